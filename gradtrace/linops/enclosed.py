"""The tensors that maps refer to, those that functions enclose (indices, masks) among them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

from torch import Tensor

from gradtrace.linops.base import Map
from gradtrace.linops.gather import Index, gather


def attributes(map_: Map) -> Iterator[tuple[str, Any]]:
    """The attributes of a map, by name."""
    return ((name, getattr(map_, name)) for name in slots_of(type(map_)) if hasattr(map_, name))


@lru_cache
def slots_of(kind: type) -> tuple[str, ...]:
    """The names of the attributes of a type of maps."""
    return tuple(name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))


def parts_of(held: Any) -> Iterable[Any]:
    """What a container, a function or a map refers to.

    >>> list(parts_of(partial(max, 3, key=abs)))
    [<built-in function max>, (3,), {'key': <built-in function abs>}]
    """
    if isinstance(held, (tuple, list)):
        return held
    if isinstance(held, FunctionType):
        return [cell.cell_contents for cell in held.__closure__ or ()]
    if isinstance(held, dict):
        return held.values()
    if isinstance(held, partial):
        return held.func, held.args, held.keywords
    if isinstance(held, Map):
        return [value for _, value in attributes(held)]
    return ()


def tensors_in(held: Any) -> Iterator[Tensor]:
    """The tensors that a map, a function or a container refers to.

    >>> import torch
    >>> mask = torch.ones(2)
    >>> [x is mask for x in tensors_in(Index(partial(torch.mul, mask), (2,), (2,)))]
    [True]
    """
    waiting = [held]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            yield each
        else:
            waiting += parts_of(each)


def memory_of(tensor: Tensor) -> int:
    """An identifier of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def copy_what_is_in(map_: Map, memory: Container[int]) -> None:
    """Copy what a map holds in this memory, which is about to be overwritten."""
    if not any(memory_of(tensor) in memory for tensor in tensors_in(map_)):
        return
    if isinstance(map_, Index):
        device = next(tensors_in(map_)).device
        numbered = gather(map_.source(device), map_.in_shape)
        map_.move, map_.fills = numbered.move, numbered.fills
        return
    for name, held in attributes(map_):
        if isinstance(held, Map):
            copy_what_is_in(held, memory)
        elif isinstance(held, Tensor):
            setattr(map_, name, _copied(held, memory))
        elif isinstance(held, (tuple, list)):
            for each in held:
                if isinstance(each, Map):
                    copy_what_is_in(each, memory)
            if any(isinstance(each, Tensor) for each in held):
                make = getattr(held, "_make", type(held))  # a NamedTuple, or a plain one
                setattr(map_, name, make([_copied(each, memory) for each in held]))


def _copied(held: Any, memory: Container[int]) -> Any:
    return held.clone() if isinstance(held, Tensor) and memory_of(held) in memory else held
