"""A first look, in one HTML file: the graph and the gradient of a two-layer tanh network, and the
paths and the influence of branches that compete.
"""

from __future__ import annotations

import platform
from collections import OrderedDict
from collections.abc import Iterable
from html import escape
from math import inf
from pathlib import Path
from string import Template
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace
from gradtrace.graph import Graph
from gradtrace.influence import Influence
from gradtrace.paths import Path as GradientPath
from gradtrace.trace import Trace

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


def demo(path: str | Path) -> dict[str, Any]:
    """Trace the network, compare its gradient with PyTorch's, write the report; say what was found.

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
        "report": str(path),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(page(found, graph, branches, best), encoding="utf-8")
    return found


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

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gradtrace demo</title>
<style>
:root { color-scheme: light dark; --text: #1f2328; --page: #fff; --line: #d0d7de; --soft: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --page: #0d1117; --line: #30363d; --soft: #9198a1; }
}
body { margin: 0 auto; max-width: 56rem; padding: 1rem; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
dl { display: flex; flex-wrap: wrap; gap: .75rem 2rem; margin: 0; }
dt, footer { color: var(--soft); font-size: .875rem; }
dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr + tr > * { border-top: 1px solid var(--line); }
pre { padding: .75rem; margin: 0; font-size: .875rem; }
.graph svg { display: block; margin: 0 auto; max-width: 100%; height: auto; }
</style>
</head>
<body>
<h1>A two-layer tanh network, traced</h1>
<p>Gradient flows from the loss at the top down to the parameters, along the edges of this
graph.</p>
<dl>$facts</dl>
<h2>The gradient, beside PyTorch's</h2>
<div class="wide" tabindex="0">$table</div>
<h2>The graph</h2>
<div class="wide graph" tabindex="0">$svg</div>
<h2>Which way it came</h2>
<p>A second network: a tanh branch, a ReLU branch and a way past both, on one embedding. Of the
embedding's entries that get any gradient, this share get most of it through each branch:</p>
<div class="wide" tabindex="0">$influence</div>
<p>The largest path of the embedding in the first sample, from the parameter to the loss:</p>
<div class="wide" tabindex="0">$path</div>
<p>$flow</p>
<h2>How to go on</h2>
<p>Do the same with a model of your own: run its forward pass inside <code>watch</code> and ask.</p>
<div class="wide" tabindex="0"><pre>$code</pre></div>
<footer><p>$versions</p></footer>
</body>
</html>
""")

CODE = """import gradtrace as gt

with gt.watch(model) as watch:
    loss = loss_function(model(x), y)

trace = watch.trace(loss)           # paths and influence
trace.influence()                   # which modules the paths run through
trace.path("layer.weight", (0, 0))  # one of them; .paths(sample=1000) for many
watch.graph(loss)                   # operators, edges, sizes; .draw("graph.svg")
watch.backward(loss)                # {name: gradient}; .grad stays as it is"""


def page(found: dict[str, Any], graph: Graph, branches: Influence, best: GradientPath) -> str:
    """One file that needs no other: picture, numbers, what to do next."""
    head, *rows = table(found)
    body = "".join(_row("td", cells) for cells in rows)
    return PAGE.substitute(
        facts="".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in facts(found)
        ),
        table=f"<table>{_row('th', head)}{body}</table>",
        svg=graph.draw(),
        influence=branches._repr_html_(),
        path=best._repr_html_(),
        flow=escape(found["flow"]),
        code=escape(CODE),
        versions=escape(", ".join(f"{name} {value}" for name, value in found["versions"].items())),
    )


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
