"""A plan as one table, which the compiled library executes in one call (CPU, rule ``greedy``).

``tracing.executor`` runs the instructions of a plan in Python and is their definition. For small
layers that takes longer than the work itself. The gradients of all values are known from
recording, so what is left to be computed are provenance ids, and for these the library needs no
more than where tensors lie. So a plan is *lowered* once: each instruction becomes a few words, the
first of which says which (``Op``), and each tensor that is read a number, its *pointer*. For every
further loss of the structure only the addresses are filled in (``plan_run``).

A residual layer ``y = x + tanh(x @ w)``, seen from its gradient ``g`` (value 1)::

    AddBits(1, 4)                     BITS    slot 1, set 0
    2 = Scale(tanh')(1)               SCALE   slot 2 from 1      no tensor is read: ids stay
    3 = Contract(x)(2), w's, Emit     SELECT  slot 3 from 2: gradient 2, x, their strides
                                      EMIT    leaf 0, slot 3, its gradient
    4 = Contract(w)(2)                SELECT  slot 4 from 2: gradient 2, w, their strides
    5 = Join(1, 4)                    JOIN    slot 5 of 1 and 4: gradients 1 and 4
    frees 1, 2, 4                     FREE    slots 1, 2, 4

The library keeps ids and tables of sets as the executor does (also when tables are searched for
equal sets), so that the counts of every leaf are equal to the bit. What a plan has beside these
instructions and maps makes it *not covered*; then the executor runs it, and ``gradtrace.plans``
says why. So does a run in which the contributions to an element cancel where they rarely do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradtrace.ir.program import Constants
from gradtrace.kernels.cpu_plan import PlanWords
from gradtrace.linops import Map, tiled
from gradtrace.linops.indexing import merged_dims
from gradtrace.linops.select_words import NotCovered
from gradtrace.semirings.base import cast

MAX_DIMS = 6
"""The most dimensions of a view, after merging."""

MAX_COMPUTED_BYTES = 1 << 24
"""The most bytes of gradients that recording has not kept and that are computed for a run."""


class Op(IntEnum):
    """The first word of an instruction: as in ``kernels/cpu/run_plan.cpp``."""

    ROOT = 0
    BITS = 1
    COPY = 2
    GATHER = 3
    TABLE = 4
    PLACE = 5
    SCALE = 6
    SELECT = 7
    UNIFORM = 8
    JOIN = 9
    CONCAT = 10
    EMIT = 11
    FREE = 12


class Reading(NamedTuple):
    """A tensor that a table reads: a gradient (``map`` is None) by the key of its value, an
    attribute of a map (``name``; ``part`` of it), or the gradient of a leaf (``leaf``).
    """

    key: int
    map: int | None = None
    name: str = ""
    part: int | None = None
    leaf: bool = False

    def tensor(self, constants: Constants, known: dict[int, Tensor]) -> Tensor:
        """The tensor, for one loss."""
        if self.map is None:
            return constants.leaves[self.key].gradient() if self.leaf else known[self.key]
        if self.name == "source":
            return _sources(constants.maps[self.map])
        found: Any = getattr(constants.maps[self.map], self.name)
        if self.part is not None:
            found = found[self.part]
        wanted: Tensor = found.long().contiguous() if self.name == "target" else found
        return wanted


def _sources(map_: Map) -> Tensor:
    return map_.rows(torch.arange(map_.outputs, device="cpu")).source[:, 0].contiguous()


class Computed(NamedTuple):
    """A gradient that recording has not kept: of a map (``maps``, one), of a sum, or of parts that
    tile it in ``order`` (``maps``: their slots).
    """

    key: int
    keys: tuple[int, ...]
    maps: tuple[int, ...]
    dtype: torch.dtype
    order: list[int] | None = None

    def tensor(self, constants: Constants, known: dict[int, Tensor]) -> Tensor:
        """The gradient, as ``Executor`` computes it."""
        parts, maps = [known[key] for key in self.keys], constants.maps
        if self.order is not None:
            return tiled([maps[at] for at in self.maps], parts, self.order)
        if self.maps:
            return cast(maps[self.maps[0]].apply(parts[0]), self.dtype)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return cast(total, self.dtype)


class PendingPart(NamedTuple):
    """A contribution to a uniform leaf, for elements that are 0: ``moves(map(value))``. Map -1: the
    value itself.
    """

    map: int
    key: int
    moves: tuple[int, ...] = ()


class Question(NamedTuple):
    """What the library asks: the ids that a map selects, of a gradient by key."""

    map: int
    key: int


class CountedLeaf(NamedTuple):
    """A leaf of a table, in the order in which they are counted. ``place``: among the leaves of the
    program. ``parts``: its contributions, while it is uniform. ``sparse``: Python counts it, by the
    few elements that are added to.
    """

    value: int
    place: int
    size: int
    parts: tuple[PendingPart, ...] = ()
    sparse: bool = False


@dataclass
class PlanTable:
    """A lowered plan, for tensors that lie in memory as those did for which it was made
    (``layouts``: shape and strides of each reading). It holds no tensors.
    """

    words: PlanWords
    readings: tuple[Reading, ...]
    layouts: list[tuple[torch.Size, tuple[int, ...]]]
    computed: tuple[Computed, ...]
    facts: list[tuple[int, object]]  # of maps by index, what else a table depends on
    lazy: dict[int, int]  # pointers that are left out, and their leaves, by place
    questions: list[Question]
    leaves: list[CountedLeaf]
    root: int


@dataclass
class TableWriter:
    """Collects the words, views and readings of a table; ``known`` has gradients by key."""

    constants: Constants
    known: dict[int, Tensor]
    ops: list[int] = field(default_factory=list)
    views: dict[tuple[int, ...], int] = field(default_factory=dict)
    bits: dict[int, int] = field(default_factory=dict)
    readings: dict[Reading, int] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    computed_bytes: int = 0

    def add(self, op: Op, *words: int) -> None:
        """An instruction."""
        self.ops += (int(op), *words)

    def set_of(self, bits: int) -> int:
        """The number of a set of bits."""
        return self.bits.setdefault(bits, len(self.bits))

    def reading(self, what: Reading) -> int:
        """The number of a tensor's address."""
        found = self.readings.get(what)
        if found is None:
            found = self.readings[what] = len(self.tensors)
            tensor = what.tensor(self.constants, self.known)
            wanted = torch.int64 if what.name in ("source", "target") else torch.float32
            if tensor.dtype is not wanted or not tensor.is_cpu:
                raise NotCovered(f"{tensor.dtype} on {tensor.device}")
            self.tensors.append(tensor)
        return found

    def view(
        self, pointer: int, sizes: Sequence[int], strides: Sequence[int], start: int = 0
    ) -> int:
        """The number of a view: of ids, which are contiguous, for pointer -1."""
        dims = merged_dims(tuple(sizes), tuple(strides))[::-1]
        if len(dims) > MAX_DIMS:
            raise NotCovered(f"a tensor in more than {MAX_DIMS} dimensions")
        if 0 in sizes:
            raise NotCovered("an empty tensor")
        rest = MAX_DIMS - len(dims)
        shape = [*(size for _, size, _ in dims), *[1] * rest]
        steps = [*(stride for *_, stride in dims), *[0] * rest]
        return self.views.setdefault((pointer, start, len(dims), *shape, *steps), len(self.views))

    def value(self, key: int) -> int:
        """The view of a gradient that is known."""
        pointer = self.reading(Reading(key))
        tensor = self.tensors[pointer]
        return self.view(pointer, tensor.shape, tensor.stride())

    def compute(self, what: Computed) -> None:
        """Compute a gradient for each run."""
        tensor = what.tensor(self.constants, self.known)
        self.computed_bytes += tensor.nbytes
        if self.computed_bytes > MAX_COMPUTED_BYTES:
            raise NotCovered("too many gradients that recording did not keep")
        self.known[what.key] = tensor
        self.computed.append(what)

    def words(self, slots: int) -> PlanWords:
        """All of it as arrays."""
        width = max(1, -(-max(self.bits, default=0).bit_length() // 64))
        line = b"".join(bits.to_bytes(8 * width, "little") for bits in self.bits)
        bits = np.frombuffer(line, "<u8").reshape(-1, width)
        views = np.array(list(self.views), np.int64).reshape(-1, 15)
        return PlanWords(np.array(self.ops, np.int64), views, bits, width, slots)
