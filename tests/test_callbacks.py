"""Trainers of others: tiny runs, whose influence is that of a direct trace of the same batch."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.table import Table
from gradtrace.training.history import read
from gradtrace.training.incident import load_incident

lightning = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.pytorch.utilities._pytree"),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    names = ("lightning.pytorch", "transformers")
    levels = [logging.getLogger(name).level for name in names]
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name, level in zip(names, levels):
        logging.getLogger(name).setLevel(level)


def data(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(4, generator=generator) for _ in range(count)]
    return [(x, torch.randint(3, (), generator=generator)) for x in rows]


def same(found: Any, expected: Table) -> bool:
    """Whether a row of a history has the shares of a table."""
    pairs = [(found[f"share {name}"], share) for name, share in expected.shares.items()]
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


class Net(nn.Module):
    """Two ways, of which one ends in a dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.mix, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        return self.out(h + self.drop(self.mix(h).tanh()))  # type: ignore[no-any-return]


# Lightning ----------------------------------------------------------------------------------------


class Lit(lightning.LightningModule):  # type: ignore[misc]
    """Its parts are called in ``training_step``, never itself."""

    def __init__(self, bad: int | None = None) -> None:
        super().__init__()
        self.net, self.bad = Net(), bad
        self.callback: Any = None
        self.seen: list[tuple[int, dict[str, Tensor], Any, Tensor]] = []

    def training_step(self, batch: Any, number: int) -> Tensor:
        state = {name: value.clone() for name, value in self.state_dict().items()}
        self.seen.append((self.global_step, state, batch, torch.get_rng_state()))
        if number == self.bad == 1:
            raise RuntimeError("mine")
        ce = F.cross_entropy(self.net(batch[0]), batch[1])
        decay = 0.1 * self.net.out.weight.square().sum()
        if self.callback is not None:
            self.callback.terms(ce=ce, decay=decay)
        return (ce + decay) * (math.nan if number == self.bad else 1)

    def validation_step(self, batch: Any, number: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def direct(self, step: int) -> Table:
        """The table of the first batch of a step, with the weights of then."""
        _, state, batch, draws = next(each for each in self.seen if each[0] == step)
        other = Lit()
        other.load_state_dict(state)
        torch.set_rng_state(draws)
        with gt.watch(other) as watch:
            loss = other.training_step(batch, -1)
        return watch.trace(loss).influence()


def fit(folder: Path, callback: Any, model: Lit | None = None, **how: Any) -> Lit:
    torch.manual_seed(1)
    model = model or Lit()
    model.callback = callback if hasattr(callback, "terms") else None
    loader = torch.utils.data.DataLoader(data(), batch_size=3)
    quietly = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
    options = {"max_epochs": 2, "accelerator": "cpu", "default_root_dir": folder}
    options |= {"log_every_n_steps": 1, "limit_val_batches": 0, **dict.fromkeys(quietly, False)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
        lightning.Trainer(**{**options, **how}, callbacks=[callback]).fit(model, loader, loader)
    return model


def test_lightning(tmp_path: Path) -> None:
    from gradtrace.training.callbacks.lightning import GradTrace

    callback = GradTrace(every=2)
    model = fit(tmp_path, callback)
    history, _ = read(tmp_path / "gradtrace.jsonl")
    assert history.column("step") == [0, 2, 4, 6] and not history.about["running"]
    assert callback.monitor is not None and callback.monitor.history == history
    for row in history:
        assert same(row, model.direct(row.step)) and row["term ce"] > 0 and not row.note
    assert (tmp_path / "gradtrace.html").stat().st_size > 10_000
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    plain = fit(tmp_path, lightning.Callback()).state_dict()
    assert all(torch.equal(each, plain[name]) for name, each in model.state_dict().items())


def test_lightning_with_accumulation_validation_and_a_logger(tmp_path: Path) -> None:
    from gradtrace.training.callbacks.lightning import GradTrace

    class Logger(lightning.loggers.logger.Logger):  # type: ignore[misc]
        name, version = "mine", 0
        heard: list[tuple[int, Mapping[str, float]]]

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.heard.append((step or 0, metrics))

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

    logger = Logger()
    logger.heard = []
    how = {"accumulate_grad_batches": 3, "limit_val_batches": 1, "num_sanity_val_steps": 1}
    model = fit(tmp_path, callback := GradTrace(every=1), logger=logger, **how)
    assert callback.monitor is not None
    history = callback.monitor.history
    assert history.column("step") == [0, 1, 2, 3]  # 4 batches an epoch: 3 and 1
    assert all(same(row, model.direct(row.step)) for row in history)
    said = [(step, each) for step, each in logger.heard if "gradtrace/loss" in each]
    assert [step for step, _ in said] == [0, 1, 2, 3]
    assert {"gradtrace/term/ce", "gradtrace/cosine/ce_decay"} <= said[0][1].keys()


def test_lightning_after_an_error_and_with_an_incident(tmp_path: Path) -> None:
    from gradtrace.training.callbacks.lightning import GradTrace

    with pytest.raises(RuntimeError, match="mine"):
        fit(tmp_path, GradTrace(every=1), model := Lit(bad=1))
    assert "ended by RuntimeError" in read(tmp_path / "gradtrace.jsonl")[0].notes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = fit(tmp_path, callback := GradTrace(every=9), Lit(bad=2), max_epochs=1)
    assert callback.monitor is not None
    (path,) = callback.monitor.incidents
    found, (_, state, batch, draws) = load_incident(path), model.seen[2]
    assert path == tmp_path / "incidents/step2.pt" and torch.equal(found.batch[0], batch[0])
    assert torch.equal(found.began["torch"], draws)
    assert all(torch.equal(found.state[name], each) for name, each in state.items())


def test_lightning_with_a_scaler(tmp_path: Path) -> None:
    from gradtrace.training.callbacks.lightning import GradTrace

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    plugin.forward_context = nullcontext  # float16 is for GPUs
    callback = GradTrace(every=2)
    fit(tmp_path, callback, max_epochs=1, plugins=[plugin])
    fit(tmp_path / "plain", other := GradTrace(every=2), max_epochs=1)
    assert callback.monitor is not None and other.monitor is not None
    for name in ("loss", "term ce", "norm net.out"):
        expected = other.monitor.history.column(name)
        assert callback.monitor.history.column(name) == pytest.approx(expected, rel=1e-5)


def test_unknown_arguments_are_refused_at_once() -> None:
    from gradtrace.training.callbacks.lightning import GradTrace

    with pytest.raises(GradtraceError, match="did you mean every"):
        GradTrace(evry=3)


# transformers -------------------------------------------------------------------------------------


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        ids = torch.randint(20, (6,), generator=torch.Generator().manual_seed(at))
        labels = ids.clone()
        labels[: at % 3] = -100  # so that batches have different numbers of items
        return {"input_ids": ids, "labels": labels}


def gpt() -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 8}
    none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **none, **special, loss_type="ForCausalLM")
    return transformers.GPT2LMHeadModel(config)


def trained(folder: Path, callback: Any, **how: Any) -> Any:
    """A trainer after training, and the weights and inputs of each pass."""

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            items = kwargs.get("num_items_in_batch")
            self.seen.append((self.state.global_step, state, dict(inputs), items))
            return super().compute_loss(model, inputs, *args, **kwargs)

    options = {"output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2}
    options |= {"learning_rate": 0.1, "report_to": [], "save_strategy": "no", "use_cpu": True}
    options |= {"logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
    arguments = transformers.TrainingArguments(**{**options, **how})
    trainer = Trainer(gpt(), arguments, train_dataset=Words(), callbacks=[callback])
    trainer.seen = []
    trainer.train()
    return trainer


def table_of(trainer: Any, step: int) -> Table:
    state, inputs, items = next(rest for at, *rest in trainer.seen if at == step)
    model = gpt()
    model.load_state_dict(state)
    more = {} if items is None or trainer.label_smoother else {"num_items_in_batch": items}
    with gt.watch(model, composed=False) as watch:
        out = model(**inputs, **more)
        loss = out.loss
        if trainer.label_smoother:
            loss = trainer.label_smoother(out, inputs["labels"], shift_labels=True)
    return watch.trace(loss).influence()


@pytest.mark.parametrize(
    "how",
    [{}, {"gradient_accumulation_steps": 2}, {"label_smoothing_factor": 0.1}],
    ids=["plain", "accumulated", "smoothed"],
)
def test_transformers(tmp_path: Path, how: dict[str, Any]) -> None:
    from gradtrace.training.callbacks.transformers import GradTrace

    trainer = trained(tmp_path, GradTrace(every=2), **how)
    history, _ = read(tmp_path / "gradtrace.jsonl")
    assert history.column("step") == [0, 2] and not history.about["running"]
    assert all(same(row, table_of(trainer, row.step)) for row in history)
    assert (tmp_path / "gradtrace.html").stat().st_size > 10_000
    logged = [line for line in trainer.state.log_history if "gradtrace/loss" in line]
    assert [line["step"] for line in logged] == [0, 2]
    assert any(name.startswith("gradtrace/fork/") for name in logged[1])
    assert not vars(trainer).get("training_step") and "backward" not in vars(trainer.accelerator)
    plain = trained(tmp_path, transformers.TrainerCallback(), **how).model.state_dict()
    assert all(torch.equal(each, plain[name]) for name, each in trainer.model.state_dict().items())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_transformers_with_an_incident(tmp_path: Path) -> None:
    from gradtrace.training.callbacks.transformers import GradTrace

    callback = GradTrace(every=9)
    trainer = trained(tmp_path, callback, learning_rate=1e30)  # the first step ruins the weights
    assert callback.monitor is not None
    found, (step, state, inputs, _) = load_incident(callback.monitor.incidents[0]), trainer.seen[1]
    assert step == found.step == 1 and torch.equal(found.batch["input_ids"], inputs["input_ids"])
    assert all(torch.equal(each, state[name]) for name, each in found.state.items())


def test_a_callback_of_nobody() -> None:
    from gradtrace.training.callbacks.transformers import GradTrace

    with pytest.raises(GradtraceError, match="called by no transformers"):
        GradTrace().on_train_begin(None, None, None)


# Accelerate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [1, 2])
def test_accelerate(tmp_path: Path, passes: int) -> None:
    from gradtrace.training.callbacks.accelerate import GradTrace

    accelerator = accelerate.Accelerator(
        cpu=True, project_dir=tmp_path, gradient_accumulation_steps=passes
    )
    model, seen = Net().eval(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data(9), batch_size=3)  # 3 batches: the last is a step
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with GradTrace(accelerator, model, every=1) as tracing:
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    logits = model(x)
                    ce, decay = F.cross_entropy(logits, y), 0.1 * logits.square().mean()
                    tracing.terms(ce=ce, decay=decay)
                    seen.append(float(ce.detach() + decay.detach()))
                    accelerator.backward(ce + decay)
                    optimizer.step()
                    optimizer.zero_grad()
    assert "backward" not in vars(accelerator) and tracing.monitor is not None
    firsts = seen if passes == 1 else [seen[0], seen[2], seen[3], seen[5]]
    history, _ = read(tmp_path / "gradtrace.jsonl")
    assert history.column("loss") == pytest.approx(firsts, rel=1e-6)
    assert all(each > 0 for each in history.column("term ce"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_accelerate_with_a_scaler(tmp_path: Path) -> None:
    """A spike and a loss of nan are kept; infinite gradients are the scaler's to handle."""
    from gradtrace.training.callbacks.accelerate import GradTrace

    accelerator, model = accelerate.Accelerator(cpu=True, project_dir=tmp_path), Net().eval()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = (torch.stack(each) for each in zip(*data(6)))
    with GradTrace(accelerator, model, every=1000) as tracing:
        for factor in (*[1.0] * 25, 50.0, math.inf, math.nan):
            out = model(x)
            loss = F.cross_entropy(out, y)
            out.register_hook(lambda grad, factor=factor: grad * factor)
            accelerator.backward(loss * (math.nan if math.isnan(factor) else 1))
            model.zero_grad()
    assert tracing.monitor is not None
    (row,) = tracing.monitor.history
    (grad,) = torch.autograd.grad(F.cross_entropy(out := model(x), y), out)
    assert row.loss == pytest.approx(loss.item())
    assert row["norm out"] == pytest.approx(grad.norm().item(), rel=1e-5)
    assert [path.name for path in tracing.monitor.incidents] == ["step25.pt", "step27.pt"]


def test_accelerate_after_an_error(tmp_path: Path) -> None:
    from gradtrace.training.callbacks.accelerate import GradTrace

    accelerator, model = accelerate.Accelerator(cpu=True, project_dir=tmp_path), Net()
    with pytest.raises(KeyError), GradTrace(accelerator, model):
        raise KeyError("mine")
    assert "backward" not in vars(accelerator)
    assert read(tmp_path / "gradtrace.jsonl")[0].notes == ("ended by KeyError",)
