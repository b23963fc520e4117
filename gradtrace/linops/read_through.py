"""Maps that read some of their tensors through a view: from other ranks, or another device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Protocol

from gradtrace.linops.base import Map
from gradtrace.linops.contraction import Contract
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


def attributes(map_: Map) -> Iterator[tuple[str, Any]]:
    """The attributes of a map, by name."""
    return ((name, getattr(map_, name)) for name in slots_of(type(map_)) if hasattr(map_, name))


@lru_cache
def slots_of(kind: type) -> tuple[str, ...]:
    """The names of the attributes of a type of maps."""
    return tuple(name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))


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
        )
    return type(kind.__name__, (kind,), {"__slots__": ("views",), **body})
