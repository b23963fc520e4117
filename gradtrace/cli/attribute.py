"""``gradtrace attribute``: which parts of the inputs move a scalar, and by which way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.influence import Top
from gradtrace.cli.measures import data, write_measure
from gradtrace.cli.printing import Json, working, write, write_json
from gradtrace.cli.target import Arguments, Target, script_function
from gradtrace.cli.trace import watched_call

RETURNS = (
    'return {"scalar": logit, "inputs": {"tokens": embeddings}}, with "tokens": {"tokens": words} '
    "if positions have names; alone, with the model, or as (model, function)"
)

ScalarFunction = Annotated[
    str,
    script_function(
        "A function that returns {'scalar': logit, 'inputs': {'tokens': embeddings}}, and words "
        "for positions as 'tokens'; alone, with the model, or as (model, function)."
    ),
]
AttributionRule = Annotated[
    Literal["gradient", "frozen", "attnlrp"],
    Option(
        help="gradient × input; the same with attention patterns and denominators of norms "
        "constant (frozen); or relevance by the rules of AttnLRP."
    ),
]
By = Annotated[
    str | None,
    Option(metavar="KIND", help="Scores by heads, layers, modules, ... instead of positions."),
]
GraphFile = Annotated[Path | None, Option(help="Write the attribution graph, a JSON file.")]
GraphFormat = Annotated[
    Literal["gradtrace", "circuit-tracer", "model-explorer", "model-explorer-data", "mib"],
    Option("--format", help="Whose JSON the graph is written in."),
]


@app.command(
    epilog=examples(
        "gradtrace attribute model.py:logit",
        "gradtrace attribute model.py:logit --rule attnlrp --by heads --json -- tiny 3",
        "gradtrace attribute model.py:logit --graph circuit.json --format circuit-tracer",
        "where model.py has: def logit(): ... return model, {'scalar': logits[0, -1, 5], 'inputs': "
        "{'tokens': embeddings}}",
    )
)
def attribute(
    target: ScalarFunction,
    args: Arguments = None,
    rule: AttributionRule = "gradient",
    by: By = None,
    graph: GraphFile = None,
    graph_format: GraphFormat = "gradtrace",
    top: Top = None,
    as_json: Json = False,
) -> None:
    """Which tokens or other parts of the inputs move a logit, a difference of logits or a loss, and
    through which heads and modules?
    """
    from gradtrace.pytorch.global_switches import uncompiled

    wanted = Target.of(target, args, graph)
    with working(f"running {wanted.name}") as work, uncompiled(), wanted.running() as script:
        given, watched = watched_call(
            lambda: wanted.call(script),
            wanted.name,
            vars(script),
            _given,
            RETURNS,
            whole=lambda given: given["scalar"],
        )
        work.begin("attributing")
        tokens = given.get("tokens")
        found = watched.attribute(given["scalar"], given["inputs"], rule=rule, tokens=tokens)
        table = found.table() if by is None else found.by(by)
        if graph is not None:
            work.begin(f"writing {graph}")
            found.graph(qkv=graph_format == "mib").export(graph, format=graph_format)
    if as_json:
        sums = {"value": found.value, "total": found.total, "defect": found.defect}
        more = {"rule": rule, "graph": graph and str(graph)}
        write_json({**more, **sums, "attribution": data(table, top)})
        return
    write_measure(table, top)
    if graph is not None:
        write(f"The graph is in {graph}")


def _given(value: Any) -> Any:
    """The scalar and its inputs, or None if it is something else."""
    known = {"scalar", "inputs"}
    right = isinstance(value, Mapping) and known <= set(value) <= {*known, "tokens"}
    return value if right else None
