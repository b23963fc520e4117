"""Do parameterised programs have the gradients, as sums over paths, that the sources say?

Expectation: what the lecture ("Gradient Computation in Abstract Neural Networks"), Lee's slides
("Backpropagation") and the note ("Training Neural Networks") print comes out; listed paths add up
to the gradient; descent meets closed forms; cross entropy and KL have one gradient.

Method: gradients are ``gt.backward``'s, in float64, beside the source's number or formula, a closed
form, and ``Im f(w + ih) / h``, which is exact and needs no graph. Paths are listed at one point a
seed. Ridge has almost as many features as samples, and half of the data is unseen.

Limits: programs are tiny, so that closed forms exist; nothing is said of large networks. What is
exact has no interval. Of a conditional the branch that is taken is looked at, not the switch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor, cos, log_softmax, outer, sigmoid, sin, softmax, tanh
from torch.nn.functional import cross_entropy, kl_div

import gradtrace as gt
from experiments import lab

PENALTIES = [0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0]
SETTINGS = {
    "full": {"longest": 30, "steps": 3000, "seeds": 5},
    "quick": {"longest": 20, "steps": 500, "seeds": 2},
    "small": {"longest": 11, "steps": 30, "seeds": 1},
}
LISTED, SWITCH, WRONG, NEAR = 7, 0.25, -10.0, 1e-9
EQUAL = {
    "slope": "slope at the solution of linear equations, 0",
    "away": "descent on a line, Gauss's solution",
    "sum": "cross entropy, entropy + KL",
    "p_minus_t": "its gradient, p - t",
    "same": "gradient of KL, that",
}
PARTS = "worked", "structures", "closed", "classes"
RIDGE = "λ", "mean ‖w‖", "error on unseen data over that at λ = 0", "descent off by"
Run: TypeAlias = Callable[..., Tensor]


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """Sources and chains of diamonds; programs, regressions and losses for each seed."""
    found: list[lab.Cell] = [{"part": "worked", "source": x} for x in ("slides", "lecture", "note")]
    found.append({"part": "structures", "kind": "diamonds", "longest": settings["longest"]})
    for seed in range(settings["seeds"]):
        rest = {"part": "closed", "seed": seed, "steps": settings["steps"]}
        found += [{"part": "structures", "kind": kind, "seed": seed} for kind in PROGRAMS]
        found += [{**rest, "kind": "ridge", "penalty": penalty} for penalty in PENALTIES]
        found += [{**rest, "kind": "line", "penalty": 0.0}, {"part": "classes", "seed": seed}]
    return found


def measure(cell: lab.Cell) -> lab.Row:
    """One part."""
    parts = {"worked": worked, "closed": closed, "classes": classes, "diamonds": diamonds}
    return parts.get(cell["part"], parts.get(cell.get("kind", ""), structures))(cell)


def exact(some: Sequence[Any]) -> list[Tensor]:
    """In float64."""
    return [torch.as_tensor(x, dtype=torch.float64) for x in some]


def slopes(run: Run, *at: Any) -> list[Tensor]:
    """The gradient at a point; 0 for what the program did not use."""
    names = {str(i): x.clone().requires_grad_() for i, x in enumerate(exact(at))}
    found = gt.backward(run(*names.values()), names=names)
    return [found.get(name, torch.zeros_like(x)) for name, x in names.items()]


def normal(seed: int, *shapes: Sequence[int]) -> list[Tensor]:
    """Standard normal numbers."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=random) for shape in shapes]


def running(w: Sequence[Tensor], p: Tensor, q: Tensor) -> Tensor:
    """The lecture's ``R(P, Q)``; of the functions it leaves open, tanh, sigmoid, sin, product."""
    b = tanh(w[0] * p + q)
    return sigmoid(w[1] * b) * sin(w[2] * b)


def by_hand(w: Sequence[Tensor], p: Tensor, q: Tensor) -> list[Tensor]:
    """``∂R/∂W1 = b·π``, and so on; from W0 two paths lead, by C and by D."""
    b = tanh(w[0] * p + q)
    e, f = sigmoid(w[1] * b), sin(w[2] * b)
    by_c, by_d = f * e * (1 - e), e * cos(w[2] * b)
    return [p * (1 - b * b) * (w[1] * by_c + w[2] * by_d), b * by_c, b * by_d]


def skips(w: Sequence[Tensor], p: Tensor, q: Tensor) -> Tensor:
    """``h ← h + tanh(wᵢ h)``: two ways through each layer."""
    h = p + q
    for x in w:
        h = h + tanh(x * h)
    return h


def loop(w: Sequence[Tensor], p: Tensor, q: Tensor) -> Tensor:
    """``h ← tanh(w h + u q)``: one weight, used in each turn."""
    for _ in range(5):
        p = tanh(w[0] * p + w[1] * q)
    return p


def branch(w: Sequence[Tensor], p: Tensor, q: Tensor) -> Tensor:
    """A conditional, as programs have it."""
    return w[0] * p * p + q if p > SWITCH else w[1] * p - q


PROGRAMS: dict[str, tuple[Run, dict[str, float]]] = {
    "R(P,Q)": (running, {"w0": 0.8, "w1": 1.5, "w2": -1.2}),
    "sharing": (lambda w, p, q: running((w[0], w[1], w[1]), p, q), {"w0": 0.8, "w": 1.2}),
    "skips": (skips, {"w0": 0.5, "w1": -0.4, "w2": 0.3, "w3": 0.6}),
    "loop": (loop, {"w": 0.7, "u": 0.9}),
    "conditional": (branch, {"a": 1.5, "b": -0.5}),
}


def structures(cell: lab.Cell) -> lab.Row:
    """A program at one point: paths, added up and counted, and the gradient by imaginary steps."""
    run, weights = PROGRAMS[cell["kind"]]
    p, q = normal(cell["seed"], (2, 32))[0][:, 0]
    (at,) = exact([[*weights.values()]])
    steps = [run(w, p, q).imag / 1e-30 for w in at + 1e-30j * torch.eye(len(at)).double()]
    names = {name: x.clone().requires_grad_() for name, x in zip(weights, at)}
    value = run([*names.values()], p, q)
    ours, paths = gt.backward(value, names=names), gt.testing.enumerate_paths(value, names=names)
    slope = {name: float(ours.get(name, 0)) for name in names}
    return {
        "apart": max(abs(x - float(y)) for x, y in zip(slope.values(), steps)),
        "summed": max(abs(paths.of(name).total() - x) for name, x in slope.items()),
        "paths": {name: len(paths.of(name)) for name in names},
    }


def diamonds(cell: lab.Cell) -> lab.Row:
    """``h ← sin h + cos h``, n times: 2ⁿ paths. Those of short chains are listed."""
    found: dict[str, list[float]] = {"n": [], "paths": [], "edges": [], "off": []}
    h = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    names = {"x": h}
    for n in range(1, cell["longest"] + 1):
        h = sin(h) + cos(h)
        found["n"].append(n)
        found["paths"].append(float(gt.backward(h, gt.semirings.COUNT, names=names)["x"]))
        found["edges"].append(len(gt.graph(h, names=names).edges))
        if n <= LISTED:
            total = gt.testing.enumerate_paths(h, names=names).total()
            found["off"].append(abs(total - float(gt.backward(h, names=names)["x"])))
    return found


def worked(cell: lab.Cell) -> lab.Row:
    """Whether the source has a number or a formula, our slope, and the source's."""
    lines = []
    for source, kind, run, at, wanted in examples():
        if source == cell["source"]:
            sides = (torch.cat([x.flatten() for x in exact(y)]) for y in (slopes(run, *at), wanted))
            lines += [[kind, *pair] for pair in zip(*(side.tolist() for side in sides))]
    return {"lines": lines}


def examples() -> list[tuple[str, str, Run, Sequence[Any], Sequence[Any]]]:
    """Functions, points, and slopes there; the text lacks the neuron's numbers: these are usual."""
    w, (x, moved) = exact([0.5, 0.4, -0.3]), exact([[-1.0, 0.0, 0.5], [1.25322, 1.25353, 1.25347]])
    (m, a, v), (n, b, u) = normal(1, (2, 3), (3,), (2,)), normal(0, (3, 2), (2,), (3,))
    (p, q, t), wave, at = normal(0, (3, 8))[0], 5 * x.exp(), (2, -1, -3, -2, -3)
    z, s, c, y = 0.7, math.sin(0.7), math.cos(0.7), 1 / (1 + math.exp(-1))
    loop = [-2 / 8 * (t - running(w, p, q)) @ slope for slope in by_hand(w, p, q)]
    by = [y * (1 - y) * k for k in (-1, 2, -2, -3, 1)]
    return [
        ("slides", "number", lambda x, y, z: (x + y) * z, (3, 5, 2), (2, 2, 8)),
        ("slides", "number", lambda w: w @ (moved - 1.25347) / 0.0001, [x], [[-2.5, 0.6, 0.0]]),
        ("slides", "formula", lambda a, b, c, d, e: sigmoid(a * b + c * d + e), at, by),
        ("slides", "formula", lambda x: sin(5 * x.exp()).sum(), [x], [wave * cos(wave)]),
        ("lecture", "number", lambda x: x * x, [3], [6]),
        ("lecture", "formula", lambda x, y: sin(x) + cos(y), (z, z), (c, -s)),
        ("lecture", "formula", lambda x: sin(cos(x)), [z], [-math.cos(c) * s]),
        ("lecture", "formula", lambda x: cos(x).exp(), [z], [-math.exp(c) * s]),
        ("lecture", "formula", lambda *w: (t - running(w, p, q)).square().mean(), w, loop),
        ("lecture", "formula", lambda w, x: u @ (w @ x), (n, b), (outer(u, b), n.T @ u)),
        ("note", "formula", lambda w, x: v @ (w @ x), (m, a), (outer(v, a), m.T @ v)),
        ("note", "formula", lambda x: sigmoid(x).sum(), [x], [sigmoid(x) * sigmoid(-x)]),
    ]


def closed(cell: lab.Cell) -> lab.Row:
    """Ridge, or a line without a penalty, by equations and by descent; half the data is unseen."""
    penalty: float = cell["penalty"]
    x, truth, noise = normal(cell["seed"], (40, 18), (18,), (40,))
    y = x @ truth / math.sqrt(18) + noise
    if cell["kind"] == "line":
        x = torch.stack([torch.ones(40).double(), x[:, 0] + 2], 1)
    square = x[:20].T @ x[:20] / 20 + penalty * torch.eye(len(x.T)).double()
    best, curved = torch.linalg.solve(square, x[:20].T @ y[:20] / 20), torch.linalg.eigvalsh(square)

    def loss(w: Tensor) -> Tensor:
        return (y[:20] - x[:20] @ w).square().mean() + penalty * w.square().sum()

    w = torch.zeros_like(best)
    for _ in range(cell["steps"]):
        w = w - slopes(loss, w)[0] / (curved[0] + curved[-1])
    return {
        "norm": float(best.norm()),
        "test": float((y[20:] - x[20:] @ best).square().mean()),
        "slope": float(slopes(loss, best)[0].abs().max()),
        "away" if cell["kind"] == "line" else "distance": float((w - best).norm() / best.norm()),
    }


def classes(cell: lab.Cell) -> lab.Row:
    """Cross entropy and KL, and the slope of a sample that is wrong for sure."""
    z, t = normal(cell["seed"], (500, 3), (500, 3))
    t = softmax(t, 1)
    ways: list[Run] = [
        lambda z: cross_entropy(z, t),
        lambda z: kl_div(log_softmax(z, 1), t, reduction="batchmean"),
    ]
    (slope, other), (cross, kl) = (slopes(way, z)[0] for way in ways), (way(z) for way in ways)
    return {
        "sum": float((cross - kl + (t * t.log()).sum(1).mean()).abs()),
        "p_minus_t": float((slope - (softmax(z, 1) - t) / 500).abs().max()),
        "same": float((slope - other).abs().max()),
        "wrong_cross": float(slopes(lambda z: -sigmoid(z).log(), WRONG)[0]),
        "wrong_square": float(slopes(lambda z: (sigmoid(z) - 1).square(), WRONG)[0]),
    }


def kept(row: lab.Row) -> list[lab.Row]:
    """Rows of docs/experiments have derivatives by hand, and all distances of a line."""
    if row["part"] not in PARTS or row.get("kind") == "program":
        return []
    line = {"away": row["end"] / row["distances"][0]} if "distances" in row else {}
    return [{**row, **line, "apart": row.get("hand")}]


def facts(row: lab.Row) -> list[tuple[str, float]]:
    """What should be equal, and how far it is apart."""
    kind = row.get("kind", row["part"])
    if kind == "worked":
        return [(f"{row['source']}: {x[0]}, ours", abs(x[-1] - x[-2])) for x in row["lines"]]
    if kind == "diamonds":
        found = [("n diamonds: sum over paths, gradient", off) for off in row["off"]]
        found += [("paths, 2ⁿ", abs(x / 2**n - 1)) for n, x in zip(row["n"], row["paths"])]
        return found + [("edges, 4n", abs(x / n / 4 - 1)) for n, x in zip(row["n"], row["edges"])]
    if kind in PROGRAMS:
        ways = ", ".join(f"{name} {n}" for name, n in row["paths"].items())
        summed = f"{kind}: sum over paths ({ways}), gradient", row["summed"]
        return [("these programs: gradient, derivative otherwise", row["apart"]), summed]
    return [(what, row[key]) for key, what in EQUAL.items() if key in row]


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """What should be equal, ridge, and the slope of a loss that is large."""
    found: dict[str, list[float]] = {}
    for what, off in (fact for row in rows for fact in facts(row)):
        found.setdefault(what, []).append(off)
    equal = [(k, f"{sum(x <= NEAR for x in v)} of {len(v)}", max(v)) for k, v in found.items()]
    by = {x: [r for r in rows if r.get("kind") == "ridge" and r["penalty"] == x] for x in PENALTIES}
    ridge = []
    for penalty, some in by.items():
        logs = [math.log(a["test"] / b["test"]) for a, b in zip(some, by[0.0])]
        mean, low, high = map(math.exp, lab.interval(logs))
        norm, off = fmean(row["norm"] for row in some), max(row["distance"] for row in some)
        ridge.append((penalty, norm, lab.said((mean, low, high), ".2g"), off))
    norms = [*zip(*([row["norm"] for row in some] for some in by.values()))]
    falls = sum([*each] == sorted(each, reverse=True) for each in norms)
    wrong = next(row for row in rows if row["part"] == "classes")
    slope = [(wrong["wrong_cross"], wrong["wrong_square"])]
    return [
        ("What should be equal", ("these two", "agree", "apart at most"), equal),
        (f"Ridge (‖w‖ falls with λ in {falls} of {len(norms)} sets of data)", RIDGE, ridge),
        ("Slope of a surely wrong sample (score -10)", ("cross entropy", "square error"), slope),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """Paths and edges of chains of diamonds."""
    chain = next(row for row in rows if row.get("kind") == "diamonds")
    curves = {name: (chain["n"], chain[name]) for name in ("paths", "edges")}
    what = "Paths and edges of chains of diamonds"
    lab.lines(path, what, "diamonds in a row", "number", curves, yscale="log")
