"""The matrix of every linear map by an independent, slow definition, for tests to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gradtrace.linops import (
    Contract,
    Convolve,
    Cut,
    Dense,
    Distances,
    Identity,
    Index,
    LowRankColumns,
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
)

Shape = tuple[int, ...]


def matrix_of(m: Map) -> Tensor:
    """J as a matrix of shape (outputs, inputs), in float64."""
    with torch.no_grad():
        return MATRICES[type(m)](m)


def forward(x: Tensor, w: Tensor, g: Windows) -> Tensor:
    """The convolution itself."""
    d = len(g.stride)
    if g.transposed:
        f: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[d - 1]
        return f(x, w, None, g.stride, g.padding, g.output_padding, g.groups, g.dilation)
    f = (F.conv1d, F.conv2d, F.conv3d)[d - 1]
    return f(x, w, None, g.stride, g.padding, g.dilation, g.groups)


def units(shape: Shape) -> list[Tensor]:
    n = math.prod(shape)
    return [row.reshape(shape) for row in torch.eye(n, dtype=torch.float64)]


def by_columns(f: Callable[[Tensor], Tensor], m: Map) -> Tensor:
    """The matrix of a linear function, from what it makes of unit vectors."""
    columns = [f(unit).reshape(-1) for unit in units(m.in_shape)]
    return torch.stack(columns, 1) if columns else torch.zeros(m.outputs, 0, dtype=torch.float64)


def of_scale(m: Scale) -> Tensor:
    matrix = torch.zeros(m.outputs, m.inputs, dtype=torch.float64)
    weight = torch.as_tensor(m.weight, dtype=torch.float64).expand(m.in_shape).reshape(-1)
    for i in range(m.inputs):
        matrix[i, i] = weight[i]
    return matrix


def of_scatter(m: Scatter) -> Tensor:
    matrix = torch.zeros(m.outputs, m.inputs, dtype=torch.float64)
    for j, i in enumerate(m.target.reshape(-1).tolist()):
        if i >= 0:
            matrix[i, j] += 1
    return matrix


def of_distances(m: Distances) -> Tensor:
    """Pair by pair, coordinate by coordinate."""
    batch, n, k = m.x.shape
    many = m.y.shape[1]
    matrix = torch.zeros(batch, n, k, batch, n, many, dtype=torch.float64)
    gaps = (m.x.unsqueeze(2) - m.y.unsqueeze(1)).double()
    for b, i, j, c in product(range(batch), range(n), range(many), range(k)):
        gap = float(gaps[b, i, j, c])
        if m.power == math.inf:
            matrix[b, i, c, b, i, j] = (abs(gap) == float(m.distance[b, i, j])) * (gap > 0 or -1)
        elif gap:
            matrix[b, i, c, b, i, j] = math.copysign(abs(gap) ** (m.power - 1), gap)
    return matrix.reshape(m.outputs, m.inputs)


def of_beside(m: SideBySide) -> Tensor:
    return torch.block_diag(*(matrix_of(each) for each in m.maps))


def of_sparse(m: Sparse) -> Tensor:
    """A product of Kronecker's for each block."""
    blocks, planes, inner = m.around
    rows, columns = (n // max(1, math.prod(m.around)) for n in (m.outputs, m.inputs))
    each = torch.zeros(blocks, rows, columns, dtype=torch.float64)
    for block, row in product(range(blocks), range(rows)):
        first, last = m.starts[block * rows + row : block * rows + row + 2].tolist()
        for e in range(first, last):
            each[block, row, m.source[e]] += m.weight[e]
    eyes = [torch.eye(n, dtype=torch.float64) for n in (planes, inner)]
    parts = [torch.kron(eyes[0], torch.kron(matrix, eyes[1])) for matrix in each]
    if not m.outputs * m.inputs:
        return torch.zeros(m.outputs, m.inputs, dtype=torch.float64)
    return torch.block_diag(*parts)


def of_contract(m: Contract) -> Tensor:
    """One product after the other, for every value of every letter."""
    matrix = np.zeros((*m.out_shape, *m.in_shape))
    weight = m.weight.double().numpy()
    x, rest = m.spec.split(",")
    w, out = rest.split("->")
    size = dict(zip(x, m.in_shape)) | dict(zip(w, m.weight.shape))
    letters = sorted(size)
    for values in product(*(range(size[letter]) for letter in letters)):
        at = dict(zip(letters, values))
        place = [tuple(at[letter] for letter in word) for word in (out, x, w)]
        matrix[(*place[0], *place[1])] += weight[place[2]]
    return torch.from_numpy(matrix).reshape(m.outputs, m.inputs)


def of_convolve(m: Convolve) -> Tensor:
    """The convolution is linear in each operand: what it makes of unit vectors."""
    other = m.other.double()
    if not m.inputs * m.outputs:
        return torch.zeros(m.outputs, m.inputs, dtype=torch.float64)
    if m.to_kernel:
        made = [forward(other, unit, m.windows) for unit in units(m.out_shape)]
        return torch.stack(made).reshape(m.outputs, m.inputs)
    sizes = m.out_shape[-len(m.windows.stride) - 1 :]  # without samples, or with
    every = torch.eye(m.outputs, dtype=torch.float64).reshape(-1, *sizes)
    return forward(every, other, m.windows).reshape(m.outputs, m.inputs)


def of_normaliser(m: Normaliser) -> Tensor:
    """Element by element, as the docstring has it."""
    shape = m.in_shape
    places = list(product(*map(range, shape)))
    every = (t.double().expand(shape).reshape(-1).tolist() for t in (m.diagonal, *m.left, *m.right))
    d, *uv = every  # numbers of Python: tensors of one element would take most of the time
    pairs = list(zip(uv[: len(m.left)], uv[len(m.left) :]))
    fixed = [tuple(p for k, p in enumerate(place) if k not in m.dims) for place in places]
    matrix = torch.zeros(len(places), len(places), dtype=torch.float64)
    lines = matrix.tolist()
    for i, j in product(range(len(places)), repeat=2):
        if fixed[i] == fixed[j]:
            lines[i][j] = sum(u[i] * v[j] for u, v in pairs)
        if i == j:
            lines[i][j] += d[i]
    return torch.tensor(lines, dtype=torch.float64).reshape(matrix.shape)


def of_scan(m: Scan) -> Tensor:
    places = list(product(*map(range, m.in_shape)))
    matrix = torch.zeros(len(places), len(places), dtype=torch.float64)
    for (i, a), (j, b) in product(enumerate(places), repeat=2):
        same = all(p == q for k, (p, q) in enumerate(zip(a, b)) if k != m.dim)
        far = b[m.dim] - a[m.dim]
        matrix[i, j] = float(same and (far >= 0 if m.reverse else far <= 0))
    return matrix


def of_reduce(m: Reduce) -> Tensor:
    return by_columns(lambda x: x.sum(m.dims) if m.dims else x, m)


def of_cut(m: Cut) -> Tensor:
    """One at each of the elements from ``start`` on, as many as the output has."""
    numbers = torch.arange(m.inputs).reshape(m.in_shape)
    along = torch.arange(m.start, m.start + m.out_shape[m.dim])
    return torch.eye(m.inputs, dtype=torch.float64)[numbers.index_select(m.dim, along).reshape(-1)]


def of_slot(m: Slot) -> Tensor:
    """By concatenation with zeros."""

    def put(x: Tensor) -> Tensor:
        rest = m.out_shape[m.dim] - m.start - m.cut[m.dim]
        sizes = [(*m.cut[: m.dim], n, *m.cut[m.dim + 1 :]) for n in (m.start, rest)]
        before, after = (x.new_zeros(size) for size in sizes)
        return torch.cat([before, x.reshape(m.cut), after], m.dim)

    return by_columns(put, m)


def of_columns(m: LowRankColumns) -> Tensor:
    """For each input its columns of the whole matrix."""
    shape, dims = m.out_shape[1:], [d - 1 for d in m.dims]
    matrix = of_normaliser(Normaliser(m.diagonal, list(zip(m.left, m.right)), dims, shape))
    number = torch.arange(math.prod(shape)).reshape(shape)
    each = [number.index_select(m.dim, row).reshape(-1) for row in m.index]
    return torch.block_diag(*(matrix[:, columns] for columns in each))


MATRICES: dict[type[Map], Callable[[Any], Tensor]] = {
    Identity: lambda m: by_columns(lambda x: x, m),
    Scale: of_scale,
    Index: lambda m: by_columns(m.move, m),
    Cut: of_cut,
    Slot: of_slot,
    Reduce: of_reduce,
    Scatter: of_scatter,
    Sparse: of_sparse,
    Distances: of_distances,
    Contract: of_contract,
    Convolve: of_convolve,
    Normaliser: of_normaliser,
    LowRankColumns: of_columns,
    Scan: of_scan,
    SideBySide: of_beside,
    Dense: lambda m: m.matrix.double(),
}
