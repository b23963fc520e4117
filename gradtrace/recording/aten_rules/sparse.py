"""Products with a sparse constant, in time and memory proportional to its nonzero entries."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.errors import Unsupported
from gradtrace.linops import Around, Map, Scatter, Sparse
from gradtrace.recording.aten_rules.call import Call, Chains, Undecided
from gradtrace.types import Shape


def entries(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (dims, n) and values (n,) of a sparse matrix or a batch of them, coalesced."""
    if matrix.layout is not torch.sparse_coo:
        matrix = matrix.to_sparse()
    if matrix.dense_dim():
        raise Unsupported("a sparse matrix of dense blocks cannot be followed; use to_dense()")
    matrix = matrix.coalesce()
    return matrix.indices(), matrix.values()


def matrix_times(matrix: Tensor, in_shape: Shape, out_shape: Shape) -> list[Map]:
    """``matrix @ in``, of matrices, batches of matrices, or a matrix and a vector."""
    places, weight = entries(matrix)
    rows, columns = places[-2], places[-1]
    blocks, inner = 1, in_shape[-1] if len(in_shape) == matrix.dim() else 1
    if matrix.dim() == 3:
        blocks, height, width = matrix.shape
        rows, columns = places[0] * height + rows, places[0] * width + columns
    around = Around(blocks, 1, inner)
    return [Sparse.of((rows, columns, weight), in_shape, out_shape, around)]


def times_matrix(matrix: Tensor, in_shape: Shape, out_shape: Shape) -> list[Map]:
    """``in @ matrix``, of matrices."""
    (rows, columns), weight = entries(matrix)
    around = Around(1, in_shape[0], 1)
    return [Sparse.of((columns, rows, weight), in_shape, out_shape, around)]


def product(call: Call) -> Chains:
    """``mm``, ``bmm`` or ``mv`` with a sparse constant operand."""
    a, b = call.args[:2]
    call.one_of(a, b)
    dep, other = (a, b) if call.dep is a else (b, a)
    if dep.is_complex() or other.is_complex() or (dep is a and other.dim() != 2):
        raise Undecided
    chain = (times_matrix if dep is a else matrix_times)(
        other, tuple(dep.shape), tuple(call.out.shape)
    )
    return [(chain, dep)]


def embedding_bag(call: Call) -> Chains:
    """The gradient of ``embedding_bag`` by its table."""
    names = [argument.name for argument in call.func._schema.arguments]
    given = {name: call.get(n, name) for n, name in enumerate(names)}
    g = call.only(given["grad"])
    indices, mode = given["indices"], given["mode"]
    padding = -1 if given.get("padding_idx") is None else given["padding_idx"]
    shape, out = tuple(g.shape), tuple(call.out.shape)
    if mode == 2:  # max: for each bag and column, the row that was largest
        there = (given["bag_size"] > 0).unsqueeze(1)
        column = torch.arange(shape[1], device=g.device)
        target = torch.where(there, given["maximum_indices"] * shape[1] + column, -1)
        return [([Scatter(target, out)], g)]
    bag = bag_of(indices, given.get("offsets"), given["offset2bag"])
    weight = torch.ones(indices.shape, dtype=g.dtype, device=g.device)
    if given.get("per_sample_weights") is not None:
        weight = given["per_sample_weights"].to(g.dtype)
    if mode == 1:
        weight = weight / given["bag_size"].clamp(min=1).to(g.dtype)[bag]
    if given["scale_grad_by_freq"]:
        weight = weight * _frequency(call, g, indices, weight, padding)
    kept = indices != padding
    entry = (indices[kept].long(), bag[kept].long(), weight[kept])
    return [([Sparse.of(entry, shape, out, Around(inner=shape[1]))], g)]


def _frequency(call: Call, g: Tensor, indices: Tensor, weight: Tensor, padding: int) -> Tensor:
    """The factor of each index with ``scale_grad_by_freq``, found with the operation itself.

    Not computed from counts: on the CPU PyTorch uses the frequency of other rows than intended, and
    the gradient is by definition what PyTorch computes.
    """
    found: Tensor = call.function(g)(torch.ones_like(g))[:, 0]
    kept = torch.where(indices == padding, 0, weight)
    plain = torch.zeros_like(found).index_add(0, indices, kept)
    return (found / torch.where(plain == 0, 1, plain))[indices]


def bag_of(indices: Tensor, offsets: Tensor | None, offset2bag: Tensor) -> Tensor:
    """The bag of each index; computed from the offsets where the forward pass did not save it."""
    if len(offset2bag) == len(indices) or offsets is None:
        return offset2bag
    number = torch.arange(len(indices), device=indices.device)
    return torch.searchsorted(offsets.long().contiguous(), number, right=True) - 1


def bag_weights(
    g: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Tensor:
    """The gradient of ``embedding_bag`` by ``per_sample_weights``."""
    rows = weight.index_select(0, indices) * (indices != padding_idx).unsqueeze(1)
    return (g.index_select(0, bag_of(indices, offsets, offset2bag)) * rows).sum(1)
