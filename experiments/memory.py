"""What memory does training take over depth and batch, and what do checkpoints and ReLU save?

The slides say that training takes "additional memory ≈ 2·(model size)", that checkpointing computes
activations again, and that a ReLU's gradient is very cheap to compute and to store.

Expectation: activations grow linearly with depth L, with √L checkpoints as √L, at ⅓ more time.
They grow with the batch, parameters do not: the rule of 2 holds for some batch only. Of tanh, as of
ReLU, PyTorch keeps the output; either takes a few operations an element backward, a product n.

Method: L layers of 128 units on 128 samples, and the mean square of the output. Live storages are
added up after every operation: after the forward pass (activations), and their peak in the other,
with gradients there to be added to or not. Processor times (best of rounds): both passes with and
without checkpoints; backward of functions of n × n elements and of a product. Intervals: Student's.

Limits: chains of equal layers, PyTorch's allocator, one thread of one machine. Bytes do not vary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import ceil, sqrt
from pathlib import Path
from time import process_time
from timeit import timeit
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from experiments import lab

ALONE = True  # it measures time
ROWS = ("memory", "memory-time")
FUNCTIONS = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
FUNCTIONS |= {"gelu": nn.functional.gelu, "silu": nn.functional.silu}
FULL = {"width": 128, "batch": 128, "batches": [1, 8, 32, 64, 128, 256, 512, 1024], "rounds": 8}
FEW = {"width": 32, "batch": 32, "batches": [8, 32], "depths": [1, 4, 9], "rounds": 1, "runs": 1}
DEEP = {"timed": [[128, 16], [128, 64], [512, 16], [1024, 16]], "sizes": [64, 256, 1024], "runs": 5}
SETTINGS = {
    "full": {**FULL, **DEEP, "depths": [n * n for n in (*range(1, 11), 12, 14, 16)]},
    "quick": {**FULL, "depths": [1, 4, 16, 64], "timed": [[128, 16]], "sizes": [256], "runs": 3},
    "small": {**FEW, "timed": [[32, 4]], "sizes": [16]},
}
MIB = 2**20
OVER = {"activations": "activations", "peak": "peak", "peak, gradients there": "peak_added"}
SIZES = ("activations", "activations, √L", "peak", "peak, √L")  # √L parts are checkpoints


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """Bytes over depth, batch and function; times of checkpoints and of functions."""
    depths, base = settings["depths"], {name: settings[name] for name in ("width", "batch")}
    plain = {"kind": "bytes", "function": "tanh", "checkpoint": False, **base}
    middle = {**plain, "depth": depths[len(depths) // 2]}
    found = [{**plain, "depth": n, "checkpoint": c} for n in depths for c in (False, True)]
    found += [{**middle, "batch": batch} for batch in settings["batches"]]
    found += [{**middle, "function": name} for name in FUNCTIONS]
    for run in range(settings["runs"]):
        rest = {"run": run, "rounds": settings["rounds"]}
        deep = {"kind": "checkpoints", "batch": settings["batch"], **rest}
        found += [{**deep, "width": width, "depth": n} for width, n in settings["timed"]]
        found += [{"kind": "function", "size": n, **rest} for n in settings["sizes"]]
    return [cell for at, cell in enumerate(found) if cell not in found[:at]]


def measure(cell: lab.Cell) -> lab.Row:
    """Bytes, or the best seconds."""
    torch.manual_seed(0)
    if cell["kind"] == "bytes":
        return counted(cell)
    runs, seconds = ways(cell), defaultdict[str, list[float]](list)
    for _ in range(cell["rounds"] + 1):
        for name, run in runs.items():
            seconds[name].append(timeit(run, number=1, timer=process_time))
    return {"seconds": {name: min(times[1:]) for name, times in seconds.items()}}


def network(cell: lab.Cell) -> tuple[nn.ModuleList, list[Tensor], Tensor]:
    """Layers, their parameters, and an input."""
    layers = nn.ModuleList(nn.Linear(cell["width"], cell["width"]) for _ in range(cell["depth"]))
    return layers, [*layers.parameters()], torch.randn(cell["batch"], cell["width"])


def loss_of(layers: nn.ModuleList, x: Tensor, function: str = "tanh", parts: int = 0) -> Tensor:
    """The mean square after all layers, in so many checkpointed parts, or none."""

    def run(x: Tensor, first: int) -> Tensor:
        for layer in layers[first : first + size]:
            x = FUNCTIONS[function](layer(x))
        return x

    size = ceil(len(layers) / (parts or 1))
    for first in range(0, len(layers), size):
        x = checkpoint(run, x, first, use_reentrant=False) if parts else run(x, first)
    return x.square().mean()


def ways(cell: lab.Cell) -> dict[str, Callable[[], object]]:
    """What is timed: passes with and without checkpoints; or backward passes of functions."""
    grad = torch.autograd.grad
    if cell["kind"] == "checkpoints":
        (layers, weights, x), parts = network(cell), round(sqrt(cell["depth"]))
        return {
            "plain": lambda: grad(loss_of(layers, x), weights),
            "checkpoints": lambda: grad(loss_of(layers, x, parts=parts), weights),
        }
    x, w, g = (torch.randn(cell["size"], cell["size"], requires_grad=n < 2) for n in range(3))
    again = partial(grad, grad_outputs=g, retain_graph=True)
    found = {name: partial(again, function(x), x) for name, function in FUNCTIONS.items()}
    return {**found, "product": partial(again, x @ w, [x, w])}


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations make, and their ``peak``, without given ones."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given, self.peak = {tensor.untyped_storage()._cdata for tensor in given}, 0
        self.seen: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)):
            if storage._cdata not in self.given:  # a weak one keeps an address from a second use
                weak: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self.seen[storage._cdata] = weak, storage.nbytes()
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """The bytes that are alive."""
        self.seen = {at: pair for at, pair in self.seen.items() if not pair[0].expired()}
        return sum(size for _, size in self.seen.values())


def counted(cell: lab.Cell) -> lab.Row:
    """Bytes of each kind, and how far gradients are from those without checkpoints."""
    layers, weights, x = network(cell)
    parts = round(sqrt(cell["depth"])) if cell["checkpoint"] else 0
    size, found = sum(weight.nbytes for weight in weights), {"parts": parts}
    for name, before in {"peak": 0, "peak_added": size}.items():
        with Live([x, *weights, *(w.grad for w in weights if w.grad is not None)]) as live:
            loss = loss_of(layers, x, cell["function"], parts)
            found["activations"] = live.now()
            loss.backward()  # type: ignore[no-untyped-call]
        found[name] = before + live.peak
    plain = torch.autograd.grad(loss_of(layers, x, cell["function"]), weights)
    ours = torch.cat([weight.grad.flatten() / 2 for weight in weights if weight.grad is not None])
    theirs = torch.cat([gradient.flatten() for gradient in plain])
    off = float((ours - theirs).abs().max() / theirs.abs().max())
    return {**found, "model": size, "difference": off}


def kept(row: lab.Row) -> list[lab.Row]:
    """Rows of docs/experiments have the system's counts, too."""
    return [] if row["kind"] == "system" else [row]


def some(rows: Sequence[lab.Row], by: str, **values: Any) -> dict[Any, lab.Row]:
    """The rows with these values, in the order of another."""
    found = [row for row in rows if all(row.get(name) == x for name, x in values.items())]
    return {row[by]: row for row in sorted(found, key=lambda row: row[by])}


def percent(rows: Sequence[lab.Row], a: str, b: str, **values: Any) -> str:
    """The time of one way as a share of another's, over runs."""
    seconds = [row["seconds"] for row in some(rows, "run", **values).values()]
    return lab.said(lab.interval([100 * each[a] / each[b] for each in seconds]), ".1f")


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Bytes over depth and batch, and what functions keep and take."""
    counted = [row for row in rows if row["kind"] == "bytes"]
    depth, batch = (some(counted, "function")["relu"][name] for name in ("depth", "batch"))
    plain = some(counted, "depth", function="tanh", batch=batch, checkpoint=False)
    depths, batches, functions = [], [], []
    for n, parted in some(counted, "depth", checkpoint=True).items():
        both = plain[n], parted
        depths.append([n, *(row["activations"] / MIB for row in both)])
        depths[-1] += [(row["peak_added"] - row["model"]) / MIB for row in both]
    for n, row in some(counted, "batch", function="tanh", depth=depth, checkpoint=False).items():
        batches.append([n, *(row[name] / row["model"] for name in OVER.values())])
    sizes = some(rows, "size", kind="function")
    for name, row in some(counted, "function", depth=depth, batch=batch, checkpoint=False).items():
        functions.append([name, row["activations"] / MIB])
        functions[-1] += [percent(rows, name, "product", size=n) for n in sizes]
    title = f"MiB over depth (gradients are {max(r['difference'] for r in counted):.1g} off)"
    columns = ["function", "keeps, MiB", *(f"backward, % of a product's, n = {n}" for n in sizes)]
    timed = {(row["width"], row["depth"]) for row in rows if row["kind"] == "checkpoints"}
    found = {at: {"kind": "checkpoints", "width": at[0], "depth": at[1]} for at in sorted(timed)}
    times = [(*at, percent(rows, "checkpoints", "plain", **of)) for at, of in found.items()]
    return [
        (title, ("layers", *SIZES), depths),
        ("Time with √L checkpoints, of that without", ("units", "layers", "%"), times),
        ("Memory beyond the model, over the model's; the slides say 2", ("batch", *OVER), batches),
        ("Functions", columns, functions),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """Bytes over depth; the peak is without gradients."""
    layers, *found = zip(*tables(rows)[0][2])
    curves = {name: (layers, sizes) for name, sizes in zip(SIZES, found)}
    what = "Memory beyond model and gradients"
    lab.lines(path, what, "layers", "MiB", curves, xscale="log", yscale="log")
