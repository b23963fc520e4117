"""How exact and how dear is a numerical gradient, and does a check with it find what is wrong?

Expectation: Lee's slides: it is approximate, h cannot go to 0, it takes d + 1 evaluations; ours is
exact and fast, but has to be checked. A forward difference is least off at h ~ √ε, a central one at
h ~ ∛ε. A note says that kinks do no harm in practice: then hardly a ReLU should be at exactly 0.

Method: ``sin(5·exp(x))`` at 20 points and a tanh network's loss, for h from 1 to below ε; the error
is ‖found - true‖ / ‖true‖. Evaluations are counted. ``gt.check`` looks at a right formula, a wrong
one and two kinks. ReLU networks learn to tell ten clouds apart, with slope 0 or 1 at exactly 0;
``blank``: one class is all zeros, and biases start at 0, so that ReLUs do meet it.

Limits: smooth functions, small networks. What ``gt.check`` does not sample it can miss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import gradtrace as gt
from experiments import lab

ALONE, ROWS = True, ("checks", "checks-kinks")  # it measures time
SIZES = [10, 30, 100, 300, 1000, 3000, 10_000, 30_000]
SETTINGS = {
    "full": {"width": 16, "seeds": 5, "sizes": SIZES, "nets": 10, "updates": 300},
    "quick": {"width": 4, "seeds": 2, "sizes": SIZES[:5], "nets": 2, "updates": 100},
    "small": {"width": 2, "seeds": 1, "sizes": SIZES[:1], "nets": 2, "updates": 10},
}
ORDER = {"forward": 1, "central": 2}  # the power of h in what is cut off
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}
DECADES = {"float32": 9, "float64": 17}  # so far down goes h, four steps each
COSTS = "d", "forward", "analytic", "check"
CURVES = "precision", "scheme", "U-shaped", "best h", "theory", "error", "theory", "backward's"
KINKS = "network", "ReLUs", "at 0", "in updates", "same loss", "loss, slope 0", "slope 1 less that"
KINDS = "float32", "bfloat16"
Function = Callable[[Tensor], Tensor]


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """A curve for each function, precision, scheme and seed; sizes; formulas; ReLU networks."""
    found: list[lab.Cell] = [{"size": size} for size in settings["sizes"]]
    for seed in range(settings["seeds"]):
        rest = {"seed": seed, "width": settings["width"]}
        for of, kind, how in product(("wave", "network"), EPSILON, ORDER):
            found.append({"of": of, "type": kind, "scheme": how, **rest})
        found += [{"formula": name, "seed": seed} for name in FORMULAS]
    nets = product(KINDS, (0, 1), (0, 1), range(settings["nets"]), [settings["updates"]])
    return found + [dict(zip(("kinks", "blank", "slope", "seed", "updates"), x)) for x in nets]


def measure(cell: lab.Cell) -> lab.Row:
    """One part."""
    parts = {"of": differences, "formula": formulas, "size": costs, "kinks": kinks}
    return next(part for name, part in parts.items() if name in cell)(cell)


def analytic(function: Function, at: Tensor) -> Tensor:
    """One evaluation, and one backward pass of ours."""
    leaf = at.clone().requires_grad_()
    return gt.backward(function(leaf), names={"x": leaf})["x"]


@torch.no_grad()
def numerical(function: Function, at: Tensor, step: float, scheme: str) -> Tensor:
    """``(f(x + h eᵢ) - f(x)) / h`` or ``(f(x + h eᵢ) - f(x - h eᵢ)) / 2h``, for each i."""
    moved, found = at.clone(), torch.empty_like(at)
    here = function(at) if scheme == "forward" else None
    for i, x in enumerate(at):
        moved[i] = x + step
        above, moved[i] = function(moved), x - step
        found[i] = (above - (function(moved) if here is None else here)) / (step * ORDER[scheme])
        moved[i] = x
    return found


def differences(cell: lab.Cell) -> lab.Row:
    """The error over h, and that of our own gradient in this precision."""
    kind, rest = getattr(torch, cell["type"]), (cell["of"], cell["width"], cell["seed"])
    (function, at), (exact, x) = problem(*rest, kind), problem(*rest, torch.float64)
    true = 5 * x.exp() * torch.cos(5 * x.exp()) if cell["of"] == "wave" else analytic(exact, x)
    steps = [10 ** (-k / 4) for k in range(4 * DECADES[cell["type"]] + 1)]
    found = [*(numerical(function, at, h, cell["scheme"]) for h in steps), analytic(function, at)]
    *errors, ours = [float((x.double() - true).norm() / true.norm()) for x in found]
    return {"steps": steps, "errors": errors, "analytic": ours}


def problem(of: str, width: int, seed: int, kind: torch.dtype) -> tuple[Function, Tensor]:
    """A function and a point, which is of float32, so that both precisions have the same."""
    random = torch.Generator().manual_seed(seed)
    if of == "wave":
        at = 2 * torch.rand(20, generator=random).to(kind) - 1
        return lambda x: torch.sin(5 * x.exp()).sum(), at
    shapes = [(width, 4), (width,), (width, width), (width,), (1, width), (1,)]
    sizes, (x, y) = [*map(math.prod, shapes)], torch.randn(2, 8, 4, generator=random).to(kind)

    def loss(vector: Tensor) -> Tensor:
        w = [part.view(shape) for part, shape in zip(torch.split(vector, sizes), shapes)]
        h = torch.tanh(torch.tanh(x @ w[0].T + w[1]) @ w[2].T / 4 + w[3])
        return mse_loss(h @ w[4].T / 4 + w[5], y[:, :1])

    return loss, torch.randn(sum(sizes), generator=random).to(kind)


FORMULAS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "right": ("ok", lambda w, at: w.tanh()),
    "wrong": ("wrong", lambda w, at: w.tanh().detach() * w / w.detach()),
    "kink": ("kink", lambda w, at: (w - at).relu()),  # looked at where it is
    "even kink": ("kink", lambda w, at: (w - at).abs()),
}


def formulas(cell: lab.Cell) -> lab.Row:
    """What ``gt.check`` says."""
    at, x = torch.randn(2, 6, generator=torch.Generator().manual_seed(cell["seed"])).double()
    model, (_, run) = nn.ParameterList([at.clone()]), FORMULAS[cell["formula"]]
    return {"verdict": gt.check(model, lambda model: run(model[0], at) @ x).rows[0].verdict}


def costs(cell: lab.Cell) -> lab.Row:
    """Evaluations and seconds for d parameters."""
    at, x = torch.randn(2, cell["size"], generator=torch.Generator().manual_seed(0)).double()
    calls, found = 0, {}

    def function(w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.tanh(w * x).square().mean()

    ways: dict[str, Callable[[], object]] = {
        "forward": lambda: numerical(function, at, 1.5e-8, "forward"),
        "analytic": lambda: analytic(function, at),
        "check": lambda: gt.check(nn.ParameterList([at.clone()]), lambda m: function(m[0])),
    }
    for name, work in [*ways.items()] * 2:  # what is imported for the first is not its cost
        calls, began = 0, perf_counter()
        work()
        found[name] = calls, perf_counter() - began
    return found


def kinks(cell: lab.Cell) -> lab.Row:
    """ReLUs at exactly 0 in training, and the held-out loss, with this slope there."""
    torch.manual_seed(cell["seed"])
    linears = [nn.Linear(a, b) for a, b in pairwise([16, 64, 64, 64, 10])]
    for layer in linears if cell["blank"] else ():
        nn.init.zeros_(layer.bias)
    layers, kind = nn.ModuleList(linears), getattr(torch, cell["kinks"])
    layers, clouds, zeros = layers.to(kind), torch.randn(10, 16), []

    def loss_of(count: int = 64) -> Tensor:
        y = torch.randint(10, (count,))
        x = ((clouds[y] + torch.randn(count, 16)) * (y >= cell["blank"])[:, None]).to(kind)
        for layer in linears[:-1]:
            z = layer(x)
            zeros.append(int((z == 0).sum()))
            x = torch.where(z >= 0 if cell["slope"] else z > 0, z, 0)
        return cross_entropy(layers[-1](x).float(), y)

    lab.train(layers, torch.optim.SGD(layers.parameters(), 0.1), [loss_of] * cell["updates"])
    seen, met = 64 * 64 * len(zeros), torch.tensor(zeros).view(-1, 3).any(1).sum().item()
    return {"elements": seen, "zeros": sum(zeros), "met": met, "loss": loss_of(2000).item()}


def kept(row: lab.Row) -> list[lab.Row]:
    """Rows of docs/experiments are as those of today."""
    return [row]


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Where curves are least, what gradients cost, what a check finds, and kinks in training."""
    curves = [_curve(rows, kind, scheme) for kind in EPSILON for scheme in ORDER]
    sizes, found = [row for row in rows if "size" in row], []
    dear = [[r["size"], *("{:,} in {:.2g} s".format(*r[way]) for way in COSTS[1:])] for r in sizes]
    for name, (wanted, _) in FORMULAS.items():
        some = [row["verdict"] for row in rows if row.get("formula") == name]
        found.append((name, f"{some.count(wanted)} of {len(some)}", ", ".join({*some})))
    return [
        ("Where differences are least off: geometric means of two functions", CURVES, curves),
        ("Evaluations of the loss for d parameters, and their time", COSTS, dear),
        ("What gt.check says", ("formula", "named as such", "said"), found),
        ("ReLUs at exactly 0", KINKS, [_kinks(rows, *way) for way in product(KINDS, (0, 1))]),
    ]


def _curve(rows: Sequence[lab.Row], kind: str, scheme: str) -> list[object]:
    some = [row for row in rows if (row.get("type"), row.get("scheme")) == (kind, scheme)]
    u = sum(10 * min(r["errors"]) < min(r["errors"][0], r["errors"][-1]) for r in some)
    least = [(row["seed"], *min(zip(row["errors"], row["steps"]))) for row in some]
    told, p = [], ORDER[scheme]
    for n, power in ((2, 1 / (p + 1)), (1, p / (p + 1))):  # where both errors meet, and their size
        seeds = {x[0]: [math.log(y[n]) for y in least if y[0] == x[0]] for x in least}
        value, low, high = map(math.exp, lab.interval([sum(x) / len(x) for x in seeds.values()]))
        told += [lab.said((value, low, high), ".0e"), f"{EPSILON[kind] ** power:.0e}"]
    return [kind, scheme, f"{u} of {len(some)}", *told, max(row["analytic"] for row in some)]


def _kinks(rows: Sequence[lab.Row], kind: str, blank: int) -> list[object]:
    some = [row for row in rows if (row.get("kinks"), row.get("blank")) == (kind, blank)]
    none, one = ([row for row in some if row["slope"] == slope] for slope in (0, 1))
    counts = (f"{sum(row[key] for row in none):,}" for key in ("elements", "zeros", "met"))
    more = [b["loss"] - a["loss"] for a, b in zip(none, one)]
    same, loss = f"{more.count(0.0)} of {len(more)}", lab.spoken([row["loss"] for row in none])
    apart = lab.said(lab.interval(more), ".2g")
    return [kind + ", blank" * blank, *counts, same, loss, apart]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """The error over h, of the first network."""
    some = [row for row in rows if row.get("of") == "network" and not row["seed"]]
    curves = {f"{r['scheme']}, {r['type'][5:]}": (r["steps"], r["errors"]) for r in some}
    what, axes = "Differences of a network's loss, by bits", {"xscale": "log", "yscale": "log"}
    lab.lines(path, what, "step h", "relative error", curves, **axes)
