"""Random small differentiable programs: one whole number says which.

``build(seed)`` gives a loss, its leaves and its scalar graph. A program is a handful of operators
drawn from ``OPERATORS``; every value they make is used, so every operator that is listed in
``Sample.ops`` is on some route to the loss. A draw that does not work out (too many paths, a value
that is not finite) is drawn again, by a number that follows from the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from bruteforce import LIMIT, NotFinite, ScalarGraph, TooManyPaths
from torch import Tensor

Shape: TypeAlias = tuple[int, ...]

LARGEST = 24
"""The most elements of a value."""

EDGES = 4_000
"""The most edges of a scalar graph."""

HUGE = 1e6
"""A larger path mass than this at an element of a leaf, and rounding would be all one tests."""

BLUR = 1e4
"""Derivatives that rounding changes by more than so many units of the last place are mostly noise:
those of a softmax that is all but 1 and 0, or of a norm over two elements."""

WHOLE = (-1.0, 0.0, 1.0, 2.0)
"""What leaves are drawn from where ties and zeros are wanted."""


class Sample(NamedTuple):
    """A random program that has run."""

    seed: int
    loss: Tensor
    leaves: dict[str, Tensor]
    ops: list[str]
    graph: ScalarGraph
    traits: frozenset[str]  # see ``TRAITS``

    def __repr__(self) -> str:
        shapes = {name: tuple(leaf.shape) for name, leaf in self.leaves.items()}
        return f"build({self.seed}): {' '.join(self.ops)}; leaves {shapes}"


TRAITS = (
    "whole",  # leaves hold few different numbers, so that ties and zeros are likely
    "shared",  # a leaf is used more than once
    "broadcast",  # an operand was
    "dead",  # an element of a leaf has no path
    "cancelled",  # an element of a leaf has paths, and its gradient is 0
    *("affine", "strided", "padded", "dilated", "grouped", "biased"),
)


class IllConditioned(Exception):
    """The program's derivatives are known to few digits only."""


class Unfit(Exception):
    """The operator cannot be applied to this value; another is drawn."""


def build(
    seed: int,
    limit: int = LIMIT,
    edges: int = EDGES,
    dtype: torch.dtype = torch.float64,
) -> Sample:
    """The program of a number; at most ``limit`` paths an element of a leaf, ``edges`` edges."""
    attempt = 0
    while True:
        rng = random.Random(seed * 1_000_003 + attempt)
        try:
            steps = max(1, rng.randint(4, 9) - attempt // 8)
            return _attempt(Draft(rng, rng.random() < 0.15, dtype), seed, steps, limit, edges)
        except (TooManyPaths, NotFinite, IllConditioned):
            attempt += 1


def graphs(rng: random.Random) -> tuple[Tensor, dict[str, Tensor], str]:
    """A random program as loss, leaves and a description."""
    sample = build(rng.getrandbits(32))
    return sample.loss, sample.leaves, repr(sample)


def _attempt(draft: Draft, seed: int, steps: int, limit: int, edges: int) -> Sample:
    rng = draft.rng
    for _ in range(rng.randint(1, 2)):
        draft.open.append(draft.leaf(draft.shape()))
    while steps:
        if draft.step(rng.choice(HAT)):
            steps -= 1
    loss = draft.loss()
    if not math.isfinite(loss.item()):
        raise NotFinite("the loss")
    graph = ScalarGraph.of(loss, draft.leaves, most_edges=edges, most_paths=limit)
    elements = [graph.starts[name] + i for name in graph.starts
                for i in range(draft.leaves[name].numel())]  # fmt: skip
    if any(graph.mass(at) > HUGE for at in elements):
        raise IllConditioned("huge")
    if graph.blur > BLUR * torch.finfo(draft.dtype).eps:
        raise IllConditioned("blurred")
    if any(len(graph.consumers(at)) > 1 for at in elements):
        draft.traits.add("shared")
    if len(graph.starts) < len(draft.leaves) or not all(graph.counts[at] for at in elements):
        draft.traits.add("dead")
    if any(graph.counts[at] and not graph.gradient(at) for at in elements):
        draft.traits.add("cancelled")
    return Sample(seed, loss, draft.leaves, draft.ops, graph, frozenset(draft.traits))


@dataclass
class Draft:
    """A program in the making. ``open`` are the values that nothing has used yet."""

    rng: random.Random
    whole: bool
    dtype: torch.dtype
    leaves: dict[str, Tensor] = field(default_factory=dict)
    open: list[Tensor] = field(default_factory=list)
    used: list[Tensor] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    traits: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.whole:
            self.traits.add("whole")

    # Values

    def shape(self) -> Shape:
        """The shape of a first leaf."""
        while True:
            shape = tuple(self.rng.randint(1, 4) for _ in range(self.rng.randint(1, 3)))
            if 4 <= math.prod(shape) <= 16:
                return shape

    def constant(self, *shape: int) -> Tensor:
        """Numbers that need no gradient."""
        rng, n = self.rng, math.prod(shape)
        numbers = rng.choices(WHOLE, k=n) if self.whole else [rng.gauss(0, 1) for _ in range(n)]
        return torch.tensor(numbers, dtype=self.dtype).reshape(shape)

    def indices(self, below: int, *shape: int) -> Tensor:
        """Whole numbers from 0 up."""
        numbers = [self.rng.randrange(below) for _ in range(math.prod(shape))]
        return torch.tensor(numbers).reshape(shape)

    def leaf(self, shape: Sequence[int]) -> Tensor:
        """A leaf of this shape: a new one or, to share it, one that there is."""
        if math.prod(shape) > LARGEST:
            raise Unfit
        there = [leaf for leaf in self.leaves.values() if leaf.shape == tuple(shape)]
        if there and self.coin():
            return self.rng.choice(there)
        leaf = self.constant(*shape).requires_grad_()
        self.leaves[f"leaf{len(self.leaves)}"] = leaf
        return leaf

    def operand(self, shape: Sequence[int]) -> Tensor:
        """Something of this shape to combine a value with: a value, a leaf or a constant."""
        for pool in (self.open, self.used):
            there = [value for value in pool if value.shape == tuple(shape)]
            if there and self.coin():
                value = self.rng.choice(there)
                if pool is self.open:
                    self._close(value)
                return value
        return self.leaf(shape) if self.rng.random() < 0.8 else self.constant(*shape)

    def _close(self, value: Tensor) -> None:
        self.open = [other for other in self.open if other is not value]
        self.used.append(value)

    # Choices

    def coin(self) -> bool:
        return self.rng.random() < 0.5

    def dim(self, x: Tensor, least: int = 1) -> int:
        """A dimension of at least this size."""
        fit = [d for d in range(x.ndim) if x.shape[d] >= least]
        if not fit:
            raise Unfit
        return self.rng.choice(fit)

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def dims(self, x: Tensor) -> list[int]:
        """Some dimensions, at least one."""
        if not x.ndim:
            raise Unfit
        return sorted(self.rng.sample(range(x.ndim), self.rng.randint(1, x.ndim)))

    def factors(self, n: int, parts: int) -> list[int]:
        """``parts`` numbers with product ``n``."""
        found = [1] * parts
        for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23):
            while n % prime == 0:
                n //= prime
                found[self.rng.randrange(parts)] *= prime
        return found

    def arranged(self, x: Tensor, ndim: int) -> Tensor:
        """The value with this many dimensions."""
        return x if x.ndim == ndim else x.reshape(self.factors(x.numel(), ndim))

    def matrix(self, x: Tensor) -> Tensor:
        """The value with two dimensions at least."""
        return self.arranged(x, max(2, x.ndim))

    def plane(self, x: Tensor, dims: int) -> Tensor:
        """Pictures of channels, none of their sides shorter than 2."""
        x = self.arranged(x, dims + 2)
        if min(x.shape[2:]) < 2:
            raise Unfit
        return x

    def resized(self, x: Tensor, dim: int) -> list[int]:
        """The shape with another size of one dimension."""
        shape = list(x.shape)
        shape[dim] = self.rng.randint(1, 3)
        return shape

    # Steps

    def step(self, name: str) -> bool:
        """Apply an operator to a value; or nothing, if it cannot be."""
        before = list(self.open), list(self.used), dict(self.leaves), set(self.traits)
        fresh = not self.open or self.rng.random() < 0.1
        # the newest value is likeliest, so that programs get deep
        x = self.leaf(self.shape()) if fresh else self.open[-1 - int(
            len(self.open) * self.rng.random() ** 2)]  # fmt: skip
        self._close(x)
        try:
            found = OPERATORS[name](self, x)
            made = [found] if isinstance(found, Tensor) else found
            if any(not y.requires_grad or y.numel() > LARGEST or not y.numel() for y in made):
                raise Unfit
            if sum(y.numel() for y in made) < min(4, x.numel()) and self.rng.random() < 0.7:
                raise Unfit  # or most programs would soon be of single numbers
        except Unfit:
            self.open, self.used, self.leaves, self.traits = before
            return False
        if self.rng.random() < 0.1 and x.requires_grad:
            self.open.append(x)  # used once more
        self.open += made
        self.ops.append(name)
        return True

    def loss(self) -> Tensor:
        """One number from all values that nothing has used."""
        total = None
        for value in self.open:
            total = self._end(value) if total is None else total + self._end(value)
        assert total is not None
        return total

    def _end(self, value: Tensor) -> Tensor:
        way = self.rng.random()
        if way < 0.2:
            return value.mean()
        if way < 0.4:
            return value.sum()
        if way < 0.7:
            return value.square().sum()
        return (value * self.constant(*value.shape)).sum()


Operator: TypeAlias = Callable[[Draft, Tensor], "Tensor | list[Tensor]"]

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "exp": lambda x: torch.exp(x.clamp(max=3)),
    "log": lambda x: torch.log(x.square() + 1),
    "sqrt": lambda x: torch.sqrt(x.abs() + 1),
    "sin": torch.sin,
    "square": torch.square,
    "pow": lambda x: x**3,
    "abs": torch.abs,
    "neg": torch.neg,
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "clamp": lambda x: x.clamp(-1, 1),
    "detached": lambda x: x * x.detach(),
    "clone": torch.clone,
}

REDUCTIONS = "mean", "sum", "none"

OPERATORS: dict[str, Operator] = {
    **{name: lambda d, x, f=f: f(x) for name, f in ELEMENTWISE.items()},  # type: ignore[misc]
    "twice": lambda d, x: d.pick(torch.add, torch.mul)(x, x),
    "where": lambda d, x: torch.where(d.constant(*x.shape) > 0, x, d.operand(x.shape)),
    "masked_fill": lambda d, x: x.masked_fill(d.constant(*x.shape) > 0.5, 0.5),
    "dropout": lambda d, x: x * (d.constant(*x.shape) > -0.5) * 1.5,
    "lerp": lambda d, x: torch.lerp(x, d.operand(x.shape), d.operand(x.shape)),
    "maximum": lambda d, x: d.pick(torch.maximum, torch.minimum)(x, d.operand(x.shape)),
    # broadcasting
    "add": lambda d, x: torch.add(x, other(d, x), alpha=d.pick(1, 1, 2)),
    "sub": lambda d, x: x - other(d, x) if d.coin() else other(d, x) - x,
    "mul": lambda d, x: x * other(d, x),
    "div": lambda d, x: safe_ratio(*d.rng.sample((x, other(d, x)), 2)),
    "addcmul": lambda d, x: torch.addcmul(x, other(d, x), d.operand(x.shape), value=0.5),
    # products
    "dot": lambda d, x: torch.dot(x.reshape(-1), d.operand((x.numel(),))),
    "outer": lambda d, x: torch.outer(x.reshape(-1), d.operand((d.pick(1, 2, 3),))),
    # reductions
    "sum": lambda d, x: x.sum(d.dims(x), keepdim=d.coin()),
    "mean": lambda d, x: x.mean(d.dims(x), keepdim=d.coin()),
    "amax": lambda d, x: d.pick(torch.amax, torch.amin)(x, d.dims(x), keepdim=d.coin()),
    "max": lambda d, x: x.max(d.dim(x), keepdim=d.coin()).values,
    "logsumexp": lambda d, x: x.logsumexp(d.dims(x), keepdim=d.coin()),
    "prod": lambda d, x: x.prod(d.dim(x), keepdim=d.coin()),
    "var": lambda d, x: x.var(d.dim(x, 2), correction=d.pick(0, 1), keepdim=d.coin()),
    "std": lambda d, x: x.std(d.dim(x, 2), correction=d.pick(0, 1), keepdim=d.coin()),
    "var_mean": lambda d, x: list(torch.var_mean(x, d.dim(x, 2))),
    "norm": lambda d, x: torch.linalg.vector_norm(x, d.pick(1, 2, 3), d.dim(x)),
    "sort": lambda d, x: x.sort(stable=True, dim=d.dim(x)).values,
    # moving elements
    "masked_select": lambda d, x: x[d.constant(*x.shape) > -0.5],
    "take": lambda d, x: x.take(d.indices(x.numel(), d.rng.randint(1, 5))),
    "flip": lambda d, x: x.flip(d.dims(x)),
    "roll": lambda d, x: x.roll(d.pick(1, 2, -1), d.dim(x)),
    "stack": lambda d, x: torch.stack([x, d.operand(x.shape)], d.rng.randint(0, x.ndim)),
    "reshape": lambda d, x: x.reshape(d.factors(x.numel(), d.rng.randint(1, 3))),
    "unsqueeze": lambda d, x: x.unsqueeze(d.rng.randint(0, x.ndim)),
    "squeeze": lambda d, x: x.squeeze(),
    "expand": lambda d, x: x.unsqueeze(0).expand(2, *x.shape),
    "repeat": lambda d, x: x.repeat([d.pick(1, 2) for _ in range(x.ndim + d.coin())]),
    "repeat_interleave": lambda d, x: x.repeat_interleave(2, d.dim(x)),
    "tril": lambda d, x: d.pick(torch.tril, torch.triu)(d.matrix(x), d.rng.randint(-1, 1)),
    "diagonal": lambda d, x: d.arranged(x, 2).diagonal(),
    "diag_embed": lambda d, x: torch.diag_embed(x.reshape(-1)[:4]),
    # scans and normalisers
    "cumsum": lambda d, x: x.cumsum(d.dim(x)),
    "cumprod": lambda d, x: x.cumprod(d.dim(x)),
    "cummax": lambda d, x: x.cummax(d.dim(x)).values,
    "softmax": lambda d, x: x.softmax(d.dim(x)),
    "log_softmax": lambda d, x: x.log_softmax(d.dim(x)),
    "mse_loss": lambda d, x: F.mse_loss(x, d.operand(x.shape), reduction=d.pick(*REDUCTIONS)),
    # windows
    "conv1d": lambda d, x: convolve(d, x, 1, transposed=False),
    "conv2d": lambda d, x: convolve(d, x, 2, transposed=False),
    "conv_transpose1d": lambda d, x: convolve(d, x, 1, transposed=True),
    "conv_transpose2d": lambda d, x: convolve(d, x, 2, transposed=True),
}


def operator(function: Operator) -> Operator:
    """Enter an operator in the table; it makes one value or several."""
    OPERATORS[function.__name__] = function
    return function


def other(draft: Draft, x: Tensor) -> Tensor:
    """An operand of the same shape, or of one that broadcasts to it or that it broadcasts to."""
    shape = list(x.shape)
    way = draft.rng.randrange(4)
    if way == 1:
        shape = [1 if draft.coin() else n for n in shape]
    elif way == 2:
        shape = shape[draft.rng.randint(0, len(shape)) :]
    elif way == 3 and x.numel() <= LARGEST // 2:
        shape = [2, *(1 if draft.coin() else n for n in shape)]
    if tuple(shape) != x.shape:
        draft.traits.add("broadcast")
    return draft.operand(shape)


def safe_ratio(x: Tensor, y: Tensor) -> Tensor:
    return x / (y.abs() + 0.5)


@operator
def residual(draft: Draft, x: Tensor) -> Tensor:
    inner = ELEMENTWISE[draft.rng.choice(sorted(ELEMENTWISE))](x)
    if draft.coin() and x.ndim:
        inner = inner @ draft.leaf((x.shape[-1], x.shape[-1]))
    return x + inner


# Products


@operator
def mm(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 2)
    (rows, columns), n = x.shape, draft.rng.randint(1, 4)
    return x @ draft.operand((columns, n)) if draft.coin() else draft.operand((n, rows)) @ x


@operator
def gram(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 2)
    return x @ x.T if draft.coin() else x.T @ x


@operator
def bmm(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 3)
    return torch.bmm(x, draft.operand((x.shape[0], x.shape[2], draft.rng.randint(1, 3))))


@operator
def matmul(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 3)
    batch = [draft.pick(1, x.shape[0])] if draft.coin() else [2, 1]
    return torch.matmul(x, draft.operand((*batch, x.shape[2], draft.rng.randint(1, 2))))


@operator
def linear(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, max(1, x.ndim))
    n = draft.rng.randint(1, 4)
    bias = draft.leaf((n,)) if draft.coin() else None
    return F.linear(x, draft.leaf((n, x.shape[-1])), bias)


@operator
def addmm(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 2)
    n = draft.rng.randint(1, 4)
    plus = draft.operand(draft.pick((n,), (len(x), n), (len(x), 1)))
    weight = draft.operand((x.shape[1], n))
    return torch.addmm(plus, x, weight, beta=draft.pick(1, 2), alpha=0.5)


@operator
def mv(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 2)
    return x @ draft.operand((x.shape[1],))


@operator
def einsum(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 3)
    a, b, c = x.shape
    spec, shape = draft.pick(
        ("abc,cd->abd", (c, 2)),
        ("abc,bd->adc", (b, 2)),
        ("abc,abc->ab", (a, b, c)),
        ("abc,acb->b", (a, c, b)),
        ("abc,b->ac", (b,)),
        ("abc,bca->", (b, c, a)),
        ("abc,ad->dc", (a, 2)),
    )
    return torch.einsum(spec, x, draft.operand(shape))


@operator
def attention(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 2)
    later = torch.ones(len(x), len(x)).triu(1) > 0
    scores = (x @ draft.operand(x.shape).T).masked_fill(later, -math.inf)
    return scores.softmax(-1) @ draft.operand(x.shape)


# Moving elements


@operator
def topk(draft: Draft, x: Tensor) -> Tensor:
    d = draft.dim(x)
    return x.topk(draft.rng.randint(1, x.shape[d]), d).values


@operator
def select(draft: Draft, x: Tensor) -> Tensor:
    d = draft.dim(x)
    return x.select(d, draft.rng.randrange(x.shape[d]))


@operator
def sliced(draft: Draft, x: Tensor) -> Tensor:
    d = draft.dim(x, 2)
    start = draft.rng.randrange(x.shape[d])
    at = [slice(None)] * x.ndim
    at[d] = slice(start, draft.rng.randint(start + 1, x.shape[d]), draft.pick(1, 2))
    return x[tuple(at)]


@operator
def index_select(draft: Draft, x: Tensor) -> Tensor:
    d = draft.dim(x)
    return x.index_select(d, draft.indices(x.shape[d], draft.rng.randint(1, 4)))


@operator
def index(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 2)
    n = draft.rng.randint(1, 4)
    return x[draft.indices(len(x), n), draft.indices(x.shape[1], n)]


@operator
def gather(draft: Draft, x: Tensor) -> Tensor:
    d = draft.dim(x)
    return x.gather(d, draft.indices(x.shape[d], *draft.resized(x, d)))


@operator
def cat(draft: Draft, x: Tensor) -> Tensor:
    d = draft.dim(x)
    return torch.cat(draft.rng.sample([x, draft.operand(draft.resized(x, d))], 2), d)


@operator
def split(draft: Draft, x: Tensor) -> list[Tensor]:
    d = draft.dim(x, 2)
    parts = torch.split(x, draft.rng.randint(1, x.shape[d] - 1), d)
    return draft.rng.sample(parts, draft.rng.randint(1, len(parts)))


@operator
def unbind(draft: Draft, x: Tensor) -> list[Tensor]:
    parts = x.unbind(draft.dim(x))
    return draft.rng.sample(parts, draft.rng.randint(1, min(2, len(parts))))


@operator
def pad(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, max(1, x.ndim))
    return F.pad(x, (draft.rng.randint(-1 if x.shape[-1] > 2 else 0, 2), draft.rng.randint(0, 2)))


@operator
def pad_by_value(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 3)
    if x.shape[-1] < 2:
        raise Unfit
    return F.pad(x, (1, 1), mode=draft.pick("reflect", "replicate", "circular"))


@operator
def permute(draft: Draft, x: Tensor) -> Tensor:
    x = draft.matrix(x)
    return x.permute(draft.rng.sample(range(x.ndim), x.ndim))


@operator
def unfold(draft: Draft, x: Tensor) -> Tensor:
    d = draft.dim(x, 2)
    return x.unfold(d, draft.rng.randint(1, min(3, x.shape[d])), draft.pick(1, 2))


@operator
def im2col(draft: Draft, x: Tensor) -> Tensor:
    return F.unfold(draft.plane(x, 2), 2)


@operator
def as_strided(draft: Draft, x: Tensor) -> Tensor:
    if x.numel() < 3 or not x.is_contiguous():
        raise Unfit
    return x.as_strided((x.numel() - 1, 2), (1, 1))


@operator
def scatter_add(draft: Draft, x: Tensor) -> Tensor:
    d = draft.dim(x)
    return x.scatter_add(d, draft.indices(x.shape[d], *x.shape), draft.operand(x.shape))


@operator
def index_add(draft: Draft, x: Tensor) -> Tensor:
    d = draft.dim(x)
    shape = draft.resized(x, d)
    return x.index_add(d, draft.indices(x.shape[d], shape[d]), draft.operand(shape))


@operator
def embedding(draft: Draft, x: Tensor) -> Tensor:
    table = draft.arranged(x, 2)
    return F.embedding(draft.indices(len(table), draft.rng.randint(1, 4)), table)


# Losses and normalisers


@operator
def cross_entropy(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 2)
    return F.cross_entropy(
        x,
        draft.indices(x.shape[1], len(x)),
        label_smoothing=draft.pick(0.0, 0.0, 0.1),
        reduction=draft.pick(*REDUCTIONS),
    )


@operator
def nll_loss(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 2)
    target = draft.indices(x.shape[1], len(x))
    return F.nll_loss(x, target, reduction=draft.pick(*REDUCTIONS))


def affine(draft: Draft, n: int) -> dict[str, Any]:
    """The weight and bias of a norm, or neither."""
    if draft.coin():
        return {}
    draft.traits.add("affine")
    return {"weight": draft.leaf((n,)), "bias": draft.leaf((n,)) if draft.coin() else None}


def epsilon(count: int) -> float:
    """Two elements less their mean, over their deviation, are 1 and -1 unless this is large."""
    if count < 2:
        raise Unfit
    return 0.1 if count == 2 else 1e-5


@operator
def layer_norm(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, max(1, x.ndim))
    n = x.shape[-1]
    return F.layer_norm(x, (n,), **affine(draft, n), eps=epsilon(n))


@operator
def rms_norm(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, max(1, x.ndim))
    n = x.shape[-1]
    return F.rms_norm(x, (n,), draft.leaf((n,)) if draft.coin() else None, eps=epsilon(n))


@operator
def batch_norm(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 2 + draft.coin())
    channels = x.shape[1]
    eps = epsilon(x.numel() // channels)
    return F.batch_norm(x, None, None, training=True, **affine(draft, channels), eps=eps)


@operator
def group_norm(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 3)
    channels = x.shape[1]
    groups = draft.pick(*(n for n in range(1, channels + 1) if channels % n == 0))
    eps = epsilon(x[0].numel() // groups)
    return F.group_norm(x, groups, **affine(draft, channels), eps=eps)


# Windows


def convolve(draft: Draft, x: Tensor, dims: int, transposed: bool) -> Tensor:
    """A convolution, or its transpose, with random options."""
    x = draft.arranged(x, dims + 2)
    channels = x.shape[1]
    stride, padding, dilation = draft.pick(1, 1, 2), draft.pick(0, 1), draft.pick(1, 1, 2)
    groups = channels if channels < 4 and draft.coin() else 1
    out = groups * draft.rng.randint(1, 2)
    window = [draft.rng.randint(1, 2 if dims == 2 else 3) for _ in range(dims)]
    bias = draft.leaf((out,)) if draft.rng.random() < 0.3 else None
    for size, width in zip(x.shape[2:], window):
        reach = dilation * (width - 1) + 1
        left = (size - 1) * stride + reach if transposed else size + 2 * padding - reach + 1
        if left - 2 * padding * transposed < 1:
            raise Unfit
    facts = {
        "strided": stride > 1,
        "padded": padding > 0,
        "dilated": dilation > 1 and max(window) > 1,
        "grouped": groups > 1,
        "biased": bias is not None,
    }
    draft.traits |= {trait for trait, fact in facts.items() if fact}
    shape = (channels, out // groups) if transposed else (out, channels // groups)
    ways = (F.conv_transpose1d, F.conv_transpose2d) if transposed else (F.conv1d, F.conv2d)
    weight = draft.operand((*shape, *window))
    return ways[dims - 1](
        x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups
    )


@operator
def max_pool(draft: Draft, x: Tensor) -> Tensor:
    dims = draft.pick(1, 2)
    way = (F.max_pool1d, F.max_pool2d)[dims - 1]
    pooled: Tensor = way(draft.plane(x, dims), 2, stride=draft.pick(1, 2), padding=draft.pick(0, 1))
    return pooled


@operator
def avg_pool(draft: Draft, x: Tensor) -> Tensor:
    dims = draft.pick(1, 2)
    way = (F.avg_pool1d, F.avg_pool2d)[dims - 1]
    return way(draft.plane(x, dims), 2, stride=draft.pick(1, 2), padding=draft.pick(0, 1))


@operator
def adaptive_pool(draft: Draft, x: Tensor) -> Tensor:
    dims = draft.pick(1, 2)
    way = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)[dims - 1]
    return way(draft.plane(x, dims), 2)


@operator
def upsample(draft: Draft, x: Tensor) -> Tensor:
    mode = draft.pick("nearest", "linear")
    return F.interpolate(draft.arranged(x, 3), scale_factor=2, mode=mode)


# In place


@operator
def in_place(draft: Draft, x: Tensor) -> Tensor:
    y = x.clone()
    for way in draft.rng.choices(range(3), k=2):
        if way == 0:
            y.mul_(draft.operand(x.shape))
        elif way == 1:
            y.add_(draft.operand(x.shape), alpha=0.5)
        else:
            y.masked_fill_(draft.constant(*x.shape) > 0, 2.0)
    return y.tanh_() if draft.coin() else y  # it keeps its result, so it must be the last


@operator
def write_slice(draft: Draft, x: Tensor) -> Tensor:
    y = x.clone()
    d = draft.dim(x)
    part = y.select(d, draft.rng.randrange(x.shape[d]))
    draft.pick(Tensor.copy_, Tensor.mul_, Tensor.add_)(part, draft.operand(part.shape))
    return y


@operator
def index_put(draft: Draft, x: Tensor) -> Tensor:
    y = x.reshape(-1).clone()
    n = draft.rng.randint(1, min(3, len(y)))
    at = torch.tensor(draft.rng.sample(range(len(y)), n))
    return y.index_put_((at,), draft.operand((n,)), accumulate=draft.coin())


@operator
def zeros_filled(draft: Draft, x: Tensor) -> Tensor:
    x = draft.arranged(x, 2)
    y = torch.zeros(len(x) + 1, x.shape[1], dtype=x.dtype)
    y[1:] = x
    y[0] = draft.operand((x.shape[1],))
    return y


# Functions of the user


class Rotate(torch.autograd.Function):
    """``(a·cos t - b·sin t, a·sin t + b·cos t)``: two results, an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, angle: float, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.turn = cos, sin = math.cos(angle), math.sin(angle)
        return a * cos - b * sin, a * sin + b * cos

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        (one, two), (cos, sin) = grads, ctx.turn
        return one * cos + two * sin, None, two * cos - one * sin


class Product(torch.autograd.Function):
    """``x · w`` by a formula of several steps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        back = torch.zeros_like(x)
        back += grads[0] * w
        return back, (2 * grads[0]) * x / 2


@operator
def function_pair(draft: Draft, x: Tensor) -> list[Tensor]:
    angle = draft.rng.uniform(0.2, 1.2)
    pair = Rotate.apply(x, angle, draft.operand(x.shape))  # type: ignore[no-untyped-call]
    return draft.rng.sample(pair, draft.rng.randint(1, 2))


@operator
def function(draft: Draft, x: Tensor) -> Tensor:
    made: Tensor = Product.apply(x, draft.operand(x.shape))  # type: ignore[no-untyped-call]
    return made


NAMES = sorted(OPERATORS)

OFTEN = """
    adaptive_pool addmm attention avg_pool batch_norm bmm conv1d conv2d conv_transpose1d
    conv_transpose2d cumsum einsum gram group_norm im2col layer_norm linear log_softmax matmul
    max_pool mm residual rms_norm softmax unfold
"""
"""Operators that join many elements with many, or that few values fit."""

HAT = NAMES + 3 * [name for name in NAMES if name in OFTEN.split()]
"""What operators are drawn from."""
