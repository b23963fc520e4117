"""The container of ``.gradtrace`` files: tensors and JSON in one safetensors file, never pickle.

>>> from tempfile import TemporaryDirectory
>>> with TemporaryDirectory() as folder:
...     write(f"{folder}/run.gradtrace", "trace", {"loss": 0.5}, {"a.b": torch.ones(2)})
...     read(f"{folder}/run.gradtrace", "trace")
Contents(kind='trace', meta={'loss': 0.5}, tensors={'a.b': tensor([1., 1.])})

The ``__metadata__`` of the safetensors header has one entry, ``gradtrace``, a JSON document::

    {"schema": 2, "sha256": "9f2c…", "kind": "trace", "gradtrace": "0.1.0", "torch": "2.13.0",
     "created": "2026-01-31T12:00:00+00:00", "names": {"t0": "encoder.weight"}, "meta": {…}}

Tensors are called ``t0``, ``t1``, ... in the file: a user's name is text, never a key or a path.

JSON has no NaN and no infinities, and many readers round integers beyond 2**53. Those are written
as ``{"$float": "nan"}`` and ``{"$int": "0x20000000000001"}``, in hexadecimal because Python reads
no more than 4,300 decimal digits. A user's key that starts with ``$`` is prefixed with another.

The SHA-256 is computed over the whole file with zeros in its own place, so it detects damage to any
byte. CRC-32 is hardly faster (2.0 against 1.5 GiB a second) and weaker. It is no signature: someone
who changes a file on purpose can change the sum, so what is read is validated regardless.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from hashlib import sha256
from math import isfinite, prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtrace.errors import UPDATE, GradtraceError
from gradtrace.io import atomic_files, tuning
from gradtrace.io.atomic_files import SPACE_HINT, BadFile, NoFile
from gradtrace.io.strict_json import parse, weight
from gradtrace.io.validation import (
    Schema,
    SchemaMismatch,
    array,
    integer,
    mapping,
    one_of,
    record,
    sequence,
    text,
    unfit,
)

__all__ = ["BadFile", "Contents", "NoFile", "digest", "kind_of", "put", "read", "write"]

SCHEMA = 2
"""Version of the documents written here. In version 1, traces have no view (see ``report``)."""

ZERO_DIGEST = "0" * 64
FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
FIELDS = {"sha256": str, "kind": str, "names": dict, "meta": dict}
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""By safetensors' names, in its order. Larger elements come first in a file, so that each tensor
begins at a multiple of its element size."""

CODES = {dtype: code for code, dtype in DTYPES.items()}
RANKS = {code: rank for rank, code in enumerate(DTYPES)}
TENSOR = record(
    dtype=one_of(*DTYPES),
    shape=array(integer(), tuning.MAX_DIMENSIONS),
    data_offsets=sequence(integer(), integer()),
)
FOREIGN = {
    b"PK": "a zip archive, such as torch.save writes",
    b"\x80": "a pickle, which could run anything and is never loaded",
    b"\x1f\x8b": "compressed by gzip",
    b"<": "HTML or XML, perhaps the error page of a download",
    b"version ": "a Git LFS pointer (git lfs pull gets the file)",
}
"""First bytes of files of other formats."""

RESTORE_HINT = "copy it again from where it is whole, or make it again"
WRONG_FILE_HINT = "give a file that gradtrace wrote for this"


class Contents(NamedTuple):
    """The contents of a file."""

    kind: str
    meta: dict[str, Any]
    tensors: dict[str, Tensor]


def write(
    path: str | os.PathLike[str], kind: str, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file atomically: an existing file stays until the new one is complete.

    ``meta`` is a JSON value: None, bool, int, float, str, lists (tuples become lists) and dicts
    with str keys. Tensors may have any name, share memory, and require grad.
    """
    with _replacing(path) as file:
        plain = {f"t{n}": _plain(*item) for n, item in enumerate(tensors.items())}
        order = sorted(plain, key=lambda key: (-RANKS[CODES[plain[key].dtype]], key))
        document = _document(kind, meta, dict(zip(plain, tensors)))
        header = _packed({key: plain[key] for key in order}, document)
        total = sha256(header)
        atomic_files.put(file, header)
        for key in order:
            for chunk in _bytes(plain[key]):
                total.update(chunk)
                atomic_files.put(file, chunk)
        file.seek(header.index(ZERO_DIGEST.encode()))
        atomic_files.put(file, total.hexdigest().encode())


def put(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write bytes, or a text as UTF-8 (lone surrogates as escapes), atomically."""
    raw = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with _replacing(path) as file:
        atomic_files.put(file, raw)


@contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that replaces ``path`` at the end; errors name it."""
    otherwise = f"was not written ({{}}); what was there is untouched: {SPACE_HINT}"
    with atomic_files.naming(path, otherwise) as at:
        try:
            at = at.resolve()
        except (OSError, RuntimeError) as error:
            raise BadFile(f"leads nowhere ({error}): give another path") from error
        with atomic_files.replacing(at) as file:
            yield file


def read(
    path: str | os.PathLike[str], kind: str | None = None, schema: Schema | None = None
) -> Contents:
    """Read what ``write`` wrote, with its checksum verified.

    If a ``kind`` is given, files of other kinds are refused, and if a ``schema``, metadata that
    does not match it. The file is opened once, so replacing it meanwhile has no effect. Nothing in
    a file is ever executed. Tensors are on the CPU, in memory of their own.
    """
    otherwise = f"is cut short or damaged ({{}}): {RESTORE_HINT}"
    with atomic_files.naming(path, otherwise) as at, atomic_files.opened(at) as file:
        header = _header(file)
        layout, document = _parsed(header, os.fstat(file.fileno()).st_size)
        names = _checked(document, kind, layout)
        total = _summed(header, document["sha256"])
        del header
        tensors = {names[key]: _tensor(file, *layout[key], total) for key in layout}
        if file.read(1) or total.hexdigest() != document["sha256"]:
            raise BadFile(f"is damaged, its checksum is wrong: {RESTORE_HINT}")
        flags = (t.view(torch.uint8) for t in tensors.values() if t.dtype is torch.bool)
        if any(bool((flag > 1).any()) for flag in flags):
            raise BadFile(f"is damaged, a bool is neither 0 nor 1: {RESTORE_HINT}")
    if schema is not None:
        with about(path):
            schema(document["meta"])
    return Contents(
        document["kind"], document["meta"], {name: tensors[name] for name in names.values()}
    )


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """Of what kind a file is, by its header alone; None if it is not there, or none of ours."""
    try:
        with atomic_files.opened(Path(path).expanduser()) as file:
            _, document = _parsed(_header(file), os.fstat(file.fileno()).st_size)
    except (OSError, ValueError, RecursionError, GradtraceError):
        return None
    return str(document["kind"])


@contextmanager
def about(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns a SchemaMismatch inside the context into a BadFile that names the file."""
    try:
        yield
    except SchemaMismatch as error:
        problem = f"its contents do not fit together ({error})"
        raise BadFile(f"{os.fspath(path)!r} is damaged: {problem}; {RESTORE_HINT}") from error


# Writing -----------------------------------------------------------------------------------------


def _plain(name: str, tensor: Tensor) -> Tensor:
    """The tensor as it is written: dense, contiguous, on the CPU."""
    dense = tensor.layout is torch.strided and not tensor.is_meta
    if not dense or tensor.dtype not in CODES or tensor.dim() > tuning.MAX_DIMENSIONS:
        dtype = str(tensor.dtype).removeprefix("torch.")
        what = f"{name[:80]!r} is {tensor.layout}, {tensor.device}, {dtype}, {tensor.dim()}-d"
        raise BadFile(
            f"cannot hold every tensor ({what}): give dense ones of real numbers and at most "
            f"{tuning.MAX_DIMENSIONS} dimensions"
        )
    return tensor.detach().cpu().resolve_neg().contiguous()


def _bytes(tensor: Tensor) -> Iterator[memoryview]:
    """The memory of a contiguous tensor, in chunks, without copying."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a dimension of size 1 has any stride
    raw = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    for start in range(0, len(raw), tuning.CHUNK_BYTES):
        yield raw[start : start + tuning.CHUNK_BYTES]


def _packed(tensors: Mapping[str, Tensor], document: str) -> bytes:
    """The header of a safetensors file, with its length before it."""
    held: dict[str, Any] = {"__metadata__": {"gradtrace": document}}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        held[key] = {"dtype": CODES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(held, separators=(",", ":"))
    if len(header) > tuning.HEADER_MAX_BYTES or weight(header) > tuning.JSON_MAX_BYTES:
        raise BadFile(
            f"would have {len(header):,} bytes of metadata, over the limit of "
            f"{tuning.HEADER_MAX_BYTES:,} (or of {tuning.JSON_MAX_BYTES:,} in memory): save fewer "
            "or smaller tables"
        )
    header += " " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header.encode()


def _document(kind: str, meta: Mapping[str, Any], names: dict[str, str]) -> str:
    if not all(isinstance(text, str) for text in (kind, *names.values())):
        raise BadFile("needs text as its kind and as the names of tensors: use str")
    document = {
        "schema": SCHEMA,
        "sha256": ZERO_DIGEST,  # the first zeros in the file: ``write`` replaces them
        "kind": kind,
        "gradtrace": sys.modules["gradtrace"].__version__,
        "torch": str(torch.__version__),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "names": names,
        "meta": _encoded(dict(meta)),
    }
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def digest(meta: Mapping[str, Any]) -> str:
    """The SHA-256 of metadata: the same for what is written and for what is read of it."""
    return sha256(json.dumps(_encoded(meta), sort_keys=True).encode()).hexdigest()


def _encoded(value: object, depth: int = 0) -> object:
    """A value as strict JSON; ``_decoded`` is the inverse.

    >>> _encoded({"$a": [float("inf"), 2**60]})
    {'$$a': [{'$float': 'inf'}, {'$int': '0x1000000000000000'}]}
    """
    if depth > tuning.MAX_DEPTH:
        raise BadFile(
            f"cannot hold metadata of more than {tuning.MAX_DEPTH} levels: make it flatter"
        )
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= 2**53 else {"$int": hex(value)}
    if isinstance(value, float):
        return value if isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, (list, tuple)):
        return [_encoded(item, depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"$" * key.startswith("$") + key: _encoded(value[key], depth + 1) for key in value}
    what = f"a {type(value).__name__}" + " with keys that are not str" * isinstance(value, Mapping)
    raise BadFile(f"cannot hold {what} as metadata: give numbers, text, lists and dicts")


# Reading -----------------------------------------------------------------------------------------


def _header(file: BinaryIO) -> bytes:
    """The first bytes of a file: the header's length and the header, if they are plausible."""
    start, length = file.read(9), os.fstat(file.fileno()).st_size
    if not start:
        raise BadFile(f"is empty: {RESTORE_HINT}")
    if start[8:] != b"{":
        found = next((FOREIGN[known] for known in FOREIGN if start.startswith(known)), None)
        raise BadFile(
            f"is {found or 'not a gradtrace file, or cut short at once'}: {WRONG_FILE_HINT}"
        )
    size = int.from_bytes(start[:8], "little")
    if size > tuning.HEADER_MAX_BYTES:
        raise BadFile(f"is damaged, its header would have {size:,} bytes: {RESTORE_HINT}")
    if size + 8 > length:
        raise BadFile(f"is cut short, its header alone has {size:,} bytes: {RESTORE_HINT}")
    file.seek(0)
    return file.read(8 + size)


def _summed(header: bytes, digest: str) -> Any:
    """The checksum state after a header, with zeros in place of the checksum it contains."""
    at = header.find(digest.encode()) if re.fullmatch("[0-9a-f]{64}", digest) else -1
    if at < 0:
        raise BadFile(f"is damaged, its checksum is wrong: {RESTORE_HINT}")
    total = sha256(memoryview(header)[:at])
    total.update(ZERO_DIGEST.encode())
    total.update(memoryview(header)[at + len(ZERO_DIGEST) :])
    return total


Layout: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and shape of each tensor, in the order of their bytes."""


def _parsed(header: bytes, length: int) -> tuple[Layout, dict[str, Any]]:
    """The layout and the document; raises if either is malformed."""
    found = parse(str(memoryview(header)[8:], "ascii"))  # a memoryview avoids a copy
    if type(found) is not dict:
        unfit("the header is no mapping")
    metadata = found.pop("__metadata__", None)
    if metadata is None or (type(metadata) is dict and "gradtrace" not in metadata):
        raise BadFile(f"is a safetensors file that gradtrace did not write: {WRONG_FILE_HINT}")
    record(gradtrace=text(tuning.HEADER_MAX_BYTES))(metadata)
    return _layout(found, length - len(header)), _document_of(metadata["gradtrace"])


def _layout(found: dict[str, Any], length: int) -> Layout:
    """The tensors, checked to be contiguous in the file and to fill it."""
    mapping(TENSOR)(found)
    layout: Layout = {}
    end = 0
    for key, tensor in sorted(found.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        dtype, shape = DTYPES[tensor["dtype"]], tuple(tensor["shape"])
        if prod(size or 1 for size in shape) * dtype.itemsize >= 2**63:
            unfit(f"tensor {key} is too large")
        start, stop = tensor["data_offsets"]
        if start != end or stop - start != prod(shape) * dtype.itemsize:
            unfit(f"tensor {key} is not where it should be")
        layout[key], end = (dtype, shape), stop
    if end != length:
        unfit(f"the tensors have {end:,} bytes, and the file {length:,}")
    return layout


def _tensor(file: BinaryIO, dtype: torch.dtype, shape: tuple[int, ...], total: Any) -> Tensor:
    """Read the next tensor of a file, and add its bytes to the checksum."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    for chunk in _bytes(tensor):
        if file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
            raise BadFile(f"is cut short: {RESTORE_HINT}")
        total.update(chunk)
    return tensor


def _document_of(document: str) -> dict[str, Any]:
    """Parse the document; raises if its version is unknown or fields are missing."""
    found = parse(document, _decoded)
    schema = found.get("schema") if isinstance(found, dict) else None
    if type(schema) is int and schema > SCHEMA:
        raise BadFile(f"was made by a newer gradtrace: {UPDATE}")
    if type(schema) is not int or schema < 1:
        raise BadFile(f"has metadata of no known version: {RESTORE_HINT}")
    for key, kind in FIELDS.items():
        if not isinstance(found.get(key), kind):
            raise BadFile(f"has metadata without a proper {key!r}: {RESTORE_HINT}")
    return dict(found)


def _decoded(pairs: list[tuple[str, Any]]) -> object:
    """The value of a JSON object; keys must differ, and be known if they start with one $."""
    if len(dict(pairs)) < len(pairs):
        raise SchemaMismatch("a key is there twice")
    match pairs:
        case [("$int", str(digits))]:
            return int(digits, 16)
        case [("$float", str(name))] if name in FLOATS:
            return FLOATS[name]
    if any(re.match(r"\$(?!\$)", key) for key, _ in pairs):
        raise SchemaMismatch("a key starts with a single $")
    return {key.removeprefix("$"): value for key, value in pairs}


def _checked(document: dict[str, Any], kind: str | None, keys: Mapping[str, Any]) -> dict[str, str]:
    """The name of each tensor by its key; raises if the file's kind or tensors do not match."""
    if kind not in (None, held := document["kind"]):
        raise BadFile(f"holds {held[:80]!r}, and {kind!r} was asked for: {WRONG_FILE_HINT}")
    strange = [key for key in keys if not re.fullmatch("t[0-9]+", key)]
    if strange:
        raise BadFile(
            f"holds a tensor under a key never written, {strange[0][:80]!r}: {WRONG_FILE_HINT}"
        )
    names: dict[str, str] = document["names"]
    if names.keys() != set(keys) or not all(isinstance(name, str) for name in names.values()):
        raise BadFile(f"names other tensors than it holds: {RESTORE_HINT}")
    if len(set(names.values())) < len(names):
        raise BadFile(f"gives two tensors the same name: {RESTORE_HINT}")
    return names
