"""Trainers of others: tiny runs, whose influence is that of a direct trace of the same batch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.runs import history
from gradtrace.tracing.influence import Influence
from gradtrace.training import loggers

lightning = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

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
    return [
        (
            torch.randn(4, generator=generator),
            torch.randint(3, (), generator=generator),
        )
        for _ in range(count)
    ]


def counts(table: Influence | None) -> list[object]:
    """What is exact in a table. Gradients are floats: their last bits may depend on where in memory
    a matrix lies.
    """
    assert table is not None
    return [(row.name, row.own, row.unreached, row.count) for row in table]


# Lightning ----------------------------------------------------------------------------------------


class Lit(lightning.LightningModule):  # type: ignore[misc]
    """Its parts are called in ``training_step``, never itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.seen: list[tuple[int, dict[str, Tensor], Any]] = []
        self.fails = False

    def training_step(self, batch: Any, number: int) -> Tensor:
        if self.fails and number == 1:
            raise RuntimeError("mine")
        state = {name: value.clone() for name, value in self.state_dict().items()}
        self.seen.append((self.global_step, state, batch))
        x, y = batch
        return functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, number: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def direct(self, step: int) -> Influence:
        """The table of the first batch of a step, with the weights of then."""
        state, batch = next((state, batch) for at, state, batch in self.seen if at == step)
        other = Lit()
        other.load_state_dict(state)
        with gt.watch(other) as watch:
            loss = functional.cross_entropy(other.net(batch[0]), batch[1])
        return watch.trace(loss).influence(sample=10_000)


def fit(folder: Path, callback: Any, model: Lit | None = None, **how: Any) -> Lit:
    model = model or Lit()
    loader = torch.utils.data.DataLoader(data(), batch_size=3)
    trainer = lightning.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": False,
            "default_root_dir": folder,
            "callbacks": [callback],
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            "limit_val_batches": 0,
            **how,
        }
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
        trainer.fit(model, loader, loader)  # it counts the machine's cores
    return model


def test_lightning(tmp_path: Path) -> None:
    from gradtrace.integrations.lightning import GradTrace

    callback = GradTrace(every=2, budget=None)
    model = fit(tmp_path, callback)
    found = history.read(tmp_path / "gradtrace.jsonl")
    assert found.steps == (0, 2, 4, 6) and not found.running
    assert callback.monitor is not None and callback.monitor.history == found
    for step, table in zip(found.steps, found.influences):
        assert counts(table) == counts(model.direct(step))
    assert set(found.components) == {"net", "net.0", "net.1", "net.2"}
    assert (tmp_path / "gradtrace.html").stat().st_size > 10_000
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_lightning_trains_as_without(tmp_path: Path) -> None:
    from gradtrace.integrations.lightning import GradTrace

    first = fit(tmp_path, GradTrace(every=1, budget=None)).state_dict()
    other = fit(tmp_path, lightning.Callback()).state_dict()
    assert all(torch.equal(first[name], other[name]) for name in first)


def test_lightning_with_accumulation_validation_and_a_logger(tmp_path: Path) -> None:
    from gradtrace.integrations.lightning import GradTrace

    class Logger(lightning.loggers.logger.Logger):  # type: ignore[misc]
        name = "mine"
        version = 0

        def __init__(self) -> None:
            super().__init__()
            self.heard: list[tuple[int, Mapping[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.heard.append((step or 0, metrics))

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

    logger = Logger()
    callback = GradTrace(every=1, budget=None, file=tmp_path / "run.jsonl", report=None)
    model = fit(
        tmp_path,
        callback,
        logger=logger,
        accumulate_grad_batches=3,
        limit_val_batches=1,
        num_sanity_val_steps=1,
    )
    found = history.read(tmp_path / "run.jsonl")
    assert found.steps == (0, 1, 2, 3)  # 4 batches an epoch: 3 and 1
    assert found.records[0].scale == pytest.approx(1 / 3)
    for step, table in zip(found.steps, found.influences):
        assert table is not None and table.shares == model.direct(step).shares
    said = [metrics for _, metrics in logger.heard if "gradtrace/loss" in metrics]
    assert len(said) == 4 and "gradtrace/share/net.2" in said[0]
    assert [path.name for path in tmp_path.iterdir()].count("gradtrace.html") == 0


def test_lightning_leaves_nothing_after_an_error(tmp_path: Path) -> None:
    from gradtrace.integrations.lightning import GradTrace

    model = Lit()
    model.fails = True
    with pytest.raises(RuntimeError, match="mine"):
        fit(tmp_path, GradTrace(every=1, budget=None), model)
    found = history.read(tmp_path / "gradtrace.jsonl")
    assert found.steps == (0,) and "RuntimeError" in found.notes[0]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_unknown_arguments_are_refused_at_once() -> None:
    from gradtrace.integrations.lightning import GradTrace

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
            if torch.is_grad_enabled():
                state = {name: value.clone() for name, value in model.state_dict().items()}
                items = kwargs.get("num_items_in_batch")
                self.seen.append((self.state.global_step, state, dict(inputs), items))
            return super().compute_loss(model, inputs, *args, **kwargs)

    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "learning_rate": 0.1,
            "report_to": [],
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_pin_memory": False,
            **how,
        }
    )
    trainer = Trainer(gpt(), arguments, train_dataset=Words(), callbacks=[callback])
    trainer.seen = []
    trainer.train()
    return trainer


def table_of(trainer: Any, step: int) -> Influence:
    state, inputs, items = next(rest for at, *rest in trainer.seen if at == step)
    model = gpt()
    model.load_state_dict(state)
    more = {} if items is None or trainer.label_smoother else {"num_items_in_batch": items}
    with gt.watch(model, composed=False) as watch:
        out = model(**inputs, **more)
        loss = out.loss
        if trainer.label_smoother:
            loss = trainer.label_smoother(out, inputs["labels"], shift_labels=True)
    return watch.trace(loss).influence(sample=10_000)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"label_smoothing_factor": 0.1},
    ],
    ids=["plain", "accumulated", "smoothed"],
)
def test_transformers(tmp_path: Path, how: dict[str, Any]) -> None:
    from gradtrace.integrations.transformers import GradTrace

    callback = GradTrace(every=2, budget=None)
    trainer = trained(tmp_path, callback, **how)
    found = history.read(tmp_path / "gradtrace.jsonl")
    assert found.steps == (0, 2) and not found.running
    for step, table in zip(found.steps, found.influences):
        assert table is not None
        expected = table_of(trainer, step)
        assert counts(table) == counts(expected)
        by = table.by("gradient").shares
        assert by == pytest.approx(expected.by("gradient").shares, rel=1e-4, nan_ok=True)
    assert (tmp_path / "gradtrace.html").stat().st_size > 10_000
    logged = [line for line in trainer.state.log_history if "gradtrace/loss" in line]
    assert [line["step"] for line in logged] == [1, 3]
    assert logged[0]["gradtrace/share/lm_head"] == 1.0
    assert not any("attn.c_proj" in name for name in logged[0])
    assert not vars(trainer).get("training_step") and "backward" not in vars(trainer.accelerator)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
    passes = how.get("gradient_accumulation_steps", 1)
    assert found.records[0].scale == pytest.approx(1 / passes)


def test_transformers_trains_as_without(tmp_path: Path) -> None:
    from gradtrace.integrations.transformers import GradTrace

    first = trained(tmp_path, GradTrace(every=1, budget=None)).model.state_dict()
    other = trained(tmp_path, transformers.TrainerCallback()).model.state_dict()
    assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_callback_of_nobody() -> None:
    from gradtrace.integrations.transformers import GradTrace

    with pytest.raises(GradtraceError, match="called by no transformers"):
        GradTrace().on_train_begin(None, None, None)


# Loggers ------------------------------------------------------------------------------------------


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from gradtrace.integrations.tensorboard import TensorBoard

    writer, ours = SummaryWriter(tmp_path / "a"), TensorBoard(tmp_path / "b")
    for step in (0, 5):
        for logger in (writer, ours):
            loggers.adapted(logger)(step, {"gradtrace/loss": 0.5 * step})
    writer.close()
    ours.close()
    for name in ("a", "b"):
        found = EventAccumulator(str(tmp_path / name)).Reload().Scalars("gradtrace/loss")
        assert [(event.step, event.value) for event in found] == [(0, 0.0), (5, 2.5)]


class Wandb:
    """As W&B's runs are: the numbers come first."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        assert isinstance(data, dict)
        self.heard.append((step, data))


Wandb.__module__ = "wandb.sdk.wandb_run"


class Mlflow:
    """As the module ``mlflow`` is."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.heard.append((step, metrics))


class Plain:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.heard.append((step, dict(scalars)))


@pytest.mark.parametrize("kind", [Wandb, Mlflow, Plain])
def test_other_loggers(kind: type) -> None:
    logger = kind()
    loggers.adapted(logger)(3, {"x": 1.0})
    assert logger.heard == [(3, {"x": 1.0})]
