"""A process that ``torchrun`` started for ``test_nccl``: measures on a device, reports as JSON.

``torchrun --nproc-per-node=1 gpuranks.py BACKEND DEVICE FOLDER``. Two ranks on one GPU have no
collectives of nccl, which wants a GPU for each; so they measure and do nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from ranks import Batch, loader
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.training.unwrap import apart


def losses(net: nn.Module, batch: Batch) -> Tensor:
    """As in ``ranks``, where the parameters are."""
    device = next(net.parameters()).device
    return ranks.losses(net, (batch[0].to(device), batch[1].to(device)))


def mean(net: nn.Module, batch: Batch) -> Tensor:
    return losses(net, batch).mean()


def table(device: str) -> dict[str, Any]:
    """What every rank is to find, wherever and with whomever it measures."""
    return gt.influence(ranks.model().to(device), mean, loader()).to_dict()


def same(device: str) -> Iterator[tuple[str, object]]:
    yield "backend", dist.get_backend()
    yield "group", table(device)


def wrappers(device: str) -> Iterator[tuple[str, object]]:
    """DistributedDataParallel and fully_shard, and that both go on as before."""
    net: Any = ranks.model().to(device)
    net = nn.parallel.DistributedDataParallel(net, [0] if device == "cuda" else None)
    yield "ddp", gt.influence(net, mean, loader()).to_dict()
    with gt.watch(net) as watch:
        loss = losses(net, next(iter(loader()))).sum()
    yield "ddp watched", watch.trace(loss).influence().to_dict()
    loss.backward()
    yield "ddp goes on", [float(p.grad.sum()) for p in net.parameters()]
    yield from sharded(device)


def sharded(device: str) -> Iterator[tuple[str, object]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, net = init_device_mesh(device, (dist.get_world_size(),)), ranks.model().to(device)
    for block in (net.left, net.right, net):
        fully_shard(block, mesh=mesh)
    yield "fsdp", gt.influence(net, mean, loader()).to_dict()
    yield "fsdp is sharded", all(hasattr(p, "full_tensor") for p in net.parameters())
    with torch.random.fork_rng(), apart(net), gt.watch(net) as watch:  # dropout draws
        traced = watch.trace(losses(net, next(iter(loader()))).sum()).influence()
    yield "fsdp gathered", traced.to_dict()
    losses(net, next(iter(loader()))).sum().backward()  # type: ignore[no-untyped-call]
    grads: list[Any] = [p.grad for p in net.parameters()]
    yield "fsdp goes on", [float(grad.full_tensor().sum()) for grad in grads]


def main(backend: str, device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    found = dict(same(device))
    if dist.get_world_size() == 1:
        found |= wrappers(device)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
