"""``check``: does autograd's gradient agree with finite differences of the loss?

The loss is evaluated in double precision on the user's own model, so that closures over it, tied
weights and custom functions are checked as training uses them. None of its tensors is modified:
meanwhile others stand in for its parameters and buffers, and a mode widens every other tensor, such
as the batch, where the loss uses it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from gradtrace.autodiff.nodes import refuse_complex, root_of
from gradtrace.errors import GradtraceError, NoGraph, NonFinite, NotScalar, Unsupported, reason_of
from gradtrace.pytorch.global_switches import DOUBLE, eager
from gradtrace.pytorch.wrapped_modules import named_parameters, refuse_lazy
from gradtrace.table import Column, Table
from gradtrace.training.state import seed_all, undisturbed
from gradtrace.types import unravel

LossFn = Callable[..., Tensor]
Values = Mapping[Tensor, Tensor]
"""A point: the values of parameters and buffers, in double precision."""

EPSILON = sys.float_info.epsilon
STEPS = tuple(EPSILON ** (1 / 3) / finer for finer in (1, 16, 256))
"""Steps of differences: the first balances the truncation error h² and the rounding error ε/h, the
others tell curvature, and kinks nearby, from a wrong gradient."""

NEARBY = 1e-3  # how far away, relative to an element, is looked whether the gradient is at a kink
MOST_OF_EACH, MOST_OF_ALL = 64, 1024  # elements that are checked, of a parameter and of all
DEVIATIONS = 10.0  # standard deviations of rounding noise that a difference may be off by
UNREACHED, OK, KINK, WRONG = range(4)
VERDICTS = ("unreached", "ok", "kink", "wrong")
KINDS: Any = {"checked": "count", "elements": "count", "worst at": "text", "verdict": "text"}
NAMES = ("checked", "elements", "error", "worst at", "analytic", "numeric", "verdict")
COLUMNS = (Column("parameter"), *(Column(name, KINDS.get(name, "number")) for name in NAMES))


@dataclass(frozen=True, repr=False)
class Check(Table):
    """The result of ``check``: one row for each parameter, the worst first."""

    @property
    def wrong(self) -> tuple[str, ...]:
        """The parameters whose gradient is wrong."""
        return tuple(row.parameter for row in self if row.verdict == "wrong")

    @property
    def ok(self) -> bool:
        """Whether no gradient is wrong; a kink has no derivative to be wrong about."""
        return not self.wrong

    @property
    def verdict(self) -> str:
        """One sentence."""
        return self.notes[0]


def check(
    model: nn.Module,
    loss_fn: LossFn,
    *,
    sample: int | None = None,
    seed: int = 0,
    tolerance: float = 1e-4,
) -> Check:
    """Compare the gradient of each parameter with finite differences of the loss.

    For an element x with step h = ε^(1/3) · max(|x|, 1), all in float64::

        numeric  = (f(x + h) - f(x - h)) / 2h
        error    = |analytic - numeric| / max(|analytic|, |numeric|, noise / tolerance)
        noise    = 10 σ / h        σ: the rounding error of f, measured by second differences

    An error above ``tolerance`` is looked at with smaller steps; if it vanishes it was due to
    curvature, or a kink nearby. If the gradient is right at points a thousandth to both sides, this
    one has no derivative ("kink": a relu at exactly 0, a tie). Otherwise it is wrong.

    ``loss_fn`` is called some hundred times, each time with the same random numbers and buffers, so
    dropout and batch norm are checked as they are in training. Of a large parameter some elements
    are checked: the one with the largest gradient, and random ones; and the slope along random
    signs over all the others. Parameters, gradients, buffers, modes and random generators are left
    as before.

    Args:
        model: The model.
        loss_fn: ``loss_fn(model)``, or ``loss_fn()``, returns the scalar loss.
        sample: How many elements of a parameter; by default 64, fewer if there are many parameters.
        seed: Of the random numbers in ``loss_fn``, and of the sample.
        tolerance: The largest error that is not looked at again.

    Returns:
        A table of parameters; ``ok``, ``wrong`` and ``verdict`` say what came out.

    >>> import torch, gradtrace as gt
    >>> model, x = torch.nn.Linear(3, 1), torch.ones(4, 3)
    >>> result = gt.check(model, lambda model: model(x).tanh().sum())
    >>> result.ok, result.verdict
    (True, 'gradients agree: 4 elements of 2 parameters')
    """
    _refuse(model, loss_fn, sample, tolerance)
    names: dict[nn.Parameter, str] = {}
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            names.setdefault(parameter, name)
    if not names:
        raise NoGraph("no parameter of the model requires grad, so there is nothing to check")
    with undisturbed(model), DOUBLE(), eager(), torch.enable_grad():
        loss = _WideLoss(model, loss_fn, seed)
        return _Comparison(loss, names, tolerance, seed).table(sample)


def _refuse(model: object, loss_fn: object, sample: int | None, tolerance: float) -> None:
    """Raise an error for invalid arguments, before anything is called."""
    if not isinstance(model, nn.Module):
        swapped = "; the order is check(model, loss_fn)" if isinstance(loss_fn, nn.Module) else ""
        raise GradtraceError(f"check takes a torch.nn.Module, got {type(model).__name__}{swapped}")
    if not callable(loss_fn):
        kind = type(loss_fn).__name__
        raise GradtraceError(f"loss_fn is a {kind}; pass a function: lambda model: ...")
    if sample is not None and sample < 1:
        raise GradtraceError(f"sample is the number of elements to check, at least 1, not {sample}")
    if not 0 < tolerance < 1:
        raise GradtraceError(f"tolerance is a relative error between 0 and 1, not {tolerance}")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise Unsupported("a scripted model keeps its parameters to itself; check it unscripted")
    for name, parameter in model.named_parameters():
        refuse_lazy(name, parameter)
        if parameter.is_meta:
            raise Unsupported(f"{name} is on the meta device, without numbers; load the weights")
        if parameter.is_complex():
            raise Unsupported(
                f"{name} is complex; differences need real numbers. Keep its real and imaginary "
                "parts as a real parameter: torch.view_as_complex(parts)"
            )


def takes_model(loss_fn: LossFn) -> bool:
    """``lambda model: ...`` takes the model; ``lambda: ...`` and ``lambda x=x: ...`` do not."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return True  # written in C: no signature
    free = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(free) > 1:
        raise GradtraceError(
            f"loss_fn takes the model alone, or nothing, but asks for {', '.join(free)}; bind the "
            "others: lambda model: loss_fn(model, batch)"
        )
    return bool(free)


# Comparing ---------------------------------------------------------------------------------------


class _Point(NamedTuple):
    """A point, with the loss and its gradient there."""

    values: Values
    loss: float
    gradients: Mapping[nn.Parameter, Tensor | None]


class _Probe(NamedTuple):
    """A direction in one parameter: ``signs`` at the elements ``at``, 0 elsewhere."""

    parameter: nn.Parameter
    at: Tensor
    signs: Tensor
    place: str

    def moved(self, values: Values, by: float) -> Values:
        """The values with this parameter moved along the direction."""
        new = values[self.parameter].clone()
        new.view(-1).index_add_(0, self.at, by * self.signs)
        return {**values, self.parameter: new}


class _Found(NamedTuple):
    """What was found along a probe; ``max`` of several is the worst."""

    verdict: int
    error: float = 0.0
    analytic: float = 0.0
    numeric: float = 0.0
    place: str = ""


class _Comparison:
    """Compares the slopes along every probe with the gradient, which is computed once."""

    def __init__(
        self, loss: _WideLoss, names: dict[nn.Parameter, str], tolerance: float, seed: int
    ) -> None:
        self.loss, self.names, self.tolerance = loss, names, tolerance
        self.random = torch.Generator().manual_seed(seed)
        self.here = _Point(loss.values, *loss.gradients(loss.values, [*names]))
        if not isfinite(self.here.loss):
            raise NonFinite(f"the loss is {self.here.loss}, so there is no gradient to check")
        if all(gradient is None for gradient in self.here.gradients.values()):
            raise NoGraph(
                "the loss depends on no parameter of the model that requires grad; is it computed "
                "from another model, or detached?"
            )
        self.noise = self._noise()
        self.nearby: list[_Point] = []  # made if they are needed

    def table(self, sample: int | None) -> Check:
        """The rows of all parameters."""
        sample = sample or min(MOST_OF_EACH, max(1, MOST_OF_ALL // len(self.names)))
        rows = list[tuple[Any, ...]]()
        for parameter, name in self.names.items():
            found = [self._compared(probe) for probe in self._probes(parameter, sample)]
            worst = max(found, default=_Found(UNREACHED))
            reached = worst.verdict != OK or self.here.gradients[parameter] is not None
            counts = min(sample, parameter.numel()), parameter.numel()
            numbers = worst.error, worst.place, worst.analytic, worst.numeric
            rows.append((name, *counts, *numbers, worst.verdict if reached else UNREACHED))
        rows.sort(key=lambda row: (row[-1], row[3], row[0]), reverse=True)
        made: Any = tuple((*row[:-1], VERDICTS[row[-1]]) for row in rows)
        about = {"loss": self.here.loss, "tolerance": self.tolerance}
        return Check("Gradient check", COLUMNS, made, (_sentence(made),), about)

    def _probes(self, parameter: nn.Parameter, sample: int) -> list[_Probe]:
        """Probes of the element with the largest gradient, of others, and of all the rest."""
        order = torch.randperm(parameter.numel(), generator=self.random, device="cpu")
        gradient = self.here.gradients[parameter]
        if gradient is not None and parameter.numel():
            size = torch.nan_to_num(gradient.abs(), nan=inf, posinf=inf)
            largest = size.argmax().cpu()
            order = torch.cat([largest[None], order[order != largest]])
        shape, one = tuple(parameter.shape), torch.ones(1, dtype=torch.float64, device="cpu")
        probes = [(at[None], one, str([*unravel(int(at), shape)])) for at in order[:sample]]
        rest = order[sample:]
        if len(rest):
            signs = (
                torch.randint(2, rest.shape, generator=self.random, device="cpu").double() * 2 - 1
            )
            probes.append((rest, signs, f"{len(rest):,} others"))
        device = parameter.device
        return [_Probe(parameter, at.to(device), s.to(device), place) for at, s, place in probes]

    def _compared(self, probe: _Probe) -> _Found:
        """What is found at the point; and where it is wrong there, what is found beside it."""
        found = self._at(probe, self.here)
        if found.verdict == OK or not isfinite(found.analytic):
            return found
        if not self.nearby:
            points = self._jittered(NEARBY)
            self.nearby = [_Point(x, *self.loss.gradients(x, [*self.names])) for x in points]
        inside = [point for point in self.nearby if isfinite(point.loss)]
        right = inside and all(self._at(probe, point).verdict == OK for point in inside)
        return found._replace(verdict=KINK) if right else found

    def _at(self, probe: _Probe, point: _Point) -> _Found:
        """``error = |a - n| / max(|a|, |n|, noise / tolerance)``, with smaller steps as long as it
        is too large and rounding noise small against it; of wrong ones, that of the first step.
        """
        gradient, found = point.gradients[probe.parameter], _Found(UNREACHED)
        analytic = 0.0 if gradient is None else float((gradient[probe.at] * probe.signs).sum())
        size = max(float(point.values[probe.parameter].view(-1)[probe.at].abs().amax()), 1.0)
        for step in (size * step for step in STEPS):
            noise = self.noise / step
            if found.verdict == WRONG and noise > abs(analytic - found.numeric) / DEVIATIONS:
                break
            right, left = (self.loss.value(probe.moved(point.values, by)) for by in (step, -step))
            numeric = (right - left) / (2 * step)
            off = abs(analytic - numeric)
            scale = max(abs(analytic), abs(numeric), noise / self.tolerance)
            error = inf if not isfinite(off) else off / scale if off else 0.0
            if error <= self.tolerance:
                return _Found(OK, error, analytic, numeric, probe.place)
            if found.verdict != WRONG:
                found = _Found(WRONG, error, analytic, numeric, probe.place)
        return found

    def _jittered(self, size: float) -> Iterator[Values]:
        """Two points: all elements moved by about this much, relative to them, and back."""
        here, moves = self.here.values, dict[nn.Parameter, Tensor]()
        for parameter in self.names:
            there = here[parameter]
            by = (
                torch.rand(there.shape, generator=self.random, device="cpu").to(there) + 0.5
            )  # to part ties
            signs = (
                torch.randint(2, there.shape, generator=self.random, device="cpu").to(there) * 2 - 1
            )
            moves[parameter] = size * by * signs * there.abs().clamp(min=1)
        for sign in (1, -1):
            yield {**here, **{p: here[p] + sign * by for p, by in moves.items()}}

    def _noise(self) -> float:
        """The rounding error of f, with a margin: ``σ² = mean of (f(x+δ) - 2f(x) + f(x-δ))² / 6``.

        δ is so small (64 units in the last place) that curvature vanishes from the second
        difference; what remains is the rounding of three evaluations.
        """
        loss, again = self.here.loss, self.loss.value(self.here.values)
        if not abs(again - loss) <= 1e-10 * abs(loss):
            raise GradtraceError(
                f"two evaluations of the loss at the same point give {loss!r} and {again!r}: "
                "loss_fn changes from call to call. Fix its batch (no next(iterator) inside), its "
                "random numbers (torch, random and numpy are reset) and any state it keeps"
            )
        ends = [map(self.loss.value, self._jittered(64 * EPSILON)) for _ in range(4)]
        squares = [(sum(pair) - 2 * loss) ** 2 / 6 for pair in ends]
        known = [square for square in squares if isfinite(square)]
        sigma = sqrt(sum(known) / len(known)) if known else 0.0
        return DEVIATIONS * max(sigma, EPSILON * abs(loss))


def _sentence(rows: Sequence[tuple[Any, ...]]) -> str:
    wrong = [row[0] for row in rows if row[-1] == "wrong"]
    if wrong:
        return f"wrong gradient: {', '.join(wrong)}"
    kinks = sum(row[-1] == "kink" for row in rows)
    note = f"; {kinks:,} at a point without a derivative" if kinks else ""
    count = sum(row[1] for row in rows)
    return f"gradients agree: {count:,} elements of {len(rows):,} parameters{note}"


# The loss in double precision --------------------------------------------------------------------

WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
WIDE |= dict.fromkeys((torch.complex32, torch.complex64), torch.complex128)
CASTS: dict[Any, Any] = dict.fromkeys((Tensor.half, Tensor.bfloat16, Tensor.float), Tensor.double)
_RUN_BACKWARD: Any = vars(torch.autograd)["_engine_run_backward"]


class _WideLoss:
    """Evaluates a loss again and again, with equal random numbers, buffers and modes."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, seed: int) -> None:
        self.loss_fn, self.seed = loss_fn, seed
        self.arguments = (model,) if takes_model(loss_fn) else ()
        tensors = (*model.parameters(), *model.buffers())
        self.values = {x: x.detach().to(WIDE.get(x.dtype, x.dtype)).contiguous() for x in tensors}
        self.modes = [(module, module.training) for module in model.modules()]
        tables: list[dict[str, Any]] = [
            t for m, _ in self.modes for t in (m._parameters, m._buffers)
        ]
        self.tables = [(table, dict(table)) for table in tables]

    def value(self, values: Values) -> float:
        """The loss at a point."""
        with self._at(values):
            return float(self._loss().detach())

    def gradients(
        self, values: Values, parameters: Sequence[nn.Parameter]
    ) -> tuple[float, dict[nn.Parameter, Tensor | None]]:
        """The loss at a point, and its gradient by autograd, flat.

        A parameter that a closure passes directly to a custom function is in the graph itself,
        though its value is that of its stand-in; the gradient is the sum of both.
        """
        with self._at(values) as stand_ins:
            loss = self._loss()
            root_of(loss)
            refuse_complex(loss)
            with torch._C.DisableTorchFunction():  # the tensors themselves, not their stand-ins
                edges = [get_gradient_edge(x) for p in parameters for x in (stand_ins[p], p)]
            # torch.autograd.grad would leave the mode, which recomputed checkpoints need, too.
            ones = (torch.ones_like(loss),)
            found = _RUN_BACKWARD((loss,), ones, False, False, tuple(edges), True)
        flat = [None if g is None else g.to_dense().double().reshape(-1) for g in found]
        pairs = zip(flat[::2], flat[1::2])
        sums = (a if b is None else b if a is None else a + b for a, b in pairs)
        return float(loss.detach()), dict(zip(parameters, sums))

    @contextmanager
    def _at(self, values: Values) -> Iterator[dict[Tensor, Tensor]]:
        """Within, the model has other tensors, with these values."""
        stand_ins = {tensor: _stand_in(tensor, value) for tensor, value in values.items()}
        seed_all(self.seed)
        try:
            for table, own in self.tables:
                table.update({k: stand_ins[x] for k, x in own.items() if x is not None})
            with _Double(stand_ins):
                yield stand_ins
        finally:
            for table, own in self.tables:
                table.clear()
                table.update(own)
            for module, training in self.modes:
                module.training = training

    def _loss(self) -> Tensor:
        """The loss; an error if it is none that can be checked."""
        try:
            loss = self.loss_fn(*self.arguments)
        except (RuntimeError, ValueError) as error:
            reason = reason_of(error)
            if not any(word in reason for word in ("dtype", "scalar type", "Double")):
                raise
            raise Unsupported(
                f"loss_fn does not run in float64, which the check needs: {reason}. Use "
                "the plain form of an operator that knows float32 only, or give it float64 inputs"
            ) from error
        if isinstance(loss, Tensor) and loss.numel() != 1:
            shape = tuple(loss.shape)
            raise NotScalar(f"the loss has shape {shape}; return its .sum() or .mean()")
        return loss


def _stand_in(tensor: Tensor, value: Tensor) -> Tensor:
    """A new tensor of the same kind (parameter or buffer) with this value."""
    if not isinstance(tensor, nn.Parameter):
        return value.clone().requires_grad_(tensor.requires_grad and tensor.is_leaf)
    parameter = nn.Parameter(value.clone(), tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


class _Double(TorchFunctionMode):
    """Within this mode, torch computes in double precision, whatever the dtype of its arguments.

    Each narrow tensor has one wide stand-in, so that in-place writes to it are seen later. The
    model's own tensors have one too, so that closures over them use it.
    """

    def __init__(self, stand_ins: Mapping[Tensor, Tensor]) -> None:
        super().__init__()
        # by id; the tensor is kept alive, so that its id stays unique
        self.wide = {id(x): (x, wide) for x, wide in stand_ins.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = {key: self.widen(value) for key, value in (kwargs or {}).items()}
        return CASTS.get(func, func)(*map(self.widen, args), **named)

    def widen(self, x: Any) -> Any:
        """The same argument in double precision."""
        if isinstance(x, Tensor):
            if id(x) not in self.wide and x.dtype in WIDE:
                with torch.enable_grad():  # connected, even if first used under no_grad
                    self.wide[id(x)] = (x, x.to(WIDE[x.dtype]))
            return self.wide[id(x)][1] if id(x) in self.wide else x
        if isinstance(x, torch.dtype):
            return WIDE.get(x, x)
        return type(x)(map(self.widen, x)) if type(x) in (list, tuple) else x
