"""Rules for common types of nodes, whose maps are known without recording their formula.

Recording a formula takes several times as long as running it, if it is small. Most nodes of most
models are products with a saved operand, elementwise functions, views, sums, or one ATen operation
on saved tensors: for these the maps follow from the node's result or its saved tensors. Each rule
must give the same maps as recording the formula (``formula``). A rule reads each saved tensor at
most once, because checkpoints return it once only, and none before it returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.nodes import Edges, Node
from gradtrace.linops import (
    Around,
    Contract,
    Cut,
    Identity,
    Index,
    Map,
    Reduce,
    Scale,
    Scan,
    Scatter,
    Slot,
    Sparse,
)
from gradtrace.recording import placeholders
from gradtrace.recording.aten_rules import (
    RULES,
    BatchedWeights,
    Call,
    Undecided,
    distance_maps,
    mask_map,
    matrix_times,
    times_matrix,
)
from gradtrace.types import Shape

aten = torch.ops.aten

Chain: TypeAlias = Sequence[Map]

RuleResult: TypeAlias = "list[tuple[Tensor, Chain] | None] | None"
"""For each argument, its cotangent and the maps that lead to it (an empty chain is the identity),
or None for no gradient. None instead of the list: the rule does not apply, record the formula."""

Edge: TypeAlias = "tuple[Node | None, int]"


class Product(Protocol):
    """Computes the matrix products that are passed along an edge, or placeholders for them.

    A ``bare`` program needs neither products nor convolutions. Weights of maps that the gradient
    itself does not depend on are requested from ``batched_weights``.
    """

    bare: bool
    batched_weights: BatchedWeights
    changes_device: bool

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        edge: Edge,
        via_transpose: bool = False,
        grad: Tensor | None = None,
    ) -> Tensor:
        """``a @ b``; with ``via_transpose`` as ``(bᵀ @ aᵀ)ᵀ``, which has transposed strides. With
        ``grad``, the operand that is the cotangent, the product may be deferred.
        """

    def defer(self, edge: Edge, shape: Sequence[int], grad: Tensor) -> Tensor | None:
        """A placeholder of this shape if the gradient computed from ``grad`` can be deferred."""

    def one(self, like: Tensor) -> Tensor:
        """A 0-d tensor 1 of the dtype and on the device of ``like``."""


NodeRule: TypeAlias = Callable[[Node, Tensor, Edges, Product], RuleResult]

# Maps without tensors are equal for similar nodes, as in the layers of a model, so they are cached.
# Shapes may be torch.Size or tuples: they hash alike.

shared = lru_cache(1 << 12)


@shared
def same(shape: Shape, wanted: Shape) -> Chain:
    """The same elements in the same order."""
    return (Identity(tuple(shape), tuple(wanted)),)


@shared
def summed(shape: Shape, wanted: Shape) -> Chain:
    """Sums over broadcast dimensions, from ``shape`` to ``wanted``."""
    extra = len(shape) - len(wanted)
    over = [d for d, n in enumerate(shape) if d < extra or (n != 1 and wanted[d - extra] == 1)]
    return (Reduce(over, tuple(shape), tuple(wanted)),)


@shared
def permuted(order: tuple[int, ...], shape: Shape, wanted: Shape) -> Chain:
    """A permutation of the dimensions."""
    return (Index(lambda x: x.permute(order), tuple(shape), tuple(wanted), injective=True),)


@shared
def swapped(first: int, second: int, shape: Shape, wanted: Shape) -> Chain:
    """Exchanges two dimensions."""
    first, second = _signed(first), _signed(second)

    def swap(x: Tensor) -> Tensor:
        return x.transpose(first, second)

    return (Index(swap, tuple(shape), tuple(wanted), injective=True),)


@shared
def flipped(shape: Shape, wanted: Shape) -> Chain:
    """``torch.t``: transposes a matrix; a vector is unchanged."""
    return (Index(torch.t, tuple(shape), tuple(wanted), injective=True),)


@shared
def cut(dim: int, start: int, shape: Shape, wanted: Shape) -> Chain:
    """``x.narrow(dim, start, wanted[dim])``."""
    return (Cut(dim, start, tuple(shape), tuple(wanted)),)


@shared
def slot(dim: int, start: int, cut: Shape, shape: Shape, wanted: Shape) -> Slot:
    """The adjoint of ``cut``: a slice along a dimension, padded with zeros."""
    return Slot(dim, start, tuple(cut), tuple(shape), tuple(wanted))


# Movements ---------------------------------------------------------------------------------------


def transpose_2d(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``t``."""
    out = node(grad)
    return [(out, flipped(grad.shape, out.shape))]


def transpose(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``transpose``: exchanges two dimensions."""
    out = node(grad)
    return [(out, swapped(node._saved_dim0, node._saved_dim1, grad.shape, out.shape))]


def permute(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``permute``: the inverse permutation."""
    out, dims = node(grad), grad.dim()
    order = [_signed(d) % dims for d in node._saved_dims]
    back = tuple(sorted(range(dims), key=order.__getitem__))
    return [(out, permuted(back, grad.shape, out.shape))]


def slice_or_select(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``slice`` and ``select``: pads with zeros; of other steps than 1 the node itself is the index
    function.
    """
    out = node(grad)
    selects = hasattr(node, "_saved_index")
    if not out.is_complex() and (selects or node._saved_step == 1):
        dim = _signed(node._saved_dim) % out.dim()
        place = node._saved_index if selects else node._saved_start or 0  # None: from the first on
        size, first = out.shape[dim], _signed(place)
        start = min(max(first + size if first < 0 else first, 0), size)
        shape = grad.shape
        cut = (*shape[:dim], 1, *shape[dim:]) if selects else tuple(shape)
        return [(out, [slot(dim, start, cut, tuple(shape), tuple(out.shape))])]
    return [(out, [Index(node, tuple(grad.shape), tuple(out.shape), True, injective=True)])]


def reshape(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """The same elements in the same order."""
    out = node(grad)
    return [(out, same(grad.shape, out.shape))]


def identity(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``clone`` and ``alias``."""
    return [(grad, ())]


def to_copy(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """Another dtype or device; the values are the same up to rounding."""
    out = node(grad)
    product.changes_device |= out.device != grad.device
    return None if out.is_complex() else [(out, [])]


def cat(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``cat``: each argument is a slice along ``dim``; arguments of shape ``(0,)`` are skipped."""
    dim, start, shape = _signed(node._saved_dim) % grad.dim(), 0, grad.shape
    found: list[tuple[Tensor, Chain] | None] = []
    for out in _as_tuple(node(grad)):
        part = out.shape
        if part == (0,):
            found.append(None)
            continue
        found.append((out, cut(dim, start, shape, part)))
        start += part[dim]
    return found


def stack(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``stack``: each argument is one index along the new dimension."""
    dim, shape = _signed(node._saved_dim) % grad.dim(), tuple(grad.shape)
    return [
        (out, [Index(_slice(dim, k), shape, tuple(out.shape), injective=True)])
        for k, out in enumerate(_as_tuple(node(grad)))
    ]


def _slice(dim: int, k: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.select(dim, k)


def _as_tuple(outs: Any) -> Iterable[Tensor]:
    return outs if type(outs) is tuple else (outs,)


def _signed(value: Any) -> Any:
    """A saved integer; PyTorch returns negative ones as unsigned 64-bit numbers."""
    return value - (1 << 64) if type(value) is int and value >= 1 << 63 else value


# Sums --------------------------------------------------------------------------------------------


def expand(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``expand``: sums over the expanded dimensions."""
    shape = grad.shape
    if shape == node._saved_self_sym_sizes:
        return [(grad, ())]
    out = node(grad)
    return [(out, summed(shape, out.shape))]


def sum_or_mean(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``sum`` and ``mean``: broadcasts the cotangent to all summands; for a mean, divides it."""
    out = node(grad)
    chain: list[Map] = [_spread(node, grad, out)]
    if type(node).__name__.startswith("Mean"):
        count = max(1, out.numel() // max(1, grad.numel()))
        chain.append(Scale(1 / count, tuple(out.shape)))
    return [(out, chain)]


def weighted(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """Functions of many elements, each of whose derivatives is a number times the cotangent of the
    sum that the element is in (``logsumexp``, norms, losses): the node's results for ones.
    """
    if any(child is not None for child, _ in edges[1:]) or _is_complex(edges[0]):
        return None
    weight: Tensor | None = next(iter(_as_tuple(node(torch.ones_like(grad)))))
    if weight is None:  # the norm of order 0, which counts
        return [None]
    spread = _spread(node, grad, weight)
    return [(spread.apply(grad) * weight, [spread, Scale(weight, tuple(weight.shape))])]


def _spread(node: Node, grad: Tensor, out: Tensor) -> Index:
    """Broadcasts the cotangent of sums over the saved dimensions to the shape of the summands."""
    shape, wide = tuple(grad.shape), tuple(out.shape)
    thin = shape
    if len(shape) < len(wide):
        over = getattr(node, "_saved_dim", None) or range(len(wide))
        dims = {_signed(d) % len(wide) for d in over}
        thin = tuple(1 if d in dims else n for d, n in enumerate(wide))
    return Index(lambda x: x.reshape(thin).expand(wide), shape, wide)


def cumsum(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``cumsum``: the sum of the cotangents from an element on."""
    if not grad.dim() or nodes.wanted(*edges[0]).dtype is not grad.dtype:
        return None
    scan = Scan(_signed(node._saved_dim) % grad.dim(), tuple(grad.shape), reverse=True)
    return [(node(grad), [scan])]


# Elementwise -------------------------------------------------------------------------------------


def elementwise(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """Elementwise functions: the weight is the node's result for ones.

    The node is called once, since checkpoints return saved tensors once only.
    """
    weight = node(torch.ones_like(grad))
    return [(weight * grad, [Scale(weight, tuple(grad.shape))])]


def sigmoid(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``g · y · (1 - y)``, as ``elementwise`` computes it. If the saved result and the cotangent
    have equal strides, a 0-d 1 replaces the tensor of ones: the weight's strides are the same.
    """
    y = node._saved_result
    ones = product.one(grad) if y.stride() == grad.stride() else torch.ones_like(grad)
    weight = aten.sigmoid_backward.default(ones, y)
    return [(weight * grad, (Scale(weight, tuple(grad.shape)),))]


def tanh(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``g · (1 - y²)``.

    In float32 and float64 the gradient has the same bits whether or not ``1 - y²`` is computed
    separately, so the weight is batched with those of other nodes. Narrower dtypes would round it.
    """
    y = node._saved_result
    if y.stride() != grad.stride() or y.dtype not in (torch.float32, torch.float64):
        weight = aten.tanh_backward.default(torch.ones_like(grad), y)
        return [(weight * grad, (Scale(weight, tuple(grad.shape)),))]
    scale = Scale(y, tuple(grad.shape))

    def fill(weight: Tensor) -> None:
        scale.weight = weight

    product.batched_weights.request(_slopes, (y,), fill)
    return [(aten.tanh_backward.default(grad, y), (scale,))]


def _slopes(y: Tensor) -> tuple[Tensor]:
    """``1 - y²``."""
    one = torch.ones((), dtype=y.dtype, device=y.device)
    return (aten.tanh_backward.default(one, y),)


def pow_scalar(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x ** number``: ``n · x^(n - 1)``, computed as in PyTorch's formula."""
    x, power = node._saved_self, node._saved_exponent
    weight = power * x.pow(power - 1) if power else torch.zeros_like(x)
    if x.stride() != grad.stride():
        weight = torch.ones_like(grad) * weight  # with the strides of the cotangent
    return [(weight * grad, (Scale(weight, tuple(grad.shape)),))]


def add(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x + y``."""
    return [(grad, ()), (grad, ())] if node._saved_alpha == 1 else None


def sub(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x - y``."""
    if node._saved_alpha != 1:
        return None
    minus = (Scale(-1, tuple(grad.shape)),)
    return [(grad, ()), None if edges[1][0] is None else (-grad, minus)]


def mul(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x · y``; the node saves a factor only if the other one needs a gradient."""
    x = None if edges[0][0] is None else _product_with(grad, node._saved_other)
    y = None if edges[1][0] is None else _product_with(grad, node._saved_self)
    return [x, y]


def mul_scalar(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x · number``."""
    return [(node(grad), (Scale(node._saved_other, tuple(grad.shape)),))]


def _product_with(grad: Tensor, factor: Tensor) -> tuple[Tensor, Chain]:
    """``grad · factor``, and its map."""
    return grad * factor, (Scale(_number(factor), tuple(grad.shape)),)


def _number(x: Tensor) -> Tensor | float:
    """A saved factor, as a Python number if the user's code has a number there."""
    if not nodes.is_number(x):
        return x
    number: Any = x.tolist()  # not item(), which dispatch modes intercept
    return number  # type: ignore[no-any-return]


def div(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x / y``: ``g / y`` and ``-g · x / y²``, computed as in PyTorch's formula."""
    saved, shape = node._saved_other, tuple(grad.shape)
    by, second = _number(saved), None
    if edges[1][0] is not None:
        factor = node._saved_self / saved / saved
        second = -grad * factor, (Scale(-1, shape), Scale(factor, shape))
    if edges[0][0] is None:
        return [None, second]
    call = Call(aten.div.Tensor, (grad, by), {}, [grad], grad / by, 0)
    ((chain, _),) = RULES["div"](call)
    return [(call.out, chain), second]


def absolute(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``abs``: ``g · sgn(x)``."""
    if _is_complex(edges[0]):
        return None
    return [_product_with(grad, node._saved_self.sgn())]


def _is_complex(edge: Edge) -> bool:
    """Whether an argument is complex, though the result of the operator is real."""
    return edge[0] is not None and bool(nodes.wanted(*edge).dtype.is_complex)


# Masks -------------------------------------------------------------------------------------------


def _where(mask: Tensor, grad: Tensor) -> tuple[Tensor, Chain]:
    """The cotangent where the mask is true, and 0 elsewhere."""
    map_ = mask_map(mask, tuple(grad.shape))
    return map_.apply(grad), (map_,)


def where(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``where(mask, x, y)``."""
    mask = node._saved_condition
    x = None if edges[0][0] is None else _where(mask, grad)
    return [x, None if edges[1][0] is None else _where(~mask, grad)]


def masked_fill(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x.masked_fill(mask, number)``."""
    if any(child is not None for child, _ in edges[1:]):
        return None
    return [_where(~node._saved_mask, grad)]


def clamp(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``clamp`` between numbers, of which one may be missing."""
    x, bounds = node._saved_self, [getattr(node, f"_saved_{end}", None) for end in ("min", "max")]
    if bounds == [None, None]:
        return [(grad, ())]
    masks = [x >= bounds[0]] if bounds[0] is not None else []
    masks += [x <= bounds[1]] if bounds[1] is not None else []
    return [_where(masks[0] if len(masks) == 1 else masks[0] & masks[1], grad)]


# Products ----------------------------------------------------------------------------------------


def matmul(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x @ w``; the node saves an operand only if the other one needs a gradient."""
    x, w = node._saved_self, node._saved_mat2
    steps = node._saved_mat2_sym_strides if type(node).__name__ == "MmBackward0" else ()
    return [_left(grad, w, edges[0], product), _right(grad, x, edges[1], product, steps)]


def addmm(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``bias + x @ w``."""
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    x, w = node._saved_mat1, node._saved_mat2
    bias: tuple[Tensor, Chain] | None = None if edges[0][0] is None else (grad, ())
    steps = node._saved_mat2_sym_strides
    return [bias, _left(grad, w, edges[1], product), _right(grad, x, edges[2], product, steps)]


def sparse_addmm(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``bias + A @ x`` with a sparse A that needs no gradient."""
    if node._saved_alpha != 1 or edges[1][0] is not None:
        return None
    if node._saved_beta != 1 and edges[0][0] is not None:  # sparse.mm: beta is 0, without bias
        return None
    bias: tuple[Tensor, Chain] | None = None if edges[0][0] is None else (grad, ())
    return [bias, None, _right(grad, node._saved_mat1, edges[2], product)]


def mv(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``A @ x`` of a constant matrix and a vector."""
    if edges[0][0] is not None:
        return None
    matrix = node._saved_self
    out = matrix.t() @ grad
    shape, wanted = tuple(grad.shape), tuple(out.shape)
    if matrix.layout is not torch.strided:
        return [None, (out, matrix_times(matrix.t(), shape, wanted))]
    return [None, (out, (Contract("m,mk->k", matrix, shape, wanted),))]


def sparse_mm_reduce(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``torch.sparse.mm(A, x, reduce)`` with a constant A in CSR layout."""
    if edges[0][0] is not None:
        return None
    matrix, how, winner = node._saved_self, node._saved_reduce, node._saved_result1
    shape, wanted = tuple(grad.shape), (matrix.shape[1], grad.shape[1])
    values, columns, starts = matrix.values(), matrix.col_indices().long(), matrix.crow_indices()
    count = starts.diff()
    if how in ("sum", "mean"):
        rows = torch.arange(len(count), device=grad.device).repeat_interleave(count)
        weight = values / count[rows] if how == "mean" else values
        entries, around = (columns, rows, weight), Around(inner=shape[1])
        chain: list[Map] = [Sparse.of(entries, shape, wanted, around)]
    else:  # amax, amin: the cotangent of each element goes to the entry that was chosen
        there = (count > 0).unsqueeze(1) & (winner < len(values))
        entry = torch.where(there, winner, 0)
        column = torch.arange(shape[1], device=grad.device)
        target = torch.where(there, columns[entry] * shape[1] + column, -1)
        chain = [Scale(values[entry], shape), Scatter(target, wanted)]
    out = grad
    for step in chain:
        out = step.apply(out)
    return [None, (out, chain)]


def _left(
    grad: Tensor, w: Tensor | None, edge: Edge, product: Product
) -> tuple[Tensor, Chain] | None:
    """The gradient of ``x @ w`` by x: ``g @ wᵀ``, of matrices or batches of matrices."""
    if edge[0] is None or w is None:
        return None
    if w.layout is not torch.strided:
        out = grad @ w.t()
        return out, times_matrix(w.t(), tuple(grad.shape), tuple(out.shape))
    out = product(grad, w.mT, edge)
    spec = "mn,kn->mk" if grad.dim() == 2 else "bmn,bkn->bmk"
    return out, (Contract(spec, w, tuple(grad.shape), tuple(out.shape)),)


def _right(
    grad: Tensor,
    x: Tensor | None,
    edge: Edge,
    product: Product,
    steps: Sequence[int] = (),
) -> tuple[Tensor, Chain] | None:
    """The gradient of ``x @ w`` by w: ``xᵀ @ g``.

    ``steps`` are the strides of w, if known. The result gets the same memory order, as in PyTorch.
    """
    if edge[0] is None or x is None:
        return None
    if x.layout is not torch.strided:
        across = x.transpose(-2, -1)
        out = (torch.mm if x.dim() == 2 else torch.bmm)(across, grad)
        return out, matrix_times(across, tuple(grad.shape), tuple(out.shape))
    via_transpose = len(steps) == 2 and steps[0] == 1 != steps[1]  # PyTorch's condition
    out = product(x.mT, grad, edge, via_transpose, None if x.is_leaf and x.requires_grad else grad)
    spec = "mn,mk->kn" if grad.dim() == 2 else "bmn,bmk->bkn"
    return out, (Contract(spec, x, tuple(grad.shape), tuple(out.shape)),)


def euclidean_dist(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """Euclidean distances that the forward pass computed by a matrix product.

    The gradient by each set of points is recorded with one weight for each pair and coordinate;
    PyTorch's own formula has two terms that would have to be merged.
    """
    if grad.dtype not in (torch.float32, torch.float64):
        return None
    x, y, distance = node._saved_x1, node._saved_x2, node._saved_result
    if not distance.numel() or not x.numel():
        return None
    ratio = (grad / distance).masked_fill_(distance == 0, 0)
    first = x * ratio.sum(-1, True) - ratio @ y
    second = y * ratio.sum(-2).unsqueeze(-1) - ratio.mT @ x
    turn = Index(lambda g: g.mT, tuple(grad.shape), tuple(grad.mT.shape), injective=True)
    return [
        None if edges[0][0] is None else (first, distance_maps(x, y, 2.0, distance)),
        None if edges[1][0] is None else (second, [turn, *distance_maps(y, x, 2.0, distance.mT)]),
    ]


def logcumsumexp(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``logcumsumexp``: ``∂yᵢ/∂xⱼ = exp(xⱼ - yᵢ)`` for j ≤ i.

    Recorded as a reverse cumulative sum between two scalings, ``exp(m - yᵢ)`` and ``exp(xⱼ - m)``
    with ``m = max y``. Where these would overflow, as one matrix for each slice along ``dim``.
    """
    if not grad.dim() or not grad.numel() or grad.is_complex():
        return None
    x, y, dim = node._saved_self, node._saved_result, _signed(node._saved_dim) % grad.dim()
    shape = tuple(grad.shape)
    most = y.amax(dim, keepdim=True)
    span = float((most - y.amin(dim, keepdim=True)).amax())
    if span < (600 if y.dtype is torch.float64 else 60):  # False for NaN
        before, after = (most - y).exp(), (x - most).exp()
        scan = Scan(dim, shape, reverse=True)
        out = scan.apply(grad * before) * after
        return [(out, [Scale(before, shape), scan, Scale(after, shape)])]
    x, y = x.movedim(dim, -1), y.movedim(dim, -1)
    weight = (x.unsqueeze(-1) - y.unsqueeze(-2)).exp().triu()  # (..., j, i)
    letters = "abcdefghijkl"[: grad.dim()]
    into, rest = letters.replace(letters[dim], "z"), letters.replace(letters[dim], "")
    spec = f"{letters},{rest}z{letters[dim]}->{into}"
    product_of = Contract(spec, weight, shape, shape)
    return [(product_of.apply(grad), [product_of])]


# Formulas that are one ATen operation -------------------------------------------------------------


def aten_call(operation: str, arguments: str) -> NodeRule:
    """A rule for a node whose formula is one ATen operation.

    ``arguments`` lists, separated by spaces: ``g`` (the cotangent), ``needed`` (for each argument
    of the node, whether it needs a gradient), ``dtype`` (of the first argument), ``0``, ``false``,
    or the name of a saved value. A formula with one result is that of the first argument.
    """
    func, aten_rule = getattr(aten, operation).default, RULES[operation]
    single = len(func._schema.returns) == 1
    special: dict[str, Callable[[Tensor, Edges], Any]] = {
        "g": lambda grad, edges: grad,
        "needed": lambda grad, edges: [child is not None for child, _ in edges],
        "dtype": lambda grad, edges: nodes.wanted(*edges[0]).dtype,
        "0": lambda grad, edges: 0,
        "false": lambda grad, edges: False,
    }
    names = [(special.get(name), f"_saved_{name}") for name in arguments.split()]

    def rule(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
        if single and any(child is not None for child, _ in edges[1:]):
            return None
        args = [f(grad, edges) if f else _signed(getattr(node, name)) for f, name in names]
        bare = product.bare and operation == "convolution_backward"
        out = placeholders.convolution_backward(*args) if bare else func(*args)
        try:
            chains = aten_rule(Call(func, args, {}, [grad], out, 0, product.batched_weights))
        except Undecided:
            return None
        if isinstance(out, Tensor):
            return [(out, chains[0][0])]
        return [(each, some[0][0]) if some else None for each, some in zip(out, chains)]

    return rule


_embedding = aten_call(
    "embedding_dense_backward",
    "g indices weight_sym_argsize_0 padding_idx scale_grad_by_freq",
)


def embedding(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``nn.functional.embedding``: scatters the cotangent into the rows of the table."""
    if node._saved_sparse:
        return None
    rows = node._saved_weight_sym_argsize_0
    lazy = None
    if not node._saved_scale_grad_by_freq:
        lazy = product.defer(edges[0], (rows, grad.shape[-1]), grad)
    if lazy is None:
        return _embedding(node, grad, edges, product)
    padding = _signed(node._saved_padding_idx)
    return [(lazy, [Scatter.table(node._saved_indices, tuple(grad.shape), rows, padding)])]


def _added(func: Any, grad: Tensor, shape: Sequence[int], *where: Any) -> RuleResult:
    """The cotangent added to zeros of a shape by an ATen operation of ``RULES``."""
    zeros = grad.new_zeros(tuple(shape))
    args = (zeros, *[grad if each is Tensor else each for each in where])
    call = Call(func, args, {}, [grad], func(*args), 0)
    ((chain, _),) = RULES[func._schema.name.removeprefix("aten::")](call)
    return [(call.out, chain)]


def index(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x[indices]``: adds each element to the one that it was read from."""
    shape, indices = node._saved_self_sym_sizes, node._saved_indices
    return _added(aten.index_put.default, grad, shape, indices, Tensor, True)


def gather(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x.gather(dim, index)``: adds each element to the one that it was read from."""
    if node._saved_sparse_grad:
        return None
    shape, dim = nodes.wanted(*edges[0]).shape, _signed(node._saved_dim)
    return _added(aten.scatter_add.default, grad, shape, dim, node._saved_index, Tensor)


_ROWS: tuple[tuple[NodeRule, str], ...] = (
    (transpose_2d, "T0"),
    (transpose, "Transpose0"),
    (permute, "Permute0"),
    (slice_or_select, "Slice0 Select0"),
    (reshape, "View0 UnsafeView0 ReshapeAlias0 Unsqueeze0 Squeeze0 Squeeze1 Squeeze2"),
    (identity, "Clone0 Alias0"),
    (to_copy, "ToCopy0"),
    (cat, "Cat0"),
    (stack, "Stack0"),
    (expand, "Expand0"),
    (sum_or_mean, "Sum0 Sum1 Mean0 Mean1"),
    (weighted, "Logsumexp0 LinalgVectorNorm0 BinaryCrossEntropyWithLogits0"),
    (cumsum, "Cumsum0"),
    (elementwise, "Gelu0 Silu0 Exp0 Sqrt0 Rsqrt0 Sin0 Cos0 Neg0 Log0 Log1P0 Reciprocal0 Erf0"),
    (tanh, "Tanh0"),
    (sigmoid, "Sigmoid0"),
    (pow_scalar, "Pow0"),
    (elementwise, "NativeDropout0"),
    (add, "Add0"),
    (sub, "Sub0"),
    (mul, "Mul0"),
    (mul_scalar, "Mul1"),
    (div, "Div0"),
    (absolute, "Abs0"),
    (where, "Where0"),
    (masked_fill, "MaskedFill0"),
    (clamp, "Clamp1 ClampMin0 ClampMax0"),
    (matmul, "Mm0 Bmm0"),
    (addmm, "Addmm0"),
    (sparse_addmm, "SparseAddmm0"),
    (sparse_mm_reduce, "SparseMmReduceImpl0"),
    (mv, "Mv0"),
    (logcumsumexp, "Logcumsumexp0"),
    (embedding, "Embedding0"),
    (index, "Index0"),
    (gather, "Gather0"),
    (euclidean_dist, "EuclideanDist0"),
)

# Copied from PyTorch's derivatives.yaml: node types, operation, arguments.
_CALLS = (
    ("Relu0", "threshold_backward", "g result 0"),
    ("Softmax0 SafeSoftmax0", "_softmax_backward_data", "g result dim dtype"),
    ("LogSoftmax0", "_log_softmax_backward_data", "g result dim dtype"),
    (
        "NativeLayerNorm0",
        "native_layer_norm_backward",
        "g input normalized_shape result1 result2 weight bias needed",
    ),
    (
        "NativeBatchNorm0",
        "native_batch_norm_backward",
        "g input weight running_mean running_var result1 result2 training eps needed",
    ),
    (
        "Convolution0",
        "convolution_backward",
        "g input weight bias_sym_sizes_opt stride padding dilation transposed output_padding "
        "groups needed",
    ),
    (
        "MaxPool2DWithIndices0",
        "max_pool2d_with_indices_backward",
        "g self kernel_size stride padding dilation ceil_mode result1",
    ),
    (
        "AvgPool2D0",
        "avg_pool2d_backward",
        "g self kernel_size stride padding ceil_mode count_include_pad divisor_override",
    ),
    ("AdaptiveAvgPool2D0", "_adaptive_avg_pool2d_backward", "g self"),
    (
        "UpsampleNearest2D0",
        "upsample_nearest2d_backward",
        "g output_size self_sym_sizes scales_h scales_w",
    ),
    (
        "UpsampleBilinear2D0",
        "upsample_bilinear2d_backward",
        "g output_size self_sym_sizes align_corners scales_h scales_w",
    ),
    ("LeakyRelu0", "leaky_relu_backward", "g self negative_slope false"),
    ("Elu0", "elu_backward", "g alpha scale input_scale false self"),
    ("Hardtanh0", "hardtanh_backward", "g self min_val max_val"),
    ("Hardswish0", "hardswish_backward", "g self"),
    ("Hardsigmoid0", "hardsigmoid_backward", "g self"),
    ("Softplus0", "softplus_backward", "g self beta threshold"),
    ("LogSigmoid0", "log_sigmoid_backward", "g self buffer"),
    ("MseLoss0", "mse_loss_backward", "g self target reduction"),
    ("SmoothL1Loss0", "smooth_l1_loss_backward", "g self target reduction beta"),
    ("HuberLoss0", "huber_loss_backward", "g self target reduction delta"),
    ("BinaryCrossEntropy0", "binary_cross_entropy_backward", "g self target weight reduction"),
    (
        "NllLoss0",
        "nll_loss_backward",
        "g self target weight reduction ignore_index total_weight",
    ),
    (
        "NllLoss2D0",
        "nll_loss2d_backward",
        "g self target weight reduction ignore_index total_weight",
    ),
)


def _named(rows: Iterable[tuple[NodeRule, str]]) -> dict[str, NodeRule]:
    return {
        f"{name[:-1]}Backward{name[-1]}": rule for rule, names in rows for name in names.split()
    }


NODES: dict[str, NodeRule] = {
    **_named(_ROWS),
    **_named((aten_call(operation, arguments), names) for names, operation, arguments in _CALLS),
}
"""Rules by type of node."""

# Several cotangents ------------------------------------------------------------------------------

JoinedCotangent: TypeAlias = "tuple[Tensor, dict[int, Slot]]"
"""The cotangent of the single argument, and the map to it from that of each output."""


def split(node: Node, grads: Mapping[int, Tensor]) -> JoinedCotangent:
    """``split``: each output is a slice of the argument along ``dim``."""
    out, dim = _joined_cotangent(node, grads)
    if type(node).__name__.startswith("SplitWithSizes"):
        starts = [0, *accumulate(node._saved_split_sizes)]
    else:
        starts = [k * node._saved_split_size for k in range(max(grads) + 1)]
    wide = out.shape
    return out, {k: slot(dim, starts[k], g.shape, g.shape, wide) for k, g in grads.items()}


def unbound(node: Node, grads: Mapping[int, Tensor]) -> JoinedCotangent:
    """``unbind``: each output is one index along ``dim``."""
    out, dim = _joined_cotangent(node, grads)
    cuts = {k: (*g.shape[:dim], 1, *g.shape[dim:]) for k, g in grads.items()}
    return out, {k: slot(dim, k, cuts[k], g.shape, out.shape) for k, g in grads.items()}


def _joined_cotangent(node: Node, grads: Mapping[int, Tensor]) -> tuple[Tensor, int]:
    """The node's result for its cotangents, and the dimension that was split."""
    out = node(*[grads.get(k) for k in range(nodes.outputs_of(node))])
    return out, _signed(node._saved_dim) % out.dim()


MULTI_OUTPUT_RULES: dict[str, Callable[[Node, Mapping[int, Tensor]], JoinedCotangent]] = {
    "SplitBackward0": split,
    "SplitWithSizesBackward0": split,
    "UnsafeSplitBackward0": split,
    "UnbindBackward0": unbound,
}
"""Rules by type of node, for operators with several outputs that are slices of the argument."""
