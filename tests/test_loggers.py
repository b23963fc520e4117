"""What loggers receive: few curves, of real choices; loss terms; a diagnosis in words, once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gradtrace.runs import history
from gradtrace.runs.history import StepRecord
from gradtrace.runs.step_results import StepResult, merged
from torch import Tensor, nn
from torch.nn import functional

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.training import loggers


class Heard:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        self.scalars: list[tuple[int, dict[str, float]]] = []
        self.texts: list[tuple[int, str, str]] = []

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.scalars.append((step, dict(scalars)))

    def say(self, step: int, name: str, text: str) -> None:
        self.texts.append((step, name, text))

    @property
    def names(self) -> set[str]:
        return {name for _, scalars in self.scalars for name in scalars}


class Hybrid(nn.Module):
    """Convolution beside an LSTM, then transformer layers, then gated experts; norms and dropouts
    at the end of each branch.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.batch_norm, self.act, self.drop = nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)
        self.lstm, self.norm = nn.LSTM(8, 16, batch_first=True), nn.LayerNorm(16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.gate, self.head = nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.drop(self.act(self.batch_norm(self.conv(x.transpose(1, 2))))).transpose(1, 2)
        h = self.encoder(seen + self.drop(self.norm(self.lstm(x)[0])))
        gates = self.gate(h).softmax(-1)
        h = h + sum(gates[..., n : n + 1] * expert(h) for n, expert in enumerate(self.experts))
        out: Tensor = self.head(h.mean(1))
        return out


def hybrid_losses(steps: int) -> tuple[nn.Module, Iterable[Tensor]]:
    model, generator = Hybrid(), torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 10, 8, generator=generator), torch.arange(6) % 4
    return model, (functional.cross_entropy(model(x), y) for _ in range(steps))


def gpt_losses(steps: int, layers: int = 12) -> tuple[nn.Module, Iterable[Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    special = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **special))
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    return model, (model(input_ids=ids, labels=ids).loss for _ in range(steps))


def monitored(model: nn.Module, losses: Iterable[Tensor], **how: Any) -> tuple[Heard, gt.Monitor]:
    heard, optimizer = Heard(), torch.optim.SGD(model.parameters(), lr=0.1)
    with gt.Monitor(
        model, **{"every": 1, "budget": None, "view": False, "loggers": [heard], **how}
    ) as monitor:
        for loss in losses:
            monitor.step(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return heard, monitor


# Curves -------------------------------------------------------------------------------------------

SERIES = re.compile(r"ln_|norm|drop|act\b|\.act", re.IGNORECASE)


@pytest.mark.parametrize("make", [gpt_losses, hybrid_losses])
def test_no_norms_no_dropouts_and_few_curves(make: Any) -> None:
    heard, _ = monitored(*make(3))
    shares = {name for name in heard.names if name.startswith("gradtrace/choice/")}
    assert 4 <= len(shares) <= 24
    assert heard.names - {"gradtrace/cost"} == shares | {"gradtrace/loss"}
    assert not any(SERIES.search(name) for name in shares), shares
    for _, scalars in heard.scalars:
        assert shares < scalars.keys()  # the same curves at every step


def test_branches_are_named_by_what_norms_and_dropouts_are_applied_to() -> None:
    heard, _ = monitored(*hybrid_losses(1))
    names = {name.removeprefix("gradtrace/choice/") for name in heard.names}
    assert {f"encoder.layers.{n}.self_attn" for n in (0, 1)} < names
    assert {f"mul_gate_experts.{n}" for n in range(3)} < names


def test_a_norm_of_several_operators_at_the_end_of_a_branch() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()

    class RMSNorm(Root):
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.into, self.mix, self.norm = nn.Linear(3, 4), nn.Linear(4, 4), RMSNorm()

        def forward(self, x: Tensor) -> Tensor:
            h = self.into(x)
            h = h + self.norm(self.mix(h))
            return (h + self.norm(h)).square().mean()  # a norm that is a branch by itself

    model, x = Net(), torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    with gt.watch(model) as watch:
        loss = model(x)
    found = watch.trace(loss).choices()
    assert [{*shares} for fork, shares in found.shares.items() if found[fork].rows[0].between] == [
        {"skip", "mix"},
        {"skip", "norm"},
    ]


def test_how_many_curves_is_a_choice() -> None:
    heard, monitor = monitored(*gpt_losses(2), curves=5)
    assert len([name for name in heard.names if "/choice/" in name]) == 5
    all_of_them = monitor.history.records[0].choices
    assert len(all_of_them) > 20
    shares = heard.scalars[0][1]
    most = {f"gradtrace/choice/{name}": share for name, share in [*all_of_them.items()][:5]}
    assert shares.items() >= most.items()
    with pytest.raises(GradtraceError, match="curves is a whole number"):
        gt.Monitor(nn.Linear(1, 1), curves=0)


def test_shares_are_those_of_choices() -> None:
    model, losses = gpt_losses(1, layers=2)
    model.eval()
    with gt.watch(model, composed=False) as watch:
        (loss,) = losses
    rows = watch.trace(loss).choices()
    heard, _ = monitored(*((again := gpt_losses(1, layers=2))[0].eval(), again[1]))
    logged = heard.scalars[0][1]
    for n in (0, 1):
        for part in ("attn", "mlp"):
            name = f"transformer.h.{n}.{part}"
            share = rows.shares[f"transformer.h.{n}.add ({part})"][name]
            assert logged[f"gradtrace/choice/{name}"] == share


def test_components_of_ones_own_are_logged_without_those_in_series() -> None:
    heard, monitor = monitored(*gpt_losses(1, layers=2), components="heads")
    shares = {name: x for name, x in heard.scalars[0][1].items() if "/share/" in name}
    table = monitor.history.influences[0]
    assert table is not None and len(shares) == 4 == len(table.names)
    assert set(shares.values()) == set(table.shares.values())
    model, losses = hybrid_losses(1)
    heard, _ = monitored(model, losses, components=["head", "encoder.layers.1.self_attn"])
    names = {name for name in heard.names if "/share/" in name}
    assert names == {"gradtrace/share/encoder.layers.1.self_attn"}  # head is in series


def test_a_chain_has_no_shares() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.1), nn.Linear(4, 1))
    heard, _ = monitored(model, (model(torch.ones(2, 4)).square().mean() for _ in range(2)))
    assert heard.names - {"gradtrace/cost"} == {"gradtrace/loss"}  # there may be no time to compare


def test_without_loggers_nothing_more_is_measured() -> None:
    _, monitor = monitored(*gpt_losses(1, layers=1), loggers=[])
    assert monitor.history.records[0].choices == {}


def test_choices_and_terms_are_in_the_file(tmp_path: Path) -> None:
    model, losses = gpt_losses(2, layers=1)
    _, monitor = monitored(model, losses, file=tmp_path / "run.jsonl")
    found = history.read(tmp_path / "run.jsonl")
    assert found.records == monitor.history.records and found.records[0].choices
    first = next(iter(found.records[0].choices))
    assert f"choice/{first}" in found.to_pandas().columns


def test_results_of_processes_are_merged() -> None:
    results = {}
    for rank in range(2):
        model, losses = gpt_losses(1, layers=1)
        model.eval()
        with gt.watch(model, composed=False) as watch:
            (loss,) = losses
        table = watch.trace(loss).choices()
        terms = {"norm a": 1.0 + rank, "cosine a b": -0.5}
        whole = StepResult(1.0, 1.0, choices=table, terms=terms)
        results[rank] = StepResult.from_dict(whole.to_dict())
    record = merged(0, results, 2)
    assert record.choices == table.between_modules()  # of equal parts
    assert record.terms == {"norm a": 1.5, "cosine a b": -0.5}


def test_names_fit_for_all_loggers() -> None:
    record = StepRecord(0, 1.0, None, choices={"a (b, c)/d·e": 0.5}, terms={"norm x y": math.nan})
    assert loggers.Curves().of(record) == {"gradtrace/loss": 1.0, "gradtrace/choice/a_b_c/d_e": 0.5}


# Terms of the loss --------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.heads(self.body(x).tanh())
        return out


def two_terms(model: nn.Module) -> dict[str, Tensor]:
    first, second = model(torch.ones(3, 4)).unbind(1)
    return {"ce": first.square().mean(), "kl": 0.1 * (second - first).square().mean()}


@pytest.mark.parametrize("scale", [1.0, 1024.0, 0.25])
def test_terms_of_the_loss(scale: float) -> None:
    model, heard = Two(), Heard()
    with gt.watch(model) as watch:
        expected = two_terms(model)
    table = watch.conflicts(expected)
    with gt.Monitor(model, every=2, budget=None, loggers=[heard]) as monitor:
        for _ in range(3):
            terms = two_terms(model)
            loss = sum(terms.values()) * scale
            record = monitor.step(loss, scale=scale, terms=terms)
            loss.backward()
            model.zero_grad()
    assert [step for step, _ in heard.scalars] == [0, 2] and record is not None
    assert record.terms == {
        "norm ce": pytest.approx(table.norm("ce"), rel=1e-6),
        "norm kl": pytest.approx(table.norm("kl"), rel=1e-6),
        "cosine ce kl": pytest.approx(table.cosine("ce", "kl"), abs=1e-6),
    }
    logged = heard.scalars[0][1]
    assert logged["gradtrace/terms/cosine_ce_kl"] == record.terms["cosine ce kl"]
    assert logged["gradtrace/terms/norm_kl"] == record.terms["norm kl"]


def test_many_terms_are_few_curves() -> None:
    model = Two()
    with gt.Monitor(model, budget=None) as monitor:
        out = model(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
        terms = {str(n): each.square().sum() for n, each in enumerate(out)}
        record = monitor.step(sum(terms.values()), terms=terms)  # type: ignore[arg-type]
    assert record is not None
    assert set(record.terms) == {*(f"norm {n}" for n in range(6)), "lowest cosine"}
    with gt.watch(model) as watch:
        again = model(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    table = watch.conflicts(again.square().sum(1))
    lowest = min(table.cosine(a, b) for a in table.terms for b in table.terms if a != b)
    assert record.terms["lowest cosine"] == pytest.approx(lowest, abs=1e-6)


def test_terms_that_are_none() -> None:
    model = Two()
    with gt.Monitor(model, every=1, budget=None) as monitor:
        terms = two_terms(model)
        with pytest.raises(GradtraceError, match="at least two terms"):
            monitor.step(terms["ce"], terms={"ce": terms["ce"]})
    with gt.Monitor(model, every=1, budget=None) as monitor:
        terms = two_terms(model)
        monitor.step(terms["ce"], terms=terms)
        terms = two_terms(model)
        with pytest.warns(UserWarning, match="'kl' is a float, not a tensor"):
            monitor.step(terms["ce"], terms={"ce": terms["ce"], "kl": 0.5})  # type: ignore[dict-item]


def test_terms_of_steps_that_are_not_traced_are_not_looked_at() -> None:
    model = Two()
    with gt.Monitor(model, every=10, budget=None) as monitor:
        monitor.step(sum(two_terms(model).values()))  # type: ignore[arg-type]
        assert monitor.step(model(torch.ones(3, 4)).sum(), terms={"wrong": 1}) is None  # type: ignore[dict-item]


# Words --------------------------------------------------------------------------------------------


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x).detach())
        return out


def cut_losses(steps: int) -> tuple[nn.Module, Iterable[Tensor]]:
    model = Cut()
    return model, (model(torch.ones(3, 4)).square().mean() for _ in range(steps))


def test_the_first_step_is_diagnosed_once_with_its_line() -> None:
    with pytest.warns(UserWarning, match="output detached") as told:
        heard, _ = monitored(*cut_losses(3))
    assert len(told) == 1
    ((step, name, text),) = heard.texts
    assert (step, name) == (0, "gradtrace/diagnosis") and text in str(told[0].message)
    assert "self.head(self.encoder(x).detach())" in text and "encoder.weight" in text
    assert "test_loggers.py" in text


def test_a_healthy_step_is_told_to_loggers_and_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard, _ = monitored(*gpt_losses(2, layers=1))
    assert [name for _, name, _ in heard.texts] == ["gradtrace/diagnosis"]
    assert heard.texts[0][2].startswith("Diagnosis: healthy")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("diagnose", "count"), [(False, 0), (True, 1)])
def test_whether_it_is_diagnosed_is_a_choice(diagnose: bool, count: int) -> None:
    with pytest.warns(UserWarning, match="encoder.weight"):  # of one kind or the other
        heard, _ = monitored(*cut_losses(1), diagnose=diagnose)
    assert len(heard.texts) == count


def test_a_loss_that_cannot_be_traced_is_diagnosed_before_the_error() -> None:
    heard, model = Heard(), Cut()
    with (
        gt.Monitor(model, budget=None, loggers=[heard]) as monitor,
        pytest.warns(UserWarning, match="no gradient"),
        pytest.raises(GradtraceError),
    ):
        monitor.step(model(torch.ones(3, 4)).detach().sum())
    assert "head.weight" in heard.texts[0][2]


def test_a_diagnosis_does_not_disturb_training() -> None:
    states = []
    for diagnose in (True, False):
        model, losses = hybrid_losses(3)
        torch.manual_seed(5)
        monitored(model, losses, diagnose=diagnose)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_where_the_results_are_is_said_once_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, losses = gpt_losses(3, layers=1)
    heard, monitor = monitored(model, losses, every=2, file="run.jsonl", report="run.html")
    monitor.close()
    expected = "2 of 3 steps are traced; report: run.html; file: run.jsonl"
    assert capsys.readouterr().err == f"gradtrace: {expected}\n"
    assert heard.texts[-1] == (3, "gradtrace/report", expected)


def test_steps_that_were_due_and_not_traced_are_said_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, now = nn.Linear(2, 1), [0.0]

    def clock() -> float:
        now[0] += 1e-3
        return now[0]

    how: dict[str, Any] = {"every": 20, "budget": 0.001, "file": tmp_path / "run.jsonl"}
    with (
        pytest.warns(UserWarning, match="step 20 was due"),
        gt.Monitor(model, clock=clock, report=tmp_path / "run.html", **how) as monitor,
    ):
        for _ in range(200):
            monitor.step(model(torch.ones(1, 2)).sum())
    assert monitor.history.steps == (0,) and monitor.history.skipped == 9
    told = capsys.readouterr().err
    assert "1 of 200 steps are traced, 9 that were due are not (budget)" in told
    page = (tmp_path / "run.html").read_text().lower()
    assert "took infinite" not in page and "infinite of" not in page
