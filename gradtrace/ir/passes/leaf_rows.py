"""Pass that computes some rows of leaves only, for measures that sample them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradtrace.ir.lazy_gradient import LazyGradient, LazyPart
from gradtrace.ir.passes.tails import find_tails
from gradtrace.ir.program import Block, Leaf, MapTable, Program, Step, Term
from gradtrace.linops import Contract, Identity, Index, Map, Scatter
from gradtrace.linops.indexing import resized


def keep_rows(program: Program, drawn: Mapping[int, Tensor]) -> tuple[Program, set[int]]:
    """The program of some rows of leaves: leaf values, each with the numbers of its rows, in the
    order in which they are to be. Products of weights are contracted for these rows alone.

    Leaves that are made of other maps than products, scatters of rows and permutations stay whole.
    Returns the leaves of which rows were kept too. Values and blocks keep their numbers.
    """
    rewriter = _RowKeeper(program)
    leaves, done = list[Leaf](), set[int]()
    for leaf in program.leaves:
        rows = drawn.get(leaf.value)
        if rows is not None and rewriter.can_keep(leaf.value, 0) and _can_narrow(leaf):
            rewriter.keep(leaf.value, 0, rows)
            leaf = replace(leaf, given=_narrowed(leaf, rows))
            done.add(leaf.value)
        leaves.append(leaf)
    found = rewriter.result(leaves)
    counts = tuple([(value, len(rows)) for value, rows in drawn.items()])
    found.facts = program.facts.of_derived(("rows", counts))
    return found, done


class _RowKeeper:
    """Rewrites the steps that leaves are made of, in place of the old ones."""

    def __init__(self, program: Program) -> None:
        self.program, self.size = program, program.size
        self.maps, self.kept = MapTable(program.maps), dict(program.kept)
        self.steps = {step.out: step for step in program.steps()}
        self.tails = find_tails(program)
        self.new: dict[int, list[Step]] = {}  # by the value that they end in

    def can_keep(self, value: int, dim: int) -> bool:
        """Whether rows of this value, along a dimension, can be computed alone."""
        step = self.steps.get(value)
        if step is None or value not in self.tails:
            return False
        for at, source in step.terms:
            before = _source_dim(self.maps[at], dim)
            if before is None or (before >= 0 and not self.can_keep(source, before)):
                return False
        return True

    def keep(self, value: int, dim: int, rows: Tensor) -> None:
        """Compute these rows of a value only."""
        step, terms, more = self.steps[value], list[Term](), list[Step]()
        for at, source in step.terms:
            before = _source_dim(self.maps[at], dim)
            assert before is not None
            map_, input_dim = narrowed_map(self.maps[at], dim, rows)
            if before >= 0:
                self.keep(source, before, rows)
            elif input_dim is not None:
                picked = _picked_rows(self.maps[at].in_shape, input_dim, rows)
                dtype = self.steps[source].dtype if source in self.steps else self._root_dtype()
                more.append(self.maps.single(self.size, picked, source, dtype))
                source, self.size = self.size, self.size + 1
            terms.append(self.maps.term(map_, source))
        shape = resized(step.shape, dim, len(rows))
        self.new[value] = [*more, Step(value, tuple(terms), shape, step.dtype)]
        if value in self.kept:
            self.kept[value] = self.kept[value].index_select(dim, rows)

    def _root_dtype(self) -> torch.dtype:
        return self.program.seed.dtype

    def result(self, leaves: list[Leaf]) -> Program:
        """The rewritten program."""
        blocks = [self._block(block) for block in self.program.blocks]
        given = self.program.constants
        constants = replace(given, maps=self.maps, leaves=leaves, kept=self.kept)
        return Program(self.program.root, self.size, tuple(blocks), constants)

    def _block(self, block: Block) -> Block:
        if not any(step.out in self.new for step in (*block.steps, *block.merges)):
            return block
        steps, merges = (self._rewritten(some) for some in (block.steps, block.merges))
        return replace(block, steps=tuple(steps), merges=tuple(merges))

    def _rewritten(self, steps: Sequence[Step]) -> list[Step]:
        return [new for step in steps for new in self.new.get(step.out, (step,))]


def _source_dim(map_: Map, dim: int) -> int | None:
    """The dimension of a map's input whose rows its output's rows are; -1 if the map itself can
    compute some rows only; None if neither.
    """
    if isinstance(map_, Contract):
        return -1
    if isinstance(map_, Scatter):
        return -1 if dim == 0 and len(map_.out_shape) == 2 else None
    if isinstance(map_, Identity):
        return dim if map_.in_shape == map_.out_shape else None
    order = _permutation(map_)
    return None if order is None else order[dim]


def _permutation(map_: Map) -> list[int] | None:
    """For each dimension of a gather's output that of its input, if it is a permutation of them."""
    if not isinstance(map_, Index) or map_.fills or len(map_.in_shape) != len(map_.out_shape):
        return None
    given = torch.empty(map_.in_shape, device="meta")
    moved = map_.move(given)
    steps = given.stride()
    if moved._base is not given or moved.storage_offset() or len({*steps}) < len(steps):
        return None
    if sorted(moved.stride()) != sorted(steps) or tuple(moved.shape) != map_.out_shape:
        return None
    order = [steps.index(step) for step in moved.stride()]
    return order if all(map_.in_shape[d] == n for d, n in zip(order, moved.shape)) else None


def narrowed_map(map_: Map, dim: int, rows: Tensor) -> tuple[Map, int | None]:
    """The map to some rows of its output along a dimension, and the dimension of its input whose
    rows it takes alone, if it does.
    """
    out_shape = resized(map_.out_shape, dim, len(rows))
    if isinstance(map_, Contract):
        how = map_.plan()
        letter = how.out[dim]
        weight, in_shape, place = map_.weight, map_.in_shape, how.x.find(letter)
        if letter in how.w:
            weight = weight.index_select(how.w.index(letter), rows.to(weight.device))
        if place >= 0:
            in_shape = resized(in_shape, place, len(rows))
        found = Contract(map_.spec, weight, in_shape, out_shape, map_.crossed)
        return found, place if place >= 0 else None
    if isinstance(map_, Scatter):
        count, width = map_.out_shape
        number = torch.full((count + 1,), -1, device=map_.target.device)  # the last for none
        number[rows.to(number.device)] = torch.arange(len(rows), device=number.device)
        row = number[torch.div(map_.target, width, rounding_mode="floor")]
        target = torch.where(row >= 0, row * width + map_.target % width, -1)
        return Scatter(target, out_shape), None
    before = _source_dim(map_, dim)
    assert before is not None
    in_shape = resized(map_.in_shape, before, len(rows))
    if isinstance(map_, Identity):
        return Identity(in_shape, out_shape), before
    order = _permutation(map_)
    assert order is not None
    return Index(lambda x: x.permute(order), in_shape, out_shape, injective=True), before


def _picked_rows(shape: Sequence[int], dim: int, rows: Tensor) -> Index:
    out_shape = resized(tuple(shape), dim, len(rows))

    def pick(x: Tensor) -> Tensor:
        return x.index_select(dim, rows.to(x.device))

    return Index(pick, tuple(shape), out_shape, injective=True)


# The gradient of the leaf itself -----------------------------------------------------------------


def _can_narrow(leaf: Leaf) -> bool:
    given = leaf.given
    if not isinstance(given, LazyGradient):
        return True
    return all(_maps_narrow(part.maps) for part in given.parts)


def _maps_narrow(maps: Sequence[Map]) -> bool:
    dim = 0
    for map_ in reversed(maps):
        before = _source_dim(map_, dim)
        if before is None or before < 0:
            return before is not None
        dim = before
    return True


def _narrowed(leaf: Leaf, rows: Tensor) -> Tensor | LazyGradient:
    """These rows of the leaf's gradient."""
    given = leaf.given
    if not isinstance(given, LazyGradient):
        return given.index_select(0, rows.to(given.device))
    return LazyGradient([_narrowed_part(part, rows) for part in given.parts])


def _narrowed_part(part: LazyPart, rows: Tensor) -> LazyPart:
    maps, dim = list(part.maps), 0
    for n in reversed(range(len(maps))):
        before = _source_dim(maps[n], dim)
        maps[n], place = narrowed_map(maps[n], dim, rows)
        if before is not None and before >= 0:
            dim = before
            continue
        if place is None:
            return LazyPart(tuple(maps), part.x)
        if n:
            maps[n:n] = [_picked_rows(part.maps[n].in_shape, place, rows)]
            return LazyPart(tuple(maps), part.x)
        return LazyPart(tuple(maps), part.x.index_select(place, rows.to(part.x.device)))
    return LazyPart(tuple(maps), part.x.index_select(dim, rows.to(part.x.device)))
