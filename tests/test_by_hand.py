"""Answers worked out by hand: closed forms of small networks, to nine digits.

Every derivation is in the docstring above its numbers and is computed from there with plain
arithmetic: no autograd, no gradtrace. A *way* is a path written as (operator, element, derivative)
for each vertex it visits, the derivative being that of the next vertex by this one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
from arguments import arguments
from arguments import rows as rows_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.semirings import ABS, COUNT, ENTROPY, EXTREMES, MAX, SUM, TopK

RULES = ("greedy", "viterbi")
TOP = TopK(3)
Way = list[tuple[str, tuple[int, ...], float]]
Weights = Mapping[tuple[int, ...], Sequence[float]]  # of all paths, by element


def real(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def near(wanted: Any) -> Any:
    return pytest.approx(wanted, rel=1e-9, abs=1e-13)


def tanh_slope(y: float) -> float:
    """The derivative of tanh where its value is y."""
    return 1 - y * y


# What semirings say of a list of weights ---------------------------------------------------------


def statistics(weights: Sequence[float]) -> dict[Any, tuple[float, ...]]:
    """Each semiring's value of paths with these weights, straight from its definition."""
    sizes = sorted((abs(w) for w in weights if w), reverse=True)
    return {
        SUM: (math.fsum(weights),),
        ABS: (math.fsum(sizes),),
        MAX: ((*sizes, 0.0)[0],),
        COUNT: (float(len(sizes)),),
        ENTROPY: (math.fsum(sizes), -math.fsum(s * math.log(s) for s in sizes)),
        EXTREMES: (max([0.0, *weights]), min([0.0, *weights])),
        TOP: (*sizes, 0.0, 0.0, 0.0)[:3],
    }


def assert_semirings(backward: Callable[[Any], Any], name: str, weights: Weights) -> None:
    """Every semiring gives what the list of an element's weights says, for every element."""
    wanted = {index: statistics(some) for index, some in weights.items()}
    for semiring in (SUM, ABS, MAX, COUNT, ENTROPY, EXTREMES, TOP):
        value = backward(semiring)[name]
        parts = value if isinstance(value, tuple) else (value,)
        assert math.prod(parts[0].shape) == len(weights)
        for index, each in wanted.items():
            found = tuple(float(part[index]) for part in parts)
            assert found == near(each[semiring]), (semiring.name, name, index)
    value = backward(ENTROPY)[name]
    for index, some in weights.items():
        sizes = [abs(w) for w in some if w]
        mass = math.fsum(sizes)
        spread = -math.fsum(s / mass * math.log(s / mass) for s in sizes)
        assert float(ENTROPY.entropy(value)[index]) == near(spread)


def assert_way(path: Any, way: Way) -> None:
    """The path visits these vertices, and each derivative is as worked out."""
    assert [(s.operator, s.index) for s in path.steps] == [(o, at) for o, at, _ in way]
    assert [s.derivative for s in path.steps] == near([d for *_, d in way])
    assert path.weight == near(math.prod(d for *_, d in way))
    assert path.index == way[0][1]


def largest(items: Sequence[Any], size: Callable[[Any], float]) -> Any:
    """The item of the largest |size|; the first of equals; none if all are 0."""
    found = max(items, key=lambda item: abs(size(item)))
    return found if size(found) else None


# A tanh network ----------------------------------------------------------------------------------


class TanhNet(nn.Module):
    """2-3-2."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 3, dtype=torch.float64)
        self.squash = nn.Tanh()
        self.out = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.squash(self.hidden(x)))


class Tanh232:
    """``L = Σ_bk (y_bk − t_bk)²``, ``y = V·h + c``, ``h = tanh(a)``, ``a = U·x + d``,
    for two samples b.

    With ``e_bk = 2·(y_bk − t_bk)`` and ``s_bj = 1 − h_bj²`` the paths are

        U[j,i]: x_bi · s_bj · V_kj · e_bk     for each sample b and output k: 4
        d[j]:    1   · s_bj · V_kj · e_bk     4
        x[b,i]: U_ji · s_bj · V_kj · e_bk     for each hidden unit j and output k: 6
        V[k,j]: h_bj · e_bk                   for each b: 2
        c[k]:    1   · e_bk                   2

    The gradient at ``h_bj`` is ``Σ_k V_kj·e_bk``, so greedy chooses b (or j) by that sum and only
    then k, where viterbi chooses both at once; where the two outputs pull ``h_bj`` in opposite
    directions these differ.
    """

    U = ((0.8, -0.4), (-0.6, 0.9), (0.3, 0.7))
    d = (0.1, -0.2, 0.05)
    V = ((0.9, -0.7, 0.4), (-0.8, 0.5, 1.1))
    c = (0.2, -0.1)
    x = ((1.0, -0.8), (0.7, 0.9))
    t = ((-0.9, -3.5), (1.1, 0.1))

    def __init__(self) -> None:
        samples, units, outputs = range(2), range(3), range(2)
        a = [
            [self.d[j] + sum(self.U[j][i] * self.x[b][i] for i in range(2)) for j in units]
            for b in samples
        ]
        self.h = [[math.tanh(value) for value in row] for row in a]
        y = [
            [self.c[k] + sum(self.V[k][j] * self.h[b][j] for j in units) for k in outputs]
            for b in samples
        ]
        self.loss = sum((y[b][k] - self.t[b][k]) ** 2 for b in samples for k in outputs)
        self.e = [[2 * (y[b][k] - self.t[b][k]) for k in outputs] for b in samples]
        self.s = [[1 - value * value for value in row] for row in self.h]

    def up(self, b: int, j: int, k: int) -> float:
        """From ``a_bj`` by output k to the loss."""
        return self.s[b][j] * self.V[k][j] * self.e[b][k]

    def at(self, b: int, j: int) -> float:
        """The gradient at ``a_bj``."""
        return self.up(b, j, 0) + self.up(b, j, 1)

    def end(self, b: int, k: int) -> Way:
        """From output k on."""
        return [
            ("AddmmBackward0", (b, k), 1.0),
            ("SubBackward0", (b, k), self.e[b][k]),
            ("PowBackward0", (b, k), 1.0),
            ("SumBackward0", (), 1.0),
        ]

    def middle(self, b: int, j: int, k: int) -> Way:
        """From hidden unit j by output k on."""
        unit = [("AddmmBackward0", (b, j), self.s[b][j]), ("TanhBackward0", (b, j), self.V[k][j])]
        return [*unit, *self.end(b, k)]

    def choose(self, rule: str, firsts: Sequence[tuple[int, int]], w: Callable[..., float]) -> Any:
        """(b, j, k) by a rule, where ``w(b, j)`` is the derivative of ``a_bj`` by the leaf."""
        if rule == "viterbi":
            whole = [(b, j, k) for b, j in firsts for k in range(2)]
            return largest(whole, lambda at: w(*at[:2]) * self.up(*at))
        b, j = largest(firsts, lambda at: w(*at) * self.at(*at))
        return b, j, largest(range(2), lambda k: self.V[k][j] * self.e[b][k])

    def ways(self, rule: str) -> dict[tuple[str, tuple[int, ...]], Way]:
        """The path of every element."""
        found: dict[tuple[str, tuple[int, ...]], Way] = {}
        for j, i in product(range(3), range(2)):
            firsts = [(0, j), (1, j)]
            b, j, k = self.choose(rule, firsts, lambda b, _, i=i: self.x[b][i])
            start: Way = [("leaf", (j, i), 1.0), ("TBackward0", (i, j), self.x[b][i])]
            found["hidden.weight", (j, i)] = start + self.middle(b, j, k)
            b, j, k = self.choose(rule, firsts, lambda *_: 1.0)
            found["hidden.bias", (j,)] = [("leaf", (j,), 1.0), *self.middle(b, j, k)]
        for b, i in product(range(2), range(2)):
            firsts = [(b, j) for j in range(3)]
            b, j, k = self.choose(rule, firsts, lambda _, j, i=i: self.U[j][i])
            found["x", (b, i)] = [("leaf", (b, i), self.U[j][i]), *self.middle(b, j, k)]
        for k in range(2):
            for j in range(3):
                b = largest(range(2), lambda b, j=j, k=k: self.h[b][j] * self.e[b][k])
                start = [("leaf", (k, j), 1.0), ("TBackward0", (j, k), self.h[b][j])]
                found["out.weight", (k, j)] = start + self.end(b, k)
            b = largest(range(2), lambda b, k=k: self.e[b][k])
            found["out.bias", (k,)] = [("leaf", (k,), 1.0), *self.end(b, k)]
        return found

    def weights(self) -> dict[str, Weights]:
        """All paths of every element."""
        both, units = (0, 1), (0, 1, 2)
        return {
            "hidden.weight": {
                (j, i): [self.x[b][i] * self.up(b, j, k) for b in both for k in both]
                for j in units
                for i in both
            },
            "hidden.bias": {(j,): [self.up(b, j, k) for b in both for k in both] for j in units},
            "x": {
                (b, i): [self.U[j][i] * self.up(b, j, k) for j in units for k in both]
                for b in both
                for i in both
            },
            "out.weight": {
                (k, j): [self.h[b][j] * self.e[b][k] for b in both] for k in both for j in units
            },
            "out.bias": {(k,): [self.e[b][k] for b in both] for k in both},
        }


@pytest.fixture(scope="module")
def tanh_net() -> tuple[Any, Tensor]:
    """The same network in PyTorch."""
    hand, net = Tanh232, TanhNet()
    net.load_state_dict(
        {
            "hidden.weight": real(hand.U),
            "hidden.bias": real(hand.d),
            "out.weight": real(hand.V),
            "out.bias": real(hand.c),
        }
    )
    x = real(hand.x).requires_grad_()
    with gt.watch(net) as watch:
        loss = ((net(x) - real(hand.t)) ** 2).sum()
    watch.name_table.name(x, "x")
    return watch, loss


def test_tanh_network_forward(tanh_net: Any) -> None:
    assert tanh_net[1].item() == near(Tanh232().loss)


@pytest.mark.parametrize("name", Tanh232().weights())
def test_tanh_network_semirings(tanh_net: Any, name: str) -> None:
    watch, loss = tanh_net
    weights = Tanh232().weights()[name]
    assert_semirings(lambda semiring: watch.backward(loss, semiring), name, weights)


@pytest.mark.parametrize("rule", RULES)
def test_tanh_network_paths(tanh_net: Any, rule: str) -> None:
    watch, loss = tanh_net
    trace = watch.trace(loss, rule=rule)
    for (name, index), way in Tanh232().ways(rule).items():
        path = trace.path(name, index)
        assert_way(path, way)
        hidden = ["hidden", "squash"] if name in ("hidden.weight", "hidden.bias", "x") else []
        assert path.modules == [*hidden, "out"]
        assert path.gradient == near(math.fsum(Tanh232().weights()[name][index]))


def test_tanh_network_greedy_and_viterbi_differ() -> None:
    """Of U, by hand: in sample 0 both outputs are far off, and pull unit 0 opposite ways."""
    hand = Tanh232()
    greedy, viterbi = hand.ways("greedy"), hand.ways("viterbi")
    differ = [at for at in greedy if greedy[at] != viterbi[at]]
    assert {name for name, _ in differ} == {"hidden.weight", "hidden.bias"}
    for at in differ:
        sizes = [abs(math.prod(d for *_, d in ways[at])) for ways in (greedy, viterbi)]
        assert sizes[0] < sizes[1]


@pytest.mark.parametrize("rule", RULES)
def test_tanh_network_influence(tanh_net: Any, rule: str) -> None:
    """Every path from hidden (9 elements) and x (4) goes through squash and out, which owns 8.

    ``hidden`` could only be passed by x. No branch, so shares are 1 by count and by gradient.
    """
    watch, loss = tanh_net
    table = watch.trace(loss, rule=rule).influence()
    found = {row.name: (row.through, row.eligible, row.own) for row in table}
    assert found == {"hidden": (4, 4, 9), "squash": (13, 13, 0), "out": (13, 13, 8)}
    assert table.shares == {"hidden": 1, "squash": 1, "out": 1}
    assert table.column("weighted") == [1, 1, 1]


# Recurrent networks, unrolled --------------------------------------------------------------------


def scalar_rnn(w: float, u: float, first: float, xs: Sequence[float]) -> Any:
    """``h_t = tanh(w·h_{t−1} + u·x_t)``; every use of w and u is a labelled slice of its own."""
    leaves = {"w": real(w), "u": real(u), "first": real(first)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    steps = len(xs)
    recur = gt.label(leaves["w"].expand(steps), 0, "recur")
    read = gt.label(leaves["u"] * real(xs), 0, "read")
    h = leaves["first"]
    for t in range(steps):
        h = torch.tanh(recur[t] * h + read[t])
    return h, leaves


def scalar_rnn_paths(
    w: float, u: float, first: float, xs: Sequence[float]
) -> dict[str, list[float]]:
    """With ``s_t = 1 − h_t²`` and T steps, back from ``h_T`` to step t the product is

        ``P_t = s_t · Π_{r=t+1..T} w·s_r``,

    and the paths of w and u, one for each time step, and of the first state weigh

        ``w: h_{t−1}·P_t``,  ``u: x_t·P_t``,  ``h_0: w·P_1``.
    """
    h = [first]
    for x in xs:
        h.append(math.tanh(w * h[-1] + u * x))
    s = [1 - value * value for value in h[1:]]
    p = [s[t] * math.prod(w * s[r] for r in range(t + 1, len(xs))) for t in range(len(xs))]
    return {
        "w": [h[t] * p[t] for t in range(len(xs))],
        "u": [xs[t] * p[t] for t in range(len(xs))],
        "first": [w * p[0]],
    }


RNNS = {  # w, u, h_0, x_1..x_5, and the step that carries w and u, as can be seen by thinking
    # each step back costs a factor below 0.5, so the last step wins ...
    "forgets": ((0.5, 1.0, 0.9, (0.3, 0.4, 0.2, 0.5, 0.3)), 4, 4),
    # ... unless another read far more, or multiplied a far larger state
    "shock": ((0.7, 1.0, 0.4, (0.1, 0.9, 0.05, -0.05, 0.02)), 3, 1),
    # a step back gains a factor of 1.5·s_t, so u is carried by the first; for w that factor makes
    # up for nearly all by which the state was smaller, but tanh z > z·(1 − tanh² z): the last
    "amplifies": ((1.5, 0.1, 0.0, (0.2, 0.01, 0.01, 0.01, 0.01)), 4, 0),
    # a negative weight: paths have either sign
    "turns": ((-0.6, 1.0, 0.5, (0.8, 0.1, 0.1, 0.1, 0.1)), 3, 4),
}


@pytest.mark.parametrize("name", RNNS)
def test_scalar_rnn_semirings(name: str) -> None:
    """A step whose state was exactly 0 is no path of w: COUNT is 4 where ``h_0 = 0``."""
    arguments, *_ = RNNS[name]
    loss, leaves = scalar_rnn(*arguments)
    for leaf, weights in scalar_rnn_paths(*arguments).items():
        back = lambda semiring: gt.backward(loss, semiring, names=leaves)  # noqa: E731
        assert_semirings(back, leaf, {(): weights})
    assert int(gt.backward(loss, COUNT, names=leaves)["w"]) == 5 - (arguments[2] == 0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", RNNS)
def test_scalar_rnn_carrier(name: str, rule: str) -> None:
    """The gradient at slice t is one path's, so both rules choose the largest of five numbers."""
    arguments, *wanted = RNNS[name]
    loss, leaves = scalar_rnn(*arguments)
    trace = gt.trace(loss, rule=rule, names=leaves)
    for leaf, step in zip("wu", wanted):
        weights = scalar_rnn_paths(*arguments)[leaf]
        assert largest(range(5), lambda t, some=weights: some[t]) == step, weights
        path = trace.path(leaf)
        assert path.weight == near(weights[step])
        assert [s.index for s in path.steps if s.operator == "LabelBackward"] == [(step,)]
        assert path.operators.count("TanhBackward0") == 5 - step
    table = trace.influence("labels")
    through = {row.name: (row.through, row.eligible) for row in table}
    # the first state never passes by a slice of w or u, so only w, or u, could
    assert through == {
        **{f"recur {t}": (int(t == wanted[0]), 1) for t in range(5)},
        **{f"read {t}": (int(t == wanted[1]), 1) for t in range(5)},
    }
    early = {"early": ["label:recur 0", "label:recur 1", "label:read 0", "label:read 1"]}
    (row,) = trace.influence(early)
    assert (row.through, row.eligible) == (sum(t < 2 for t in wanted), 2)


class PairRnn:
    """``h_t = tanh(W·h_{t−1} + U·x_t)``, two units, three steps, ``L = c·h_3``; ``h_0`` is given.

    With ``s_t[i] = 1 − h_t[i]²`` a path from ``W[i,j]`` as used at step t starts at unit
    ``i_t = i`` and visits units ``i_{t+1}, ..., i_3``:

        ``h_{t−1}[j] · s_t[i] · Π_{r=t+1..3} W[i_r, i_{r−1}]·s_r[i_r] · c[i_3]``

    so 4 + 2 + 1 = 7 paths. The gradient at ``h_t[i]`` is ``G_3 = c``,
    ``G_t[i] = Σ_k W[k,i]·s_{t+1}[k]·G_{t+1}[k]``. Greedy chooses the step by
    ``|h_{t−1}[j]·s_t[i]·G_t[i]|`` and then each next unit k by ``|W[k,i]·s_{t+1}[k]·G_{t+1}[k]|``.
    """

    W = ((1.4, 1.2), (1.1, 1.3))
    U = ((0.3, -0.2), (0.1, 0.25))
    first = (0.3, -0.2)
    xs = ((0.5, -0.4), (-0.3, 0.2), (0.1, 0.6))
    c = (1.0, -0.8)

    def __init__(self) -> None:
        self.h = [list(self.first)]
        for x in self.xs:
            row = [
                math.tanh(sum(self.W[i][j] * self.h[-1][j] + self.U[i][j] * x[j] for j in range(2)))
                for i in range(2)
            ]
            self.h.append(row)
        self.s = [[1 - value * value for value in row] for row in self.h]
        self.G = [[0.0, 0.0] for _ in range(4)]
        self.G[3] = list(self.c)
        for t in (2, 1, 0):
            self.G[t] = [
                sum(self.W[k][i] * self.s[t + 1][k] * self.G[t + 1][k] for k in range(2))
                for i in range(2)
            ]

    def weight(self, j: int, t: int, units: Sequence[int]) -> float:
        """Of the path that uses W at step t and visits these units from there on."""
        total = self.h[t - 1][j] * self.s[t][units[0]] * self.c[units[-1]]
        for r, (before, unit) in enumerate(pairwise(units), t + 1):
            total *= self.W[unit][before] * self.s[r][unit]
        return total

    def every(self, i: int) -> list[tuple[int, tuple[int, ...]]]:
        """All (step, units)."""
        return [(t, (i, *rest)) for t in (1, 2, 3) for rest in product(range(2), repeat=3 - t)]

    def chosen(self, rule: str, i: int, j: int) -> tuple[int, tuple[int, ...]]:
        """(step, units) by a rule."""
        if rule == "viterbi":
            found: tuple[int, tuple[int, ...]] = largest(
                self.every(i), lambda at: self.weight(j, *at)
            )
            return found
        start = largest((1, 2, 3), lambda t: self.h[t - 1][j] * self.s[t][i] * self.G[t][i])
        units = [i]
        for t in range(start + 1, 4):
            here = units[-1]
            units.append(
                largest(range(2), lambda k, t=t, i=here: self.W[k][i] * self.s[t][k] * self.G[t][k])
            )
        return start, tuple(units)


@pytest.fixture(scope="module")
def pair_rnn() -> tuple[Tensor, dict[str, Tensor]]:
    hand = PairRnn
    w, u = real(hand.W).requires_grad_(), real(hand.U).requires_grad_()
    used = gt.label(w.expand(3, 2, 2), 0, ["one", "two", "three"])
    h = real(hand.first)
    for t in range(3):
        h = torch.tanh(used[t] @ h + u @ real(hand.xs[t]))
    return (real(hand.c) * h).sum(), {"w": w, "u": u}


def test_pair_rnn_semirings(pair_rnn: Any) -> None:
    loss, leaves = pair_rnn
    hand = PairRnn()
    weights = {
        (i, j): [hand.weight(j, *at) for at in hand.every(i)] for i in range(2) for j in range(2)
    }
    assert all(len(some) == 7 for some in weights.values())
    assert_semirings(lambda semiring: gt.backward(loss, semiring, names=leaves), "w", weights)


@pytest.mark.parametrize("rule", RULES)
def test_pair_rnn_carriers(pair_rnn: Any, rule: str) -> None:
    loss, leaves = pair_rnn
    hand = PairRnn()
    trace = gt.trace(loss, rule=rule, names=leaves)
    steps = []
    for i, j in product(range(2), range(2)):
        step, units = hand.chosen(rule, i, j)
        path = trace.path("w", (i, j))
        assert path.weight == near(hand.weight(j, step, units))
        assert [s.index for s in path.steps if s.operator == "LabelBackward"] == [(step - 1, i, j)]
        seen = [s.index for s in path.steps if s.operator == "TanhBackward0"]
        assert seen == [(unit,) for unit in units]
        steps.append(step)
    table = trace.influence("labels")
    names = ("one", "two", "three")
    assert table.shares == {name: steps.count(n) / 4 for n, name in enumerate(names, 1)}


def test_pair_rnn_rules_differ() -> None:
    """Both units hand back gradient of opposite signs, as c has, to each earlier state; so what is
    left of it there is small, and greedy does not go back where the single path is large.
    """
    hand = PairRnn()
    both = [[hand.chosen(rule, i, j) for i in range(2) for j in range(2)] for rule in RULES]
    assert [step for step, _ in both[0]] == [3, 3, 1, 3]
    assert [step for step, _ in both[1]] == [2, 3, 1, 1]


# A residual chain --------------------------------------------------------------------------------


class Branch(nn.Module):
    """``w·tanh(x)``."""

    def __init__(self, w: Sequence[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(real(w))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * torch.tanh(x)


class Residual(nn.Module):
    """``x + branch(x)``."""

    def __init__(self, w: Sequence[float]) -> None:
        super().__init__()
        self.branch = Branch(w)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Chain:
    """``x_{l+1} = x_l + w_l·tanh(x_l)``, six layers, elementwise; ``L = Σ_e c_e·x_6[e]``.

    The derivative through branch l is ``f_l = w_l·(1 − tanh² x_l)``, through the skip it is 1. So a
    path from ``x_0`` is a set S of layers whose branch it takes and weighs ``c·Π_{l∈S} f_l``: 2⁶
    paths, which add up to ``c·Π (1 + f_l)`` and have ``ABS = |c|·Π (1 + |f_l|)`` and
    ``MAX = |c|·Π max(1, |f_l|)``. From ``w_l`` it is ``tanh x_l`` and a set of later layers:
    2^(5−l). Both rules take branch l where ``|f_l| > 1``: skip and branch share what comes after.
    """

    layers = 6

    def __init__(
        self, x: Sequence[float], w: Sequence[Sequence[float]], c: Sequence[float]
    ) -> None:
        self.x0, self.w, self.c = x, w, c
        self.size = len(x)
        xs = [list(x)]
        for row in w:
            xs.append([a + b * math.tanh(a) for a, b in zip(xs[-1], row)])
        self.tanh = [[math.tanh(a) for a in row] for row in xs]
        self.f = [[b * (1 - t * t) for b, t in zip(row, self.tanh[n])] for n, row in enumerate(w)]

    def weights(self, e: int, start: int) -> list[float]:
        """Of all paths from ``x_start[e]``."""
        f = [self.f[n][e] for n in range(start, self.layers)]
        sets = [s for k in range(len(f) + 1) for s in combinations(f, k)]
        return [self.c[e] * math.prod(s) for s in sets]

    def leaves(self) -> dict[str, Weights]:
        """All paths of every leaf element."""
        found: dict[str, Weights] = {
            f"{n}.branch.w": {
                (e,): [self.tanh[n][e] * v for v in self.weights(e, n + 1)]
                for e in range(self.size)
            }
            for n in range(self.layers)
        }
        return {"x": {(e,): self.weights(e, 0) for e in range(self.size)}, **found}

    def gradient(self, e: int, start: int) -> float:
        """At ``x_start[e]``."""
        return self.c[e] * math.prod(1 + self.f[n][e] for n in range(start, self.layers))

    def torch(self) -> tuple[Any, Tensor]:
        """The same in PyTorch, watched."""
        net = nn.Sequential(*(Residual(row) for row in self.w))
        x = real(self.x0).requires_grad_()
        with gt.watch(net) as watch:
            loss = (net(x) * real(self.c)).sum()
        watch.name_table.name(x, "x")
        return watch, loss


CALM = Chain((0.4,), [(0.5,), (-0.7,), (0.3,), (0.6,), (-0.4,), (0.8,)], (1.0,))
"""Every ``|f_l| < 1``."""

MIXED = Chain(  # element 0 skips all; 1 takes branch 3; 2 takes 0, 1; 3 takes 5, and c is negative
    (0.4, 0.2, 0.1, 0.3),
    [
        (0.5, 0.1, 1.5, 0.2),
        (-0.7, 0.2, -3.0, -0.3),
        (0.3, -0.1, 0.1, 0.1),
        (0.6, 1.9, 0.2, 0.2),
        (-0.4, 0.1, -0.3, 0.1),
        (0.8, 0.3, 0.4, -2.5),
    ],
    (1.0, 2.0, 0.5, -1.5),
)
TAKEN = {1: [3], 2: [0, 1], 3: [5]}


def test_mixed_chain_is_what_it_says() -> None:
    for e in range(4):
        assert [n for n in range(6) if abs(MIXED.f[n][e]) > 1] == TAKEN.get(e, [])


@pytest.mark.parametrize("chain", [CALM, MIXED], ids=["calm", "mixed"])
def test_residual_chain_semirings(chain: Chain) -> None:
    watch, loss = chain.torch()
    for name, weights in chain.leaves().items():
        assert_semirings(lambda semiring: watch.backward(loss, semiring), name, weights)
    count, mass, most = (watch.backward(loss, s)["x"] for s in (COUNT, ABS, MAX))
    for e in range(chain.size):
        f = [abs(chain.f[n][e]) for n in range(6)]
        assert int(count[e]) == 2**6
        assert float(mass[e]) == near(abs(chain.c[e]) * math.prod(1 + v for v in f))
        assert float(most[e]) == near(abs(chain.c[e]) * math.prod(max(1, v) for v in f))
        assert float(watch.backward(loss)["x"][e]) == near(chain.gradient(e, 0))
    for n in range(6):
        assert watch.backward(loss, COUNT)[f"{n}.branch.w"].tolist() == [2 ** (5 - n)] * chain.size


@pytest.mark.parametrize("rule", RULES)
def test_residual_chain_largest_is_all_skip(rule: str) -> None:
    watch, loss = CALM.torch()
    trace = watch.trace(loss, rule=rule)
    path = trace.path("x", 0)
    adds: Way = [("AddBackward0", (0,), 1.0)] * 6
    end: Way = [("MulBackward0", (0,), 1.0), ("SumBackward0", (), 1.0)]
    assert_way(path, [("leaf", (0,), 1.0), *adds, *end])
    assert path.modules == [str(n) for n in range(6)]
    shares = [1 / (1 + CALM.f[n][0]) for n in range(6)]  # what the skip brings of all at x_n
    assert [step.share for step in path.steps] == near([*shares, 1, 1, 1])
    for n in range(6):
        path = trace.path(f"{n}.branch.w", 0)
        assert path.modules == [f"{n}.branch", *(str(m) for m in range(n, 6))]
        assert path.weight == near(CALM.tanh[n][0])
    table = trace.influence([f"{n}.branch" for n in range(6)])
    for n, row in enumerate(table):  # those before could: x and w_0 .. w_{n-1}; none does
        assert (row.through, row.eligible, row.own) == (0, n + 1, 1)


@pytest.mark.parametrize("rule", RULES)
def test_residual_chain_influence_of_branches(rule: str) -> None:
    """Of branch n: x and ``w_0 .. w_{n−1}``, four elements each, could; an element e does if
    ``|f_n[e]| > 1``. By gradient, it counts as

        ``|∂L/∂x_0[e]| + Σ_m |tanh x_m[e] · ∂L/∂x_{m+1}[e]|``.
    """
    watch, loss = MIXED.torch()
    table = watch.trace(loss, rule=rule).influence()
    assert {row.name for row in table} == {
        name for n in range(6) for name in (str(n), f"{n}.branch")
    }
    for n in range(6):
        size = [
            abs(MIXED.gradient(e, 0))
            + sum(abs(MIXED.tanh[m][e] * MIXED.gradient(e, m + 1)) for m in range(n))
            for e in range(4)
        ]
        takers = [e for e, layers in TAKEN.items() if n in layers]
        row = table[f"{n}.branch"]
        assert (row.through, row.eligible) == (len(takers) * (n + 1), 4 * (n + 1))
        assert row.weighted == near(sum(size[e] for e in takers) / sum(size))
        assert (row.own, row.unreached) == (4, 0)
        whole = table[str(n)]  # the sum is in the block: every path passes by
        assert (whole.through, whole.eligible) == (4 * (n + 1), 4 * (n + 1))


@pytest.mark.parametrize("rule", RULES)
def test_residual_chain_arguments(rule: str) -> None:
    """Which argument of sum n: 0 is the skip, 1 the branch, by which ``w_n`` comes too."""
    watch, loss = MIXED.torch()
    trace = watch.trace(loss, rule=rule)
    table = trace.influence(arguments(trace))
    assert len(table) == 12
    for n in range(6):
        takers = sum(n in layers for layers in TAKEN.values())
        skip = table[f"{n}.add[0] from {n - 1 if n else 'x'}"]
        branch = table[f"{n}.add[1] from {n}.branch"]
        assert (skip.through, skip.eligible) == ((4 - takers) * (n + 1), 4 * (n + 1))
        assert (branch.through, branch.eligible) == (takers * (n + 1) + 4, 4 * (n + 2))
    picked = trace.influence(arguments(trace, {"skips": "*[[]0] from *"}))
    (row,) = picked
    # w_5 comes to no skip, and w_4[3] goes by branch 4 and branch 5; all others, by a skip or more
    assert (row.through, row.eligible) == (23, 24)


# One operator, and a fork behind it --------------------------------------------------------------

Index = tuple[int, ...]
Entries = dict[Index, list[tuple[Index, float]]]  # leaf element: output elements, with derivatives


def numbers(phase: float, *shape: int) -> dict[Index, float]:
    """A number for each element, no two alike."""
    return {index: math.sin(phase + 1.9 * n) for n, index in enumerate(product(*map(range, shape)))}


def filled(values: Mapping[Index, float], *shape: int) -> Tensor:
    return real([values[index] for index in product(*map(range, shape))]).reshape(shape)


class Operator:
    """An operator with known derivatives, and ``L = (Σ a·y + Σ b·y) + Σ c·y`` of its output y.

    From ``y_j`` three paths lead on, of weights ``a_j``, ``b_j`` and ``c_j``, so the gradient there
    is their sum ``g_j``. A leaf element with derivatives ``J_j`` has the paths ``J_j·a_j``,
    ``J_j·b_j``, ``J_j·c_j``; viterbi takes the largest of all, greedy the j of largest
    ``|J_j·g_j|`` and then the largest of a, b, c.
    """

    name: str
    out: Index

    def leaves(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def apply(self, leaves: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def entries(self) -> dict[str, Entries]:
        raise NotImplementedError

    def fork(self) -> tuple[dict[Index, float], ...]:
        """a, b and c: all 0 at the first element; at the last they cancel out."""
        sides = tuple(numbers(phase, *self.out) for phase in (0.3, 0.8, 2.9))
        first, last = min(sides[0]), max(sides[0])
        for side, value in zip(sides, (0.5, 0.25, -0.75)):
            side[first], side[last] = 0.0, value
        return sides

    def loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: leaf.requires_grad_() for name, leaf in self.leaves().items()}
        y = self.apply(leaves)
        assert tuple(y.shape) == self.out
        a, b, c = (filled(side, *self.out) for side in self.fork())
        return (a * y).sum() + (b * y).sum() + (c * y).sum(), leaves

    def weights(self, name: str) -> Weights:
        return {
            index: [w * side[j] for j, w in row for side in self.fork()]
            for index, row in self.entries()[name].items()
        }

    def chosen(self, rule: str, row: list[tuple[Index, float]]) -> tuple[Index, float, int] | None:
        """(j, J_j, which of a, b, c) by a rule."""
        sides = self.fork()
        whole = [(j, w, n) for j, w in row for n in range(3)]
        if rule == "greedy" and row:
            best = largest(row, lambda at: at[1] * sum(side[at[0]] for side in sides))
            whole = [at for at in whole if at[:2] == best]
        found: tuple[Index, float, int] | None = None
        if whole:
            found = largest(whole, lambda at: at[1] * sides[at[2]][at[0]])
        return found

    def way(self, index: Index, found: tuple[Index, float, int]) -> Way:
        j, w, n = found
        return [
            ("leaf", index, w),
            (self.name, j, self.fork()[n][j]),
            ("MulBackward0", j, 1.0),
            ("SumBackward0", (), 1.0),
            *[("AddBackward0", (), 1.0)] * (1 if n == 2 else 2),
        ]


class Conv1d(Operator):
    """``y[n,o,q] = Σ_ik W[o,i,k]·x[n,i,p]`` with ``p = 2q + 2k − 2``: stride 2, dilation 2, padding
    2, three taps. So ``∂y[n,o,q]/∂W[o,i,k] = x[n,i,p]`` and ``∂y[n,o,q]/∂x[n,i,p] = W[o,i,k]``
    where ``0 ≤ p < 7``; p is even, and no path leads to the odd places of x.
    """

    name = "ConvolutionBackward0"
    out = (2, 3, 4)
    x, w = numbers(0.1, 2, 2, 7), numbers(0.5, 3, 2, 3)

    def leaves(self) -> dict[str, Tensor]:
        return {"x": filled(self.x, 2, 2, 7), "w": filled(self.w, 3, 2, 3)}

    def apply(self, leaves: dict[str, Tensor]) -> Tensor:
        return F.conv1d(leaves["x"], leaves["w"], stride=2, padding=2, dilation=2)

    def entries(self) -> dict[str, Entries]:
        to_x: Entries = {index: [] for index in self.x}
        to_w: Entries = {index: [] for index in self.w}
        for n, o, q in product(range(2), range(3), range(4)):
            for i, k in product(range(2), range(3)):
                p = 2 * q + 2 * k - 2
                if 0 <= p < 7:
                    to_w[o, i, k].append(((n, o, q), self.x[n, i, p]))
                    to_x[n, i, p].append(((n, o, q), self.w[o, i, k]))
        assert all(bool(row) == (index[2] % 2 == 0) for index, row in to_x.items())
        return {"x": to_x, "w": to_w}


class Conv2d(Operator):
    """``y[n,o,q,r] = Σ_km W[o,0,k,m]·x[n,g,p,s]``, two groups of one channel in and two out:
    ``g = o // 2``, ``p = 2q + k − 1``, ``s = r + 2m − 2``: stride (2, 1), padding (1, 2), dilation
    (1, 2), taps (2, 3).
    """

    name = "ConvolutionBackward0"
    out = (2, 4, 3, 4)
    x, w = numbers(0.7, 2, 2, 5, 4), numbers(0.2, 4, 1, 2, 3)

    def leaves(self) -> dict[str, Tensor]:
        return {"x": filled(self.x, 2, 2, 5, 4), "w": filled(self.w, 4, 1, 2, 3)}

    def apply(self, leaves: dict[str, Tensor]) -> Tensor:
        x, w = leaves["x"], leaves["w"]
        return F.conv2d(x, w, stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)

    def entries(self) -> dict[str, Entries]:
        to_x: Entries = {index: [] for index in self.x}
        to_w: Entries = {index: [] for index in self.w}
        for n, o, q, r in product(*map(range, self.out)):
            for k, m in product(range(2), range(3)):
                g, p, s = o // 2, 2 * q + k - 1, r + 2 * m - 2
                if 0 <= p < 5 and 0 <= s < 4:
                    to_w[o, 0, k, m].append(((n, o, q, r), self.x[n, g, p, s]))
                    to_x[n, g, p, s].append(((n, o, q, r), self.w[o, 0, k, m]))
        return {"x": to_x, "w": to_w}


class Softmax(Operator):
    """``y_j = exp x_j / Σ exp x``: ``∂y_j/∂x_i = y_j·(δ_ij − y_i)``, along rows of five."""

    name = "SoftmaxBackward0"
    out = (2, 5)
    x = numbers(0.4, 2, 5)

    def y(self) -> dict[Index, float]:
        powers = {index: math.exp(2 * v) for index, v in self.x.items()}
        return {(r, j): p / sum(powers[r, k] for k in range(5)) for (r, j), p in powers.items()}

    def leaves(self) -> dict[str, Tensor]:
        return {"x": 2 * filled(self.x, 2, 5)}

    def apply(self, leaves: dict[str, Tensor]) -> Tensor:
        return leaves["x"].softmax(1)

    def slope(self, r: int, i: int, j: int) -> float:
        y = self.y()
        return y[r, j] * ((i == j) - y[r, i])

    def entries(self) -> dict[str, Entries]:
        return {
            "x": {
                (r, i): [((r, j), self.slope(r, i, j)) for j in range(5)]
                for r in range(2)
                for i in range(5)
            }
        }


class LogSoftmax(Softmax):
    """``y_j = x_j − log Σ exp x``: ``∂y_j/∂x_i = δ_ij − p_i`` with p the softmax."""

    name = "LogSoftmaxBackward0"

    def apply(self, leaves: dict[str, Tensor]) -> Tensor:
        return leaves["x"].log_softmax(1)

    def slope(self, r: int, i: int, j: int) -> float:
        return (i == j) - self.y()[r, i]


class LayerNorm(Operator):
    """``y_j = γ_j·x̂_j + β_j``, ``x̂ = (x − μ)·s``, ``s = 1/√(σ² + ε)``, over rows of n = 6.

    ``∂x̂_j/∂x_i = s·(δ_ij − 1/n − x̂_i·x̂_j/n)``, so

        ``∂y_j/∂x_i = γ_j · s/n · (n·δ_ij − 1 − x̂_i·x̂_j)``,  ``∂y_j/∂γ_j = x̂_j``,  ``∂y_j/∂β_j = 1``

    with a path for each of the two rows from γ and β.
    """

    name = "NativeLayerNormBackward0"
    out = (2, 6)
    n, eps = 6, 1e-3
    x, gain, bias = numbers(0.6, 2, 6), numbers(0.9, 6), numbers(1.1, 6)

    def leaves(self) -> dict[str, Tensor]:
        return {
            "x": filled(self.x, 2, 6),
            "gain": filled(self.gain, 6),
            "bias": filled(self.bias, 6),
        }

    def apply(self, leaves: dict[str, Tensor]) -> Tensor:
        return F.layer_norm(leaves["x"], (6,), leaves["gain"], leaves["bias"], self.eps)

    def unit(self) -> tuple[dict[Index, float], list[float]]:
        """x̂, and s of each row."""
        found, scales = {}, []
        for r in range(2):
            row = [self.x[r, j] for j in range(6)]
            mean = math.fsum(row) / 6
            scales.append(1 / math.sqrt(math.fsum((v - mean) ** 2 for v in row) / 6 + self.eps))
            found.update({(r, j): (v - mean) * scales[r] for j, v in enumerate(row)})
        return found, scales

    def entries(self) -> dict[str, Entries]:
        hat, s = self.unit()

        def slope(r: int, i: int, j: int) -> float:
            return self.gain[j,] * s[r] / 6 * (6 * (i == j) - 1 - hat[r, i] * hat[r, j])

        return {
            "x": {(r, i): [((r, j), slope(r, i, j)) for j in range(6)] for r, i in self.x},
            "gain": {(j,): [((r, j), hat[r, j]) for r in range(2)] for j in range(6)},
            "bias": {(j,): [((r, j), 1.0) for r in range(2)] for j in range(6)},
        }


class WideLayerNorm(LayerNorm):
    """The same over rows of 200, where the largest is found on a convex hull of points."""

    out = (1, 200)
    x, gain, bias = numbers(0.6, 1, 200), numbers(0.9, 200), numbers(1.1, 200)

    def leaves(self) -> dict[str, Tensor]:
        sides = {"x": (self.x, (1, 200)), "gain": (self.gain, (200,)), "bias": (self.bias, (200,))}
        return {name: filled(values, *shape) for name, (values, shape) in sides.items()}

    def apply(self, leaves: dict[str, Tensor]) -> Tensor:
        return F.layer_norm(leaves["x"], (200,), leaves["gain"], leaves["bias"], self.eps)

    def entries(self) -> dict[str, Entries]:
        row = [self.x[0, j] for j in range(200)]
        mean = math.fsum(row) / 200
        s = 1 / math.sqrt(math.fsum((v - mean) ** 2 for v in row) / 200 + self.eps)
        hat = [(v - mean) * s for v in row]
        return {
            "x": {
                (0, i): [
                    (
                        (0, j),
                        self.gain[j,] * s / 200 * (200 * (i == j) - 1 - hat[i] * hat[j]),
                    )
                    for j in range(200)
                ]
                for i in range(0, 200, 7)
            }
        }


OPERATORS: list[Operator] = [Conv1d(), Conv2d(), Softmax(), LogSoftmax(), LayerNorm()]


def called(operator: Operator) -> str:
    return type(operator).__name__


@pytest.mark.parametrize("operator", OPERATORS, ids=called)
def test_operator_semirings(operator: Operator) -> None:
    loss, leaves = operator.loss()
    for name in leaves:
        back = lambda semiring: gt.backward(loss, semiring, names=leaves)  # noqa: E731
        assert_semirings(back, name, operator.weights(name))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("operator", [*OPERATORS, WideLayerNorm()], ids=called)
def test_operator_paths(operator: Operator, rule: str) -> None:
    loss, leaves = operator.loss()
    trace = gt.trace(loss, rule=rule, names=leaves)
    for name, rows in operator.entries().items():
        for index, row in rows.items():
            found = operator.chosen(rule, row)
            if found is None:
                with pytest.raises(GradtraceError, match="has no path"):
                    trace.path(name, index)
            else:
                assert_way(trace.path(name, index), operator.way(index, found))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("operator", OPERATORS, ids=called)
def test_operator_influence(operator: Operator, rule: str) -> None:
    """Which side of the fork: the arguments of both sums, counted from what was chosen."""
    loss, leaves = operator.loss()
    trace = gt.trace(loss, rule=rule, names=leaves)
    table = rows_of(trace)
    rows = [row for rows in operator.entries().values() for row in rows.values()]
    found = [at for row in rows if (at := operator.chosen(rule, row))]
    a, b, c = ([n for *_, n in found].count(side) for side in range(3))
    missing = len(rows) - len(found)
    assert [(row.through, row.eligible, row.unreached) for row in table] == [
        (through, len(found), missing) for through in (a + b, c, a, b)
    ]


def test_the_fork_tells_the_rules_apart() -> None:
    for operator in OPERATORS:
        rows = [row for rows in operator.entries().values() for row in rows.values()]
        assert any(
            operator.chosen("greedy", row) != operator.chosen("viterbi", row) for row in rows
        )


def test_odd_places_of_the_convolution_have_no_path() -> None:
    loss, leaves = Conv1d().loss()
    for semiring in (COUNT, MAX, ABS, SUM):
        assert not gt.backward(loss, semiring, names=leaves)["x"][..., 1::2].any()
    trace = gt.trace(loss, names=leaves)
    with pytest.raises(GradtraceError, match=r"x\[0, 1, 3\] has no path"):
        trace.path("x", (0, 1, 3))


# Cross entropy -----------------------------------------------------------------------------------


class CrossEntropy:
    """``L = Σ_b v[t_b]·(−log p_b[t_b]) / Σ_b v[t_b]`` with class weights v; one sample is ignored.

    ``∂L/∂z_bj = v[t_b]/Σv · (p_bj − δ(j, t_b))``: a logit reaches the loss by the target's
    log-probability only, a single path. ``z = h·Wᵀ``, so W[j,k] has a path for each sample that is
    not ignored, ``h_bk·∂L/∂z_bj``, and ``h[b,k]`` one for each class, ``W_jk·∂L/∂z_bj``. What comes
    to ``z_bj`` is one path, so both rules agree.
    """

    h = numbers(0.2, 4, 3)
    w = numbers(0.5, 5, 3)
    v = (1.0, 0.5, 2.0, 1.5, 0.25)
    t = (2, -100, 0, 3)

    def slopes(self) -> dict[Index, float]:
        """∂L/∂z."""
        total = sum(self.v[t] for t in self.t if t >= 0)
        found = {}
        for b, t in enumerate(self.t):
            z = [sum(self.h[b, k] * self.w[j, k] for k in range(3)) for j in range(5)]
            powers = [math.exp(value) for value in z]
            for j in range(5):
                p = powers[j] / sum(powers)
                found[b, j] = self.v[t] / total * (p - (j == t)) if t >= 0 else 0.0
        return found

    def loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {"h": filled(self.h, 4, 3), "w": filled(self.w, 5, 3)}
        for leaf in leaves.values():
            leaf.requires_grad_()
        logits = gt.label(F.linear(leaves["h"], leaves["w"]), 0, "sample")
        loss = F.cross_entropy(logits, torch.tensor(self.t), real(self.v))
        return loss, leaves


def test_cross_entropy_semirings() -> None:
    hand = CrossEntropy()
    loss, leaves = hand.loss()
    slopes = hand.slopes()
    back = lambda semiring: gt.backward(loss, semiring, names=leaves)  # noqa: E731
    w = {(j, k): [hand.h[b, k] * slopes[b, j] for b in range(4)] for j, k in hand.w}
    assert_semirings(back, "w", w)
    assert set(back(COUNT)["w"].flatten().tolist()) == {3.0}
    h = {(b, k): [hand.w[j, k] * slopes[b, j] for j in range(5)] for b, k in hand.h}
    assert_semirings(back, "h", h)


@pytest.mark.parametrize("rule", RULES)
def test_cross_entropy_paths(rule: str) -> None:
    hand = CrossEntropy()
    loss, leaves = hand.loss()
    slopes = hand.slopes()
    trace = gt.trace(loss, rule=rule, names=leaves)
    total = sum(hand.v[t] for t in hand.t if t >= 0)
    carriers = []

    def end(b: int, j: int) -> Way:
        target = hand.t[b]
        slope = -hand.v[target] / total
        return [
            ("LabelBackward", (b, j), slopes[b, j] / slope),
            ("LogSoftmaxBackward0", (b, target), slope),
            ("NllLossBackward0", (), 1.0),
        ]

    for j, k in hand.w:
        b = largest(range(4), lambda b, j=j, k=k: hand.h[b, k] * slopes[b, j])
        way: Way = [("leaf", (j, k), 1.0), ("TBackward0", (k, j), hand.h[b, k])]
        assert_way(trace.path("w", (j, k)), [*way, ("MmBackward0", (b, j), 1.0), *end(b, j)])
        carriers.append(b)
    for b, k in hand.h:
        j = largest(range(5), lambda j, b=b, k=k: hand.w[j, k] * slopes[b, j])
        if j is None:
            with pytest.raises(GradtraceError, match="has no path"):
                trace.path("h", (b, k))
            continue
        way = [("leaf", (b, k), hand.w[j, k]), ("MmBackward0", (b, j), 1.0)]
        assert_way(trace.path("h", (b, k)), [*way, *end(b, j)])
        carriers.append(b)
    table = trace.influence("labels")
    for b in range(4):
        row = table[f"sample {b}"]
        assert (row.through, row.eligible) == (carriers.count(b), 15 + 9)
        assert row.unreached == 3


# Vocabularies: the same in O(n) ------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that is made while it is on."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the compiler is imported, which takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                held = each.untyped_storage().nbytes() // each.element_size()
                self.elements = max(self.elements, each.numel(), held)
        return out


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Largest:
    """A mode that also sees what runs where other modes are switched off."""
    mode = Largest()

    @contextmanager
    def all_but_ours() -> Iterator[None]:
        with _disable_current_modes(), mode:
            yield

    for name, module in list(sys.modules.items()):
        if name.startswith("gradtrace") and hasattr(module, "_disable_current_modes"):
            monkeypatch.setattr(module, "_disable_current_modes", all_but_ours)
    return mode


def test_sizes_sees_a_square(sizes: Largest) -> None:
    x = torch.ones(300, requires_grad=True)
    with sizes:
        y = (x[:, None] * x).sum()
        assert sizes.elements == 300 * 300
        sizes.elements = 0
        gt.trace(y, names={"x": x}).influence("operators")
        assert sizes.elements >= 300 * 300


@pytest.mark.parametrize("rule", RULES)
def test_softmax_over_50_000_classes(rule: str, sizes: Largest) -> None:
    """``L = Σ_j c_j·y_j``, y a softmax: the path from ``x_i`` by ``y_j`` weighs
    ``c_j·y_j·(δ_ij − y_i)``.

    Off the diagonal that is ``y_i`` times ``|c_j·y_j|``, largest for the j that is largest whatever
    i is, call it m. On the diagonal it is ``y_i·(1 − y_i)·|c_i|``. So the path of i goes by m if
    ``|c_m|·y_m > (1 − y_i)·|c_i|``, else by i itself. Here x is 0 but for ``x_7 = log n``, so
    ``y_7 = n/(2n − 1)``, about a half, and all others are ``1/(2n − 1)``; ``c_7 = 1`` and the
    others are 0.9 (own path) or 0.1 (by way of 7), a third of them 0 (by way of 7 too). From 7
    itself: ``y_7·(1 − y_7)`` by itself, ``y_7·0.9/(2n − 1)`` by another.
    """
    n = 50_000
    x = torch.zeros(n)
    x[7] = math.log(n)
    x.requires_grad_()
    c = torch.tensor([0.9, 0.1, 0.0]).repeat(n // 3 + 1)[:n]
    c[7] = 1.0
    with sizes:
        y = gt.label(x.softmax(0), 0, ["seven" if j == 7 else "others" for j in range(n)])
        loss = (y * c).sum()
        trace = gt.trace(loss, rule=rule, names={"x": x})
        table = trace.influence("labels")
        paths = {i: trace.path("x", i) for i in (0, 1, 2, 6, 7, 8, 49_998, 49_999)}
        most = gt.backward(loss, MAX, names={"x": x})["x"]
        count = gt.backward(loss, COUNT, names={"x": x})["x"]
    assert sizes.operations and sizes.elements <= 20 * n
    large, small = n / (2 * n - 1), 1 / (2 * n - 1)
    for i, path in paths.items():
        here = large if i == 7 else small
        j, weight = 7, -here * large
        if i == 7:
            weight = large * (1 - large)
        elif i % 3 == 0:
            j, weight = i, 0.9 * here * (1 - here)
        assert path.operators[:2] == ["SoftmaxBackward0", "LabelBackward"]
        assert path.steps[1].index == (j,)
        assert path.weight == pytest.approx(weight, rel=1e-3)
        assert float(most[i]) == pytest.approx(abs(weight), rel=1e-3)
    own = sum(i % 3 == 0 for i in range(n))
    assert {row.name: row.through for row in table} == {"others": own, "seven": n - own}
    assert {row.eligible for row in table} == {n}
    # every class whose c is not 0 is a path; class 7 (7 % 3 = 1) was one of them anyway
    assert set(count.tolist()) == {float(sum(i % 3 < 2 for i in range(n)))}


@pytest.mark.parametrize("rule", RULES)
def test_cross_entropy_over_50_257_words(rule: str, sizes: Largest) -> None:
    """``L = −Σ_b log p_b[t_b] / B``, logits ``z_bj = Σ_k h_bk·E_jk``.

    The only path from ``z_bj`` weighs ``(p_bj − δ(j, t_b))/B`` and goes by the target's
    log-probability. With ``E = 0`` every ``p = 1/n``, so ``E[j,k]`` has a path for each b,
    ``h_bk·(1/n − δ(j, t_b))/B``: a target's word goes by its own token, any other by the token of
    largest ``|h_bk|``, of equals the first.
    """
    n = 50_257
    words = torch.zeros(n, 2, requires_grad=True)
    h = torch.tensor([[1.0, 3.0], [-2.0, 0.5], [2.0, -0.25]])
    target = [50_256, 11, 40_000]
    with sizes:
        logits = gt.label(h @ words.T, 0, "token")
        loss = F.cross_entropy(logits, torch.tensor(target))
        trace = gt.trace(loss, rule=rule, names={"words": words})
        table = trace.influence("labels")
        asked = [(j, k) for j in (0, 11, 12, 39_999, 40_000, 50_256) for k in (0, 1)]
        paths = {index: trace.path("words", index) for index in asked}
        most = gt.backward(loss, MAX, names={"words": words})["words"]
    assert sizes.operations and sizes.elements <= 20 * n
    for (j, k), path in paths.items():
        b = target.index(j) if j in target else (1, 0)[k]
        weight = float(h[b, k]) * (1 / n - (j in target)) / 3
        assert path.weight == pytest.approx(weight, rel=1e-5)
        assert float(most[j, k]) == pytest.approx(abs(weight), rel=1e-5)
        places = [(s.operator, s.index) for s in path.steps[2:]]
        assert places == [
            ("MmBackward0", (b, j)),
            ("LabelBackward", (b, j)),
            ("LogSoftmaxBackward0", (b, target[b])),
            ("NllLossBackward0", ()),
        ]
    # all but the three targets: column 0 by token 1 (|−2|, before token 2's 2), column 1 by token 0
    assert {row.name: row.through for row in table} == {
        "token 0": n - 3 + 2,
        "token 1": n - 3 + 2,
        "token 2": 2,
    }
