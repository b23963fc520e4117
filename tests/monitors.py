"""What a process of a training run does for ``test_monitor_ranks``: a mode is a run with a Monitor.

``launch`` starts the processes; the test keeps the store at the port.
"""

from __future__ import annotations

import json
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradtrace as gt

STEPS = 5


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def part(step: int, rank: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def run(mode: str, rank: int, folder: Path) -> dict[str, Any]:
    """Train; in mode "apart" without averaging gradients. In "bad" one of them has a loss of nan,
    in "raises" and "killed" one ends early.
    """
    inner = model()
    averaged = mode in ("ddp", "bad")
    outer: nn.Module = nn.parallel.DistributedDataParallel(inner) if averaged else inner
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    kept = folder / mode if mode == "bad" else None
    losses = []
    with gt.Monitor(outer, every=2, file=folder / f"{mode}.jsonl", folder=kept) as monitor:
        for step in range(STEPS):
            if rank == 1 and step == 3:
                if mode == "raises":
                    raise ValueError("on purpose")
                if mode == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
            loss = outer(part(step, rank)).square().mean()
            losses.append(loss.item())
            if mode == "bad" and rank == 1 and step == 4:
                loss = loss * math.nan
            monitor.step(loss, batch=part(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if mode in ("ddp", "apart"):
            dist.barrier()
    weights = {name: value.tolist() for name, value in inner.state_dict().items()}
    return {"losses": losses, "weights": weights, "steps": monitor.history.column("step")}


def warm() -> None:
    """Load what is loaded when it is first used, before the process is copied."""
    net = model()
    with gt.Monitor(net) as monitor:
        monitor.step(net(part(0, 0)).square().mean())


def main(modes: str, rank: int, world: int, port: int, folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    warnings.simplefilter("ignore", UserWarning)
    told = {}
    for mode in modes.split(","):
        try:
            told[mode] = run(mode, rank, folder)
        except ValueError as error:
            told[mode] = {"error": str(error)}
        (folder / f"told-{rank}.json").write_text(json.dumps(told))
