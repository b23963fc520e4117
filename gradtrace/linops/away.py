"""Maps whose tensors are on another device than the values they are applied to.

Such a map holds its tensors where they are, and copies them to the device of the values when they
are used; only the last few copies are kept. So a model that does not fit on one device is traced on
it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.linops.base import Map
from gradtrace.linops.read_through import attributes, read_through
from gradtrace.linops.side_by_side import SideBySide
from gradtrace.types import Shape

COPIES_KEPT = 8
"""How many copies of tensors are kept; one step of a program reads at most five."""

SMALL_MAX_BYTES = 1 << 12
"""Tensors up to this size are copied once, and the copy is kept."""


class Copies:
    """Copies of tensors on one device, made when they are read; the last few are kept.

    >>> copies = Copies(torch.device("cpu"))
    >>> copies.read(torch.ones(2)).tolist()
    [1.0, 1.0]
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recent: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the last one read last

    def is_away(self, x: object) -> bool:
        """Whether this is a tensor on another device. Maps take single numbers from any."""
        return isinstance(x, Tensor) and x.dim() > 0 and x.device != self.device

    def read(self, x: Tensor) -> Tensor:
        """A copy of a tensor; repeated elements (of stride 0) are copied once."""
        found = self._recent.pop(id(x), None)
        if found is None:
            while len(self._recent) >= COPIES_KEPT:
                del self._recent[next(iter(self._recent))]
            found = x, copied(x, self.device)
        self._recent[id(x)] = found
        return found[1]


def copied(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device; dimensions of stride 0 stay so.

    >>> copied(torch.ones(1).expand(5), torch.device("meta")).stride()
    (0,)
    """
    once = x.detach()
    for dim, stride in enumerate(x.stride()):
        if not stride and x.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    return once.to(device).expand(x.shape)


class AwayView(NamedTuple):
    """A tensor, or a tuple of tensors, that is copied when it is read."""

    held: Any
    copies: Copies

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return tuple(self.held.shape)

    @property
    def tensors(self) -> list[Tensor]:
        """What is held on other devices."""
        each = self.held if isinstance(self.held, tuple) else (self.held,)
        return [x for x in each if self.copies.is_away(x)]

    def read(self) -> Any:
        """The copies."""
        if isinstance(self.held, tuple):
            return tuple(self._read(x) for x in self.held)
        return self._read(self.held)

    def _read(self, x: Any) -> Any:
        return self.copies.read(x) if self.copies.is_away(x) else x


def copied_on_read(map_: Map, copies: Copies) -> Map:
    """The same map, for values on the device of ``copies``. The map itself if it has all there."""
    if isinstance(map_, SideBySide):
        return SideBySide([copied_on_read(each, copies) for each in map_.maps])
    views, replaced = dict[str, AwayView](), dict[str, Any]()
    for name, held in attributes(map_):
        if isinstance(held, Tensor | tuple):
            view = AwayView(held, copies)
            if sum(x.nbytes for x in view.tensors) > SMALL_MAX_BYTES:
                views[name] = view
            elif view.tensors:
                replaced[name] = view.read()
        elif callable(held) and (home := _other_device(held, copies.device)) is not None:
            replaced[name] = partial(_applied_at, home, held)  # of Index, Opaque
    return read_through(map_, views, replaced)


def _applied_at(home: torch.device, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function that holds tensors on another device, applied there."""
    return function(x.to(home)).to(x.device)


def _other_device(held: Any, device: torch.device) -> torch.device | None:
    """Another device than this one that a function refers to, by what it encloses."""
    if isinstance(held, Tensor | torch.device):
        found = held.device if isinstance(held, Tensor) else held
        return None if found == device else found
    each: Iterable[Any] = ()
    if isinstance(held, tuple | list):
        each = held
    elif isinstance(held, dict):
        each = held.values()
    elif isinstance(held, partial):
        each = held.func, held.args, held.keywords
    elif isinstance(held, FunctionType):
        each = [cell.cell_contents for cell in held.__closure__ or ()]
    return next((d for one in each if (d := _other_device(one, device)) is not None), None)
