"""``gradtrace trace``: traces the gradient of a script's loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.influence import (
    Components,
    Granularity,
    Of,
    Rule,
    Sample,
    Seed,
    Top,
    Weight,
    parsed,
    rows,
    write_influence,
)
from gradtrace.cli.measures import (
    Measured,
    Power,
    Question,
    checked,
    data,
    measured,
    write_measure,
)
from gradtrace.cli.printing import Json, as_text, working, write, write_json, write_table
from gradtrace.cli.target import (
    Arguments,
    Target,
    kind_of,
    script_function,
    without_optimizers,
)
from gradtrace.errors import GradtraceError, TooLarge

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradtrace.io.table import TextTable
    from gradtrace.paths.paths import Path as GradientPath
    from gradtrace.runs.influence import Influence
    from gradtrace.traced import Trace
    from gradtrace.tracing.choices import Choices
    from gradtrace.watch import watch

SHOWN_FORKS = 5
RETURNS = "return a loss, a model and its loss, or (model, loss_fn)"

LossFunction = Annotated[
    str,
    script_function(
        "A function that returns a loss, a model and a loss, or (model, loss_fn), in any order; "
        "with the model, modules have the names that it has for them."
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
SavedTrace = Annotated[
    Path | None, Option(help="Save the trace, to read it with gradtrace report.")
]
ReportPage = Annotated[Path | None, Option(help="Write a report, one HTML file.")]


@app.command(
    epilog=examples(
        "gradtrace trace train.py:loss --report loss.html",
        "gradtrace trace train.py:loss --components 'encoder.*' --weight gradient --top 5",
        "gradtrace trace train.py:loss --path 'embed.weight[23,3]' --json -- tiny 3",
        "gradtrace trace train.py:loss --components lstm --components gru --measure decompose",
        "gradtrace trace train.py:loss --granularity operator --out before.gradtrace",
        "where train.py has: def loss(size='base', layers='2'): ... return model(batch).loss",
    )
)
def trace(
    target: LossFunction,
    args: Arguments = None,
    rule: Rule = "greedy",
    granularity: Granularity = "scalar",
    components: Components = None,
    weight: Weight = "count",
    of: Of = None,
    sample: Sample = None,
    seed: Seed = 0,
    top: Top = None,
    path: Elements = None,
    measure: Measured = None,
    power: Power = 1.0,
    out: SavedTrace = None,
    report: ReportPage = None,
    as_json: Json = False,
) -> None:
    """Trace the gradient of a loss: through which modules do its paths run, how do they divide, and
    how much of the gradient do they explain?
    """
    from gradtrace.pytorch.global_switches import uncompiled

    chosen, elements = parsed(components or []), [element(text) for text in path or ()]
    more = checked(measure or ())
    wanted = Target.of(target, args, out, report)
    with working(f"running {wanted.name}") as work, uncompiled(), wanted.running() as script:
        kept = out is not None or report is not None  # what is wrong stands first there
        loss, watched = watched_loss(lambda: wanted.call(script), wanted.name, vars(script), kept)
        work.begin("tracing")
        traced = watched.trace(loss, rule=rule, granularity=granularity)
        paths = [_path(traced, *each) for each in elements]  # first: a typo is reported early
        work.begin("measuring influence")
        table = traced.influence(chosen, weight, of=of or None, sample=sample, seed=seed)
        divided = _divided(traced, of, sample, seed)
        flow = " ".join(traced.norms().notes)
        tables = measured(traced, more, Question(chosen, of or None, power), work.begin)
        _write_files(traced, out, report, work.begin)
    if as_json:
        files = {"out": out and str(out), "report": report and str(report)}
        more_data = {"measures": {name: data(each, top) for name, each in tables.items()}}
        write_json(_data(traced, loss, table, divided, top, flow, paths) | more_data | files)
        return
    write(_summary(traced, loss))
    write_influence(table, top)
    write(f"Flow: {flow}")
    forks = [divided.top(SHOWN_FORKS)] if divided.rows and "choices" not in tables else []
    _write_tables([*forks, *paths], tables, top)
    _name_files(out, report)


def _write_tables(
    first: Iterable[Choices | GradientPath], measures: Mapping[str, TextTable], top: int | None
) -> None:
    for each in first:
        write_table(as_text(each))
    for table in measures.values():
        write_measure(table, top)


def _name_files(out: Path | None, report: Path | None) -> None:
    for what, file in (("trace", out), ("report", report)):
        if file is not None:
            write(f"The {what} is in {file}")


def _write_files(
    traced: Trace, out: Path | None, report: Path | None, begin: Callable[[str], None]
) -> None:
    from gradtrace.io.atomic_files import make_folder

    for verb, make, file in (("saving", traced.save, out), ("writing", traced.report, report)):
        if file is not None:
            begin(f"{verb} {file}")
            make_folder(file.parent)
            make(file)


def _divided(traced: Trace, of: list[str] | None, sample: int | None, seed: int) -> Choices:
    """How paths divide at forks; none if that is too large to find."""
    from gradtrace.tracing.choices import Choices

    try:
        return traced.choices(of=of or None, sample=sample, seed=seed)
    except TooLarge:
        return Choices(())


def element(text: str) -> tuple[str, tuple[int, ...] | None]:
    """Parse ``weight[23,3]``, ``weight[23][3]`` or ``weight``: the name of a leaf, and an index."""
    found = re.fullmatch(r"(.*?)((?:\[[-\d\s,]*\])*)", text, flags=re.DOTALL)
    name, index = found.groups() if found else ("", "")
    if not name or name.endswith("]") or not re.fullmatch(r"[^\[\]]*", name):
        raise GradtraceError(f"--path {text!r}: write NAME or NAME[INDEX], as weight[23,3]")
    numbers = tuple(int(number) for number in re.findall(r"-?\d+", index))
    return name, numbers if index else None


# The function's return value ---------------------------------------------------------------------


def watched_loss(
    call: Callable[[], Any],
    name: str,
    known: Mapping[str, Any],
    diagnose: bool = False,
    numbers: bool = False,
) -> tuple[Any, watch]:
    """Call the function while watching all modules: the loss, and the watch that saw it.

    With ``numbers`` the loss may be a float: all that is asked is what is wrong with it.
    """

    def read(value: Any) -> Any:
        return value if numbers and isinstance(value, float) else _loss(value)

    return watched_call(call, name, known, read, RETURNS, diagnose=diagnose)


def watched_call(
    call: Callable[[], Any],
    name: str,
    known: Mapping[str, Any],
    read: Callable[[Any], Any],
    returns: str,
    *,
    whole: Callable[[Any], Any] = lambda loss: loss,
    diagnose: bool = False,
) -> tuple[Any, watch]:
    """Call a function while watching all modules: what ``read`` finds in the value that it returns
    (None: nothing), and the watch. ``whole`` makes one loss of it, ``returns`` is what to return.
    """
    from gradtrace.tools.discovery import Discovery
    from gradtrace.training.gradcheck import takes_model
    from gradtrace.watch import watch

    with Discovery(diagnose=diagnose) as discovery:
        _, returned = without_optimizers(call())  # which only diagnose looks at
    model, rest = _parted(returned, name, read, returns)
    if (found := read(rest)) is not None:
        discovery.resolve_names(whole(found), model, known)
        return found, discovery
    if model is None or not callable(rest):
        raise GradtraceError(f"{name} returned {kind_of(returned)}; {returns}")
    with watch(model, diagnose=diagnose) as watched:
        later = rest(model) if takes_model(rest) else rest()
    if (found := read(later)) is None:
        raise GradtraceError(
            f"the loss_fn that {name} returned gave {kind_of(later)}, not a loss; {returns}"
        )
    return found, watched


def _parted(
    returned: Any, name: str, read: Callable[[Any], Any], returns: str
) -> tuple[nn.Module | None, Any]:
    """Split a return value into the model, if there is one, and the rest."""
    from torch import nn

    if not isinstance(returned, (tuple, list)) or read(returned) is not None:
        return None, returned
    models = [part for part in returned if isinstance(part, nn.Module)]
    rest = [part for part in returned if not isinstance(part, nn.Module)]
    if len(models) != 1 or len(rest) != 1:
        raise GradtraceError(f"{name} returned {kind_of(returned)}; {returns}")
    return models[0], rest[0]


def _loss(value: Any) -> Tensor | None:
    """The tensor itself, or the ``loss`` of an output or a dict."""
    from torch import Tensor, nn

    if isinstance(value, Mapping) and "loss" in value:
        value = value["loss"]
    elif not isinstance(value, (Tensor, nn.Module)):
        value = getattr(value, "loss", value)
    return value if isinstance(value, Tensor) else None


# Results -----------------------------------------------------------------------------------------


def _path(traced: Trace, name: str, index: tuple[int, ...] | None) -> GradientPath:
    """The path of an element; without an index, the largest from any element of the leaf."""
    if index is not None or traced.granularity == "operator":
        return traced.path(name, index or ())
    best = traced.paths(name, k=1)
    if not best:
        raise GradtraceError(f"{name} has no path: every contribution to it is 0")
    return best[0]


def _summary(traced: Trace, loss: Tensor) -> str:
    """``Loss 3.912: 57 operators, 10 leaves of 2,458 elements``."""
    leaves = traced.program.leaves
    heading = f"Mean of {traced.pairs:,} losses" if traced.pairs > 1 else "Loss"
    return (
        f"{heading} {float(loss.detach().double().mean()):.4g}: {len(traced.program.blocks):,} "
        f"operators, {len(leaves):,} leaves of {sum(x.tensor.numel() for x in leaves):,} elements"
    )


def _data(
    traced: Trace,
    loss: Tensor,
    table: Influence,
    divided: Choices,
    top: int | None,
    flow: str,
    paths: list[GradientPath],
) -> dict[str, Any]:
    return {
        "loss": loss.detach().double().reshape(-1).tolist(),
        "rule": traced.rule,
        "granularity": traced.granularity,
        "operators": len(traced.program.blocks),
        "leaves": {traced.names[x.value]: list(x.tensor.shape) for x in traced.program.leaves},
        "weight": table.weight,
        "influence": rows(table, top),
        "choices": divided.shares,
        "flow": flow,
        "paths": [
            {
                "leaf": path.name,
                "element": list(path.index),
                "weight": path.weight,
                "gradient": path.gradient,
                "steps": as_text(path).to_dicts(),
            }
            for path in paths
        ],
        "notes": list(table.notes),
    }
