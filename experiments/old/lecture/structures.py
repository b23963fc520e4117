"""Sharing, skips, loops and conditionals as programs, and the sum over paths.

The lecture: a derivative is the sum over all paths from the weight to the output of the product of
local derivatives; as a sum it is exponential in the graph, back-propagation is linear. Each program
here has its derivative by hand; beside it stand our gradient, and the weights of all listed paths
added up. Then each is fitted to what it gives with other weights.

The "small caveat" about conditionals and loops: what runs is one branch, and that one's derivative
is what we get; a difference across the switch sees a jump in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import fsum
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradtrace as gt
from gradtrace import semirings
from gradtrace.experiments.harness.findings import (
    Cell,
    Findings,
    Plot,
    Result,
    Row,
    Series,
    Table,
    Tick,
)
from gradtrace.experiments.lecture import program
from gradtrace.experiments.lecture.descent import Point, descend, gradient
from gradtrace.experiments.lecture.optimisers import AdamW

LAYERS, TURNS, SWITCH = 4, 5, 0.25


class Program(NamedTuple):
    """A function of weights and two inputs, its derivatives by hand, and weights to find."""

    run: Callable[[Point, Tensor, Tensor], Tensor]
    hand: Callable[[Point, Tensor, Tensor], Point]
    weights: dict[str, float]


def _plain_hand(w: Point, p: Tensor, q: Tensor) -> Point:
    """``∂R/∂W1 = b · f1'(c) · ∂f3/∂E``, and so on; two paths lead from W0."""
    b = torch.tanh(w["w0"] * p + q)
    c, d = w["w1"] * b, w["w2"] * b
    e, f = c.sigmoid(), d.sin()
    via_c, via_d = f * e * (1 - e), e * d.cos()  # ∂R/∂C and ∂R/∂D
    slope = 1 - b * b
    return {
        "w0": p * slope * (w["w1"] * via_c + w["w2"] * via_d),
        "w1": b * via_c,
        "w2": b * via_d,
    }


def _shared(w: Point, p: Tensor, q: Tensor) -> Tensor:
    """R(P,Q) with one weight for W1 and W2."""
    return program.run({"w0": w["w0"], "w1": w["w"], "w2": w["w"]}, p, q)


def _shared_hand(w: Point, p: Tensor, q: Tensor) -> Point:
    """The lecture's small tweak: the derivatives of all uses, added up."""
    found = _plain_hand({"w0": w["w0"], "w1": w["w"], "w2": w["w"]}, p, q)
    return {"w0": found["w0"], "w": found["w1"] + found["w2"]}


def _skips(w: Point, p: Tensor, q: Tensor) -> Tensor:
    """``h ← h + tanh(wᵢ h)``: two ways through each layer."""
    h = p + q
    for i in range(LAYERS):
        h = h + torch.tanh(w[f"w{i}"] * h)
    return h


def _skips_hand(w: Point, p: Tensor, q: Tensor) -> Point:
    h, states = p + q, []
    for i in range(LAYERS):
        states.append(h)
        h = h + torch.tanh(w[f"w{i}"] * h)
    found, v = {}, torch.ones_like(h)
    for i in reversed(range(LAYERS)):
        slope = 1 - torch.tanh(w[f"w{i}"] * states[i]) ** 2
        found[f"w{i}"] = v * slope * states[i]
        v = v * (1 + w[f"w{i}"] * slope)
    return found


def _loop(w: Point, p: Tensor, q: Tensor) -> Tensor:
    """``h ← tanh(w h + u q)``, some turns: one weight, used in each."""
    h = p
    for _ in range(TURNS):
        h = torch.tanh(w["w"] * h + w["u"] * q)
    return h


def _loop_hand(w: Point, p: Tensor, q: Tensor) -> Point:
    """Forward: ``dh ← (1 - h²)(w dh + direct)``."""
    h, dw, du = p, torch.zeros_like(p), torch.zeros_like(p)
    for _ in range(TURNS):
        old, h = h, torch.tanh(w["w"] * h + w["u"] * q)
        dw, du = (1 - h * h) * (w["w"] * dw + old), (1 - h * h) * (w["w"] * du + q)
    return {"w": dw, "u": du}


def _branch(w: Point, p: Tensor, q: Tensor) -> Tensor:
    """``if p > 1/4: a·p² + q  else: b·p - q``, sample by sample, as programs branch."""
    if p.dim():
        return torch.stack([_branch(w, x, y) for x, y in zip(p, q)])
    return w["a"] * p * p + q if p > SWITCH else w["b"] * p - q


def _branch_hand(w: Point, p: Tensor, q: Tensor) -> Point:
    taken = (p > SWITCH).double()
    return {"a": taken * p * p, "b": (1 - taken) * p}


PROGRAMS = {
    "R(P,Q)": Program(program.run, _plain_hand, dict(zip(("w0", "w1", "w2"), program.TRUTH))),
    "sharing": Program(_shared, _shared_hand, {"w0": 0.8, "w": 1.2}),
    "skips": Program(_skips, _skips_hand, {"w0": 0.5, "w1": -0.4, "w2": 0.3, "w3": 0.6}),
    "loop": Program(_loop, _loop_hand, {"w": 0.7, "u": 0.9}),
    "conditional": Program(_branch, _branch_hand, {"a": 1.5, "b": -0.5}),
}


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """Each program for each seed; chains of diamonds once."""
    kinds = [
        {"kind": name, "updates": settings["updates"], "samples": settings["samples"], "seed": s}
        for name in PROGRAMS
        for s in range(seeds)
    ]
    return [*kinds, {"kind": "diamonds", "longest": settings["longest"], "listed": 10}]


def measure(cell: Cell, tick: Tick) -> Result:
    """One program, or the chains."""
    if cell["kind"] == "diamonds":
        return _diamonds(cell)
    generator = torch.Generator().manual_seed(cell["seed"])
    one = PROGRAMS[cell["kind"]]
    truth = {name: torch.tensor(x, dtype=torch.float64) for name, x in one.weights.items()}
    p, q = torch.randn(2, cell["samples"], dtype=torch.float64, generator=generator)
    found = _paths(one, truth, p[0], q[0]) | _fit(one, truth, p, q, cell["updates"], generator)
    return found | (_caveat(one, truth) if cell["kind"] == "conditional" else {})


def _paths(one: Program, w: Point, p: Tensor, q: Tensor) -> Result:
    """At one sample: by hand, by our engine, and path by path."""
    _, ours = gradient(lambda at: one.run(at, p, q), w)
    hand = one.hand(w, p, q)
    leaves = {name: x.clone().requires_grad_() for name, x in w.items()}
    paths = gt.enumerate_paths(one.run(leaves, p, q), names=leaves)
    count = gt.backward(one.run(leaves, p, q), semirings.COUNT, names=leaves)
    return {
        "hand": max(abs(float(ours[name] - hand[name])) for name in w),
        "summed": max(abs(paths.of(name).total() - float(ours[name])) for name in w),
        "paths": {name: len(paths.of(name)) for name in w},
        "counted": {name: int(count[name]) if name in count else 0 for name in w},
        "ways": [[p.name, " → ".join(map(_word, p.operators)), p.weight] for p in paths],
    }


def _word(operator: str) -> str:
    """``MulBackward0``: mul."""
    return operator.partition("Backward")[0].lower()


def _fit(
    one: Program, truth: Point, p: Tensor, q: Tensor, updates: int, generator: torch.Generator
) -> Result:
    """Find the weights again, from nearby, by AdamW without decay."""
    target = one.run(truth, p, q)
    off = torch.rand(len(truth), dtype=torch.float64, generator=generator) - 0.5
    start = {name: x + d for (name, x), d in zip(truth.items(), off)}

    def loss(w: Point, _: int = 0) -> Tensor:
        return (target - one.run(w, p, q)).square().mean()

    *_, end = islice(descend(loss, start, AdamW(0.05, decay=0.0)), updates + 1)
    return {
        "before": float(loss(start)),
        "after": float(loss(end)),
        "off": max(float((end[name] - truth[name]).abs()) for name in truth),
    }


def _caveat(one: Program, w: Point) -> Result:
    """The derivative by p just beside the switch, and a difference across it."""
    q, beside = torch.tensor(0.5, dtype=torch.float64), torch.tensor(SWITCH + 1e-6).double()
    _, ours = gradient(lambda at: one.run(w, at["p"], q), {"p": beside})
    step = 1e-4
    across = (one.run(w, beside + step, q) - one.run(w, beside - step, q)) / (2 * step)
    branch = 2 * w["a"] * beside
    return {
        "beside": float(ours["p"]),
        "branch": float(branch),
        "across": float(across),
    }


def _diamonds(cell: Cell) -> Result:
    """``h ← sin h · cos h`` n times: 2ⁿ paths in a graph of about 3n edges."""
    found: dict[str, list[float]] = {"n": [], "paths": [], "edges": [], "listed": [], "off": []}
    for n in range(1, cell["longest"] + 1):
        x = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
        h = x
        for _ in range(n):
            h = h.sin() + h.cos()
        names = {"x": x}
        graph = gt.graph(h, names=names)
        counted = gt.backward(h, semirings.COUNT, names=names)["x"]
        found["n"].append(n)
        found["paths"].append(float(counted))
        found["edges"].append(len(graph.edges))
        if n <= cell["listed"]:
            paths = gt.enumerate_paths(h, names=names)
            found["listed"].append(len(paths))
            slope = float(gt.backward(h, names=names)["x"])
            found["off"].append(abs(paths.total() - slope))
    return found


# What came out -----------------------------------------------------------------------------------


def conclude(rows: Sequence[Row]) -> Findings:
    """Whether sums over paths, derivatives by hand and our gradients are the same."""
    programs = [row for row in rows if row.cell["kind"] in PROGRAMS]
    chains = [row.result for row in rows if row.cell["kind"] == "diamonds"]
    facts: dict[str, Any] = {}
    said, tables, plots = [], [], []
    if programs:
        facts |= _facts(programs)
        tables += [_table(programs), _listed(programs)]
        said.append(_sentence(facts))
    for chain in chains[:1]:
        facts["diamonds"] = {
            "doubles": all(p == 2**n for n, p in zip(chain["n"], chain["paths"])),
            "edges_a_layer": sorted({b - a for a, b in zip(chain["edges"], chain["edges"][1:])}),
            "off": max(chain["off"]),
            "listed": chain["listed"],
        }
        said.append(
            f"A chain of {chain['n'][-1]} diamonds has {chain['paths'][-1]:,.0f} paths and "
            f"{chain['edges'][-1]} edges: back-propagation is linear where the sum is exponential."
        )
        plots.append(_plot(chain))
    return Findings(" ".join(said), tuple(tables), tuple(plots), facts)


def _facts(rows: Sequence[Row]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "hand": max(row.result["hand"] for row in rows),
        "summed": max(row.result["summed"] for row in rows),
        "counts": all(row.result["paths"] == row.result["counted"] for row in rows),
        "fitted": max(_left(row.result) for row in rows),
        "paths": {row.cell["kind"]: row.result["paths"] for row in rows if not row.cell["seed"]},
    }
    for row in rows:
        if "across" in row.result:
            facts |= {key: row.result[key] for key in ("beside", "branch", "across")}
    return facts


def _left(result: Result) -> float:
    """The share of the first loss that is left; all of one that was 0."""
    return float(result["after"] / result["before"]) if result["before"] else 1.0


def _sentence(facts: Mapping[str, Any]) -> str:
    text = (
        f"Sum over paths: under sharing, skips, a loop and a conditional the listed paths add up "
        f"to our gradient within {facts['summed']:.0e}, and both are the derivative by hand within "
        f"{facts['hand']:.0e}."
    )
    if not facts["counts"]:
        text += " COUNT does NOT always tell their number."
    if "across" in facts:
        text += (
            " Of a conditional only the branch that was taken is seen: beside the switch its "
            f"slope is {facts['beside']:.3g}, where a difference across it is "
            f"{facts['across']:.3g}."
        )
    return text


def _table(rows: Sequence[Row]) -> Table:
    lines = []
    for name in PROGRAMS:
        chosen = [row.result for row in rows if row.cell["kind"] == name]
        if not chosen:
            continue
        first = chosen[0]
        lines.append(
            (
                name,
                ", ".join(f"{key}: {n}" for key, n in first["paths"].items()),
                max(r["summed"] for r in chosen),
                max(r["hand"] for r in chosen),
                max(_left(r) for r in chosen),
                max(r["off"] for r in chosen),
            )
        )
    return Table(
        "Programs: sum over paths, derivative by hand, and fit",
        ("program", "paths from", "paths - ours", "ours - hand", "loss left", "weights off"),
        tuple(lines),
        "the most over seeds; paths of the first seed's first sample (a branch that was not taken "
        "has none)",
    )


def _listed(rows: Sequence[Row]) -> Table:
    """The paths of the first seed's R(P,Q) and of its version with sharing."""
    lines: list[tuple[str | float, ...]] = []
    for name in ("R(P,Q)", "sharing"):
        for row in [row for row in rows if row.cell["kind"] == name][:1]:
            for leaf in row.result["paths"]:
                ways = [way for way in row.result["ways"] if way[0] == leaf]
                lines += [(name, leaf, way, weight) for _, way, weight in ways]
                if len(ways) > 1:
                    lines.append((name, leaf, "sum", fsum(weight for *_, weight in ways)))
    return Table(
        "Paths, one by one", ("program", "from", "way to the output", "weight"), tuple(lines)
    )


def _plot(chain: Result) -> Plot:
    return Plot(
        "paths",
        "Sum over paths against back-propagation",
        "diamonds in a row",
        "number",
        (
            Series("paths", chain["n"], chain["paths"]),
            Series("edges of the graph", chain["n"], chain["edges"]),
        ),
        log_y=True,
    )
