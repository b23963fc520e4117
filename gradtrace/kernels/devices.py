"""The backends. Operations that have kernels are still chosen inside the functions they call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradtrace.kernels import (
    cpu_library,
    cuda_contraction,
    cuda_launch,
    cuda_steps,
    cuda_tiling,
    cuda_top_k,
    max_contraction,
    rows,
    steps,
    sync,
)
from gradtrace.kernels.cuda_batched_tally import BatchedTally
from gradtrace.kernels.cuda_contraction import MatrixLayout
from gradtrace.kernels.reference import Contraction, Matrices
from gradtrace.kernels.sync import AsyncCopy, DeferredChecks
from gradtrace.pytorch import memory_limits

CONCAT_MAX_ELEMENTS = 1 << 12
"""Tensors of fewer elements are concatenated before they are summed."""


class Reference:
    """Plain torch, on any device."""

    synchronises = False
    max_top_k = 0
    table_entries = 1 << 22

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = device.type == "cpu"

    def contract(
        self,
        a: Matrices,
        b: Matrices,
        *,
        value: bool = True,
        index: bool = False,
        ids: Matrices | None = None,
        of_b: bool = False,
    ) -> Contraction:
        return max_contraction.contraction(a, b, value=value, index=index, marks=ids, of_b=of_b)

    def contract_strided(
        self,
        a: Tensor,
        b: Tensor,
        ids: Tensor,
        layout: MatrixLayout,
        shape: tuple[int, ...],
        value: bool,
    ) -> Contraction:
        for kernel in (cuda_contraction, max_contraction):
            if kernel.serving(a, b, ids):
                found: Contraction | None = kernel.carried(a, b, ids, layout, shape, value)
                if found is not None:
                    return found
        (i, m, n), k = layout.shape, layout.k
        left, right = a.as_strided((i, m, k), layout.a), b.as_strided((i, n, k), layout.b).mT
        of_b = layout.of_b
        words = ids.as_strided((i, n, k) if of_b else (i, m, k), layout.marks)
        words = words.mT if of_b else words
        largest, _, chosen = self.contract(left, right, value=value, ids=words, of_b=of_b)
        assert chosen is not None
        return Contraction(
            None if largest is None else largest.reshape(shape), None, chosen.reshape(shape)
        )

    contract_lines = staticmethod(rows.products)
    normalise_at = staticmethod(rows.others)
    reduce = staticmethod(steps.reduce)
    scatter = staticmethod(steps.scatter)
    sparse = staticmethod(steps.sparse)
    sparse_sum = staticmethod(steps.sparse_sum)
    normalise = staticmethod(steps.normalise)
    merge = staticmethod(steps.merge)
    merge_pair = staticmethod(cuda_steps.larger)
    fuses = staticmethod(steps.on_gpu)
    tally = staticmethod(steps.tally)
    measure = staticmethod(steps.measured)
    fetch = staticmethod(sync.fetch_scalars)
    copy = AsyncCopy

    def contract_top(self, parts: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, ...] | None:
        served = cuda_top_k.serves(parts, weight)
        return cuda_top_k.contraction(parts, weight) if served else None

    def masked(self, ids: Tensor, value: Tensor) -> Tensor:
        if not self.synchronises and bool(value.all()):  # reading is cheaper than copying
            return ids
        return ids * (value != 0)

    def used(self, ids: Tensor, count: int) -> Tensor:
        bits = cuda_steps.used(ids, count)
        if bits is not None:
            return _flags(bits, count)
        if self.synchronises:  # bincount would synchronise for its size
            flags = torch.zeros(count, dtype=torch.bool, device=ids.device)
            return flags.index_fill_(0, ids.reshape(-1).long(), True).cpu()
        return torch.bincount(ids.reshape(-1), minlength=count).cpu() != 0

    def close_gaps(self, ids: Tensor, count: int) -> tuple[Tensor, Callable[[], Tensor]] | None:
        bits = cuda_steps.used(ids, count)
        if bits is None:
            return None
        copy = AsyncCopy(bits)
        return self.renumber(ids, cuda_steps.closed(bits, count)), lambda: _flags(
            copy.read(), count
        )

    def renumber(self, ids: Tensor, table: Tensor) -> Tensor:
        table = table.to(ids.device, non_blocking=True)
        found = cuda_steps.renumbered(ids, table)
        return table[ids] if found is None else found

    def batched_tally(self, gradient: Tensor) -> BatchedTally | None:
        return BatchedTally(gradient.device) if steps.batchable(gradient) else None

    def add_rows(self, total: Tensor, index: Tensor, rows: Tensor) -> None:
        total.index_add_(0, index, rows)

    def finite_sums(self, grads: Sequence[Tensor]) -> list[Tensor]:
        by_shape: dict[tuple[object, ...], list[Tensor]] = {}
        sums: list[Tensor] = []
        for grad in grads:
            if grad.numel() < CONCAT_MAX_ELEMENTS:
                by_shape.setdefault((grad.dtype, grad.shape), []).append(grad)
            else:
                sums.append(grad.sum())
        for some in by_shape.values():
            sums.append((torch.cat(some) if some[0].dim() else torch.stack(some)).sum())
        return sums

    def checks(self) -> DeferredChecks | None:
        return DeferredChecks() if self.synchronises else None

    def check(self, checks: DeferredChecks | None, holds: Callable[[], Tensor]) -> bool:
        if checks is None or not self.synchronises:
            return bool(holds().all())
        checks.add(holds())
        return True

    @property
    def label(self) -> str:
        return str(self.device)

    def free_bytes(self) -> int | None:
        return memory_limits.available() if self.host else None

    def held_bytes(self) -> int | None:
        return memory_limits.resident() if self.host else None

    def spare_bytes(self) -> int | None:
        return None

    def workspace_bytes(self, shape: tuple[int, int, int], k: int) -> int:
        return 0

    def workspace_max_bytes(self) -> int:
        return 0


def _flags(bits: Tensor, count: int) -> Tensor:
    """The bits of int32 words, lowest first, as ``count`` flags on the CPU."""
    octets = bits.cpu().view(torch.uint8).unsqueeze(1)
    places = torch.arange(8, dtype=torch.uint8, device="cpu")
    return (octets >> places & 1).view(-1)[:count].bool()


class Cpu(Reference):
    """The compiled library."""


class Cuda(Reference):
    """The CUDA kernels."""

    synchronises = True
    max_top_k = cuda_top_k.MAX_PARTS
    table_entries = 1 << 24

    def add_rows(self, total: Tensor, index: Tensor, rows: Tensor) -> None:
        # index_add_ adds in whatever order threads come, and index_put_ sorts first; on the CPU it
        # is the other way round
        total.index_put_((index,), rows, accumulate=True)

    def finite_sums(self, grads: Sequence[Tensor]) -> list[Tensor]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            if grad.numel():
                by_dtype.setdefault(grad.dtype, []).append(grad)
        return [x for some in by_dtype.values() for x in torch._foreach_norm(some, float("inf"))]

    @property
    def label(self) -> str:
        return f"the GPU ({self.device}, {torch.cuda.get_device_name(self.device)})"

    def free_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.device)
        used, reserved = cuda_launch.allocated_and_reserved(self.device)
        cached = reserved - used  # held by PyTorch's caching allocator, but unused
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.device))
        return max(0, min(free + cached, allowed - used))

    def held_bytes(self) -> int | None:
        return cuda_launch.allocated_and_reserved(self.device)[0]

    def spare_bytes(self) -> int | None:
        return self.free_bytes()

    def workspace_bytes(self, shape: tuple[int, int, int], k: int) -> int:
        return cuda_tiling.workspace(shape, k, cuda_launch.processors(self.device))

    def workspace_max_bytes(self) -> int:
        return cuda_contraction.WORKSPACE_MAX_BYTES


def chosen(device: torch.device) -> Reference:
    """The backend for a device."""
    if device.type == "cuda":
        return Cuda(device)
    return Cpu(device) if device.type == "cpu" and cpu_library.library() else Reference(device)
