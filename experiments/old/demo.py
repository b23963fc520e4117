"""The main job on embedded data, in one HTML file: a network in which three things were planted,
what gradtrace finds of them, and the report to look around in; then the competition, briefly.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gradtrace
from gradtrace.diagnosis import Diagnosis, Reason
from gradtrace.errors import GradtraceError
from gradtrace.experiments import demo_network as network
from gradtrace.experiments.harness.command import ExperimentOptions, run, sources
from gradtrace.experiments.harness.page import html, section
from gradtrace.experiments.harness.publishing import pictures
from gradtrace.experiments.harness.results import write
from gradtrace.experiments.harness.runner import Say
from gradtrace.traced import Trace

VIEWS = [f"views.{name}" for name in network.VIEWS]
SHORT = ("steps=80",)
"""Settings of the demo's competition: half as many steps of training as in its quick form, so that
the demo takes well below a minute.
"""

REASONS = {"cut off": Reason.DETACHED, "never chosen": Reason.NO_SAMPLES}
"""What a parameter without gradient says of what was planted."""


def demo(path: str | Path, say: Say = print) -> dict[str, Any]:
    """Look for what was planted, run the quick competition, write the report; say what was found.

    The competition's rows lie in a folder beside the report: a demo that was stopped goes on.
    """
    path = Path(path)
    if not path.name or path.is_dir():
        raise GradtraceError(f"--out {str(path)!r} is a folder: give the name of a file to write")
    first = look()
    asked = ExperimentOptions(quick=True, settings=SHORT, out=path.with_suffix(""))
    done = run(sources("competition", every=False), asked, say)
    data = done.found["competition"]
    found = first.found | {"competition": data, "report": str(path)}
    write(path, page(found, first, dict(pictures(data, asked.folder / "competition"))))
    return found


class Look(NamedTuple):
    """What was found in the network, and what can be drawn of it."""

    found: dict[str, Any]
    trace: Trace
    diagnosis: Diagnosis


def look() -> Look:
    """Train the planted network a little, and ask where its gradient goes.

    The caller's random numbers stay as they are.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(network.SEED)
        model = network.Classifier()
    generator = torch.Generator().manual_seed(network.SEED)
    untrained = through_views(model, network.draw(generator))
    network.train(model, generator)
    sample = network.draw(generator)
    with gradtrace.watch(model, diagnose=True) as watch:
        loss = network.loss_of(model, sample)
    diagnosis = watch.diagnose(loss)
    trace = watch.trace(loss)
    shares = trace.decompose(VIEWS).shares
    found = {
        "loss": float(loss.detach()),
        "planted": judged(shares, untrained, diagnosis),
        "shares": {"untrained": untrained, "trained": shares},
        "diagnosis": diagnosis.to_dict(),
        "versions": versions(),
    }
    return Look(found, trace, diagnosis)


def through_views(model: network.Classifier, sample: network.Sample) -> dict[str, float]:
    """Of the embedding's gradient, the part that comes through each view."""
    with gradtrace.watch(model) as watch:
        loss = network.loss_of(model, sample)
    return watch.trace(loss).decompose(VIEWS).shares


def judged(
    shares: dict[str, float], untrained: dict[str, float], diagnosis: Diagnosis
) -> list[dict[str, Any]]:
    """For each thing that was planted, the module that it lies in, the one that was found, and
    what was seen there. What was planted is not looked at before something was found.
    """
    best = max(shares, key=lambda name: shares[name])
    answers = {
        "answer": (
            best,
            f"{shares[best]:.0%} of the embedding's gradient comes through it "
            f"({untrained[best]:.0%} before training)",
        )
    }
    for silent in diagnosis.silent:
        for what, reason in REASONS.items():
            if silent.reason == reason:
                answers.setdefault(what, (silent.module, f"{reason}: {silent.line}"))
    rows = []
    for what, module in network.PLANTED.items():
        found, evidence = answers.get(what, ("", "nothing was found"))
        right = found == module or found.startswith(f"{module}.")
        rows.append(
            {"what": what, "planted": module, "found": found, "right": right, "seen": evidence}
        )
    return rows


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "gradtrace": gradtrace.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


QUESTIONS = {
    "answer": "Which of four equal views of the text lets the network solve its task?",
    "cut off": "Which module never learns, as a detach cuts it off?",
    "never chosen": "Which expert never gets a sample?",
}


def table(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """What was planted and what was found, as text under a header."""
    header = ("question", "planted", "found", "seen")
    return [
        header,
        *(
            (QUESTIONS[row["what"]], row["planted"], row["found"] or "not found", row["seen"])
            for row in found["planted"]
        ),
    ]


def verdict(found: dict[str, Any]) -> str:
    """How many were found."""
    right = sum(row["right"] for row in found["planted"])
    return f"gradtrace found {right} of the {len(found['planted'])} things that were planted."


# The page ----------------------------------------------------------------------------------------

CODE = """import gradtrace as gt

with gt.watch(model, diagnose=True) as watch:
    loss = loss_function(model(x), y)

print(watch.diagnose(loss))         # what does not learn, and why, with the line of code
trace = watch.trace(loss)
trace.decompose(["left", "right"])  # how much of the gradient comes through each, exactly
trace.choices()                     # where paths divide, and how
trace.path("layer.weight", (0, 0))  # the way of a single element
trace.report("mine.html")           # all of it, to look at in a browser"""

ABOUT = """A text has twelve words, and one of them tells its class. Four equal modules,
<code>views.first</code> to <code>views.last</code>, see three words each; their outputs and that of
<code>memory</code>, which sees the mean of all words, are added up, and a router hands the sum to
one of three experts. It was trained for {steps} steps. Three things were planted in it, so the
answers are known."""


def page(found: dict[str, Any], first: Look, pictures: dict[str, bytes]) -> str:
    """One file that needs no other: what was planted and found, the report, what to do next."""
    head, *rows = table(found)
    body = "".join(_row("td", cells, head) for cells in rows)
    told = escape(", ".join(f"{name} {value}" for name, value in found["versions"].items()))
    return html(
        [
            "<h1>Three things were planted in this network. Are they found?</h1>",
            f'<p class="found">{escape(verdict(found))}</p>',
            f"<p>{ABOUT.format(steps=network.STEPS)}</p>",
            _wide(f'<table class="answers">{_row("th", head, head)}{body}</table>'),
            "<h2>The report of this network</h2>",
            "<p>Its modules, its graph, where paths have a choice, and the path of every parameter "
            "element (Paths: pick a cell of the heat map). <code>trace.report</code> writes it as "
            "a file of its own.</p>",
            first.trace._repr_html_(),
            "<h2>The diagnosis</h2>",
            "<p>This is what <code>print(watch.diagnose(loss))</code> says:</p>",
            _wide(f"<pre>{escape(str(first.diagnosis))}</pre>"),
            "<h2>Your own model</h2>",
            _wide(f"<pre>{escape(CODE)}</pre>"),
            "<h1>An RNN, an LSTM and a GRU in competition</h1>",
            "<p>A question without a known answer: does influence predict which of three "
            "components a network needs? This is the short form of an experiment, which shows how "
            "one is run; it is too small to tell. What the full one found is in "
            "<code>docs/experiments</code>.</p>",
            section(found["competition"], pictures, folded=True),
            f'<p class="note">{told}</p>',
        ],
        "gradtrace demo",
    )


def _wide(content: str) -> str:
    return f'<div class="wide" tabindex="0">{content}</div>'


def _row(tag: str, cells: Iterable[str], columns: Iterable[str]) -> str:
    """A row; cells know their column, which a narrow page shows before each."""
    made = (
        f'<{tag} data-of="{escape(column)}">{escape(cell)}</{tag}>'
        for cell, column in zip(cells, columns)
    )
    return f"<tr>{''.join(made)}</tr>"
