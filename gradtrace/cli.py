"""The command line: ``gradtrace demo | check | ops | bench | experiment``.

Results go to stdout, progress and errors to stderr. The exit code is 0, or 1 where a check fails,
or 2 where something is wrong with the question itself, or 130 where Ctrl-C ended it.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

import gradtrace
from gradtrace import scripts
from gradtrace.check import Check
from gradtrace.check import check as check_gradients
from gradtrace.errors import GradtraceError
from gradtrace.laboratory.results import numeric, told
from gradtrace.linear import OPENED, RULES
from gradtrace.recorder import way

WRONG, FAILED, INTERRUPTED = 1, 2, 130
PIPE_WIDTH = 160
SCRIPT = "gradtrace_script"
"""The name under which a user's script is imported, so that it hides no other module."""
STYLES = {"wrong": "bold red", "kink": "yellow", "ok": "green", "unreached": "dim"}


class Guarded(TyperGroup):
    """Errors that are meant for the user are one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (GradtraceError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            print(f"gradtrace: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(FAILED) from error


app = typer.Typer(
    cls=Guarded,
    help="See which way gradient flows through a PyTorch model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no ×
    app(prog_name="gradtrace")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gradtrace {gradtrace.__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """See which way gradient flows through a PyTorch model."""


# gradtrace demo ----------------------------------------------------------------------------------


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path(
        "gradtrace-demo.html"
    ),
    as_json: Json = False,
) -> None:
    """Let an RNN, an LSTM and a GRU compete, look at a small network, and write a report."""
    from gradtrace import demo as demonstration

    found = demonstration.demo(out, _say)
    if as_json:
        _print_json(found)
        return
    console = _console()
    _print_found({"competition": found["competition"]})
    console.print("A two-layer tanh network:")
    for name, value in demonstration.facts(found):
        console.print(f"  {name:18} {value}")
    console.print(_table(demonstration.table(found), right=range(2, 5)))
    console.print("Two branches on one embedding; of its paths, there run through")
    for name, share in found["influence"].items():
        console.print(f"  {name:18} {share:.1%}")
    console.print(f"All figures and tables, the graph and a path are in {out}", soft_wrap=True)


# gradtrace check ---------------------------------------------------------------------------------


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT.py:FUNCTION", help="A function that returns (loss_fn, model)."
        ),
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Passed to it, as strings.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="Elements to check of each parameter.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="For the sample and for dropout.")] = 0,
    tolerance: Annotated[float, typer.Option(help="The relative error allowed.")] = 1e-4,
    as_json: Json = False,
) -> None:
    """Compare gradients with differences of the loss; exit code 1 if one is wrong."""
    path, name = _target(target)
    with _script(path) as module, _progress() as progress:
        loss_fn, model = _call(_function(module, path, name), name, args or [])
        result = check_gradients(
            loss_fn, model, sample=sample, seed=seed, tolerance=tolerance, progress=progress
        )
    if as_json:
        _print_json(result.to_dict())
    else:
        _print_check(result)
    raise typer.Exit(0 if result.ok else WRONG)


def _print_check(result: Check) -> None:
    console = _console()
    console.print(_table(result.table(), right=(1, 2, 4, 5), styles=STYLES))
    console.print(result.verdict, style=STYLES["ok" if result.ok else "wrong"])


def _target(target: str) -> tuple[Path, str]:
    """``path/script.py:function``; a drive letter's colon is not the one."""
    path, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier():
        raise GradtraceError(f"{target!r} names no function; write script.py:function")
    if not Path(path).is_file():
        raise GradtraceError(f"there is no script {path!r} (in {Path.cwd()})")
    return Path(path).resolve(), name


@contextlib.contextmanager
def _script(path: Path) -> Iterator[ModuleType]:
    """A user's script, while it runs."""
    with scripts.running(path):
        try:
            yield scripts.imported(path, SCRIPT)
        finally:
            sys.modules.pop(SCRIPT, None)


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
    raise GradtraceError(f"{path.name} has no function {name!r}{_close(name, own)}")


def _call(function: Callable[..., Any], name: str, args: Sequence[str]) -> tuple[Any, Any]:
    """``(loss_fn, model)``, as the function returns them."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args)
    except TypeError as error:
        raise GradtraceError(
            f"{name}{signature} was given {len(args)} arguments after --: {error}"
        ) from error
    made = function(*args)
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise GradtraceError(f"{name} returned {type(made).__name__}; return (loss_fn, model)")
    return made[0], made[1]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal."""
    console = _console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checking", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# gradtrace ops -----------------------------------------------------------------------------------


class Op(NamedTuple):
    """How one ATen operation is handled."""

    name: str
    kind: str
    how: str


HOW = {
    "view": "moves elements; run on element numbers to see where each comes from",
    "probed": "elementwise; run on ones to see its derivative",
    "opened": "opened into smaller operations by PyTorch's decomposition",
    "dense": "no structure known: written out as a matrix, up to a size limit",
}


@app.command()
def ops(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Such as mul.Tensor.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What is known of each ATen operation that backward formulas are made of."""
    found = [op for name in names for op in _named(name)] if names else _listed()
    counts = Counter(way(func).kind for _, func in _overloads() if not func._schema.is_mutable)
    if as_json:
        _print_json({"operations": [op._asdict() for op in found], "kinds": dict(counts)})
        return
    console = _console()
    console.print(_table([Op._fields, *found]))
    if not names:
        told = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
        console.print(f"All {counts.total():,} functional ATen overloads: {told}")


def _listed() -> list[Op]:
    """The rows of our own tables."""
    exact = [Op(name, "exact", _summary(rule)) for name, rule in RULES.items()]
    return exact + [Op(name, "opened", _summary(rule)) for name, rule in OPENED.items()]


def _named(name: str) -> list[Op]:
    """All overloads of an operation, or the one that is named."""
    wanted = name.removeprefix("aten::").removeprefix("aten.").removesuffix(".default")
    every = dict(_overloads())
    found = [key for key in every if wanted in (key, key.partition(".")[0])]
    if not found:
        known = {*every, *(key.partition(".")[0] for key in every)}
        raise GradtraceError(f"there is no ATen operation {name!r}{_close(wanted, known)}")
    functional = [key for key in found if not every[key]._schema.is_mutable]
    return [_op(key, every[key]) for key in sorted(functional or found)]


def _op(name: str, func: Any) -> Op:
    found = way(func)
    ours = found.kind == "exact" or name.partition(".")[0] in OPENED
    how = _summary(found.rule) if ours else HOW.get(found.kind, "")
    return Op(name, found.kind, f"in place: {how}" if found.mutates else how)


def _overloads() -> Iterator[tuple[str, Any]]:
    """Every ATen operation as ``mul.Tensor``, with the function."""
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None) if namespace == "aten" else None
        func = getattr(packet, overload or "default", None)
        if func is not None:
            yield name, func


def _summary(rule: Callable[..., Any]) -> str:
    """The first line of a rule's docstring, or of the function that made the rule."""
    maker = rule.__qualname__.partition(".")[0]
    text = inspect.getdoc(rule) or inspect.getdoc(getattr(inspect.getmodule(rule), maker, None))
    return (text or "").partition("\n")[0]


# gradtrace bench ---------------------------------------------------------------------------------


@app.command()
def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Run this section only, and keep the others of the page; may be given again."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds, in place of each section's own.", min=1)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small cases, under a minute: to try the tool.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write a Markdown page, and beside it the same as JSON.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Draw the curves into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Time tracing beside PyTorch's own passes; takes up to 20 minutes."""
    from gradtrace.bench import page
    from gradtrace.bench.results import Setting
    from gradtrace.bench.run import SECTIONS, Places, run

    for name in only or ():
        if name not in SECTIONS:
            raise GradtraceError(f"there is no section {name!r}{_close(name, SECTIONS)}")
    found = run(only or SECTIONS, Setting(quick, rounds), Places(out, figures))
    if as_json:
        _print_json(found.data())
    else:
        print(page.markdown(found.data()))
    raise typer.Exit(WRONG if found.failed else 0)


# gradtrace experiment ----------------------------------------------------------------------------


@app.command()
def experiment(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME | FILE.py]", help="Which one; --list says what there is."),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Run all of them.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="The small form, under a minute on two cores.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(help="How many seeds.", min=1)] = None,
    workers: Annotated[int | None, typer.Option(help="How many processes.", min=1)] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder for rows, results and pages; a run that finds rows goes on."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be given again."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file to take for the embedded data.")
    ] = None,
    docs: Annotated[
        Path | None, typer.Option(help="Write Markdown, JSON and pictures here as well.")
    ] = None,
    called: Annotated[
        str | None,
        typer.Option("--name", help="What to call it, if it is on other data or settings."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Set earlier rows aside and begin anew.")
    ] = False,
    on_ray: Annotated[
        bool, typer.Option("--ray", help="Measure on a Ray cluster (extra ray).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run an experiment, or go on with one; under torchrun, many processes do one together."""
    from gradtrace.laboratory import command

    if listed:
        _print_experiments(command.listed(), as_json)
        return
    asked = command.Asked(
        quick=quick,
        seeds=seeds,
        workers=workers,
        out=out,
        settings=tuple(settings or ()),
        text=text,
        docs=docs,
        restart=restart,
        ray=on_ray,
        name=called,
    )
    try:
        done = command.run(command.sources(name, every), asked, _say)
    except KeyboardInterrupt as stop:
        _say(f"gradtrace: {stop or 'stopped'}")
        raise typer.Exit(INTERRUPTED) from stop
    if done.spoken and as_json:
        _print_json({"experiments": done.found, "failed": done.failed})
    elif done.spoken:
        _print_found(done.found)
        _console().print(f"Tables, figures and how it was run are in {done.page}", soft_wrap=True)
    raise typer.Exit(WRONG if done.failed else 0)


def _print_experiments(found: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        _print_json({"experiments": found})
        return
    rows = [(one["name"], one["question"]) for one in found]
    _console().print(_table([("name", "question"), *rows]))


def _print_found(found: dict[str, dict[str, Any]]) -> None:
    console = _console()
    for name, data in found.items():
        for table in data["tables"]:
            console.print(table["title"])
            columns = range(len(table["columns"]))
            rows = [table["columns"], *([told(cell) for cell in row] for row in table["rows"])]
            console.print(_table(rows, right=[k for k in columns if numeric(table, k)]))
        console.print(f"{name}: {data['sentence']}", soft_wrap=True)


def _say(line: str) -> None:
    """A remark, on stderr."""
    print(" ".join(line.split()), file=sys.stderr, flush=True)


# Printing ----------------------------------------------------------------------------------------


def _console(stderr: bool = False) -> Console:
    """Plain where colour is not wanted, wide where nobody's window limits it."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        width=None if stream.isatty() else PIPE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )


def _table(
    rows: Sequence[Sequence[str]], right: Iterable[int] = (), styles: dict[str, str] | None = None
) -> Table:
    """A table of text under its first row; cells found in ``styles`` are coloured."""
    table = Table(box=SIMPLE, pad_edge=False)
    numbers = set(right)
    for k, title in enumerate(rows[0]):
        table.add_column(title, justify="right" if k in numbers else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    return table


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


def _close(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?``, or what there is."""
    listed = sorted(known)
    close = get_close_matches(name, listed, n=3)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; there are {', '.join(listed[:8])}" if 0 < len(listed) <= 8 else ""
