"""Digests of data, weights and code.

Tensors are digested on their own device, so those of a GPU are not copied: each 8-byte word is
multiplied by an odd factor that depends on its position, and the products are summed modulo 2**64.
That is exact integer arithmetic, so the result does not depend on the device or the number of
threads; and it covers every element, so a single changed weight is detected.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.pytorch.function_modes import paused

STRETCH_WORDS = 1 << 16
"""Factors repeat after this many words; the sums of such stretches are digested in order."""

LAYOUTS = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that give the dense tensors of a sparse one, by its layout."""

PRIMITIVES = (str, bytes, int, float, bool, complex, type(None))


def new() -> Any:
    """An empty digest."""
    return blake2b(digest_size=8)


def digest(*items: Any) -> str:
    """The digest of some items, as 16 hexadecimal digits."""
    into = new()
    for item in items:
        add(into, item)
    return str(into.hexdigest())


# Tensors ------------------------------------------------------------------------------------------


@paused()
def add_tensors(pairs: list[tuple[Any, Tensor]]) -> None:
    """Add each tensor to its digest; one synchronisation for all tensors of a device."""
    sums: dict[torch.device, list[tuple[Any, Tensor]]] = {}
    for into, tensor in pairs:
        into.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        for part in _parts(tensor.detach()):
            found = _sums(part)
            sums.setdefault(found.device, []).append((into, found))
    for some in sums.values():
        flat = torch.cat([found for _, found in some]).tolist()
        start = 0
        for into, found in some:
            end = start + len(found)
            into.update(b",".join(b"%d" % number for number in flat[start:end]))
            start = end


def _parts(tensor: Tensor) -> list[Tensor]:
    """The dense strided tensors that a nested, sparse or wrapper tensor consists of."""
    if tensor.is_meta:
        return []
    if tensor.is_nested:
        return [part for each in tensor.unbind() for part in _parts(each)]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return [part for name in flatten()[0] for part in _parts(getattr(tensor, name))]
    if tensor.layout is torch.strided:
        return [tensor] if tensor.numel() else []
    if tensor.layout not in LAYOUTS:
        return _parts(tensor.to_dense())
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
    return [part for name in LAYOUTS[tensor.layout] for part in _parts(getattr(tensor, name)())]


def _sums(tensor: Tensor) -> Tensor:
    """The weighted sum of each stretch of a dense tensor, int64."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = flat.resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    odd = flat.numel() % 8
    if flat.storage_offset() % 8 or odd:  # memory that cannot be viewed as int64
        flat = torch.cat([flat, flat.new_zeros((8 - odd) % 8)])
    flat = flat.view(torch.int64)
    factors = _factors(flat.device)
    found = []
    for part in torch.split(flat, STRETCH_WORDS):
        mixed = (part >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(part)
        found.append(mixed.mul_(factors[: len(part)]).sum())
    return torch.stack(found)


@cache
def _factors(device: torch.device) -> Tensor:
    """Pseudo-random odd factors (splitmix64), one for each position in a stretch."""
    with np.errstate(over="ignore"):
        z = np.arange(1, STRETCH_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    with torch.inference_mode(False):
        return torch.from_numpy(z.view(np.int64)).to(device)


# Data ---------------------------------------------------------------------------------------------


def add(into: Any, item: Any) -> None:
    """Add the content of an item: a tensor, an array, a container or any other object."""
    _add(into, item, {})


def _add(into: Any, item: Any, seen: dict[int, Any]) -> None:
    """``seen`` holds the objects visited so far, by id, so that cycles end."""
    if isinstance(item, Tensor):
        add_tensors([(into, item)])
    elif isinstance(item, PRIMITIVES):
        into.update(f"{item!r},".encode("utf-8", "surrogatepass"))
    elif isinstance(item, np.ndarray) and item.dtype != object:
        into.update(f"{item.dtype.str}{item.shape}".encode())
        into.update(np.ascontiguousarray(item).tobytes())
        if isinstance(item, np.ma.MaskedArray):
            into.update(np.ma.getmaskarray(item).tobytes())
            into.update(repr(item.fill_value).encode())
    elif id(item) in seen:
        into.update(b"again")
    else:
        seen[id(item)] = item
        _add_inside(into, item, seen)


def _add_inside(into: Any, item: Any, seen: dict[int, Any]) -> None:
    into.update(named(item if isinstance(item, type) else type(item)).encode())
    if isinstance(item, type):
        return
    if isinstance(item, (list, tuple, np.ndarray)):
        items = item.tolist() if isinstance(item, np.ndarray) else item
        into.update(b"[%d" % len(items))
        if all(type(each) in PRIMITIVES for each in items):
            into.update(repr(tuple(items)).encode("utf-8", "surrogatepass"))
        else:
            for each in items:
                _add(into, each, seen)
    elif isinstance(item, Mapping) or callable(getattr(item, "items", None)):
        for key, value in item.items():
            _add(into, key, seen)
            _add(into, value, seen)
    elif isinstance(item, (set, frozenset)):
        into.update("".join(sorted(digest(each) for each in item)).encode())
    elif isinstance(item, enum.Enum):
        into.update(item.name.encode())
    elif held := attributes(item):
        _add_array(into, item)
        _add(into, held, seen)
    else:
        _add_array(into, item)
        try:
            into.update(pickle.dumps(item, 4))
        except Exception:  # what cannot be pickled is identified by its class alone
            return


def _add_array(into: Any, item: Any) -> None:
    """The content of what NumPy can read but pickle cannot, as of an image of PIL."""
    if hasattr(type(item), "__array_interface__"):
        _add(into, np.array(item, subok=False), {})


def attributes(item: Any) -> dict[str, Any]:
    """The attributes of an object, from ``__dict__`` and from slots."""
    slots = (name for kind in type(item).__mro__ for name in _slots(kind) if hasattr(item, name))
    return {**(getattr(item, "__dict__", None) or {}), **{n: getattr(item, n) for n in slots}}


def _slots(kind: type) -> tuple[str, ...]:
    found = kind.__dict__.get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(name for name in names if not name.startswith("__"))


def named(definition: Any) -> str:
    """The qualified name of a class or a function, without its module: that of a script is
    ``__main__`` when it is run, and another when it is imported.
    """
    return str(getattr(definition, "__qualname__", definition))
