"""``gradtrace experiment``: runs the experiments that test the claims of the sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gradtrace.cli.app import app, examples
from gradtrace.cli.codes import FAILED
from gradtrace.cli.printing import Json, console, say, table, write, write_json


def names(incomplete: str) -> list[str]:
    """Shell completion."""
    from gradtrace.experiments.harness.table import available

    return [name for name in available() if name.startswith(incomplete)]


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
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME | FILE.py]",
            help="Which one; --list says what there is.",
            autocompletion=names,
        ),
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
    from gradtrace.experiments.harness import command

    if listed:
        _write_list(command.listed(), as_json)
        return
    asked = command.ExperimentOptions(
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
    done = command.run(command.sources(name, every), asked, say)
    if done.spoken and as_json:
        write_json({"experiments": done.found, "failed": done.failed})
    elif done.spoken:
        write_found(done.found)
        write(f"Tables, figures and how it was run are in {done.page}")
    raise typer.Exit(FAILED if done.failed else 0)


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
