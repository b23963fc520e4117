"""Maps that read some of their tensors through a view: from other ranks, or another device.

A map whose tensors are on another device than the values holds them where they are, and copies them
to the values when they are used; only the last few copies are kept. So a model that does not fit on
one device is traced on it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradtrace.linops.base import Map
from gradtrace.linops.contraction import Contract
from gradtrace.linops.enclosed import attributes, memory_of, parts_of
from gradtrace.linops.side_by_side import SideBySide
from gradtrace.semirings.einsum_plan import plan
from gradtrace.types import Shape


class View(Protocol):
    """What an attribute of a map reads its value from."""

    @property
    def shape(self) -> Shape:
        """The shape of the tensor, known without reading it."""

    def read(self) -> Any:
        """The value of the attribute."""


def read_through(
    map_: Map, views: Mapping[str, View], replaced: Mapping[str, Any] | None = None
) -> Map:
    """The same map, whose attributes ``views`` are read each time they are used; others may be
    ``replaced``. The map itself if there are neither.
    """
    if not views and not replaced:
        return map_
    kind = _kind(type(map_), frozenset(views)) if views else type(map_)
    found: Any = object.__new__(kind)
    for name, held in {**dict(attributes(map_)), **(replaced or {})}.items():
        if name not in views:
            setattr(found, name, held)
    if views:
        found.views = views
    return found  # type: ignore[no-any-return]


def views_of(map_: Map) -> Iterable[View]:
    """The views that a map reads its attributes from."""
    views = getattr(map_, "views", None)
    return views.values() if views else ()


@lru_cache
def _kind(kind: type[Map], names: frozenset[str]) -> type[Map]:
    """A subclass in which these attributes are read from ``views``."""

    def reader(name: str) -> property:
        return property(lambda self: self.views[name].read())

    body: dict[str, Any] = {name: reader(name) for name in names}
    body["weights"] = tuple(name for name in kind.weights if name not in names)
    if issubclass(kind, Contract):  # passes read its shape, on some ranks only if plans are kept
        body["plan"] = lambda self: plan(self.spec, self.in_shape, self.views["weight"].shape)
        body["structure"] = lambda self: (
            Contract,
            self.spec,
            self.in_shape,
            self.views["weight"].shape,
            self.crossed,
        )
    return type(kind.__name__, (kind,), {"__slots__": ("views",), **body})


# From other ranks ---------------------------------------------------------------------------------


class ShardedView(NamedTuple):
    """A view of a parameter that is gathered when it is read."""

    model: Any  # a ShardedModel, or WholeTensors
    unit: Any  # the unit of it, or a DTensor
    key: int  # of the parameter's memory
    like: Tensor  # without elements: dtype and device
    shape: Shape
    strides: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """The view, in memory of its own."""
        storage: Any = self.model.read(self.unit, self.key)
        with torch.no_grad():
            return self.like.new_empty(0).set_(storage, self.offset, self.shape, self.strides)


def gathered_on_read(map_: Map, model: Any, owners: Mapping[int, Any]) -> Map:
    """The same map; weights in the memory of parameters (``owners``, by the identity of their
    memory) are gathered when they are read. The map itself if it has none.
    """
    if isinstance(map_, SideBySide):
        return SideBySide([gathered_on_read(each, model, owners) for each in map_.maps])
    views = {}
    for name, held in attributes(map_):
        if isinstance(held, Tensor) and (key := memory_of(held)) in owners:
            shape, strides, offset = tuple(held.shape), held.stride(), int(held.storage_offset())
            like = held.new_empty(0)
            views[name] = ShardedView(model, owners[key], key, like, shape, strides, offset)
        elif type(held) is tuple:  # vectors, such as the weight of a layer norm: copied
            setattr(map_, name, tuple(_own(each, owners) for each in held))
    return read_through(map_, views)


def sharded_model(maps: Iterable[Map]) -> Any:
    """What gathers the weights that these maps read; None if they are in memory."""
    views = (view for map_ in maps for view in views_of(map_) if isinstance(view, ShardedView))
    return next((view.model for view in views), None)


def reads_memory_of(map_: Map, owners: Mapping[int, Any]) -> bool:
    """Whether a weight of a map is in the memory of parameters."""
    return any(memory_of(getattr(map_, name)) in owners for name in map_.tensors())


def _own(held: Any, owners: Mapping[int, Any]) -> Any:
    return held.clone() if isinstance(held, Tensor) and memory_of(held) in owners else held


# From another device ------------------------------------------------------------------------------


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
            replaced[name] = partial(_applied_at, home, held)  # of Index
    return read_through(map_, views, replaced)


def _applied_at(home: torch.device, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function that holds tensors on another device, applied there."""
    return function(x.to(home)).to(x.device)


def _other_device(held: Any, device: torch.device) -> torch.device | None:
    """Another device than this one that a function refers to, by what it encloses."""
    if isinstance(held, Tensor | torch.device):
        found = held.device if isinstance(held, Tensor) else held
        return None if found == device else found
    found_inside = (_other_device(each, device) for each in parts_of(held))
    return next((each for each in found_inside if each is not None), None)
