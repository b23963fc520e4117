"""``check_semiring`` finds what is wrong with a semiring, and says it with a small example."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from test_semirings import EVERY, title
from torch import Tensor

from gradtrace import testing
from gradtrace.errors import GradtraceError
from gradtrace.semirings import Abs, Count, Max, Semiring, TopK, Value
from gradtrace.semirings.base import Piece
from gradtrace.testing import LawBroken, check_semiring


@dataclass(frozen=True)
class Plain(Semiring):
    """(+, ×), with nothing wrong with it; each of the others spoils one thing."""

    name: str = "PLAIN"
    zero: tuple[float, ...] = (0.0,)
    one: tuple[float, ...] = (1.0,)

    def lift(self, weight: Tensor) -> Value:
        return (weight,)

    def plus(self, a: Value, b: Value) -> Value:
        return (a[0] + b[0],)

    def times(self, a: Value, b: Value) -> Value:
        return (a[0] * b[0],)


class Shifted(Plain):
    def lift(self, weight: Tensor) -> Value:
        return (weight + 1,)


class Constant(Plain):
    def lift(self, weight: Tensor) -> Value:
        return (torch.ones_like(weight),)


class Doubled(Plain):
    """Multiplicative only up to a factor."""

    def lift(self, weight: Tensor) -> Value:
        return (2 * weight,)


class Signed(Plain):
    def plus(self, a: Value, b: Value) -> Value:
        return (torch.maximum(a[0], b[0]),)


@dataclass(frozen=True)
class SignedWithItsZero(Signed):
    zero: tuple[float, ...] = (-math.inf,)


@dataclass(frozen=True)
class Bottleneck(Plain):
    one: tuple[float, ...] = (math.inf,)

    def lift(self, weight: Tensor) -> Value:
        return (weight.abs(),)

    def plus(self, a: Value, b: Value) -> Value:
        return (torch.maximum(a[0], b[0]),)

    def times(self, a: Value, b: Value) -> Value:
        return (torch.minimum(a[0], b[0]),)


@dataclass(frozen=True)
class Steps(Plain):
    """The length of the longest path, if every operator were one step."""

    zero: tuple[float, ...] = (-math.inf,)
    one: tuple[float, ...] = (0.0,)

    def lift(self, weight: Tensor) -> Value:
        return (torch.where(weight == 0, -math.inf, 1.0).to(weight.dtype),)

    def plus(self, a: Value, b: Value) -> Value:
        return (torch.maximum(a[0], b[0]),)

    def times(self, a: Value, b: Value) -> Value:
        return (a[0] + b[0],)


@dataclass(frozen=True)
class WrongZero(Plain):
    zero: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class NegativeZero(Plain):
    """Neutral for ⊕, and yet no zero for ⊗."""

    zero: tuple[float, ...] = (-1.0,)

    def lift(self, weight: Tensor) -> Value:
        return (weight.abs(),)

    def plus(self, a: Value, b: Value) -> Value:
        return (torch.maximum(a[0], b[0]),)


@dataclass(frozen=True)
class Half(Plain):
    """A product of two semirings of which lift knows one."""

    zero: tuple[float, ...] = (0.0, 0.0)
    one: tuple[float, ...] = (1.0, 1.0)

    def lift(self, weight: Tensor) -> Value:
        return weight, torch.zeros_like(weight)

    def plus(self, a: Value, b: Value) -> Value:
        return a[0] + b[0], a[1] + b[1]

    def times(self, a: Value, b: Value) -> Value:
        return a[0] * b[0], a[1] * b[1]


@dataclass(frozen=True)
class WrongOne(Plain):
    one: tuple[float, ...] = (2.0,)


class Mean(Plain):
    def plus(self, a: Value, b: Value) -> Value:
        return ((a[0] + b[0]) / 2,)


class First(Plain):
    def plus(self, a: Value, b: Value) -> Value:
        return (a[0] + 0 * b[0],)


class Power(Plain):
    def times(self, a: Value, b: Value) -> Value:
        return (a[0] - b[0],)


class Left(Plain):
    def times(self, a: Value, b: Value) -> Value:
        return (a[0] + 0 * b[0],)


@dataclass(frozen=True)
class NaiveLogarithm(Plain):
    """log(eᵃ + eᵇ) as it should not be computed: -∞ - -∞ is NaN."""

    zero: tuple[float, ...] = (-math.inf,)
    one: tuple[float, ...] = (0.0,)

    def lift(self, weight: Tensor) -> Value:
        return (weight.abs().log(),)

    def plus(self, a: Value, b: Value) -> Value:
        return (a[0] + (1 + (b[0] - a[0]).exp()).log(),)

    def times(self, a: Value, b: Value) -> Value:
        return (a[0] + b[0],)


class PlusInPlace(Plain):
    def plus(self, a: Value, b: Value) -> Value:
        a[0].add_(b[0])
        return a


class TimesInPlace(Plain):
    def times(self, a: Value, b: Value) -> Value:
        b[0].neg_()
        return (a[0] * -b[0],)


class LiftInPlace(Plain):
    def lift(self, weight: Tensor) -> Value:
        return (weight.abs_(),)


class OnePartMore(Plain):
    def times(self, a: Value, b: Value) -> Value:
        return a[0] * b[0], a[0]


class NoTuple(Plain):
    def lift(self, weight: Tensor) -> Value:
        return weight  # type: ignore[return-value]


@dataclass(frozen=True)
class TwoOnes(Plain):
    one: tuple[float, ...] = (1.0, 1.0)


class Summed(Plain):
    def lift(self, weight: Tensor) -> Value:
        return (weight.sum(),)


class Narrow(Plain):
    """What does not broadcast."""

    def times(self, a: Value, b: Value) -> Value:
        return (b[0] * a[0].reshape(-1)[0],)


class Shares(Plain):
    def lift(self, weight: Tensor) -> Value:
        return (weight / weight.abs().sum().clamp(min=1.0),)


class Turned(Plain):
    def plus(self, a: Value, b: Value) -> Value:
        return (a[0] + b[0].flip(-1) if b[0].dim() else a[0] + b[0],)


class WrongFold(Plain):
    def fold(self, x: Value, dim: int) -> Value:
        return (x[0].amax(dim),)


class WrongReduce(Plain):
    def reduce(self, x: Value, dims: Sequence[int]) -> Value:
        return (x[0].sum(tuple(dims)),)


class WrongScan(Plain):
    def scan(self, x: Value, dim: int) -> Value:
        return (x[0].flip(dim).cumsum(dim).flip(dim),)


class WrongScatter(Plain):
    def scatter(self, x: Value, target: Tensor, size: int) -> Value:
        return (x[0].new_zeros(size).index_add(0, target.clamp(min=0), x[0]),)


class WrongContract(Plain):
    def contract(self, spec: str, x: Value, weight: Tensor) -> Value:
        return (torch.einsum(spec, x[0], weight.abs()),)


class WrongZeros(Plain):
    def zeros(self, shape: Sequence[int], like: Value) -> Value:
        return (like[0].new_ones(tuple(shape)),)


class WrongWeigh(Plain):
    def weigh(self, weight: Tensor) -> Value:
        return (weight.abs(),)


class WrongLinear(Plain):
    def linear(self, weight: Tensor) -> list[Piece]:
        return [(0, 0, weight.abs())]


class WrongScale(Plain):
    def size(self, x: Value) -> float:
        return float(x[0].abs().max())

    def scale(self, x: Value, shift: int) -> Value:
        return (x[0] + shift,)


class Changeable(Semiring):
    name, zero, one = "CHANGEABLE", (0.0,), (1.0,)

    def lift(self, weight: Tensor) -> Value:
        return (weight,)

    plus, times = Plain.plus, Plain.times  # type: ignore[assignment]


@dataclass
class NotFrozen(Changeable):
    name: str = "NOTFROZEN"


@dataclass(frozen=True)
class WithList(Plain):
    seen: list[int] = field(default_factory=list)


BROKEN: dict[type[Semiring], tuple[str, str]] = {
    Shifted: ("lift is not multiplicative", "for a = lift(1), b = lift(1)"),
    Constant: ("lift(0) is not zero", "1 and 0"),
    Doubled: ("lift is not multiplicative", "2 and 4 for a = lift(1), b = lift(1)"),
    Signed: (
        "⊗ does not distribute over ⊕",
        "-2 and -1 for a = lift(-1), b = lift(1), c = lift(2)",
    ),
    SignedWithItsZero: ("⊗ does not distribute over ⊕", "a = lift(-1), b = lift(1), c = lift(2)"),
    Bottleneck: ("lift is not multiplicative", "2 and 1 for a = lift(1), b = lift(2)"),
    Steps: ("lift is not multiplicative", "1 and 2 for a = lift(1), b = lift(1)"),
    WrongZero: ("zero is not neutral", "2 and 1 for a = lift(1)"),
    NegativeZero: ("zero does not annihilate", "-2 and -1 for a = lift(2)"),
    Half: ("lift(1) is not one", "1, 0 and 1, 1"),
    WrongOne: ("one is not neutral", "2 and 1 for a = lift(1)"),
    Mean: ("⊕ is not associative", "for a = lift(1), b = lift(1), c = lift(2)"),
    First: ("⊕ is not commutative", "1 and 2 for a = lift(1), b = lift(2)"),
    Power: ("⊗ is not associative", "-1 and 1 for a = lift(1), b = lift(1), c = lift(1)"),
    Left: ("⊗ is not commutative", "1 and 2 for a = lift(1), b = lift(2)"),
    NaiveLogarithm: ("⊕ is not associative", "nan"),
    PlusInPlace: ("plus changes its arguments", "others need them"),
    TimesInPlace: ("times changes its arguments", "others need them"),
    LiftInPlace: ("lift changes its arguments", "others need them"),
    OnePartMore: ("wrong parts", "zero 1, and times makes shapes [(2, 3), (2, 3)]"),
    NoTuple: ("wrong parts", "lift makes shapes [(3,), (3,)]"),
    TwoOnes: ("wrong parts", "one has 2 parts, zero 1"),
    Summed: ("wrong parts", "lift makes shapes [()] of shape (2, 3)"),
    Narrow: ("wrong parts", "times makes shapes [(1, 3)]"),
    Shares: ("lift is not elementwise", "elements change one another"),
    Turned: ("plus is not elementwise", "elements change one another"),
    WrongFold: ("fold is wrong", "what ⊕ and ⊗ make"),
    WrongReduce: ("reduce is wrong", "shapes (4,), (1, 4)"),
    WrongScan: ("scan is wrong", "what ⊕ and ⊗ make"),
    WrongScatter: ("scatter is wrong", "what ⊕ and ⊗ make"),
    WrongContract: ("contract is wrong", "what ⊕ and ⊗ make"),
    WrongZeros: ("zeros is wrong", "1 and 0"),
    WrongWeigh: ("weigh is wrong", "what ⊕ and ⊗ make"),
    WrongLinear: ("linear is wrong", "its pieces are not ⊗"),
    WrongScale: ("scale is wrong", "does not go through"),
    Changeable: ("it can be changed", "frozen dataclass"),
    NotFrozen: ("it can be changed", "frozen dataclass"),
    WithList: ("it has no hash", "unhashable type: 'list'; make its fields tuples"),
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_what_is_wrong_is_found(kind: type[Semiring]) -> None:
    law, why = BROKEN[kind]
    with pytest.raises(LawBroken) as caught:
        check_semiring(kind())
    assert caught.value.law == law
    text = str(caught.value)
    assert text.startswith(f"{kind().name}: {law}: ")
    assert why in text
    assert len(text) < 300


OPTIONS: list[Semiring] = [
    *EVERY, Plain(), Abs(log=True), Max(log=True), Count(log=True), TopK(2), TopK(7),
]  # fmt: skip


@pytest.mark.parametrize("semiring", OPTIONS, ids=title)
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_right_passes(semiring: Semiring, seed: int) -> None:
    check_semiring(semiring, seed=seed)


def test_every_law_is_shown_to_be_checked() -> None:
    assert {*testing.LAWS, *OTHERS} <= {law for law, _ in BROKEN.values()}


OTHERS = {
    "it can be changed", "it has no hash", "wrong parts", "lift is not elementwise",
    "plus changes its arguments", "lift is not multiplicative", "lift(0) is not zero",
    "lift(1) is not one", "zero is not neutral", "zero does not annihilate", "one is not neutral",
    "scale is wrong", "linear is wrong",
}  # fmt: skip


@dataclass(frozen=True)
class Rare(Plain):
    """Wrong only where a value is a sum."""

    def times(self, a: Value, b: Value) -> Value:
        product = a[0] * b[0]
        return (torch.where(a[0].abs() > 20, product * 1.001, product),)


def test_sums_and_random_numbers_find_what_simple_ones_do_not() -> None:
    with pytest.raises(LawBroken) as caught:
        check_semiring(Rare(), samples=4000)
    assert " ⊕ " in str(caught.value).split(" for ")[-1]


def test_the_tolerance_is_the_callers() -> None:
    class Rough(Plain):
        def lift(self, weight: Tensor) -> Value:
            return ((weight * 1e4).round() / 1e4,)

    with pytest.raises(LawBroken, match="multiplicative"):
        check_semiring(Rough())
    check_semiring(Rough(), rtol=1e-2)


def test_few_samples_are_enough_to_run() -> None:
    check_semiring(Plain(), samples=1)
    check_semiring(Plain(), samples=0)


def test_the_seed_decides_and_nothing_global_changes() -> None:
    before = torch.get_rng_state()
    check_semiring(Plain(), seed=3)
    assert torch.equal(torch.get_rng_state(), before)

    def message(seed: int) -> str:
        with pytest.raises(LawBroken) as caught:
            check_semiring(WrongFold(), seed=seed)
        return str(caught.value)

    assert message(0) == message(0)
    assert message(0) != message(1)


def test_it_is_an_error_of_the_family() -> None:
    assert issubclass(LawBroken, GradtraceError)
    assert LawBroken.__doc__
    assert str(LawBroken("what happened")) == "what happened"
    assert LawBroken("what happened").law == ""


def test_it_needs_neither_pytest_nor_hypothesis() -> None:
    tree = ast.parse(inspect.getsource(testing))
    imported = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert not {name for name in imported if name.split(".")[0] in ("pytest", "hypothesis")}
