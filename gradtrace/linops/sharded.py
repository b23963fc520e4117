"""Maps whose weights are parameters of a sharded model: gathered when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.linops.base import Map
from gradtrace.linops.read_through import attributes, read_through, views_of
from gradtrace.linops.side_by_side import SideBySide
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
    views = {}
    for name, held in attributes(map_):
        if isinstance(held, Tensor) and (key := _memory(held)) in owners:
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
    return any(_memory(getattr(map_, name)) in owners for name in map_.tensors())


def _own(held: Any, owners: Mapping[int, Any]) -> Any:
    return held.clone() if isinstance(held, Tensor) and _memory(held) in owners else held


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
