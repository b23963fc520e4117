"""Nested tuples, lists, dicts and dataclasses, as modules take and return them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested tuples, lists, dicts and dataclasses, with ``change`` applied to each leaf
    (a packed sequence is one).

    A container that occurs twice is one object in the copy, too.

    >>> mapped({"a": [1, 2], "b": (3, None)}, lambda v: v and -v)
    {'a': [-1, -2], 'b': (-3, None)}
    """
    return _mapped(value, change, {})


def _mapped(value: Any, change: Callable[[Any], Any], made: dict[int, tuple[Any, Any]]) -> Any:
    """``made`` has each container with its copy, by the container's id."""
    if id(value) in made:
        return made[id(value)][1]
    if isinstance(value, PackedSequence):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, change, made) for item in value]
        found = value._make(items) if hasattr(value, "_make") else type(value)(items)
    elif isinstance(value, dict):
        found = copy.copy(value)
        for key in value:
            found[key] = _mapped(value[key], change, made)
    elif is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)
        for field in fields(value):
            part = _mapped(getattr(value, field.name), change, made)
            object.__setattr__(found, field.name, part)
    else:
        return change(value)
    made[id(value)] = value, found
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nested structure, in order.

    >>> import torch
    >>> tensors_in([torch.tensor(1), {"a": (torch.tensor(2), "b")}])
    [tensor(1), tensor(2)]
    """
    if isinstance(value, Tensor):
        return [value]
    parts: list[Any] = []
    if isinstance(value, PackedSequence):
        parts = [value.data]
    elif isinstance(value, (tuple, list, set, frozenset)):
        parts = list(value)
    elif isinstance(value, dict):
        parts = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in fields(value)]
    return [tensor for part in parts for tensor in tensors_in(part)]
