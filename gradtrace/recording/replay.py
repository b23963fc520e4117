"""Replays recordings: a loss of the structure of an earlier one is not recorded from scratch.

``record`` orders the nodes, decides for each which maps it has, numbers values, and makes blocks of
steps. All of that is the same for the next loss of a training loop; only tensors differ. So what a
recording made without tensors is kept (``Replay``), and for the next loss the rules of
``node_rules`` run alone. Each map that they make is compared with the one that was recorded: type,
shapes and dtype, so that the program of the earlier loss is also that of this one, or else
(``Mismatch``) the loss is recorded. A formula without a rule is recorded again, and its block
compared. Code of the user's must run once only, so losses with some are not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.graph_shape import NONE, Mismatch, NodeShape, shape_of_graph
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import NameTable
from gradtrace.autodiff.nodes import Edges, Node, Outputs
from gradtrace.autodiff.pass_scope import one_pass
from gradtrace.ir.kept_recordings import RECORDINGS, KeptRecording
from gradtrace.ir.optimise import simplified
from gradtrace.ir.program import Block, Constants, Leaf, MapTable, Program, Step
from gradtrace.kernels import backend_of
from gradtrace.linops import Cut, Identity, Map, Reduce, Slot
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.recording import record as recording
from gradtrace.recording.aten_rules import as_real
from gradtrace.recording.dispatch import DispatchRecorder
from gradtrace.recording.formula import FormulaRecorder
from gradtrace.recording.gradient_cache import GradientCache
from gradtrace.recording.node_rules import (
    MULTI_OUTPUT_RULES,
    Chain,
    Edge,
    NodeRule,
    same,
    summed,
)
from gradtrace.recording.record import (
    DeferredGradients,
    GradientProducts,
    NodeKind,
    ProgramRecorder,
)
from gradtrace.recording.sharded import recorder_of
from gradtrace.types import Shape

T = TypeVar("T")

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
class Replay(KeptRecording):
    """A recording without its tensors. ``kept`` are the values whose gradients were kept, in at
    most ``budget`` bytes, of which ``used`` were needed; ``defers`` says of each large leaf's
    product whether it was deferred.
    """

    nodes: Sequence[RecordedNode] = ()
    maps: RecordedMaps
    kept: tuple[int, ...] = ()
    defers: tuple[bool, ...] = ()
    rules: Mapping[str, NodeRule | None] = field(default_factory=dict)
    budget: int = 0
    used: int = 0
    limited: bool = False  # some gradients were not kept for want of memory
    limit: int = 0
    opaque: bool = False
    composed: bool = False  # some nodes are recorded by their formulas, which passes simplify
    # the blocks that passes made of those, and the structures of the maps in recorded formulas
    simplified: tuple[list[Block], list[object]] = field(default_factory=lambda: ([], []))

    @cached_property
    def entries(self) -> list[Entry]:
        """What is expected of each node; found when the first loss is replayed."""
        expected = _Expected(self.maps, frozenset(self.kept))
        return [expected.entry(*each) for each in zip(self.nodes, self.graph.nodes)]

    def check(self, seed: Tensor, keep: int) -> None:
        """Raise ``Mismatch`` if with so much memory for gradients others would be kept, or if nodes
        have other rules now.
        """
        if self.limited:
            near = backend_of(seed).synchronises and self.used <= keep <= 2 * self.budget
            fits = near or keep == self.budget
        else:
            fits = 2 * self.used <= keep
        if not fits:
            raise Mismatch("other memory is free for gradients")
        if any(recording.rule_of(name) is not rule for name, rule in self.rules.items()):
            raise Mismatch("operators have other rules")

    def program(self, loss: Tensor, seed: Tensor, table: NameTable, clear_since: int) -> Program:
        """The program of a loss; raises ``Mismatch`` if it has another structure."""
        found, edges = self.graph.find(loss, table, clear_since)
        run = _Run(self, seed, table, clear_since)
        try:
            with one_pass():
                run.visit_all(found, edges, self.entries)
                run.products.batched_weights.flush()
        finally:
            self.graph.limit_recursion(found)
        program = Program(self.root, self.size, self.blocks, run.constants())
        if self.composed:
            program = simplified(program)
        if not self.composed or self.passes_made_the_same(program):
            program.facts = self.facts
        program.recorded = ""
        return program

    def passes_made_the_same(self, program: Program) -> bool:
        """Whether the passes over programs simplified this one as the one that was recorded; they
        also look at tensors. If so, blocks are shared.
        """
        blocks, structures = self.simplified
        if program.blocks != blocks or _structures(blocks, program.maps) != structures:
            return False
        program.blocks = blocks
        return True


class _Products(GradientProducts):
    """``GradientProducts`` that are deferred where they were when the loss was recorded."""

    def __init__(self, clear_since: int, defers: Sequence[bool]) -> None:
        super().__init__(clear_since, False, GradientCache(0, MapTable()))
        self.decided = iter(defers)

    def _defers(self, leaf: Tensor, size: int, grad: Tensor) -> bool:
        found = next(self.decided, None)
        if found is None:
            raise Mismatch("other gradients are deferred")
        return found


class _Run:
    """One replay: the gradients that are pending by value, and what was found so far."""

    def __init__(self, replay: Replay, seed: Tensor, table: NameTable, clear_since: int) -> None:
        self.replay, self.seed = replay, seed
        self.products = _Products(clear_since, replay.defers)
        self.outputs = Outputs()
        backend = backend_of(seed)
        self.checks = backend.checks() if backend.synchronises else None
        self.recorder = DispatchRecorder(replay.limit, False, self.checks)
        self.formulas = FormulaRecorder(self.recorder, clear_since, replay.opaque, self.outputs)
        self.deferred = DeferredGradients()
        self.grads = {replay.root: seed}
        self.kept = {replay.root: seed} if replay.root in replay.kept else {}
        self.maps = self.recorder.maps
        self.leaves: list[Leaf] = []

    def visit_all(
        self, found: Iterable[Node], edges: Iterable[Edges], entries: Iterable[Entry]
    ) -> None:
        """Make the maps of all nodes, and pass their results on."""
        for node, out, entry in zip(found, edges, entries):
            if type(entry) is RuleNode:
                self._rule(node, out, entry)
            elif type(entry) is LeafNode:
                self._leaf(node.variable, entry)
            elif type(entry) is FormulaNode:
                self._formula(node, out, entry)
            elif type(entry) is JoinNode:
                self._join(node, entry)

    @staticmethod
    def _called(rule: Callable[..., T], *args: Any) -> T:
        """The result of a rule or formula, which may run code of the user's (in a checkpoint). If
        that fails it will do so again when the loss is recorded, which says where.
        """
        try:
            return rule(*args)
        except Exception as error:
            raise Mismatch("an error") from error

    def _rule(self, node: Node, edges: Edges, entry: RuleNode) -> None:
        value, products = entry.value, self.products
        grad = self.grads.pop(value)
        try:
            found = entry.rule(node, grad, edges, products)
        except Exception as error:
            raise Mismatch("an error") from error  # as in _called, which would take a call more
        if found is None:
            raise Mismatch(f"{type(node).__name__} has no rule")
        many = len(found)
        for position in entry.without:
            if position < many and found[position] is not None:
                raise Mismatch(f"{type(node).__name__} has other results")
        for how in entry.results:
            result = found[how.position] if how.position < many else None
            if result is None:
                raise Mismatch(f"{type(node).__name__} has fewer results")
            out, chain = result
            only = how.only
            if how.conforms:
                out = self._conform(node, result, edges[how.position], how)
            elif (
                only is not None
                and len(chain) == 1
                and out.dtype is only.dtype
                and (chain[0] is only.shared or only.has(chain[0]))
            ):
                self.maps.append(chain[0])
            else:
                maps = chain or same(out.shape, out.shape)
                self._compare(node, maps, (out.dtype,) * len(maps), how.steps)
            if self.deferred or products.deferred_outputs:
                starts = products.deferred_outputs.pop(id(out), None) is not None
                self.deferred.follow(value, grad, chain, how.value, starts)
            out = plain(out)
            if how.keeps:
                self.kept[how.value] = out
            if how.there is None:
                self.grads[how.value] = out
            else:
                self._add(out, how)

    def _conform(
        self, node: Node, result: tuple[Tensor, Chain], edge: Edge, how: ExpectedResult
    ) -> Tensor:
        """A result as its argument is; its maps are compared and added to the table."""
        (out, chain), meta, map_ = result, self.outputs.wanted(*edge), how.follows
        if (
            map_ is not None
            and not chain
            and map_.out_shape  # scalars may come from another device
            and out.shape == map_.in_shape
            and meta.shape == map_.out_shape
            and out.dtype is how.steps[0].dtype is meta.dtype
            and out.layout is torch.strided
        ):
            self.maps.append(map_)
            return out if map_.in_shape == map_.out_shape else nodes.conform(out, meta)
        out, pairs = recording.conformed(out, chain, meta)
        self._compare(node, [m for m, _ in pairs], [d for _, d in pairs], how.steps)
        return out

    def _compare(
        self,
        node: Node,
        maps: Sequence[Map],
        dtypes: Sequence[torch.dtype],
        steps: Sequence[ExpectedStep],
    ) -> None:
        """Add maps, each with the dtype of its result, to the table if they are as expected."""
        if len(maps) != len(steps):
            raise Mismatch(f"{type(node).__name__} has derivatives of another kind")
        for map_, dtype, step in zip(maps, dtypes, steps):
            if not step.has(map_):
                there, shape = tuple(map_.out_shape), step.shape
                what = f"shape {there}, not {shape}" if there != shape else "another derivative"
                raise Mismatch(f"{type(node).__name__}: {what}")
            if dtype is not step.dtype:
                raise Mismatch(f"{type(node).__name__}: {dtype}, not {step.dtype}")
        self.maps += maps

    def _pass_on(self, out: Tensor, how: ExpectedResult) -> None:
        """Add a result to the pending gradients."""
        out = plain(out)
        if how.keeps:
            self.kept[how.value] = as_real(out)
        if how.there is None:
            self.grads[how.value] = out
        else:
            self._add(out, how)

    def _add(self, out: Tensor, how: ExpectedResult) -> None:
        """Add a result to the value that is there."""
        assert how.there is not None and how.move is not None
        self.maps += (how.move, how.move)
        there = self.grads.pop(how.there), how.there
        out = self.deferred.add(there, (out, how.value), how.total)
        if how.keeps_total:
            self.kept[how.total] = as_real(out)
        self.grads[how.total] = out

    def _join(self, node: Node, entry: JoinNode) -> None:
        grads = {slot: self.grads.pop(value) for slot, value in entry.takes}
        out, slots = self._called(MULTI_OUTPUT_RULES[entry.name], node, grads)
        (step,) = entry.result.steps
        structures = tuple([map_.structure() for map_ in slots.values()])
        if structures != entry.structures or (out.shape, out.dtype) != (step.shape, step.dtype):
            raise Mismatch(f"{entry.name}: shape {tuple(out.shape)}, not {step.shape}")
        self.maps += slots.values()
        self._pass_on(out, entry.result)

    def _formula(self, node: Node, edges: Edges, entry: FormulaNode) -> None:
        wanted, first = entry.block, len(self.maps)
        block = Block(wanted.operator, wanted.place, dict(wanted.takes), [], {})
        arrived = {slot: (self.grads.pop(value), value) for slot, value in wanted.takes.items()}
        self.recorder.new = count(entry.start + 1).__next__
        found = self._called(self.formulas.follow, node, edges, arrived, block)
        block.merges = wanted.merges
        structures = tuple([map_.structure() for map_ in self.maps[first:]])
        if block != wanted or structures != entry.structures:
            raise Mismatch(f"the formula of {wanted.operator} has other steps")
        for (_, out, _), how in zip(found, entry.results, strict=True):
            self.products.changes_device |= out.device != self.seed.device
            self._pass_on(out, how)

    def _leaf(self, leaf: Tensor, entry: LeafNode) -> None:
        if leaf._backward_hooks:
            raise Mismatch("hooks stand on its leaves")
        if leaf.device != self.seed.device and leaf.dim():
            raise Mismatch("leaves are on several devices")
        value, lazy = entry
        given = self.deferred.get(value)
        if lazy is not (given is not None):
            raise Mismatch("other gradients are deferred")
        grad = self.grads.pop(value)
        self.leaves.append(Leaf(leaf, value, given or grad))

    def constants(self) -> Constants:
        """The tensors of the program, once all nodes have been visited."""
        if (
            len(self.maps) != len(self.replay.maps.shared)
            or next(self.products.decided, None) is not None
        ):
            raise Mismatch("it has other maps")
        if self.products.changes_device:
            raise Mismatch("it is over several devices")
        if self.checks is not None and not self.checks.fulfilled():
            raise Mismatch("a formula is not what it was taken for")
        kept = {value: self.kept[value] for value in self.replay.kept}
        return Constants(self.seed, self.maps, self.leaves, kept)


# From a recording to its replay -------------------------------------------------------------------


def replay_of(loss: Tensor, recorder: ProgramRecorder, program: Program) -> Replay | str:
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
    return Replay(
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
        rules={kind.name: recording.rule_of(kind.name) for kind in kinds.values()},
        budget=cache.budget,
        used=cache.budget - cache.bytes_left,
        limited=cache.refused,
        limit=recorder.recorder.limit,
        opaque=recorder.formulas.opaque,
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


def recorded(
    loss: Tensor,
    seed: Tensor,
    name_table: NameTable,
    watch: HookWatch,
    order: str,
    limit: int = recording.DENSE_MAX_ENTRIES,
    opaque: bool = False,
    keep: int = 0,
    bare: bool = False,
) -> Program:
    """The simplified program of a loss, replayed if a loss of its structure was recorded before;
    the options are those of ``record``.
    """
    clear_since = watch.clear_since()
    settings = recording.DEFER_MIN_ELEMENTS, backend_of(seed).synchronises
    key = (order, limit, opaque, settings, *_signature(loss))

    def attempt(replay: Replay) -> Program:
        replay.check(seed, keep)
        return replay.program(loss, seed, name_table, clear_since)

    program, reason = None, ""
    if not bare and name_table.sharded is None:
        program, reason = RECORDINGS.replayed(key, Replay, attempt)
    if program is not None:
        return program  # of the same types of nodes, so that there are no DTensors to look for
    make = recorder_of(loss, name_table)
    options = (loss, seed, name_table, watch, order, limit, opaque, keep, bare, make)
    if bare or make is not ProgramRecorder:
        return simplified(recording.record(*options))
    kept: list[Replay | str] = []

    def done(recorder: ProgramRecorder, raw: Program) -> None:
        kept.append(replay_of(loss, recorder, raw))

    raw = recording.record(*options, done=done)
    program = simplified(raw)
    replay = kept[-1]
    if isinstance(replay, Replay):
        program.facts = replay.facts
        replay.simplified = program.blocks, _structures(program.blocks, program.maps)
        RECORDINGS.add(key, replay)
    else:
        reason = replay
    program.recorded = reason
    return program


def _structures(blocks: Sequence[Block], maps: MapTable) -> list[object]:
    """The structures of the maps in formulas that were recorded operation by operation."""
    steps = (step for block in blocks if block.composed for step in block.steps)
    return [map_.structure() for step in steps for map_ in maps.of(step)]


def _signature(loss: Tensor) -> tuple[object, ...]:
    """What is quickly read of a graph: the type of its root, shapes and dtypes around it."""
    root = nodes.root_of(loss)

    def meta(edge: Edge) -> Any:
        found = None if edge[0] is None else nodes.wanted(*edge)
        return found if found is None else (tuple(found.shape), found.dtype)

    try:
        around = tuple(map(meta, nodes.edges_of(root)))
    except RuntimeError:  # a nested tensor
        around = ()
    return type(root), tuple(loss.shape), loss.dtype, loss.device, around
