"""``python -m experiments`` lists the experiments, ``python -m experiments NAME`` runs one, and
``python -m experiments all --form quick`` all of them, with one HTML page.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from base64 import b64encode
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from experiments import lab
from gradtrace.errors import GradtraceError, did_you_mean
from gradtrace.files import made_folder, write_text

SHARED = {"data", "lab", "nets"}
NAMES = sorted({path.stem for path in Path(__file__).parent.glob("[a-z]*.py")} - SHARED)

HEAD = """<!doctype html><meta charset="utf-8"><title>Experiments</title><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;display:block;overflow-x:auto}
td,th{padding:.2em .8em;border-bottom:1px solid #ccc;text-align:left}
img{max-width:100%}</style>
"""


def run(name: str, form: str, out: Path, workers: int) -> str:
    """Measure what is missing, and write the page of an experiment: tables and a figure."""
    experiment: Any = import_module(f"experiments.{name}")
    folder, settings = made_folder(out), experiment.SETTINGS[form]
    rows_file = folder / f"{name}.{form}.jsonl"
    alone = 1 if getattr(experiment, "ALONE", False) else workers
    rows = lab.measured(rows_file, name, experiment.cells(settings), alone)
    experiment.figure(rows, folder / f"{name}.png")
    tables = "\n".join(map(lab.markdown, experiment.tables(rows)))
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    how = f"{form}: {settings}; {versions}, {platform.machine()}"
    page = f"# {name}\n\n{experiment.__doc__}\n## Found\n\n![]({name}.png)\n\n{tables}\n{how}\n"
    write_text(folder / f"{name}.md", page)
    return tables


def run_all(form: str, out: Path, workers: int) -> str:
    """Run all experiments, and write their pages as one HTML file with the figures inside."""
    from markdown_it import MarkdownIt  # rich brings it

    for name in NAMES:
        run(name, form, out, workers)
    texts = [(out / f"{name}.md").read_text(encoding="utf-8") for name in NAMES]
    body = MarkdownIt("commonmark").enable("table").render("\n\n".join(texts))
    for name in NAMES:
        data = b64encode((out / f"{name}.png").read_bytes()).decode()
        body = body.replace(f'src="{name}.png"', f'src="data:image/png;base64,{data}"')
    write_text(out / "experiments.html", f"{HEAD}{body}")
    return f"written: {out / 'experiments.html'}"


def main(words: list[str] | None = None) -> int:
    """Run the command; its exit code: 0, 2 for a bad question, 130 for Ctrl-C."""
    options = argparse.ArgumentParser("python -m experiments", description=__doc__)
    options.add_argument("name", nargs="?", help=", ".join([*NAMES, "all"]))
    options.add_argument("--form", choices=["full", "quick", "small"], default="full")
    options.add_argument("--out", type=Path, default=Path("out/experiments"))
    options.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = options.parse_args(words)
    try:
        if given.name is None:
            for name in NAMES:
                question = (import_module(f"experiments.{name}").__doc__ or "").splitlines()[0]
                print(f"{name:<16}{question}")
        elif given.name == "all":
            print(run_all(given.form, given.out, given.workers))
        elif given.name not in NAMES:
            raise GradtraceError(f"no experiment {given.name!r}{did_you_mean(given.name, NAMES)}")
        else:
            print(run(given.name, given.form, given.out, given.workers))
    except GradtraceError as error:
        print(f"experiments: {error}; rows that were measured are kept", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("experiments: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
