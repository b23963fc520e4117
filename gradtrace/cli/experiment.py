"""``gradtrace experiment``: runs the experiments that test the claims of the sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.codes import FAILED
from gradtrace.cli.printing import Json, console, say, table, write, write_json


def names(incomplete: str) -> list[str]:
    """Shell completion."""
    from gradtrace.experiments.harness.table import available

    return [name for name in available() if name.startswith(incomplete)]


Name = Annotated[
    str | None,
    Argument(
        metavar="[NAME | FILE.py]",
        help="Which one; --list says what there is.",
        autocompletion=names,
    ),
]
Quick = Annotated[bool, Option("--quick", help="The small form, under a minute on two cores.")]
Out = Annotated[
    Path | None,
    Option(help="The folder for rows, results and pages; a run that finds rows goes on."),
]
Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Change a setting; may be given again."),
]
Text = Annotated[Path | None, Option(help="A text file to take for the embedded data.")]
Docs = Annotated[Path | None, Option(help="Write Markdown, JSON, rows and pictures here, too.")]
Title = Annotated[
    str | None, Option("--name", help="What to call it, if it is on other data or settings.")
]
Restart = Annotated[bool, Option("--restart", help="Set earlier rows aside and begin anew.")]
Rows = Annotated[
    list[Path] | None,
    Option(
        "--rows",
        help="Measure nothing: make tables and figures of published rows; rows of a file that is "
        "given later take the place of those of the same cell.",
    ),
]
OnRay = Annotated[
    bool, Option("--ray", help="Measure on a Ray cluster (which needs the package ray).")
]


@app.command(
    epilog=examples(
        "gradtrace experiment --list",
        "gradtrace experiment first-token --quick",
        "gradtrace experiment competition --seeds 5 --set steps=300 --workers 4",
        "gradtrace experiment mine.py --out results",
        "torchrun --nproc-per-node 4 -m gradtrace experiment treebank-scale --text ptb.train.txt",
    )
)
def experiment(
    name: Name = None,
    listed: Annotated[bool, Option("--list", help="List the experiments.")] = False,
    every: Annotated[bool, Option("--all", help="Run all of them.")] = False,
    quick: Quick = False,
    seeds: Annotated[int | None, Option(help="How many seeds.", min=1)] = None,
    workers: Annotated[int | None, Option(help="How many processes.", min=1)] = None,
    out: Out = None,
    settings: Settings = None,
    text: Text = None,
    docs: Docs = None,
    called: Title = None,
    restart: Restart = False,
    rows: Rows = None,
    on_ray: OnRay = False,
    as_json: Json = False,
) -> None:
    """Run an experiment, or go on with one; under torchrun, many processes do one together."""
    from gradtrace.experiments.harness import command

    if listed:
        _write_list(command.listed(), as_json)
        return
    asked = command.ExperimentOptions(
        *(quick, seeds, workers, out, tuple(settings or ()), text, docs, restart, on_ray, called),
        rows=tuple(rows or ()),
    )
    done = command.run(command.sources(name, every, asked.rows), asked, say)
    if done.spoken and as_json:
        write_json({"experiments": done.found, "failed": done.failed})
    elif done.spoken:
        write_found(done.found)
        write(f"Tables, figures and how it was run are in {done.page}")
    raise Exit(FAILED if done.failed else 0)


def _write_list(found: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        write_json({"experiments": found})
        return
    rows = [(one["name"], one["question"]) for one in found]
    console().print(table([("name", "question"), *rows]))


def write_found(found: dict[str, dict[str, Any]]) -> None:
    """Print the tables and the sentence of each experiment."""
    from gradtrace.experiments.harness.results import numeric, told

    out = console()
    for name, data in found.items():
        for each in data["tables"]:
            out.print(each["title"])
            columns = range(len(each["columns"]))
            rows = [each["columns"], *([told(cell) for cell in row] for row in each["rows"])]
            out.print(table(rows, right=[k for k in columns if numeric(each, k)]))
        out.print(f"{name}: {data['sentence']}", soft_wrap=True)
