"""Estimate the memory that a pass takes, and compare it with what is free, before it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.errors import TooLarge
from gradtrace.ir.program import Program
from gradtrace.kernels import Backend, backend_of
from gradtrace.linops import Contract, Map
from gradtrace.pytorch import memory_limits
from gradtrace.pytorch.memory_limits import spelt
from gradtrace.semirings.einsum_plan import plan
from gradtrace.types import Shape

ID_BYTES = 4
"""Bytes of an element's provenance id."""

COMPACT_ID_BYTES = 2
"""Bytes of a provenance id in compact storage (int16). Small tables use int8, but their size is not
known when this estimate is made.
"""

LEAF_BATCH_MAX_BYTES = 1 << 28
"""The most bytes that leaves hold while they are collected to be counted in one batch."""

MIN_FREE_RATIO = 2
"""Memory counts as short if less than this many times the need is free."""


def streaming(
    program: Program, kept: bool = True, narrow: bool = False, sized: Collection[int] = ()
) -> int:
    """The most bytes that a streaming pass holds at a time, beyond the program itself.

    Every live value counts with its provenance ids, and with its elements unless these are in
    ``program.kept`` and the rule uses them (``kept``), as the greedy rule uses gradients. A leaf is
    tallied and freed. With ``narrow``, ids of live values are in compact storage and are widened
    when read. ``sized`` are the values that the rule ``edge`` holds with the size of their largest
    contribution (``passes.edge_sizes``). On a GPU a contraction copies its operands into a
    workspace whose size depends on the free memory; its minimum counts here.
    """
    known = program.facts.streaming_bytes
    key = (len(program.kept) if kept else None, narrow, frozenset(sized))
    if key not in known:
        known[key] = _streaming(program, kept, narrow, sized)
    return known[key]


def _streaming(program: Program, kept: bool, narrow: bool, sized: Collection[int]) -> int:
    backend = backend_of(program.seed)
    uses_workspace = backend.workspace_max_bytes() > 0
    last = program.last_uses
    known = {*program.kept, *(leaf.value for leaf in program.leaves if leaf.known is not None)}
    known = known if kept else set()
    compact_saving = ID_BYTES - COMPACT_ID_BYTES if narrow else 0
    held: dict[int, int] = {}
    sizes: dict[int, int] = {}  # elements of live values
    now = most = 0
    for n, step in enumerate(program.steps()):
        out, count = step.out, prod(step.shape)
        size = count * (ID_BYTES if out in known else ID_BYTES + step.dtype.itemsize)
        if out in sized:
            size += count * size_bytes(step.dtype)
        here = size
        if compact_saving:
            here += compact_saving * sum(sizes.get(term.value, 0) for term in step.terms)
        if uses_workspace:
            here += max((workspace(m, backend) for m in program.maps.of(step)), default=0)
        if now + here > most:
            most = now + here
        if out in last:
            sizes[out] = count
            held[out] = size - compact_saving * count
            now += held[out]
        for term in step.terms:
            if last[term.value] == n:
                now -= held.pop(term.value, 0)
                sizes.pop(term.value, None)
    return most


def size_bytes(dtype: torch.dtype) -> int:
    """Bytes of the size of a contribution: half precisions are compared in float32."""
    return max(dtype.itemsize, 4)


def workspace(map_: Map, backend: Backend) -> int:
    """The workspace bytes that a contraction needs besides its result: its whole operands if they
    are small, else one tile at a time.
    """
    if not isinstance(map_, Contract):
        return 0
    return _workspace(map_.spec, map_.in_shape, tuple(map_.weight.shape), backend)


@lru_cache(4096)
def _workspace(spec: str, x: Shape, w: Shape, backend: Backend) -> int:
    how = plan(spec, x, w)
    shape = (how.size(how.batch), how.size(how.rows), how.size(how.columns))
    return backend.workspace_bytes(shape, how.size(how.inner))


def ample(
    program: Program, backend: Backend, budget: int | None = None, sized: bool = False
) -> bool:
    """Whether a streaming pass fits even if no value is ever freed, and, with ``sized``, all have
    sizes. Cheaper than ``streaming``.
    """
    values, sizes = step_bytes(program)
    most = values + (sizes if sized else 0)
    return not short(most + backend.workspace_max_bytes(), backend, budget)


def step_bytes(program: Program) -> tuple[int, int]:
    """The bytes of the results of all steps with their ids, and of the sizes of contributions."""
    found = program.facts.step_bytes
    if found is None:
        steps = [(prod(shape), dtype) for _, _, shape, dtype in program.steps()]
        values = sum([count * (ID_BYTES + dtype.itemsize) for count, dtype in steps])
        widths = {dtype: size_bytes(dtype) for dtype in {dtype for _, dtype in steps}}
        found = values, sum([count * widths[dtype] for count, dtype in steps])
        program.facts.step_bytes = found
    return found


def whole(program: Program, kept: bool = True) -> int:
    """The bytes of the values of all steps; with ``kept``, without those in ``program.kept``."""
    steps = (s for s in program.steps() if not kept or s.out not in program.kept)
    return sum(prod(step.shape) * step.dtype.itemsize for step in steps)


SEMIRING_TEMPORARIES = 4
"""How many tensors of a result's size computing it in a semiring holds for a moment: sizes of
weights, products, what they are compared with.
"""


def semiring_temporaries(program: Program) -> int:
    """The bytes that the largest step holds for a moment in a semiring, beside its values."""
    sizes = (prod(step.shape) * step.dtype.itemsize for step in program.steps())
    return SEMIRING_TEMPORARIES * max(sizes, default=0)


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
"""Nodes whose maps hold no tensors of their own, only what autograd has saved."""

NORM_WEIGHTS_PER_OUTPUT = 6
"""Weights held for each output element of a norm: its maps are diagonal plus rank two."""

AMPLE_FREE_RATIO = 4
"""With this many times the memory in use free, the estimate for recording is skipped."""


class RecordingBytes(NamedTuple):
    """What recording a loss holds besides its graph, in bytes: ``weights``, one for each output of
    an operator whose maps hold weights; the ``gradients`` of all outputs, and the ``largest``.
    """

    weights: int
    gradients: int
    largest: int

    def with_kept(self, keep: int) -> int:
        """About the most that is held at a time, with gradients kept in at most ``keep`` bytes and
        some in flight.
        """
        return self.weights + min(keep, self.gradients) + 2 * self.largest


def recording(loss: Tensor) -> RecordingBytes:
    """What recording a loss takes, by the outputs of its operators."""
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
                weights += size * (NORM_WEIGHTS_PER_OUTPUT if "Norm" in name else 1)
        for child, _ in nodes.edges_of(node):
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return RecordingBytes(weights, gradients, largest)


def see_recording(
    loss: Tensor, backend: Backend, keep: int, known: RecordingBytes | None = None
) -> RecordingBytes | None:
    """Raise TooLarge for a loss whose program does not fit in memory. Returns the estimate, which
    is made unless it is ``known`` or much memory is free.
    """
    free, held = available(backend), backend.held_bytes()
    if free is None or (held is not None and free >= AMPLE_FREE_RATIO * held):
        return known  # a backward pass holds about as much as the forward pass saved
    remedy = "trace fewer samples at a time; the model itself may be as large as it is"
    needed = recording(loss) if known is None else known
    see(needed.with_kept(keep), backend, "recording the backward pass", remedy, free)
    return needed


def available(backend: Backend) -> int | None:
    """How many bytes can still be allocated on a backend's device; None if unknown."""
    return backend.free_bytes()


def short(needed: int, backend: Backend, budget: int | None = None) -> bool:
    """Whether less than ``MIN_FREE_RATIO`` times ``needed`` is free, or in the budget if given."""
    free = available(backend) if budget is None else budget
    return free is not None and MIN_FREE_RATIO * needed > free


def see(needed: int, backend: Backend, what: str, remedy: str, free: int | None = None) -> None:
    """Raise TooLarge if ``needed`` bytes are not free; ``free`` is queried if not given."""
    free = available(backend) if free is None else free
    if free is not None and needed > free:
        where = "" if backend.host else f" on {backend.label}"
        raise TooLarge(
            f"{what} takes about {spelt(needed)}{where}, and {spelt(free)} are free; {remedy}"
        )


@contextmanager
def within(backend: Backend, what: str, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error into TooLarge with a remedy. Needed despite the estimates, since
    other processes use memory too.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not memory_limits.ran_out(error):
            raise
        free = available(backend)
        left = "" if free is None else f" ({spelt(free)} are free now)"
        raise TooLarge(f"{what} ran out of memory on {backend.label}{left}; {remedy}") from error
