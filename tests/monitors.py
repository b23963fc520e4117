"""What a process of a training run does for ``test_monitor_ranks``: a mode is a run with a Monitor.

``launch`` starts the processes; the test keeps the store at the port. There is no collective in
these loops but those that modes name: without a Monitor each comes to its end.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradtrace as gt

STEPS = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left = nn.Linear(3, 4), nn.Linear(4, 4)
        self.right, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.out(torch.tanh(self.left(x)) + torch.tanh(self.right(x)))  # type: ignore[no-any-return]


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def part(step: int, rank: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def steps(mode: str, rank: int) -> int:
    """How many steps a rank has."""
    if mode in ("left", "barrier"):
        return STEPS if rank == 0 else STEPS - 2 - rank
    return STEPS + rank if mode == "more" else STEPS


class Clock:
    """A millisecond passes when it is read: what a budget affords is the same on every machine."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def run(mode: str, rank: int, world: int, folder: Path) -> dict[str, Any]:
    net = model()
    options: dict[str, Any] = {"every": 1, "budget": None, "view": False}
    clock = Clock()
    if mode == "budget":
        options |= {"budget": 1.0, "clock": clock}
    if mode == "bad":
        options |= {"trigger": "nonfinite", "start": 10}
    count = 60 if mode == "budget" else steps(mode, rank)
    begun = time.perf_counter()
    longest = 0.0
    with gt.Monitor(net, file=folder / f"{mode}.jsonl", **options) as monitor:
        for step in range(count):
            if mode == "slow" and rank == 1:
                time.sleep(0.15)
            if mode == "budget":
                clock.now += 0.02
                time.sleep(0.02)
                dist.barrier()
            if rank == 1 and step == 3:
                if mode == "raises":
                    raise ValueError("on purpose")
                if mode == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
            x = part(step, rank)
            if mode == "bad" and step == 3 and rank != 1:  # at one step, on all but one
                x[0] = math.nan
            loss = net(x).square().mean()
            before = time.perf_counter()
            monitor.step(loss)
            longest = max(longest, time.perf_counter() - before)
            loss.backward()
        if mode == "barrier":
            dist.barrier()
    return {"longest": longest, "seconds": time.perf_counter() - begun}


def train(rank: int, folder: Path) -> None:
    """DistributedDataParallel; the last loss of the second process is not finite."""
    net = model()
    outer = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept = {}
    with gt.Monitor(outer, every=2, budget=None, file=folder / "ddp.jsonl") as monitor:
        for step in range(5):
            loss = outer(part(step, rank)).square().mean()
            if step == 4 and rank == 1:
                loss = loss * math.nan
            kept[step] = {name: value.clone() for name, value in net.state_dict().items()}
            monitor.step(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(kept, folder / f"{rank}.pt")


def warm() -> None:
    """Load what is loaded when it is first used, before the process is copied."""
    net = model()
    with gt.Monitor(net, every=1, budget=None) as monitor:
        monitor.step(net(part(0, 0)).square().mean())


def main(modes: str, rank: int, world: int, port: int, folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    told = {}
    for mode in modes.split(","):
        if mode == "ddp":
            train(rank, folder)
            continue
        try:
            told[mode] = run(mode, rank, world, folder)
        except ValueError as error:
            told[mode] = {"error": str(error)}
        if mode != "killed":
            dist.barrier()  # a program's own, after the Monitor
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    # Who is left ends together, so that the first hears all of them, on a slow machine too.
    store.add("through", 1)
    until = time.monotonic() + 60
    while store.add("through", 0) < world - ("killed" in modes) and time.monotonic() < until:
        time.sleep(0.05)
