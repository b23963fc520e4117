"""Maps whose weights are parameters of a sharded model: gathered when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.linops.base import Map
from gradtrace.linops.contraction import Contract
from gradtrace.linops.side_by_side import SideBySide
from gradtrace.semirings.einsum_plan import plan
from gradtrace.types import Shape


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
    slots = {name: getattr(map_, name) for name in _slots(type(map_)) if hasattr(map_, name)}
    views = {}
    for name, held in slots.items():
        if isinstance(held, Tensor) and (key := _memory(held)) in owners:
            shape, strides, offset = tuple(held.shape), held.stride(), int(held.storage_offset())
            like = held.new_empty(0)
            views[name] = ShardedView(model, owners[key], key, like, shape, strides, offset)
        elif isinstance(held, tuple):  # vectors, such as the weight of a layer norm: copied
            slots[name] = tuple(_own(each, owners) for each in held)
            setattr(map_, name, slots[name])
    if not views:
        return map_
    found: Any = object.__new__(_kind(type(map_), frozenset(views)))
    found.views = views
    for name, held in slots.items():
        if name not in views:
            setattr(found, name, held)
    return found  # type: ignore[no-any-return]


def sharded_model(maps: Iterable[Map]) -> Any:
    """What gathers the weights that these maps read; None if they are in memory."""
    views = (getattr(map_, "views", None) for map_ in maps)
    return next((view.model for found in views if found for view in found.values()), None)


def reads_memory_of(map_: Map, owners: Mapping[int, Any]) -> bool:
    """Whether a weight of a map is in the memory of parameters."""
    return any(_memory(getattr(map_, name)) in owners for name in map_.tensors())


def _own(held: Any, owners: Mapping[int, Any]) -> Any:
    return held.clone() if isinstance(held, Tensor) and _memory(held) in owners else held


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@lru_cache
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))


@lru_cache
def _kind(kind: type[Map], names: frozenset[str]) -> type[Map]:
    """A subclass in which these weights are read from ``views``."""

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
        )
    return type(kind.__name__, (kind,), {"__slots__": ("views",), **body})
