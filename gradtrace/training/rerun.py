"""Runs the forward pass of a training step again, watched, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isnan
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradtrace.autodiff.hooks import silenced
from gradtrace.autodiff.pass_scope import rerunning
from gradtrace.diagnosis import Diagnosis
from gradtrace.errors import GradtraceError
from gradtrace.kernels import backend_of
from gradtrace.pytorch.function_modes import resumed
from gradtrace.pytorch.module_calls import Forward, Listener, listen
from gradtrace.pytorch.nested import tensors_in
from gradtrace.pytorch.random_state import RandomState
from gradtrace.pytorch.side_effects import users_code
from gradtrace.pytorch.wrapped_modules import named_modules, named_parameters
from gradtrace.training.forward_keeper import Call, named_buffers
from gradtrace.training.step_tracer import loss_value, undisturbed
from gradtrace.watch import watch

LossOf: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True)
class Rerun:
    """A step that was run again: its loss, what is wrong with it, and whether it is the same.

    ``same`` says that the loss has the same bits as in training, or is NaN again.
    """

    loss: float
    diagnosis: Diagnosis
    same: bool


@dataclass(eq=False)
class Beginning:
    """What a forward pass began with: everything that its result depends on, beside the code."""

    random: RandomState
    autocast: Mapping[str, torch.dtype]
    state: Mapping[str, Tensor]  # parameters and buffers by name
    evaluating: Sequence[str]  # modules in evaluation mode

    def load(self, model: nn.Module) -> None:
        """Set parameters, buffers, modes and random numbers; for good, unless within ``run``."""
        there = {**dict(named_parameters(model)), **dict(named_buffers(model))}
        _check_fit(self.state, there)
        with torch.no_grad():
            for name, tensor in self.state.items():
                if there[name] is not tensor:  # of training's own graph, whose versions must stay
                    there[name].data.copy_(tensor)
        for name, module in named_modules(model):
            module.training = name not in self.evaluating
        self.random.restore()

    def run(
        self, model: nn.Module, compute: Callable[[], Any], composed: bool | None = None
    ) -> tuple[float, Diagnosis]:
        """Compute the loss again in a watch; its value and diagnosis. Nothing that the forward
        pass does is left behind.
        """
        if composed is None:
            composed = not all(backend_of(each).host for each in model.parameters())
        with rerunning(), undisturbed(model):
            with ExitStack() as stack:
                stack.enter_context(users_code())
                stack.enter_context(resumed())
                stack.enter_context(torch.enable_grad())
                self.load(model)
                stack.callback(listen(Unwrapped(), _replicated(model)))
                watched = stack.enter_context(watch(model, diagnose=True, composed=composed))
                for kind, dtype in self.autocast.items():
                    stack.enter_context(torch.autocast(kind, dtype))
                loss = compute()
            if not isinstance(loss, Tensor):
                raise GradtraceError(
                    f"rerun= returned a {type(loss).__name__}; return the loss, a tensor"
                )
            return loss_value(loss), watched.diagnose(loss)


class Unwrapped(Listener):
    """Calls the module inside of DistributedDataParallel, without what it does for all processes:
    these do not run the step again.
    """

    def around(self, module: nn.Module, forward: Forward) -> Forward:
        """The module inside."""
        return module.module  # type: ignore[return-value]


def _replicated(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, DistributedDataParallel)]


def _check_fit(state: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        if name not in there:
            raise GradtraceError(f"the model has no {name!r}, which this step had: give its model")
        if there[name].shape != tensor.shape:
            raise GradtraceError(
                f"{name!r} has shape {tuple(there[name].shape)}, and in this step had "
                f"{tuple(tensor.shape)}: make the model with the sizes of the run"
            )


def same_number(a: float, b: float) -> bool:
    """Whether two numbers are equal, or both NaN."""
    return a == b or (isnan(a) and isnan(b))


# Without a function that computes the loss -------------------------------------------------------


def outputs_in(results: Sequence[Any]) -> list[Tensor]:
    """The outputs of calls that a gradient could come from."""
    return [each for each in tensors_in(list(results)) if each.requires_grad]


def seeds_of(loss: Tensor, outputs: Sequence[Tensor]) -> list[Tensor | None] | None:
    """``d loss / d output`` for each of a model's outputs; None unless all are finite.

    With these held constant, ``Σ seed · output`` has the gradient of the loss.
    """
    if not outputs or not loss.requires_grad:
        return None
    with silenced():
        seed = torch.ones_like(loss)
        found = torch.autograd.grad(loss, outputs, seed, retain_graph=True, allow_unused=True)
    known = [each for each in found if each is not None]
    finite = all(bool(each.isfinite().all()) for each in known)
    return list(found) if known and finite else None


def stand_in(results: Sequence[Any], seeds: Sequence[Tensor | None] | None) -> Tensor:
    """A loss of a model's outputs: ``Σ seed · output``, or the loss that is among them, or their
    sum.
    """
    outputs = outputs_in(results)
    if not outputs:
        raise GradtraceError("the model returns no tensor that requires grad; pass rerun=")
    if seeds is not None and len(seeds) == len(outputs):
        pairs = [(out, each) for out, each in zip(outputs, seeds) if each is not None]
        return torch.stack([(out * each.to(out.device)).sum() for out, each in pairs]).sum()
    last = results[-1]
    own = last.get("loss") if isinstance(last, Mapping) else last
    if isinstance(own, Tensor) and own.numel() == 1 and own.requires_grad:
        return own
    return torch.stack([out.sum().float() for out in outputs]).sum()


def called_again(
    model: nn.Module, calls: Sequence[Call], seeds: Sequence[Tensor | None] | None
) -> Tensor:
    """Call the model again, and make a loss of what it returns."""
    if not calls:
        raise GradtraceError(
            "the model itself was not called in this step, so it cannot be run again; pass "
            "monitor.step(loss, rerun=loss_of, batch=(x, y)), and call monitor.begin() where a "
            "step begins"
        )
    return stand_in([model(*args, **kwargs) for args, kwargs in calls], seeds)
