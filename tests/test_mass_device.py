"""Mass where reading an element would wait for a GPU: few reads, few launches, the same masses."""

from __future__ import annotations

import warnings
from math import frexp
from typing import Any

import pytest
import test_mass
import torch
from architectures import ARCHITECTURES
from arguments import arguments
from backends import CPU, imitate_gpu, using
from random_transformers import gpt2
from thorough import some
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from waits import Waits

import gradtrace as gt
from gradtrace.errors import NonFinite
from gradtrace.ir import rescaling
from gradtrace.ir.rescaling import DeferredRescaling, Rescaling, Scalar, ScaledValue
from gradtrace.kernels import Reference
from gradtrace.kernels.operands import LineLayout, LowRankLines, line_operands
from gradtrace.measures.mass import mass_of
from gradtrace.paths.path_mass import SumLayout
from gradtrace.semirings import ABS, Abs
from gradtrace.semirings.additive import LiftedAbs
from gradtrace.table import Table
from gradtrace.traced import Trace


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_gpu(monkeypatch)


def only_deferred(patch: pytest.MonkeyPatch) -> None:
    """A second run, with every value read, would fail."""

    def read(self: Rescaling, held: ScaledValue, alone: bool = False) -> ScaledValue:
        raise AssertionError("values were out of range")

    patch.setattr(Rescaling, "balanced", read)


# The same masses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("often", [1, 3, 20])
def test_random_graphs(often: int, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often values are rescaled."""
    monkeypatch.setattr(rescaling, "DEFERRED_STEPS", often)
    monkeypatch.setattr(rescaling, "DEFERRED_STEPS_ALONE", often)
    for seed in range(often * 10, often * 10 + 10):
        test_mass.check(seed)


def deep(steps: int, gain: float, other: float, dtype: torch.dtype = torch.float32) -> Trace:
    """Two branches after two, and a way past all of them."""
    x = torch.tensor([0.5, 0.25], dtype=dtype, requires_grad=True)
    y = x
    for _ in range(steps):
        y = y * gain + y * other
    return gt.trace(y.sum() + (x * 3.0).sum(), names={"x": x})


def masses(trace: Trace, p: float = 1.0) -> Table:
    return trace.mass(arguments(trace), p=p)  # type: ignore[arg-type]


@pytest.mark.parametrize("gains", [(1e-3, 2e-3), (-0.4, 0.8), (50.0, -49.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_deep_graphs(
    gains: tuple[float, float], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = masses(deep(150, *gains, dtype))
    imitate_gpu(monkeypatch)
    found = masses(deep(150, *gains, dtype))
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    assert found.shares == pytest.approx(wanted.shares, rel=tolerance, abs=1e-30)
    assert found.about["mass"] == pytest.approx(wanted.about["mass"], rel=tolerance)


def test_growth_needs_no_second_run(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    only_deferred(monkeypatch)
    table = masses(deep(200, 50.0, -49.0))
    assert table.about["mass"] == float("inf")  # 2 · 99²⁰⁰ is no float


@pytest.mark.parametrize("name", some(ARCHITECTURES, 6))
def test_architectures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loss_of = ARCHITECTURES[name]()
        torch.manual_seed(0)
        with gt.watch(model) as watch:
            loss = loss_of(model)
    trace = watch.trace(loss)
    wanted = trace.mass()
    imitate_gpu(monkeypatch)
    only_deferred(monkeypatch)
    found = trace.mass()
    assert found.shares == pytest.approx(wanted.shares, rel=1e-4, abs=1e-6, nan_ok=True)
    assert found.about["mass"] == pytest.approx(wanted.about["mass"], rel=1e-4)


# Range -------------------------------------------------------------------------------------------


def test_out_of_range_is_computed_again(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that leave the range between two rescalings, upwards or downwards, for a while."""
    reads = []
    balanced = Rescaling.balanced
    monkeypatch.setattr(
        Rescaling, "balanced", lambda *given, **more: reads.append(1) or balanced(*given, **more)
    )
    for factor in (1e-30, 1e30):
        reads.clear()
        x = torch.tensor([0.5, 0.25], requires_grad=True)
        loss = (x * factor / factor).sum()
        assert gt.trace(loss, names={"x": x}).mass("operators").about["mass"] == pytest.approx(2)
        assert reads


def test_what_is_not_finite(gpu: None) -> None:
    x = torch.zeros(2, requires_grad=True)
    trace = gt.trace(x.sqrt().sum() + x.sum(), names={"x": x}, nonfinite="allow")
    with pytest.raises(NonFinite, match="norms"):
        trace.mass("operators")


def in_range(rescaling: Rescaling, *numbers: float) -> bool:
    """Whether these results are read, and not found to have left the range of floats."""
    scalars = [Scalar(torch.tensor(number), 0) for number in numbers]
    layout, tensors = SumLayout.of([{"sum": scalars}], rescaling)
    return layout.read(tensors) is not None


def test_alignment() -> None:
    """Values with other powers of two: more of them, or others."""
    deferred = DeferredRescaling(ABS)

    def held(number: float, age: int = 99) -> ScaledValue:
        return ScaledValue((torch.tensor([number, number / 4]),), 0, age=age)

    def number(value: ScaledValue) -> Tensor:
        powers = [frexp(float(power))[1] - 1 for power in deferred.unread().powers]
        return value.value[0].double() * 2.0 ** sum(powers[n] for n in value.powers)

    a, b = deferred.balanced(held(3e10)), deferred.balanced(held(7e-10))
    c = deferred.balanced(a._replace(value=(a.value[0] * 1000,), age=99))
    assert a.powers != b.powers and c.powers[:1] == a.powers and not a.age
    assert 1 <= float(a.value[0].amax()) < 2
    for first, second in ((a, b), (a, c), (c, a), (a, held(5.0)), (b, c), (held(5.0), b)):
        both = deferred.plus(first, second)
        torch.testing.assert_close(
            number(both), number(first) + number(second), rtol=1e-6, atol=0.0
        )
    three = deferred.aligned((held(5.0), a, b))
    assert len({each.powers for each in three}) == 1
    for before, after in zip((held(5.0), a, b), three):
        torch.testing.assert_close(number(after), number(before), rtol=1e-6, atol=0.0)
    for powers in ((), a.powers, b.powers, c.powers):
        one = ScaledValue((deferred.one(powers, torch.ones(1)),), 0, powers)
        assert float(number(one)) == 1.0
    assert in_range(deferred, 1.0) and not in_range(deferred, float("inf"))
    deferred._number(torch.tensor(float("inf"), dtype=torch.float64))
    assert not in_range(deferred, 1.0)


@pytest.mark.parametrize("kind", [Rescaling, DeferredRescaling])
def test_the_larger_of_two_values_keeps_its_size(kind: type[Rescaling]) -> None:
    """Aligned the other way, it would leave the range of floats."""
    rescaling = kind(ABS)
    if isinstance(rescaling, DeferredRescaling):
        held = [ScaledValue((torch.tensor([x]),), 0, age=99) for x in (1e12, 1e-12)]
        large, small = (rescaling.balanced(each) for each in held)
        large = rescaling.balanced(large._replace(value=(large.value[0] * 1e12,), age=99))
        small = rescaling.balanced(small._replace(value=(small.value[0] * 1e-12,), age=99))
    else:
        large, small = (
            ScaledValue((torch.tensor([x]),), power) for x, power in ((3.0, 200), (5.0, -200))
        )
    for pair in ((large, small), (small, large)):
        both = rescaling.plus(*pair)
        assert torch.equal(both.value[0], large.value[0])
        assert both.exponent == large.exponent


def test_zeros_stay_zeros() -> None:
    deferred = DeferredRescaling(ABS)
    zero = deferred.balanced(ScaledValue((torch.zeros(3),), 0, age=99))
    assert not zero.value[0].any() and in_range(deferred, 0.0)
    empty = ScaledValue((torch.zeros(0),), 0, age=99)
    assert deferred.balanced(empty) is empty
    assert deferred.total(empty).value == 0


@pytest.mark.parametrize("size", [2.0**-60, 2.0**60, float("nan")])
def test_watched_values(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (1, 1000):
        monkeypatch.setattr(rescaling, "WAITING_VALUES", most)
        deferred = DeferredRescaling(Abs())
        deferred.balanced(ScaledValue((torch.ones(3),), 0, age=1))
        assert in_range(deferred)
        deferred.balanced(ScaledValue((torch.tensor([size, 0.0]),), 0, age=1))
        assert not in_range(deferred)


def test_parts_of_large_values(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large value a part tells that it is in range, unless that part is 0."""
    monkeypatch.setattr(rescaling, "WATCHED_ELEMENTS", 4)
    ones, few = torch.ones(40), torch.cat([torch.ones(4), torch.zeros(36)])
    for value, parts, holds in ((ones, True, True), (few, True, False), (few, False, True)):
        deferred = DeferredRescaling(Abs(), 1, parts)
        deferred.balanced(ScaledValue((value,), 0, age=1))
        assert in_range(deferred) is holds
    for size in (2.0**-60, 2.0**60):
        deferred = DeferredRescaling(Abs(), 1, parts=True)
        deferred.balanced(ScaledValue((torch.full((8, 5), size).T,), 0, age=1))
        assert not in_range(deferred)
    table = nn.Embedding(9, 4, dtype=torch.float64)
    only_deferred(monkeypatch)
    for _ in range(2):  # its gradient is 0 in the middle
        loss = (table(torch.tensor([0])) * 2).sum() + (table.weight * 0.0).sum()
        assert gt.trace(loss, names={"table": table.weight}).mass("operators").about["mass"] == 8.0


def test_growth_within_a_few_steps(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values leave their range they are rescaled more often, still unread; the next loss of
    the structure begins with what was right, and other powers for themselves.
    """
    only_deferred(monkeypatch)
    tried = []
    first = DeferredRescaling.__init__

    def init(self: DeferredRescaling, semiring: Abs, often: int = 1, parts: bool = False) -> None:
        tried.append(often)
        first(self, semiring, often, parts)

    monkeypatch.setattr(DeferredRescaling, "__init__", init)
    assert masses(deep(6, 1.0, 2.0)).about["mass"] == 2 * (3**6 + 3)
    table = masses(deep(10, 4000.0, -6000.0))
    assert tried == [1, 1, 1, 2, 8]
    again = deep(10, 4000.0, -6000.0)
    assert masses(again).shares == table.shares and tried[5:] == [8]
    masses(again, p=0.25)
    assert tried[6:] == [1]


# Absolute values of weights, once ----------------------------------------------------------------


def test_lifted_weights() -> None:
    """The smallest first, as many as fit; expanded ones and masks as they are."""
    small, large = torch.tensor([-2.0, 3.0]), torch.randn(5, 4).mT
    half, mask = torch.tensor([-1.5, 0.25]).bfloat16(), torch.tensor([True, False])
    wide = torch.tensor([-1.0]).expand(7)
    weights = [large, small, half, mask, wide, small]
    for most, count in ((0, 0), (11, 1), (12, 2), (100, 3)):
        semiring = LiftedAbs.of(weights, most)
        assert len(semiring.known) == count
        for weight in weights:
            (found,), (wanted,) = semiring.weigh(weight), ABS.weigh(weight)
            assert found.dtype is wanted.dtype and torch.equal(found, wanted)
            x = torch.rand(weight.shape)
            assert torch.equal(semiring.times_weight((x,), weight)[0], x * wanted)
    assert semiring.weigh(small)[0] is semiring.weigh(small)[0]


@pytest.mark.parametrize("spec", ["mk,kn->mn", "mn,kn->mk", "bmk,bnk->bmn", "mk,kna->mn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lifted_contractions(spec: str, dtype: torch.dtype) -> None:
    sizes = dict(zip("abmnk", (2, 3, 4, 5, 6)))
    x, weight = (torch.randn([sizes[c] for c in part]) for part in spec.split("->")[0].split(","))
    weight = weight.to(dtype)
    known = LiftedAbs.of([weight], 1 << 20)
    (found,), (wanted,) = (s.contract(spec, (x.abs(),), weight) for s in (known, ABS))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)


# Launches and synchronisations -------------------------------------------------------------------

_NO_LAUNCH = (
    "view _unsafe_view reshape expand permute transpose t unsqueeze squeeze select slice alias "
    "as_strided narrow split unbind diagonal detach empty empty_strided new_empty empty_like"
)
NO_LAUNCH = frozenset(_NO_LAUNCH.split())
"""ATen operations that start nothing on a GPU."""


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that start work on a GPU, and sees results in float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.wide = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") not in NO_LAUNCH:
            self.count += 1
            wide = isinstance(out, Tensor) and out.dtype is torch.float64 and out.numel() > 1
            self.wide += wide
        return out


class Gpu(Reference):
    """Plain torch, with a kernel for sums along lines, which is one launch."""

    synchronises = sums_lines = True

    def __init__(self) -> None:
        super().__init__(CPU)
        self.host = False

    def normalised_sums(
        self, lines: LowRankLines, layout: LineLayout | None = None
    ) -> Tensor | None:
        operands = line_operands(lines, None, layout)
        assert operands is not None
        given, layout = operands
        found = torch.zeros(tuple(layout.shape))  # the launch
        with _disable_current_modes():
            shape = layout.lines, layout.n
            d, x, *pairs = (part.as_strided(shape, s) for part, s in zip(given, layout.steps))
            weight = torch.diag_embed(d)
            for u, v in zip(pairs, pairs[len(lines.left) :]):
                weight = weight + u.unsqueeze(2) * v.unsqueeze(1)
            return found.copy_((weight.abs() @ x.unsqueeze(2)).reshape(found.shape))


def counted(layers: int) -> tuple[int, int, int, int]:
    """Launches of a backward pass and of mass, synchronisations, and steps."""
    given = gpt2(4, vocab_size=11, n_embd=8, n_layer=layers, n_head=2, n_positions=4)
    with gt.watch(given.model) as watch:
        loss = given.loss()
    with Launches() as backward:
        torch.autograd.grad(loss, list(given.model.parameters()), retain_graph=True)
    trace = watch.trace(loss)
    wanted = trace.mass().shares
    with using(Gpu()), Waits() as waits, Launches() as launches:
        found = mass_of(trace, None, 1.0)
    assert found.shares == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    assert launches.wide < 10  # where scalars are read
    return backward.count, launches.count, waits.count, len(trace.program.steps())


def test_few_launches_and_synchronisations() -> None:
    """A GPT-2 layer is some 75 steps in each direction; reading one element of each would wait."""
    pytest.importorskip("transformers")
    small, large = counted(2), counted(4)
    assert small[2] == large[2] <= 4
    backward, mass, steps = (large[n] - small[n] for n in (0, 1, 3))
    assert steps >= 140
    assert mass <= 3 * backward
    assert mass <= 1.6 * steps
