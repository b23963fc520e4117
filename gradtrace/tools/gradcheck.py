"""Numerical gradient check: does autograd's gradient agree with finite differences of the loss?

The check runs in float64 on the user's own model, so that it covers what training uses: closures
over the model, tied weights, custom functions. No tensor of the user's is modified: during the
check, stand-ins in double precision replace parameters and buffers.
"""

from __future__ import annotations

import contextlib
import html
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from gradtrace.autodiff import nodes
from gradtrace.errors import GradtraceError, NoGraph, NonFinite, NotScalar, Unsupported
from gradtrace.printable import printable
from gradtrace.pytorch.global_switches import DOUBLE, EAGER
from gradtrace.session import named_parameters

EPSILON = torch.finfo(torch.float64).eps
RELATIVE_STEP = EPSILON ** (1 / 3)
"""Balances the truncation error h² of a central difference and its rounding error ε/h."""
COARSER_STEP, FINER_STEPS = 4.0, (1 / 16, 1 / 256)
"""Other steps, as multiples of the first: they distinguish curvature or a kink from a wrong
gradient."""
NOISE_DEVIATIONS = 10.0
"""How many standard deviations of rounding noise a difference may be off by."""
SAMPLE_ELEMENTS = 64
TOTAL_ELEMENTS = 1024
"""Defaults: the most elements checked of each parameter, and of all parameters in total."""

WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
CASTS: dict[Any, Callable[..., Any]] = {
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
    Tensor.float: Tensor.double,
}
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


@dataclass(frozen=True, slots=True)
class Check:
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
            "rows": [{key: _plain(x) for key, x in asdict(row).items()} for row in self.rows],
        }

    def table(self) -> list[tuple[str, ...]]:
        """The rows as texts, after a header."""
        header = ("parameter", "checked", "error", "worst at", "analytic", "numeric", "verdict")
        return [header, *map(_cells, self.rows)]

    def __str__(self) -> str:
        table = [tuple(map(printable, cells)) for cells in self.table()]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
        return "\n".join([*lines, printable(self.verdict)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


LossFn = Callable[..., Tensor]
Progress = Callable[[int, int], None]


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

    ``loss_fn(model)`` (or ``loss_fn()``) returns the scalar loss. It is called some hundred times,
    each time with the same random numbers (``seed``) and the same buffers, so dropout and batch
    norm are checked as they are in training; float32 tensors that it uses are converted to float64.
    Of a large parameter, ``sample`` elements are checked (by default 64, fewer if there are many
    parameters): the one with the largest gradient, and random ones; and the slope along random
    signs over all the others. Afterwards the model is as before.

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
    evaluator = _LossEvaluator(loss_fn, model, seed)
    with evaluator.open():
        return _Inspection(evaluator, names, tolerance, progress).run(sample, seed)


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
        if nn.parameter.is_lazy(parameter):
            raise Unsupported(f"parameter {name} has no shape yet; call the model once before")
        if parameter.is_complex():
            raise Unsupported(
                f"parameter {name} is complex; differences need real numbers. Keep its real and "
                "imaginary parts as a real parameter: torch.view_as_complex(parts)"
            )


# Judging -----------------------------------------------------------------------------------------


class Probe(NamedTuple):
    """A direction in one parameter: ``signs`` at the elements ``at``, 0 elsewhere."""

    at: Tensor
    signs: Tensor
    place: tuple[int, ...] | None  # the index of a single element


class Finding(NamedTuple):
    """The comparison of analytic and numeric slope along one probe."""

    verdict: str
    error: float
    place: tuple[int, ...] | None
    analytic: float
    numeric: float

    @property
    def badness(self) -> tuple[int, float]:
        """Sort key: worse findings have larger ones."""
        return VERDICTS.index(self.verdict), self.error


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
    """One check: computes the gradient once, then a finding for every probe."""

    def __init__(
        self,
        evaluator: _LossEvaluator,
        names: dict[nn.Parameter, str],
        tolerance: float,
        progress: Progress | None,
    ) -> None:
        self.evaluator = evaluator
        self.names = names
        self.tolerance = tolerance
        self.progress = progress
        parameters = list(names)
        loss, found = evaluator.gradients(parameters)
        self.loss = loss
        self.gradients = dict(zip(parameters, found))
        self.noise = evaluator.noise(parameters, loss)

    def run(self, sample: int | None, seed: int) -> Check:
        """Compare the slopes along all probes."""
        sample = sample or min(SAMPLE_ELEMENTS, max(1, TOTAL_ELEMENTS // len(self.names)))
        generator = torch.Generator().manual_seed(seed)
        plan = {
            parameter: _probes(parameter, gradient, sample, generator)
            for parameter, gradient in self.gradients.items()
        }
        total, done, rows = sum(map(len, plan.values())), 0, []
        for parameter, probes in plan.items():
            findings = []
            for probe in probes:
                findings.append(self.compare(parameter, probe))
                done += 1
                if self.progress:
                    self.progress(done, total)
            rows.append(self.row(parameter, findings))
        rows.sort(key=lambda row: (VERDICTS.index(row.verdict), row.error, row.name), reverse=True)
        return Check(tuple(rows), self.loss, self.tolerance)

    def row(self, parameter: nn.Parameter, findings: list[Finding]) -> Row:
        """The worst finding of a parameter."""
        name, shape = self.names[parameter], tuple(parameter.shape)
        checked = sum(finding.place is not None for finding in findings)
        if not findings:  # a parameter without elements
            return Row(name, shape, 0, 0.0, None, 0.0, 0.0, "unreached")
        verdict, error, place, analytic, numeric = max(findings, key=lambda f: f.badness)
        if verdict == "ok" and self.gradients[parameter] is None:
            verdict = "unreached"
        return Row(name, shape, checked, error, place, analytic, numeric, verdict)

    def compare(self, parameter: nn.Parameter, probe: Probe) -> Finding:
        """Compare the slope along a probe with the gradient."""
        gradient = self.gradients[parameter]
        analytic = 0.0
        if gradient is not None:
            analytic = float((gradient.reshape(-1)[probe.at] * probe.signs).sum())
        first = self.slopes(parameter, probe, 1.0)
        finding = self.finding(probe, analytic, first)
        if finding.verdict == "ok":
            return finding
        coarse = self.slopes(parameter, probe, COARSER_STEP)
        extrapolated = self.finding(probe, analytic, first.extrapolated(coarse))
        if extrapolated.verdict == "ok":
            return extrapolated
        return self.compare_finer(parameter, probe, first, finding)

    def compare_finer(
        self, parameter: nn.Parameter, probe: Probe, first: Slopes, finding: Finding
    ) -> Finding:
        """Try smaller steps, as long as rounding noise is small against the error found."""
        analytic = finding.analytic
        before = last = first
        for multiple in FINER_STEPS:
            finer = self.slopes(parameter, probe, multiple)
            if self.noise / finer.step > abs(analytic - first.central) / NOISE_DEVIATIONS:
                break
            closer = self.finding(probe, analytic, finer)
            if closer.verdict == "ok":
                return closer
            before, last = last, finer
        if isfinite(analytic) and self.unreliable(analytic, before, last):
            return finding._replace(verdict="kink")
        return finding

    def finding(self, probe: Probe, analytic: float, slopes: Slopes) -> Finding:
        """``error = |a - n| / max(|a|, |n|, noise / tolerance)``."""
        numeric = slopes.central
        floor = self.noise / slopes.step / self.tolerance
        off = abs(analytic - numeric)
        scale = max(abs(analytic), abs(numeric), floor)
        error = inf if not isfinite(off) else off / scale if off else 0.0
        verdict = "ok" if error <= self.tolerance else "wrong"
        return Finding(verdict, error, probe.place, analytic, numeric)

    def unreliable(self, analytic: float, before: Slopes, last: Slopes) -> bool:
        """Whether the finite differences may be wrong by as much as the error they show.

        Where f is smooth, the gap between the one-sided slopes and the change from one step size to
        the next vanish with h; at a kink the gap remains.
        """
        doubt = abs(last.central - before.central) + last.gap / 2 - self.noise / last.step
        return not doubt <= 0.1 * abs(analytic - last.central)  # NaN: outside the domain of f

    def slopes(self, parameter: nn.Parameter, probe: Probe, multiple: float) -> Slopes:
        """The slopes from two evaluations, one step to either side."""
        steps, step = self.evaluator.steps(parameter, probe, multiple)
        right = self.evaluator.value({parameter: (probe.at, steps)})
        left = self.evaluator.value({parameter: (probe.at, -steps)})
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
    one = torch.ones(1, dtype=torch.float64, device=parameter.device)
    places = [(at, torch.unravel_index(at, parameter.shape)) for at in order[:sample]]
    found = [
        Probe(at.reshape(1).to(parameter.device), one, tuple(map(int, place)))
        for at, place in places
    ]
    rest = order[sample:]
    if len(rest):
        signs = torch.randint(2, rest.shape, generator=generator).double() * 2 - 1
        found.append(Probe(rest.to(parameter.device), signs.to(parameter.device), None))
    return found


# Evaluating --------------------------------------------------------------------------------------

Moves = dict[nn.Parameter, tuple[Tensor, Tensor]]
"""By parameter: the indices of the elements to move, and by how much."""


class _LossEvaluator:
    """Evaluates a loss repeatedly under equal conditions, without side effects."""

    def __init__(self, loss_fn: LossFn, model: nn.Module, seed: int) -> None:
        self.loss_fn = loss_fn
        self.arguments = (model,) if takes_model(loss_fn) else ()
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self.wide = {tensor: _wide(tensor) for tensor in tensors.values()}
        self.attributes = [_Attributes(module, tensors) for module in model.modules()]
        self.rng = _RngSnapshot(tensors.values(), seed)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Context for evaluations; afterwards the model and the generators are restored."""
        try:
            with DOUBLE, EAGER, torch.enable_grad():
                yield
        finally:
            for attributes in self.attributes:
                attributes.restore()
            self.rng.restore()

    def reset(self) -> dict[Tensor, Tensor]:
        """Reset the model's attributes and the generators, and put fresh stand-ins in place."""
        stand_ins = {tensor: _stand_in(tensor, wide) for tensor, wide in self.wide.items()}
        for attributes in self.attributes:
            attributes.restore()
            attributes.exchange(stand_ins)
        self.rng.reseed()
        return stand_ins

    def loss(self) -> Tensor:
        """Evaluate the loss at the current stand-ins; raises if it cannot be checked."""
        try:
            loss = self.loss_fn(*self.arguments)
        except (RuntimeError, ValueError) as error:
            if not any(word in str(error) for word in ("dtype", "scalar type", "Double")):
                raise
            raise Unsupported(
                f"loss_fn does not run in float64, which the check needs: {error}. Use the plain "
                "form of an operator that knows float32 only, or give it float64 inputs"
            ) from error
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise NotScalar(
                f"the loss has {loss.numel():,} elements (shape {tuple(loss.shape)}); return its "
                ".sum() or .mean()"
            )
        return loss

    def gradients(self, parameters: Sequence[nn.Parameter]) -> tuple[float, list[Tensor | None]]:
        """The loss, and its gradient by autograd.

        A parameter that a closure passes directly to a custom function is in the graph itself,
        though its value is that of its stand-in; the gradient is the sum of both.
        """
        stand_ins = self.reset()
        with _Double(stand_ins):
            loss = self.loss()
            nodes.root_of(loss)
            if loss.is_complex():
                raise Unsupported("the loss is complex; take its real part or magnitude")
            value = float(loss.detach())
            if not isfinite(value):
                raise NonFinite(f"the loss is {value}, so there is no gradient to check")
            found = _analytic(loss, [*(stand_ins[p] for p in parameters), *parameters])
        found = [_sum(*both) for both in zip(found, found[len(parameters) :])]
        if all(gradient is None for gradient in found):
            raise NoGraph(
                "the loss depends on no parameter of the model that requires grad; is it computed "
                "from another model, or detached?"
            )
        return value, found

    def value(self, moves: Moves) -> float:
        """The loss with some elements moved."""
        stand_ins = self.reset()
        for parameter, (at, by) in moves.items():
            stand_ins[parameter].data.view(-1).index_add_(0, at, by)
        with _Double(stand_ins):
            return float(self.loss().detach())

    def steps(self, parameter: nn.Parameter, probe: Probe, multiple: float) -> tuple[Tensor, float]:
        """The step of each element along a probe, and its length as a multiple of ``signs``."""
        there = self.wide[parameter].view(-1)[probe.at]
        step = RELATIVE_STEP * multiple * max(float(there.abs().amax()), 1.0)
        return probe.signs * step, step

    def noise(self, parameters: Sequence[nn.Parameter], loss: float) -> float:
        """The rounding error of f, with a margin: ``σ² = mean of (f(x+δ) - 2f(x) + f(x-δ))² / 6``.

        δ is so small (64 units in the last place) that curvature vanishes from the second
        difference; what remains is the rounding of three evaluations.
        """
        again = self.value({})
        if not abs(again - loss) <= 1e-10 * abs(loss):
            raise GradtraceError(
                f"two evaluations of the loss at the same point give {loss!r} and {again!r}: "
                "loss_fn changes from call to call. Fix its batch (no next(iterator) inside), its "
                "random numbers (torch, random and numpy are reset) and any state it keeps"
            )
        generator = torch.Generator().manual_seed(0)
        squares = []
        for _ in range(4):
            moves = {p: self.jitter(p, generator) for p in parameters}
            back = {p: (at, -by) for p, (at, by) in moves.items()}
            squares.append((self.value(moves) - 2 * loss + self.value(back)) ** 2 / 6)
        measured = [square for square in squares if isfinite(square)]
        sigma = sqrt(sum(measured) / len(measured)) if measured else 0.0
        return NOISE_DEVIATIONS * max(sigma, EPSILON * abs(loss))

    def jitter(self, parameter: nn.Parameter, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Moves of all elements by 64 units in the last place, up or down at random."""
        there = self.wide[parameter].view(-1)
        signs = torch.randint(2, there.shape, generator=generator).to(there) * 2 - 1
        at = torch.arange(there.numel(), device=there.device)
        return at, 64 * EPSILON * signs * there.abs().clamp(min=1)


def _analytic(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient under test; None for parameters that the loss does not depend on."""
    with torch._C.DisableTorchFunction():  # the tensors themselves, not their stand-ins
        edges = [get_gradient_edge(parameter) for parameter in parameters]
    found = torch.autograd.grad(loss, edges, allow_unused=True)
    return [None if g is None else g.to_dense() for g in found]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other.double() if one is None else one + other


def takes_model(loss_fn: LossFn) -> bool:
    """``lambda model: ...`` takes the model; ``lambda: ...`` and ``lambda x=x: ...`` do not."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return True  # written in C: no signature
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    free = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(free) > 1:
        raise GradtraceError(
            f"loss_fn takes the model alone, or nothing, but asks for {', '.join(free)}; bind the "
            "others: lambda model: loss_fn(model, batch)"
        )
    return bool(free)


def _wide(tensor: Tensor) -> Tensor:
    """A copy of a tensor in double precision, contiguous."""
    dtype = WIDE.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(dtype).clone(memory_format=torch.contiguous_format)


def _stand_in(tensor: Tensor, wide: Tensor) -> Tensor:
    """A new tensor of the same kind (parameter or buffer) with the value ``wide``."""
    if not isinstance(tensor, nn.Parameter):
        return wide.clone().requires_grad_(tensor.requires_grad and tensor.is_leaf)
    parameter = nn.Parameter(wide.clone(), tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


class _Attributes:
    """A snapshot of a module's attributes, and of dicts and lists among them, one level deep.

    That includes parameters, buffers, old-style weight norm, hidden states and counters.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[int, Tensor]) -> None:
        own = vars(module)
        self.dicts = [(x, dict(x)) for x in (own, *own.values()) if isinstance(x, dict)]
        self.lists = [(x, list(x)) for x in own.values() if isinstance(x, list)]
        self.places: list[tuple[Any, Any, Tensor]] = []
        for table, items in self.dicts:
            self.places += [
                (table, k, tensors[id(x)]) for k, x in items.items() if id(x) in tensors
            ]
        for sequence, entries in self.lists:
            self.places += [
                (sequence, k, tensors[id(x)]) for k, x in enumerate(entries) if id(x) in tensors
            ]

    def restore(self) -> None:
        """Restore the original objects."""
        for table, items in self.dicts:
            table.clear()
            table.update(items)
        for sequence, entries in self.lists:
            sequence[:] = entries

    def exchange(self, stand_ins: Mapping[Tensor, Tensor]) -> None:
        """Replace tensors by their stand-ins."""
        for container, key, tensor in self.places:
            container[key] = stand_ins[tensor]


class _RngSnapshot:
    """The random number generators that a loss may use: seeded alike, and restored at the end."""

    def __init__(self, tensors: Iterable[Tensor], seed: int) -> None:
        self.seed = seed
        cuda = {t.device.index for t in tensors if t.device.type == "cuda"}
        self.generators = [torch.default_generator]
        self.generators += [torch.cuda.default_generators[i] for i in sorted(cuda)]
        self.states = [generator.get_state() for generator in self.generators]
        self.python = random.getstate()
        self.numpy = sys.modules.get("numpy")
        self.numpy_state = self.numpy.random.get_state() if self.numpy else None

    def reseed(self) -> None:
        """Seed every generator."""
        for generator in self.generators:
            generator.manual_seed(self.seed)
        random.seed(self.seed)
        if self.numpy:
            self.numpy.random.seed(self.seed % (1 << 32))

    def restore(self) -> None:
        """Restore the state of every generator."""
        for generator, state in zip(self.generators, self.states):
            generator.set_state(state)
        random.setstate(self.python)
        if self.numpy:
            self.numpy.random.set_state(self.numpy_state)


class _Double(TorchFunctionMode):
    """Within this mode, torch computes in double precision, whatever the dtype of its arguments.

    Each narrow tensor has one wide stand-in, so in-place writes to it are seen later. The model's
    own tensors have one too, so that closures over them use it.
    """

    def __init__(self, stand_ins: Mapping[Tensor, Tensor]) -> None:
        super().__init__()
        self.wide = {
            id(x): (x, wide) for x, wide in stand_ins.items()
        }  # keeps x alive, so that its id stays unique

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = {key: self.widen(value) for key, value in (kwargs or {}).items()}
        return CASTS.get(func, func)(*map(self.widen, args), **named)

    def widen(self, x: Any) -> Any:
        """The same argument in double precision."""
        if isinstance(x, Tensor):
            found = self.wide.get(id(x))
            if found is None and x.dtype in WIDE:
                with (
                    torch.enable_grad()
                ):  # connected in the graph, even if first used under no_grad
                    found = self.wide[id(x)] = (x, x.to(WIDE[x.dtype]))
            return found[1] if found else x
        if isinstance(x, torch.dtype):
            return WIDE.get(x, x)
        if type(x) in (list, tuple):
            return type(x)(map(self.widen, x))
        return x


# Showing -----------------------------------------------------------------------------------------


def _cells(row: Row) -> tuple[str, ...]:
    rest = prod(row.shape) - row.checked
    where = f"{rest:,} others" if row.index is None else str(list(row.index))
    if not row.checked:
        where = ""
    numbers = (f"{row.error:.1e}", where, f"{row.analytic:.6g}", f"{row.numeric:.6g}")
    return (row.name, f"{row.checked:,}/{prod(row.shape):,}", *numbers, row.verdict)


def _plain(x: Any) -> Any:
    return str(x) if isinstance(x, float) and not isfinite(x) else x
