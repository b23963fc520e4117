"""What is said of versions is what was run; wheels without kernels are not taken for wheels."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from contextlib import nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from gradtrace.pytorch import internals

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()


def script(name: str) -> ModuleType:
    """One of the scripts of .ci, which is no package."""
    spec = spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


matrix, wheels = script("matrix"), script("wheels")


def test_bounds_are_those_of_the_matrix() -> None:
    versions = [tuple(map(int, cell.split(":")[0].split("."))) for cell in matrix.CELLS]
    low = ".".join(map(str, min(versions)[:2]))
    assert f'"torch>={low}"' in PROJECT
    pythons = {cell.split(":")[1] for cell in matrix.CELLS}
    assert pythons == {f"3.{minor}" for minor in range(10, 15)}


def test_versions_that_are_called_tested_have_passed() -> None:
    """Both ends are the matrix's, and tests have passed there; none in between has failed."""
    ends = [tuple(map(int, end.split("."))) for end in internals.TESTED.split(" to ")]
    rows = {tuple(map(int, row[0].split(".")[:2])): row for row in matrix.read().values()}
    assert ends == [min(rows), max(rows)]
    for end in ends:
        assert int(rows[end][4]) > 50, rows[end]


def test_the_page_has_a_row_for_every_cell_and_hides_none_that_failed() -> None:
    rows = matrix.read()
    for name in matrix.CELLS:
        torch, python, *rest = name.split(":")
        row = rows[torch, python, "lowest" if rest else "newest"]
        assert row[5] == "0" or (row[4] == "**not run**" and row[-1]), row


def test_the_lowest_version_is_asked_for() -> None:
    assert matrix.lowest("numpy>=1.26") == "numpy==1.26"


def test_a_cell_that_cannot_be_made_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    row = matrix.cell("2.8.0:3.99", Path("none.whl"), "0")
    assert row[4] == "**not run**" and "no Python 3.99 here" in row[-1]
    assert "NOT RUN: torch 2.8.0 with Python 3.99" in capsys.readouterr().err


AARCH64, X86_64 = (bytes(18) + machine.to_bytes(2, "little") for machine in (183, 62))
BAD = {
    "no kernels": ({}, "has no kernels"),
    "another machine": ({wheels.LIBRARY: AARCH64}, "x86_64"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wheel_that_is_wrong_is_refused(name: str, tmp_path: Path) -> None:
    contents, text = BAD[name]
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as file:
        for path, data in contents.items():
            file.writestr(path, data)
    with pytest.raises(SystemExit, match=text):
        wheels.check_library(tmp_path / "a.whl", "x86_64")


@pytest.mark.parametrize("tag", ["manylinux_2_34_x86_64", "linux_x86_64", "manylinux_2_17_aarch64"])
def test_a_wheel_for_newer_systems_than_torch_is_refused(tag: str) -> None:
    wheels.check_tag(Path("a-1-py3-none-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"), "x86_64")
    with pytest.raises(SystemExit, match="asks for more"):
        wheels.check_tag(Path(f"a-1-py3-none-{tag}.whl"), "x86_64")


SOURCES = ("pyproject.toml", "CMakeLists.txt", "gradtrace/__init__.py")
SDISTS = {
    "whole": ((*SOURCES, "PKG-INFO"), None),
    "with the packages of an environment": (
        (*SOURCES, ".venv/lib/other/tests/a.py"),
        "git ignores",
    ),
    "without the kernels' build": (SOURCES[:1], r"lacks CMakeLists.txt, gradtrace/__init__.py"),
}


@pytest.mark.parametrize("name", SDISTS)
def test_sources_are_those_of_the_project(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, text = SDISTS[name]
    monkeypatch.setattr(wheels, "run", lambda *command, **options: "\n".join(SOURCES))
    with tarfile.open(tmp_path / "a-1.tar.gz", "w:gz") as file:
        for path in files:
            file.addfile(tarfile.TarInfo(f"a-1/{path}"))
    with pytest.raises(SystemExit, match=text) if text else nullcontext():
        wheels.check_sources(tmp_path / "a-1.tar.gz")


def test_what_git_ignores_is_not_searched_for_sources() -> None:
    """An environment in the checkout takes a minute to look through, and its tests got in."""
    (least,) = re.findall(r'minimum-version = "0\.(\d+)"', PROJECT)
    assert int(least) >= 12 and "sdist.include" not in PROJECT


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_extra_of_dev_is_there() -> None:
    import tomllib

    extras = tomllib.loads(PROJECT)["project"]["optional-dependencies"]
    (own,) = [line for line in extras["dev"] if line.startswith("gradtrace[")]
    assert set(re.findall(r"\w+", own.removeprefix("gradtrace"))) <= extras.keys()
