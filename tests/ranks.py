"""What a process of a group does for ``test_process_group``: scenarios that report as JSON.

``launch`` starts the processes; the test keeps the store at the port.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradtrace as gt
from gradtrace.distributed import unwrap
from gradtrace.tracing.influence import Influence

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
        x = torch.tanh(self.first(x))
        return self.out(torch.tanh(self.left(x)) + torch.tanh(self.right(x)))  # type: ignore[no-any-return]


def model(seed: int = 4) -> Model:
    torch.manual_seed(seed)
    return Model()


class Noisy(Model):
    """Draws from the generators of PyTorch, Python, NumPy, and from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.3) + 0.1 * torch.randn(x.shape, generator=self.generator)
        return super().forward(x * random.random() + float(numpy.random.rand()))


def noisy(seed: int = 0) -> Noisy:
    """The same weights; what is drawn from then on depends on the seed."""
    torch.manual_seed(4)
    net = Noisy()
    seed_all(seed)
    return net


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(SIZE, 3, generator=generator)
    return TensorDataset(xs, torch.randint(0, 2, (SIZE,), generator=generator))


class Reads(Dataset[Any]):
    """Notes which samples are loaded."""

    def __init__(self) -> None:
        self.data, self.read = data(), set[int]()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, n: int) -> Any:
        self.read.add(n)
        return self.data[n]


class Collects(Reads):
    """Collects garbage in a loader's worker; connections that the parent left there would hang."""

    def __getitem__(self, n: int) -> Any:
        if not self.read:
            gc.collect()
        return super().__getitem__(n)


def loader(size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(), size, **options)


def shuffled(seed: int) -> DataLoader[Any]:
    return loader(4, shuffle=True, generator=torch.Generator().manual_seed(seed))


def losses(net: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], reduction="none")


def mean(net: nn.Module, batch: Batch) -> Tensor:
    return losses(net, batch).mean()


# What is compared with one process: the same calls, there without a group ------------------------

SAME: dict[str, Callable[[], Influence]] = {
    "greedy": lambda: gt.influence(model(), losses, loader()),
    "viterbi": lambda: gt.influence(model(), losses, loader(3), rule="viterbi", weight="gradient"),
    "operators": lambda: gt.influence(model(), mean, list(loader(5)), components="operators"),
    "shuffled": lambda: gt.influence(model(), mean, shuffled(7)),
    "random": lambda: gt.influence(noisy(), losses, loader(2)),
    "one batch": lambda: gt.influence(model(), losses, loader(SIZE)),
    "a generator": lambda: gt.influence(model(), losses, (batch for batch in loader(8))),
    "loaded by workers": lambda: gt.influence(
        model(), mean, DataLoader(Collects(), 4, num_workers=1)
    ),
}


def same(rank: int, world: int, folder: Path) -> Iterator[tuple[str, object]]:
    """Every rank gets the table of one process."""
    for name, call in SAME.items():
        yield name, call().to_dict()
    yield "alone", gt.influence(model(), losses, loader(), group=False).to_dict()


# Loaders, wrappers, errors, stops: two ranks -----------------------------------------------------


def parts(rank: int, world: int, folder: Path) -> Iterator[tuple[str, object]]:
    """Loaders that are a rank's own; which samples are loaded."""
    own = list(loader())[:4] if rank == 0 else list(loader())[4:]
    yield "own", gt.influence(model(), losses, own, sharded=True).to_dict()
    none = list(loader()) if rank == 0 else []
    yield "own, one empty", gt.influence(model(), losses, none, sharded=True).to_dict()
    sampler: DistributedSampler[Any] = DistributedSampler(data(), shuffle=True, seed=3)
    table = gt.influence(model(), losses, loader(4, sampler=sampler))
    yield "sampler", table.to_dict()
    sampler = DistributedSampler(data(), 4, 0)
    yield "sampler of four", failure(lambda: gt.influence(model(), losses, loader(sampler=sampler)))
    reads = Reads()
    gt.influence(model(), losses, DataLoader(reads, 4))
    yield "read", sorted(reads.read)
    half = dist.new_group([0])
    chosen = half if rank == 0 else False
    yield "a group of one", gt.influence(model(), losses, loader(), group=chosen).to_dict()


def failure(call: Callable[[], object]) -> str:
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing went wrong"


TROUBLE: dict[str, Any] = {"calls": 0, "what": None}
"""How often the loss was called, and what happens: on a rank, in the n-th batch of its own,
something. The loss changes this, so that a journal leaves it out.
"""


def troubled(net: nn.Module, batch: Batch) -> Tensor:
    """A loss with accidents; without them it is the same loss, for a journal too."""
    TROUBLE["calls"] += 1
    if TROUBLE["what"] is not None:
        rank, number, act = TROUBLE["what"]
        if dist.get_rank() == rank and number in (0, TROUBLE["calls"]):
            act()
    return losses(net, batch)


def at(rank: int, number: int, act: Callable[[], None]) -> Callable[[nn.Module, Batch], Tensor]:
    """A loss that does something in the n-th batch of a rank; 0 is every batch."""
    TROUBLE.update(calls=0, what=(rank, number, act))
    return troubled


def calm() -> Callable[[nn.Module, Batch], Tensor]:
    """The same loss without accidents."""
    TROUBLE["what"] = None
    return troubled


def broken() -> None:
    raise ValueError("no such word")


def ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def wrong(rank: int, world: int, folder: Path) -> Iterator[tuple[str, object]]:
    """What goes wrong on one rank."""
    for who in (0, 1):
        file = folder / f"raised{who}.gradtrace"
        loss = at(who, 2, broken)
        yield (
            f"rank {who} raises",
            failure(lambda: gt.influence(model(), loss, loader(), checkpoint=file)),  # noqa: B023
        )
        dist.barrier()
        if rank == 0:
            yield f"kept {who}", sorted(path.name for path in folder.glob(f"raised{who}*"))
        dist.barrier()
        yield f"resumed {who}", gt.influence(model(), calm(), loader(), checkpoint=file).to_dict()
        again = gt.influence(model(), at(rank, 1, broken), loader(), checkpoint=file)
        yield f"again {who}", again.to_dict()
    yield "models", failure(lambda: gt.influence(model(rank), losses, loader()))
    rule = "viterbi" if rank else "greedy"
    yield "rules", failure(lambda: gt.influence(model(), losses, loader(), rule=rule))
    yield "orders", failure(lambda: gt.influence(model(), losses, shuffled(rank)))
    yield "kinds", failure(lambda: gt.influence(model(), losses, loader(), sharded=rank == 0))
    yield "nothing", failure(lambda: gt.influence(model(), losses, []))


def slow(rank: int, world: int, folder: Path) -> Iterator[tuple[str, object]]:
    """One rank takes its time, and has more batches than the others."""
    yield "slow", gt.influence(model(), at(1, 0, lambda: time.sleep(0.1)), loader()).to_dict()
    own = list(loader())[1:] if rank == 1 else list(loader())[: 1 if rank == 0 else 0]
    loss = at(1, 0, lambda: time.sleep(0.1))
    yield "slow, of its own", gt.influence(model(), loss, own, sharded=True).to_dict()


def stopped(rank: int, world: int, folder: Path) -> Iterator[tuple[str, object]]:
    """Ctrl-C on one rank."""
    for who in (0, 1):
        file = folder / f"stopped{who}.gradtrace"
        table = gt.influence(model(), at(who, 2, ctrl_c), loader(2), checkpoint=file)
        yield f"stopped {who}", table.to_dict()
        dist.barrier()
        yield f"resumed {who}", gt.influence(model(), calm(), loader(2), checkpoint=file).to_dict()
    yield "at once", failure(lambda: gt.influence(model(), at(rank, 0, ctrl_c), loader()))
    file = folder / "random.gradtrace"
    first = gt.influence(noisy(rank), at(1, 3, ctrl_c), loader(2), checkpoint=file)
    yield "stopped at random", first.to_dict()
    dist.barrier()
    again = gt.influence(noisy(7 + rank), calm(), loader(2), checkpoint=file)
    yield "resumed at random", again.to_dict()


def wrappers(rank: int, world: int, folder: Path) -> Iterator[tuple[str, object]]:
    """DistributedDataParallel and fully_shard; batches of which one rank has more."""
    net = nn.parallel.DistributedDataParallel(nn.Sequential(model(), nn.BatchNorm1d(2)))
    for _ in range(2):  # the first step's buckets are rebuilt in the second
        losses(net, next(iter(loader()))).sum().backward()
        net.zero_grad()
        net.eval()
        yield "ddp", gt.influence(net, losses, loader(8)).to_dict()
        net.train()
        yield "ddp has no gradient", all(p.grad is None for p in net.parameters())
    with gt.watch(net) as watch:
        loss = losses(net, next(iter(loader()))).sum()
    yield "ddp watched", sorted(watch.trace(loss).influence().shares)
    loss.backward()
    yield "ddp goes on", [float(p.grad.sum()) for p in net.parameters() if p.grad is not None]
    yield from sharded(rank)


def sharded(rank: int) -> Iterator[tuple[str, object]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for name, dtype in {"fsdp": None, "fsdp in bfloat16": torch.bfloat16}.items():
        net: Any = model()
        for block in (net.left, net.right):
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype))
        whole = MixedPrecisionPolicy(dtype, output_dtype=dtype and torch.float32)
        fully_shard(net, mesh=mesh, mp_policy=whole)
        yield name, gt.influence(net, losses, loader(8)).to_dict()
        yield f"{name} is sharded", all(hasattr(p, "full_tensor") for p in net.parameters())
        if dtype is None:
            with unwrap.gathered(net), gt.watch(net) as watch:
                traced = watch.trace(losses(net, next(iter(loader())))).influence()
            yield "fsdp gathered", traced.to_dict()
        losses(net, next(iter(loader()))).sum().backward()
        yield (
            f"{name} goes on",
            [float(p.grad.full_tensor().double().sum()) for p in net.parameters()],
        )


# A process that dies -----------------------------------------------------------------------------


def killed(rank: int, world: int, folder: Path) -> Iterator[tuple[str, object]]:
    """The first of two ranks or the last of more is killed in its second batch."""
    who = world - 1 if world > 2 else 0
    loss = at(who, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    file = folder / "killed.gradtrace"
    yield "killed", failure(lambda: gt.influence(model(), loss, loader(2), checkpoint=file))


SCENARIOS = {f.__name__: f for f in (same, parts, wrong, slow, stopped, wrappers, killed)}


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

    gt.influence(model(), losses, loader(), progress=False)
    assert torch.distributed.fsdp is not None


def main(names: str, rank: int, world: int, port: int, folder: Path) -> None:
    if names.startswith("["):
        command(names, rank, world, port)
        return
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in names.split(","):
        found = list(SCENARIOS[name](rank, world, folder))
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
