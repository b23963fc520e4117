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

JSON has no NaN and no infinities, and many who read it round integers beyond 2**53. Those are
``{"$float": "nan"}`` and ``{"$int": "0x20000000000001"}``, in hexadecimal because Python reads no
more than 4,300 decimal digits. A key of the user's that starts with ``$`` gets another in front.

The SHA-256 is that of the whole file with zeros in its own place: damage to any byte shows. CRC-32
is hardly faster (2.0 against 1.5 GiB a second) and weaker. It is no signature: who changes a file
on purpose can change the sum, so what is read is checked as if there were none.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from hashlib import sha256
from math import isfinite
from pathlib import Path
from stat import S_IMODE
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gradtrace.errors import UPDATE, GradtraceError

SCHEMA = 2
"""Of the documents that are written here. In files of 1, traces have no view (see ``report``)."""

HEADER = 100_000_000
"""The most bytes of names and metadata: of more, the safetensors library reads none."""

DEPTH = 100
"""The most levels of lists and dicts within ``meta``."""

BLANK = "0" * 64
FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
FIELDS = {"sha256": str, "kind": str, "names": dict, "meta": dict}
DTYPES = re.compile("bool|u?int(8|16|32|64)|b?float16|float(32|64)")
FOREIGN = {
    b"PK": "a zip archive, such as torch.save writes",
    b"\x80": "a pickle, which could run anything and is never loaded",
    b"\x1f\x8b": "compressed by gzip",
    b"<": "HTML or XML, perhaps the error page of a download",
    b"version ": "a Git LFS pointer (git lfs pull gets the file)",
}
"""What files of other formats start with."""

AGAIN = "copy it again from where it is whole, or make it again"
OTHER = "give a file that gradtrace wrote for this"
ROOM = "free some space, or choose a folder that you may write to"


class BadFile(GradtraceError):
    """A file that cannot be read or written: missing, damaged, of another kind, no space left."""


class Contents(NamedTuple):
    """What a file holds."""

    kind: str
    meta: dict[str, Any]
    tensors: dict[str, Tensor]


def write(
    path: str | os.PathLike[str], kind: str, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file, all of it or nothing: what was there stays until the new one is whole.

    ``meta`` holds what JSON can: None, bool, int, float, str, lists (tuples become lists) and dicts
    with str keys. Tensors may have any name, share memory, and require grad.
    """
    with _replacing(path) as temporary:
        plain = _plain(tensors)
        document = _document(kind, meta, dict(zip(plain, tensors)))
        save_file(plain, temporary, {"gradtrace": document})
        _seal(temporary)


def put(path: str | os.PathLike[str], text: str) -> None:
    """Write a text as UTF-8, all of it or nothing, as ``write`` does."""
    with _replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file beside ``path`` that takes its place in the end, if nothing goes wrong."""
    with _about(path, f"was not written ({{}}); what was there is untouched: {ROOM}") as at:
        _permit(at)
        temporary = at.with_name(f".gradtrace-{secrets.token_hex(8)}.tmp")
        try:
            with open(temporary, "xb"):
                mode = S_IMODE((at if at.exists() else temporary).stat().st_mode)
            yield temporary
            with suppress(OSError):  # save_file makes private files; some systems know no modes
                os.chmod(temporary, mode)
            os.replace(temporary, at)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], kind: str | None = None) -> Contents:
    """Read what ``write`` wrote, each byte checked; if a ``kind`` is given, that kind only.

    Nothing in a file is ever run. Tensors come back on the CPU, in memory of their own.
    """
    with _about(path, f"is cut short or damaged ({{}}): {AGAIN}") as at, _opened(at) as file:
        header = _header(file)
        with safe_open(at, "pt", device="cpu") as held:
            document = _parsed(held.metadata() or {})
            names = _checked(document, kind, held.keys())
            if _digest(header, document["sha256"], file) != document["sha256"]:
                raise BadFile(f"is damaged, its checksum is wrong: {AGAIN}")
            tensors = {name: held.get_tensor(key).clone() for key, name in names.items()}
    return Contents(document["kind"], document["meta"], tensors)


@contextmanager
def _about(path: str | os.PathLike[str], otherwise: str) -> Iterator[Path]:
    """Where a path leads; what goes wrong there becomes a BadFile that names the file."""
    called = repr(os.fspath(path))
    try:
        at = Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise BadFile(f"{called} leads nowhere ({error}): give another path") from error
    try:
        yield at
    except BadFile as error:
        raise BadFile(f"{called} {error}") from error.__cause__
    except Exception as error:  # of hostile files, libraries complain in many ways
        raise BadFile(f"{called} {otherwise.format(repr(str(error)[:200]))}") from error


# Writing -----------------------------------------------------------------------------------------


def _permit(at: Path) -> None:
    """Refuse to put a file in place of a device or a read-only file, as ``os.replace`` would."""
    if not at.parent.is_dir():
        raise BadFile("is in a folder that does not exist: make the folder first")
    if at.exists() and not at.is_file():
        raise BadFile("is a folder or a device: give the name of a file to write")
    if at.exists() and not os.access(at, os.W_OK):
        raise BadFile("is read-only: make it writable, or choose another name")


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors wants them: dense, contiguous, on the CPU, each in memory of its own."""
    plain: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if not DTYPES.fullmatch(dtype) or tensor.layout is not torch.strided or tensor.is_meta:
            what = f"{name[:80]!r} is {tensor.layout}, {tensor.device}, {dtype}"
            raise BadFile(f"cannot hold every tensor ({what}): give dense ones of real numbers")
        bare = tensor.detach().cpu().resolve_neg().contiguous()
        storage = bare.untyped_storage().data_ptr()
        plain[f"t{len(plain)}"] = bare.clone() if storage in seen else bare
        seen.add(storage)
    return plain


def _document(kind: str, meta: Mapping[str, Any], names: dict[str, str]) -> str:
    if not all(isinstance(text, str) for text in (kind, *names.values())):
        raise BadFile("needs text as its kind and as the names of tensors: use str")
    document = {
        "schema": SCHEMA,
        "sha256": BLANK,  # the first such zeros in the file; _seal finds them by that
        "kind": kind,
        "gradtrace": sys.modules["gradtrace"].__version__,
        "torch": str(torch.__version__),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "names": names,
        "meta": _encoded(dict(meta)),
    }
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def _encoded(value: object, depth: int = 0) -> object:
    """As strict JSON, of which ``_decoded`` makes the value again.

    >>> _encoded({"$a": [float("inf"), 2**60]})
    {'$$a': [{'$float': 'inf'}, {'$int': '0x1000000000000000'}]}
    """
    if depth > DEPTH:
        raise BadFile(f"cannot hold metadata of more than {DEPTH} levels: make it flatter")
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


def _seal(path: Path) -> None:
    """Put the checksum in its place, and see the file onto the disk."""
    with open(path, "r+b") as file:
        if (size := int.from_bytes(file.read(8), "little")) > HEADER:
            raise BadFile(f"would have {size:,} bytes of metadata, over the limit of {HEADER:,}")
        file.seek(0)
        header = _header(file)
        digest = _digest(header, BLANK, file)
        file.seek(header.index(BLANK.encode()))
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())


# Reading -----------------------------------------------------------------------------------------


def _opened(at: Path) -> BinaryIO:
    try:
        if at.is_dir():
            raise BadFile("is a folder: name a file in it")
        if at.exists() and not at.is_file():  # opening a pipe could wait for ever
            raise BadFile("is a device or a pipe: copy it to a file first")
        return open(at, "rb")
    except FileNotFoundError:
        raise BadFile("does not exist: check the name and the folder") from None
    except OSError as error:
        raise BadFile(f"cannot be opened ({error.strerror}): check its permissions") from error


def _header(file: BinaryIO) -> bytes:
    """The length of the header and the header itself, if they can be what they should."""
    start, length = file.read(9), os.fstat(file.fileno()).st_size
    if not start:
        raise BadFile(f"is empty: {AGAIN}")
    if start[8:] != b"{":
        found = next((FOREIGN[known] for known in FOREIGN if start.startswith(known)), None)
        raise BadFile(f"is {found or 'not a gradtrace file, or cut short at once'}: {OTHER}")
    size = int.from_bytes(start[:8], "little")
    if size > HEADER:
        raise BadFile(f"is damaged, its header would have {size:,} bytes: {AGAIN}")
    if size + 8 > length:
        raise BadFile(f"is cut short, its header alone has {size:,} bytes: {AGAIN}")
    file.seek(0)
    return file.read(8 + size)


def _digest(header: bytes, digest: str, rest: BinaryIO) -> str:
    """The checksum of header and rest, with zeros for the checksum that the header holds."""
    total = sha256(header.replace(digest.encode(), BLANK.encode(), 1))
    while chunk := rest.read(1 << 20):
        total.update(chunk)
    return total.hexdigest()


def _parsed(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The document, if it has the form of a version that is known here."""
    if "gradtrace" not in metadata:
        raise BadFile(f"is a safetensors file that gradtrace did not write: {OTHER}")
    try:
        found = json.loads(metadata["gradtrace"], object_pairs_hook=_decoded)
    except RecursionError:
        raise BadFile(f"has metadata nested too deep to be read: {OTHER}") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if type(schema) is int and schema > SCHEMA:
        raise BadFile(f"was made by a newer gradtrace: {UPDATE}")
    if type(schema) is not int or schema < 1:
        raise BadFile(f"has metadata of no known version: {AGAIN}")
    for key, kind in FIELDS.items():
        if not isinstance(found.get(key), kind):
            raise BadFile(f"has metadata without a proper {key!r}: {AGAIN}")
    return dict(found)


def _decoded(pairs: list[tuple[str, Any]]) -> object:
    """A value from its JSON object; keys must differ, and mean something if they start with $."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    match pairs:
        case [("$int", str(digits))]:
            return int(digits, 16)
        case [("$float", str(name))]:
            return FLOATS[name]
    if any(re.match(r"\$(?!\$)", key) for key, _ in pairs):
        raise ValueError("a key starts with a single $")
    return {key.removeprefix("$"): value for key, value in pairs}


def _checked(document: dict[str, Any], kind: str | None, keys: Iterable[str]) -> dict[str, str]:
    """The name of each tensor by its key, if the file holds the kind and the tensors it should."""
    if kind not in (None, held := document["kind"]):
        raise BadFile(f"holds {held[:80]!r}, and {kind!r} was asked for: {OTHER}")
    strange = [key for key in keys if not re.fullmatch("t[0-9]+", key)]
    if strange:
        raise BadFile(f"holds a tensor under a key never written, {strange[0][:80]!r}: {OTHER}")
    names: dict[str, str] = document["names"]
    if names.keys() != set(keys) or not all(isinstance(name, str) for name in names.values()):
        raise BadFile(f"names other tensors than it holds: {AGAIN}")
    if len(set(names.values())) < len(names):
        raise BadFile(f"gives two tensors the same name: {AGAIN}")
    return names
