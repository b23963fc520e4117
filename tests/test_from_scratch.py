"""The tutorial runs on Python alone, says true numbers, and stops where a piece of it is broken."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor

FILE = Path(__file__).parents[1] / "docs" / "from_scratch.py"


def run(path: Path) -> subprocess.CompletedProcess[str]:
    """Without site-packages, so that only the standard library is there."""
    command = [sys.executable, "-I", "-S", "-W", "error", "-X", "utf8", str(path)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=fresh.LONG)


@pytest.fixture(scope="module")
def transcript() -> dict[str, str]:
    """What it says: the number found for each claim. Of equal claims the last stays."""
    done = run(FILE)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = (line.rsplit(maxsplit=1) for line in done.stdout.splitlines())
    return {claim.strip(): number for claim, number in rows}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("from_scratch", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "from_scratch", module)  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


# The file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "number"),
    [
        ("(x + y)·z at (-2, 5, -4)", "-12"),
        ("neuron, σ(s): value", "0.731059"),
        ("neuron, 1 + exp(-s): gradient", "-0.534447"),
        ("paths from W0", "2"),
        ("paths from W2", "1"),
        ("a ladder of 10: paths", "1024"),
        ("a ladder of 6: ENTROPY", "3.29984"),
        ("a dead end: COUNT (4 with the dead)", "3"),
        ("a ladder of 60: COUNT, where no list would end", "1.15292e+18"),
        ("greedy finds a path of weight", "2"),
        ("viterbi finds the heaviest", "3"),
        ("a loop of 200: gradient of the first state", "1.15551e-59"),
        ("edges on its path", "600"),
        ("influence of the left cell: one of three", "0.333333"),
        ("a wrong sign shows: it errs by 2·cos(1)", "1.0806"),
    ],
)
def test_transcript(transcript: dict[str, str], claim: str, number: str) -> None:
    assert transcript[claim] == number


def test_it_is_short() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 400


def test_it_imports_the_standard_library_alone() -> None:
    tree = ast.walk(ast.parse(FILE.read_text(encoding="utf-8")))
    found = [n for n in tree if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {n.module or "" for n in found if isinstance(n, ast.ImportFrom)}
    names |= {alias.name for n in found if isinstance(n, ast.Import) for alias in n.names}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_it_is_silent_when_imported(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    module.check("one", 1.0, 1.0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("found", [1.0 + 1e-8, float("nan"), float("inf"), False])
def test_check_can_fail(module: ModuleType, found: float) -> None:
    with pytest.raises(AssertionError, match="one"):
        module.check("one", found, 1.0)


# Against PyTorch ---------------------------------------------------------------------------------


def ladder(x: Tensor) -> Tensor:
    for _ in range(10):
        x = x.sin() + x.tanh()
    return x


def loop(h: Tensor, w: Tensor, u: Tensor) -> Tensor:
    for _ in range(200):
        h = torch.tanh(w * h + u)
    return h


def cells(*v: Tensor) -> Tensor:
    inputs, left, right = torch.stack(v).view(3, 4)
    return torch.tanh(left @ inputs) + torch.tanh(right @ inputs)


TWINS: dict[str, Callable[..., Tensor]] = {
    "product": lambda x, y, z: (x + y) * z,
    "neuron": lambda w0, x0, w1, x1, w2: torch.sigmoid(w0 * x0 + w1 * x1 + w2),
    "program": lambda w0, w1, w2, p, q: torch.sin(w1 * w0 * p * q) * torch.exp(w2 * w0 * p * q),
    "ladder": ladder,
    "signs": lambda x, w: torch.sin(w * x) * x.relu() + torch.tanh(w * x),
    "fork": lambda x, p, q: x * p + 2 * x * q,
    "shared": lambda w, x: torch.tanh(w * torch.tanh(w * x)),
    "skip": lambda x, w: x + torch.tanh(w * x),
    "loop": loop,
    "cells": cells,
}


def test_every_example_has_a_twin(module: ModuleType) -> None:
    assert module.EXAMPLES.keys() == TWINS.keys()


@pytest.mark.parametrize("name", TWINS)
def test_values_and_gradients_are_those_of_pytorch(module: ModuleType, name: str) -> None:
    f, at = module.EXAMPLES[name]
    leaves: list[Any] = [module.Scalar(value) for value in at]
    root = f(*leaves)
    g, again = module.gradient(root), module.backward(root, module.SUM)
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in at]
    loss = TWINS[name](*tensors)
    assert root.value == pytest.approx(loss.item(), rel=1e-12)
    for leaf, wanted in zip(leaves, torch.autograd.grad(loss, tensors)):
        assert g[leaf] == again[leaf] == pytest.approx(wanted.item(), rel=1e-9, abs=0)


# Broken on purpose -------------------------------------------------------------------------------

BREAKS = {
    "a derivative": ("1 - y * y", "1 + y * y"),
    "a sign": ("-y * y)", "y * y)"),
    "the arguments of a product": ("((self, b), (other, a))", "((self, a), (other, b))"),
    "a term of the gradient": ("g.get(v, 0.0) + w * g[u]", "w * g[u]"),
    "edges not counted": ("uses[v] = uses.get(v, 0) + 1", "uses[v] = 1"),
    "a visit for each edge": ("if not uses[v]:", "if uses[v] >= 0:"),
    "a path": ("reversed(path.vertices[0].edges)", "path.vertices[0].edges[:1]"),
    "the weight of a path": ("path.weight * w))", "w))"),
    "MAX without |·|": ("lambda a, b: a * b, abs)", "lambda a, b: a * b, lambda w: w)"),
    "MAX that sums": ("0.0, 1.0, max,", "0.0, 1.0, lambda a, b: a + b,"),
    "COUNT of dead paths": ("int(w != 0)", "1"),
    "half of the product rule": ("a[0] * b[1] + a[1] * b[0]", "a[0] * b[1]"),
    "a term in a semiring": ("semiring.plus(values.get(v, semiring.zero), term)", "term"),
    "ties to the last": ("> largest.get(v, 0.0)", ">= largest.get(v, 1e-300)"),
    "contributions of 0": ("> largest.get(v, 0.0)", "> largest.get(v, -1.0)"),
    "the largest, with its sign": ("if abs(w * values[u]) >", "if w * values[u] >"),
    "gradients forgotten": ("if abs(w * values[u]) >", "if abs(w) >"),
    "the weight of a traced path": ("weight *= w", "weight = w"),
    "parameters inside": ("for v in order(u)} - component", "for v in order(u)}"),
    "parameters with no way through": ("if v in below and v in pointers", "if v in pointers"),
    "parameters without a path": ("if v in below and v in pointers", "if v in below"),
    "the numerical gradient": ("/ 2e-5", "/ 1e-5"),
}


@pytest.mark.parametrize(("old", "new"), BREAKS.values(), ids=BREAKS)
def test_a_broken_piece_stops_it(old: str, new: str, tmp_path: Path) -> None:
    source = FILE.read_text(encoding="utf-8")
    assert source.count(old) == 1, "break one place"
    broken = tmp_path / "broken.py"
    broken.write_text(source.replace(old, new), encoding="utf-8")
    done = run(broken)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr, done.stderr
