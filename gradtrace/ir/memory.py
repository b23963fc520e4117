"""How much memory a pass takes, and how much there is: told before the work begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.errors import TooLarge
from gradtrace.ir.program import Program
from gradtrace.kernels import cuda_contraction, cuda_launch, cuda_tiling
from gradtrace.linops import Contract, Map
from gradtrace.pytorch import memory_limits
from gradtrace.pytorch.memory_limits import spelt
from gradtrace.semirings.einsum_plan import plan
from gradtrace.types import Shape

MARK = 4
"""Bytes of an element's mark."""

PARKED = 2
"""The same while it waits and is narrow; or 1 where marks are few, which nobody knows yet."""

ROOM = 1 << 28
"""The most bytes that leaves hold while they wait to be counted together."""

COMFORT = 2
"""Memory is not short where there is so many times what is needed."""


def streaming(program: Program, kept: bool = True, narrow: bool = False) -> int:
    """The most bytes that a streaming pass holds at a time, beyond the program itself.

    Every value that is waiting to be used counts with its marks, and with its elements unless
    these were kept and are of use, as gradients are to the greedy rule. A leaf is counted and
    dropped. ``narrow`` marks grow when they are used. On a GPU a contraction lays its operands
    out, in as much room as there is: the least that it asks for counts.
    """
    seed = program.seed
    processors = cuda_launch.processors(seed.device) if seed.is_cuda else 0
    last = program.last_uses
    known = {*program.kept, *(leaf.value for leaf in program.leaves if leaf.known is not None)}
    known = known if kept else set()
    spared = MARK - PARKED if narrow else 0
    held: dict[int, int] = {}
    sizes: dict[int, int] = {}  # elements of what waits
    now = most = 0
    for n, step in enumerate(program.steps()):
        out, count = step.out, prod(step.shape)
        size = here = count * (MARK if out in known else MARK + step.dtype.itemsize)
        if spared:
            here += spared * sum(sizes.get(term.value, 0) for term in step.terms)
        if processors:
            here += max((workspace(t.map, processors) for t in step.terms), default=0)
        if now + here > most:
            most = now + here
        if out in last:
            sizes[out] = count
            held[out] = size - spared * count
            now += held[out]
        for term in step.terms:
            if last[term.value] == n:
                now -= held.pop(term.value, 0)
                sizes.pop(term.value, None)
    return most


def workspace(map_: Map, processors: int) -> int:
    """The bytes that a contraction asks for beside its result, on a GPU of so many processors (0:
    on none): all that it would lay out if that is little, else a tile at a time will do.
    """
    if not processors or not isinstance(map_, Contract):
        return 0
    return _workspace(map_.spec, map_.in_shape, tuple(map_.weight.shape), processors)


@lru_cache(4096)
def _workspace(spec: str, x: Shape, w: Shape, processors: int) -> int:
    how = plan(spec, x, w)
    shape = (how.size(how.batch), how.size(how.rows), how.size(how.columns))
    return cuda_tiling.workspace(shape, how.size(how.inner), processors)


def ample(program: Program, device: torch.device, budget: int | None = None) -> bool:
    """Whether a streaming pass fits even if it never drops anything, which is told sooner."""
    steps = program.steps()
    most = sum([prod(shape) * (MARK + dtype.itemsize) for _, _, shape, dtype in steps])
    spare = cuda_contraction.WORKSPACE_MAX_BYTES if device.type == "cuda" else 0
    return not short(most + spare, device, budget)


def whole(program: Program, kept: bool = True) -> int:
    """The bytes of the values of all steps, without those that were kept unless these are of no
    use.
    """
    steps = (s for s in program.steps() if not kept or s.out not in program.kept)
    return sum(prod(step.shape) * step.dtype.itemsize for step in steps)


WITHOUT_WEIGHTS = frozenset(
    {
        *("TBackward0", "TransposeBackward0", "PermuteBackward0", "SliceBackward0"),
        *("SelectBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"),
        *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
        *("CloneBackward0", "AliasBackward0", "ToCopyBackward0", "CatBackward0", "StackBackward0"),
        *("ExpandBackward0", "SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"),
        *("AddBackward0", "SubBackward0", "MulBackward0", "MulBackward1", "MmBackward0"),
        *("BmmBackward0", "AddmmBackward0", "SplitBackward0", "SplitWithSizesBackward0"),
        *("UnbindBackward0", "ConvolutionBackward0", "EmbeddingBackward0", "IndexBackward0"),
    }
)
"""Nodes whose maps refer to what autograd has saved, or to nothing."""

NORM = 6
"""Numbers that are held for each output of a norm: its maps are of rank two."""

PLENTY = 4
"""With so many times what the process holds free, nobody need estimate what recording takes."""


def recording(loss: Tensor, keep: int) -> int:
    """About the most bytes that recording holds beside the graph: a weight for each output of an
    operator that has weights of its own, the gradients that are kept, and those that are worked on.
    """
    weights = gradients = largest = 0
    stack = [nodes.root_of(loss)]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if type(node) is not nodes.ACCUMULATE:
            size = nodes.bytes_of(node)
            gradients += size
            largest = max(largest, size)
            name = type(node).__name__
            if name not in WITHOUT_WEIGHTS:
                weights += size * (NORM if "Norm" in name else 1)
        for child, _ in nodes.edges_of(node):
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return weights + min(keep, gradients) + 2 * largest


def see_recording(loss: Tensor, keep: int = 0) -> None:
    """Refuse a loss whose program does not fit in memory."""
    device = loss.device
    free = available(device)
    held = (
        memory_limits.resident()
        if device.type == "cpu"
        else cuda_launch.allocated_and_reserved(device)[0]
    )
    if free is None or (held is not None and free >= PLENTY * held):
        return  # a backward pass holds about what the forward pass left
    remedy = "trace fewer samples at a time; the model itself may be as large as it is"
    see(recording(loss, keep), device, "recording the backward pass", remedy, free)


def available(device: torch.device) -> int | None:
    """How many bytes can still be had on a device; None if nobody tells."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used, reserved = cuda_launch.allocated_and_reserved(device)
        cached = reserved - used  # PyTorch's own, in nobody's use
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return max(0, min(free + cached, allowed - used))
    if device.type != "cpu":
        return None
    return memory_limits.available()


def short(needed: int, device: torch.device, budget: int | None = None) -> bool:
    """Whether that is more than a part of what is free, or of a budget."""
    free = available(device) if budget is None else budget
    return free is not None and COMFORT * needed > free


def see(needed: int, device: torch.device, what: str, remedy: str, free: int | None = None) -> None:
    """Refuse work that does not fit in what is free, if the caller has not asked yet."""
    free = available(device) if free is None else free
    if free is not None and needed > free:
        where = "" if device.type == "cpu" else f" on {spoken(device)}"
        raise TooLarge(
            f"{what} takes about {spelt(needed)}{where}, and {spelt(free)} are free; {remedy}"
        )


def spoken(device: torch.device) -> str:
    """A device as people say it."""
    if device.type == "cuda":
        return f"the GPU ({device}, {torch.cuda.get_device_name(device)})"
    return str(device)


@contextmanager
def within(device: torch.device, what: str, remedy: str) -> Iterator[None]:
    """Say what to do where memory ends all the same; estimates know nothing of other programs."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not memory_limits.ran_out(error):
            raise
        free = available(device)
        left = "" if free is None else f" ({spelt(free)} are free now)"
        raise TooLarge(f"{what} ran out of memory on {spoken(device)}{left}; {remedy}") from error
