"""What operators cost: recording does work in proportion to the pairs of elements that they join.

Work is counted, not timed: the elements of the tensors that PyTorch's operations are handed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from scalar_pairs import scalar_edges
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.ir.passes.merge_routes import NOTE, distinct
from gradtrace.semirings import ABS, COUNT, MAX

Case = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def whole(most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(most))


def work(f: Callable[[], object]) -> int:
    """The elements that operations are handed while this runs."""
    with torch.autograd.profiler.profile(record_shapes=True) as found:
        f()
    events: Any = found.function_events
    outer = [e for e in events if e.name.startswith("aten::") and _outermost(e)]
    return sum(prod(shape) for e in outer for shape in e.input_shapes if isinstance(shape, list))


def _outermost(event: Any) -> bool:
    parent = event.cpu_parent
    return parent is None or not parent.name.startswith("aten::")


SOURCE, TARGET = whole(100, 600), whole(90, 600)
GRID = numbers(2, 16, 16, 2).tanh()

CASES: dict[str, Case] = {
    "bilinear": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        (numbers(2, 8, 24, 24),),
    ),
    "bicubic": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        (numbers(2, 8, 12, 12),),
    ),
    "antialias": (
        lambda x: F.interpolate(x, (12, 12), mode="bicubic", antialias=True),
        (numbers(2, 8, 32, 32),),
    ),
    "trilinear": (
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        (numbers(2, 4, 8, 8, 8),),
    ),
    "average": (lambda x: F.avg_pool2d(x, 3, 2, 1), (numbers(2, 8, 32, 32),)),
    "average of planes": (
        lambda x: F.avg_pool3d(x, (5, 1, 1), 1, (2, 0, 0)),
        (numbers(2, 1, 16, 24, 24),),
    ),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 7), (numbers(2, 8, 30, 30),)),
    "local response norm": (lambda x: F.local_response_norm(x, 5), (numbers(2, 16, 16, 16),)),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        (numbers(2, 8, 16, 16), GRID),
    ),
    **{
        f"cdist {p}": (lambda x, y, p=p: torch.cdist(x, y, p=p), (numbers(48, 16), numbers(40, 16)))
        for p in (1, 2, 3, float("inf"))
    },
    "cdist by product": (
        lambda x, y: torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist"),
        (numbers(48, 16), numbers(40, 16)),
    ),
    "pdist": (F.pdist, (numbers(40, 16),)),
    "bilinear layer": (F.bilinear, (numbers(32, 16), numbers(32, 16), numbers(16, 16, 16))),
    "multi_margin": (
        lambda x: F.multi_margin_loss(x, whole(40, 200), reduction="none"),
        (numbers(200, 40),),
    ),
    "multilabel_margin": (
        lambda x: F.multilabel_margin_loss(x, whole(40, 64, 40), reduction="none"),
        (numbers(64, 40),),
    ),
    "segments": (
        lambda x: torch.segment_reduce(x, "mean", lengths=torch.full((100,), 8)),
        (numbers(800, 4),),
    ),
    "graph": (
        lambda x: torch.zeros(90, 16).index_add(0, TARGET, x[SOURCE]),
        (numbers(100, 16),),
    ),
    "logsumexp": (lambda x: x.logsumexp(1), (numbers(16, 512),)),
    "minimum": (torch.minimum, (numbers(64, 64), numbers(64, 1))),
}


OFTEN = {"minimum": 40, "pdist": 4}
"""How many times all pairs and elements are gone over at most, if not 6: what is equal gets half by
two routes, which are merged.
"""


@pytest.mark.parametrize("name", CASES)
def test_recording_does_work_for_the_pairs_alone(name: str) -> None:
    f, inputs = CASES[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    loss = (out * numbers(*out.shape, seed=1)).sum()
    size = sum(x.numel() for x in (out, *leaves))
    pairs = scalar_edges(loss)
    assert work(lambda: programs.program(loss)) < OFTEN.get(name, 6) * (pairs + size)


POWERS = (0.5, 1, 1.5, 2, 3, float("inf"))


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("mode", ["use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"])
def test_distances_of_many_points_have_one_weight_for_a_pair(power: float, mode: str) -> None:
    """By matrices alone, 40 points in 30 dimensions were too many to merge the routes."""
    x, y = numbers(40, 30).double().requires_grad_(), numbers(35, 30).double()

    def distances(points: Tensor) -> Tensor:
        return torch.cdist(points, y, power, compute_mode=mode)

    seed = numbers(40, 35, seed=1).double()
    each = torch.autograd.functional.jacobian(lambda p: distances(p).sum(0), x)  # (35, 40, 30)
    wanted = (each * seed.t().unsqueeze(2)).abs()
    there = (each.abs() > 1e-12).double().sum(0)
    for semiring, value in ((ABS, wanted.sum(0)), (MAX, wanted.amax(0)), (COUNT, there)):
        found = gt.backward(distances(x), semiring, names={"x": x}, cotangent=seed)
        assert not found.notes
        torch.testing.assert_close(found["x"].double(), value, rtol=1e-6, atol=1e-12)


def test_values_that_are_not_exact_are_said_to_be() -> None:
    x = numbers(40, 40).requires_grad_()
    loss = torch.fft.rfft2(x).abs().sum()
    for semiring in (ABS, MAX, COUNT):
        with pytest.warns(UserWarning, match="not exact.*several routes") as caught:
            found = gt.backward(loss, semiring, names={"x": x})
        assert caught[0].filename == __file__
        assert any(NOTE in note for note in found.notes)
        with pytest.warns(UserWarning, match="not exact"):
            some = gt.backward(loss, semiring, names={"x": x}, leaves=["x"])
        assert some.notes == found.notes
    assert not gt.backward(loss, names={"x": x}).notes  # SUM is exact


def test_a_watched_model_says_it_too() -> None:
    model = nn.Linear(40, 40)
    with gt.watch(model) as watched:
        loss = torch.fft.rfft2(model(numbers(40, 40))).abs().sum()
    with pytest.warns(UserWarning, match="not exact.*several routes") as caught:
        found = watched.backward(loss, MAX)
    assert caught[0].filename == __file__
    assert found.notes


def test_whole_numbers_that_occur_twice() -> None:
    many = torch.randperm(100_000, generator=torch.Generator().manual_seed(0)) * 12_345_678_901
    assert distinct(many)
    for place in (0, 50_000, 99_998):
        again = many.clone()
        again[place] = many[place + 1]
        assert not distinct(again)
    assert distinct(many[:0]) and distinct(many[:1])
    assert not distinct(torch.zeros(5_000, dtype=torch.int64))


def positive(x: Tensor) -> Tensor:
    """Matrices far from singular ones."""
    return x + 4 * torch.eye(x.shape[-1], dtype=x.dtype)


class Turned(torch.autograd.Function):
    """``a @ x @ b``, with the product turned round half way back; or ``x @ a @ b``, by whose
    gradient every two elements of a row are joined in several ways.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, both: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.both = both
        return a @ x @ b if both else x @ a @ b

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        half = (given[0] @ b.mT).mT.contiguous()
        found = (half @ a).mT if ctx.both else (a @ half).mT
        return found, None, None, None


SQUARE = numbers(3, 4, 4).double()
PRODUCTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "inverse": (lambda x: torch.linalg.inv(positive(x)), True),
    "solve": (lambda x: torch.linalg.solve(positive(x), SQUARE[..., :2]), True),
    "triangular": (
        lambda x: torch.linalg.solve_triangular(positive(x), SQUARE[..., :2], upper=True),
        True,
    ),
    "turned": (lambda x: Turned.apply(x, SQUARE, SQUARE.mT.contiguous(), True), True),  # type: ignore[no-untyped-call]
    "on one side": (lambda x: Turned.apply(x, SQUARE, SQUARE, False), False),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_both_sides_stay_products(name: str) -> None:
    """They join every two elements of a matrix, n⁴ pairs, each in one way; others are merged."""
    f, apart = PRODUCTS[name]
    x = numbers(3, 4, 4, seed=2).double().requires_grad_()
    out = f(x)
    seed = numbers(*out.shape, seed=1).double()
    each = torch.autograd.functional.jacobian(f, x) * seed.reshape(*out.shape, 1, 1, 1)
    sizes = each.abs().reshape(out.numel(), *x.shape)
    wanted = ((ABS, sizes.sum(0)), (MAX, sizes.amax(0)), (COUNT, (sizes > 1e-13).double().sum(0)))
    for semiring, value in wanted:
        found = gt.backward(f(x), semiring, names={"x": x}, cotangent=seed)
        assert not found.notes
        torch.testing.assert_close(found["x"].double(), value, rtol=1e-6, atol=1e-12)
    maps = programs.program(f(x), cotangent=seed).maps
    held = [getattr(m, part) for m in maps for part in m.tensors()]
    largest = max(t.numel() for t in held if isinstance(t, Tensor))
    assert (largest <= x.numel()) == apart
