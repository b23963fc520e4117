"""Compiled kernels are kept between processes, where that is safe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradtrace.kernels import cuda_cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "cache"
    monkeypatch.setenv("GRADTRACE_CACHE", str(found))
    return found


class Compiler:
    """Counts how often it is asked, and returns that."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> bytes:
        self.asked += 1
        return b"binary %d" % self.asked


def test_a_binary_is_compiled_once(folder: Path) -> None:
    compiler = Compiler()
    for _ in range(3):
        assert cuda_cache.binary(("source", "2.13"), compiler) == b"binary 1"
    assert cuda_cache.binary(("source", "2.14"), compiler) == b"binary 2"
    assert cuda_cache.binary(("source", "2.13"), compiler, again=True) == b"binary 3"
    assert cuda_cache.binary(("source", "2.13"), compiler) == b"binary 3"
    assert sorted(path.suffix for path in folder.iterdir()) == [".cubin"] * 2
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 100], ids=len)
def test_a_damaged_one_is_compiled_again(folder: Path, content: bytes) -> None:
    compiler = Compiler()
    cuda_cache.binary(("source",), compiler)
    (path,) = folder.iterdir()
    path.write_bytes(content)
    assert cuda_cache.binary(("source",), compiler) == b"binary 2"
    assert cuda_cache.binary(("source",), compiler) == b"binary 2"


def test_nothing_is_kept_where_others_can_write(folder: Path) -> None:
    compiler = Compiler()
    folder.mkdir()
    folder.chmod(0o777)
    for n in (1, 2):
        assert cuda_cache.binary(("source",), compiler) == b"binary %d" % n
    assert not [*folder.iterdir()]


def test_nothing_is_kept_if_not_wanted_or_not_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, file = Compiler(), tmp_path / "file"
    file.write_text("")
    for place in ("", str(file), str(file / "below")):
        monkeypatch.setenv("GRADTRACE_CACHE", place)
        before = compiler.asked
        cuda_cache.binary(("source",), compiler)
        cuda_cache.binary(("source",), compiler)
        assert compiler.asked == before + 2
    assert [*tmp_path.iterdir()] == [file]


def test_a_full_disk_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cuda_cache.binary(("source",), Compiler()) == b"binary 1"
    assert not [*folder.iterdir()]


def test_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_cache, "CACHED_BINARIES", 3)
    compiler = Compiler()
    for n in range(6):
        cuda_cache.binary((str(n),), compiler)
        for path in folder.iterdir():
            os.utime(path, (path.stat().st_mtime - 10,) * 2)
    assert len([*folder.iterdir()]) == 3
    assert cuda_cache.binary(("5",), compiler) == b"binary 6"
    assert cuda_cache.binary(("0",), compiler) == b"binary 7"


def test_the_place_in_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADTRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    compiler = Compiler()
    cuda_cache.binary(("source",), compiler)
    assert cuda_cache.binary(("source",), compiler) == b"binary 1"
    (kept,) = tmp_path.rglob("*.cubin")
    assert kept.parent.name == "gradtrace"
