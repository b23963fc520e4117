"""Files that are written whole or not at all, and lines of JSON that are appended.

A file is written beside its place and then moved there, so that who reads it never sees half of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any

from gradtrace.errors import BadFile


@contextmanager
def naming(path: str | os.PathLike[str], verb: str) -> Iterator[Path]:
    """The path, expanded; an error of the system inside says which file it was and what to do."""
    try:
        yield Path(path).expanduser()
    except OSError as error:
        advice = "choose a folder that you may write to" if verb == "written" else "check the name"
        reason = error.strerror or str(error)
        raise BadFile(f"{os.fspath(path)!r} cannot be {verb} ({reason}): {advice}") from error
    except (RuntimeError, ValueError) as error:
        raise BadFile(f"{os.fspath(path)!r} cannot be {verb} ({error})") from error


def made_folder(path: str | os.PathLike[str]) -> Path:
    """A folder, made if it is not there; errors name it."""
    with naming(path, "written") as at:
        at.mkdir(parents=True, exist_ok=True)
        return at


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A new file to write to, which takes the place of ``path`` when the block ends without an
    error.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/a.txt") as new:
    ...         _ = new.write_text("whole")
    ...     [(file.name, file.read_text()) for file in Path(folder).iterdir()]
    [('a.txt', 'whole')]
    """
    with naming(path, "written") as at:
        new = at.with_name(f".{at.name[:100]}.{os.getpid()}.new")
        try:
            new.touch()
            yield new
            with open(new, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(new, at)
        finally:
            with suppress(OSError):
                new.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text, whole or not at all."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file; errors name it."""
    with naming(path, "read") as at:
        return at.read_text(encoding="utf-8")


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds; errors name it."""
    text = read_text(path)
    with naming(path, "read"):
        return json.loads(text)


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write strict JSON: NaN and infinities become texts."""
    write_text(path, json.dumps(json_value(data), ensure_ascii=False, indent=1))


def append_line(path: str | os.PathLike[str], data: Any) -> None:
    """Append one line of JSON; a line that an earlier process left unfinished is ended first."""
    with naming(path, "written") as at, open(at, "ab+") as file:
        if file.tell() and not _ended(file):
            file.write(b"\n")
        file.write(json.dumps(json_value(data), ensure_ascii=True).encode() + b"\n")


def read_lines(path: str | os.PathLike[str]) -> list[Any]:
    """The lines of JSON in a file; one that was not finished when its process ended is left out."""
    text, found = read_text(path), []
    for line in text.splitlines():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def json_value(value: Any) -> Any:
    """A value for strict JSON: tuples become lists, NaN and infinities texts.

    >>> json_value({"loss": float("nan"), "sizes": (1, 2)})
    {'loss': 'nan', 'sizes': [1, 2]}
    """
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _ended(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")
