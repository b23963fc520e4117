"""What a process of a group does for ``test_process_group``: scenarios that report as JSON.

``launch`` starts the processes; the test keeps the store at the port.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradtrace as gt
from gradtrace.table import Table
from gradtrace.training.unwrap import apart

Batch = tuple[Tensor, Tensor]
SIZE = 22


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        return self.out(torch.tanh(self.left(x)) + torch.tanh(self.right(x)))  # type: ignore[no-any-return]


def model(seed: int = 4) -> Model:
    torch.manual_seed(seed)
    return Model()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(SIZE, 3, generator=generator)
    return TensorDataset(xs, torch.randint(0, 2, (SIZE,), generator=generator))


def loader(size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(), size, **options)


def shuffled(seed: int) -> DataLoader[Any]:
    return loader(4, shuffle=True, generator=torch.Generator().manual_seed(seed))


def losses(net: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], reduction="none")


def mean(net: nn.Module, batch: Batch) -> Tensor:
    return losses(net, batch).mean()


# What is compared with one process ---------------------------------------------------------------

SAME: dict[str, Callable[[], Table]] = {
    "greedy": lambda: gt.influence(model(), mean, loader()),
    "by sample": lambda: gt.influence(model(), losses, loader(), per_sample=True, rule="viterbi"),
    "sampled": lambda: gt.influence(model(), mean, shuffled(7), sample=9, by=nn.Linear),
    "one batch": lambda: gt.influence(model(), mean, loader(SIZE)),
    "a generator": lambda: gt.influence(model(), mean, (batch for batch in loader(8))),
    "decompose": lambda: gt.decompose(model(), mean, loader()),
}


def same(rank: int, folder: Path) -> Iterator[tuple[str, object]]:
    for name, call in SAME.items():
        yield name, call().to_dict()


# What goes wrong ---------------------------------------------------------------------------------


def failure(call: Callable[[], object]) -> str:
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing went wrong"


def at(rank: int, number: int, act: Callable[[], None]) -> Callable[[nn.Module, Batch], Tensor]:
    """A loss that does something in the n-th batch of a rank."""
    calls = list[int]()

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        calls.append(1)
        if dist.get_rank() == rank and len(calls) == number:
            act()
        return mean(net, batch)

    return loss


def broken() -> None:
    raise ValueError("no such word")


def ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def wrong(rank: int, folder: Path) -> Iterator[tuple[str, object]]:
    """What goes wrong on one rank, and how runs that ended early go on."""
    for who in (0, 1):
        ask: Any = {"loader": loader(2), "journal": folder / f"raised{who}"}
        loss = at(who, 2, broken)
        yield f"rank {who} raises", failure(lambda: gt.influence(model(), loss, **ask))  # noqa: B023
        yield f"resumed {who}", gt.influence(model(), mean, **ask).to_dict()
        ask["journal"] = folder / f"stopped{who}"
        yield f"rank {who} stops", gt.influence(model(), at(who, 2, ctrl_c), **ask).to_dict()
        dist.barrier()
        yield f"goes on {who}", gt.influence(model(), mean, **ask).to_dict()
    sampler = DistributedSampler(data())  # type: ignore[var-annotated]
    rule = "viterbi" if rank else "greedy"
    calls: dict[str, Callable[[], object]] = {
        "weights": lambda: gt.influence(model(rank), mean, loader()),
        "rules": lambda: gt.influence(model(), mean, loader(), rule=rule),
        "orders": lambda: gt.influence(model(), mean, shuffled(rank)),
        "sampler": lambda: gt.influence(model(), mean, loader(sampler=sampler)),
        "nothing": lambda: gt.influence(model(), mean, []),
    }
    for name, call in calls.items():
        yield name, failure(call)


def killed(rank: int, folder: Path) -> Iterator[tuple[str, object]]:
    """The second rank is killed in its second batch."""
    loss = at(1, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    yield "killed", failure(lambda: gt.influence(model(), loss, loader(2), journal=folder / "run"))


# Wrapped models ----------------------------------------------------------------------------------


def wrappers(rank: int, folder: Path) -> Iterator[tuple[str, object]]:
    """DistributedDataParallel and fully_shard; batches of which one rank has more."""
    net = nn.parallel.DistributedDataParallel(nn.Sequential(model(), nn.BatchNorm1d(2)))
    for _ in range(2):  # the first step's buckets are rebuilt in the second
        torch.autograd.backward(mean(net, next(iter(loader()))))
        net.zero_grad()
        yield "ddp", gt.influence(net, lambda _, batch: mean(net, batch), loader(8)).to_dict()
    torch.autograd.backward(mean(net, next(iter(loader(4 + rank)))))
    yield "ddp goes on", [float(p.grad.sum()) for p in net.parameters() if p.grad is not None]
    yield from sharded()


def sharded() -> Iterator[tuple[str, object]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for name, dtype in {"fsdp": None, "fsdp in bfloat16": torch.bfloat16}.items():
        net: Any = model().eval()
        for block in (net.left, net.right):
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype))
        whole = MixedPrecisionPolicy(dtype, output_dtype=dtype and torch.float32)
        fully_shard(net, mesh=mesh, mp_policy=whole)
        yield name, gt.influence(net, mean, loader(8)).to_dict()
        yield f"{name} is sharded", all(hasattr(p, "full_tensor") for p in net.parameters())
        with apart(net), gt.watch(net) as watch:
            traced = watch.trace(mean(net, next(iter(loader())))).influence()
        yield f"{name} gathered", traced.to_dict()
        torch.autograd.backward(mean(net, next(iter(loader()))))
        sums = [float(p.grad.full_tensor().double().sum()) for p in net.parameters()]
        yield f"{name} goes on", sums


SCENARIOS = {f.__name__: f for f in (same, wrong, wrappers, killed)}


def command(words: str, rank: int, world: int, port: int) -> None:
    """The command line with its words as JSON, in the environment that torchrun gives it."""
    from gradtrace.cli import main

    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "RANK": rank}
    torchrun |= {"LOCAL_RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": True, "NO_COLOR": 1}
    os.environ |= {name: str(value) for name, value in torchrun.items()}
    sys.argv[:] = ["gradtrace", *json.loads(words)]
    main()


def warm() -> None:
    """Load what is loaded when it is first used, before the process is copied."""
    import torch.distributed.fsdp

    import gradtrace.cli.influence  # noqa: F401

    gt.influence(model(), mean, loader(), progress=False)
    assert torch.distributed.fsdp is not None


def main(names: str, rank: int, world: int, port: int, folder: Path) -> None:
    if names.startswith("["):
        command(names, rank, world, port)
        return
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in names.split(","):
        found = list(SCENARIOS[name](rank, folder))
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    if name != "killed":
        dist.destroy_process_group()
