"""Nested values of tensors, numbers and text as JSON with tensors beside it, for files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.io.container import CODES
from gradtrace.io.validation import unfit
from gradtrace.pytorch.plain_tensors import is_wrapper

CONTAINERS = {"tuple": tuple, "list": list}
PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class Missing:
    """Stands for a value that a file cannot hold."""

    what: str

    def __str__(self) -> str:
        return f"<{self.what}, which the file cannot hold>"


def storable(value: Any) -> bool:
    """Whether this is a tensor that a file can hold."""
    if not isinstance(value, Tensor) or is_wrapper(value):
        return False
    return value.layout is torch.strided and not value.is_meta and value.dtype in CODES


def encoded(value: Any, tensors: list[Tensor]) -> Any:
    """A nested value as JSON; its tensors are appended to ``tensors``, each once.

    >>> tensors = []
    >>> encoded({"x": torch.ones(2), "n": (3, None)}, tensors)
    {'dict': [['x', {'tensor': 0, 'device': 'cpu', 'grad': False}], ['n', {'tuple': [3, None]}]]}
    >>> decoded(encoded([1, {"a": object()}], tensors), tensors)
    [1, {'a': Missing(what='object')}]
    """
    if value is None or isinstance(value, PLAIN):
        return value
    if storable(value):
        at = next((n for n, each in enumerate(tensors) if each is value), len(tensors))
        tensors += [value] if at == len(tensors) else []
        found = {"tensor": at, "device": str(value.device), "grad": value.requires_grad}
        last = not value.is_contiguous() and value.dim() == 4
        if last and value.is_contiguous(memory_format=torch.channels_last):
            found["channels_last"] = True
        return found
    name = type(value).__name__
    if name in CONTAINERS and isinstance(value, (tuple, list)):
        return {name: [encoded(each, tensors) for each in value]}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, encoded(value[key], tensors)] for key in value]}
    return {"missing": name}


def decoded(value: Any, tensors: list[Tensor], device: torch.device | None = None) -> Any:
    """The value that ``encoded`` was given; what is no such JSON raises SchemaMismatch.

    Tensors that were not on the CPU are moved to ``device``. A tensor that is there twice is one.
    """
    return Decoder(tensors, device, {}).value(value)


class Decoder(NamedTuple):
    """Reads what ``encoded`` wrote."""

    tensors: list[Tensor]
    device: torch.device | None
    made: dict[tuple[object, ...], Tensor]  # each once: a short text may name a tensor very often

    def value(self, value: Any) -> Any:
        """A nested value."""
        if value is None or type(value) in PLAIN:
            return value
        if type(value) is not dict:
            unfit(f"the batch has a {type(value).__name__}")
        if "tensor" in value:
            return self._tensor(value)
        if "missing" in value:
            return Missing(str(value["missing"])[:80])
        for name, kind in CONTAINERS.items():
            if type(value.get(name)) is list:
                return kind(self.value(each) for each in value[name])
        pairs = value.get("dict")
        if type(pairs) is not list or not all(type(p) is list and len(p) == 2 for p in pairs):
            unfit("the batch is none that was written")
        if not all(type(key) in (str, int) for key, _ in pairs):
            unfit("the batch has a key that is neither text nor number")
        return {key: self.value(each) for key, each in pairs}

    def _tensor(self, value: dict[str, Any]) -> Tensor:
        at = value["tensor"]
        if type(at) is not int or not 0 <= at < len(self.tensors):
            unfit("the batch has a tensor that is not there")
        tensor = self.tensors[at].detach()
        moved = self.device if value.get("device") != "cpu" else None
        last = bool(value.get("channels_last")) and tensor.dim() == 4
        grad = value.get("grad") is True and tensor.is_floating_point()
        key = (at, moved, last, grad)
        if key not in self.made:
            tensor = tensor if moved is None else tensor.to(moved)
            if last:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            self.made[key] = tensor.requires_grad_() if grad else tensor
        return self.made[key]


def missing_in(value: Any) -> list[Missing]:
    """What is missing in a decoded value."""
    if isinstance(value, Missing):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    found = value if isinstance(value, (list, tuple)) else ()
    return [each for part in found for each in missing_in(part)]
