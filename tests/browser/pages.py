"""The reports that are looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.diagnosis import Diagnosis
from gradtrace.report.training import write_run
from gradtrace.table import Column, Table
from gradtrace.traced import Trace

HOSTILE = (
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror='window.hacked=2'>",
    "\"quotes' & ampersands;",
    "\u202eright to left\u2066",
    "👩‍🔬 emoji",
    "n" * 10_000,
    "${window.hacked=3}",
    "<!--",
)


class Made(NamedTuple):
    """A page and the trace it shows."""

    file: Path
    trace: Trace


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.inner = nn.Sequential(nn.Linear(size, 2 * size), nn.Tanh(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Network(nn.Module):
    """Equal blocks one after the other, a wide layer, and one that gets nothing."""

    def __init__(self, blocks: int, size: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.wide = nn.Linear(size, 90)
        self.gate = nn.Linear(90, 60)
        self.last = nn.Linear(60, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.last(self.gate(self.wide(x)).clamp(min=-0.1))
        return found


def traced(model: nn.Module, x: Tensor, rule: str = "greedy") -> Trace:
    with gt.watch(model) as watch:
        loss = model(x).square().mean()
    return watch.trace(loss, rule=rule)


def network(folder: Path) -> Made:
    torch.manual_seed(0)
    trace = traced(Network(4), torch.randn(3, 4))
    file = folder / "network.html"
    trace.report(file, name="a network")
    return Made(file, trace)


class Broken(Network):
    """A network with a layer whose output is detached, and one that is never called."""

    def __init__(self) -> None:
        super().__init__(1)
        self.memory = nn.Linear(4, 6)
        self.spare = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.memory(x).detach()
        found: Tensor = self.last(self.gate(self.wide(self.blocks[0](h))).relu())
        return found


def broken(folder: Path) -> tuple[Path, Diagnosis]:
    """The report of a network that does not learn, and what is wrong with it."""
    torch.manual_seed(0)
    model = Broken()
    with gt.watch(model, diagnose=True) as watch:
        loss = model(torch.randn(3, 4)).square().mean()
    file = folder / "broken.html"
    watch.trace(loss).report(file, name="a network that does not learn")
    return file, watch.diagnose(loss)


class Sentence(nn.Module):
    """Words, layers of attention, and one number."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        sizes: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        one = nn.TransformerEncoderLayer(8, 2, 16, **sizes)
        more = (nn.TransformerEncoderLayer(8, 2, 16, **sizes) for _ in range(1, layers))
        self.body = nn.Sequential(one, *more) if layers > 1 else one
        self.out = nn.Linear(8, 1)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.out(self.body(words)[:, -1]).sum()
        return found


def attributed(folder: Path, layers: int = 1) -> tuple[Path, dict[str, Any]]:
    """A report with an attribution graph, and the graph."""
    torch.manual_seed(0)
    model, text = Sentence(layers), ["the", "cat", "sat", "down"]
    with gt.watch(model) as watch:
        words = model.words(torch.arange(4)[None])
        output = model(words)
    found = watch.attribute(output, {"words": words}, tokens={"words": text})
    graph = found.graph(nodes=1.0, edges=1.0)
    file = folder / f"attributed{layers}.html"
    found.trace.report(file, name="a sentence", attribution=graph)
    return file, graph.to_dict()


def hostile(folder: Path) -> Made:
    torch.manual_seed(0)
    model = nn.Module()
    for number, name in enumerate(HOSTILE):
        key = name.replace(".", "")
        model.add_module(key, nn.Linear(2, 2) if number % 2 else nn.Sequential(nn.Linear(2, 2)))

    def forward(x: Tensor) -> Tensor:
        for part in model.children():
            x = gt.label(part(x), -1, HOSTILE[:2])
        return x

    model.forward = forward  # type: ignore[assignment]
    trace = traced(model, torch.randn(2, 2))
    file = folder / "hostile <b>'&\" \u202e 👩.html"
    trace.report(file, name=HOSTILE[0])
    return Made(file, trace)


def run(folder: Path) -> Path:
    """A training run of a few components, whose steps become slower."""
    names = [f"blocks.{n}.inner" for n in range(12)]
    columns = [Column("step", "count"), Column("loss", "number")]
    columns += [
        Column(f"{kind} {name}", "share") for name in names for kind in ("share", "weighted")
    ]
    rows: Any = [
        (5 * n, 3 / (n + 1), *(0.5 + 0.4 * ((n + k) % 7) / 7 for k in range(2 * len(names))))
        for n in range(20)
    ]
    about = {"slope": 1e-4, "low": 5e-5, "high": 2e-4, "grows": True}
    seconds: Any = [(n, 0.01 + 1e-4 * n + 1e-3 * (n % 3)) for n in range(100)]
    history = Table("Run", tuple(columns), rows, ("a note",), {"running": True, "model": "Network"})
    pair = Column("step", "count"), Column("seconds", "number", "s")
    words = ("a step takes 15 ms (median), and 0.1 ms more each step",)
    write_run(folder / "run.html", history, Table("Time per step", pair, seconds, words, about))
    return folder / "run.html"


class Long(nn.Module):
    """Many operators: with 905 a layer, as many as a Mamba of 24 layers over 64 tokens has."""

    def __init__(self, layers: int = 24, operators: int = 905) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))
        self.operators = operators

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            for step in range(self.operators):
                x = x.t() if step % 3 else x * 1.001
        return x


def long(folder: Path, operators: int = 100) -> Made:
    torch.manual_seed(0)
    trace = traced(Long(operators=operators), torch.randn(2, 2))
    file = folder / "long.html"
    trace.report(file)
    return Made(file, trace)
