"""``check``: does autograd's gradient agree with finite differences of the loss?

The loss is evaluated in double precision on the user's own model. None of its tensors is modified:
others stand in for its parameters and buffers, and a mode widens other tensors, as the batch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
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

Found = tuple[Any, ...]
"""A verdict, and the error, place, analytic and numeric slope of a row."""

EPSILON = torch.finfo(torch.float64).eps
STEPS = tuple(EPSILON ** (1 / 3) / finer for finer in (1, 16, 256))
"""The first balances truncation h² and rounding ε/h; others tell curvature, and kinks nearby."""

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
        noise    = 10 σ / h        σ: the rounding error of f, measured

    An error above ``tolerance`` that vanishes with smaller steps was due to curvature, or a kink
    nearby. If the gradient is right a thousandth to both sides, the point has no derivative
    ("kink": a relu at exactly 0, a tie). Otherwise it is wrong.

    ``loss_fn`` is called some hundred times with the same random numbers and buffers: dropout and
    batch norm are checked as in training. Of a large parameter some elements are checked, and the
    slope along random signs over all the others. Model and generators are left as before.

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
    named = [*named_parameters(model)][::-1]  # of several names the first
    names = {parameter: name for name, parameter in named if parameter.requires_grad}
    if not names:
        raise NoGraph("no parameter of the model requires grad, so there is nothing to check")
    sample = sample or min(MOST_OF_EACH, max(1, MOST_OF_ALL // len(names)))
    with DOUBLE(), eager(), torch.enable_grad():
        loss = _WideLoss(model, loss_fn, [*names], seed)
        comparison = _Comparison(loss, tolerance, seed)
        found = [(name, *comparison.row(parameter, sample)) for parameter, name in names.items()]
    found.sort(key=lambda row: (VERDICTS.index(row[-1]), row[3], row[0]), reverse=True)
    rows: Any = tuple(found)
    about = {"loss": comparison.here.loss, "tolerance": tolerance}
    return Check("Gradient check", COLUMNS, rows, (_sentence(rows),), about)


def _refuse(model: object, loss_fn: object, sample: int | None, tolerance: float) -> None:
    """Raise an error for invalid arguments, before anything is called."""
    if not isinstance(model, nn.Module) or not callable(loss_fn):
        kinds = f"{type(model).__name__}, {type(loss_fn).__name__}"
        raise GradtraceError(f"check(model, loss_fn) takes a module and a function, got ({kinds})")
    if (sample is not None and sample < 1) or not 0 < tolerance < 1:
        raise GradtraceError(f"sample is from 1 on, tolerance in (0, 1): {sample}, {tolerance}")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise Unsupported("a scripted model keeps its parameters to itself; check it unscripted")
    for name, parameter in model.named_parameters():
        refuse_lazy(name, parameter)
        if parameter.is_meta:
            raise Unsupported(f"{name} is on the meta device, without numbers; load the weights")
        if parameter.is_complex():
            raise Unsupported(f"{name} is complex: check torch.view_as_complex of a real parameter")


def takes_model(loss_fn: LossFn) -> bool:
    """``lambda model: ...`` takes the model; ``lambda: ...`` and ``lambda x=x: ...`` do not."""
    parameters = inspect.signature(loss_fn).parameters.values()
    return any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters)


def _sentence(rows: Sequence[tuple[Any, ...]]) -> str:
    wrong = [row[0] for row in rows if row[-1] == "wrong"]
    if wrong:
        return f"wrong gradient: {', '.join(wrong)}"
    kinks = sum(row[-1] == "kink" for row in rows)
    note = f"; {kinks:,} at a point without a derivative" if kinks else ""
    count = sum(row[1] for row in rows)
    return f"gradients agree: {count:,} elements of {len(rows):,} parameters{note}"


class _Point(NamedTuple):
    """The loss at a point, and its gradient."""

    values: Values
    loss: float
    gradients: Mapping[nn.Parameter, Tensor | None]


class _Comparison:
    """Compares slopes along directions with the gradient, which is computed once. A direction is in
    one parameter: ``signs`` at the elements ``at``, 0 elsewhere.
    """

    def __init__(self, loss: _WideLoss, tolerance: float, seed: int) -> None:
        self.loss, self.tolerance = loss, tolerance
        self.random = torch.Generator().manual_seed(seed)
        self.here = loss.point(loss.values)
        if not isfinite(self.here.loss):
            raise NonFinite(f"the loss is {self.here.loss}, so there is no gradient to check")
        if all(gradient is None for gradient in self.here.gradients.values()):
            raise NoGraph("the loss depends on no parameter of this model that requires grad")
        self.noise = self._noise()

    def row(self, parameter: nn.Parameter, sample: int) -> tuple[Any, ...]:
        """What is found of a parameter, by so many of its elements and all the others together."""
        found = [self._compared(parameter, *each) for each in self._directions(parameter, sample)]
        verdict, *worst = max(found, default=(UNREACHED, 0.0, "", 0.0, 0.0))
        if verdict == OK and self.here.gradients[parameter] is None:
            verdict = UNREACHED
        size = parameter.numel()
        return min(sample, size), size, *worst, VERDICTS[verdict]

    def _directions(self, parameter: nn.Parameter, sample: int) -> Iterator[Any]:
        """The element with the largest gradient, others, and all the rest."""
        order = torch.randperm(parameter.numel(), generator=self.random, device="cpu")
        gradient, device = self.here.gradients[parameter], parameter.device
        if gradient is not None and len(order):
            largest = gradient.abs().argmax().cpu()  # nan is the largest
            order = torch.cat([largest[None], order[order != largest]])
        for at in order[:sample].to(device):
            place = str([*unravel(int(at), tuple(parameter.shape))])
            yield at[None], torch.ones(1, device=device), place
        if len(rest := order[sample:].to(device)):
            yield rest, self._drawn(rest).sign(), f"{len(rest):,} others"

    def _compared(self, *direction: Any) -> Found:
        """What is found at the point; and where it is wrong there, what is found beside it."""
        verdict, *found = self._at(self.here, *direction)
        if verdict == WRONG and isfinite(found[-2]) and self.nearby:
            right = all(self._at(point, *direction)[0] == OK for point in self.nearby)
            verdict = KINK if right else WRONG
        return verdict, *found

    def _at(self, point: _Point, parameter: Any, at: Tensor, signs: Tensor, place: str) -> Found:
        """``error = |a - n| / max(|a|, |n|, noise / tolerance)``, with smaller steps as long as it
        is too large and rounding noise small against it; of wrong ones, that of the first step.
        """
        gradient, values = point.gradients[parameter], point.values[parameter]
        analytic = 0.0 if gradient is None else float((gradient[at] * signs).sum())
        size, found = max(float(values.view(-1)[at].abs().amax()), 1.0), list[Found]()
        for step in (size * step for step in STEPS):
            noise = self.noise / step
            if found and noise > abs(analytic - found[0][-1]) / DEVIATIONS:
                break
            moved = (values.view(-1).index_add(0, at, by * signs) for by in (step, -step))
            spots = ({**point.values, parameter: each.view_as(values)} for each in moved)
            right, left = map(self.loss.value, spots)
            numeric = (right - left) / (2 * step)
            off = abs(analytic - numeric)
            scale = max(abs(analytic), abs(numeric), noise / self.tolerance)
            error = inf if not isfinite(off) else off / scale if off else 0.0
            if error <= self.tolerance:
                return OK, error, place, analytic, numeric
            found.append((WRONG, error, place, analytic, numeric))
        return found[0]

    def _drawn(self, like: Tensor) -> Tensor:
        """Random numbers: equal ones on all devices."""
        return torch.randn(like.shape, generator=self.random, device="cpu").to(like.device)

    def _beside(self, size: float) -> list[Values]:
        """Two points: all elements moved by about this much, relative to them, and back."""
        here = self.here.values
        moves = {p: size * self._drawn(p) * here[p].abs().clamp(min=1) for p in self.here.gradients}
        return [{**here, **{p: here[p] + s * by for p, by in moves.items()}} for s in (1, -1)]

    @cached_property
    def nearby(self) -> list[_Point]:
        """Points beside this one, where the gradient of a kink is right."""
        points = [self.loss.point(values) for values in self._beside(NEARBY)]
        return [point for point in points if isfinite(point.loss)]

    def _noise(self) -> float:
        """The rounding error of f, with a margin: by how much it changes with the last digits of
        the parameters.
        """
        loss, again = self.here.loss, self.loss.value(self.here.values)
        if not abs(again - loss) <= 1e-10 * abs(loss):
            raise GradtraceError(
                f"two evaluations of the loss at the same point give {loss!r} and {again!r}: "
                "loss_fn changes from call to call. Fix its batch and any state it keeps"
            )
        others = [self.loss.value(x) for _ in range(4) for x in self._beside(EPSILON)]
        known = [abs(other - loss) for other in others if isfinite(other)]
        return DEVIATIONS * max(EPSILON * abs(loss), *known)


WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
WIDE |= dict.fromkeys((torch.complex32, torch.complex64), torch.complex128)
CASTS: dict[Any, Any] = dict.fromkeys((Tensor.half, Tensor.bfloat16, Tensor.float), Tensor.double)
_RUN_BACKWARD: Any = vars(torch.autograd)["_engine_run_backward"]


class _WideLoss(TorchFunctionMode):
    """Evaluates a loss again and again, with equal random numbers, buffers and modes.

    Within this mode torch computes in double precision, whatever the dtype of its arguments. Each
    narrow tensor has one wide stand-in, so that in-place writes to it are seen later. The model's
    own tensors have one too, in its modules and for closures over them.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, parameters: Any, seed: int) -> None:
        super().__init__()
        self.model, self.loss_fn, self.parameters, self.seed = model, loss_fn, parameters, seed
        self.arguments = (model,) if takes_model(loss_fn) else ()
        tensors = (*model.parameters(), *model.buffers())
        self.values = {x: x.detach().to(WIDE.get(x.dtype, x.dtype)).contiguous() for x in tensors}
        tables = [table for m in model.modules() for table in (m._parameters, m._buffers)]
        self.tables: list[Any] = [(table, dict(table)) for table in tables]

    def value(self, values: Values) -> float:
        """The loss at a point."""
        with self._at(values):
            return float(self.loss_fn(*self.arguments).detach())

    def point(self, values: Values) -> _Point:
        """The loss at a point, and its gradient by autograd, flat.

        A parameter that a closure passes directly to a custom function is in the graph itself,
        though its value is that of its stand-in; the gradient is the sum of both.
        """
        with self._at(values) as stand_ins:
            try:
                loss = self.loss_fn(*self.arguments)
            except RuntimeError as error:
                if not re.search("dtype|scalar type|Double", reason_of(error)):
                    raise
                raise Unsupported(
                    f"loss_fn does not run in float64, which the check needs: {reason_of(error)}; "
                    "use the plain form of an operator, or give it float64 inputs"
                ) from error
            if isinstance(loss, Tensor) and loss.numel() != 1:
                raise NotScalar(f"the loss has shape {tuple(loss.shape)}; return its .mean()")
            root_of(loss)
            refuse_complex(loss)
            leaves = [x for p in self.parameters for x in (stand_ins[p], p)]
            with torch._C.DisableTorchFunction():  # the tensors themselves, not their stand-ins
                edges = tuple(map(get_gradient_edge, leaves))
            # torch.autograd.grad would leave the mode, which recomputed checkpoints need, too.
            ones = (torch.ones_like(loss),)
            found = _RUN_BACKWARD((loss,), ones, False, False, edges, True)
        flat = [None if g is None else g.to_dense().double().reshape(-1) for g in found]
        pairs = zip(flat[::2], flat[1::2])
        sums = (a if b is None else b if a is None else a + b for a, b in pairs)
        return _Point(values, float(loss.detach()), dict(zip(self.parameters, sums)))

    @contextmanager
    def _at(self, values: Values) -> Iterator[dict[Tensor, Tensor]]:
        """Within, the model has other tensors, with these values."""
        stand_ins = {x: each.clone().requires_grad_(x.requires_grad) for x, each in values.items()}
        # by id; the tensor is kept alive, so that its id stays unique
        self.wide = {id(x): (x, wide) for x, wide in stand_ins.items()}
        with undisturbed(self.model), self:
            seed_all(self.seed)
            try:
                for table, own in self.tables:
                    table.update({k: stand_ins[x] for k, x in own.items() if x is not None})
                yield stand_ins
            finally:
                for table, own in self.tables:
                    table.clear()
                    table.update(own)

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
