"""What is kept of recordings, to replay them for later losses (``recording.replay``).

A recording holds no tensors: the shape of the graph, the program, and what each node is expected to
make (``Entry``). They are kept by what is quickly read of a loss, bounded, for several threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtrace.autodiff.graph_shape import NONE, GraphShape, Mismatch, NodeShape, shape_of_graph
from gradtrace.errors import GradtraceError
from gradtrace.ir.memory import RecordingBytes
from gradtrace.ir.program import Block, Program, ProgramFacts, Step
from gradtrace.linops import Cut, Identity, Map, Reduce, Slot
from gradtrace.recording import node_rules
from gradtrace.recording.node_rules import NodeRule, same, summed
from gradtrace.recording.record import NodeKind, ProgramRecorder
from gradtrace.types import Shape

MAX_RECORDINGS = 64
"""The most recordings that are kept; the one that was used least recently goes first."""

MAX_STEPS = 500_000
"""The most steps of all recordings that are kept together."""

MAX_FAILURES = 8
"""A recording that failed to replay so many times and never did is forgotten."""

_SHARED = (Identity, Reduce, Cut, Slot)
"""Maps that hold numbers only and are shared by nodes: the same object is the same map."""


@dataclass(slots=True, eq=False)
class ExpectedStep:
    """A step with one map: the map itself if it is ``shared``, its structure, and the shape and
    dtype of the result.
    """

    shared: Map | None
    structure: object
    shape: Shape
    dtype: torch.dtype

    def has(self, map_: Map) -> bool:
        """Whether a map is as expected."""
        return map_ is self.shared or (
            map_.out_shape == self.shape and map_.structure() == self.structure
        )


@dataclass(slots=True, eq=False)
class ExpectedResult:
    """One result of a node: the steps to it and the number of its value. It is added to the value
    ``there``, if that is not None, by two terms with the map ``move``; the sum is ``total``.

    ``only`` is the only step, if there is one; ``follows`` its map, if that is what an empty chain
    stands for where the result has the shape that the map takes. ``keeps`` and ``keeps_total``:
    whether the gradient and the sum are kept. Slots are read faster than a NamedTuple's fields.
    """

    position: int
    conforms: bool
    steps: tuple[ExpectedStep, ...]
    only: ExpectedStep | None
    follows: Map | None
    value: int
    keeps: bool
    there: int | None
    total: int
    keeps_total: bool
    move: Map | None


@dataclass(slots=True, eq=False)
class RuleNode:
    """A node with a rule, the value that it takes, its results, and the positions of arguments that
    need a gradient and have none.
    """

    rule: NodeRule
    value: int
    results: tuple[ExpectedResult, ...]
    without: tuple[int, ...]


class JoinNode(NamedTuple):
    """A node whose cotangents are slices of its argument's: the values it takes, by slot."""

    name: str
    takes: tuple[tuple[int, int], ...]
    structures: tuple[object, ...]
    result: ExpectedResult


class FormulaNode(NamedTuple):
    """A node whose formula is recorded: its block, the structures of the maps that this adds, a
    value number before those of its steps, and its results.
    """

    block: Block
    structures: tuple[object, ...]
    start: int
    results: tuple[ExpectedResult, ...]


class LeafNode(NamedTuple):
    """A leaf: its value, and whether its gradient is deferred."""

    value: int
    lazy: bool


Entry: TypeAlias = RuleNode | JoinNode | FormulaNode | LeafNode | None
"""None for nodes that no cotangent reaches."""


class RecordedNode(NamedTuple):
    """What recording a node left: its kind, the block or the value of the leaf that it became,
    whether that leaf's gradient is deferred, and its span among the values and maps if its formula
    was recorded (``ProgramRecorder.formula_spans``).
    """

    kind: NodeKind | None
    made: Block | int | None
    lazy: bool
    span: tuple[int, int, int] | None


class RecordedMaps(NamedTuple):
    """Maps without their tensors: each itself if it is shared, else None, and its structure."""

    shared: Sequence[Map | None]
    structures: tuple[object, ...]


@dataclass(eq=False, kw_only=True)
class KeptRecording:
    """A recorded program without its tensors, and how often it was replayed.

    ``kept`` are the values whose gradients were kept, in at most ``budget`` bytes, of which
    ``used`` were needed; ``defers`` says of each large leaf's product whether it was deferred.
    """

    graph: GraphShape
    root: int
    size: int
    blocks: tuple[Block, ...]
    facts: ProgramFacts
    hits: int = 0
    failures: int = 0
    nodes: Sequence[RecordedNode] = ()
    maps: RecordedMaps
    kept: tuple[int, ...] = ()
    defers: tuple[bool, ...] = ()
    rules: Mapping[str, NodeRule | None] = field(default_factory=dict)
    budget: int = 0
    used: int = 0
    limited: bool = False  # some gradients were not kept for want of memory
    limit: int = 0
    composed: bool = False  # some nodes are recorded by their formulas, which passes simplify
    # the blocks that passes made of those, and the structures of the maps in recorded formulas
    simplified: tuple[tuple[Block, ...], list[object]] = ((), [])
    needed: RecordingBytes | None = None  # what recording takes; made when first asked for

    @cached_property
    def entries(self) -> list[Entry]:
        """What is expected of each node; found when the first loss is replayed."""
        expected = _Expected(self.maps, frozenset(self.kept))
        return [expected.entry(*each) for each in zip(self.nodes, self.graph.nodes)]

    @property
    def steps(self) -> int:
        """The number of steps of the program."""
        return sum(len(block.steps) + len(block.merges) for block in self.blocks)

    def check(self, synchronises: bool, keep: int) -> None:
        """Raise ``Mismatch`` if with so much memory for gradients others would be kept, or if nodes
        have other rules now. ``synchronises``: of the backend.
        """
        if self.limited:
            near = synchronises and 2 * self.used <= 3 * keep and keep <= 2 * self.budget
            fits = near or keep == self.budget
        else:
            fits = 2 * self.used <= keep
        if not fits:
            raise Mismatch("other memory is free for gradients")
        if any(node_rules.NODES.get(name) is not rule for name, rule in self.rules.items()):
            raise Mismatch("operators have other rules")

    def passes_made_the_same(self, program: Program) -> bool:
        """Whether the passes over programs simplified this one as the one that was recorded; they
        also look at tensors. If so, blocks are shared.
        """
        blocks, structures = self.simplified
        if program.blocks != blocks or structures_of(program) != structures:
            return False
        program.blocks = blocks
        return True


# From a recording to what is kept of it -----------------------------------------------------------


def kept_recording(
    loss: Tensor, recorder: ProgramRecorder, program: Program
) -> KeptRecording | str:
    """What can be replayed of a recording, or the reason why nothing can."""
    if recorder.not_replayable:
        return recorder.not_replayable
    if any(step.dtype.is_complex for step in program.steps()):
        return "its gradients are complex"
    visited, cache, deferred = recorder.visited, recorder.cache, recorder.deferred
    kinds, spans = recorder.kinds, recorder.formula_spans
    edges = {node: out for node, (out, _) in visited.items()}
    maps = RecordedMaps(
        [map_ if type(map_) in _SHARED else None for map_ in program.maps],
        tuple([map_.structure() for map_ in program.maps]),
    )
    program.facts.maps = () if spans else maps.structures  # passes change formulas
    return KeptRecording(
        graph=shape_of_graph(loss, edges, recorder.name_table),
        root=program.root,
        size=program.size,
        blocks=program.blocks,
        facts=program.facts,
        nodes=[
            _tuple(RecordedNode, (kinds.get(type(node)), made, made in deferred, spans.get(node)))
            if type(made) is int
            else _tuple(RecordedNode, (kinds.get(type(node)), made, False, spans.get(node)))
            for node, (_, made) in visited.items()
        ],
        maps=maps,
        kept=tuple(program.kept),
        defers=tuple(recorder.products.decisions),
        rules={kind.name: kind.rule for kind in kinds.values()},
        budget=cache.budget,
        used=cache.budget - cache.bytes_left,
        limited=cache.refused,
        limit=recorder.limit,
        composed=bool(spans),
    )


class _Expected(NamedTuple):
    """Finds what is expected of a node, given the recorded maps and the values that were kept."""

    maps: RecordedMaps
    kept: frozenset[int]

    def entry(self, node: RecordedNode, shape: NodeShape) -> Entry:
        """What is expected of a node."""
        (kind, made, lazy, span), maps = node, self.maps
        if not isinstance(made, Block):
            return made if made is None else LeafNode(made, lazy)
        if span is not None:
            start, first, end = span
            given = tuple([self.result(made, position, (), False) for position in made.gives])
            return FormulaNode(made, maps.structures[first:end], start, given)
        assert kind is not None
        if kind.rule is None or len(made.takes) > 1 or 0 not in made.takes:
            ((position, value),) = made.gives.items()
            (step,) = made.steps
            structures = tuple([maps.structures[term.map] for term in step.terms])
            takes = tuple(sorted(made.takes.items()))
            joined = self.result(made, position, [step], False)
            return JoinNode(kind.name, takes, structures, joined)
        results, steps = [], iter(made.steps)
        for position, value in made.gives.items():
            conforms = kind.conform_at is None or position in kind.conform_at
            results.append(self.result(made, position, _until(value, steps), conforms))
        live = [position for position, (child, _) in enumerate(shape.edges) if child != NONE]
        without = tuple([position for position in live if position not in made.gives])
        return RuleNode(kind.rule, made.takes[0], tuple(results), without)

    def result(
        self, block: Block, position: int, steps: Sequence[Step], conforms: bool
    ) -> ExpectedResult:
        """What is expected of the result at a position."""
        maps, value = self.maps, block.gives[position]
        expected = []
        for step in steps:
            at = step.terms[0].map
            found = maps.shared[at], maps.structures[at], step.shape, step.dtype
            expected.append(ExpectedStep(*found))
        only = expected[0] if len(expected) == 1 else None
        follows = None if only is None else _follows(only.shared)
        there, total, move = None, value, None
        for step in block.merges:
            if step.terms[1].value == value:
                there, total, move = step.terms[0].value, step.out, maps.shared[step.terms[0].map]
        keeps, keeps_total = value in self.kept, total in self.kept
        how = (tuple(expected), only, follows, value, keeps, there, total, keeps_total, move)
        return ExpectedResult(position, conforms, *how)


def _follows(map_: Map | None) -> Map | None:
    """The map, if it follows from the shapes that it leads from and to: it is what an empty chain
    between these is made of (``record.conformed``).
    """
    if map_ is None:
        return None
    before, after = map_.in_shape, map_.out_shape
    found = same(before, after) if before == after else ()
    if type(map_) is Reduce and before != after:
        found = summed(before, after)
    return map_ if found and found[0] is map_ else None


_tuple = tuple.__new__  # NamedTuple constructors are Python code


def _until(value: int, steps: Iterator[Step]) -> list[Step]:
    """The steps up to the one that computes ``value``."""
    found = [next(steps)]
    while found[-1].out != value:
        found.append(next(steps))
    return found


def structures_of(program: Program) -> list[object]:
    """The structures of the maps in formulas that were recorded operation by operation."""
    steps = (step for block in program.blocks if block.composed for step in block.steps)
    return [map_.structure() for step in steps for map_ in program.maps.of(step)]


# The recordings of a process ----------------------------------------------------------------------


class RecordingCache:
    """Kept recordings by what is quickly read of a loss."""

    def __init__(self, recordings: int = MAX_RECORDINGS, steps: int = MAX_STEPS) -> None:
        self.max_recordings, self.max_steps = recordings, steps
        self._lock = Lock()
        self._kept: OrderedDict[KeptRecording, Hashable] = OrderedDict()  # the key of each
        self.hits = 0

    def replayed(
        self, key: Hashable, attempt: Callable[[KeptRecording], Program]
    ) -> tuple[Program | None, str]:
        """The program that a recording of this key makes, if one does, and else why none did."""
        reason = "its first loss"
        for n, kept in enumerate(self.all(key)):
            try:
                program = attempt(kept)
            except (Mismatch, GradtraceError, RuntimeError) as error:
                # an error of PyTorch's or ours: recording will raise it too, and say where
                if not n:
                    reason = str(error) if isinstance(error, Mismatch) else "an error"
                self._count(kept, failed=True)
            else:
                self._count(kept, failed=False)
                return program, ""
        return None, reason

    def _count(self, kept: KeptRecording, failed: bool) -> None:
        with self._lock:
            self.hits += not failed
            kept.hits += not failed
            kept.failures += failed
            if kept in self._kept and not failed:
                self._kept.move_to_end(kept)
            if not kept.hits and kept.failures >= MAX_FAILURES:
                self._kept.pop(kept, None)

    def add(self, key: Hashable, new: KeptRecording) -> None:
        """Keep a recording, in place of one of the same program."""
        with self._lock:
            for kept, its in [*self._kept.items()]:
                if its == key and kept.graph == new.graph and kept.blocks == new.blocks:
                    del self._kept[kept]
            self._kept[new] = key
            while len(self._kept) > 1 and (
                len(self._kept) > self.max_recordings
                or sum(each.steps for each in self._kept) > self.max_steps
            ):
                self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forget all recordings."""
        with self._lock:
            self._kept.clear()
            self.hits = 0

    def all(self, key: Hashable = None) -> list[KeptRecording]:
        """Those that are kept now, with a key or all, the most recently used first."""
        with self._lock:
            kept = [*reversed(self._kept.items())]
        return [each for each, its in kept if key is None or its == key]


RECORDINGS = RecordingCache()
"""The recordings of this process."""
