"""``gradtrace trace``: traces the gradient of a script's loss."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.influence import By, Of, Rule, Sample, Seed, components
from gradtrace.cli.output import Json, Top, progress, records, write, write_json, write_table
from gradtrace.cli.script import Arguments, loaded, script_function
from gradtrace.errors import GradtraceError, UnknownName, not_one_of

if TYPE_CHECKING:
    from gradtrace.paths.paths import Path as GradientPath
    from gradtrace.table import Table
    from gradtrace.traced import Trace

MEASURES = ("decompose", "mass", "coverage", "norms")

LossFunction = Annotated[
    str,
    script_function(
        "A function that returns a loss, a model and a loss, or (model, loss_fn); with the model, "
        "modules have the names that it has for them."
    ),
]
Elements = Annotated[
    list[str] | None,
    Option(
        metavar="NAME[INDEX]",
        help="Show the path of an element, as 'embed.weight[23,3]'; without an index the largest "
        "path from any element. May be given again.",
    ),
]
Measures = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help="Measure more. decompose: the gradient through each component, exactly and with its "
        "sign; mass: the share of all paths by |weight|; coverage: what part of its gradient a "
        "path carries; norms: the gradient by module. May be given again.",
    ),
]


@app.command(
    epilog=examples(
        "gradtrace trace train.py:loss --report loss.html",
        "gradtrace trace train.py:loss --by 'encoder.*' --top 5",
        "gradtrace trace train.py:loss --path 'embed.weight[23,3]' --json -- tiny 3",
        "gradtrace trace train.py:loss --by lstm --by gru --measure decompose",
        "where train.py has: def loss(size='base', layers='2'): ... return model(batch).loss",
    )
)
def trace(
    target: LossFunction,
    args: Arguments = None,
    by: By = None,
    of: Of = None,
    rule: Rule = "greedy",
    sample: Sample = None,
    seed: Seed = 0,
    path: Elements = None,
    measure: Measures = None,
    top: Top = 20,
    save: Annotated[Path | None, Option(help="Save the trace, for gradtrace.load.")] = None,
    report: Annotated[Path | None, Option(help="Write a report, one HTML file.")] = None,
    as_json: Json = False,
) -> None:
    """Trace the gradient of a loss: through which parts of the model does it come?"""
    from gradtrace.cli.returned import watched

    chosen, elements = components(by), [element(text) for text in path or ()]
    for name in measure or ():
        if name not in MEASURES:
            raise UnknownName(not_one_of("--measure", name, MEASURES))
    with loaded(target, args, save, report) as (call, known):
        kept = bool(save or report)  # what is wrong stands first there
        loss, watch, _ = watched(call, target, known, diagnose=kept)
        progress("tracing")
        found = watch.trace(loss, rule=rule)
        tables = {
            "influence": found.influence(chosen, of=of or None, sample=sample or "auto", seed=seed)
        }
        for name in measure or ():
            progress(f"measuring {name}")
            asked = (chosen,) if name in ("decompose", "mass") else ()
            tables[name] = getattr(found, name)(*asked)
        paths = [_path(found, *each) for each in elements]
        for write_file, file in ((found.save, save), (found.report, report)):
            if file is not None:
                progress(f"writing {file}")
                write_file(file)
    if as_json:
        write_json(_data(found, tables, paths))
        return
    write(found)
    for table in tables.values():
        write_table(table, top)
    for each in paths:
        write(each)


def element(text: str) -> tuple[str, tuple[int, ...] | None]:
    """Parse ``weight[23,3]`` or ``weight``: the name of a leaf, and an index.

    >>> element("embed.weight[23,3]"), element("bias")
    (('embed.weight', (23, 3)), ('bias', None))
    """
    found = re.fullmatch(r"([^\[\]]+)(\[[-\d\s,]*\])?", text)
    if not found:
        raise GradtraceError(f"--path {text!r}: write NAME or NAME[INDEX], as weight[23,3]")
    name, index = found.groups()
    return name, tuple(map(int, re.findall(r"-?\d+", index))) if index else None


def _path(traced: Trace, name: str, index: tuple[int, ...] | None) -> GradientPath:
    """The path of an element; without an index, the largest from any element of the leaf."""
    if index is not None:
        return traced.path(name, index)
    best = traced.paths(name, k=1)
    if not best:
        raise GradtraceError(f"{name} has no path: every contribution to it is 0")
    return best[0]


def _data(traced: Trace, tables: Mapping[str, Table], paths: list[GradientPath]) -> dict[str, Any]:
    """All that was found, for ``--json``."""
    found: dict[str, Any] = {name: records(table) for name, table in tables.items()}
    found["parameters"] = {name: list(each.shape) for name, each in traced.gradients.items()}
    found["paths"] = [
        {
            "leaf": path.name,
            "element": list(path.index),
            "weight": path.weight,
            "gradient": path.gradient,
            "steps": records(path.table())["rows"],
        }
        for path in paths
    ]
    return {"loss": traced.loss, "rule": traced.rule, **found}
