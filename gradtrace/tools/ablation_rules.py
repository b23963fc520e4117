"""What ``ablate`` puts in place of a module's outputs, or of labelled slices of a tensor."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import count, starmap
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from gradtrace.autodiff import labels
from gradtrace.errors import GradtraceError, reason_of
from gradtrace.pytorch.global_switches import UNFUSED, load_compiler
from gradtrace.pytorch.module_calls import Forward, Listener
from gradtrace.pytorch.nested import mapped, tensors_in
from gradtrace.tools.batch_dims import BatchDim
from gradtrace.tools.shared_outputs import Replaced, rejoined

Value: TypeAlias = Tensor | float | Sequence[Tensor | float]
Change: TypeAlias = Callable[[Tensor, int, Tensor | None], Tensor]
"""A tensor, its number among the outputs, and the batch sizes of a packed sequence."""


class Calls(Listener):
    """Notes whether a module was called."""

    called = False

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called when a module's forward pass begins."""
        self.called = True


@dataclass(eq=False)
class ModuleRule(Calls):
    """Ablates the calls of one module."""

    name: str
    how: str
    value: Value | None
    batch_dim: BatchDim
    module: nn.Module

    def around(self, module: nn.Module, forward: Forward) -> Forward:
        """Wrap ``forward``. Of several ablations of a module, each acts on the result of those
        opened before it.
        """
        return functools.partial(HOWS[self.how], self, forward)

    def each(
        self,
        out: Any,
        change: Change,
        other: Callable[[Any], Any] = lambda v: v,
        rejoin: bool = True,
    ) -> Any:
        """Map the floating tensors in ``out`` by ``change`` and the rest by ``other``.

        What occurs twice is changed once, so that it stays one object, which may be written to; and
        with ``rejoin``, what overlaps in memory still does.
        """
        numbers = count()
        made: dict[tuple[int, int], tuple[Any, Any]] = {}  # keeps the keys' ids alive

        def tensor(value: Any, steps: Tensor | None = None) -> Any:
            if not floats(value):
                return other(value)
            number = next(numbers)
            key = id(value), self._first_of_value(number)
            if key not in made:
                made[key] = value, change(value, number, steps)
            return made[key][1]

        def leaf(value: Any) -> Any:  # not recursive: a closure of itself is a reference cycle
            if isinstance(value, PackedSequence):
                return value._replace(data=tensor(value.data, value.batch_sizes))
            return tensor(value)

        changed = mapped(out, leaf)
        if next(numbers) == 0:
            raise GradtraceError(
                f"module {self.name!r} returned a {type(out).__name__} without a floating tensor "
                "that could be found, so nothing would be ablated; ablate a module inside it"
            )
        if not rejoin or len(made) < 2:
            return changed
        joint = rejoined(starmap(Replaced, made.values()), self.name, self.value is None)
        return mapped(changed, functools.partial(_exchanged, joint)) if joint else changed

    def _first_of_value(self, number: int) -> int:
        """The number of the first output that the user gives the value of output ``number``."""
        if not isinstance(self.value, Sequence) or number >= len(self.value):
            return 0
        wanted = self.value[number]
        plain = not isinstance(wanted, Tensor)
        return next(
            n
            for n, each in enumerate(self.value)
            if each is wanted or (plain and not isinstance(each, Tensor) and each == wanted)
        )

    def given(self, like: Tensor, number: int, _: Tensor | None) -> Tensor:
        """The user's value for output ``number``, broadcast to its shape."""
        value = self.value
        if isinstance(value, Sequence):
            if number >= len(value):
                raise GradtraceError(
                    f"values[{self.name!r}] holds {len(value)} values, and the module returns more "
                    "floating tensors; give one for each"
                )
            value = value[number]
        return broadcast(value, like, like.shape, f"module {self.name!r}").clone()


def _exchanged(joint: dict[int, Tensor], value: Any) -> Any:
    if isinstance(value, PackedSequence):
        return value._replace(data=joint.get(id(value.data), value.data))
    return joint.get(id(value), value)


def _zero(rule: ModuleRule, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    return rule.each(forward(*args, **kwargs), lambda x, *_: torch.zeros_like(x.detach()))


def _mean(rule: ModuleRule, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    out = forward(*args, **kwargs)
    if rule.value is not None:
        return rule.each(out, rule.given)
    rule.batch_dim.check(args, kwargs)
    sizes: list[int] = []  # number of samples in each tensor

    def change(x: Tensor, number: int, steps: Tensor | None) -> Tensor:
        if steps is None:
            mean, size = averaged(x, rule.batch_dim.of(x, number))
        else:
            parts = x.detach().split_with_sizes(steps.tolist())
            mean = torch.cat([step.mean(0, keepdim=True).expand_as(step) for step in parts])
            size = int(steps[0])
        sizes.append(size)
        return mean.expand_as(x).clone()

    changed = rule.each(out, change)
    _check_samples(max(sizes), rule.batch_dim.what)
    return changed


def _remove(rule: ModuleRule, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if floats(tensor)]
    if not inputs:
        raise GradtraceError(
            f"module {rule.name!r} is given no floating tensor that could take the place of its "
            "output; use how='zero'"
        )
    out, handed = outline(rule, args, kwargs)

    def change(x: Tensor, number: int, _: Tensor | None) -> Tensor:
        original = handed[id(x)][1] if id(x) in handed else None
        if number == 0 and original is not inputs[0]:
            return _passed(rule, inputs[0], x)
        if original is not None:
            return original  # type: ignore[no-any-return]
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    def other(value: Any) -> Any:
        if id(value) in handed:
            return handed[id(value)][1]
        if isinstance(value, Tensor):
            raise GradtraceError(
                f"module {rule.name!r} also returns a tensor of {value.dtype}, for which nothing "
                "can stand in; use how='zero'"
            )
        return value

    return rule.each(out, change, other, rejoin=False)


def _passed(rule: ModuleRule, given: Tensor, wanted: Tensor) -> Tensor:
    if given.shape != wanted.shape:
        raise GradtraceError(
            f"module {rule.name!r} cannot be removed: it is given shape {tuple(given.shape)} and "
            f"returns shape {tuple(wanted.shape)}; use how='zero'"
        )
    # A copy, since the model may write in place to the output and still use the input.
    return given.to(wanted.device, wanted.dtype, copy=True)


class MetaCopies(TorchFunctionMode):
    """Makes copies of tensors fake: with shape, dtype and device, and no data."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercepts ``deepcopy`` of tensors, and ``clone``, by which parameters are copied."""
        if func is Tensor.__deepcopy__ or func is Tensor.clone:
            return self.mode.from_tensor(args[0].detach(), static_shapes=True)
        return func(*args, **(kwargs or {}))


def outline(rule: ModuleRule, args: Any, kwargs: Any) -> tuple[Any, dict[int, tuple[Any, Any]]]:
    """What a module would return, as fake tensors: nothing is computed, no random numbers drawn.

    A copy of the module with fake tensors runs on fake copies of the arguments, so that neither is
    changed. The second result maps the copies to their originals, to recognise inputs that are
    passed through: ``{id(copy): (copy, original)}``.
    """
    load_compiler()  # a FakeTensorMode does
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {
        id(hooks): OrderedDict()  # hooks are not copied: they may refer to anything
        for part in rule.module.modules()
        for key, hooks in vars(part).items()
        if "hooks" in key and isinstance(hooks, dict)
    }
    try:
        with torch.no_grad(), UNFUSED():
            with MetaCopies(mode):
                twin, args, kwargs = copy.deepcopy((rule.module, args, kwargs), memo)
            with mode:
                out = twin.forward(*args, **kwargs)
    except Exception as error:
        raise GradtraceError(
            f"module {rule.name!r} cannot be removed: what it returns cannot be told without "
            f"running it ({type(error).__name__}: {reason_of(error)}); use how='zero'"
        ) from error
    copied = memo[id(memo)]  # where deepcopy keeps the originals alive
    return out, {id(memo[id(old)]): (memo[id(old)], old) for old in copied if id(old) in memo}


HOWS: dict[str, Callable[..., Any]] = {"zero": _zero, "mean": _mean, "remove": _remove}


# Slices ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LabelRule:
    """Ablates the slices to which ``gradtrace.label`` gives a name, or names of a pattern."""

    name: str  # with ``label:``
    how: str
    value: Value | None
    batch_dim: BatchDim
    called: bool = False
    seen: dict[str, None] = field(default_factory=dict)  # the names that came up

    def __call__(self, tensor: Tensor, dim: int, names: labels.Names) -> Tensor:
        """The tensor with the slices of this name ablated."""
        self.seen.update(dict.fromkeys(name for name in names if name is not None))
        wanted = self.name.partition(":")[2]
        chosen = [n is not None and (n == wanted or fnmatchcase(n, wanted)) for n in names]
        if not any(chosen):
            return tensor
        self.called = True
        if not floats(tensor):
            raise GradtraceError(
                f"{self.name!r} marks a tensor of {tensor.dtype}, which cannot be ablated; label a "
                "floating tensor"
            )
        shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
        mask = torch.tensor(chosen, device=tensor.device).view(shape)
        if self.how == "zero":
            return tensor.masked_fill(mask, 0)
        return torch.where(mask, self._replacement(tensor, dim), tensor)

    def _replacement(self, tensor: Tensor, dim: int) -> Tensor:
        """The values that replace the chosen slices, broadcastable to the tensor."""
        if self.value is not None:
            shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
            return broadcast(self.value, tensor, shape, f"a slice of {self.name!r}").unsqueeze(dim)
        if tensor.dim() == 1:
            raise GradtraceError(
                f"{self.name!r} marks elements of a tensor of one dimension, so there is none to "
                "take the mean over; use how='zero', or give values"
            )
        batch = self.batch_dim.of(tensor, 0)
        if batch == dim and self.batch_dim.given is not None:
            raise GradtraceError(
                f"{self.name!r} marks slices along dimension {dim}, which batch_dim says are "
                "samples"
            )
        mean, size = averaged(tensor, batch if batch != dim else 1 - min(dim, 1))
        _check_samples(size, repr(self.name))
        return mean


# Values ------------------------------------------------------------------------------------------


def floats(value: object) -> bool:
    """Whether it is a real or complex floating tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def averaged(tensor: Tensor, dim: int) -> tuple[Tensor, int]:
    """The mean along ``dim``, kept with size 1, and the number of samples."""
    tensor = tensor.detach()
    return (tensor.mean(dim, keepdim=True), tensor.shape[dim]) if tensor.dim() else (tensor, 1)


def _check_samples(size: int, what: str) -> None:
    if size == 1:
        raise GradtraceError(
            f"{what} holds one sample in this call, and its mean is the sample itself, so nothing "
            "would be ablated; use larger batches (and drop_last), or give values"
        )


def broadcast(value: Any, like: Tensor, shape: Sequence[int], what: str) -> Tensor:
    """A user's value, expanded to ``shape``, with the dtype and device of ``like``."""
    found = torch.as_tensor(value).detach().to(like)
    try:
        return found.expand(tuple(shape))
    except RuntimeError:
        raise GradtraceError(
            f"the value given for {what} has shape {tuple(found.shape)}, which does not broadcast "
            f"to {tuple(shape)}"
        ) from None
