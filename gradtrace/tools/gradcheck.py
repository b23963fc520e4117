"""Numerical gradient check: does autograd's gradient agree with finite differences of the loss?"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradtrace.errors import GradtraceError, NoGraph, Unsupported, printable
from gradtrace.io.strict_json import json_value
from gradtrace.io.table import Summarised, TextColumn, TextTable
from gradtrace.pytorch.wrapped_modules import named_parameters, refuse_lazy
from gradtrace.tools import tuning
from gradtrace.tools.loss_evaluator import LossEvaluator, LossFn, evaluating
from gradtrace.types import unravel

Progress = Callable[[int, int], None]
VERDICTS = ("unreached", "ok", "kink", "wrong")
"""Verdicts, from best to worst."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result for one parameter: how many elements were checked, and the worst of them.

    ``index`` is None if the worst is not an element but the slope along a direction of random
    signs over all elements that were not sampled.
    """

    name: str
    shape: tuple[int, ...]
    checked: int
    error: float
    index: tuple[int, ...] | None
    analytic: float
    numeric: float
    verdict: str

    @property
    def badness(self) -> tuple[int, float, str]:
        """Sort key: worse rows have larger ones."""
        return VERDICTS.index(self.verdict), self.error, self.name

    @property
    def place(self) -> str:
        """Where the worst element is; empty if none was checked."""
        others = f"{prod(self.shape) - self.checked:,} others"
        return "" if not self.checked else others if self.index is None else str([*self.index])

    def cells(self) -> tuple[str, ...]:
        """The row as texts."""
        total = prod(self.shape)
        numbers = (f"{self.error:.1e}", self.place, f"{self.analytic:.6g}", f"{self.numeric:.6g}")
        return (self.name, f"{self.checked:,}/{total:,}", *numbers, self.verdict)


@dataclass(frozen=True, slots=True)
class Check(Summarised):
    """The result of ``check``: one row for each parameter, the worst first."""

    rows: tuple[Row, ...]
    loss: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether no gradient is wrong; a kink has no derivative to be wrong about."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[str, ...]:
        """The parameters whose gradient is wrong."""
        return tuple(row.name for row in self.rows if row.verdict == "wrong")

    @property
    def verdict(self) -> str:
        """One sentence."""
        count = sum(row.checked for row in self.rows)
        if self.wrong:
            return f"wrong gradient: {', '.join(self.wrong)}"
        kinks = sum(row.verdict == "kink" for row in self.rows)
        note = f"; {kinks:,} at a point without a derivative" if kinks else ""
        return f"gradients agree: {count:,} elements of {len(self.rows):,} parameters{note}"

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON, which has no NaN: non-finite numbers are strings."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "loss": self.loss,
            "tolerance": self.tolerance,
            "rows": [
                {key: json_value(x) if isinstance(x, float) else x for key, x in row.items()}
                for row in map(asdict, self.rows)
            ],
        }

    def table(self) -> TextTable:
        """The rows as values, with the verdict below."""
        columns = (
            TextColumn("parameter"),
            TextColumn("checked", "count"),
            TextColumn("elements", "count"),
            TextColumn("error", "number"),
            TextColumn("worst at"),
            TextColumn("analytic", "number"),
            TextColumn("numeric", "number"),
            TextColumn("verdict"),
        )
        rows = tuple(
            (r.name, r.checked, prod(r.shape), r.error, r.place, r.analytic, r.numeric, r.verdict)
            for r in self.rows
        )
        return TextTable("Gradient check", columns, rows, (self.verdict,))

    def lines(self) -> list[tuple[str, ...]]:
        """The rows as texts, after a header; numbers with enough digits to compare them."""
        header = ("parameter", "checked", "error", "worst at", "analytic", "numeric", "verdict")
        return [header, *(row.cells() for row in self.rows)]

    def __str__(self) -> str:
        table = [tuple(map(printable, cells)) for cells in self.lines()]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
        return "\n".join([*lines, printable(self.verdict)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def check(
    loss_fn: LossFn,
    model: nn.Module,
    *,
    sample: int | None = None,
    seed: int = 0,
    tolerance: float = 1e-4,
    progress: Progress | None = None,
) -> Check:
    """Compare the gradient of each parameter with finite differences of the loss.

    For an element x with step h = ε^(1/3) · max(|x|, 1), all in float64::

        numeric  = (f(x + h) - f(x - h)) / 2h
        error    = |analytic - numeric| / max(|analytic|, |numeric|, noise / tolerance)
        noise    = 10 σ / h        σ: the rounding error of f, measured by second differences

    An error above ``tolerance`` is checked again, with 4h and h extrapolated to 0 and with h/16 and
    h/256. If it vanishes it was due to curvature, or a kink nearby; if the slopes to the left and
    to the right differ, or the estimates do not converge, the point has no derivative ("kink");
    otherwise the gradient is wrong.

    ``loss_fn`` is called some hundred times, each time with the same random numbers and the same
    buffers, so dropout and batch norm are checked as they are in training; float32 tensors that it
    uses are converted to float64. Of a large parameter some elements are checked: the one with the
    largest gradient, and random ones; and the slope along random signs over all the others.
    Afterwards the model is as before.

    Args:
        loss_fn: ``loss_fn(model)``, or ``loss_fn()``, returns the scalar loss.
        model: The model; afterwards it is as before.
        sample: How many elements of a parameter; by default 64, fewer if there are many parameters.
        seed: Of the random numbers in ``loss_fn``, and of the sample.
        tolerance: The largest error that is not looked at again.
        progress: Called with what is done so far, ``progress(done, total)``.

    Returns:
        A table of parameters; ``ok`` and ``verdict`` say what came out.

    >>> import torch
    >>> from gradtrace import check
    >>> model, x = torch.nn.Linear(3, 1), torch.ones(4, 3)
    >>> result = check(lambda model: model(x).tanh().sum(), model)
    >>> result.ok, result.verdict
    (True, 'gradients agree: 4 elements of 2 parameters')
    """
    _refuse(loss_fn, model, sample, tolerance)
    names: dict[nn.Parameter, str] = {}
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            names.setdefault(parameter, name)
    if not names:
        raise NoGraph("no parameter of the model requires grad, so there is nothing to check")
    with evaluating(loss_fn, model, seed) as evaluator:
        return _Inspection(evaluator, names, tolerance).run(sample, seed, progress)


def _refuse(loss_fn: object, model: object, sample: int | None, tolerance: float) -> None:
    """Raise an error for invalid arguments, before the model is modified."""
    if not isinstance(model, nn.Module):
        swapped = "; the order is check(loss_fn, model)" if isinstance(loss_fn, nn.Module) else ""
        raise GradtraceError(f"check takes a torch.nn.Module, got {type(model).__name__}{swapped}")
    if not callable(loss_fn):
        raise GradtraceError(
            f"loss_fn must be a function of the model that returns the loss, got "
            f"{type(loss_fn).__name__}; write lambda model: ... so that it can be evaluated again"
        )
    if sample is not None and sample < 1:
        raise GradtraceError(f"sample is the number of elements to check, at least 1, not {sample}")
    if not 0 < tolerance < 1:
        raise GradtraceError(f"tolerance is a relative error between 0 and 1, not {tolerance}")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise Unsupported("a scripted model keeps its parameters to itself; check it unscripted")
    for name, parameter in model.named_parameters():
        refuse_lazy(name, parameter)
        if parameter.is_meta:
            raise Unsupported(
                f"parameter {name} is on the meta device, where tensors have shapes and no numbers;"
                " give it numbers (model.to_empty, load_state_dict) or remove it"
            )
        if parameter.is_complex():
            raise Unsupported(
                f"parameter {name} is complex; differences need real numbers. Keep its real and "
                "imaginary parts as a real parameter: torch.view_as_complex(parts)"
            )


# Judging -----------------------------------------------------------------------------------------


class Probe(NamedTuple):
    """A direction in one parameter: ``signs`` at the elements ``at``, 0 elsewhere."""

    parameter: nn.Parameter
    at: Tensor
    signs: Tensor
    place: tuple[int, ...] | None  # the index of a single element
    analytic: float  # the slope, by autograd


class Slopes(NamedTuple):
    """The slope at a point from differences of step h."""

    step: float
    central: float
    gap: float  # |slope to the right - slope to the left|: h·f'' where f is smooth

    def extrapolated(self, coarse: Slopes) -> Slopes:
        """Richardson extrapolation to step 0, without c·h²: ``(q² n(h) - n(qh)) / (q² - 1)``."""
        square = (coarse.step / self.step) ** 2
        return self._replace(central=(square * self.central - coarse.central) / (square - 1))


class _Inspection:
    """One check: computes the gradient once, then compares the slopes along every probe."""

    def __init__(
        self, evaluator: LossEvaluator, names: dict[nn.Parameter, str], tolerance: float
    ) -> None:
        self.evaluator = evaluator
        self.names = names
        self.tolerance = tolerance
        self.loss, self.gradients = evaluator.gradients(list(names))
        self.noise = evaluator.noise(list(names), self.loss)

    def run(self, sample: int | None, seed: int, progress: Progress | None) -> Check:
        """Compare the slopes along all probes."""
        share = max(1, tuning.TOTAL_ELEMENTS // len(self.names))
        sample = sample or min(tuning.SAMPLE_ELEMENTS, share)
        generator = torch.Generator().manual_seed(seed)
        plan = {p: _probes(p, g, sample, generator) for p, g in self.gradients.items()}
        total, done, rows = sum(map(len, plan.values())), 0, []
        for parameter, probes in plan.items():
            found = []
            for probe in probes:
                found.append(self.compare(probe))
                done += 1
                if progress:
                    progress(done, total)
            rows.append(self.worst(parameter, found))
        rows.sort(key=lambda row: row.badness, reverse=True)
        return Check(tuple(rows), self.loss, self.tolerance)

    def worst(self, parameter: nn.Parameter, found: list[Row]) -> Row:
        """The worst of a parameter's comparisons, with the number of elements compared."""
        if not found:  # a parameter without elements
            shape = tuple(parameter.shape)
            return Row(self.names[parameter], shape, 0, 0.0, None, 0.0, 0.0, "unreached")
        row = max(found, key=lambda row: row.badness)
        if row.verdict == "ok" and self.gradients[parameter] is None:
            row = replace(row, verdict="unreached")
        return replace(row, checked=sum(each.checked for each in found))

    def compare(self, probe: Probe) -> Row:
        """Compare the slope along a probe with the gradient; if it is off, by other steps too.

        Smaller steps are tried as long as rounding noise is small against the error found.
        """
        first = before = last = self.slopes(probe, 1.0)
        found = self.row(probe, first)
        if found.verdict == "ok":
            return found
        coarse = self.slopes(probe, tuning.COARSER_STEP)
        closer = self.row(probe, first.extrapolated(coarse))
        if closer.verdict == "ok":
            return closer
        off = abs(probe.analytic - first.central)
        for multiple in tuning.FINER_STEPS:
            finer = self.slopes(probe, multiple)
            if self.noise / finer.step > off / tuning.NOISE_DEVIATIONS:
                break
            closer = self.row(probe, finer)
            if closer.verdict == "ok":
                return closer
            before, last = last, finer
        if isfinite(probe.analytic) and self.unreliable(probe.analytic, before, last):
            return replace(found, verdict="kink")
        return found

    def row(self, probe: Probe, slopes: Slopes) -> Row:
        """``error = |a - n| / max(|a|, |n|, noise / tolerance)``."""
        analytic, numeric = probe.analytic, slopes.central
        floor = self.noise / slopes.step / self.tolerance
        off = abs(analytic - numeric)
        scale = max(abs(analytic), abs(numeric), floor)
        error = inf if not isfinite(off) else off / scale if off else 0.0
        name, shape = self.names[probe.parameter], tuple(probe.parameter.shape)
        verdict = "ok" if error <= self.tolerance else "wrong"
        checked = int(probe.place is not None)
        return Row(name, shape, checked, error, probe.place, analytic, numeric, verdict)

    def unreliable(self, analytic: float, before: Slopes, last: Slopes) -> bool:
        """Whether the finite differences may be wrong by as much as the error they show.

        Where f is smooth, the gap between the one-sided slopes and the change from one step size to
        the next vanish with h; at a kink the gap remains.
        """
        doubt = abs(last.central - before.central) + last.gap / 2 - self.noise / last.step
        return not doubt <= 0.1 * abs(analytic - last.central)  # NaN: outside the domain of f

    def slopes(self, probe: Probe, multiple: float) -> Slopes:
        """The slopes from two evaluations, one step to either side."""
        there = self.evaluator.wide[probe.parameter].view(-1)[probe.at]
        step = tuning.RELATIVE_STEP * multiple * max(float(there.abs().amax()), 1.0)
        by = probe.signs * step
        right = self.evaluator.value({probe.parameter: (probe.at, by)})
        left = self.evaluator.value({probe.parameter: (probe.at, -by)})
        return Slopes(step, (right - left) / (2 * step), abs(right - 2 * self.loss + left) / step)


def _probes(
    parameter: nn.Parameter, gradient: Tensor | None, sample: int, generator: torch.Generator
) -> list[Probe]:
    """Probes of the element with the largest gradient, of random others, and of random signs on
    the rest.
    """
    order = torch.randperm(parameter.numel(), generator=generator)
    if gradient is not None and parameter.numel():
        size = torch.nan_to_num(gradient.reshape(-1).abs(), nan=inf, posinf=inf)
        largest = int(size.argmax())
        order = torch.cat([torch.tensor([largest]), order[order != largest]])

    def probe(at: Tensor, signs: Tensor, place: tuple[int, ...] | None) -> Probe:
        at, signs = at.to(parameter.device), signs.to(parameter.device)
        slope = 0.0 if gradient is None else float((gradient.reshape(-1)[at] * signs).sum())
        return Probe(parameter, at, signs, place, slope)

    one = torch.ones(1, dtype=torch.float64)
    found = [
        probe(at.reshape(1), one, unravel(int(at), tuple(parameter.shape))) for at in order[:sample]
    ]
    rest = order[sample:]
    if len(rest):
        signs = torch.randint(2, rest.shape, generator=generator).double() * 2 - 1
        found.append(probe(rest, signs, None))
    return found
