"""A run over a data set draws the same random numbers, interrupted or not, on any rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradtrace.distributed.checkpoint import PartialResult, pooled
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.io import container

HELD = torch.Generator()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = torch.Generator().manual_seed(3)
        self.mode = "dropout"

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        keep = DRAWS[self.mode](self, x)
        return self.a(x * keep).tanh() + self.b(x * (1 - keep)).tanh()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    HELD.manual_seed(seed)
    KEPT["python"].seed(seed)
    KEPT["numpy"].bit_generator.state = np.random.PCG64(seed).state
    KEPT["old"].seed(seed)


KEPT: dict[str, Any] = {
    "python": random.Random(),
    "numpy": np.random.default_rng(),
    "old": np.random.RandomState(),
    "system": random.SystemRandom(),
}

DRAWS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "dropout": lambda net, x: F.dropout(torch.ones_like(x), 0.4) * 0.6,
    "python": lambda net, x: torch.tensor([random.random() for _ in range(4)]),
    "numpy": lambda net, x: torch.from_numpy(np.random.rand(4)).float(),
    "own generator": lambda net, x: torch.rand(x.shape, generator=net.own),
    "held generator": lambda net, x: torch.rand(x.shape, generator=HELD),
    "held python": lambda net, x: torch.tensor([KEPT["python"].random() for _ in range(4)]),
    "held numpy": lambda net, x: torch.from_numpy(KEPT["numpy"].random(4)).float(),
    "held old numpy": lambda net, x: torch.from_numpy(KEPT["old"].rand(4)).float(),
}


def batches(n: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator) for _ in range(n)]


def net(mode: str = "dropout") -> Net:
    torch.manual_seed(0)
    found = Net()
    found.mode = mode
    return found


STOP = {"left": -1}
"""In which batch the loss ends the run. It changes this, so that a journal leaves it out."""


def losses(model: nn.Module, x: Tensor) -> Tensor:
    STOP["left"] -= 1
    if STOP["left"] == 0:
        raise KeyboardInterrupt
    return model(x).square().mean(1)


def run(model: nn.Module, loader: Any, seed: int, stop: int = -1, **options: Any) -> Any:
    seed_all(seed)
    STOP["left"] = stop
    return gt.influence(model, losses, loader, **options)


@pytest.mark.parametrize("mode", DRAWS)
def test_a_resumed_run_is_an_uninterrupted_one(mode: str, tmp_path: Path) -> None:
    model, file = net(mode), tmp_path / "run.gradtrace"
    whole = run(model, batches(), 1)
    assert run(model, batches(), 1, 3, checkpoint=file).interrupted
    found = run(model, batches(), 2, checkpoint=file)  # as if nobody had seeded the second
    assert not found.interrupted and found == whole
    assert run(model, batches(), 3) != whole


def test_gt_decompose_too(tmp_path: Path) -> None:
    model, file = net(), tmp_path / "run.gradtrace"
    seed_all(1)
    whole = gt.decompose(model, losses, batches(), components=["a", "b"])
    for stop in (3, -1):
        STOP["left"] = stop
        found = gt.decompose(model, losses, batches(), components=["a", "b"], checkpoint=file)
    assert found.shares == whole.shares and not found.interrupted


@pytest.mark.parametrize("mode", DRAWS)
def test_calls_draw_alike_unless_seeded_anew_and_put_generators_back(mode: str) -> None:
    model = net(mode)
    first = run(model, batches(), 1)
    after = (torch.rand(2).tolist(), random.random(), np.random.rand(), HELD.get_state().tolist())
    assert run(model, batches(), 1) == first and run(model, batches(), 2) != first
    seed_all(1)
    assert after[:3] == (torch.rand(2).tolist(), random.random(), np.random.rand())
    assert after[3] == HELD.get_state().tolist()


def test_batches_draw_other_numbers() -> None:
    for mode in DRAWS:
        model, same = net(mode), batches(1)
        tables = [run(model, same * n, 1) for n in (1, 2)]
        assert tables[0].merge(tables[0]) != tables[1], mode


class Augments(Dataset[Tensor]):
    """Samples that are changed at random when they are loaded, from the generators of all."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, n: int) -> Tensor:
        return torch.full((4,), 0.1 * n) + torch.randn(4) * random.random() * np.random.rand()


def test_a_loader_draws_as_if_no_loss_did(tmp_path: Path) -> None:
    model, file = net(), tmp_path / "run.gradtrace"

    def loader() -> DataLoader[Tensor]:
        return DataLoader(Augments(), 2, shuffle=True)

    seed_all(1)
    plain = [batch.tolist() for batch in loader()]
    seen: list[Any] = []

    def noted() -> Iterator[Tensor]:
        for batch in loader():
            seen.append(batch.tolist())
            yield batch

    whole = run(model, noted(), 1)
    assert seen == plain
    assert run(model, loader(), 1, 4, checkpoint=file).interrupted
    assert run(model, loader(), 1, checkpoint=file) == whole


def test_a_journal_that_has_no_draws_is_an_older_one(tmp_path: Path) -> None:
    model, file = net(), tmp_path / "run.gradtrace"
    run(model, batches(), 1, 3, checkpoint=file)
    meta = dict(container.read(file, "influence").meta)
    del meta["draws"], meta["digest"]
    container.write(file, "influence", {**meta, "digest": container.digest(meta)}, {})
    with pytest.raises(GradtraceError, match=r"older gradtrace, which did not note .* its random"):
        run(model, batches(), 1, checkpoint=file)


def test_parts_of_runs_with_other_draws_are_not_added() -> None:
    part = gt.influence(net(), losses, batches(1))
    one = PartialResult(part, {("", "a"): None}, "01")  # type: ignore[dict-item]
    two = PartialResult(part, {("", "b"): None}, "02")  # type: ignore[dict-item]
    with pytest.raises(GradtraceError, match="random numbers were others"):
        pooled(PartialResult(), [one, two], [])
    assert pooled(PartialResult(), [one, replace(two, draws="01")], [])[0].draws == ""
