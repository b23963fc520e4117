"""Data as one string: JSON and columns in a container, compressed, as base64.

>>> import numpy as np
>>> data = contained({"name": "</script>", "x": np.array([1.5, 2.5]), "y": float("inf")})
>>> read(data)
{'name': '</script>', 'x': array([1.5, 2.5]), 'y': 'inf'}
>>> lettered(data)[:8]
'H4sIAAAA'

``web/src/types.ts`` describes the container, ``web/src/data.ts`` reads it.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gradtrace.files import json_value

Column: TypeAlias = npt.NDArray[Any]
View: TypeAlias = dict[str, Any]
"""What a page shows of a trace, see the package."""

KINDS = {"f4": "<f4", "f8": "<f8", "i4": "<i4", "u1": "|u1"}
NAMES = {np.dtype(form): kind for kind, form in KINDS.items()}

ALIGNMENT_BYTES = 8
"""Columns begin at multiples of this many bytes, so that the page can use them without a copy."""

COMPRESSION_LEVEL = 6
"""9 takes six times as long and saves a hundredth."""


def floats(numbers: Iterable[Any]) -> Column:
    """A column of 64-bit floats."""
    return np.array([float(x) for x in numbers], dtype=np.float64)


def ints(numbers: Iterable[int]) -> Column:
    """A column of 32-bit integers."""
    return np.array([*numbers], dtype=np.int32)


def columns(rows: Sequence[Sequence[int]], many: int) -> list[Column]:
    """Transpose rows of integers into ``many`` columns."""
    return list(np.array(rows, dtype=np.int32).reshape(-1, many).T.copy())


def contained(value: Any) -> bytes:
    """Encode dicts, lists, text, numbers and columns as bytes."""
    blob = bytearray()
    text = json.dumps(_written(value, blob), allow_nan=False, separators=(",", ":")).encode()
    head = len(text).to_bytes(4, "little") + text
    return b"".join([head, bytes(-len(head) % ALIGNMENT_BYTES), blob])


def _written(value: Any, blob: bytearray) -> Any:
    """The value with the kind, offset and length of each column in its place."""
    if isinstance(value, dict):
        return {str(key): _written(each, blob) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(each, blob) for each in value]
    if not isinstance(value, np.ndarray):
        return json_value(value)
    kind, offset = NAMES[value.dtype.newbyteorder("<")], len(blob)
    blob.extend(value.astype(KINDS[kind], copy=False).tobytes())
    blob.extend(bytes(-len(blob) % ALIGNMENT_BYTES))
    return {"$": kind, "o": offset, "n": value.size}


def read(data: bytes) -> Any:
    """Decode what ``contained`` encoded; tuples become lists, non-finite numbers texts."""
    size = int.from_bytes(data[:4], "little")
    start = -(-(4 + size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def column(found: dict[str, Any]) -> Any:
        if "$" not in found:
            return found
        return np.frombuffer(data, KINDS[found["$"]], found["n"], start + found["o"])

    return json.loads(data[4 : 4 + size], object_hook=column)


def lettered(data: bytes) -> str:
    """Compress, and encode as base64; the same for the same data."""
    return b64encode(gzip.compress(data, COMPRESSION_LEVEL, mtime=0)).decode()
