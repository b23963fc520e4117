"""Inner products of a leaf's gradient and of its parts, without the gradients where they are large.

The gradient of a weight is ``w' x``, for activations w, (rows, in), and cotangents x, (rows, out).
With few rows it is far larger than x, but ``⟨w' x, w' y⟩ = ⟨x, (w w') y⟩``. The gradient of an
embedding is 0 but in the rows of the words that occurred. So such a leaf is held as ``TailPart``s,
by the cotangents that it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.ir.lazy_gradient import WEIGHT_GRADIENT_SPEC, LazyGradient, LazyPart, layout_key
from gradtrace.linops import Contract, Identity, Index, Map, Scatter, is_permutation

GRAM_ELEMENTS = 1 << 20
"""Elements that are converted to float64 at a time for inner products."""

WHOLE = -1
"""The gradient itself, beside components from 0 on."""


class TailPart(NamedTuple):
    """One contribution to a leaf: ``maps[-1](... maps[0](x))`` for each ``x`` of ``rows``.

    These are the gradient (``WHOLE``) and what of it came through components; one that is absent
    is 0.
    """

    maps: tuple[Map, ...]
    rows: dict[int, Tensor]

    def then(self, map_: Map) -> TailPart:
        """The contribution after another map."""
        if isinstance(map_, Identity) and map_.in_shape == map_.out_shape:
            return self
        return TailPart((*self.maps, map_), self.rows)

    def all_through(self, components: Sequence[int]) -> TailPart:
        """The same contribution, all of which came through these components."""
        return TailPart(self.maps, {**self.rows, **dict.fromkeys(components, self.rows[WHOLE])})

    @property
    def inputs(self) -> int:
        """How many elements it is made of."""
        return self.maps[0].inputs


def dense(parts: Sequence[TailPart], key: int) -> Tensor | None:
    """The sum of all contributions to one row; None if it has none."""
    found = [LazyPart(part.maps, part.rows[key]) for part in parts if key in part.rows]
    return LazyGradient(found).total() if found else None


def leaf_gram(
    parts: Sequence[TailPart], components: Sequence[int], whole: Callable[[], Tensor]
) -> Tensor:
    """``gram`` of a leaf's gradient and of its parts through components: (1, rows, rows).

    ``whole`` computes the gradient, where it is needed.
    """
    keys = (WHOLE, *components)
    if _are_weight_gradients(parts):
        return _weight_gram(parts, keys)
    mine = [part for part in parts if any(c in part.rows for c in components)]
    if mine and all(_is_scatter(part) for part in mine):
        return _scatter_gram(mine, keys, None if len(mine) == len(parts) else whole())
    found = [whole(), *(dense(parts, component) for component in components)]
    return gram([row.unsqueeze(0) for row in found if row is not None])


def gram(rows: Sequence[Tensor]) -> Tensor:
    """``out[p, a, b] = Σᵢ rows[a][p, i] · rows[b][p, i]`` in float64."""
    pairs, device = len(rows[0]), rows[0].device
    total = torch.zeros(pairs, len(rows), len(rows), dtype=torch.float64, device=device)
    flat = [row.reshape(pairs, -1) for row in rows]
    size = flat[0].shape[1]
    step = max(1, min(size, GRAM_ELEMENTS // max(1, len(rows) * pairs)))
    buffer = torch.empty(pairs, len(rows), step, dtype=torch.float64, device=device)
    for n in range(0, size, step):
        some = buffer[:, :, : min(step, size - n)]
        for k, row in enumerate(flat):
            some[:, k].copy_(row[:, n : n + step])
        total += some @ some.mT
    return total


def gram_by_pair(rows: Sequence[Tensor], of: Tensor, pairs: int) -> Tensor:
    """``gram`` where each element belongs to the pair ``of`` it, from 1 on (0: to none)."""
    flat = torch.stack([row.reshape(-1).double() for row in rows])
    number = of.reshape(-1)
    order = number.argsort(stable=True)
    counts = torch.bincount(number, minlength=pairs + 1).tolist()
    parts = torch.split(flat[:, order], counts, 1)[1:]
    return torch.stack([part @ part.mT for part in parts])


def _are_weight_gradients(parts: Sequence[TailPart]) -> bool:
    """Whether all are ``w' x`` with few rows, in one layout."""
    contracts = [part.maps[0] for part in parts if isinstance(part.maps[0], Contract)]
    if len(contracts) < len(parts) or any(c.spec != WEIGHT_GRADIENT_SPEC for c in contracts):
        return False
    if sum(c.inputs for c in contracts) >= contracts[0].outputs:
        return False
    moves = [part.maps[1:] for part in parts]
    if not all(
        isinstance(move, Identity | Index) and is_permutation(move)
        for some in moves
        for move in some
    ):
        return False
    return len(parts) == 1 or len({tuple(map(layout_key, some)) for some in moves}) == 1


def _weight_gram(parts: Sequence[TailPart], keys: Sequence[int]) -> Tensor:
    """``⟨w' x, w' y⟩ = ⟨x, (w w') y⟩`` for all rows x, y of the contributions one below another."""
    weights = [part.maps[0].weight for part in parts if isinstance(part.maps[0], Contract)]
    weight = torch.cat([w.double() for w in weights])  # (m, k)
    inner = weight @ weight.mT
    sizes, device = [len(w) for w in weights], weight.device
    width = parts[0].maps[0].in_shape[1]
    count, height = len(keys), len(weight)
    step = max(1, min(width, GRAM_ELEMENTS // max(1, count * height)))
    total = torch.zeros(1, count, count, dtype=torch.float64, device=device)
    for n in range(0, width, step):
        last = min(n + step, width)
        rows = torch.zeros(count, height, last - n, dtype=torch.float64, device=device)
        for k, key in enumerate(keys):
            for part, here in zip(parts, torch.split(rows[k], sizes)):
                if key in part.rows:
                    here.copy_(part.rows[key][:, n:last])
        total += rows.reshape(count, -1) @ (inner @ rows).reshape(count, -1).mT
    return total


def _is_scatter(part: TailPart) -> bool:
    moves = part.maps[1:]
    return isinstance(part.maps[0], Scatter) and all(isinstance(m, Identity) for m in moves)


def _scatter_gram(parts: Sequence[TailPart], keys: Sequence[int], whole: Tensor | None) -> Tensor:
    """``gram`` over the elements that are the target of some input. ``whole`` is the gradient, if
    it has other contributions too.
    """
    targets = [part.maps[0].target for part in parts if isinstance(part.maps[0], Scatter)]
    target = torch.cat([each.reshape(-1) for each in targets])
    used, place = target.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    places = torch.split(place, [each.numel() for each in targets])
    shape = (len(keys), len(used))
    rows = torch.zeros(shape, dtype=torch.float64, device=target.device)
    for row, key in zip(rows, keys):
        for part, at in zip(parts, places):
            if key in part.rows and (key != WHOLE or whole is None):
                row.index_add_(0, at, part.rows[key].reshape(-1).double())
    there = used >= 0  # -1, no target, is the first of them, if it occurs
    rows *= there
    if whole is None:
        return gram([row.unsqueeze(0) for row in rows])
    rows[0] = torch.where(there, whole.reshape(-1)[used.clamp(min=0)].double(), 0.0)
    found = gram([row.unsqueeze(0) for row in rows])
    found[0, 0, 0] = gram([whole.unsqueeze(0)])[0, 0, 0]
    return found
