"""Two processes that train one model: the first writes what both found."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import gradtrace as gt
from gradtrace import history

SCRIPT = """
    import math, sys, torch, gradtrace as gt
    from torch.nn.parallel import DistributedDataParallel
    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    outer = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {}
    with gt.Monitor(outer, every=2, budget=None, file=f"{folder}/run.jsonl") as monitor:
        for step in range(5):
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = outer(x).square().mean()
            if step == 4 and rank == 1:
                loss = loss * math.nan
            kept[step] = {name: value.clone() for name, value in model.state_dict().items()}
            record = monitor.step(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(kept, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    found = tmp_path_factory.mktemp("shards")
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT)]
    both = [subprocess.Popen([*command, str(rank), str(found)]) for rank in (0, 1)]
    try:
        codes = [each.wait(timeout=240) for each in both]
    finally:
        for each in both:
            each.kill()
    assert codes == [0, 0]
    return found


def shard(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def test_two_processes_are_one_over_both_parts(folder: Path) -> None:
    found = history.read(folder / "run.jsonl")
    assert found.steps == (0, 2, 4) and not found.running
    kept = torch.load(folder / "0.pt")
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for record in found.records[:2]:
        model.load_state_dict(kept[record.step])
        tables, losses = [], []
        for rank in (0, 1):
            with gt.watch(model) as watch:
                loss = model(shard(record.step, rank)).square().mean()
            tables.append(watch.trace(loss).influence(sample=10_000))
            losses.append(loss.item())
        expected = tables[0].merge(tables[1])
        assert record.influence is not None and record.influence.pairs == 2
        counts = [(row.name, row.own, row.unreached, row.count) for row in record.influence]
        assert counts == [(row.name, row.own, row.unreached, row.count) for row in expected]
        assert record.loss == pytest.approx(sum(losses) / 2, rel=1e-6)
        assert set(record.norms) >= {"0", "2"}


def test_one_process_that_fails_to_trace_is_told(folder: Path) -> None:
    last = history.read(folder / "run.jsonl").records[-1]
    assert last.influence is not None and last.influence.pairs == 1
    assert last.notes and "not finite" in last.notes[0]


def test_both_processes_train_alike(folder: Path) -> None:
    first, second = (torch.load(folder / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(first[4][name], second[4][name]) for name in first[4])
