"""Evaluates a loss again and again in double precision, on the user's own model.

So the gradient check covers what training uses: closures over the model, tied weights, custom
functions. No tensor of the user's is modified: during an evaluation, stand-ins in double precision
replace parameters and buffers, and a mode widens every other tensor, such as the batch, where the
loss uses it. (A copy of the model in double precision would not be the one that a closure calls,
and would refuse a batch in float32.)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from gradtrace.autodiff import nodes
from gradtrace.errors import GradtraceError, NoGraph, NonFinite, NotScalar, Unsupported, reason_of
from gradtrace.pytorch.global_switches import DOUBLE, eager
from gradtrace.pytorch.side_effects import WriteLog, same_draws
from gradtrace.tools import tuning

EPSILON = sys.float_info.epsilon
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

_RUN_BACKWARD: Any = vars(torch.autograd)["_engine_run_backward"]

LossFn = Callable[..., Tensor]
Moves = Mapping[nn.Parameter, tuple[Tensor, Tensor]]
"""By parameter: the indices of the elements to move, and by how much."""


@contextlib.contextmanager
def evaluating(loss_fn: LossFn, model: nn.Module, seed: int) -> Iterator[LossEvaluator]:
    """A ``LossEvaluator``; afterwards the model and the random generators are as before."""
    with DOUBLE(), eager(), torch.enable_grad(), same_draws(model) as reseed:
        yield LossEvaluator(loss_fn, model, functools.partial(reseed, seed))


class LossEvaluator:
    """Evaluates a loss under equal conditions, without side effects, in the context ``evaluating``.

    Each evaluation has the same random numbers and finds the model as it was at first.
    """

    def __init__(self, loss_fn: LossFn, model: nn.Module, reseed: Callable[[], None]) -> None:
        self.loss_fn = loss_fn
        self.model = model
        self.arguments = (model,) if takes_model(loss_fn) else ()
        self.wide = {tensor: _wide(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._reseed = reseed
        self._log = WriteLog(model, structure=True)

    def gradients(
        self, parameters: Sequence[nn.Parameter]
    ) -> tuple[float, dict[nn.Parameter, Tensor | None]]:
        """The loss, and its gradient by autograd.

        A parameter that a closure passes directly to a custom function is in the graph itself,
        though its value is that of its stand-in; the gradient is the sum of both.
        """
        with self._stand_ins({}) as stand_ins:
            loss = self._loss()
            nodes.root_of(loss)
            if loss.is_complex():
                raise Unsupported("the loss is complex; take its real part or magnitude")
            value = float(loss.detach())
            if not isfinite(value):
                raise NonFinite(f"the loss is {value}, so there is no gradient to check")
            with torch._C.DisableTorchFunction():  # the tensors themselves, not their stand-ins
                edges = [get_gradient_edge(x) for p in parameters for x in (stand_ins[p], p)]
            # torch.autograd.grad would leave the mode, which recomputed checkpoints need, too
            ones = (torch.ones_like(loss),)
            found = _RUN_BACKWARD((loss,), ones, False, False, tuple(edges), True)
        dense = [None if g is None else g.to_dense().double() for g in found]
        gradients = [_sum(*pair) for pair in zip(dense[::2], dense[1::2])]
        if all(gradient is None for gradient in gradients):
            raise NoGraph(
                "the loss depends on no parameter of the model that requires grad; is it computed "
                "from another model, or detached?"
            )
        return value, dict(zip(parameters, gradients))

    def value(self, moves: Moves) -> float:
        """The loss with some elements moved."""
        with self._stand_ins(moves):
            return float(self._loss().detach())

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
            moves = {p: self._jitter(p, generator) for p in parameters}
            back = {p: (at, -by) for p, (at, by) in moves.items()}
            squares.append((self.value(moves) - 2 * loss + self.value(back)) ** 2 / 6)
        measured = [square for square in squares if isfinite(square)]
        sigma = sqrt(sum(measured) / len(measured)) if measured else 0.0
        return tuning.NOISE_DEVIATIONS * max(sigma, EPSILON * abs(loss))

    def _jitter(self, parameter: nn.Parameter, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Moves of all elements by 64 units in the last place, up or down at random."""
        there = self.wide[parameter].view(-1)
        signs = torch.randint(2, there.shape, generator=generator).to(there) * 2 - 1
        at = torch.arange(there.numel(), device=there.device)
        return at, 64 * EPSILON * signs * there.abs().clamp(min=1)

    @contextlib.contextmanager
    def _stand_ins(self, moves: Moves) -> Iterator[dict[Tensor, Tensor]]:
        """Within, the model has new tensors in double precision, with some elements moved."""
        stand_ins = {tensor: _stand_in(tensor, wide) for tensor, wide in self.wide.items()}
        for parameter, (at, by) in moves.items():
            stand_ins[parameter].data.view(-1).index_add_(0, at, by)
        self._reseed()
        try:
            for module in self.model.modules():
                tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for table in tables:
                    table.update({k: stand_ins[x] for k, x in table.items() if x is not None})
            with _Double(stand_ins):
                yield stand_ins
        finally:
            self._log.restore()

    def _loss(self) -> Tensor:
        """Evaluate the loss at the current stand-ins; raises if it cannot be checked."""
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
            raise NotScalar(
                f"the loss has {loss.numel():,} elements (shape {tuple(loss.shape)}); return its "
                ".sum() or .mean()"
            )
        return loss


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


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one + other


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


class _Double(TorchFunctionMode):
    """Within this mode, torch computes in double precision, whatever the dtype of its arguments.

    Each narrow tensor has one wide stand-in, so in-place writes to it are seen later. The model's
    own tensors have one too, so that closures over them use it.
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
            found = self.wide.get(id(x))
            if found is None and x.dtype in WIDE:
                with torch.enable_grad():  # connected, even if first used under no_grad
                    found = self.wide[id(x)] = (x, x.to(WIDE[x.dtype]))
            return found[1] if found else x
        if isinstance(x, torch.dtype):
            return WIDE.get(x, x)
        if type(x) in (list, tuple):
            return type(x)(map(self.widen, x))
        return x
