"""``out[i] = ⊕ in[j]`` over the j whose target is i: index_add, embeddings, pooling."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import backend_of
from gradtrace.linops import tuning
from gradtrace.linops.base import Best, Map, Rows, Selection, chosen, taken_at
from gradtrace.linops.indexing import each_at
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import UNTARGETED, each, places
from gradtrace.types import Shape


class SparseElements(NamedTuple):
    """Some elements: their numbers, values, provenance ids and, if known, their largest
    |contribution|.
    """

    at: Tensor
    value: Tensor
    ids: Tensor
    size: Tensor | None = None


class Scatter(Map):
    """``out[i] = ⊕ in[j]`` over ``target[j] = i``; elements with target -1 are dropped."""

    __slots__ = ("target",)
    single_target = unit_weights = True

    def __init__(self, target: Tensor, out_shape: Shape) -> None:
        self.target = target
        self.in_shape = tuple(target.shape)
        self.out_shape = out_shape

    def structure(self) -> object:
        return type(self), self.sparse, self.in_shape

    @classmethod
    def table(cls, indices: Tensor, shape: Shape, rows: int, padding: int = -1) -> Scatter:
        """The backward of an embedding: row n of the input is added to row ``indices[n]`` of a
        table with ``rows`` rows; input rows with index ``padding`` are dropped.
        """
        width, places = shape[-1], indices.reshape(-1, 1)
        target = places * width + torch.arange(width, device=indices.device)
        if padding >= 0:
            target = torch.where(places == padding, -1, target)
        return cls(target.reshape(shape), (rows, width))

    def targets(self) -> Tensor:
        """For each input element the number of its output element; -1 for none."""
        return self.target

    def apply(self, x: Tensor) -> Tensor:
        out = x.new_zeros(self.outputs + UNTARGETED)
        out.index_add_(0, places(self.target.reshape(-1), self.outputs), x.reshape(-1))
        return out[: self.outputs].reshape(self.out_shape)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """``total += apply(x)`` in place; only elements that are a target are written."""
        target = self.target.reshape(-1)
        there = (target >= 0).nonzero().reshape(-1)
        total.view(-1).index_add_(0, target[there], x.reshape(-1)[there])
        return total

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        flat = each(x, lambda part: part.reshape(-1))
        found = semiring.scatter(flat, self.target.reshape(-1), self.outputs)
        return each(found, lambda part: part.reshape(self.out_shape))

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        if at is None or at.numel() >= self.outputs:
            return chosen(*super().best(x), at)
        part, mine, back = self._into(at)
        small = part.best(x.reshape(-1)[mine])
        source = taken_at(mine, small.source, -1)
        return Best(small.value[back], source[back])

    def apply_at(self, x: Tensor, at: Tensor) -> Tensor:
        part, mine, back = self._into(at)
        return part.apply(x.reshape(-1)[mine])[back]

    def _into(self, at: Tensor) -> tuple[Scatter, Tensor, Tensor]:
        """The scatter into these outputs alone, each once; the inputs that have such a target; and
        for each of ``at`` the number of its output.
        """
        wanted, back = at.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        target = self.target.reshape(-1).contiguous()
        place = torch.searchsorted(wanted, target).clamp(max=max(0, len(wanted) - 1))
        mine = (wanted[place] == target).nonzero().reshape(-1) if len(wanted) else target[:0]
        return Scatter(place[mine], (len(wanted),)), mine, back

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        target = self.target.reshape(-1)
        if not value and self.sparse:
            elements = self.few(x, ids)
            out = ids.new_zeros(self.outputs)
            out[elements.at] = elements.ids
            return None, out.reshape(self.out_shape)
        largest, selected = backend_of(x).scatter(
            x.reshape(-1), ids.reshape(-1), target, self.outputs
        )
        return largest.reshape(self.out_shape) if value else None, selected.reshape(self.out_shape)

    @property
    def sparse(self) -> bool:
        """Whether most outputs are the target of no input."""
        return tuning.SPARSE_RATIO * self.inputs < self.outputs

    def few(self, x: Tensor, ids: Tensor) -> SparseElements:
        """``apply`` and ``select`` for only the outputs that are the target of some input."""
        target, flat, ids = self.target.reshape(-1), x.reshape(-1), ids.reshape(-1)
        there = (target >= 0).nonzero().reshape(-1)
        if len(there) < len(
            target
        ):  # on a GPU all those without a target would wait for each other
            target, flat, ids = target[there], flat[there], ids[there]
        at, place = target.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        size, selected = backend_of(x).scatter(flat, ids, place, len(at))
        return SparseElements(
            at, flat.new_zeros(len(at)).index_add_(0, place, flat), selected, size
        )

    def rows(self, at: Tensor) -> Rows:
        target = self.target.reshape(-1).to(at.device)
        order = target.argsort(stable=True)
        ranked = target[order]
        first = torch.searchsorted(ranked, at)
        count = torch.searchsorted(ranked, at, right=True) - first
        number = torch.arange(int(count.max()) if len(at) else 0, device=at.device)
        place = first.unsqueeze(1) + number
        there = number < count.unsqueeze(1)
        source = order[torch.where(there, place, 0)] if len(order) else torch.zeros_like(place)
        return Rows(torch.where(there, source, -1), torch.ones((), device=at.device))

    @property
    def width(self) -> int:
        kept = self.target[self.target >= 0]
        if not kept.numel():
            return 1
        _, times = kept.unique(return_counts=True)  # type: ignore[no-untyped-call]
        return int(times.max())

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        return self.max_source((x != 0).int()) != 0

    def copies(self, count: int) -> Map | None:
        return self._batched(self.target.expand(count, *self.in_shape))

    def sums_over(self, dim: int) -> bool:
        return True

    def narrow(self, dim: int, index: Tensor) -> Map:
        return self._batched(each_at(self.target, dim, index))

    def _batched(self, targets: Tensor) -> Scatter:
        """One scatter for a batch of targets, (count, *in_shape), each into its own output."""
        count = len(targets)
        shift = torch.arange(count, device=targets.device) * self.outputs
        shift = shift.reshape(count, *[1] * (targets.dim() - 1))
        return Scatter(torch.where(targets >= 0, targets + shift, -1), (count, *self.out_shape))

    def max_source(self, x: Tensor) -> Tensor:
        place = places(self.target.reshape(-1), self.outputs)
        out = x.new_zeros(self.outputs + UNTARGETED).scatter_reduce(0, place, x.reshape(-1), "amax")
        return out[: self.outputs].reshape(self.out_shape)
