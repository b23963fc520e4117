"""Influence on a GPU in a group of nccl, as ``torchrun`` starts it. Skipped where there is no GPU:
there the same program runs by gloo on the CPU, so that it is known to be right itself.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import gpuranks
import pytest
import ranks
import torch
import torch.distributed as dist

import gradtrace as gt

HERE = Path(__file__).parent
LONG = 300
"""Seconds that processes may take on a machine that has much else to do."""

Found = dict[str, Any]

on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or not dist.is_available() or not dist.is_nccl_available(),
    reason="no GPU, or a torch without nccl: influence in a group of nccl is NOT tested here",
)
WAYS = [pytest.param("nccl", "cuda", marks=on_a_gpu), ("gloo", "cpu")]


PATH = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
SHARED = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "GRADTRACE_NATIVE": "0"}
"""Processes find gradtrace and the tests whether or not it is installed."""


def alone(*command: object) -> subprocess.CompletedProcess[str]:
    """One process, told what ``torchrun`` tells it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    env = os.environ | SHARED | {key: str(value) for key, value in told.items()}
    return fresh.python(*map(str, command), env=env | {"MASTER_PORT": str(port)})


def torchrun(world: int, *command: object) -> subprocess.CompletedProcess[str]:
    """So many processes."""
    runner = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return subprocess.run(
        [sys.executable, *runner, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=LONG,
        env=os.environ | SHARED,
    )


Runs = Callable[[str, str, int], list[Found]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What every rank found, by backend, device and how many they are; each is started once."""
    known: dict[tuple[str, str, int], list[Found]] = {}

    def run(backend: str, device: str, world: int) -> list[Found]:
        if (backend, device, world) not in known:
            folder = tmp_path_factory.mktemp("ranks")
            if backend == "gloo":  # without torchrun, which imports torch, too
                ended = alone("-m", "gpuranks", backend, device, folder)
            else:
                ended = torchrun(world, HERE / "gpuranks.py", backend, device, folder)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            files = [folder / f"{rank}.json" for rank in range(world)]
            known[backend, device, world] = [json.loads(file.read_text()) for file in files]
        return known[backend, device, world]

    return run


@pytest.mark.parametrize(
    ("backend", "device", "world"),
    [
        pytest.param("nccl", "cuda", 1, marks=on_a_gpu),
        pytest.param("nccl", "cuda", 2, marks=on_a_gpu),
        ("gloo", "cpu", 1),  # test_process_group has more of them
    ],
)
def test_a_group_finds_what_one_process_finds(
    backend: str, device: str, world: int, runs: Runs
) -> None:
    wanted = gpuranks.table(device)
    assert wanted["about"]["losses"] == len(list(gpuranks.loader()))
    for found in runs(backend, device, world):
        assert found["backend"] == backend
        assert found["group"] == wanted


def watched(device: str) -> Found:
    """The first batch, of the plain model."""
    with gt.watch(net := ranks.model().to(device)) as watch:
        loss = gpuranks.losses(net, next(iter(gpuranks.loader()))).sum()
    return watch.trace(loss).influence().to_dict()


def trained(device: str) -> list[float]:
    net = ranks.model().to(device)
    gpuranks.losses(net, next(iter(gpuranks.loader()))).sum().backward()  # type: ignore[no-untyped-call]
    return [float(p.grad.sum()) for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize(("backend", "device"), WAYS)
def test_a_model_in_ddp(backend: str, device: str, runs: Runs) -> None:
    (found,) = runs(backend, device, 1)
    assert found["ddp"] == gpuranks.table(device)
    assert found["ddp watched"]["rows"] == watched(device)["rows"]
    assert found["ddp goes on"] == pytest.approx(trained(device), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("backend", "device"), WAYS)
def test_a_sharded_model(backend: str, device: str, runs: Runs) -> None:
    (found,) = runs(backend, device, 1)
    assert found["fsdp is sharded"]
    assert found["fsdp"] == gpuranks.table(device)
    assert found["fsdp gathered"] == watched(device)
    assert found["fsdp goes on"] == pytest.approx(trained(device), rel=1e-4, abs=1e-5)


SCRIPT = """
import gpuranks, ranks

def parts():
    return ranks.model().to({device!r}), gpuranks.losses, ranks.loader()
"""


@on_a_gpu
@pytest.mark.parametrize("world", [1, 2])
def test_the_command_line(world: int, tmp_path: Path) -> None:
    """Its own group is one of gloo; ``test_process_group`` has it on the CPU."""
    pytest.importorskip("typer")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(device="cuda"))
    ended = torchrun(world, "-m", "gradtrace", "influence", f"{script}:parts", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found, rows = json.loads(ended.stdout), gpuranks.table("cuda")["rows"]
    assert {row["component"] for row in found["rows"]} == {row[0] for row in rows}
