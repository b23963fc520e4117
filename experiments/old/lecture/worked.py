"""The worked examples of the slides, the lecture and the note, with their numbers.

Of the pictures only the text is left. Where a number is in it, it is reproduced: the slides'
``(x+y)·z`` has the gradients 2, 2, 8, so z = 2 and x + y = 8 (here 3 + 5); their differences of
losses give -2.5, 0.6 and 0; the lecture's ``x²`` at 3 is 9 with slope 6. The slides' sigmoid neuron
has lost its numbers; here it has those that this example is known by (``w = (2, -3, -3)``,
``x = (-1, -2)``), and the derivative by hand. The rest are formulas, compared at some points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtrace.experiments.harness.findings import Cell, Findings, Result, Row, Table, Tick
from gradtrace.experiments.lecture import program
from gradtrace.experiments.lecture.descent import Point, gradient

Line: TypeAlias = tuple[str, str, float, float]
"""Whether the source has a number or a formula, what it is, our number, and the source's."""

SOURCES = ("slides", "lecture", "note")


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each source."""
    return [{"source": source, "tolerance": settings["tolerance"]} for source in SOURCES]


def measure(cell: Cell, tick: Tick) -> Result:
    """All examples of a source."""
    lines = {"slides": slides, "lecture": lecture, "note": note}[cell["source"]]()
    return {"lines": [list(line) for line in lines]}


def _at(**values: float) -> Point:
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in values.items()}


def slides() -> list[Line]:
    """Of Lee's slides, "Backpropagation"."""
    value, found = gradient(lambda w: (w["x"] + w["y"]) * w["z"], _at(x=3, y=5, z=2))
    lines: list[Line] = [("formula", "(x+y)·z", value, 16.0)]
    for name, wanted in zip("xyz", (2.0, 2.0, 8.0)):
        lines.append(("number", f"∂(x+y)·z/∂{name}", float(found[name]), wanted))
    return lines + _neuron() + _waves() + _differences()


def _neuron() -> list[Line]:
    """``f = 1 / (1 + exp(-(w0·x0 + w1·x1 + w2)))``: ``∂f/∂w0 = f (1 - f) x0``, and so on."""
    at = _at(w0=2, x0=-1, w1=-3, x1=-2, w2=-3)

    def neuron(w: Point) -> Tensor:
        return 1 / (1 + torch.exp(-(w["w0"] * w["x0"] + w["w1"] * w["x1"] + w["w2"])))

    value, found = gradient(neuron, at)
    slope = value * (1 - value)
    hand = {"w0": -1, "x0": 2, "w1": -2, "x1": -3, "w2": 1}
    wanted = 1 / (1 + math.exp(-1))
    return [("formula", "sigmoid neuron", value, wanted)] + [
        ("formula", f"∂ neuron/∂{name}", float(found[name]), slope * by)
        for name, by in hand.items()
    ]


def _waves() -> list[Line]:
    """``g = sin(5·exp(x))`` has ``g' = 5·cos(5·exp(x))·exp(x)``."""
    lines: list[Line] = []
    for x in (-1.0, 0.0, 0.5):
        _, found = gradient(lambda w: torch.sin(5 * torch.exp(w["x"])), _at(x=x))
        wanted = 5 * math.cos(5 * math.exp(x)) * math.exp(x)
        lines.append(("formula", f"sin(5·exp(x))' at {x:g}", float(found["x"]), wanted))
    return lines


def _differences() -> list[Line]:
    """The slides' losses and step; five digits are as many as they print."""
    loss, step = 1.25347, 0.0001
    moved = ((1.25322, -2.5), (1.25353, 0.6), (1.25347, 0.0))
    return [
        ("number", f"({x} - {loss}) / {step}", round((x - loss) / step, 5), wanted)
        for x, wanted in moved
    ]


def lecture() -> list[Line]:
    """Of the lecture, "Gradient Computation in Abstract Neural Networks"."""
    value, found = gradient(lambda w: w["x"] ** 2, _at(x=3))
    lines: list[Line] = [
        ("number", "x² at 3", value, 9.0),
        ("number", "slope of x² at 3", float(found["x"]), 6.0),
    ]
    formulas: list[tuple[str, Callable[[Tensor], Tensor], Callable[[float], float]]] = [
        ("sin x", torch.sin, math.cos),
        ("cos x", torch.cos, lambda x: -math.sin(x)),
        (
            "sin(cos x)",
            lambda x: torch.sin(torch.cos(x)),
            lambda x: -math.cos(math.cos(x)) * math.sin(x),
        ),
        (
            "exp(cos x)",
            lambda x: torch.exp(torch.cos(x)),
            lambda x: -math.exp(math.cos(x)) * math.sin(x),
        ),
    ]
    for name, run, slope in formulas:
        _, found = gradient(lambda w, run=run: run(w["x"]), _at(x=0.7))  # type: ignore[misc]
        lines.append(("formula", f"slope of {name} at 0.7", float(found["x"]), slope(0.7)))
    return lines + _training() + _transfer()


def _training() -> list[Line]:
    """``∂Loss/∂Wₖ = -2/N Σ (tᵢ - R) ∂R/∂Wₖ``: our gradient of the loss, and the lecture's loop over
    samples, which adds up products of error and gradient and scales them in the end.
    """
    data, w = program.samples(8, 0), program.weights((0.5, 0.4, -0.3))
    _, ours = gradient(program.loss(data), w)
    total = dict.fromkeys(w, 0.0)
    for p, q, t in zip(*data):
        value, slope = gradient(lambda w, p=p, q=q: program.run(w, p, q), w)  # type: ignore[misc]
        for name in total:
            total[name] += (float(t) - value) * float(slope[name])
    scale = -2 / len(data.p)
    return [("formula", f"∂Loss/∂{name}", float(ours[name]), scale * total[name]) for name in w]


def _transfer() -> list[Line]:
    """A linear function: ``v_in = Wᵀ v_out`` and ``∂/∂W = v_out ⊗ x``."""
    return _linear("W[{},{}]", "x[{}]", 3, 2, 0)


def note() -> list[Line]:
    """Of the note, "Training Neural Networks": ``∂ℓ/∂w_ji = ∂ℓ/∂z_j · a_i``,
    ``∂ℓ/∂a_i = Σ_j ∂ℓ/∂z_j · w_ji``, and ``∂ℓ/∂z_i = ∂ℓ/∂a_i · σ'(z_i)``.
    """
    lines = _linear("w[{},{}]", "a[{}]", 2, 3, 1)
    z = torch.tensor([-1.0, 0.3, 2.0], dtype=torch.float64)
    _, found = gradient(lambda w: (w["z"].sigmoid() * torch.arange(1, 4)).sum(), {"z": z})
    for i, at in enumerate(z.tolist()):
        s = 1 / (1 + math.exp(-at))
        lines.append(("formula", f"∂ℓ/∂z[{i}]", float(found["z"][i]), (i + 1) * s * (1 - s)))
    return lines


def _linear(weight: str, input_: str, rows: int, columns: int, seed: int) -> list[Line]:
    """``ℓ = v · (W x)`` in its elements."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    x = torch.randn(columns, dtype=torch.float64, generator=generator)
    v = torch.randn(rows, dtype=torch.float64, generator=generator)
    _, found = gradient(lambda w: v @ (w["W"] @ w["x"]), {"W": matrix, "x": x})
    lines: list[Line] = [
        (
            "formula",
            f"∂ℓ/∂{weight.format(j, i)}",
            float(found["W"][j, i]),
            float(v[j]) * float(x[i]),
        )
        for j in range(rows)
        for i in range(columns)
    ]
    for i in range(columns):
        wanted = math.fsum(float(v[j]) * float(matrix[j, i]) for j in range(rows))
        lines.append(("formula", f"∂ℓ/∂{input_.format(i)}", float(found["x"][i]), wanted))
    return lines


READ_SO = (
    "The slides' losses have five digits, which at h = 0.0001 tell a slope to ±0.1 only, so their "
    "third slope, 0, need not be 0. The lecture's ∂R/∂W1 = b·f1'(c)·∂f3/∂E(e) has to be read as "
    "∂f3/∂E(e, f): with f3 = e·f it is f, and does not depend on e."
)


def conclude(rows: Sequence[Row]) -> Findings:
    """How many numbers are those of the source."""
    if not rows:
        return Findings("")
    lines = [
        (row.cell["source"], *line)
        for row in sorted(rows, key=lambda row: SOURCES.index(row.cell["source"]))
        for line in row.result["lines"]
    ]
    off = [abs(ours - theirs) for *_, ours, theirs in lines]
    wrong = [line[2] for line, d in zip(lines, off) if d > rows[0].cell["tolerance"]]
    given = sum(line[1] == "number" for line in lines)
    sentence = (
        f"Worked examples: {len(lines) - len(wrong)} of {len(lines)} numbers and formulas in "
        f"slides, lecture and note come out as printed, to {max(off):.0e}"
        + (f"; not: {', '.join(wrong)}." if wrong else ".")
    )
    columns = ("source", "has a", "what", "ours", "source's")
    table = Table("Worked examples", columns, tuple(lines), READ_SO)
    facts = {"numbers": given, "values": len(lines), "wrong": wrong, "off": max(off)}
    return Findings(sentence, (table,), (), facts)
