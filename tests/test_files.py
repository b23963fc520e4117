"""Files are written whole or not at all; lines are appended, and torn ones left out."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest

from gradtrace import files
from gradtrace.errors import BadFile


def test_a_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    files.write_text(file, "before")
    with files.replacing(file) as new:
        new.write_text("after")
        assert file.read_text() == "before"
    assert file.read_text() == "after" and [*tmp_path.iterdir()] == [file]


def test_an_error_within_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    files.write_text(file, "before")
    with pytest.raises(ZeroDivisionError), files.replacing(file) as new:
        new.write_text("half")
        raise ZeroDivisionError
    assert file.read_text() == "before" and [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    files.write_text(file, "before")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(BadFile, match=r"a\.txt. cannot be written .No space left"):
        files.write_json(file, {"after": 1})
    assert file.read_text() == "before" and [*tmp_path.iterdir()] == [file]


KILLED = """
import os, signal
from gradtrace import files
with files.replacing("a.txt") as new:
    new.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_what_was_there(tmp_path: Path) -> None:
    files.write_text(tmp_path / "a.txt", "before")
    assert fresh.python("-c", KILLED, cwd=tmp_path).returncode != 0
    assert (tmp_path / "a.txt").read_text() == "before"
    files.write_text(tmp_path / "a.txt", "after")
    assert files.read_text(tmp_path / "a.txt") == "after"


USES: dict[str, Callable[[Path], object]] = {
    "write_text": lambda path: files.write_text(path, ""),
    "append_line": lambda path: files.append_line(path, {}),
    "read_text": files.read_text,
    "read_json": files.read_json,
    "read_lines": files.read_lines,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("place", ["none/a.json", "", "a\0b"])
def test_a_path_that_is_no_file_gets_a_sentence(tmp_path: Path, use: str, place: str) -> None:
    """A folder that is not there, a folder, a name that no system takes."""
    with pytest.raises(BadFile, match=r"cannot be (read|written) \(") as found:
        USES[use](tmp_path / place)
    assert "\n" not in str(found.value)
    assert not any(tmp_path.iterdir())


def test_what_is_no_json_gets_a_sentence(tmp_path: Path) -> None:
    for text in ("", "{", "\xff"):
        (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(BadFile, match=r"a\.json' cannot be read"):
            files.read_json(tmp_path / "a.json")


def test_lines_are_appended_after_a_torn_one(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    files.append_line(file, {"step": 0, "name": "\u202e\ud800\n"})
    with open(file, "a") as half:
        half.write('{"step": 1, "lo')  # as a process that was killed left it
    assert files.read_lines(file) == [{"step": 0, "name": "\u202e\ud800\n"}]
    files.append_line(file, {"step": 2, "loss": float("nan")})
    assert [line["step"] for line in files.read_lines(file)] == [0, 2]


def test_json_is_strict(tmp_path: Path) -> None:
    data = {"a": (1, float("inf")), 3: [None, True, Path("x")], "b": "\u2028\ud800"}
    files.write_json(tmp_path / "a.json", data)
    text = (tmp_path / "a.json").read_text()
    wanted = {"a": [1, "inf"], "3": [None, True, "x"], "b": "\u2028\ud800"}
    assert json.loads(text, parse_constant=lambda _: pytest.fail("not strict")) == wanted
