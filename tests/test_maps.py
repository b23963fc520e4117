"""Every map against its matrix, by the independent definitions of ``oracle``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import CPU, use
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import MATRICES, forward, matrix_of
from test_semirings import EVERY, OWN, LogMax, title
from thorough import few
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.utils._python_dispatch import TorchDispatchMode

import gradtrace.linops
from gradtrace.kernels import Reference
from gradtrace.linops import (
    Around,
    Contract,
    Convolve,
    Cut,
    Dense,
    Distances,
    Identity,
    Index,
    Map,
    Normaliser,
    Reduce,
    Scale,
    Scan,
    Scatter,
    SideBySide,
    Slot,
    Sparse,
    Windows,
    gather,
    tiled,
    tiling,
)
from gradtrace.linops.base import any_nonzero
from gradtrace.linops.convex_hull import PointCloud
from gradtrace.semirings import COUNT, ENTROPY, MAX, SUM, Count, Max, Semiring, TopK, Value

Shape = tuple[int, ...]
Make = Callable[..., Tensor]


def maker(seed: int = 0, dtype: torch.dtype = torch.float64) -> Make:
    """Makes weights: generic, of either sign, none of them small."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        size = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return (size * sign).to(dtype)

    return make


def whole(seed: int = 0, dtype: torch.dtype = torch.float64) -> Make:
    """Makes whole numbers, few of them, so that products are exact and tie; some are 0."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    return make


# The table of instances --------------------------------------------------------------------------


def windows(
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    transposed: bool = False,
    output_padding: Shape | None = None,
    groups: int = 1,
) -> Windows:
    extra = output_padding or (0,) * len(stride)
    return Windows(stride, padding, dilation, transposed, extra, groups)


def convolve(make: Make, x: Shape, w: Shape, how: Windows, to_kernel: bool) -> Convolve:
    image, kernel = make(*x), make(*w)
    out = tuple(forward(image.double(), kernel.double(), how).shape)
    if to_kernel:
        return Convolve(image, how, True, out, w)
    return Convolve(kernel, how, False, out, x)


def zeros_around(x: Tensor) -> Tensor:
    return F.pad(x, (1, 2, 0, 1))


MOVES: dict[str, tuple[Callable[[Tensor], Tensor], Shape, bool]] = {
    "permute": (lambda x: x.permute(2, 0, 1), (2, 3, 4), False),
    "slice": (lambda x: x[:, 1::2], (3, 5), False),
    "select": (lambda x: x.select(0, 1), (3, 2), False),
    "flip": (lambda x: x.flip(0), (4,), False),
    "expand": (lambda x: x.expand(3, 4), (1, 4), False),
    "expand scalar": (lambda x: x.expand(2, 3), (), False),
    "unsqueeze scalar": (lambda x: x.unsqueeze(0), (), False),
    "index_select": (lambda x: x.index_select(0, torch.tensor([2, 0, 2])), (3, 2), False),
    "unfold": (lambda x: x.unfold(0, 3, 1), (5,), False),
    "diagonal": (lambda x: x.diagonal(), (3, 4), False),
    "pad": (zeros_around, (2, 3), True),
    "tril": (lambda x: x.tril(), (3, 3), True),
    "diag_embed": (lambda x: x.diag_embed(), (2, 3), True),
    "cat with zeros": (lambda x: torch.cat([x, x.new_zeros(2), x]), (3,), True),
    "all zeros": (lambda x: torch.zeros_like(x), (3,), True),
    "empty": (lambda x: x[:, :0], (3, 2), False),
    "from empty": (lambda x: x.new_zeros(2) + x.sum(), (0,), True),
}


def index(name: str) -> Callable[[Make], Map]:
    move, shape, fills = MOVES[name]
    out = tuple(move(torch.zeros(shape)).shape)
    return lambda make: Index(move, shape, out, fills=fills)


SPECS: dict[str, tuple[Shape, Shape]] = {
    "mk,kn->mn": ((2, 3), (3, 4)),
    "kn,mk->mn": ((3, 4), (2, 3)),
    "bmk,bkn->bmn": ((2, 3, 4), (2, 4, 2)),
    "bkn,bmk->bmn": ((2, 4, 2), (2, 3, 4)),
    "mk,k->m": ((3, 4), (4,)),
    "k,mk->m": ((4,), (3, 4)),
    "k,k->": ((5,), (5,)),
    ",k->k": ((), (4,)),
    ",->": ((), ()),
    "m,n->mn": ((2,), (3,)),
    "n,n->n": ((4,), (4,)),
    "nb,nab->na": ((3, 2), (3, 2, 2)),
    "ncp,ncpd->npd": ((2, 3, 4), (2, 3, 4, 2)),
    "bp,pq->bq": ((2, 6), (6, 3)),
    "abkn,abmk->abmn": ((1, 2, 3, 2), (1, 2, 2, 3)),
    "aby,bymz->amz": ((2, 3, 2), (3, 2, 4, 2)),
}


def contract(spec: str, x: Shape, w: Shape) -> Callable[[Make], Map]:
    out = tuple(torch.einsum(spec, torch.zeros(x), torch.zeros(w)).shape)
    return lambda make: Contract(spec, make(*w), x, out)


def flat(make: Make) -> Map:
    return Dense(make(6, 4), (2, 2), (3, 2))


def sparse(make: Make) -> Map:
    matrix = make(5, 6)
    matrix[1] = 0
    matrix[:, 2] = 0
    return Dense(matrix, (6,), (5,))


def normaliser(shape: Shape, dims: Sequence[int], rank: int) -> Callable[[Make], Map]:
    def build(make: Make) -> Map:
        return Normaliser(
            make(*shape), [(make(*shape), make(*shape)) for _ in range(rank)], dims, shape
        )

    return build


def broadcasting(make: Make) -> Map:
    """Shaped as log_softmax and batch norm make them."""
    return Normaliser(
        make(), [(make(1, 3, 1), make()), (make(2, 3, 4), make(3, 1))], (0, 2), (2, 3, 4)
    )


def columns(
    build: Callable[[Make], Map], dim: int, *places: Sequence[int]
) -> Callable[[Make], Map]:
    """A map restricted to other places along a dimension for each of several inputs."""
    return lambda make: build(make).narrow(dim, torch.tensor(places))


def compressed(
    columns: int, rows: int, around: Around | None = None, shapes: tuple[Shape, Shape] | None = None
) -> Callable[[Make], Map]:
    """A sparse matrix for each block, some rows of it empty; the last entry is there twice."""
    blocks, planes, inner = around or Around()
    pairs = [
        (b * rows + i, b * columns + j)
        for b, i, j in product(range(blocks), range(rows), range(columns))
        if i % 4 != 1 and (i + 2 * j + b) % 3
    ]
    before, after = shapes or ((blocks, planes, columns, inner), (blocks, planes, rows, inner))

    def build(make: Make) -> Map:
        weight = make(len(pairs))
        twice = [*pairs[::-1], *pairs[:1]]
        row, column = torch.tensor(twice, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return Sparse.of((row, column, torch.cat([weight, weight[-1:]])), before, after, around)

    return build


def distances(power: float, batch: Shape = (), n: int = 3, m: int = 4) -> Callable[[Make], Map]:
    """Between points with three coordinates, of which some are the same."""

    def build(make: Make) -> Map:
        b = math.prod(batch)
        x, y = make(b, n, 3), make(b, m, 3)
        off = torch.cdist(x.double(), y.double(), math.inf).to(x.dtype)
        return Distances(x, y, power, off, ((*batch, n, m), (*batch, n, 3)))

    return build


TABLE: dict[str, Callable[[Make], Map]] = {
    "Identity": lambda make: Identity((2, 3)),
    "Identity reshaped": lambda make: Identity((2, 3), (3, 1, 2)),
    "Identity 0-d": lambda make: Identity((), (1, 1)),
    "Identity empty": lambda make: Identity((0, 3), (0,)),
    "Scale": lambda make: Scale(make(2, 3), (2, 3)),
    "Scale broadcast": lambda make: Scale(make(3, 1), (2, 3, 4)),
    "Scale number": lambda make: Scale(0.1, (2, 3)),
    "Scale integer": lambda make: Scale(-1, (4,)),
    "Scale 0-d": lambda make: Scale(make(), ()),
    "Scale 0-d weight": lambda make: Scale(make(), (2, 1)),
    "Scale number 0-d": lambda make: Scale(1 / 3, ()),
    "Scale empty": lambda make: Scale(make(0, 1), (0, 3)),
    **{f"Index {name}": index(name) for name in MOVES},
    "Cut": lambda make: Cut(1, 2, (2, 7, 2), (2, 3, 2)),
    "Cut first": lambda make: Cut(0, 0, (5, 3), (2, 3)),
    "Cut whole": lambda make: Cut(0, 0, (3,), (3,)),
    "Cut empty": lambda make: Cut(0, 1, (3, 2), (0, 2)),
    "Slot": lambda make: Slot(1, 2, (2, 3, 2), (2, 3, 2), (2, 7, 2)),
    "Slot first": lambda make: Slot(0, 0, (2, 3), (2, 3), (5, 3)),
    "Slot stacked": lambda make: Slot(1, 1, (2, 1, 3), (2, 3), (2, 4, 3)),
    "Slot whole": lambda make: Slot(0, 0, (3,), (3,), (3,)),
    "Slot empty": lambda make: Slot(0, 1, (0, 2), (0, 2), (3, 2)),
    "Index told injective": lambda make: Index(lambda x: x.t(), (2, 3), (3, 2), injective=True),
    "gather": lambda make: gather(torch.tensor([[3, 1], [0, 2]]), (4,)),
    "gather twice": lambda make: gather(torch.tensor([1, 1, 0]), (3,)),
    "gather nothing": lambda make: gather(torch.tensor([2, -1, 0, -1]), (1, 3)),
    "gather only nothing": lambda make: gather(torch.tensor([-1, -1]), (2,)),
    "gather from empty": lambda make: gather(torch.tensor([-1, -1]), (0,)),
    "gather to empty": lambda make: gather(torch.zeros(0, dtype=torch.int64), (3,)),
    "gather 0-d": lambda make: gather(torch.tensor(0), ()),
    "Reduce": lambda make: Reduce([1], (2, 3, 4), (2, 4)),
    "Reduce kept": lambda make: Reduce([0, 2], (2, 3, 4), (1, 3, 1)),
    "Reduce unsorted": lambda make: Reduce([2, 0], (2, 3, 4), (3,)),
    "Reduce negative": lambda make: Reduce([-1], (2, 3), (2,)),
    "Reduce all": lambda make: Reduce([0, 1], (2, 3), ()),
    "Reduce none": lambda make: Reduce([], (2, 3), (2, 3)),
    "Reduce size 1": lambda make: Reduce([1], (2, 1, 3), (2, 3)),
    "Reduce 0-d": lambda make: Reduce([], (), ()),
    "Reduce empty": lambda make: Reduce([0], (0, 2), (2,)),
    "Reduce of empty lines": lambda make: Reduce([1], (0, 2), (0,)),
    "Scatter": lambda make: Scatter(torch.tensor([[0, 3], [3, 1]]), (2, 2)),
    "Scatter nowhere": lambda make: Scatter(torch.tensor([-1, 2, 2, -1]), (4,)),
    "Scatter permuted": lambda make: Scatter(torch.tensor([2, 0, 1]), (3,)),
    "Scatter all nowhere": lambda make: Scatter(torch.tensor([-1, -1]), (2,)),
    "Scatter 0-d": lambda make: Scatter(torch.tensor(1), (2,)),
    "Scatter empty": lambda make: Scatter(torch.zeros(0, dtype=torch.int64), (3,)),
    "Scatter to empty": lambda make: Scatter(torch.tensor([-1, -1]), (0,)),
    **{f"Distances {power}": distances(power) for power in (1, 2, 3)},
    "Distances of batches": distances(2, (2, 1)),
    "Distances from none": distances(2, m=0),
    "Distances of none": distances(2, n=0),
    "Sparse": compressed(5, 6),
    "Sparse shaped": compressed(6, 4, shapes=((2, 3), (2, 1, 2))),
    "Sparse planes": compressed(3, 4, Around(planes=3)),
    "Sparse inner": compressed(4, 3, Around(inner=2)),
    "Sparse blocks": compressed(3, 4, Around(blocks=2)),
    "Sparse blocks of planes": compressed(3, 5, Around(2, 3, 2)),
    "Sparse 0-d": lambda make: Sparse.of((*torch.zeros(2, 1).long(), make(1)), (), ()),
    "Sparse without entries": compressed(1, 2, shapes=((0,), (2,))),
    "Sparse to empty": compressed(3, 0),
    "Sparse no planes": compressed(3, 4, Around(planes=0)),
    **{f"Contract {spec}": contract(spec, *shapes) for spec, shapes in SPECS.items()},
    "Contract size 1": contract("mk,kn->mn", (1, 1), (1, 1)),
    "Contract inner size 1": contract("mk,kn->mn", (2, 1), (1, 3)),
    "Contract inner empty": contract("mk,kn->mn", (2, 0), (0, 3)),
    "Contract outer empty": contract("mk,kn->mn", (0, 2), (2, 3)),
    "Contract complex": contract("mkY,knYZ->mnZ", (2, 3, 2), (3, 2, 2, 2)),
    "Beside": lambda make: SideBySide([Scale(make(2, 3), (2, 3)) for _ in range(2)]),
    "Beside of one": lambda make: SideBySide([Reduce([1], (2, 3), (2,))]),
    "Beside of contractions": lambda make: SideBySide(
        [contract("mk,kn->mn", (2, 3), (3, 2))(make)] * 2
    ),
    "Dense": flat,
    "Dense sparse": sparse,
    "Dense 0-d": lambda make: Dense(make(1, 1), (), ()),
    "Dense empty": lambda make: Dense(make(0, 3), (3,), (0,)),
    "Dense of empty": lambda make: Dense(make(3, 0), (0,), (3,)),
    "Normaliser": normaliser((2, 5), [1], 1),
    "Normaliser rank 2": normaliser((2, 3, 4), [1, 2], 2),
    "Normaliser rank 0": normaliser((2, 1), [1], 0),
    "Normaliser negative": normaliser((2, 3), [-1], 1),
    "Normaliser size 1": normaliser((3, 1), [1], 2),
    "Normaliser 0-d": normaliser((), [], 1),
    "Normaliser empty": normaliser((0, 3), [1], 1),
    "Normaliser of empty lines": normaliser((2, 0), [1], 1),
    "Normaliser no dims": normaliser((3,), [], 1),
    "Normaliser broadcast": broadcasting,
    "LowRankColumns": columns(normaliser((4, 2), [0], 1), 0, [1], [3]),
    "LowRankColumns rank 2": columns(normaliser((2, 3, 2), [1, 2], 2), 1, [0, 2], [1, 2]),
    "LowRankColumns broadcast": columns(broadcasting, 2, [0, 3], [1, 2]),
    "LowRankColumns rank 0": columns(normaliser((2, 1), [1], 0), 1, [0]),
    "Scan": lambda make: Scan(0, (4,)),
    "Scan middle": lambda make: Scan(1, (2, 3, 2)),
    "Scan negative": lambda make: Scan(-1, (2, 3)),
    "Scan size 1": lambda make: Scan(1, (3, 1)),
    "Scan reverse": lambda make: Scan(0, (5,), reverse=True),
    "Scan reverse middle": lambda make: Scan(1, (2, 4, 2), reverse=True),
    "Scan reverse empty": lambda make: Scan(0, (0, 2), reverse=True),
    "Scan other empty": lambda make: Scan(1, (0, 2)),
    "Scan empty": lambda make: Scan(0, (0, 2)),
}

GEOMETRY: dict[str, tuple[Shape, Shape, Windows]] = {
    "1d": ((2, 2, 6), (3, 2, 3), windows((1,), (0,), (1,))),
    "1d stride": ((1, 1, 7), (2, 1, 2), windows((3,), (1,), (1,))),
    "1d dilated": ((1, 2, 8), (2, 2, 3), windows((2,), (2,), (2,))),
    "1d groups": ((2, 4, 5), (6, 2, 2), windows((1,), (1,), (1,), groups=2)),
    "1d depthwise": ((1, 3, 5), (3, 1, 3), windows((1,), (1,), (1,), groups=3)),
    "1d pointwise": ((2, 3, 4), (2, 3, 1), windows((1,), (0,), (1,))),
    "1d transposed": ((2, 2, 4), (2, 3, 3), windows((1,), (0,), (1,), True)),
    "1d transposed output_padding": (
        (1, 2, 3),
        (2, 1, 3),
        windows((2,), (1,), (1,), True, (1,)),
    ),
    "1d transposed groups": (
        (1, 4, 3),
        (4, 2, 2),
        windows((2,), (0,), (2,), True, (1,), 2),
    ),
    "2d": ((1, 2, 4, 3), (2, 2, 2, 2), windows((1, 1), (0, 0), (1, 1))),
    "2d uneven": ((2, 1, 5, 4), (2, 1, 3, 2), windows((2, 1), (1, 0), (1, 2))),
    "2d groups": ((1, 4, 4, 3), (2, 2, 3, 3), windows((2, 2), (1, 1), (1, 1), groups=2)),
    "2d transposed": (
        (1, 2, 2, 3),
        (2, 2, 3, 2),
        windows((2, 3), (1, 0), (1, 1), True, (1, 2)),
    ),
    "2d transposed groups": (
        (1, 2, 2, 2),
        (2, 1, 2, 2),
        windows((1, 2), (0, 1), (2, 1), True, (0, 1), 2),
    ),
    "3d": ((1, 1, 3, 2, 3), (2, 1, 2, 2, 2), windows((1, 1, 1), (0, 1, 0), (1, 1, 1))),
    "3d transposed": (
        (1, 2, 2, 1, 2),
        (2, 1, 2, 2, 1),
        windows((2, 1, 1), (0, 1, 0), (1, 2, 1), True, (1, 0, 0)),
    ),
    "kernel larger than input": ((1, 1, 2), (1, 1, 5), windows((1,), (2,), (1,))),
}


def _convolution(name: str, to_kernel: bool) -> Callable[[Make], Map]:
    return lambda make: convolve(make, *GEOMETRY[name], to_kernel)


TABLE |= {f"Convolve {name} to input": _convolution(name, False) for name in GEOMETRY}
TABLE |= {f"Convolve {name} to kernel": _convolution(name, True) for name in GEOMETRY}


# What is asked of each ---------------------------------------------------------------------------


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def apart(x: Tensor) -> Tensor:
    """The same values, no two of them neighbours in memory, dimensions turned round."""
    back = list(reversed(range(x.dim())))
    turned = x.permute(back)
    poison = torch.full_like(turned, math.nan if x.is_floating_point() else 1)
    return torch.stack([turned, poison], -1)[..., 0].permute(back)


def check_apply(m: Map, make: Make) -> None:
    x = make(*m.in_shape)
    wanted = (matrix_of(m) @ x.reshape(-1)).reshape(m.out_shape)
    for given_x in (x, apart(x)):
        for found in (m.apply(given_x), *m.apply_in((given_x,), SUM)):
            assert tuple(found.shape) == m.out_shape
            assert found.dtype is torch.float64
            close(found, wanted)


def check_routes(m: Map) -> None:
    there = (matrix_of(m) != 0).double()
    counts = torch.arange(1, m.inputs + 1, dtype=torch.float64)
    for count, before in (
        (1, torch.ones_like(counts)),
        (3, torch.full_like(counts, 3)),
        (counts.reshape(m.in_shape), counts),
    ):
        found = m.routes(count, CPU)
        if isinstance(found, Tensor):
            assert tuple(found.shape) == m.out_shape
            found = found.reshape(-1)
        wanted = there @ before
        assert torch.equal(torch.as_tensor(found).double().expand(m.outputs), wanted)


def check_singles(m: Map) -> None:
    there = matrix_of(m) != 0
    source = bool((there.sum(1) <= 1).all())
    target = bool((there.sum(0) <= 1).all())
    assert source or not m.single_source
    assert target or not m.single_target
    if isinstance(m, Index):
        assert m.single_source
        assert m.single_target == target


@pytest.fixture(params=TABLE)
def build(request: pytest.FixtureRequest) -> Callable[[Make], Map]:
    return TABLE[request.param]


@pytest.fixture
def semirings(build: Callable[[Make], Map]) -> list[Semiring]:
    """A third of them, for maps in turn; in the thorough run all."""
    turns = few(3, 1)
    return EVERY[list(TABLE.values()).index(build) % turns :: turns]


def test_apply_is_the_matrix(build: Callable[[Make], Map]) -> None:
    make = maker()
    check_apply(build(make), make)


def test_routes_are_the_pattern(build: Callable[[Make], Map]) -> None:
    check_routes(build(maker()))


def test_single_source_and_target_are_true(build: Callable[[Make], Map]) -> None:
    check_singles(build(maker()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_other_precisions(build: Callable[[Make], Map], dtype: torch.dtype) -> None:
    """With weights of the same precision, and of others (autocast, norms of half precision)."""
    for kind in {dtype, torch.float32, torch.float64}:
        m = build(maker(dtype=kind))
        x = maker(seed=1, dtype=dtype)(*m.in_shape)
        matrix, flat_x = matrix_of(m), x.double().reshape(-1)
        (found,) = m.apply_in((x,), SUM)
        assert tuple(found.shape) == m.out_shape
        scale = matrix.abs() @ flat_x.abs()
        error = (found.double().reshape(-1) - matrix @ flat_x).abs()
        allowed = 4 * torch.finfo(dtype).eps * float(scale.amax()) if scale.numel() else 0.0
        assert bool((error <= allowed).all())


def test_repr_shows_the_shapes(build: Callable[[Make], Map]) -> None:
    m = build(maker())
    assert repr(m) == f"{type(m).__name__}({list(m.in_shape)} -> {list(m.out_shape)})"


def test_tensors_names_the_weights(build: Callable[[Make], Map]) -> None:
    m = build(maker())
    for name in m.tensors():
        assert isinstance(getattr(m, name), Tensor)


def map_classes() -> list[type[Map]]:
    found = [getattr(gradtrace.linops, name) for name in gradtrace.linops.__all__]
    return [c for c in found if isinstance(c, type) and issubclass(c, Map) and c is not Map]


@pytest.mark.parametrize("kind", map_classes(), ids=lambda kind: kind.__name__)
def test_every_map_is_in_the_tables(kind: type[Map]) -> None:
    instances = [build(maker()) for build in TABLE.values()]
    assert any(type(m) is kind for m in instances), f"add instances of {kind.__name__} to TABLE"
    assert kind in MATRICES, f"add a definition of {kind.__name__} to oracle.MATRICES"


def test_index_finds_injectivity_once() -> None:
    calls = []

    def move(x: Tensor) -> Tensor:
        calls.append(x.dtype)
        return x.flip(0)

    m = Index(move, (3,), (3,))
    assert m.single_target
    before = len(calls)
    assert m.single_target
    assert len(calls) == before > 0


# Row by row --------------------------------------------------------------------------------------


def check_rows(m: Map) -> None:
    """Any rows, in any order: sources rise, -1 is padding, and the entries are the matrix'."""
    matrix = matrix_of(m)
    generator = torch.Generator().manual_seed(m.outputs)
    some = torch.randint(max(m.outputs, 1), (m.outputs + 3,), generator=generator)
    for at in (torch.arange(m.outputs), some[: m.outputs and len(some)], some[:0]):
        source, weight = m.rows(at)
        assert source.dtype is torch.int64
        assert source.shape[0] == len(at)
        assert source.shape[1] <= m.width
        weight = weight.double().expand(source.shape)
        found = torch.zeros(len(at), m.inputs, dtype=torch.float64)
        there = source >= 0
        row, places = there.nonzero()[:, 0], source[there]
        assert bool((source[~there] == -1).all())
        assert bool((places[1:] > places[:-1])[row[1:] == row[:-1]].all())
        assert bool((places < m.inputs).all())
        found[row, places] = weight[there]
        close(found, matrix[at], 1e-6 if _is_single(m) else 1e-10)


def _is_single(m: Map) -> bool:
    """Whether a weight is of single precision or less."""
    weights = [getattr(m, name) for name in m.tensors()]
    return any(w.dtype is not torch.float64 for w in weights)


def check_reach(m: Map) -> None:
    """At least the largest number that an element comes from, and 0 where it comes from none."""
    there = (matrix_of(m) != 0).long()
    for x in (torch.arange(1, m.inputs + 1), torch.arange(m.inputs, 0, -1)):
        most = (there * x).amax(1) if m.inputs else torch.zeros(m.outputs, dtype=torch.int64)
        found = m.max_source(x.reshape(m.in_shape))
        assert tuple(found.shape) == m.out_shape
        assert found.dtype is torch.int64
        found = found.reshape(-1)
        assert bool((found >= most).all())
        assert bool((found <= m.inputs).all())
        if isinstance(m, Convolve):
            continue
        assert torch.equal(found, most)


def test_rows_are_the_matrix(build: Callable[[Make], Map]) -> None:
    check_rows(build(maker()))
    check_rows(build(whole()))


def test_reach_is_the_pattern(build: Callable[[Make], Map]) -> None:
    check_reach(build(maker()))


def test_what_is_not_loud_gets_nothing(build: Callable[[Make], Map]) -> None:
    for seed in range(3):
        m = build(whole(seed))
        x = whole(seed + 1)(*m.in_shape)
        if x.dim():
            x[: len(x) * seed // 2] = 0  # nothing, half or all of it
        loud = m.may_be_nonzero(x)
        if loud is not None:
            largest = m.largest(x).value
            assert not largest[~loud.reshape(largest.shape)].any()
        at = torch.arange(0, m.outputs, 2)
        if (read := m.reads_nonzero(x, at)) is not None:
            entries = m.rows(at)
            there = (entries.source >= 0) & (x.reshape(-1)[entries.source.clamp(min=0)] != 0)
            assert torch.equal(read, there.any(1))


def test_few_rows_at_a_time(build: Callable[[Make], Map], monkeypatch: pytest.MonkeyPatch) -> None:
    m = build(maker())
    x = maker(seed=1)(*m.in_shape)
    wanted, winners = m.generic((x,), SUM), m.largest(x)
    for limit in (1, 7):
        monkeypatch.setattr("gradtrace.linops.tuning.ROWS_MAX_ENTRIES", limit)
        assert torch.equal(m.generic((x,), SUM)[0], wanted[0])
        assert all(torch.equal(a, b) for a, b in zip(m.largest(x), winners))


# In every semiring -------------------------------------------------------------------------------


def value_like(semiring: Semiring, make: Make, shape: Shape) -> Value:
    """A sum of two lifts."""
    return semiring.plus(semiring.lift(make(*shape)), semiring.lift(make(*shape)))


def folded(matrix: Tensor, x: Value, semiring: Semiring) -> Value:
    """``out[i] = ⊕ⱼ lift(J[i, j]) ⊗ in[j]``, one j after the other."""
    out = semiring.zeros([matrix.shape[0]], semiring.lift(matrix[:0]))
    flat_x = tuple(part.reshape(-1) for part in x)
    for j in range(matrix.shape[1]):
        taken = tuple(part[j] for part in flat_x)
        out = semiring.plus(out, semiring.times(semiring.lift(matrix[:, j]), taken))
    return out


def agree(semiring: Semiring, found: Value, wanted: Value, shape: Shape, exact: bool) -> None:
    assert len(found) == len(wanted), semiring
    for a, b in zip(found, wanted):
        assert tuple(a.shape) == shape, semiring
        assert a.dtype is b.dtype, semiring
        if exact and semiring not in LOGARITHMS:
            assert torch.equal(a.reshape(-1), b), semiring
        else:
            close(a.reshape(-1), b)


LOGARITHMS = [s for s in EVERY if s == ENTROPY or s in OWN or getattr(s, "log", False)]


@pytest.mark.parametrize("semiring", EVERY, ids=lambda s: str(s.name))
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_norms_of_some_rows_at_a_time(
    semiring: Semiring, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rank)
    wide, per_row, per_line = torch.randn(7, 3, 5), torch.randn(7, 3, 1), torch.randn(5)
    pairs = [(per_row * wide, per_line), (per_row, wide)][:rank]
    for dims in ([2], [1, 2]):
        m = Normaliser(per_row * per_line, pairs, dims, (7, 3, 5))
        x = semiring.lift(torch.randn(7, 3, 5))
        wanted = m.apply_in(x, semiring)
        for most in (1, 40):
            monkeypatch.setattr("gradtrace.linops.tuning.SEMIRING_PIECE_ELEMENTS", most)
            found = m.apply_in(x, semiring)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        monkeypatch.undo()


def check_semiring(
    m: Map, semiring: Semiring, make: Make, exact: bool = False, matrix: Tensor | None = None
) -> None:
    matrix = matrix_of(m) if matrix is None else matrix
    x = value_like(semiring, make, m.in_shape)
    wanted = folded(matrix, x, semiring)
    for given_x in (x, tuple(map(apart, x))):
        agree(semiring, m.apply_in(given_x, semiring), wanted, m.out_shape, exact)
    agree(semiring, m.generic(x, semiring), wanted, m.out_shape, exact)


def test_pull_is_a_fold_over_the_matrix(
    build: Callable[[Make], Map], semirings: list[Semiring]
) -> None:
    """In every semiring, for weights of all kinds and for whole numbers, which are exact."""
    for make, exact in ((maker(), False), (whole(seed=5), True)):
        m = build(make)
        matrix = matrix_of(m)
        exact = exact and (not isinstance(m, Scale) or _powers_of_two(m))
        for semiring in semirings:
            check_semiring(m, semiring, make, exact, matrix)


def _powers_of_two(m: Scale) -> bool:
    return isinstance(m.weight, Tensor) or m.weight == -1


@pytest.mark.parametrize("name", ["Convolve 1d to input", "Normaliser rank 2", "Scatter nowhere"])
def test_whole_numbers_stay_whole(name: str) -> None:
    """2⁴⁰ + 1 has more digits than float32."""
    semiring, m = Count(exact=True), TABLE[name](maker())
    x = torch.full(m.in_shape, 2**40 + 1)
    wanted = folded(matrix_of(m), (x, x.double()), semiring)
    agree(semiring, m.generic((x, x.double()), semiring), wanted, m.out_shape, True)


def test_a_derivative_in_half_precision_is_weighed_in_single() -> None:
    """256² is beyond float16."""
    w = torch.full((2, 2), 256.0, dtype=torch.float16)
    maps = [Scale(w, (2, 2)), Contract("mk,kn->mn", w, (2, 2), (2, 2)), Dense(w, (2,), (2,))]
    for m in maps:
        x = MAX.weigh(w.reshape(-1)[: m.inputs].reshape(m.in_shape))
        for found in (m.apply_in(x, MAX), m.generic(x, MAX), m.best(x[0])[:1]):
            assert found[0].dtype is torch.float32
            assert torch.equal(found[0], torch.full(m.out_shape, 65536.0))


# The largest contribution ------------------------------------------------------------------------


def brute(matrix: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """By comparing one after the other: a later one must be larger, and NaN is largest of all."""
    numbers, rows = x.reshape(-1).tolist(), matrix.tolist()
    values, sources = [], []
    for row in rows:
        value, source = 0.0, -1
        for j, (w, number) in enumerate(zip(row, numbers)):
            size = abs(w * number) if w != 0 else 0.0  # what is no entry takes no infinity
            if size > value or (math.isnan(size) and not math.isnan(value)):
                value, source = size, j
        values.append(value)
        sources.append(source)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(sources, dtype=torch.int64)


def places(m: Map) -> list[Tensor]:
    """Ways to ask for some output elements."""
    if not m.outputs:
        return [torch.zeros(0, dtype=torch.int64)]
    last = m.outputs - 1
    return [
        torch.arange(m.outputs).flip(0),
        torch.tensor([last, 0, last]),
        torch.tensor([[0, last], [last // 2, 0]]),
        torch.zeros(0, dtype=torch.int64),
    ]


def check_best(m: Map, x: Tensor, matrix: Tensor | None = None) -> None:
    """``best`` and ``largest``, of all and of some, against comparing one by one; to the bit."""
    matrix = matrix_of(m) if matrix is None else matrix
    value, source = brute(matrix, x)
    for ask, given_x in product((m.best, m.largest), (x, apart(x))):
        found = ask(given_x)
        assert tuple(found.value.shape) == tuple(found.source.shape) == m.out_shape
        assert torch.equal(found.value.reshape(-1).double(), value)
        assert torch.equal(found.source.reshape(-1), source)
    for ask, at in product((m.best, m.largest), places(m)):
        some = ask(x, at)
        assert some.value.shape == some.source.shape == at.shape
        assert torch.equal(some.value.double(), value[at])
        assert torch.equal(some.source, source[at])


def test_the_largest_of_whole_numbers(build: Callable[[Make], Map]) -> None:
    """Ties go to the lowest source; where all is 0 there is none."""
    for seed in range(2):
        make = whole(seed)
        m = build(make)
        if isinstance(m, Scale) and not _powers_of_two(m):
            continue
        check_best(m, make(*m.in_shape))
        check_best(m, torch.full(m.in_shape, float(seed), dtype=torch.float64))


def test_the_largest_of_any_numbers(build: Callable[[Make], Map]) -> None:
    m = build(maker())
    matrix = matrix_of(m)
    x = maker(seed=1)(*m.in_shape)
    value, source = brute(matrix, x)
    for found in (m.best(x), m.largest(x)):
        close(found.value.reshape(-1), value, 1e-12)
        assert found.source.reshape(-1).tolist() == source.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_largest_with_nan_and_infinity(build: Callable[[Make], Map], bad: float) -> None:
    m = build(maker())
    matrix, base = matrix_of(m), maker(seed=1)(*m.in_shape)
    for places_of_bad in ([0], [-1], [0, -1], [m.inputs // 2]) if m.inputs else ():
        x = base.clone()
        for place in places_of_bad:
            x.view(-1)[place] = bad
        value, source = brute(matrix, x)
        for found in (m.best(x), m.largest(x)):
            torch.testing.assert_close(
                found.value.reshape(-1), value, rtol=1e-12, atol=0, equal_nan=True
            )
            assert found.source.reshape(-1).tolist() == source.tolist()


def test_an_infinite_weight_counts_only_where_it_is() -> None:
    kernel = torch.tensor([[[math.inf, 1.0, 1.0]]], dtype=torch.float64)
    m = Convolve(kernel, windows((1,), (1,), (1,)), False, (1, 1, 3), (1, 1, 3))
    x = torch.ones(1, 1, 3, dtype=torch.float64)
    assert m.apply(x).flatten().tolist() == [math.inf, math.inf, 2.0]
    assert m.best(x).value.flatten().tolist() == [math.inf, math.inf, 1.0]
    assert m.apply_in((x,), MAX)[0].flatten().tolist() == [math.inf, math.inf, 1.0]


def test_nan_and_infinity_together() -> None:
    x = torch.tensor([1.0, math.inf, math.nan, -math.inf, math.nan], dtype=torch.float64)
    for m in (
        Reduce([0], (5,), ()),
        Scan(0, (5,)),
        Scatter(torch.tensor([1, 1, 0, 1, 0]), (3,)),
        Identity((5,)),
        Dense(maker()(4, 5), (5,), (4,)),
        Contract("k,kn->n", maker()(5, 3), (5,), (3,)),
        Normaliser(maker()(5), [(maker(1)(5), maker(2)(5))], [0], (5,)),
        Normaliser(maker()(5), [(maker(1)(5), maker(2)(5)), (maker(3)(5), maker(4)(5))], [0], (5,)),
    ):
        matrix = matrix_of(m)
        for turned in (x, x.flip(0), x.roll(2)):
            value, source = brute(matrix, turned)
            for found in (m.best(turned), m.largest(turned)):
                assert found.source.reshape(-1).tolist() == source.tolist()
                assert torch.equal(found.value.reshape(-1).isnan(), value.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_largest_in_half_precision(build: Callable[[Make], Map], dtype: torch.dtype) -> None:
    """Products are taken in float32: 300² would be infinite in float16."""
    for kind in (dtype, torch.float32, torch.float64):
        m = build(lambda *shape, kind=kind: (maker()(*shape) * 300).to(kind))
        x = (maker(seed=1)(*m.in_shape) * 300).to(dtype)
        matrix = matrix_of(m)
        value, _ = brute(matrix, x.double())
        size = (matrix * x.double().reshape(1, -1)).abs()
        for found in (m.best(x), m.largest(x)):
            assert found.value.dtype in (torch.float32, torch.float64)
            close(found.value.reshape(-1) / value.clamp(min=1), value / value.clamp(min=1), 1e-5)
            winners = found.source.reshape(-1)
            assert torch.equal(winners < 0, value == 0)
            there = winners >= 0
            attained = size[there, winners[there]]
            close(attained / value[there], torch.ones_like(attained), 1e-5)


def test_best_is_what_max_takes(build: Callable[[Make], Map]) -> None:
    """The value of ``best`` is the pull in MAX: tracing and semiring are one."""
    m = build(maker())
    x = maker(seed=1)(*m.in_shape).abs()
    close(m.best(x).value, m.apply_in((x,), MAX)[0], 1e-12)


# Random instances --------------------------------------------------------------------------------

sizes = st.integers(0, 3)
shapes = st.lists(sizes, max_size=3).map(tuple)
seeds = st.integers(0, 10_000)


@st.composite
def scales(draw: Any) -> Map:
    shape = draw(shapes)
    first = draw(st.integers(0, len(shape)))
    weight = [n if draw(st.booleans()) else 1 for n in shape[first:]]
    if draw(st.booleans()):
        return Scale(draw(st.sampled_from([-2, 0.5, 3, -1.25])), shape)
    return Scale(maker(draw(seeds))(*weight), shape)


@st.composite
def gathers(draw: Any) -> Map:
    shape, out = draw(shapes), draw(shapes)
    most = math.prod(shape) - 1
    source = draw(st.lists(st.integers(-1, most), min_size=math.prod(out), max_size=math.prod(out)))
    return gather(torch.tensor(source, dtype=torch.int64).reshape(out), shape)


@st.composite
def scatters(draw: Any) -> Map:
    shape, out = draw(shapes), draw(shapes)
    most = math.prod(out) - 1
    n = math.prod(shape)
    target = draw(st.lists(st.integers(-1, most), min_size=n, max_size=n))
    return Scatter(torch.tensor(target, dtype=torch.int64).reshape(shape), out)


@st.composite
def sparse_matrices(draw: Any) -> Map:
    around = Around(*(draw(st.integers(1, 2)) for _ in range(3)))
    rows, columns = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    pairs = st.tuples(
        st.integers(0, 1), st.integers(0, max(rows - 1, 0)), st.integers(0, max(columns - 1, 0))
    )
    found = draw(st.lists(pairs, max_size=8, unique=True)) if rows * columns else []
    found = [(b % around.blocks, i, j) for b, i, j in found]
    found = sorted(set(found))
    block, row, column = torch.tensor(found, dtype=torch.int64).reshape(-1, 3).unbind(1)
    entries = (block * rows + row, block * columns + column, maker(draw(seeds))(len(found)))
    shapes = [(around.blocks, around.planes, n, around.inner) for n in (columns, rows)]
    return Sparse.of(entries, shapes[0], shapes[1], around)


@st.composite
def reduces(draw: Any) -> Map:
    shape = draw(shapes)
    dims = [d for d in range(len(shape)) if draw(st.booleans())]
    if draw(st.booleans()):
        out = tuple(1 if d in dims else n for d, n in enumerate(shape))
    else:
        out = tuple(n for d, n in enumerate(shape) if d not in dims)
    return Reduce(dims, shape, out)


@st.composite
def contracts(draw: Any) -> Map:
    """Each letter is of one of the kinds: batch, left, right, summed."""
    kinds = {"x,w->o": "abc", "x->o": "lm", "w->o": "rs", "x,w": "kj"}
    size: dict[str, int] = {}
    words = {"x": "", "w": "", "o": ""}
    for kind, letters in kinds.items():
        for letter in letters[: draw(st.integers(0, 2))]:
            size[letter] = draw(st.integers(1, 3))
            for word in "xwo":
                if word in kind:
                    words[word] += letter
    x, w, o = ("".join(draw(st.permutations(words[word]))) for word in "xwo")
    weight = maker(draw(seeds))(*(size[letter] for letter in w))
    in_shape, out_shape = (tuple(size[letter] for letter in word) for word in (x, o))
    return Contract(f"{x},{w}->{o}", weight, in_shape, out_shape)


@st.composite
def convolutions(draw: Any) -> Map:
    spatial = draw(st.integers(1, 2))

    def some(low: int, high: int) -> Shape:
        return tuple(draw(st.integers(low, high)) for _ in range(spatial))

    stride, dilation, kernel, groups = some(1, 3), some(1, 2), some(1, 3), draw(st.integers(1, 2))
    transposed = draw(st.booleans())
    span = [d * (k - 1) for d, k in zip(dilation, kernel)]
    padding = tuple(draw(st.integers(0, min(2, s))) for s in span)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation))
    how = Windows(
        stride, padding, dilation, transposed, extra if transposed else (0,) * spatial, groups
    )
    into, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    size = tuple(s + 1 + draw(st.integers(0, 2)) for s in span)
    w = (into, out // groups, *kernel) if transposed else (out, into // groups, *kernel)
    x = (draw(st.integers(1, 2)), into, *size)
    return convolve(maker(draw(seeds)), x, w, how, draw(st.booleans()))


@st.composite
def normalisers(draw: Any) -> Map:
    shape = draw(st.lists(sizes, min_size=1, max_size=3).map(tuple))
    dims = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1).map(sorted))
    make = maker(draw(seeds))

    def part() -> Tensor:
        return make(*(n if draw(st.booleans()) else 1 for n in shape))

    pairs = [(part(), part()) for _ in range(draw(st.integers(1, 2)))]
    return Normaliser(part(), pairs, dims, shape)


@st.composite
def scans(draw: Any) -> Map:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    return Scan(draw(st.integers(-len(shape), len(shape) - 1)), shape, draw(st.booleans()))


anything = st.one_of(
    scales(),
    gathers(),
    scatters(),
    sparse_matrices(),
    reduces(),
    contracts(),
    normalisers(),
    scans(),
    convolutions(),
)


@settings(max_examples=few(40, 120))
@given(anything, seeds)
def test_random_instances(m: Map, seed: int) -> None:
    check_apply(m, maker(seed))
    check_routes(m)
    check_singles(m)
    check_rows(m)
    check_reach(m)


@settings(max_examples=few(40, 150))
@given(anything, seeds, st.sampled_from(EVERY))
def test_random_instances_in_every_semiring(m: Map, seed: int, semiring: Semiring) -> None:
    check_semiring(m, semiring, maker(seed))
    check_semiring(m, semiring, whole(seed))


def rounded(m: Map) -> Map:
    """The same map with whole numbers for weights, if it has any."""
    if isinstance(m, Normaliser):
        pairs = [(u.round(), v.round()) for u, v in zip(m.left, m.right)]
        return Normaliser(m.diagonal.round(), pairs, m.dims, m.in_shape)
    for name in m.tensors():
        setattr(m, name, getattr(m, name).round())
    return m


@settings(max_examples=few(40, 100))
@given(anything, seeds)
def test_the_largest_of_random_instances(m: Map, seed: int) -> None:
    m = rounded(m)
    check_best(m, whole(seed)(*m.in_shape))


# Normalisers as the rules make them --------------------------------------------------------------

NORMALISED: dict[str, tuple[Callable[[Tensor], Tensor], Shape]] = {
    "softmax": (lambda x: x.softmax(-1), (2, 4)),
    "softmax middle": (lambda x: x.softmax(1), (2, 3, 2)),
    "log_softmax": (lambda x: x.log_softmax(0), (3, 2)),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), (3, 4)),
    "layer_norm 2d": (lambda x: F.layer_norm(x, (2, 3), maker()(2, 3)), (2, 2, 3)),
    "group_norm": (lambda x: F.group_norm(x, 2, maker()(4)), (2, 4, 3)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, maker()(3), training=True), (4, 3, 2)),
    "weight_norm": (lambda x: torch._weight_norm(x, maker()(2, 1), 0), (2, 3)),
}


@pytest.mark.parametrize("name", NORMALISED)
def test_rules_of_the_norms(name: str) -> None:
    f, shape = NORMALISED[name]
    x = maker(seed=2)(*shape).requires_grad_()
    program = gradtrace.program(f(x), cotangent=maker(seed=3)(*shape))
    steps = program.maps
    found = [m for m in steps if isinstance(m, Normaliser)]
    assert len(found) == 1, steps
    wanted: Any = jacobian(f, x.detach())
    close(matrix_of(found[0]), wanted.reshape(x.numel(), x.numel()).T)


# Long lines: the convex hull ---------------------------------------------------------------------


def numbers(kind: str, n: int, seed: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(left, right, x) along a line: two pairs, and what goes in."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    def few() -> Tensor:
        return torch.randint(-3, 4, (n,), generator=generator).double()

    one = torch.ones(n, dtype=torch.float64)
    x_hat, g = normal(), normal()
    if kind == "gaussian":
        return [one, x_hat], [one, x_hat], g
    if kind == "four gaussians":
        return [normal(), normal()], [normal(), normal()], g
    if kind == "ties":
        return [few(), few()], [few(), few()], few()
    if kind == "norm with ties":
        hat = few()
        return [one, hat], [one, hat], few()
    if kind == "collinear":
        return [one, x_hat], [one, 2 * one], g
    if kind == "constant gradient":
        return [one, x_hat], [one, x_hat], one * 0.125
    if kind == "all equal":
        return [one, one], [one, one], one
    if kind == "zeros":
        return [one, x_hat], [one, x_hat], g * 0
    if kind == "mostly zeros":
        return [one, x_hat], [one, x_hat], g * (torch.arange(n) % 50 == 3)
    if kind == "one right is zero":
        return [one, x_hat], [one * 0, x_hat], g
    if kind == "heavy tails":
        return [one, normal() ** 5], [one, normal() ** 5], g / normal().abs()
    if kind == "outlier":
        x_hat[n // 3] = 1e9
        g[n // 2] = -1e7
        return [one, x_hat], [one, x_hat], g
    if kind == "circle":
        angle = normal() * 10
        return [normal(), normal()], [angle.cos(), angle.sin()], one
    if kind == "tiny":
        return [one, x_hat], [one, x_hat], g * 1e-150
    raise KeyError(kind)


KINDS = [
    "gaussian", "four gaussians", "ties", "norm with ties", "collinear", "constant gradient",
    "all equal", "zeros", "mostly zeros", "one right is zero", "heavy tails", "outlier", "circle",
    "tiny",
]  # fmt: skip
EXACT = {"ties", "norm with ties", "all equal", "zeros"}


def long_line(kind: str, n: int, seed: int = 0) -> tuple[Normaliser, Tensor]:
    left, right, x = numbers(kind, n, seed)
    diagonal = -torch.ones(n, dtype=torch.float64) if kind in EXACT else -left[1] - 0.5
    return Normaliser(diagonal, list(zip(left, right)), [0], (n,)), x


def check_long(m: Normaliser, x: Tensor, exact: bool) -> None:
    """``best`` against ``largest``; where two contributions are equal to rounding, either."""
    found, wanted = m.best(x), m.largest(x)
    torch.testing.assert_close(found.value, wanted.value, rtol=1e-12, atol=0)
    different = (found.source != wanted.source).reshape(-1).nonzero().reshape(-1)
    if exact:
        assert not len(different)
    assert torch.equal(found.source < 0, wanted.source < 0)
    for i in different.tolist():
        _, weight = m.rows(torch.tensor([i]))
        size = (weight.reshape(-1) * x.reshape(-1)).abs()
        here, there = (float(size[int(best.source.reshape(-1)[i])]) for best in (found, wanted))
        assert here == pytest.approx(there, rel=1e-12)


@pytest.mark.parametrize("n", [65, 66, 127, 500, 2000])
@pytest.mark.parametrize("kind", KINDS)
def test_long_lines(kind: str, n: int) -> None:
    check_long(*long_line(kind, n), kind in EXACT)


@settings(max_examples=few(15, 40))
@given(st.sampled_from(KINDS), st.integers(65, 300), seeds)
def test_random_long_lines(kind: str, n: int, seed: int) -> None:
    check_long(*long_line(kind, n, seed), kind in EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_long_lines_side_by_side(dtype: torch.dtype) -> None:
    """Lines with few corners, with many, and of zeros, in the middle dimension of three."""
    lines = [numbers(kind, 150, 3) for kind in ("gaussian", "mostly zeros", "zeros", "outlier")]
    wide = [torch.stack(t).to(dtype) for t in zip(*((*u, *v, x) for u, v, x in lines))]
    shaped = [t.reshape(2, 2, 150).transpose(1, 2) for t in wide]
    u0, u1, v0, v1, x = shaped
    m = Normaliser(u1 * 0, [(u0, v0), (u1, v1)], [1], (2, 150, 2))
    found, wanted = m.best(x), m.largest(x)
    assert torch.equal(found.value, wanted.value)
    assert torch.equal(found.source, wanted.source)


@contextmanager
def corners_of(found: list[Tensor]) -> Iterator[None]:
    """What ``PointCloud`` takes for corners, while this lasts."""
    before = PointCloud._corners

    def record(self: PointCloud) -> Tensor:
        found.append(before(self))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        use(patch, Reference(CPU))  # which has a hull of its own
        patch.setattr(PointCloud, "_corners", record)
        yield


@pytest.mark.parametrize("kind", ["gaussian", "four gaussians", "outlier", "heavy tails"])
def test_few_points_are_corners(kind: str) -> None:
    found: list[Tensor] = []
    with corners_of(found):
        m, x = long_line(kind, 2000)
        m.best(x)
    assert len(found) == 1
    assert 1 <= int(found[0].sum()) < 100


def test_short_lines_and_other_ranks_take_no_hull() -> None:
    found: list[Tensor] = []
    with corners_of(found):
        m, x = long_line("gaussian", 64)
        m.best(x)
        make = maker()
        parts = [(make(100), make(100)) for _ in range(3)]
        Normaliser(make(100), parts, [0], (100,)).best(make(100))
        Normaliser(make(100), parts[:1], [0], (100,)).best(make(100))
    assert not found


def test_points_too_small_for_a_hull() -> None:
    n = 100
    one, small = torch.ones(n, dtype=torch.float64), 1e-200
    v = torch.linspace(2, 1, n, dtype=torch.float64) * small
    m = Normaliser(one * 0, [(one / small, v), (one / small, v.flip(0))], [0], (n,))
    check_long(m, torch.linspace(3, 1, n, dtype=torch.float64) * small, exact=False)


# Memory ------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements that any tensor had that was made while this lasts."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and not func.is_view:  # an expanded view costs nothing
                self.most = max(self.most, tensor.numel())
        return out


VOCABULARY = 50_000


@pytest.fixture(scope="module")
def softmax() -> Normaliser:
    y = torch.rand(VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = y / y.sum()
    return Normaliser(y, [(-y, y)], [0], (VOCABULARY,))


@pytest.mark.parametrize("semiring", EVERY, ids=title)
def test_softmax_of_a_vocabulary_takes_linear_memory(
    softmax: Normaliser, semiring: Semiring
) -> None:
    x = semiring.lift(maker()(VOCABULARY))
    with Largest() as seen:
        softmax.apply_in(x, semiring)
    assert VOCABULARY <= seen.most <= 12 * VOCABULARY


def test_the_largest_of_a_vocabulary_takes_linear_memory(softmax: Normaliser) -> None:
    x = maker()(VOCABULARY)
    with Largest() as seen:
        found = softmax.best(x)
    assert VOCABULARY <= seen.most <= 2 * VOCABULARY
    some = torch.tensor([0, 17, VOCABULARY - 1, int((softmax.right[0] * x).abs().argmax())])
    wanted = softmax.largest(x, some)
    close(found.value[some], wanted.value, 1e-12)
    assert torch.equal(found.source[some], wanted.source)


FEW = 1 << 21  # what any map may write out at a time, twice


@pytest.mark.parametrize("kind", ["gaussian", "outlier", "mostly zeros"])
def test_a_norm_over_an_image_takes_little_memory(kind: str) -> None:
    m, x = long_line(kind, 10_000)
    with Largest() as seen:
        m.best(x)
    assert seen.most <= FEW


def one_gradient_a_sample(samples: int, pixels: int) -> tuple[Normaliser, Tensor]:
    """Batch norm before average pooling: one gradient for all pixels of a sample."""
    generator = torch.Generator().manual_seed(0)
    n = samples * pixels
    hat = torch.randn(n, generator=generator, dtype=torch.float64)
    g = torch.randn(samples, generator=generator, dtype=torch.float64).repeat_interleave(pixels)
    one = torch.ones(n, dtype=torch.float64)
    return Normaliser(one, [(-one / n, one), (-hat / n, hat)], [0], (n,)), g


def test_a_norm_before_average_pooling_takes_little_memory() -> None:
    m, x = one_gradient_a_sample(8, 800)
    with Largest() as seen:
        m.best(x)
    assert seen.most <= FEW


def test_a_norm_before_average_pooling() -> None:
    m, x = one_gradient_a_sample(8, 100)
    check_long(m, x, exact=False)


@pytest.mark.parametrize("semiring", [MAX, Max(log=True), COUNT, TopK(2), LogMax()], ids=title)
def test_every_semiring_runs_through_a_norm(semiring: Semiring) -> None:
    """Rank two, by rows, some at a time."""
    m, x = long_line("gaussian", 1500)
    with Largest() as seen:
        found = m.apply_in(semiring.lift(x), semiring)
    wanted = folded(REFERENCE_OF_LINE(m), semiring.lift(x), semiring)
    for a, b in zip(found, wanted):
        close(a, b)
    assert seen.most <= 2 * FEW


def REFERENCE_OF_LINE(m: Normaliser) -> Tensor:
    """The matrix of a normaliser of one line."""
    outer = sum(torch.outer(u, v) for u, v in zip(m.left, m.right))
    return torch.diag(m.diagonal) + outer


def test_slots_that_fill_the_output_are_laid_side_by_side() -> None:
    sizes, starts = (2, 1, 3), (3, 5, 0)
    maps = [Slot(1, at, (2, n), (2, n), (2, 6)) for at, n in zip(starts, sizes)]
    parts = [torch.randn(2, n) for n in sizes]
    order = tiling(maps)
    assert order == [2, 0, 1]
    whole = sum(m.apply(x) for m, x in zip(maps, parts))
    assert torch.equal(tiled(maps, parts, order), whole)
    assert tiling(maps[:2]) is None  # a gap
    assert tiling([*maps, maps[0]]) is None  # twice
    assert tiling([*maps, Identity((2, 6))]) is None
    assert tiling([maps[0], maps[1], Slot(0, 0, (2, 3), (2, 3), (2, 6))]) is None
    stacked = [Slot(0, n, (1, 3), (3,), (2, 3)) for n in (1, 0)]
    found = tiled(stacked, [torch.zeros(3), torch.ones(3)], tiling(stacked) or [])
    assert torch.equal(found, torch.tensor([[1.0] * 3, [0.0] * 3]))


# In a CPU's cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(), (3, 1), (5, 3, 1), (5, 3, 4)])
def test_a_normaliser_of_parts_is_that_of_the_whole(
    weights: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = maker()
    for dims in ((1,), (1, 2), (0, 2)):
        pairs = [(make(*weights), make(*weights)) for _ in range(2)]
        m, x = Normaliser(make(*weights), pairs, dims, (5, 3, 4)), make(5, 3, 4)
        for part in (x, x.float(), x.mT.contiguous().mT, x.half()):
            wanted = m.apply(part)
            with monkeypatch.context() as patch:
                patch.setattr("gradtrace.linops.tuning.CACHED_ELEMENTS", 24)  # two of five rows
                found = m.apply(part)
            assert torch.equal(found, wanted) and found.dtype is wanted.dtype
            assert found.stride() == wanted.stride()


def test_nonzero_lines_are_found_wherever_they_begin() -> None:
    x = torch.zeros(3, 20, 4)
    x[0, 1], x[1, 19, 2], x[2, 0] = 1, torch.nan, -1
    for part in (x, x[:1], x.int(), x.mT, x[:, :2], x[:, :0]):
        for dims in ((), (0,), (1,), (0, 1), (0, 1, 2)):
            for keep in (False, True):
                wanted = (part != 0).any(dims, keep) if dims else part != 0
                assert torch.equal(any_nonzero(part, dims, keep), wanted)


@pytest.mark.parametrize("spec", ["mn,mk->kn", "mn,kn->mk", "mpn,mpk->nk", "mn,n->m", "nm,mk->nk"])
def test_copies_of_a_contraction_need_not_move_their_input(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, (x, rest) = maker(), spec.split(",")
    sizes = dict(zip("mnkp", (6, 5, 4, 3)))
    shapes = [tuple(sizes[letter] for letter in some) for some in (x, *rest.split("->"))]
    many = Contract(spec, make(*shapes[1]), shapes[0], shapes[2]).copies(3)
    assert isinstance(many, Contract)
    assert bool(many.each) == (spec in ("mn,mk->kn", "mpn,mpk->nk")), "rows come after"
    part = make(3, *shapes[0])
    wanted = many.apply(part)
    monkeypatch.setattr("gradtrace.linops.tuning.BATCHED_MIN_ELEMENTS", 0)
    close(many.apply(part), wanted)
