"""The main job on embedded data, in one HTML file: an RNN, an LSTM and a GRU in competition, in a
minute; then a first look at a graph, its gradient, a path and influence.
"""

from __future__ import annotations

import platform
from collections import OrderedDict
from collections.abc import Iterable
from html import escape
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace
from gradtrace.experiments.harness.command import ExperimentOptions, run, sources
from gradtrace.experiments.harness.page import html, section
from gradtrace.experiments.harness.publishing import pictures
from gradtrace.experiments.harness.results import write
from gradtrace.experiments.harness.runner import Say
from gradtrace.graphs.graph import Graph
from gradtrace.trace import Trace
from gradtrace.tracing.influence import Influence
from gradtrace.tracing.paths import Path as GradientPath

SEED = 0


def network() -> tuple[nn.Sequential, Tensor, Tensor]:
    """``y = W₂ tanh(W₁ x + b₁) + b₂`` with a batch for it; the caller's random numbers stay."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        layers = OrderedDict(hidden=nn.Linear(3, 4), squash=nn.Tanh(), output=nn.Linear(4, 2))
        return nn.Sequential(layers), torch.randn(5, 3), torch.randn(5, 2)


class Branches(nn.Module):
    """Two branches and a way past them, all on one embedding, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.left = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.output = nn.Linear(6, 4)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of four classes for each sample."""
        x = self.embed(words).mean(1)
        scores: Tensor = self.output(x + self.left(x) + self.right(x))
        return scores


def traced() -> Trace:
    """The branches, traced on sixteen samples, each a pair of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        model, words = Branches(), torch.randint(0, 12, (16, 3))
        classes = torch.randint(0, 4, (16,))
    with gradtrace.watch(model) as watch:
        loss = F.cross_entropy(model(words), classes, reduction="none")
    return watch.trace(loss)


def demo(path: str | Path, say: Say = print) -> dict[str, Any]:
    """Run the quick competition and the first look, write the report; say what was found.

    The competition's rows lie in a folder beside the report: a demo that was stopped goes on.
    """
    path = Path(path)
    first = look()
    asked = ExperimentOptions(quick=True, out=path.with_suffix(""))
    done = run(sources("competition", every=False), asked, say)
    data = done.found["competition"]
    found = first.found | {"competition": data, "report": str(path)}
    write(path, page(found, first, dict(pictures(data, asked.folder / "competition"))))
    return found


class Look(NamedTuple):
    """What was found of the small networks, and what can be drawn of it."""

    found: dict[str, Any]
    graph: Graph
    trace: Trace
    branches: Influence
    best: GradientPath


def look() -> Look:
    """Trace the small networks, and compare the gradient with PyTorch's.

    ``scalar_vertices`` is |V'|, ``scalar_edges`` |E'|: the graph of single numbers that the
    operators stand for.
    """
    model, x, y = network()
    with gradtrace.watch(model) as watch:
        loss = F.mse_loss(model(x), y)
    graph = watch.graph(loss)
    trace = traced()
    branches = trace.influence(["left", "right", "output"])
    best = trace.paths("embed.weight", k=1)[0]
    found = {
        "loss": float(loss.detach()),
        "operators": len(graph),
        "edges": sum(edge.producer is not None for edge in graph.edges),
        "scalar_vertices": graph.scalar_vertices,
        "scalar_edges": graph.scalar_edges,
        "gradients": compare(model, loss, watch.backward(loss)),
        "influence": branches.shares,
        "path": {"weight": best.weight, "gradient": best.gradient, "modules": best.modules},
        "flow": trace.flow().verdict,
        "versions": versions(),
    }
    return Look(found, graph, trace, branches, best)


def compare(model: nn.Module, loss: Tensor, ours: dict[str, Tensor]) -> list[dict[str, Any]]:
    """For each parameter, the size of both gradients and the largest difference of an element."""
    names, parameters = zip(*model.named_parameters())
    theirs = torch.autograd.grad(loss, parameters, retain_graph=True)
    return [
        {
            "parameter": name,
            "shape": list(other.shape),
            "ours": float(ours[name].norm()),
            "pytorch": float(other.norm()),
            "difference": float((ours[name] - other).norm(inf)),
        }
        for name, other in zip(names, theirs)
    ]


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "gradtrace": gradtrace.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The counts, in words."""
    return [
        ("operators", f"{found['operators']:,}"),
        ("edges", f"{found['edges']:,}"),
        ("scalars |V'|", f"{found['scalar_vertices']:,}"),
        ("scalar edges |E'|", f"{found['scalar_edges']:,}"),
        ("loss", f"{found['loss']:.6f}"),
    ]


def table(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """The gradients as text under a header."""
    header = ("parameter", "shape", "|gradient|", "PyTorch's", "largest difference")
    return [
        header,
        *(
            (
                row["parameter"],
                "×".join(map(str, row["shape"])),
                f"{row['ours']:.6f}",
                f"{row['pytorch']:.6f}",
                f"{row['difference']:.2g}",
            )
            for row in found["gradients"]
        ),
    ]


# The page ----------------------------------------------------------------------------------------

CODE = """import gradtrace as gt

with gt.watch(model) as watch:
    loss = loss_function(model(x), y)

trace = watch.trace(loss)           # paths and influence
trace.influence()                   # which modules the paths run through
trace.path("layer.weight", (0, 0))  # one of them; .paths(sample=1000) for many
trace.report("mine.html")           # all of it, to look at in a browser
watch.graph(loss)                   # operators, edges, sizes; .draw("graph.svg")
watch.backward(loss)                # {name: gradient}; .grad stays as it is"""


def page(found: dict[str, Any], first: Look, pictures: dict[str, bytes]) -> str:
    """One file that needs no other: what was found, pictures, numbers, what to do next."""
    head, *rows = table(found)
    body = "".join(_row("td", cells) for cells in rows)
    counts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts(found))
    told = escape(", ".join(f"{name} {value}" for name, value in found["versions"].items()))
    return html(
        [
            "<h1>Three networks in competition: does influence tell which one is needed?</h1>",
            section(found["competition"], pictures),
            "<h1>A first look: a two-layer tanh network, traced</h1>",
            "<p>Gradient flows from the loss at the top down to the parameters, along the edges of "
            "this graph.</p>",
            f"<dl>{counts}</dl>",
            "<h2>The gradient, beside PyTorch's</h2>",
            _wide(f"<table>{_row('th', head)}{body}</table>"),
            "<h2>The graph</h2>",
            _wide(first.graph.draw()),
            "<h2>Which way it came</h2>",
            "<p>A second network: a tanh branch, a ReLU branch and a way past both, on one "
            "embedding. Of the embedding's entries that get any gradient, this share have their "
            "path through each branch:</p>",
            _wide(first.branches._repr_html_()),
            "<p>The largest path of the embedding in the first sample, from the parameter to the "
            "loss:</p>",
            _wide(first.best._repr_html_()),
            f"<p>{escape(found['flow'])}</p>",
            "<p>All of this network to look at: its modules, its graph, and the path of every "
            "parameter element (Paths: pick a cell of the heat map). <code>trace.report</code> "
            "writes it as a file of its own.</p>",
            first.trace._repr_html_(),
            "<h2>How to go on</h2>",
            "<p>Do the same with a model of your own: run its forward pass inside "
            "<code>watch</code> and ask.</p>",
            _wide(f"<pre>{escape(CODE)}</pre>"),
            f'<p class="note">{told}</p>',
        ],
        "gradtrace demo",
    )


def _wide(content: str) -> str:
    return f'<div class="wide" tabindex="0">{content}</div>'


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
