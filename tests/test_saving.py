"""Traces in files: what comes back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.components.forks import find_forks
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.io import container
from gradtrace.measures import choosing
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
        return self.out(h + torch.tanh(self.mix(h)))


def trace(rule: str = "greedy", reduction: str = "mean", **options: Any) -> Trace:
    torch.manual_seed(0)
    model = Model()
    with gt.watch(model) as watch:
        logits = model(torch.randint(0, 6, (3, 2)))
        loss = F.cross_entropy(logits, torch.randint(0, 6, (3,)), reduction=reduction)
    return watch.trace(loss, rule=rule, **options)


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_round_trip(tmp_path: Path, rule: str, reduction: str) -> None:
    made = trace(rule, reduction)
    operators = made.influence("operators")
    file = tmp_path / "run.gradtrace"
    made.save(file, sample=20, seed=3)
    found = gt.load(file)
    assert (found.rule, found.granularity, found.pairs) == (rule, "scalar", made.pairs)
    assert list(found.gradients) == list(made.gradients)
    for name, grad in made.gradients.items():
        assert torch.equal(found.gradients[name], grad)
    assert torch.equal(found.gradients["out.weight"], made.gradients["embed.weight"])  # tied
    assert found.influence() == made.influence()
    assert found.influence("operators") == operators
    assert found.influence(weight="gradient") == made.influence(weight="gradient")
    assert found.norms() == made.norms()
    paths = made.paths(sample=20, seed=3)
    assert list(found.paths()) == list(paths)
    assert found.path(paths[0].name, paths[0].index) == paths[0]
    assert found.modules == made.modules
    assert str(found.influence()) == str(made.influence())


def test_operator_granularity(tmp_path: Path) -> None:
    made = trace(granularity="operator")
    made.save(tmp_path / "x")
    assert gt.load(tmp_path / "x").influence() == made.influence()
    assert len(gt.load(tmp_path / "x").paths()) == 0


def test_the_model_is_not_needed(tmp_path: Path) -> None:
    made = trace()
    made.save(tmp_path / "x.gradtrace")
    code = "import gradtrace as gt; print(gt.load('x.gradtrace').influence())"
    out = fresh.python("-c", code, cwd=tmp_path, check=True)
    assert out.stdout.strip() == str(made.influence())


def test_what_was_not_saved_is_said(tmp_path: Path) -> None:
    trace().save(tmp_path / "x", sample=2)
    found = gt.load(tmp_path / "x")
    with pytest.raises(UnknownName, match="only of the default"):
        found.influence("operators")
    with pytest.raises(GradtraceError, match="not among the 2"):
        found.path("mix.weight", (99, 0))
    with pytest.raises(UnknownName, match=r"did you mean mix\.weight"):
        found.path("mix.weigth", (0, 0))


def test_hostile_module_names_are_text(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "</script><b>", "a\x00b", "\u202e", "🔥" * 100, "x" * 10_000]
    model = nn.ModuleDict()
    for name in names:
        model._modules[name] = nn.Linear(2, 2)  # add_module would refuse some
    with gt.watch(model) as watch:
        x = torch.ones(1, 2)
        for name in names:
            x = model._modules[name](x)  # type: ignore[misc]
        loss = x.sum()
    watch.trace(loss).save(tmp_path / "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]
    found = gt.load(tmp_path / "x")
    assert f"{names[0]}.weight" in found.gradients
    assert "<b>" not in found.influence()._repr_html_()
    assert names[0] in found.influence().shares


def rewritten(path: Path, change: Any) -> None:
    """The file with other contents, its container intact."""
    contents = container.read(path)
    meta, tensors = json.loads(json.dumps(contents.meta)), dict(contents.tensors)
    change(meta, tensors)
    container.write(path, contents.kind, meta, tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda meta, tensors: meta.pop("rule"),
        lambda meta, tensors: tensors.pop("gradient 0"),
        lambda meta, tensors: meta.update(leaves=5),
        lambda meta, tensors: meta["tables"][""]["rows"][0].pop("own"),
        lambda meta, tensors: meta["tables"][""]["rows"][0].update(count=[[1, 0]] * 5),
        lambda meta, tensors: meta.update(kinds=[]),
        lambda meta, tensors: tensors.update(lengths=tensors["lengths"] + 1),
        lambda meta, tensors: tensors.update(steps=tensors["steps"] + 10**6),
        lambda meta, tensors: meta.update(flow=None),
        lambda meta, tensors: meta.update(tables=[1, 2]),
        lambda meta, tensors: meta["kinds"][0].update(leaf="nobody"),
    ],
)
def test_contents_that_do_not_fit_together_are_refused(tmp_path: Path, change: Any) -> None:
    file = tmp_path / "x"
    trace().save(file, sample=5)
    rewritten(file, change)
    with pytest.raises(container.BadFile, match="damaged"):
        gt.load(file)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    container.write(tmp_path / "x", "influence", {}, {})
    with pytest.raises(container.BadFile):
        gt.load(tmp_path / "x")


def test_weights_changed_before_saving_are_noticed(tmp_path: Path) -> None:
    made = trace()
    with torch.no_grad():
        next(t for t, _ in made._states.versions).add_(1)
    with pytest.raises(GradtraceError, match="changed in place"):
        made.save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_forks_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the report in a file and the file itself have them."""
    found: list[object] = []

    def count(*given: Any) -> Any:
        found.append(given)
        return find_forks(*given)

    monkeypatch.setattr(choosing, "find_forks", count)
    x = torch.ones(3, requires_grad=True)
    trace = gt.trace((x + x.sin()).sum(), names={"x": x})
    trace.save(tmp_path / "x.gradtrace")
    trace.save(tmp_path / "y.gradtrace")
    assert len(found) == 1
    assert gt.load(tmp_path / "y.gradtrace").choices().shares == trace.choices().shares
