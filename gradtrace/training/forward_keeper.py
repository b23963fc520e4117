"""Keeps what a forward pass of a training loop began with, so that it can be run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradtrace.autodiff.pass_scope import of_training
from gradtrace.pytorch.module_calls import Listener
from gradtrace.pytorch.random_state import RandomState, cuda_devices
from gradtrace.pytorch.wrapped_modules import join, named_modules
from gradtrace.training.tuning import LOOK_STEPS, MAX_KEPT_CALLS

AUTOCAST_DEVICES = ("cpu", "cuda")
is_grad_enabled = torch.is_grad_enabled
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


Home: TypeAlias = tuple[nn.Module, str]
"""The module of a buffer, and its name there."""


class Call(NamedTuple):
    """The arguments of a call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Kept(NamedTuple):
    """What a forward pass began with. Arguments and outputs are references, not copies."""

    random: RandomState | None  # None: passes draw no random numbers
    autocast: dict[str, torch.dtype]  # by device, where it was on
    buffers: dict[str, Tensor]  # those that forward passes change, as they were
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    outputs: list[Any]


def batch_size(kept: Kept) -> int:
    """The first dimension of the first argument that is a tensor; 0 if there is none."""
    if not kept.calls:
        return 0
    args, kwargs = kept.calls[0]
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor) and value.ndim:
            return value.size(0)
    return 0


class Watcher(Listener):
    """Listens to calls while ``wanted``; passes without a graph make it ``idle``."""

    outermost = True
    wanted = idle = False


PLAIN: dict[str, Any] = {}
"""No autocast, no buffers."""

new_tuple = tuple.__new__


class ForwardKeeper(Listener):
    """Keeps the random state, the autocast and the buffers at the beginning of a forward pass of a
    model whose calls it listens to, and the arguments of the model's calls, until ``take``.

    Buffers are copied that passes have been seen to change, and the states of the generators that
    they have been seen to draw from: most change few and many draw from none. Looked at are the
    1st, 2nd, 4th, ... pass, and then every 64th: of these all is copied, and compared with what is
    there after it, since not every operation that writes says so (those of batch norms do not).

    What else listens to the model's calls (``watched``) is told by this: one listener costs less
    than two.
    """

    outermost = True

    def __init__(self, model: nn.Module, watched: Watcher | None = None) -> None:
        self.model, self._watched = model, watched
        self._devices = cuda_devices(model)
        self.kept: Kept | None = None  # of this pass
        self.depth = 0  # of calls of the model within itself
        self._homes: dict[str, Home] = {}  # of the buffers that passes change
        self._passes, self._look_at = 0, 1
        self._draws: set[str] = set()  # the generators that passes draw from
        self._keeps = True  # whether the next pass needs more than its arguments

    def begin(self) -> None:
        """A step begins, if the model has not been called yet."""
        if self.kept is None:
            self.kept = self._now()

    def _now(self) -> Kept:
        autocast = {}
        if any_autocast():
            for kind in AUTOCAST_DEVICES if self._devices else AUTOCAST_DEVICES[:1]:
                if torch.is_autocast_enabled(kind):
                    autocast[kind] = torch.get_autocast_dtype(kind)
        looks = self._passes + 1 == self._look_at
        homes = dict(_buffer_homes(self.model)) if looks else self._homes
        buffers = _copied(homes) if homes else {}
        random = None
        if looks:
            random = RandomState.now(self._devices)
        elif draws := self._draws:  # to look at those of Python and NumPy takes 6 µs each
            random = RandomState.now(self._devices, "python" in draws, "numpy" in draws)
        return Kept(random, autocast, buffers, [], [])

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> int:
        """The model is called. The sum of 1 if this is kept and 2 if it is watched."""
        watched, entered = self._watched, 0
        if not is_grad_enabled():
            if watched is not None:
                watched.idle = True
            return 0
        if watched is not None and watched.wanted and watched.enter(module, args, kwargs):
            entered = 2
        if not of_training():
            return entered
        if not self.depth:
            kept = self.kept
            if kept is not None:
                if len(kept.calls) < MAX_KEPT_CALLS:
                    kept.calls.append((args, kwargs))
            elif self._keeps or any_autocast():
                self.kept = kept = self._now()
                kept.calls.append((args, kwargs))
            else:  # nothing but the arguments; without another call
                self.kept = new_tuple(Kept, (None, PLAIN, PLAIN, [(args, kwargs)], []))
        self.depth += 1
        return entered + 1

    def leave(self, entered: int, result: Any) -> None:
        """The call has ended."""
        if entered & 1 and self.depth:
            self.depth -= 1
            if not self.depth and self.kept is not None:
                self.kept.outputs.append(result)
        if entered > 1 and self._watched is not None:
            self._watched.leave(True, result)

    @property
    def idle(self) -> int:
        """For how many passes nothing but ``kept`` has to be taken; ``skip`` counts them."""
        return self._look_at - 2 - self._passes

    def skip(self, count: int) -> None:
        """Count passes of which ``kept`` was taken."""
        self._passes += count

    def take(self) -> Kept | None:
        """What was kept since the last call; None if the model was not called."""
        found = self.kept
        if found is not None:
            self.kept, self.depth = None, 0
            passes = self._passes = self._passes + 1
            if passes == self._look_at:
                self._look(found)
            self._keeps = bool(self._draws or self._homes) or passes + 1 == self._look_at
        return found

    def _look(self, found: Kept) -> None:
        """Find what a pass has drawn and changed."""
        if found.random is not None:
            self._draws |= found.random.moved()
        for name, (module, key) in _buffer_homes(self.model):
            now, before = getattr(module, key), found.buffers.get(name)
            if now is not None and (before is None or not _equal(now, before)):
                self._homes[name] = module, key
        self._look_at = self._passes + min(self._passes, LOOK_STEPS)


def _equal(now: Tensor, before: Tensor) -> bool:
    """Whether two tensors have the same values, in whatever layout."""
    if now.layout is not before.layout or now.shape != before.shape:
        return False
    if now.layout is torch.sparse_coo:
        parts = [(each._indices(), each._values()) for each in (now, before)]
        return all(map(torch.equal, *parts))
    try:
        return torch.equal(now, before)
    except (NotImplementedError, RuntimeError):  # of other layouts, which are copied each time
        return False


def _copied(homes: Mapping[str, Home]) -> dict[str, Tensor]:
    buffers = {}
    for name, (module, key) in homes.items():
        table = module._buffers
        buffer = table.get(key) if type(table) is dict else getattr(module, key, None)
        if buffer is not None and not is_lazy(buffer):
            buffers[name] = buffer.detach().clone() if buffer.requires_grad else buffer.clone()
    return buffers


def _buffer_homes(model: nn.Module) -> Iterator[tuple[str, Home]]:
    """The module of each buffer and its name there, by the buffer's full name."""
    for name, module in named_modules(model):
        for key in module._buffers.keys():  # noqa: SIM118 (TorchScript has a table of its own)
            yield join(name, key), (module, key)


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every buffer under each of its names, as without wrappers."""
    for name, (module, key) in _buffer_homes(model):
        if (buffer := getattr(module, key)) is not None:
            yield name, buffer
