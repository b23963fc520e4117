"""Trainers of others: tiny runs, whose influence is that of a direct trace of the same batch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gradtrace.runs import history
from torch import Tensor, nn
from torch.nn import functional

import gradtrace as gt
from gradtrace.errors import GradtraceError
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
    rows = how.pop("rows", data())
    loader = torch.utils.data.DataLoader(rows, batch_size=3)
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
    assert len(said) == 4 and said[0].keys() <= {"gradtrace/loss", "gradtrace/cost"}  # a chain
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
    assert [line["gradtrace/step"] for line in logged] == [0, 2]
    numbers = {*logged[1]} - {"epoch", "step", "gradtrace/step", "gradtrace/loss", "gradtrace/cost"}
    parts = {f"gradtrace/choice/transformer.h.0.{part}" for part in ("attn", "mlp")}
    assert parts <= numbers and all(name.startswith("gradtrace/choice/") for name in numbers)
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
    from gradtrace.integrations.tensorboard import TensorBoard
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer, ours = SummaryWriter(tmp_path / "a"), TensorBoard(tmp_path / "b")
    for step in (0, 5):
        for logger in (writer, ours):
            loggers.adapted(logger)(step, {"gradtrace/loss": 0.5 * step})
    writer.close()
    ours.close()
    for name in ("a", "b"):
        found = EventAccumulator(str(tmp_path / name)).Reload().Scalars("gradtrace/loss")
        assert [(event.step, event.value) for event in found] == [(0, 0.0), (5, 2.5)]


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


@pytest.mark.parametrize("kind", [Mlflow, Plain])
def test_other_loggers(kind: type) -> None:
    logger = kind()
    loggers.adapted(logger)(3, {"x": 1.0})
    assert logger.heard == [(3, {"x": 1.0})]


# Words, choices and terms in each -----------------------------------------------------------------


class Forked(lightning.LightningModule):  # type: ignore[misc]
    """Two loss terms, a skip connection with a dropout at its end, and a cut, if wanted."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.mix, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.1)
        self.side = nn.Linear(4, 6) if cut else None
        self.callback: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        if self.side is not None:
            h = h + self.side(x).detach()
        found: Tensor = self.out(h + self.drop(self.mix(self.norm(h)).tanh()))
        return found

    def training_step(self, batch: Any, number: int) -> Tensor:
        logits = self(batch[0])
        ce, decay = functional.cross_entropy(logits, batch[1]), 0.1 * logits.square().mean()
        self.callback.terms(ce=ce, decay=decay)
        return ce + decay

    def validation_step(self, batch: Any, number: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


CURVES = {
    "gradtrace/loss",
    "gradtrace/cost",
    "gradtrace/choice/mix",
    "gradtrace/terms/norm_ce",
    "gradtrace/terms/norm_decay",
    "gradtrace/terms/cosine_ce_decay",
}


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def text_of(found: Any, name: str) -> str:
    (event,) = found.Tensors(f"{name}/text_summary")
    text: str = event.tensor_proto.string_val[0].decode()
    return text


def test_lightning_and_tensorboard_get_choices_terms_and_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradtrace.integrations.lightning import GradTrace

    model, callback = Forked(cut=True), GradTrace(every=4, budget=None)
    model.callback = callback
    logger = lightning.loggers.TensorBoardLogger(tmp_path, version="a")
    fit(tmp_path, callback, model, logger=logger)
    folder = tmp_path / "lightning_logs/a"
    logger.finalize("success")
    found = events(folder)
    names = {name for name in found.Tags()["scalars"] if "gradtrace" in name}
    assert names | {"gradtrace/cost"} == CURVES  # no time may have passed to compare with
    assert [event.step for event in found.Scalars("gradtrace/choice/mix")] == [0, 4]
    words = text_of(found, "gradtrace/diagnosis")
    assert "output detached" in words and "h = h + self.side(x).detach()" in words
    assert str(folder / "gradtrace.html") in text_of(found, "gradtrace/report")
    told = capsys.readouterr().err  # where warnings are errors, ours is printed
    assert told.count("gradtrace.html") == 1
    assert told.count("not healthy\n") == 1 and "side.weight, side.bias" in told
    assert (folder / "gradtrace.html").exists()


def test_terms_of_steps_that_are_not_traced_are_not_held(tmp_path: Path) -> None:
    from gradtrace.integrations.lightning import GradTrace

    class Checked(GradTrace):  # type: ignore[misc]
        def on_before_backward(self, trainer: Any, *rest: Any) -> None:
            assert (self._given is not None) == (trainer.global_step % 4 == 0)
            super().on_before_backward(trainer, *rest)
            assert self._given is None

    model, callback = Forked(), Checked(every=4, budget=None, diagnose=False)
    model.callback = callback
    callback.terms(ce=torch.ones(()))  # before training: nothing
    fit(tmp_path, callback, model)
    assert callback.monitor is not None
    assert [set(each.terms) for each in callback.monitor.history.records] == [
        {"norm ce", "norm decay", "cosine ce decay"}
    ] * 2


def test_trainer_and_tensorboard_get_choices_terms_and_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradtrace.integrations.transformers import GradTrace

    callback = GradTrace(every=2, budget=None, curves=1)
    whole = transformers.Trainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = whole(self, model, inputs, *args, **kwargs)
        callback.terms(task=loss, decay=1e-3 * model.lm_head.weight.square().sum())
        return loss

    monkeypatch.setattr(transformers.Trainer, "compute_loss", compute_loss)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    trained(tmp_path, callback, report_to=["tensorboard"])
    found = events(tmp_path / "runs")
    names = {name for name in found.Tags()["scalars"] if "gradtrace" in name}
    assert {name for name in names if "terms" in name} == {
        f"train/gradtrace/terms/{name}" for name in ("norm_task", "norm_decay", "cosine_task_decay")
    }
    assert len([name for name in names if "choice" in name]) == 1
    assert "Diagnosis: healthy" in text_of(found, "gradtrace/diagnosis")
    told = capsys.readouterr().err
    assert f"2 of 4 steps are traced; report: {tmp_path / 'gradtrace.html'}" in told


@pytest.mark.parametrize("passes", [1, 2])
def test_accelerate(tmp_path: Path, passes: int, capsys: pytest.CaptureFixture[str]) -> None:
    import accelerate
    from gradtrace.integrations.accelerate import GradTrace

    accelerator = accelerate.Accelerator(
        cpu=True,
        log_with="tensorboard",
        project_dir=tmp_path,
        gradient_accumulation_steps=passes,
    )
    accelerator.init_trackers("run")
    model, seen = Forked().eval(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data(9), batch_size=3)  # 3 batches: the last is a step
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with GradTrace(accelerator, model, every=1, budget=None) as tracing:
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    logits = model(x)
                    ce, decay = functional.cross_entropy(logits, y), 0.1 * logits.square().mean()
                    tracing.terms(ce=ce, decay=decay)
                    seen.append(float(ce.detach() + decay.detach()))
                    accelerator.backward(ce + decay)
                    optimizer.step()
                    optimizer.zero_grad()
    assert "backward" not in vars(accelerator)
    firsts = seen if passes == 1 else [seen[0], seen[2], seen[3], seen[5]]
    assert tracing.monitor.history.losses == pytest.approx(firsts, rel=1e-6)
    assert tracing.monitor.history.records[0].scale == pytest.approx(1 / passes)
    accelerator.end_training()
    found = events(tmp_path / "run")
    names = {name for name in found.Tags()["scalars"] if "gradtrace" in name}
    assert names | {"gradtrace/cost"} == CURVES  # no time may have passed to compare with
    assert "Diagnosis: healthy" in text_of(found, "gradtrace/diagnosis")
    assert str(tmp_path / "gradtrace.html") in capsys.readouterr().err


def test_accelerate_after_an_error(tmp_path: Path) -> None:
    import accelerate
    from gradtrace.integrations.accelerate import GradTrace

    accelerator, model = accelerate.Accelerator(cpu=True, project_dir=tmp_path), Forked()
    with pytest.raises(KeyError), GradTrace(accelerator, model, budget=None) as tracing:
        raise KeyError("mine")
    assert "backward" not in vars(accelerator)
    assert "KeyError" in tracing.monitor.history.notes[0]
    with pytest.raises(GradtraceError, match="takes the Accelerator, then the model"):
        GradTrace(model, accelerator)  # type: ignore[arg-type]


# Triggers -----------------------------------------------------------------------------------------

BAD = 2
"""The step that goes wrong."""


class Poisoned(lightning.LightningModule):  # type: ignore[misc]
    """All that a rerun may move, and a line that large inputs make infinite; ``seen`` has the state
    at the beginning of each step.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
        self.out = nn.Linear(6, 3)
        self.seen: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append({name: value.clone() for name, value in self.state_dict().items()})
        hidden = self.net(x)
        bad = bool(x.max() > 50)
        return self.out(-hidden.abs().log() if bad else hidden)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, number: int) -> dict[str, Tensor]:
        x, y = batch
        loss = functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def check_incident(
    monitor: gt.Monitor | None, folder: Path, before: Mapping[str, Tensor], told: str
) -> None:
    """The step was found and run again with the weights that it began with, and the file named."""
    path = folder / f"gradtrace-step{BAD}-nonfinite.gradtrace"
    assert monitor is not None and monitor.incidents == (path,)
    found = gt.load_incident(path)
    assert (found.step, found.same) == (BAD, True), found.notes
    for name, value in found.beginning.state.items():
        assert torch.equal(value, before[name]), name
    assert found.diagnosis["nonfinite"]["operator"] == "log"
    assert f"incident at step {BAD}: {path}" in told
    (line,) = monitor.history.incidents
    assert (line.step, line.file) == (BAD, str(path)) and "hidden.abs().log()" in line.line


@pytest.mark.filterwarnings("ignore")
def test_lightning_runs_a_bad_step_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradtrace.integrations.lightning import GradTrace

    rows = [(x + 100 * (n // 3 == BAD), y) for n, (x, y) in enumerate(data())]
    callback = GradTrace(trigger="nonfinite", diagnose=False)
    watched = fit(tmp_path, callback, Poisoned(), max_epochs=1, rows=rows)  # type: ignore[arg-type]
    check_incident(callback.monitor, tmp_path, watched.seen[BAD], capsys.readouterr().err)  # type: ignore[arg-type]
    plain = fit(tmp_path, lightning.Callback(), Poisoned(), max_epochs=1, rows=rows)  # type: ignore[arg-type]
    assert len(plain.seen) == len(watched.seen) == 4
    for a, b in zip(plain.seen, watched.seen):
        for name in a:  # type: ignore[attr-defined]
            assert torch.equal(a[name], b[name]) or bool(a[name].isnan().any())  # type: ignore[call-overload,index]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("passes", [1, 2])
def test_accelerate_runs_a_bad_step_again(
    tmp_path: Path, passes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    import accelerate
    from gradtrace.integrations.accelerate import GradTrace

    accelerator = accelerate.Accelerator(
        cpu=True, project_dir=tmp_path, gradient_accumulation_steps=passes
    )
    model = Poisoned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = torch.utils.data.DataLoader(data(24), batch_size=3, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.seen += [{}] * (BAD - BAD * passes)
    with GradTrace(accelerator, model, trigger="nonfinite", diagnose=False) as tracing:
        for n, (x, y) in enumerate(loader):
            x = x + 100 * (n == BAD * passes)
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    check_incident(tracing.monitor, tmp_path, model.seen[BAD * passes], capsys.readouterr().err)


@pytest.mark.filterwarnings("ignore")
def test_trainer_runs_a_bad_step_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gradtrace.integrations.transformers import GradTrace

    callback = GradTrace(trigger="nonfinite", diagnose=False)
    trainer = trained(tmp_path, callback, learning_rate=1e30)  # the first step ruins the weights
    assert callback.monitor is not None
    (path,) = callback.monitor.incidents
    found = gt.load_incident(path)
    step, state, inputs, _ = trainer.seen[found.step]
    assert step == found.step == 1 and path.parent == tmp_path and found.same, found.notes
    for name, value in found.beginning.state.items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(found.calls[0].kwargs["input_ids"], inputs["input_ids"])
    assert f"incident at step 1: {path}" in capsys.readouterr().err
