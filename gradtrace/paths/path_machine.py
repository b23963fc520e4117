"""A program written as the table by which a backend's kernel follows paths, all in one launch.

For every value that paths can reach it says which terms it is a sum of, and where the operands lie.
The kernel makes the choices of ``path_search.PathFollower``, element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from math import prod
from types import FunctionType

import torch
from torch import Tensor

from gradtrace.ir.bound import BoundTerm
from gradtrace.ir.recompute import Values
from gradtrace.ir.rescaling import ScaledValue
from gradtrace.kernels import Backend
from gradtrace.kernels.path_table import (
    KINDS,
    MAX_RANK,
    MAX_WORDS,
    MOVE,
    NONE,
    NORMALISE,
    SCALE,
    SCATTER,
    SLOT,
    SUM,
    TABLE,
    Dims,
    PathEnds,
    PathTable,
    PathTerm,
    Reference,
    TableWriter,
)
from gradtrace.linops import (
    Contract,
    Cut,
    Identity,
    Index,
    Map,
    Normaliser,
    Reduce,
    Scale,
    Scatter,
    Slot,
)
from gradtrace.linops.indexing import merged_dims, repeated, strides_of
from gradtrace.paths.path_forest import SliceBits, split_words, words_of
from gradtrace.paths.path_search import PathFollower
from gradtrace.semirings.base import wide
from gradtrace.semirings.einsum_plan import plan
from gradtrace.types import Shape

PathBits = tuple[Mapping[int, int], Mapping[int, SliceBits]]
"""By value, the bits that a path gets for each of its elements, or for those of a slice."""


class NotFollowed(Exception):
    """A kernel cannot follow paths through this program."""


def follow(
    follower: PathFollower,
    rule: str,
    starts: Mapping[int, Tensor],
    bits: Callable[[], PathBits],
    kept: dict[Hashable, PathTable | None],
    backend: Backend,
) -> PathEnds | None:
    """Follow the paths from elements of values by a kernel; None if there is none for this program.
    ``kept``: the tables of other losses of the same structure.
    """
    if follower.budget is not None or not backend.follows_paths or not starts:
        return None
    key = (rule, follower.seed is follower.program.seed, *starts)
    table = kept.get(key)
    if table is None and key in kept:
        return None
    with torch.no_grad():
        found = None if table is None else table.bound(follower)
        if table is None or found is None:
            writer = PathMachine(follower, rule, *bits())
            table = kept[key] = writer.table(starts)
            if not writer.lasting:
                del kept[key]
            found = None if table is None else table.bound(follower)
        if table is None or found is None:
            return None
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        counts = none.new_tensor([len(some) for some in starts.values()])
        nodes = none.new_tensor([table.nodes[value] for value in starts])
        at = torch.cat([none, *starts.values()])
        places = torch.stack([repeated(nodes, counts), at], 1)
        ends = backend.follow_paths(found, places, table.width)
        _fill(ends, follower, starts, table.unread)
    return ends


def _fill(
    ends: PathEnds, follower: PathFollower, starts: Mapping[int, Tensor], unread: frozenset[int]
) -> None:
    """Set the gradients of the starts that the kernel could not read."""
    first = 0
    for value, some in starts.items():
        if value in unread and len(some):
            gradient = follower.gradient(value, some.to(follower.seed.device)).double()
            ends.gradient[first : first + len(some)] = gradient.cpu().numpy()
        first += len(some)


@lru_cache(maxsize=4096)
def _dims(sizes: Shape, strides: Shape, offset: int = 0) -> Dims:
    """The layout of elements numbered row-major in ``sizes``; steps that do not matter left out."""
    found = merged_dims(sizes, strides)
    return Dims((*(dim for dim in found[:-1] if dim[2]), *found[-1:]), offset)


@dataclass
class PathMachine:
    """Writes the table of a program, for paths that are followed by a rule. ``lasting``: it holds
    for other losses of the same structure.
    """

    follower: PathFollower
    rule: str
    bits: Mapping[int, int]
    slices: Mapping[int, SliceBits]
    writer: TableWriter = field(default_factory=TableWriter)
    known: dict[Hashable, int] = field(default_factory=dict)  # words of tensors
    lasting: bool = True

    @cached_property
    def width(self) -> int:
        """How many words a set of components has."""
        slices = (bits for some in self.slices.values() for bits in some.bits)
        return words_of([*self.bits.values(), *slices])

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The number of each map, by identity."""
        return {id(map_): n for n, map_ in enumerate(self.follower.program.maps)}

    def table(self, starts: Mapping[int, Tensor]) -> PathTable | None:
        """The table of all nodes that paths can reach; None if a kernel cannot follow them."""
        if self.width > MAX_WORDS:
            return None
        try:
            return self.writer.finished(self._written(starts), self.width)
        except NotFollowed:
            return None

    # Nodes ----------------------------------------------------------------------------------------

    def _written(self, starts: Mapping[int, Tensor]) -> set[int]:
        """Write all nodes; returns the starts whose gradient is not known."""
        follower, root = self.follower, self.follower.program.root
        self.skipped = self._skipped(starts)
        needed, unread = set(starts), set[int]()
        for out, terms in reversed(follower.makers.items()):
            if out not in needed:
                continue
            if follower.edge_chooses(out, terms, self.rule):
                raise NotFollowed
            written = self._terms(out, terms)
            needed.update(term.node for term in written)
            gradient = NONE
            if out in starts and out in follower.gradients:
                gradient = self._gradient(out, terms[0].map.out_shape)
            elif out in starts:
                unread.add(out)
            self.writer.node(out, *self._components(out), written, gradient)
        if root not in self.writer.nodes:
            shape = tuple(follower.seed.shape)
            seed = self._spread(follower.seed, shape, ("seed",), lambda f: f.seed)
            self.writer.node(root, *self._components(root), (), seed)
        return unread

    def _skipped(self, starts: Mapping[int, Tensor]) -> dict[int, int]:
        """For values that are others, unchanged, and tell nothing: the first that does."""
        found: dict[int, int] = {}
        for out, terms in self.follower.makers.items():
            plain = len(terms) == 1 and isinstance(terms[0].map, Identity)
            if plain and out not in starts and not self.bits.get(out) and out not in self.slices:
                found[out] = found.get(terms[0].value, terms[0].value)
        return found

    def _components(self, value: int) -> tuple[int, int]:
        """The places of the bits of a value, and of its slices."""
        bits, slices = self.bits.get(value, 0), self.slices.get(value)
        at = self.writer.put(("bits", bits), split_words([bits], self.width)[0]) if bits else 0
        if slices is None:
            return at, 0
        shape, dim, named = slices
        rows = [word for row in split_words(named, self.width) for word in row]
        return at, self.writer.put(("slices", value), [prod(shape[dim + 1 :]), shape[dim], *rows])

    # Terms ----------------------------------------------------------------------------------------

    def _terms(self, out: int, terms: Sequence[BoundTerm]) -> list[PathTerm]:
        held = self.follower.compared(out, self.rule)
        self.lasting &= held is None
        alone = len(terms) == 1
        powers = [0 if held is None else held[term.value].exponent for term in terms]
        found = []
        for term, power in zip(terms, powers):
            here = self._term(out, term, held, alone)
            if not alone:
                here = here._replace(shift=power - max(powers), total=self._total(term, held))
            found.append(here)
        return found

    def _term(
        self, out: int, term: BoundTerm, held: Values[ScaledValue] | None, alone: bool
    ) -> PathTerm:
        map_, value = term
        write = _WRITERS.get(type(map_))
        if write is None or not map_.inputs or not map_.outputs:
            raise NotFollowed
        operand = None
        if not (alone and map_.is_gather):
            operand = _Operand(self, out, value, held is not None, map_.in_shape)
        return write(self, map_, operand)._replace(node=self.skipped.get(value, value))

    def _total(self, term: BoundTerm, held: Values[ScaledValue] | None) -> Reference:
        """The size of a whole term, where that is not the size of its largest contribution."""
        map_, value = term
        if held is not None or map_.is_gather or map_.is_diagonal:
            return NONE
        n = self.numbers[id(map_)]

        def whole(follower: PathFollower) -> Tensor:
            return wide(follower.program.maps[n].apply(follower.gradients[value]))

        return self._spread(whole(self.follower), map_.out_shape, ("total", n, value), whole)

    # Operands -------------------------------------------------------------------------------------

    def read(
        self, x: Tensor, how: Dims, key: Hashable, find: Callable[[PathFollower], Tensor]
    ) -> Reference:
        """A reference to a tensor that is read by a layout. ``find``: how it is found again."""
        seed = self.follower.seed
        if x.dtype not in KINDS or x.device != seed.device or x.is_neg():
            raise NotFollowed
        return self._word(x, key, find), KINDS[x.dtype], self.writer.layout(how)

    def _word(self, x: Tensor, key: Hashable, find: Callable[[PathFollower], Tensor]) -> int:
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.writer.tensor(x, find)
        return found

    def _spread(
        self, x: Tensor, shape: Shape, key: Hashable, find: Callable[[PathFollower], Tensor]
    ) -> Reference:
        """A tensor that broadcasts to a shape, read by element numbers."""
        return self.read(x, _dims(shape, spread(x, shape)), key, find)

    def _gradient(self, value: int, shape: Shape) -> Reference:
        return _Operand(self, value, value, False, shape).elements()

    def weight(self, map_: Map, name: str, part: int = -1) -> tuple[Tensor, Hashable, _Finder]:
        """A tensor of a map, or one of several, and how it is found again."""
        n = self.numbers[id(map_)]

        def one(follower: PathFollower) -> Tensor:
            found: Tensor = getattr(follower.program.maps[n], name)
            return found

        def of_several(follower: PathFollower) -> Tensor:
            found: Tensor = getattr(follower.program.maps[n], name)[part]
            return found

        find = one if part < 0 else of_several
        return find(self.follower), (n, name, part), find

    # Maps -----------------------------------------------------------------------------------------

    def moved(self, map_: Map, x: _Operand | None) -> PathTerm:
        """An element of the input, by a layout or a table."""
        here = NONE if x is None else x.elements()
        if isinstance(map_, Identity):
            return PathTerm(MOVE, 0, here)
        assert isinstance(map_, Index)
        n, device = self.numbers[id(map_)], self.follower.seed.device
        moving = _moving(map_, device)
        self.writer.facts.append((lambda f: _moving(f.program.maps[n], f.seed.device), moving))
        if isinstance(map_, Slot):
            cut, dim = map_.cut, map_.dim
            args = (prod(cut[dim + 1 :]), cut[dim], map_.out_shape[dim], map_.start)
            return PathTerm(SLOT, 0, here, args=args)
        how = _view(map_, device)
        if how is not None:
            return PathTerm(MOVE, 0, here, source=self.writer.layout(how))

        def source(follower: PathFollower) -> Tensor:
            index = follower.program.maps[n]
            assert isinstance(index, Index)
            return index.source(follower.seed.device).reshape(-1).contiguous()

        word = self._word(source(self.follower), ("source", n), source)
        return PathTerm(TABLE, 0, here, args=(word,))

    def scaled(self, map_: Map, x: _Operand | None) -> PathTerm:
        """The same element, scaled."""
        assert isinstance(map_, Scale) and x is not None
        weight, n = map_.weight, self.numbers[id(map_)]
        self.writer.facts.append((lambda f: type(f.program.maps[n].weight), type(weight)))
        if isinstance(weight, Tensor) and (weight.dim() or weight.device == x.tensor.device):
            found, key, find = self.weight(map_, "weight")
            if not found.is_floating_point():  # a mask, or whole numbers
                find, dtype = partial(_converted, find, _wide_dtype(x.tensor)), x.tensor.dtype
                found, key = find(self.follower), (key, dtype)
            w = self._spread(found, map_.in_shape, key, find)
        else:
            like = weight if isinstance(weight, Tensor) else x.tensor
            w = self.writer.number(_wide_dtype(like), lambda f: float(f.program.maps[n].weight))
        return PathTerm(SCALE, 0, x.elements(), w)

    def contracted(self, map_: Map, x: _Operand | None) -> PathTerm:
        """One of the products of a sum."""
        assert isinstance(map_, Contract) and x is not None
        weight, key, find = self.weight(map_, "weight")
        how = map_.plan()
        if alone := [d for d, c in enumerate(how.w) if c not in how.x + how.out]:
            whole = find

            def summed(follower: PathFollower) -> Tensor:
                return whole(follower).sum(alone)

            weight, key, find = summed(self.follower), (key, "summed"), summed
        letters = "".join(c for d, c in enumerate(how.w) if d not in alone)
        sizes = (map_.in_shape, tuple(map_.weight.shape))
        layouts, count, steps, inner = _contraction(
            map_.spec, *sizes, x.tensor.stride(), letters, weight.stride()
        )
        if inner:
            steps = tuple(self.writer.layout(each, True) for each in inner)
        left, right = x.read(layouts[1]), self.read(weight, layouts[2], key, find)
        source, args = self.writer.layout(layouts[0]), (count, int(bool(inner)), *steps)
        return PathTerm(SUM, 0, left, right, source=source, args=args)

    def reduced(self, map_: Map, x: _Operand | None) -> PathTerm:
        """One of the elements that are summed."""
        assert isinstance(map_, Reduce) and x is not None
        shape, dims = map_.in_shape, sorted(map_.dims)
        kept = tuple(1 if d in dims else n for d, n in enumerate(shape))
        sizes = tuple(shape[d] for d in dims)
        numbers, strides = strides_of(shape), x.tensor.stride()
        along = [_dims(sizes, tuple(some[d] for d in dims)) for some in (strides, numbers)]
        if all(len(how.dims) <= 1 for how in along):
            x_step, step = (how.dims[0][2] if how.dims else 0 for how in along)
            args = (prod(sizes), 0, x_step, 0, step)
        else:
            x_at, at = (self.writer.layout(how, True) for how in along)
            args = (prod(sizes), 1, x_at, 0, at)
        source = self.writer.layout(_dims(kept, numbers))
        return PathTerm(SUM, 0, x.read(_dims(kept, strides)), source=source, args=args)

    def normalised(self, map_: Map, x: _Operand | None) -> PathTerm:
        """One of the elements of a line."""
        assert isinstance(map_, Normaliser) and x is not None
        shape, dims, rank, n = map_.in_shape, map_.dims, len(map_.left), self.numbers[id(map_)]
        kinds = {_wide_dtype(part) for part in _parts(map_, x.tensor)}
        if len(kinds) > 1 or not 0 < rank <= MAX_RANK:
            raise NotFollowed
        self.writer.facts.append((lambda f: _line_facts(f.program.maps[n]), _line_facts(map_)))
        place = dict(zip(dims, strides_of(tuple(shape[d] for d in dims))))
        mine = self.writer.layout(_dims(shape, tuple(place.get(d, 0) for d in range(len(shape)))))
        diagonal, key, find = self.weight(map_, "diagonal")
        found = [*self._spread(diagonal, shape, key, find), 0]
        for r in range(rank):
            left, key, find = self.weight(map_, "left", r)
            found += [*self._spread(left, shape, key, find), 0]
            right, key, find = self.weight(map_, "right", r)
            how, step = _lines(shape, dims, spread(right, shape))
            found += [*self.read(right, how, key, find), step]
        how, x_step = _lines(shape, dims, x.tensor.stride())
        first, step = _lines(shape, dims, strides_of(shape))
        at = len(self.writer.words)
        self.writer.words += found
        args, source = (map_.width, mine, step, rank, at, x_step), self.writer.layout(first)
        return PathTerm(NORMALISE, 0, x.read(how), source=source, args=args)

    def scattered(self, map_: Map, x: _Operand | None) -> PathTerm:
        """One of the elements with this target."""
        assert isinstance(map_, Scatter) and x is not None
        if map_.target.device != x.tensor.device:
            raise NotFollowed
        n = self.numbers[id(map_)]

        def targets(follower: PathFollower) -> Tensor:
            found = follower.program.maps[n]
            assert isinstance(found, Scatter)
            ranked, order = found.target.reshape(-1).long().sort(stable=True)
            follower.orders[n] = order
            return ranked

        def order(follower: PathFollower) -> Tensor:
            return follower.orders.pop(n)

        args = [
            self._word(find(self.follower), (name, n), find)
            for name, find in (("targets", targets), ("order", order))
        ]
        return PathTerm(SCATTER, 0, x.elements(), args=(*args, map_.inputs))


_Finder = Callable[[PathFollower], Tensor]


@dataclass
class _Operand:
    """The input of a term: the value by which its contributions are compared."""

    machine: PathMachine
    out: int
    value: int
    held: bool
    shape: Shape

    def find(self, follower: PathFollower) -> Tensor:
        """The tensor, in a program of this structure."""
        if self.held:
            held = follower.compared(self.out, self.machine.rule)
            x = follower.value(self.value, held)
        else:
            x = follower.gradients[self.value]
        return x if x.shape == self.shape else x.reshape(self.shape)

    @cached_property
    def tensor(self) -> Tensor:
        """The tensor."""
        return self.find(self.machine.follower)

    def read(self, how: Dims) -> Reference:
        """A reference to it, by a layout."""
        key = (self.out if self.held else -1, self.value, self.shape)
        return self.machine.read(self.tensor, how, key, self._finder())

    def elements(self) -> Reference:
        """A reference to it, by element numbers."""
        return self.read(_dims(self.shape, self.tensor.stride()))

    def _finder(self) -> _Finder:
        value, shape = self.value, self.shape
        if self.held:
            return self.find  # not kept

        def gradient(follower: PathFollower) -> Tensor:
            x = follower.gradients[value]
            return x if x.shape == shape else x.reshape(shape)

        return gradient


def _converted(find: _Finder, dtype: torch.dtype, follower: PathFollower) -> Tensor:
    return find(follower).to(dtype)


def spread(x: Tensor, shape: Shape) -> Shape:
    """The strides of a tensor, broadcast to a shape."""
    return x.stride() if tuple(x.shape) == shape else x.expand(shape).stride()


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _parts(map_: Normaliser, x: Tensor) -> tuple[Tensor, ...]:
    return (map_.diagonal, *map_.left, *map_.right, x)


def _line_facts(map_: Map) -> object:
    assert isinstance(map_, Normaliser)
    return map_.dims, len(map_.left)


def _view(map_: Index, device: torch.device) -> Dims | None:
    """The layout of the elements that a map moves, if it is a view."""
    if map_.fills:
        return None
    numbers = torch.empty(map_.in_shape, dtype=torch.uint8, device=device)
    view = map_.move(numbers)
    if view.untyped_storage().data_ptr() != numbers.untyped_storage().data_ptr():
        return None
    return _dims(tuple(view.shape), view.stride(), int(view.storage_offset()))


def _moving(map_: Map, device: torch.device) -> object:
    """What a map that moves elements depends on, beside its shapes."""
    if isinstance(map_, Slot):
        return map_.cut, map_.dim, map_.start
    assert isinstance(map_, Index)
    move = map_.move
    if isinstance(move, FunctionType) and not move.__defaults__ and not move.__kwdefaults__:
        cells = [cell.cell_contents for cell in move.__closure__ or ()]
        if all(type(each) is int or _is_shape(each) for each in cells):
            return move.__code__, cells, map_.fills
    return _view(map_, device), map_.fills


def _is_shape(x: object) -> bool:
    return isinstance(x, (tuple, list)) and all(type(each) is int for each in x)


def _lines(shape: Shape, dims: Shape, strides: Shape) -> tuple[Dims, int]:
    """The layout of the first elements of lines along ``dims``, and the step along a line."""
    along = merged_dims(tuple(shape[d] for d in dims), tuple(strides[d] for d in dims))
    if len(along) > 1:
        raise NotFollowed
    first = tuple(0 if d in dims else n for d, n in enumerate(strides))
    return _dims(shape, first), along[0][2] if along else 0


@lru_cache(maxsize=4096)
def _contraction(
    spec: str, x: Shape, w: Shape, of_x: Shape, letters: str, of_w: Shape
) -> tuple[tuple[Dims, Dims, Dims], int, tuple[int, ...], tuple[Dims, ...]]:
    """For a contraction of tensors with these shapes and strides: the layouts of the first element,
    of the row of x and of the column of the weight that belong to an output; the length of both;
    the steps of x, the weight and the element along it, or, for several dimensions, their layouts.
    """
    how = plan(spec, x, w)
    by_x, by_w, numbers = dict(zip(how.x, of_x)), dict(zip(letters, of_w)), how.strides(how.x)
    shape = tuple(how.sizes[c] for c in how.out)
    layouts = (
        _dims(shape, how.element_strides.first),
        _dims(shape, tuple(by_x.get(c, 0) for c in how.out)),
        _dims(shape, tuple(by_w.get(c, 0) for c in how.out)),
    )
    sizes = tuple(how.sizes[c] for c in how.inner)
    along = [tuple(by.get(c, 0) for c in how.inner) for by in (by_x, by_w, numbers)]
    if len(sizes) <= 1:
        return layouts, prod(sizes), tuple(steps[0] if steps else 0 for steps in along), ()
    return layouts, prod(sizes), (), tuple(_dims(sizes, steps) for steps in along)


_WRITERS: dict[type[Map], Callable[[PathMachine, Map, _Operand | None], PathTerm]] = {
    Identity: PathMachine.moved,
    Index: PathMachine.moved,
    Cut: PathMachine.moved,
    Slot: PathMachine.moved,
    Scale: PathMachine.scaled,
    Contract: PathMachine.contracted,
    Reduce: PathMachine.reduced,
    Normaliser: PathMachine.normalised,
    Scatter: PathMachine.scattered,
}
"""The methods that write maps, by their kind."""
