"""What a process of a group does for ``test_sharded``: models that its ranks hold in parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from thorough import some
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.pytorch.fsdp import Unit
from gradtrace.traced import Trace

CASES = {
    2: [
        ("mlp", "greedy", False),
        ("adapted", "edge", False),
        ("transformer", "viterbi", True),
        ("recomputed", "greedy", True),
    ],
    4: some([("mlp", "viterbi", False), ("transformer", "greedy", True)], 1),
}
"""Models, rules, and whether samples have one loss together, by the number of ranks."""


def mlp() -> nn.Module:
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)
    return nn.Sequential(*layers)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Tied embeddings, which belong to the root; blocks are recomputed if asked for."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A frozen weight, and a product of two parameters that is deferred in recording."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 256).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, 256)), nn.Parameter(torch.randn(256, 256) / 16)
        self.out = nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.frozen(x) + x @ (self.a @ self.b)))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "transformer": Transformer,
    "recomputed": lambda: Transformer(recomputed=True),
    "adapted": Adapted,
}


def model(name: str) -> Any:
    torch.manual_seed(3)
    return MODELS[name]().double()


def given(name: str, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(20 + rank)
    if "embed" in dict(model(name).named_children()):
        return torch.randint(0, 11, (2, 5), generator=generator)
    return torch.randn(3, 4, generator=generator).double()


def losses(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().flatten(1).mean(1)  # type: ignore[no-any-return]


def watched(net: Any) -> gt.watch:
    """A watch; what is recomputed after it is closed must save what the forward pass saved."""
    return gt.watch(net, composed=not getattr(net, "recomputed", False))


def traced(net: nn.Module, x: Tensor, rule: str = "greedy", one: bool = False) -> Trace:
    with watched(net) as watch:
        loss = losses(net, x)
    return watch.trace(loss.sum() if one else loss, rule=rule)


def failure(action: Callable[[], object]) -> str:
    try:
        action()
    except GradtraceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# fully_shard --------------------------------------------------------------------------------------


def sharded(name: str, mesh: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    net = model(name)
    parts = getattr(net, "blocks", None) or [m for m in net.children() if list(m.parameters())]
    for part in parts:
        fully_shard(part, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


MEASURES: dict[str, Callable[[Trace], Any]] = {
    "influence": lambda trace: trace.influence().to_dict(),
    "flow": lambda trace: str(trace.norms()),
    "decompose": lambda trace: str(trace.decompose(["blocks.1", "blocks.0.attention"])),
    "mass": lambda trace: str(trace.mass(["blocks.1", "blocks.0.attention"])),
    "path": lambda trace: repr(trace.path("blocks.1.up.weight", (1, 2))),
    "sample": lambda trace: trace.influence(sample=50).to_dict(),
}


def measured(net: nn.Module, rank: int) -> Iterator[tuple[str, object]]:
    trace = traced(net, given("transformer", rank), one=True)
    for name, measure in MEASURES.items():
        yield name, measure(trace)


def fsdp(rank: int, world: int, folder: Path) -> Iterator[tuple[str, object]]:
    """Models in units, each rank with samples of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    for name, rule, one in CASES[world]:
        net, x = sharded(name, mesh), given(name, rank)
        yield f"{name} {rule}", traced(net, x, rule, one).influence().to_dict()
        yield f"{name} {rule} goes on", training(net, x)
    if world > 2:
        return
    net = sharded("transformer", mesh)
    yield from measured(net, rank)
    whole = sharded("mlp", mesh, reshard_after_forward=False)
    yield "kept", traced(whole, given("mlp", rank)).influence().to_dict()
    yield "gradients", gradients(net, given("transformer", rank))
    yield "hooked", hooked(net, given("transformer", rank))
    yield "most gathered", most_gathered(net, given("transformer", rank))
    yield from refused(net, rank)
    yield from monitored(mesh, rank)


def training(net: nn.Module, x: Tensor) -> list[float]:
    """A step after a trace: the sum of each gradient, over all ranks."""
    with watched(net) as watch:
        loss = losses(net, x).sum()
    watch.trace(loss).influence()
    loss.backward()  # type: ignore[no-untyped-call]
    return [float(whole(p.grad).sum()) for p in net.parameters() if p.grad is not None]


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[no-any-return]


def hooked(net: nn.Module, x: Tensor) -> Any:
    """A hook of the user's, so that every operator is asked for hooks, also for those of FSDP."""
    with gt.watch(net) as watch:
        out = net(x)
        out.register_hook(lambda grad: 2 * grad)
        loss = out.square().sum()
    return watch.trace(loss).influence().to_dict()


def gradients(net: nn.Module, x: Tensor) -> dict[str, float]:
    with gt.watch(net) as watch:
        loss = losses(net, x).sum()
    return {name: float(grad.square().sum()) for name, grad in watch.backward(loss).items()}


def most_gathered(net: Any, x: Tensor) -> list[int]:
    """The most units whose parameters were in memory at once: in a forward pass, in a trace."""
    units = [Unit(module) for module in net.modules() if hasattr(module, "unshard")]
    most = [0]
    kind = type(units[0].groups[0])
    original = kind.wait_for_unshard

    def counted(group: Any) -> None:
        original(group)
        most[-1] = max(most[-1], sum(not unit.freed for unit in units))

    kind.wait_for_unshard = counted
    try:
        with gt.watch(net) as watch:
            loss = losses(net, x)
        most.append(0)
        trace = watch.trace(loss)
        trace.influence()
        most.append(sum(not unit.freed for unit in units))
    finally:
        kind.wait_for_unshard = original
    return most


def refused(net: Any, rank: int) -> Iterator[tuple[str, object]]:
    x = given("transformer", rank)
    loss = losses(net, x).sum()
    yield "unwatched", failure(lambda: gt.trace(loss))
    yield "unwatched backward", failure(lambda: gt.backward(loss))
    trace = traced(net, x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    yield "stepped", failure(trace.influence)
    with gt.watch(net) as watch:
        loss = losses(net, x).sum() * (float("nan") if rank == 1 else 1.0)
    yield "not finite", failure(lambda: watch.trace(loss))


def shares_of(row: Any) -> dict[str, float]:
    """The shares in a row of a Monitor's history, where there are some."""
    names = [name for name in row._places if name.startswith("share ")]
    return {name: row[name] for name in names if row[name] == row[name]}


def monitored(mesh: Any, rank: int) -> Iterator[tuple[str, object]]:
    """Five steps, of which two are traced; weights as without a Monitor."""
    ends = []
    for every in (4, None):
        net = sharded("transformer", mesh)
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        monitor = None if every is None else gt.Monitor(net, every=every)
        for step in range(5):
            loss = losses(net, given("transformer", 2 * step + rank)).mean()
            if monitor is not None:
                monitor.step(loss)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        if monitor is not None:
            monitor.close()
            for row in monitor.history:
                yield f"monitor {row.step}", shares_of(row)
        ends.append([parameter.full_tensor() for parameter in net.parameters()])
    yield "same weights", all(map(torch.equal, *ends))


# Tensor parallel ---------------------------------------------------------------------------------


class Heads(nn.Module):
    """Causal attention with four heads of two units, as many as a rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        parts = (f(x).view(batch, tokens, -1, 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, tokens, -1))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(8), nn.LayerNorm(8), Heads()
        self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


MODELS["decoder"] = Decoder


def parallel(plan: str, mesh: Any) -> Any:
    """An MLP, or a decoder of which layers or also tokens are sharded (``sequence``)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    if plan == "mlp":
        return parallelize_module(
            model("mlp"), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
    net = model("decoder")
    given, made = (Shard(1), Shard(1)) if plan == "sequence" else (Replicate(), Replicate())
    for layer in net.layers:
        columns = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        columns |= {name: ColwiseParallel(input_layouts=given) for name in ("up", "gate")}
        rows = {name: RowwiseParallel(output_layouts=made) for name in ("attention.o", "down")}
        parallelize_module(layer, mesh, columns | rows)
        if plan == "sequence":
            norms = {name: SequenceParallel() for name in ("norm1", "norm2")}
            whole = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            parallelize_module(layer, mesh, {**norms, "attention": whole})
    ends = {"head": ColwiseParallel(input_layouts=given, output_layouts=Replicate())}
    if plan == "sequence":
        ends["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        ends["norm"] = SequenceParallel()
    return parallelize_module(net, mesh, ends)


PLANS = {"mlp": "mlp", "layers": "decoder", "sequence": "decoder"}
"""The model of each plan."""

PARALLEL_CASES = {
    2: [
        ("mlp", "viterbi", False),
        ("layers", "greedy", True),
        *(("sequence", rule, True) for rule in ("greedy", "edge", "viterbi")),
        ("sequence", "greedy", False),
    ],
    4: some([("layers", "greedy", True), ("sequence", "edge", True)], 1),
}


def tokens(name: str) -> Tensor:
    """The same data on all ranks."""
    generator = torch.Generator().manual_seed(7)
    if name == "decoder":
        return torch.randint(0, 12, (2, 4), generator=generator)
    return torch.randn(3, 4, generator=generator).double()


def tensor_parallel(rank: int, world: int, folder: Path) -> Iterator[tuple[str, object]]:
    """Models whose ranks compute each loss together."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    for plan, rule, one in PARALLEL_CASES[world]:
        net, x = parallel(plan, mesh), tokens(PLANS[plan])
        trace = traced(net, x, rule, one)
        table = trace.influence()
        yield f"{plan} {rule} {one}", table.to_dict()
        if rank == 0:
            yield "printed", str(table)  # by one rank alone
        if rule == "greedy" and one:
            yield f"{plan} goes on", training(net, x)
    if world > 2:
        return
    net, x = parallel("sequence", mesh), tokens("decoder")
    trace = traced(net, x, one=True)
    yield "decompose", str(trace.decompose(["layers.1", "layers.0.attention"]))
    yield "forks", trace.influence("forks").names
    yield "levels", [(row.module, row.norm) for row in trace.norms()]
    yield "gradient sums", {name: float(g.square().sum()) for name, g in trace.gradients.items()}
    yield "path", failure(lambda: trace.path("layers.1.up.weight", (1, 2)))
    yield "mass", failure(lambda: trace.mass(["layers.0.attention"]))
    yield "unwatched", sorted(gt.trace(losses(net, x).sum()).influence("operators").shares.items())
    unseen = parallel("mlp", mesh)  # registers hooks, so operators may have some
    yield "hooked", failure(lambda: gt.trace(losses(unseen, tokens("mlp")).sum()))
    yield "labelled", failure(lambda: labelled(mesh))
    yield "local leaf", failure(lambda: local_leaf(mesh))
    batches = [tokens("decoder").roll(n) for n in range(3)]
    yield "data set", failure(lambda: gt.influence(net, losses, batches, progress=False))
    yield "monitor", failure(lambda: gt.Monitor(net, every=2))


def labelled(mesh: Any) -> None:
    """Heads of a rank's own part are labelled."""
    net = parallel("mlp", mesh)
    with gt.watch(net) as watch:
        hidden = gt.label(net[0](tokens("mlp")), 1, [f"unit{n}" for n in range(4)])
        loss = net[4](net[2](hidden)).sum()
    watch.trace(loss)


def local_leaf(mesh: Any) -> None:
    """A plain parameter between two layers, where each rank has other units."""
    net, scale = parallel("mlp", mesh), torch.ones(4, dtype=torch.float64, requires_grad=True)
    with gt.watch(net) as watch:
        loss = net[4](net[2](net[0](tokens("mlp")) * scale)).sum()
    watch.trace(loss)


SCENARIOS = {f.__name__: f for f in (fsdp, tensor_parallel)}


def warm() -> None:
    """Load what is loaded when it is first used, before the process is copied."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    traced(model("mlp"), given("mlp", 0)).influence()


def main(names: str, rank: int, world: int, port: int, folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    waiting = timedelta(seconds=100)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=waiting)
    for name in names.split(","):
        found = list(SCENARIOS[name](rank, world, folder))
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
