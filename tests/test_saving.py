"""Traces in files: what comes back, and what is refused in one sentence."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import fresh
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import BadFile, GradtraceError
from gradtrace.traced import Trace


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).mean(1)
        found: Tensor = self.out(h + torch.tanh(self.mix(h)))
        return found


def trace(rule: str = "greedy", dtype: torch.dtype = torch.float32) -> Trace:
    torch.manual_seed(0)
    model = Model().to(dtype)
    with gt.watch(model) as watch:
        logits = model(torch.randint(0, 6, (3, 2)))
        loss = F.cross_entropy(logits, torch.randint(0, 6, (3,)))
    return watch.trace(loss, rule=rule)


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path: Path, rule: str, dtype: torch.dtype) -> None:
    made = trace(rule, dtype)
    made.save(tmp_path / "run.gradtrace", sample=20, seed=3)
    found = gt.load(tmp_path / "run.gradtrace")
    assert found.rule == rule and found.notes == made.notes
    assert list(found.gradients) == list(made.gradients)
    for name, grad in made.gradients.items():
        assert torch.equal(found.gradients[name], grad)
    assert torch.equal(found.gradients["out.weight"], made.gradients["embed.weight"])  # tied
    assert found.influence() == made.influence() and found.norms() == made.norms()
    assert found.coverage() == made.coverage(20, 3)
    paths = made.paths(sample=20, seed=3)
    assert len(found.paths()) == len(paths)
    for row, path in zip(found.paths(), paths):
        assert (row.leaf, row.element, row.gradient) == (
            path.name,
            str([*path.index]),
            path.gradient,
        )
        assert row.weight == path.weight and row.way.split(" → ") == path.modules
    assert str(found.influence()) == str(made.influence())


def test_the_model_is_not_needed(tmp_path: Path) -> None:
    made = trace()
    made.save(tmp_path / "x.gradtrace")
    code = "import gradtrace as gt; print(gt.load('x.gradtrace').influence())"
    out = fresh.python("-c", code, cwd=tmp_path, check=True)
    assert out.stdout.strip() == str(made.influence())


def test_hostile_module_names_are_text(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "</script><b>", "a\x00b", "\u202e\ud800", "🔥" * 100, "x" * 10_000]
    model = nn.ModuleDict()
    for name in names:
        model._modules[name] = nn.Linear(2, 2)  # add_module would refuse some
    with gt.watch(model) as watch:
        x = torch.ones(1, 2)
        for name in names:
            x = model._modules[name](x)  # type: ignore[misc]
        loss = x.sum()
    watch.trace(loss).save(tmp_path / "x.gradtrace")
    assert [p.name for p in tmp_path.iterdir()] == ["x.gradtrace"]
    found = gt.load(tmp_path / "x.gradtrace")
    assert f"{names[0]}.weight" in found.gradients
    assert "<b>" not in found.influence()._repr_html_()
    assert set(names) <= found.influence().shares.keys()


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def foreign(file: Path) -> None:
    save_file({"x": torch.ones(2)}, file)


def newer(file: Path) -> None:
    save_file({}, file, {"gradtrace": "trace", "schema": "2", "meta": "{}"})


def changed(file: Path) -> None:
    with safe_open(file, "pt") as found:
        tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
        meta = found.metadata()
    save_file(tensors, file, {**meta, "meta": meta["meta"][:50]})


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda file: file.write_bytes(b""), "is empty: save the trace again"),
    "text": (lambda file: file.write_text("step,loss\n1,2\n" * 9), "is no .gradtrace file: give"),
    "torn": (torn, r"is torn or damaged \(.*\): copy it again"),
    "cut in its head": (
        lambda file: file.write_bytes(file.read_bytes()[:50]),
        "is torn or damaged",
    ),
    "foreign": (foreign, "holds tensors, but no trace: give a file that trace.save wrote"),
    "newer": (newer, "has schema 2, this gradtrace reads 1: update gradtrace"),
    "changed": (changed, r"is damaged, as its parts do not fit together .*: copy it again"),
    "gone": (Path.unlink, r"cannot be read \(No such file or directory\): check the name"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), r"cannot be read \(Is a directory\)"),
}


@pytest.mark.parametrize("harm", BAD)
def test_other_files_are_refused_in_a_sentence(tmp_path: Path, harm: str) -> None:
    file = tmp_path / "run.gradtrace"
    trace().save(file, sample=5)
    change, words = BAD[harm]
    change(file)
    with pytest.raises(BadFile, match=words) as found:
        gt.load(file)
    assert "run.gradtrace" in str(found.value) and "\n" not in str(found.value)


def test_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    file, told = tmp_path / "run.gradtrace", Counter[bool]()
    trace().save(file, sample=5)
    whole, random = file.read_bytes(), Random(0)
    for _ in range(60):
        changed = bytearray(whole)
        for at in random.sample(range(len(whole) // 2), 5):  # most in the JSON
            changed[at] ^= 1 << random.randrange(8)
        file.write_bytes(changed)
        try:
            gt.load(file)
        except BadFile:
            told[False] += 1
        else:
            told[True] += 1
    assert told[False] > 20


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    made = trace()
    with torch.no_grad():
        next(t for t, _ in made._states.versions).add_(1)
    with pytest.raises(GradtraceError, match="changed in place"):
        made.save(tmp_path / "x")
    with pytest.raises(BadFile, match="choose a folder that you may write to"):
        trace().save(tmp_path / "no" / "x")
    assert not list(tmp_path.iterdir())


def test_anybody_can_read_it(tmp_path: Path) -> None:
    """With the library of the format alone."""
    made = trace()
    made.save(tmp_path / "x.gradtrace")
    with safe_open(tmp_path / "x.gradtrace", "pt") as found:
        meta = json.loads(found.metadata()["meta"])
        for n, name in enumerate(meta["leaves"]):
            assert torch.equal(found.get_tensor(f"gradient {n}"), made.gradients[name])
    assert meta["tables"]["influence"]["columns"][0]["name"] == "component"
