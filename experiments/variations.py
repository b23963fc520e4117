"""Do three remarks hold: on batch normalisation, on the order of execution, and on priors?

The lecture: batch normalisation reshapes the landscape "to avoid valleys"; nodes run "in any
topological order" or in parallel "when inputs are available"; a start "can also exploit prior".

Expectation: normalisation takes away a valley along the features, and not one turned against them.
All orders give the same bits forwards, not always backwards. What is known of weights beforehand
decides which minimum is found, for better and worse.

Method: linear models of six features (κ = 100) at the rate 2/(L+μ), where curvatures tell the
number of updates; a network of eight tanh units at the best of four rates. R(P,Q) and random
programs of 63 nodes, run in drawn orders, by threads, and backwards by three schedules. R(P,Q) by
descent from 128 starts for each thing that may be known.

Limits: small problems; a deep network need not behave so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor

import gradtrace as gt
from experiments import lab
from experiments.descent import TRUTH, Loss, descend, errors, least, ratio, samples, some

Program: TypeAlias = dict[str, tuple[Callable[..., Tensor], Sequence[str]]]
"""By name, a function and the names of the values that it is applied to."""

SETTINGS = {
    "full": {"seeds": 8, "updates": 600, "orders": 200},
    "quick": {"seeds": 2, "updates": 300, "orders": 40},
    "small": {"seeds": 1, "updates": 20, "orders": 3},
}
PROBLEMS = {"axes": "along features", "turned": "across features", "network": "network"}
FEATURES, HIDDEN, POINTS, RATES = 6, 8, 200, (0.1, 0.3, 1.0, 3.0)
GOAL, ENOUGH, CLOSE = 1e-4, 0.1, 1e-3  # shares of the first loss; excess loss
NODES, LEAVES, THREADS, RUNS = 63, 4, 4, 20
SCHEDULES = ("kahn", "creation", "recursive")
KINDS, EACH = ("nothing known", "signs known", "near the truth", "signs wrong"), 128


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """All parts for each seed."""
    parts: list[dict[str, Any]] = [
        *({"part": "valleys", "problem": p, "normalised": n} for p in PROBLEMS for n in (0, 1)),
        *({"part": "dataflow", "kind": kind} for kind in ("R(P,Q)", "drawn")),
        {"part": "priors", "kind": "program"},
    ]
    return [{**part, **settings, "seed": n} for part in parts for n in range(settings["seeds"])]


def measure(cell: lab.Cell) -> lab.Row:
    """One cell, by its part."""
    parts = {"valleys": valley, "dataflow": dataflow, "priors": priors}
    return parts[cell["part"]](cell, torch.Generator().manual_seed(cell["seed"]))


def valley(cell: lab.Cell, random: torch.Generator) -> lab.Row:
    """The updates that descent needs, and those that follow from curvatures."""
    z = torch.randn(POINTS, FEATURES, dtype=torch.float64, generator=random)
    z = z - z.mean(0)
    square = torch.randn(FEATURES, FEATURES, dtype=torch.float64, generator=random)
    x, t = z * torch.logspace(0, -1, FEATURES, dtype=torch.float64), z.sum(1)
    if cell["problem"] == "network":
        return network(cell, x, torch.tanh(t), random)
    x = x @ torch.linalg.qr(square)[0].T if cell["problem"] == "turned" else x
    x = normal(x) if cell["normalised"] else x
    curves, vectors = torch.linalg.eigh(x.T @ x / POINTS)
    rate, off = 2 / float(curves[0] + curves[-1]), torch.linalg.lstsq(x, t[:, None]).solution
    shares, kept = curves * (vectors.T @ off)[:, 0] ** 2, (1 - rate * curves) ** 2
    left = (shares * kept ** torch.arange(2_000)[:, None]).sum(1)
    walk = down(lambda w: (t - x @ w).square().mean() / 2, 0 * off[:, 0], rate, cell, GOAL)
    found = {"condition": float(curves[-1] / curves[0]), **reached(walk, GOAL)}
    return found | {"expected": int((left > GOAL * left[0]).sum())}


def normal(x: Tensor) -> Tensor:
    """``(x - mean) / √(var + ε)`` over the batch."""
    return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-8).sqrt()


def down(loss: Loss, start: Tensor, rate: float, cell: lab.Cell, goal: float) -> list[float]:
    """The loss as a share of the first, until the goal."""
    found = list[float]()
    for w in descend(loss, start, [rate] * cell["updates"]):
        found.append(float(loss(w)) / float(loss(start)))
        if not goal < found[-1] < 1e3:
            break
    return found


def reached(curve: list[float], goal: float) -> lab.Row:
    """A curve, and the updates until the goal."""
    return {"curve": curve, "updates": len(curve) - 1 if curve[-1] <= goal else None}


def network(cell: lab.Cell, x: Tensor, t: Tensor, random: torch.Generator) -> lab.Row:
    """A hidden layer of tanh, its sums normalised or not, at the best of the rates."""
    first = torch.randn(FEATURES, HIDDEN, dtype=torch.float64, generator=random)
    last = torch.randn(1, HIDDEN, dtype=torch.float64, generator=random)
    one = torch.ones_like(last)  # rows of weights: first layer, scale, shift, last layer, bias
    start = torch.cat([first / FEATURES**0.5, one, 0 * one, last / HIDDEN**0.5, 0 * one])

    def loss(w: Tensor) -> Tensor:
        sums = x @ w[:FEATURES]
        hidden = torch.tanh((normal(sums) if cell["normalised"] else sums) * w[-4] + w[-3])
        return (t - hidden @ w[-2] - w[-1, 0]).square().mean() / 2

    curves = [down(loss, start, rate, cell, ENOUGH) for rate in RATES]
    arrived = [curve for curve in curves if curve[-1] <= ENOUGH]
    return reached(min(arrived or curves, key=len), ENOUGH)


def running_example() -> Program:
    """R(P,Q), with P, Q and the weights as given values."""
    return {
        "a": (torch.mul, ("x0", "x1")),
        "b": (lambda a, q: torch.tanh(a + q), ("a", "x2")),
        "c": (torch.mul, ("x3", "b")),
        "d": (torch.mul, ("x0", "b")),
        "e": (torch.sigmoid, ("c",)),
        "f": (torch.sin, ("d",)),
        "r": (torch.mul, ("e", "f")),
    }


def drawn(draw: Random) -> Program:
    """Each node is a sum or product of two earlier values; the last adds up what has no user."""
    names, found = [f"x{i}" for i in range(LEAVES)], Program()
    kinds: list[Callable[..., Tensor]] = [torch.add, lambda a, b: torch.tanh(a) * torch.cos(b)]
    for i in range(NODES - 1):
        found[f"n{i}"] = draw.choice(kinds), draw.choices(names, k=2)
        names.append(f"n{i}")
    used = {name for _, inputs in found.values() for name in inputs}
    ends = [name for name in found if name not in used]
    return {**found, "end": (lambda *terms: torch.stack(terms).sum(0), ends)}


def dataflow(cell: lab.Cell, random: torch.Generator) -> lab.Row:
    """Executions in drawn orders and by threads, and gradients by three schedules."""
    draw = Random(cell["seed"])
    program = drawn(draw) if cell["kind"] == "drawn" else running_example()
    values = torch.randn(LEAVES, 5, dtype=torch.float64, generator=random)
    given = {f"x{i}": value.requires_grad_() for i, value in enumerate(values.unbind())}
    wanted, orders = run(program, given), {order(program, draw) for _ in range(cell["orders"])}
    others = [run({n: program[n] for n in names}, given) for names in orders]
    others += [run(program, given, THREADS) for _ in range(RUNS)]
    different = sum(not all(torch.equal(a[n], wanted[n]) for n in wanted) for a in others)
    loss = [*wanted.values()][-1].sum()
    first, *rest = (gt.backward(loss, names=given, schedule=each) for each in SCHEDULES)
    apart = max(float((g[n] - first[n]).abs().max()) for g in rest for n in first)
    largest = max(float(g.abs().max()) for g in first.values())
    return {"orders": len(orders), "runs": RUNS, "different": different, "apart": apart / largest}


def run(program: Program, given: Mapping[str, Tensor], threads: int = 1) -> dict[str, Tensor]:
    """All values; a thread takes up one node after the other, when its inputs are available."""
    values: dict[str, Any] = dict(given)

    def node(apply: Callable[..., Tensor], inputs: Sequence[Any]) -> Tensor:
        return apply(*(x.result() if isinstance(x, Future) else x for x in inputs))

    with ThreadPoolExecutor(threads) as pool:
        for name, (apply, inputs) in program.items():
            values[name] = pool.submit(node, apply, [values[x] for x in inputs])
    return {name: values[name].result() for name in program}


def order(program: Program, draw: Random) -> tuple[str, ...]:
    """A topological order."""
    found = list[str]()
    while left := {name: inputs for name, (_, inputs) in program.items() if name not in found}:
        found.append(draw.choice([n for n, inputs in left.items() if not left.keys() & inputs]))
    return tuple(found)


def priors(cell: lab.Cell, random: torch.Generator) -> lab.Row:
    """The update at which each start of R(P,Q) arrives, or -1."""
    data = samples(torch.Generator().manual_seed(cell["seed"]), 128)
    points = 2 * torch.randn(len(KINDS), EACH, 3, dtype=torch.float64, generator=random)
    points[1], points[3] = points[1].abs() * TRUTH.sign(), -points[3].abs() * TRUTH.sign()
    points[2] = TRUTH + 0.15 * points[2]
    start, goal = points.reshape(-1, 3).T[..., None], least(data) + CLOSE
    first = torch.full((len(KINDS) * EACH,), -1)
    walk = descend(lambda w: errors(w, data).sum(), start, [0.5] * cell["updates"])
    for i, w in enumerate(walk):
        first[(errors(w, data) < goal) & (first < 0)] = i
    return {"arrived": dict(zip(KINDS, first.reshape(len(KINDS), -1).tolist()))}


def kept(row: lab.Row) -> list[lab.Row]:
    """Rows of docs/experiments without chains, trees, and linear models with priors."""
    return [] if row.get("kind") in ("chain", "tree", "linear") else [row]


def _valley(rows: Sequence[lab.Row], problem: str) -> list[object]:
    plain, mended = (some(rows, "valleys", problem=problem, normalised=n) for n in (False, True))
    pairs = [(a["updates"], b["updates"]) for a, b in zip(plain, mended)]
    if any(None in pair for pair in pairs):
        return [PROBLEMS[problem], *["–"] * 5]
    spread = ([r["condition"] for r in each if "expected" in r] for each in (plain, mended))
    numbers: list[Sequence[float]] = [*spread, *zip(*pairs), [a / b for a, b in pairs]]
    return [PROBLEMS[problem], *(ratio(each, ".3g") if each else "–" for each in numbers)]


def _flow(rows: Sequence[lab.Row], kind: str) -> list[object]:
    found = some(rows, "dataflow", kind=kind)
    counts = [sum(row[k] for row in found) for k in ("orders", "runs", "different")]
    return [kind, *counts, max(row["apart"] for row in found)]


def _share(rows: Sequence[lab.Row], kind: str) -> list[object]:
    each = [[i for i in row["arrived"][kind] if i >= 0] for row in some(rows, "priors")]
    shares, steps = [len(one) / EACH for one in each], [median(one) for one in each if one]
    return [kind, lab.spoken(shares), lab.said(lab.interval(steps), ".0f") if steps else "–"]


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Valleys, orders of execution, and starts."""
    valleys = "", "κ", "κ, normalised", "updates", "updates, normalised", "times fewer"
    flow = "program", "orders", "runs by threads", "other bits", "schedules differ by"
    starts = "start", "share that arrives", "median updates"
    return [
        ("Batch normalisation: updates of descent", valleys, [_valley(rows, p) for p in PROBLEMS]),
        ("Order of execution", flow, [_flow(rows, kind) for kind in ("R(P,Q)", "drawn")]),
        ("Priors: R(P,Q) from 128 starts a seed", starts, [_share(rows, kind) for kind in KINDS]),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """Descent of the first seed, with and without normalisation."""
    curves = {}
    for row in some(rows, "valleys", seed=0):
        name = f"{PROBLEMS[row['problem']]}{', BN' if row['normalised'] else ''}"
        curves[name] = [*range(1, len(row["curve"]) + 1)], row["curve"]
    what, axes = "Batch normalisation (BN)", {"xscale": "log", "yscale": "log"}
    lab.lines(path, what, "updates + 1", "loss over the first", curves, **axes)
