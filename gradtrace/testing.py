"""``check_semiring`` tests a user's semiring; ``enumerate_paths`` lists all paths, for teaching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gradtrace.autodiff.loss_checks import isolated
from gradtrace.errors import GradtraceError
from gradtrace.paths.paths import Paths
from gradtrace.semirings import Semiring, Value
from gradtrace.tracing.every_path import every_path

SIMPLE = (1.0, 2.0, 0.0, -1.0, -2.0, 3.0, 0.5)
"""Derivatives tried first, in this order, so that counterexamples are simple."""

SUMS = ((2, 1), (1, 2), (2, 2), (3, 2))
"""(terms, factors) of the sums of products of random derivatives tried after ``SIMPLE``."""


class LawBroken(GradtraceError):
    """A semiring breaks a law, so its results depend on how a graph is written.

    ``law`` names the law; the message has the simplest counterexample found.
    """

    def __init__(self, message: str, law: str = "") -> None:
        super().__init__(message)
        self.law = law


LAWS: dict[str, tuple[int, str, Callable[..., tuple[Value, Value]]]] = {
    "⊕ is not associative": (3, "(a ⊕ b) ⊕ c is not a ⊕ (b ⊕ c)",
        lambda plus, times, a, b, c: (plus(plus(a, b), c), plus(a, plus(b, c)))),
    "⊕ is not commutative": (2, "a ⊕ b is not b ⊕ a",
        lambda plus, times, a, b: (plus(a, b), plus(b, a))),
    "⊗ is not associative": (3, "(a ⊗ b) ⊗ c is not a ⊗ (b ⊗ c)",
        lambda plus, times, a, b, c: (times(times(a, b), c), times(a, times(b, c)))),
    "⊗ is not commutative": (2, "a ⊗ b is not b ⊗ a",
        lambda plus, times, a, b: (times(a, b), times(b, a))),
    "⊗ does not distribute over ⊕": (
        3, "a ⊗ (b ⊕ c) is not (a ⊗ b) ⊕ (a ⊗ c), so paths may not be joined before their end",
        lambda plus, times, a, b, c: (times(a, plus(b, c)), plus(times(a, b), times(a, c)))),
}  # fmt: skip
"""By name: the number of values, the explanation, and a function for the two sides."""


def check_semiring(
    semiring: Semiring, *, samples: int = 200, seed: int = 0, rtol: float = 1e-9
) -> None:
    """Raise ``LawBroken`` if a semiring breaks a law, with the simplest counterexample found.

    Values are sums of products of lifted derivatives, as in a backward pass: simple ones first,
    then random ones.

    Args:
        semiring: Semiring to test.
        samples: How many random values per law.
        seed: Draws the same values for the same number.
        rtol: Relative tolerance of comparisons.

    >>> from gradtrace.semirings import MAX
    >>> check_semiring(MAX)
    """
    check = _Check(semiring, samples, torch.Generator().manual_seed(seed), rtol)
    for part in (check.frozen, check.elementwise, check.laws, check.constants, check.derived):
        part()


@dataclass
class _Check:
    semiring: Semiring
    samples: int
    random: torch.Generator
    rtol: float

    def frozen(self) -> None:
        with suppress(AttributeError):  # raised by a frozen dataclass
            self.semiring.name = self.semiring.name
            raise self.broken("it can be changed", "make it a frozen dataclass")
        try:
            hash(self.semiring)
        except TypeError as error:
            raise self.broken("it has no hash", f"{error}; make its fields tuples") from None

    def elementwise(self) -> None:
        """Operations are elementwise and do not modify their arguments."""
        s, w = self.semiring, self.draw(2, 3)
        a, b = s.lift(w.clone()), s.lift(w[:1].flip(1))
        whole = tuple(part.expand(2, 3).clone() for part in b)
        acts: Any = {"lift": ((w,),), "plus": (a, whole), "times": (a, b)}
        for name, given in acts.items():
            act = getattr(s, name) if name != "lift" else lambda x: s.lift(*x)
            before = [part.clone() for x in given for part in x]
            found = act(*given)
            if not all(map(torch.equal, before, (part for x in given for part in x))):
                raise self.broken(f"{name} changes its arguments", "others need them as they are")
            shapes = [tuple(part.shape) for part in found]
            if not [(2, 3)] * len(s.zero) == [(2, 3)] * len(s.one) == shapes:
                parts = f"one has {len(s.one)} parts, zero {len(s.zero)}, and {name} makes"
                raise self.broken("wrong parts", f"{parts} shapes {shapes} of shape (2, 3)")
            first = act(*(tuple(part[0, 0] for part in x) for x in given))
            sides = tuple(part[0, 0] for part in found), first
            self.same(f"{name} is not elementwise", "elements change one another", sides)

    def laws(self) -> None:
        plus, times = self.semiring.plus, self.semiring.times
        for law, (arity, says, sides) in LAWS.items():
            for weights in self.tries(arity, SUMS):
                self.same(law, says, sides(plus, times, *map(self.value, weights)), weights)

    def constants(self) -> None:
        """``lift`` of products, of 0 and of 1; ``zero`` and ``one`` are neutral."""
        s = self.semiring
        says = "the lift of a product is not a ⊗ b, so it matters how many steps an operator takes"
        for weights in self.tries(2, [(1, 1)]):
            v, w = (some[:, 0, 0] for some in weights)
            sides = s.lift(v * w), s.times(s.lift(v), s.lift(w))
            self.same("lift is not multiplicative", says, sides, weights)
        for weights in self.tries(1, SUMS):
            a, w = self.value(weights[0]), weights[0][:, 0, 0]
            zero = tuple(torch.full_like(part, n) for part, n in zip(a, s.zero))
            one = tuple(torch.full_like(part, n) for part, n in zip(a, s.one))
            for law, says, sides in (
                ("zero is not neutral", "a ⊕ zero is not a", (s.plus(a, zero), a)),
                ("zero does not annihilate", "a ⊗ zero is not zero", (s.times(a, zero), zero)),
                ("one is not neutral", "a ⊗ one is not a", (s.times(a, one), a)),
            ):
                self.same(law, says, sides, weights)
            self.same("lift(0) is not zero", "found and wanted", (s.lift(w * 0), zero))
            self.same("lift(1) is not one", "found and wanted", (s.lift(w * 0 + 1), one))

    def derived(self) -> None:
        """Overridable methods agree with the base class, which is written in ⊕ and ⊗."""
        s, w, x = self.semiring, self.draw(4, 5), self.value(self.draw(12, 2, 2))
        a = tuple(part.reshape(3, 4) for part in x)
        target = torch.tensor([2, 0, 0, -1, 2, 2, 0, 2, -1, 0, 2, 3])
        acts: Any = {
            "fold": (a, 1), "reduce": (a, [0]), "scan": (a, 1), "scatter": (x, target, 5),
            "contract": ("mk,kn->mn", a, w), "zeros": ([2, 3], x), "weigh": (w,),
        }  # fmt: skip
        for name, given in acts.items():
            sides = getattr(s, name)(*given), getattr(Semiring, name)(s, *given)
            self.same(f"{name} is wrong", "it is not what ⊕ and ⊗ make", sides)
        if (pieces := s.linear(w[:3, :4])) is not None:
            out = [torch.zeros_like(part) for part in a]
            for i, o, weight in pieces:
                out[o] = out[o] + a[i] * weight
            sides = tuple(out), s.times(a, s.lift(w[:3, :4]))
            self.same("linear is wrong", "its pieces are not ⊗", sides)
        for n in (3, -5) if s.size(a) != 1.0 else ():  # size 1.0 means it cannot be scaled
            b, moved = tuple(part.flip(0) for part in a), s.scale(a, n)
            for sides in (
                (s.scale(s.plus(a, b), n), s.plus(moved, s.scale(b, n))),
                (s.scale(s.times(a, b), n), s.times(moved, b)),
                (s.scale(moved, -n), a),
            ):
                self.same("scale is wrong", "it does not go through ⊕ and ⊗ and back", sides)

    def draw(self, *shape: int) -> Tensor:
        """Random derivatives: integers, signed powers of two, and normal floats."""
        x = torch.randn(shape, generator=self.random, dtype=torch.float64)
        kinds = torch.stack([(2 * x).round(), x.sign() * 2 ** (2 * x).round(), x])
        return kinds.gather(0, torch.randint(3, (1, *shape), generator=self.random))[0]

    def tries(self, arity: int, sums: Sequence[tuple[int, int]]) -> Iterator[list[Tensor]]:
        """Batches to test: derivatives of ``arity`` values, each (batch, terms, factors)."""
        numbers = sorted(product(range(len(SIMPLE)), repeat=arity), key=sum)
        yield [torch.tensor([[[SIMPLE[n]]] for n in some]).double() for some in zip(*numbers)]
        for shape in sums:
            yield [self.draw(max(1, self.samples // len(sums)), *shape) for _ in range(arity)]

    def value(self, weights: Tensor) -> Value:
        """``⊕ₜ ⊗ᶠ lift(weights[:, t, f])``."""
        s = self.semiring
        terms = [reduce(s.times, map(s.lift, term.unbind(1))) for term in weights.unbind(1)]
        return reduce(s.plus, terms)

    def same(
        self, law: str, says: str, sides: tuple[Value, Value], weights: Sequence[Tensor] = ()
    ) -> None:
        """Raise if the sides differ, with the first element that does."""
        x, y = (torch.stack([part.double() for part in side]) for side in sides)
        if x.shape != y.shape:
            raise self.broken(law, f"{says}: shapes {tuple(x.shape[1:])}, {tuple(y.shape[1:])}")
        tolerance = self.rtol * (1 + torch.maximum(x.abs(), y.abs()).nan_to_num(0, 0, 0))
        different = ~((x == y) | ((x - y).abs() <= tolerance)).all(0)  # NaN is never right
        if bool(different.any()):
            n = int(different.reshape(-1).nonzero()[0])
            numbers = (z.reshape(len(z), -1)[:, n].tolist() for z in (x, y))
            found = " and ".join(", ".join(f"{number:g}" for number in some) for some in numbers)
            made = [f"{name} = {_text(w[n])}" for name, w in zip("abc", weights)]
            raise self.broken(law, f"{says}: {found}" + " for " * bool(made) + ", ".join(made))

    def broken(self, law: str, why: str) -> LawBroken:
        return LawBroken(f"{self.semiring.name}: {law}: {why}", law)


def _text(weights: Tensor) -> str:
    return " ⊕ ".join(" ⊗ ".join(f"lift({w:g})" for w in term) for term in weights.tolist())


def enumerate_paths(
    loss: Tensor,
    *,
    names: Mapping[str, Tensor] | None = None,
    limit: int = 10_000,
    zeros: bool = False,
) -> Paths:
    """All paths of a small graph from every leaf element to the loss, with their weights.

    The sum of the weights of an element's paths is its gradient: back-propagation without dynamic
    programming, for teaching and for checks. Their number grows exponentially.

    Args:
        loss: Loss whose graph is still there: before ``loss.backward()``, or after it with
            ``retain_graph=True``.
        names: ``{name: tensor}`` for leaves; others are called leaf0, leaf1, ...
        limit: The most paths; more raise an error.
        zeros: Whether paths of weight 0 are listed, too.

    Returns:
        All paths; ``total()`` adds their weights up.

    >>> import torch, gradtrace.testing
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> paths = gradtrace.testing.enumerate_paths(x * x, names={"x": x})
    >>> [path.weight for path in paths], paths.total()
    ([3.0, 3.0], 6.0)
    """
    from gradtrace.session import Session  # imports PyTorch's graph, which semirings do without

    trace = Session(names).trace(loss)
    return isolated()(every_path)(trace, limit, zeros)
