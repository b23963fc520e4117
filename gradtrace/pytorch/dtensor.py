"""Tensors of ``torch.distributed.tensor``, of which each rank holds a part.

A ``DTensor`` has the shape of the whole tensor. Along each dimension of its mesh it is sharded
(each rank has its own slices), replicated, or partial (the whole is the sum over ranks).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradtrace.errors import Unsupported
from gradtrace.types import Shape

RESIDENT_TENSORS = 2
"""The most tensors that are kept whole for maps that read them."""

TO_LOCAL, FROM_LOCAL = "_ToTorchTensorBackward", "_FromTorchTensorBackward"
"""The nodes of ``dtensor.to_local()`` and ``DTensor.from_local(x)``."""

REDISTRIBUTE = "RedistributeBackward"
"""The node of ``dtensor.redistribute()``, which does not change the whole tensor."""

NODES = frozenset({TO_LOCAL, FROM_LOCAL, REDISTRIBUTE})


def is_dtensor(x: object) -> bool:
    """Whether this is a ``DTensor``; they can only exist once their module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(x, kind)


def in_use() -> bool:
    """Whether there may be tensors of this kind in the process."""
    return "torch.distributed.tensor" in sys.modules


def told(mine: Any, mesh: Any, axis: int = 0) -> list[Any]:
    """What each rank along a dimension of the mesh says, in their order. Called by all."""
    group = mesh.get_group(axis)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    return found


class LocalParts(NamedTuple):
    """Values of which each rank of a mesh has its own part."""

    mesh: Any
    values: frozenset[int]


class Layout:
    """Which slices of a tensor each rank of a mesh holds; ``dims`` are the sharded ones, by
    dimension of the mesh, None where all ranks hold the same.
    """

    def __init__(self, mesh: Any, dims: tuple[int | None, ...], shape: Shape) -> None:
        self.mesh, self.dims, self.shape = mesh, dims, shape

    @classmethod
    def of(cls, mesh: Any, placements: Sequence[Any], shape: Shape) -> Layout:
        """The layout of a gradient; that of a partial sum is replicated."""
        dims = []
        for placement in placements:
            if type(placement).__name__ == "_StridedShard":
                raise Unsupported(
                    "a DTensor is sharded twice along one dimension, which cannot be followed; "
                    "trace the model on one of the two meshes"
                )
            dims.append(int(placement.dim) % len(shape) if placement.is_shard() else None)
        return cls(mesh, tuple(dims), tuple(shape))

    @property
    def whole(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(dim is None or self.mesh.size(n) == 1 for n, dim in enumerate(self.dims))

    def placements(self) -> list[Any]:
        """The layout in terms of ``torch.distributed.tensor``."""
        from torch.distributed.tensor import Replicate, Shard

        return [Replicate() if dim is None else Shard(dim) for dim in self.dims]

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor, of this rank's part and those of the others. Called by all ranks."""
        from torch.distributed.tensor import DTensor

        strides = torch.empty(self.shape, device="meta").stride()
        found = DTensor.from_local(
            part.contiguous(),
            self.mesh,
            self.placements(),
            run_check=False,
            shape=torch.Size(self.shape),
            stride=strides,
        )
        return whole(found)

    def part(self, x: Tensor) -> Tensor:
        """The part of a whole tensor that this rank holds."""
        found = replicate(x.contiguous(), self.mesh)
        part: Tensor = found.redistribute(placements=self.placements()).to_local().clone()
        return part

    @property
    def _axis(self) -> int:
        """The dimension of the mesh along which ranks hold different parts."""
        return next(n for n, dim in enumerate(self.dims) if dim is not None)

    @property
    def rank(self) -> int:
        """The number of this rank among those that hold other parts."""
        return int(self.mesh.get_local_rank(self._axis))

    def told(self, mine: Any) -> list[Any]:
        """What each of the ranks that hold other parts says, in their order. Called by all."""
        return told(mine, self.mesh, self._axis)

    def batched(self, count: int) -> Layout:
        """The layout of ``count`` tensors along a new first dimension."""
        dims = tuple(None if dim is None else dim + 1 for dim in self.dims)
        return Layout(self.mesh, dims, (count, *self.shape))


def whole(x: Any) -> Tensor:
    """A ``DTensor`` as a plain tensor, gathered and summed over ranks. Called by all ranks."""
    with torch.no_grad():
        found: Tensor = x.detach().full_tensor()
        return found


def replicate(x: Tensor, mesh: Any) -> Any:
    """A tensor that is the same on all ranks, as a ``DTensor``."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def replicated(x: Any) -> bool:
    """Whether each rank holds the whole of a ``DTensor``."""
    return all(placement.is_replicate() for placement in x.placements)


class WholeTensors:
    """Whole tensors for maps that read them: gathered, unless they were among the last."""

    def __init__(self) -> None:
        self._resident: dict[int, tuple[Any, Tensor]] = {}  # by id; the last one read last

    def read(self, source: Any, key: int) -> torch.UntypedStorage:
        """The memory of a whole tensor."""
        found = self._resident.pop(id(source), None)
        if found is None:
            while len(self._resident) >= RESIDENT_TENSORS:
                del self._resident[next(iter(self._resident))]
            found = source, whole(source).contiguous()
        self._resident[id(source)] = found
        return found[1].untyped_storage()

    def read_all(self) -> None:
        """All ranks read the same tensors in the same order, so nothing is read in advance."""
