"""The benchmarks as a tool: what they write, on small cases, and never how long it takes."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import fresh
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from gradtrace.benchmarks import cases, trained
from gradtrace.benchmarks import run as running
from gradtrace.benchmarks.page import markdown
from gradtrace.benchmarks.results import Absent, ResultColumn, Section, Setting
from gradtrace.benchmarks.table import ELSEWHERE
from gradtrace.cli import app
from gradtrace.experiments.branching import Branching, branching
from gradtrace.experiments.harness import machine
from gradtrace.io import atomic_files

OPTIONAL = ("matplotlib", "transformers", "torch_semiring_einsum")


def bench(*args: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, args)])


# A whole run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page, the JSON and the figures of a quick run of everything."""
    folder = tmp_path_factory.mktemp("bench")
    places = ("--out", folder / "page.md", "--figures", folder / "figures")
    result = bench("--quick", "--device", "cpu", *places)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("# Benchmarks")
    return folder


@pytest.fixture(scope="module")
def data(written: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((written / "page.json").read_text(encoding="utf-8"))
    return found


def test_every_section_is_there(data: dict[str, Any]) -> None:
    assert list(data["sections"]) == list(running.SECTIONS)


def test_what_is_left_out_is_what_is_not_installed(data: dict[str, Any]) -> None:
    missing = {name for name in OPTIONAL if importlib.util.find_spec(name) is None}
    named = {line.split(": ")[1].split(" is not")[0] for line in data["left_out"]}
    assert named == missing


def test_rows_fit_their_columns_and_numbers_are_finite(data: dict[str, Any]) -> None:
    for section in data["sections"].values():
        assert section["rows"] and section["seconds"] >= 0
        for row in section["rows"]:
            assert len(row) == len(section["columns"])
            for cell, column in zip(row, section["columns"]):
                assert cell is None or isinstance(cell, str) is not bool(column["form"])
                if isinstance(cell, (int, float)):
                    assert math.isfinite(cell) and cell >= 0


def test_every_model_is_compared_in_every_way(data: dict[str, Any]) -> None:
    rows = data["sections"]["models"]["rows"]
    for case in cases.SMALL:
        if not case.needs or importlib.util.find_spec(case.needs) is not None:
            ways = [row[1] for row in rows if row[0] == case.name]
            assert ways[:4] == [
                "loss.backward()",
                "torch.autograd.grad, watched",
                "influence",
                "Viterbi values",
            ]
            assert len(ways) == (7 if case.paths else 4)


def test_the_machine_is_told(data: dict[str, Any]) -> None:
    assert data["machine"]["cores"] > 0 and data["machine"]["threads"] == torch.get_num_threads()
    assert data["versions"]["torch"] == torch.__version__
    assert set(data["load"]) == {"start", "end"}
    assert data["quick"] is True


def test_the_page_is_written_from_the_json(written: Path, data: dict[str, Any]) -> None:
    figures = "figures" if (written / "figures").exists() else None
    page = (written / "page.md").read_text(encoding="utf-8")
    assert page == markdown(data, figures)
    assert "say nothing about speed" in page and "missed" not in page


def test_tables_of_the_page_are_even(written: Path) -> None:
    """A | inside a cell would be another column."""
    width = 0
    for line in (written / "page.md").read_text(encoding="utf-8").splitlines():
        bars = line.replace("\\|", "").count("|")
        assert not width or not bars or bars == width, line
        width = bars if line.startswith("|") else 0


def test_figures_are_drawn_and_shown(written: Path, data: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    page = (written / "page.md").read_text(encoding="utf-8")
    figures = [f for section in data["sections"].values() for f in section["figures"]]
    assert len(figures) >= 4
    for figure in figures:
        path = written / "figures" / f"{figure['name']}.svg"
        drawn = "".join(ElementTree.parse(path).getroot().itertext())
        for text in (figure["title"], figure["x"], figure["y"]):
            assert text in drawn
        assert all(curve["label"] in drawn for curve in figure["curves"])
        assert f"(figures/{figure['name']}.svg)" in page


# The command -------------------------------------------------------------------------------------


def test_one_section_as_json() -> None:
    result = bench("--quick", "--only", "contraction", "--rounds", 3, "--json")
    found = json.loads(result.stdout)
    assert list(found["sections"]) == ["contraction"]
    assert {row[-1] for row in found["sections"]["contraction"]["rows"]} == {3}


def test_sections_that_are_not_run_again_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("peak", "contraction"):
        monkeypatch.setitem(running.SECTIONS, name, lambda _: Section("first", []))
    out = tmp_path / "page.md"
    bench("--quick", "--only", "peak", "--out", out)
    bench("--quick", "--only", "contraction", "--out", out)
    monkeypatch.setitem(running.SECTIONS, "peak", lambda _: Section("second", []))
    bench("--quick", "--only", "peak", "--out", out)
    found = json.loads(out.with_suffix(".json").read_text())["sections"]
    assert {name: one["title"] for name, one in found.items()} == {
        "contraction": "first",
        "peak": "second",
    }
    page = out.read_text(encoding="utf-8")
    assert page.count("\nTaken ") == 2 and page.index("## first") < page.index("## second")
    monkeypatch.setattr(machine, "machine", lambda: {"processor": "another"})
    result = bench("--quick", "--only", "peak", "--out", out)
    assert result.exit_code == 2 and "of another machine" in result.stderr
    assert out.read_text(encoding="utf-8") == page


def test_an_unknown_section_is_refused() -> None:
    result = bench("--only", "contractoin")
    assert result.exit_code == 2 and "did you mean contraction" in result.stderr


def test_a_section_that_fails_is_told_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(_: Setting) -> Section:
        raise MemoryError("too large")

    monkeypatch.setitem(running.SECTIONS, "peak", fails)
    out = tmp_path / "new" / "page.md"
    result = bench("--quick", "--only", "peak", "--only", "contraction", "--out", out)
    assert result.exit_code == 1
    assert "LEFT OUT: peak: MemoryError: too large" in result.stderr
    assert "- peak: MemoryError: too large" in out.read_text(encoding="utf-8")
    assert list(json.loads(out.with_suffix(".json").read_text())["sections"]) == ["contraction"]


def test_a_page_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    result = bench("--quick", "--only", "peak", "--out", tmp_path)
    assert result.exit_code == 2 and "cannot be written (Is a directory)" in result.output
    assert "peak" not in result.output


def test_a_disk_that_is_full_loses_no_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("peak", "contraction"):
        monkeypatch.setitem(running.SECTIONS, name, lambda _: Section("first", []))
    out = tmp_path / "page.md"
    bench("--quick", "--only", "peak", "--out", out)
    held = out.read_bytes(), out.with_suffix(".json").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_files, "put", full)
    result = bench("--quick", "--only", "contraction", "--out", out)
    assert result.exit_code == 1 and "No space left" in result.stderr
    assert result.stdout.count("## first") == 2
    assert held == (out.read_bytes(), out.with_suffix(".json").read_bytes())


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[" * 100_000, '{"sections": {}}', "\udcff"])
def test_numbers_beside_a_page_that_are_damaged_are_told(tmp_path: Path, text: str) -> None:
    out = tmp_path / "page.md"
    out.with_suffix(".json").write_text(text, errors="surrogateescape")
    result = bench("--quick", "--only", "peak", "--out", out)
    assert result.exit_code == 2 and "is not what gradtrace bench wrote" in result.stderr


def test_without_optional_packages_the_rest_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in OPTIONAL else real(name)
    )
    result = bench(
        *("--quick", "--only", "others", "--only", "models", "--json"),
        *("--out", tmp_path / "page.md", "--figures", tmp_path / "figures"),
    )
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    told = "\n".join(found["left_out"])
    assert all(f"{name} is not installed" in told for name in OPTIONAL)
    assert all(f"LEFT OUT: {line}" in result.stderr for line in found["left_out"])
    names = {row[0] for row in found["sections"]["models"]["rows"]}
    assert names == {case.name for case in cases.SMALL if not case.needs}
    assert "](" not in (tmp_path / "page.md").read_text(encoding="utf-8")


# For a GPU ---------------------------------------------------------------------------------------


def test_sections_for_a_gpu_say_where_they_were_taken(data: dict[str, Any], written: Path) -> None:
    page = (written / "page.md").read_text(encoding="utf-8")
    for name in ELSEWHERE:
        section = data["sections"][name]
        assert "Not on a GPU: a trial of the benchmark." in section["notes"]
        assert f"torch {torch.__version__}" in section["where"] and section["where"] in page
        assert data["machine"]["processor"] in section["where"]
    sizes = [row[0] for row in data["sections"]["gpu-tokens"]["rows"]]
    assert sizes == [8, 16]
    assert sum("tokens^" in note for note in data["sections"]["gpu-tokens"]["notes"]) == 4
    ways = [row[0] for row in data["sections"]["gpu-billion"]["rows"]]
    assert ways[0] == "loss.backward()" and len(ways) == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_said_and_what_the_page_has_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    result = bench("--quick", "--only", "gpu-contraction", "--out", out)
    assert result.exit_code == 0
    assert "- gpu-contraction: no GPU here" in out.read_text(encoding="utf-8")
    bench("--quick", "--only", "gpu-contraction", "--device", "cpu", "--out", out)
    before = json.loads(out.with_suffix(".json").read_text())["sections"]
    result = bench("--quick", "--only", "gpu-contraction", "--out", out)
    assert "no GPU here; the figures that the page has are kept" in result.stderr
    data = json.loads(out.with_suffix(".json").read_text())
    assert data["sections"] == before and not data["left_out"]
    result = bench("--quick", "--only", "gpu-gpt2", "--device", "nowhere")
    assert result.exit_code == 0 and "no device 'nowhere' here" in result.stdout


def test_sections_of_two_machines_stand_on_one_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in running.SECTIONS:
        monkeypatch.setitem(running.SECTIONS, name, lambda _: Section("here", []))
    out, read = tmp_path / "page.md", lambda: json.loads((tmp_path / "page.json").read_text())
    bench("--only", "contraction", "--out", out)
    first = read()
    monkeypatch.setattr(machine, "machine", lambda: {**first["machine"], "processor": "another"})
    monkeypatch.setitem(running.SECTIONS, "gpu-gpt2", lambda _: Section("there", []))
    bench("--only", "gpu-gpt2", "--out", out)
    both = read()
    assert {n: one["title"] for n, one in both["sections"].items()} == {
        "contraction": "here",
        "gpu-gpt2": "there",
    }
    assert both["machine"] == first["machine"]  # that of all sections that do not name theirs

    def absent(_: Setting) -> Section:
        raise Absent("no GPU here")

    monkeypatch.setitem(running.SECTIONS, "gpu-gpt2", absent)
    bench("--out", out)  # all of them, on the other machine
    whole = read()
    assert whole["machine"]["processor"] == "another"
    assert whole["sections"]["gpu-gpt2"]["title"] == "there"
    assert list(whole["sections"]) == list(running.SECTIONS)


def test_any_failure_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(_: Setting) -> Section:
        raise KeyError("a bug")

    monkeypatch.setitem(running.SECTIONS, "gpu-gpt2", fails)
    monkeypatch.setitem(running.SECTIONS, "gpu-width", lambda _: Section("there", []))
    out = tmp_path / "page.md"
    result = bench("--only", "gpu-gpt2", "--only", "gpu-width", "--out", out)
    assert result.exit_code == 1 and "Traceback" in result.stderr
    assert list(json.loads(out.with_suffix(".json").read_text())["sections"]) == ["gpu-width"]


def test_it_runs_with_torch_and_numpy_alone() -> None:
    """On the GPU's machine nothing can be installed."""
    program = (
        "import sys\n"
        "for name in ('typer', 'click', 'rich', 'networkx', 'safetensors', 'pandas', 'scipy',\n"
        "             'matplotlib', 'sklearn', 'hypothesis'):\n"
        "    sys.modules[name] = None\n"
        "from gradtrace.benchmarks.__main__ import main\n"
        "print(main(['--quick', '--device', 'cpu', '--only', 'gpu-contraction', '--only', 'x']))\n"
        "sys.exit(main(['--quick', '--device', 'cpu', '--only', 'gpu-contraction']))\n"
    )
    done = fresh.python("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2\n# Benchmarks") and "| smaller | (1, 3, 5, 2) |" in done.stdout
    assert "there is no section 'x'" in done.stderr


# The page ----------------------------------------------------------------------------------------


def test_a_target_says_whether_it_was_met() -> None:
    section = {
        "title": "t",
        "columns": [
            {"title": "ratio", "form": ".1f", "limits": ""},
            {"title": "aim", "form": ".1f", "limits": "ratio"},
            {"title": "floor", "form": ".0f", "limits": "ratio", "least": True},
        ],
        "rows": [[1.5, 2.0, None], [2.5, 2.0, 3], [2.5, None, 2], [None, 2.0, None]],
        "notes": [],
        "figures": [],
    }
    page = markdown(
        {
            "machine": machine.machine(),
            "versions": {},
            "load": {"start": 0.0, "end": 0.0},
            "date": "",
            "seconds": 0,
            "quick": False,
            "sections": {"s": section},
            "left_out": [],
        }
    )
    assert "| 1.5 | 2.0 met |  |" in page
    assert "| 2.5 | 2.0 **missed** | 3 **missed** |" in page
    assert "| 2.5 |  | 2 met |" in page
    assert "|  | 2.0 |  |" in page


def test_rows_of_another_width_are_an_error() -> None:
    with pytest.raises(AssertionError):
        Section("t", [ResultColumn("a"), ResultColumn("b")]).add("one")


# The chapter's networks --------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_deep_networks_have_the_chapters_sizes(layers: int) -> None:
    model, loss = cases.deep(layers)
    shapes = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    assert shapes == [(10, 20), *[(20, 20)] * (layers - 1), (20, 15)]
    assert sum(isinstance(m, nn.Tanh) for m in model.modules()) == layers + 1
    assert loss().shape == ()


def test_the_benchmark_has_the_networks_of_the_experiment() -> None:
    model, loss = cases.branched(7, layers=3)
    assert isinstance(model, Branching) and str(model) == str(branching(7, layers=3))
    assert torch.equal(loss(), cases.branched(7, layers=3).loss())
    assert loss().shape == ()


# Models ------------------------------------------------------------------------------------------


def test_names_of_models_are_unique() -> None:
    """A new process finds its model by name."""
    names = [case.name for case in (*cases.FULL, *cases.SMALL)]
    assert len(names) == len(set(names))


def test_the_products_of_a_trained_model_are_its_gradients() -> None:
    torch.manual_seed(0)
    model, letters = trained.Reader(16), trained.text()
    found = trained._factors(model, letters)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and not name.endswith("out_proj"):
            g, x = found[f"{name}, weight gradient"]
            assert layer.weight.grad is not None
            torch.testing.assert_close(g @ x, layer.weight.grad)
            rows, weight = found[f"{name}, activation gradient"]
            assert torch.equal(rows, g.T) and torch.equal(weight, layer.weight)
    assert len(found) == 10


def test_training_lowers_the_loss() -> None:
    found = trained.products(30, 16)
    assert found.after < found.before - 0.3


def test_of_what_was_not_told_nothing_is_said() -> None:
    """A ratio to a time of 0 is no number, and a page has none that JSON does not know."""
    section = Section("t", [ResultColumn("a"), ResultColumn("b", ".2f"), ResultColumn("c", "d")])
    section.add("x", float("nan"), 3)
    assert section.rows == [["x", None, 3]]
