"""Encodes data as one string: JSON and columns in a container, compressed, as base64; and views as
tensors of bytes.

>>> import numpy as np
>>> data = contained({"name": "</script>", "x": np.array([1.5, 2.5]), "y": float("inf")})
>>> read(data)
{'name': '</script>', 'x': array([1.5, 2.5]), 'y': 'inf'}
>>> lettered(data)[:8]
'H4sIAAAA'

The container is described in ``web/src/types.ts``, which reads it.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from typing import Any

import numpy as np
import torch

from gradtrace.io.strict_json import distinct, json_value, parse
from gradtrace.io.validation import integer, one_of, record, unfit
from gradtrace.report.checking import check
from gradtrace.report.model import View, revived
from gradtrace.report.tuning import COMPRESSION_LEVEL

KINDS = {"f4": "<f4", "f8": "<f8", "i4": "<i4", "u1": "|u1"}
NAMES = {np.dtype(form): kind for kind, form in KINDS.items()}
COLUMN = record({"$": one_of(*KINDS)}, o=integer(), n=integer())
ALIGNMENT_BYTES = 8
"""Columns begin at multiples of this many bytes, so that the page can use them without a copy."""


def contained(value: object) -> bytes:
    """Encode dicts, dataclasses, lists, text, numbers and columns as bytes."""
    blob = bytearray()

    def written(value: Any) -> object:
        """The type, offset and length of a column; the fields of a dataclass."""
        if not isinstance(value, np.ndarray):
            return json_value(vars(value))
        kind, offset = NAMES[value.dtype.newbyteorder("<")], len(blob)
        blob.extend(value.astype(KINDS[kind], copy=False).tobytes())
        blob.extend(bytes(-len(blob) % ALIGNMENT_BYTES))
        return {"$": kind, "o": offset, "n": value.size}

    text = json.dumps(
        json_value(value), allow_nan=False, separators=(",", ":"), default=written
    ).encode()
    head = len(text).to_bytes(4, "little") + text
    return b"".join([head, bytes(-len(head) % ALIGNMENT_BYTES), blob])


def read(data: bytes) -> Any:
    """Decode what ``contained`` encoded; tuples become lists, non-finite numbers strings.

    Columns must be contiguous, as they are written, and fill the blob: columns that shared a few
    bytes would become large when they are written again.
    """
    size = int.from_bytes(data[:4], "little")
    start = -(-(4 + size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if not 4 <= start <= len(data):
        unfit("the view is cut short")
    blob = memoryview(data)[start:]
    end = 0

    def column(pairs: list[tuple[str, Any]]) -> Any:
        nonlocal end
        found = distinct(pairs)
        if "$" not in found:
            return found
        COLUMN(found)
        form = np.dtype(KINDS[found["$"]])
        length = found["n"] * form.itemsize
        if found["o"] != end or end + length > len(blob):
            unfit("a column of the view is not where it should be")
        end += length + -length % ALIGNMENT_BYTES
        return np.frombuffer(blob, form, found["n"], found["o"])

    value = parse(data[4 : 4 + size], column)
    if end != len(blob):
        unfit("the view is longer than its columns")
    return value


def lettered(data: bytes) -> str:
    """Compress, and encode as base64; deterministic (no time stamp)."""
    return b64encode(gzip.compress(data, COMPRESSION_LEVEL, mtime=0)).decode()


def saved(view: View) -> torch.Tensor:
    """Encode a view as a tensor of bytes."""
    return torch.frombuffer(bytearray(contained(view)), dtype=torch.uint8)


def loaded(data: torch.Tensor) -> View:
    """The inverse of ``saved``, with each field checked; raises ``SchemaMismatch``."""
    if data.dtype != torch.uint8 or data.dim() != 1:
        unfit("the view is no row of bytes")
    found: View = revived(View, read(data.numpy().tobytes()))
    check(found)
    return found
