"""Gradient tracing on scalars, from scratch.

Back-propagation says how much gradient reaches a parameter. Gradient tracing says which way it
came. Both are one walk over one graph, and all of it fits in this file. Read it from top to bottom
and run it, with Python alone: every claim is followed by a check, and the first to fail stops it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

say = print if __name__ == "__main__" else len  # len says nothing: silent when imported


def check(claim: str, found: float, wanted: float = True, within: float = 0.0) -> None:
    """Say what was found, or stop if it is not what was wanted, to nine digits or ``within``."""
    if not abs(found - wanted) <= max(within, 1e-9 * abs(wanted)):  # so NaN fails too
        raise AssertionError(f"{claim}: found {found!r}, wanted {wanted!r}")
    say(f"  {claim:<60} {'yes' if found is True else format(found, '.6g')}")


say("1. Scalars that remember")
# A scalar keeps its value and how it was made: an edge for every argument, with the derivative of
# the result by that argument. Once the values are known, this is a mere number.


@dataclass(eq=False, repr=False)  # equal means identical, and a graph is too much to print
class Scalar:
    """A vertex u; ``edges`` are pairs of an argument v and the derivative ``w(u, v) = ∂u/∂v``."""

    value: float
    edges: tuple[tuple[Scalar, float], ...] = ()

    def __add__(self, other: Scalar) -> Scalar:
        return total(self, other)

    def __mul__(self, other: Scalar) -> Scalar:
        a, b = self.value, other.value
        return Scalar(a * b, ((self, b), (other, a)))  # d(ab) = b·da + a·db


def total(*terms: Scalar) -> Scalar:
    """A sum hands gradient to its terms as it is: all derivatives are 1."""
    return Scalar(sum(x.value for x in terms), tuple((x, 1.0) for x in terms))


def unary(f: Callable[[float], float], slope: Callable[[float, float], float]) -> Unary:
    """``y = f(x)`` with ``dy/dx = slope(x, y)``."""
    return lambda x: Scalar(y := f(x.value), ((x, slope(x.value, y)),))


Unary = Callable[[Scalar], Scalar]
exp = unary(math.exp, lambda x, y: y)
sin = unary(math.sin, lambda x, y: math.cos(x))
tanh = unary(math.tanh, lambda x, y: 1 - y * y)
relu = unary(lambda x: max(x, 0.0), lambda x, y: float(x > 0))
inverse = unary(lambda x: 1 / x, lambda x, y: -y * y)


# Going backwards, we visit a scalar after all of its consumers: Kahn's algorithm. It counts edges,
# not vertices (x·x uses x twice), and does not recurse, so graphs may be deep.
def order(root: Scalar) -> list[Scalar]:
    """All that ``root`` was made from, consumers first."""
    uses, found, ready = {root: 0}, [root], [root]
    for u in found:  # both lists grow as we go
        for v, _ in u.edges:
            if v not in uses:
                found.append(v)
            uses[v] = uses.get(v, 0) + 1
    for u in ready:
        for v, _ in u.edges:
            uses[v] -= 1
            if not uses[v]:
                ready.append(v)
    return ready


def gradient(root: Scalar) -> dict[Scalar, float]:
    """Back-propagation: ``g_root = 1``, else ``g_v = Σ w(u, v)·g_u`` over the consumers u of v."""
    g = {root: 1.0}
    for u in order(root):
        for v, w in u.edges:
            g[v] = g.get(v, 0.0) + w * g[u]
    return g


x = Scalar(3.0)
check("gradient of y = x·x at 3: two edges, 3 by each", gradient(y := x * x)[x], 6)
check("gradient of y + y·y: y waits for both, (1 + 2y)·2x", gradient(y + y * y)[x], 114)
root = x
for _ in range(20_000):
    root = total(root)
check("gradient through 20,000 vertices in a row", gradient(root)[x], 1)

say("2. Forward and backward")
# Two functions that every course draws, in numbers of CS231n (cs231n.github.io/optimization-2).
# The slides of EECE454 (lecture 15) have them too; their text keeps a step of descent on the first
# by 2, 2 and 8, so there z = 2 and x + y = 8, say 3 + 5.


def product(x: Scalar, y: Scalar, z: Scalar) -> Scalar:
    """``(x + y)·z``; the gradient is (z, z, x + y)."""
    return (x + y) * z


def neuron(w0: Scalar, x0: Scalar, w1: Scalar, x1: Scalar, w2: Scalar) -> Scalar:
    """``σ(s) = 1 / (1 + exp(-s))`` at ``s = w0·x0 + w1·x1 + w2``; ``σ' = σ·(1 - σ)``."""
    s = w0 * x0 + w1 * x1 + w2
    return inverse(exp(s * Scalar(-1.0)) + Scalar(1.0))


for inputs, wanted in (((-2, 5, -4), (-12, -4.0, -4.0, 3.0)), ((3, 5, 2), (16, 2.0, 2.0, 8.0))):
    leaves = [Scalar(value) for value in inputs]
    root = product(*leaves)
    check(f"(x + y)·z at {inputs}", root.value, wanted[0])
    for v, name, slope in zip(leaves, "xyz", wanted[1:]):
        check(f"  gradient of {name}", gradient(root)[v], slope)

NEURON = (2.0, -1.0, -3.0, -2.0, -3.0)  # w0, x0, w1, x1, w2
leaves = [Scalar(value) for value in NEURON]
g = gradient(u := neuron(*leaves))
for name, value, slope in (  # drawn with two digits, from the result back to w0
    *(("σ(s)", 0.73, 1.00), ("1 + exp(-s)", 1.37, -0.53), ("exp(-s)", 0.37, -0.53)),
    *(("-s", -1.00, -0.20), ("s", 1.00, 0.20), ("w0·x0 + w1·x1", 4.00, 0.20)),
    *(("w0·x0", -2.00, 0.20), ("w0", 2.00, -0.20)),
):
    check(f"neuron, {name}: value", u.value, value, 0.005)
    check(f"neuron, {name}: gradient", g[u], slope, 0.005)
    u = u.edges[0][0] if u.edges else u  # on to the first argument
sigma = 1 / (1 + math.exp(-1))
for v, slope, partner in zip(leaves, (-0.20, 0.39, -0.39, -0.59, 0.20), (-1, 2, -2, -3, 1)):
    check(f"neuron, gradient drawn as {slope:.2f}", g[v], slope, 0.005)
    check("  analytically: σ·(1 - σ)·partner", g[v], sigma * (1 - sigma) * partner)

say("3. A sum over paths")
# Expand g_v = Σ w(u, v)·g_u until only the root is left: the gradient of v is a sum over all paths
# from v to the root, where a path weighs the product of the derivatives along it.


class Path(NamedTuple):
    """Vertices from a leaf to the root, and the product of the derivatives between them."""

    vertices: tuple[Scalar, ...]
    weight: float


def paths(root: Scalar, leaf: Scalar) -> Iterator[Path]:
    """All paths, by going down from the root in every possible way."""
    stack = [Path((root,), 1.0)]
    while stack:
        path = stack.pop()
        if path.vertices[0] is leaf:
            yield path
        for v, w in reversed(path.vertices[0].edges):  # so the first argument comes first
            stack.append(Path((v, *path.vertices), path.weight * w))


# A program with parameters, after CS395T (lecture 2): A = W0·P, B = f0(A, Q), C = W1·B, D = W2·B,
# E = f1(C), F = f2(D), R = f3(E, F). Here f0 and f3 multiply, f1 is sin and f2 is exp.
def program(W0: Scalar, W1: Scalar, W2: Scalar, P: Scalar, Q: Scalar) -> Scalar:
    """``R = sin(W1·B)·exp(W2·B)`` with ``B = W0·P·Q``."""
    B = (W0 * P) * Q
    return sin(W1 * B) * exp(W2 * B)


def ladder(x: Scalar, rungs: int) -> Scalar:
    """``x ← sin(x) + tanh(x)``, again and again: each rung can be taken in two ways."""
    for _ in range(rungs):
        x = sin(x) + tanh(x)
    return x


PROGRAM = (W0, W1, W2, P, Q) = (0.5, 1.5, -0.8, 2.0, 0.7)
leaves = [Scalar(value) for value in PROGRAM]
root, B = program(*leaves), W0 * P * Q
C = math.cos(W1 * B) * math.exp(W2 * B)  # ∂R/∂C, by hand
D = math.sin(W1 * B) * math.exp(W2 * B)  # ∂R/∂D
for v, name, hand in (
    (leaves[0], "W0", [P * Q * W1 * C, P * Q * W2 * D]),  # W0-A-B-C-E-R and W0-A-B-D-F-R
    (leaves[1], "W1", [B * C]),  # W1-C-E-R
    (leaves[2], "W2", [B * D]),  # W2-D-F-R
):
    check(f"paths from {name}", len(list(paths(root, v))), len(hand))
    for path, weight in zip(paths(root, v), hand):
        check(f"  weight of one over {len(path.vertices) - 1} edges", path.weight, weight)
    check("  their sum is the gradient", sum(hand), gradient(root)[v])

# Edges add up, paths multiply: n rungs have 4n edges and 2ⁿ paths. Back-propagation looks at an
# edge once, since g_u is already the sum over all that lies beyond u.
for rungs in (1, 5, 10):
    x = Scalar(0.5)
    root = ladder(x, rungs)
    weights = [path.weight for path in paths(root, x)]
    check(f"a ladder of {rungs}: edges", sum(len(u.edges) for u in order(root)), 4 * rungs)
    check(f"a ladder of {rungs}: paths", len(weights), 2**rungs)
    check("  their sum is the gradient", sum(weights), gradient(root)[x])

say("4. Semirings")
# It may sum that early since a·(b + c) = a·b + a·c. Any ⊕ and ⊗ with this law can take the place
# of + and ×, and the same pass tells something else about the same paths. `lift` says what a
# derivative counts as, and keeps products: lift(a·b) = lift(a) ⊗ lift(b).
T = TypeVar("T")


@dataclass(frozen=True)
class Semiring(Generic[T]):
    """``zero`` is the value of no path, ``one`` that of the path without edges."""

    zero: T
    one: T
    plus: Callable[[T, T], T]
    times: Callable[[T, T], T]
    lift: Callable[[float], T]


SUM = Semiring[float](0.0, 1.0, lambda a, b: a + b, lambda a, b: a * b, lambda w: w)
MAX = Semiring[float](0.0, 1.0, max, lambda a, b: a * b, abs)  # |weight| of the best path
COUNT = Semiring[int](0, 1, lambda a, b: a + b, lambda a, b: a * b, lambda w: int(w != 0))
ENTROPY = Semiring[tuple[float, float]](  # (Σ|π|, Σ|π|·log|π|) over paths of weight π
    (0.0, 0.0),
    (1.0, 0.0),
    lambda a, b: (a[0] + b[0], a[1] + b[1]),
    lambda a, b: (a[0] * b[0], a[0] * b[1] + a[1] * b[0]),  # the product rule
    lambda w: (abs(w), abs(w) * math.log(abs(w)) if w else 0.0),  # 0·log 0 = 0
)


def backward(root: Scalar, semiring: Semiring[T]) -> dict[Scalar, T]:
    """``value_v = ⊕ lift(w(u, v)) ⊗ value_u``: the loop of ``gradient``."""
    values = {root: semiring.one}
    for u in order(root):
        for v, w in u.edges:
            term = semiring.times(semiring.lift(w), values[u])
            values[v] = semiring.plus(values.get(v, semiring.zero), term)
    return values


x, w = Scalar(0.5), Scalar(-0.3)
for name, root in (
    ("a ladder of 6", ladder(x, 6)),
    ("two signs", sin(w * x) * relu(x) + tanh(w * x)),
    ("a dead end", total(relu(x * Scalar(-1.0)), relu(x), x * x)),
):
    weights = [path.weight for path in paths(root, x)]
    sizes = [abs(weight) for weight in weights if weight]
    spread = -sum(p * math.log(p) for p in [size / sum(sizes) for size in sizes])
    mass, moment = backward(root, ENTROPY)[x]  # -Σ p·log p = log mass - moment/mass
    check(f"{name}: SUM", backward(root, SUM)[x], sum(weights))
    check(f"{name}: MAX", backward(root, MAX)[x], max(sizes))
    check(f"{name}: COUNT ({len(weights)} with the dead)", backward(root, COUNT)[x], len(sizes))
    check(f"{name}: ENTROPY", math.log(mass) - moment / mass, spread)
check("a ladder of 60: COUNT, where no list would end", backward(ladder(x, 60), COUNT)[x], 2**60)

say("5. Gradient tracing")
# Let every vertex v point to the consumer u that gave it most; then pointers lead from any leaf to
# the root. What "most" is depends on the values:
#   greedy    |w(u, v)·g_u| with the values g of SUM: the largest term of the true gradient g_v
#   viterbi   |w(u, v)·m_u| with the values m of MAX: the path of the greatest |product|
# (On tensors greedy compares what whole operators hand back, and single edges are the rule edge.)
# Ties go to the consumer met first. A contribution of exactly 0 is none, and a vertex that has
# none has no path. One `>` says both.
Pointers = dict[Scalar, tuple[Scalar, float]]


def trace(root: Scalar, semiring: Semiring[float]) -> Pointers:
    """``t_v = argmax |w(u, v)·value_u|`` over the consumers u of v, and ``w(u, v)`` with it."""
    values, pointers = backward(root, semiring), Pointers()
    largest: dict[Scalar, float] = {}
    for u in order(root):
        for v, w in u.edges:
            if abs(w * values[u]) > largest.get(v, 0.0):
                largest[v], pointers[v] = abs(w * values[u]), (u, w)
    return pointers


def follow(pointers: Pointers, leaf: Scalar) -> Path:
    """From ``leaf`` to the root; a leaf that has no path stays alone."""
    vertices, weight = [leaf], 1.0
    while vertices[-1] in pointers:
        u, w = pointers[vertices[-1]]
        vertices.append(u)
        weight *= w
    return Path(tuple(vertices), weight)


# Where the rules differ: from x to the root there is 3 by way of a, and 2 + 2 by way of b.
#   x ─3─ a ─1─ root           paths 3, 2, 2: gradient 7. At b, g = 2 + 2 and m = max(2, 2)
#   x ─1─ b ─2─ c ─1─ root     greedy at x:  |3·1| < |1·4|, to b; there c and d tie: to c
#         b ─2─ d ─1─ root     viterbi at x: |3·1| > |1·2|, to a
x = Scalar(1.0)
a, b = x * Scalar(3.0), total(x)
root = total(a, c := b * Scalar(2.0), b * Scalar(2.0))
easy, best = follow(trace(root, SUM), x), follow(trace(root, MAX), x)
check("gradient of x", gradient(root)[x], 7)
check("greedy finds a path of weight", easy.weight, 2)
check("  it is x-b-c-root: the tie goes to the first", easy.vertices == (x, b, c, root))
check("viterbi finds the heaviest", best.weight, max(path.weight for path in paths(root, x)))
check("  it is x-a-root", best.vertices == (x, a, root))
root = total(b, b * Scalar(-1.0))  # contributions 1 and -1 to b: its gradient is 0
check("where gradients cancel, greedy has no path", x not in trace(root, SUM))
check("  viterbi has one, of weight", abs(follow(trace(root, MAX), x).weight), 1)
check("behind a dead relu neither has", trace(relu(x * Scalar(-1.0)), MAX) == {})

say("6. Sharing, skips, loops, influence")  # no new idea is needed: these are graphs too


def loop(h: Scalar, w: Scalar, u: Scalar, steps: int = 200) -> Scalar:
    """A recurrent network, unrolled: ``h ← tanh(w·h + u)``."""
    for _ in range(steps):
        h = tanh(w * h + u)
    return h


x, w = Scalar(1.0), Scalar(0.5)
root = tanh(w * tanh(w * x))
low, high = math.tanh(0.5), math.tanh(0.5 * math.tanh(0.5))
outer, inner = low * (1 - high**2), 0.5 * (1 - low**2) * (1 - high**2)  # by hand, use by use
check("a shared weight: its gradient sums over its uses", gradient(root)[w], outer + inner)
check("  the outer use carried most", follow(trace(root, SUM), w).weight, outer)

for slope in (0.5, 3.0):
    x, w, branch = Scalar(0.1), Scalar(slope), slope * (1 - math.tanh(slope / 10) ** 2)
    path = follow(trace(x + tanh(w * x), SUM), x)
    check(f"a skip of 1, a branch of {branch:.2f}: the path weighs", path.weight, max(1, branch))
    check("  its edges: skip 1, branch 3", len(path.vertices) - 1, 3 if branch > 1 else 1)

for steps in (1, 10, 50, 200):
    h, w, state, chain = Scalar(0.5), Scalar(0.9), 0.5, 1.0
    root = loop(h, w, Scalar(0.2), steps)
    for _ in range(steps):
        state = math.tanh(0.9 * state + 0.2)
        chain *= 0.9 * (1 - state**2)  # w·(1 - h²) is less than 1, so the product vanishes
    check(f"a loop of {steps}: gradient of the first state", gradient(root)[h], chain)
    check("  edges on its path", len(follow(trace(root, SUM), h).vertices) - 1, 3 * steps)
check("  paths from w, one for each use", backward(root, COUNT)[w], 200)
check("  edges on the heaviest: the last use", len(follow(trace(root, MAX), w).vertices) - 1, 3)


# A component is a set of vertices. Two cells read the same inputs: through which were they taught?
def cell(weights: Sequence[Scalar], inputs: Sequence[Scalar]) -> list[Scalar]:
    """The vertices of ``tanh(Σ wᵢ·xᵢ)``: weights, products, sum, output."""
    products = [w * x for w, x in zip(weights, inputs)]
    return [*weights, *products, s := total(*products), tanh(s)]


def influence(component: set[Scalar], parameters: list[Scalar], pointers: Pointers) -> float:
    """Of the parameters outside that have a path, and a way through, the share that took it."""
    below = {v for u in component for v in order(u)} - component
    found = [follow(pointers, v) for v in parameters if v in below and v in pointers]
    return sum(not component.isdisjoint(path.vertices) for path in found) / len(found)


CELLS = (0.5, -1.0, 0.8, 0.3, 0.9, -0.4, 0.3, 0.0, 0.2, 0.5, -0.7, 0.0)  # inputs, left, right
leaves = [Scalar(value) for value in CELLS]
left, right = cell(leaves[4:8], leaves[:4]), cell(leaves[8:], leaves[:4])
pointers = trace(left[-1] + right[-1], SUM)
check("both weights of the fourth input are 0: no path", leaves[3] not in pointers)
check("influence of the left cell: one of three", influence(set(left), leaves, pointers), 1 / 3)
check("influence of the right cell: the others", influence(set(right), leaves, pointers), 2 / 3)

say("7. Is it right?")
# A derivative is a limit, and we can come near it: move one input a little, both ways.


def error(f: Callable[..., Scalar], *at: float) -> float:
    """The largest difference of ``gradient`` and ``(f(x + h) - f(x - h)) / 2h`` over the inputs."""
    leaves, errors = [Scalar(x) for x in at], []
    g = gradient(f(*leaves))
    for n, v in enumerate(leaves):
        moved = [[x + h * (i == n) for i, x in enumerate(at)] for h in (1e-5, -1e-5)]
        up, down = (f(*map(Scalar, inputs)).value for inputs in moved)
        errors.append(abs(g[v] - (up - down) / 2e-5))
    return max(errors)


EXAMPLES: dict[str, tuple[Callable[..., Scalar], tuple[float, ...]]] = {
    "product": (product, (-2.0, 5.0, -4.0)),
    "neuron": (neuron, NEURON),
    "program": (program, PROGRAM),
    "ladder": (lambda x: ladder(x, 10), (0.5,)),
    "signs": (lambda x, w: sin(w * x) * relu(x) + tanh(w * x), (0.5, -0.3)),
    "fork": (lambda x, p, q: total(x * p, (b := total(x)) * q, b * q), (1.0, 3.0, 2.0)),
    "shared": (lambda w, x: tanh(w * tanh(w * x)), (0.5, 1.0)),
    "skip": (lambda x, w: x + tanh(w * x), (0.1, 3.0)),
    "loop": (loop, (0.5, 0.9, 0.2)),
    "cells": (lambda *v: cell(v[4:8], v[:4])[-1] + cell(v[8:], v[:4])[-1], CELLS),
}
for name, (f, at) in EXAMPLES.items():
    check(f"{name}: largest error over its inputs", error(f, *at), 0, 1e-8)
wrong = unary(math.sin, lambda x, y: -math.cos(x))
check("a wrong sign shows: it errs by 2·cos(1)", error(wrong, 1.0), 2 * math.cos(1), 1e-8)

# The same for tensors, on any PyTorch model, with `import gradtrace as gt`:
#   gradient, backward   gt.backward(loss), gt.backward(loss, gt.semirings.MAX)
#   paths                gt.testing.enumerate_paths, where the graph is small
#   trace, follow        trace = gt.trace(loss), by rule="greedy", "edge", "viterbi"; trace.path
#   influence, error     trace.influence(), gt.check
