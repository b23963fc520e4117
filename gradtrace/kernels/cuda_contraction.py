"""The (max, ×) contraction on a GPU: CUDA kernels compiled on first use, with Triton as fallback.
Both return the same bits as ``plain_contraction``.

The CUDA kernels read float32 in place, by strides; half precisions are first copied to float32, or
multiplied in pairs (``cuda_pair_contraction``).
Whatever depends only on shapes and strides is computed once and cached (``ready``), so that a
launch only has to fill in addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch, cuda_pair_contraction, plain_contraction, tuning
from gradtrace.kernels.cuda_pair_contraction import Place, PreparedPairs
from gradtrace.kernels.cuda_tiling import (
    THREADS,
    ContractionPlan,
    contraction_plan,
    round_up,
)
from gradtrace.kernels.operands import (
    Contraction,
    Matrices,
    MatrixLayout,
    Operand,
    Steps,
    as_int32,
    columns,
    product_dtype,
    sizes,
)
from gradtrace.kernels.pointers import on_device

FILE, RESCAN_FILE = "contract.cu", "rescan.cu"
KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
BFLOAT16 = KINDS[torch.bfloat16]
DTYPES = (*KINDS, torch.float64)
ROW_STRIDE_LIMIT, K_STRIDE_LIMIT = 1 << 24, 1 << 31
"""Strides of rows and of k from which an operand is copied. The first also bounds the columns of a
launch, half of the second the steps of all tiles in a launch: kernels count in 32 bits.
"""


def serves(*operands: Matrices) -> bool:
    """Whether these operands are on a GPU and have a supported dtype."""
    for x in operands:
        if x.dtype not in DTYPES:
            return False
    datas = [_data(x) for x in operands]
    return cuda_launch.serves(FILE, *datas) or (triton() and all(x.is_cuda for x in datas))


def _data(x: Matrices) -> Tensor:
    return x.data if isinstance(x, Operand) else x


@cache
def triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def contraction(
    a: Matrices,
    b: Matrices,
    *,
    value: bool = True,
    index: bool = False,
    ids: Matrices | None = None,
    of_b: bool = False,
) -> Contraction:
    """``Backend.contract`` on the device of its operands."""
    (i, m, k), n = sizes(a), columns(b)
    left, right = _data(a), _data(b)
    device, dtype = a.device, product_dtype(a, b)
    make = torch.empty if i and m and k and n else torch.zeros
    shape = (i, m, n)
    out = Contraction(
        make(shape, dtype=dtype, device=device) if value else None,
        make(shape, dtype=torch.int64, device=device) if index else None,
        make(shape, dtype=torch.int32, device=device) if ids is not None else None,
    )
    if make is torch.zeros or not (value or index or ids is not None):
        return out
    with cuda_launch.at(device):
        if (
            dtype is torch.float32
            and _is_large_enough(shape, k)
            and cuda_launch.serves(FILE, left, right)
        ):
            given = NULL_OPERAND if ids is None else _PlacedOperand.of(as_int32(ids), *ROLES[of_b])
            sides = _PlacedOperand.of(a, 1, 2), _PlacedOperand.of(b, 2, 1), given
            _run(device, shape, k, sides, of_b, out)
        elif triton():
            from gradtrace.kernels import triton_contraction

            words = None if ids is None else as_int32(ids)
            triton_contraction.contraction(a, b, out, dtype, words, of_b)
        else:
            return plain_contraction.contraction(a, b, value=value, index=index, ids=ids, of_b=of_b)
    return out


ROLES = {False: (1, 2), True: (2, 1)}
"""By ``of_b``: the dimensions of the provenance ids that hold their rows and their k."""


def _is_large_enough(shape: tuple[int, int, int], k: int) -> bool:
    i, m, n = shape
    return (i * m * n * k >= tuning.CUDA_MIN_PRODUCTS or not triton()) and n < ROW_STRIDE_LIMIT


def serves_strided(a: Tensor, b: Tensor, ids: Tensor) -> bool:
    """Whether ``strided`` accepts these tensors."""
    kinds = a.dtype in KINDS and b.dtype in KINDS and ids.dtype is torch.int32
    return kinds and cuda_launch.serves(FILE, a, b, ids)


def strided(
    a: Tensor, b: Tensor, ids: Tensor, how: MatrixLayout, shape: tuple[int, ...], value: bool
) -> Contraction | None:
    """``Backend.contract_strided``; None if a size is 0, or if the contraction does not fit one
    launch or is too small to pay.
    """
    device = a.device
    found = _ready(device, how, KINDS[a.dtype], KINDS[b.dtype], value)
    if found is None or not (found.small and _is_large_enough(how.shape, how.k)):
        return None
    largest = torch.empty(shape, dtype=torch.float32, device=device) if value else None
    out = torch.empty(shape, dtype=torch.int32, device=device)
    with cuda_launch.at(device):
        found(
            (on_device(a), 0, 0, 0), (on_device(b), 0, 0, 0), (on_device(ids), 0, 0, 0),
            0 if largest is None else on_device(largest), 0, on_device(out),
        )  # fmt: skip
    return Contraction(largest, None, out)


@lru_cache(4096)
def _ready(
    device: torch.device, how: MatrixLayout, first: int, second: int, value: bool
) -> PreparedLaunch | PreparedPairs | None:
    if not (all(how.shape) and how.k):
        return None
    layouts = (
        OperandLayout(first, 2 if first else 4, how.a),
        OperandLayout(second, 2 if second else 4, how.b),
    )
    requested = value, False, True
    ids = OperandLayout(0, 4, how.ids)
    return ready(device, how.shape, how.shape, how.k, (*layouts, ids), how.of_b, requested)


# CUDA --------------------------------------------------------------------------------------------

PACKING, CONTRACTING = (32, 8, 1), (THREADS, 1, 1)
UNPACKED = (0,) * 12
NO_STEPS = (0, 0, 0)


class OperandLayout(NamedTuple):
    """Layout of an operand: dtype code, bytes per element, and strides; None for an operand that
    has tables instead.
    """

    kind: int
    size: int
    steps: Steps | None

    @property
    def near(self) -> Steps | None:
        """The strides, if the kernels can read the operand in place; None if it must be copied."""
        if (
            self.kind
            or self.steps is None
            or self.steps[1] >= ROW_STRIDE_LIMIT
            or self.steps[2] >= K_STRIDE_LIMIT
        ):
            return None
        return self.steps

    def at(self, place: Place, batch: int, row: int) -> Place:
        """The addresses for the part that starts at this matrix and row."""
        start, batches, rows, inners = place
        if self.steps is None:
            return start, batches + 8 * batch, rows + 8 * row, inners
        return start + self.size * (batch * self.steps[0] + row * self.steps[1]), 0, 0, 0


class OperandRead(NamedTuple):
    """Whether a kernel reads a copy of an operand, and the strides of what it reads."""

    copy: bool
    steps: Steps


class PreparedLaunch(NamedTuple):
    """A contraction prepared for any operands of one layout: everything but the addresses."""

    device: torch.device
    contraction_plan: ContractionPlan
    pack: cuda_launch.Kernel
    contract: cuda_launch.Kernel
    rescan: cuda_launch.Kernel
    packing: tuple[tuple[int, ...], tuple[int, ...]]  # argument words of pack, without addresses
    lines: int  # rows of blocks that copy the first operand
    contracting: tuple[OperandRead, OperandRead]
    searching: tuple[OperandRead, OperandRead]
    plane: tuple[int, int]  # strides of values
    whole: tuple[int, int]  # strides of indices and ids
    searched: bool
    ids: tuple[int, ...]
    of_b: bool
    countable: bool  # fits the 32-bit counters of the kernels

    @property
    def workspace_bytes(self) -> int:
        """Bytes of memory that a launch takes besides its results."""
        return self.contraction_plan.space.size

    @property
    def small(self) -> bool:
        """Whether one launch suffices, without asking how much memory is free."""
        return self.countable and self.workspace_bytes <= tuning.SMALL_WORKSPACE_BYTES

    def __call__(self, a: Place, b: Place, ids: Place, value: int, index: int, found: int) -> None:
        """Launch it. ``value``, ``index`` and ``found`` are the addresses of the results: values,
        indices and provenance ids; 0 for those not requested.
        """
        how = self.contraction_plan
        memory = cuda_launch.WORKSPACES.memory(self.device, how.space.size)
        start = on_device(memory)
        left, right, spare, blocks, parts, numbers, _ = [start + each for each in how.space]
        pack_a, pack_b = how.copied
        if pack_a or pack_b:
            self.pack(
                how.grids[0], PACKING,
                (
                    *((*a, *self.packing[0], left) if pack_a else UNPACKED),
                    *((*b, *self.packing[1], right) if pack_b else UNPACKED),
                    self.lines,
                ),
            )  # fmt: skip
        results = (value or spare, *self.plane, blocks if self.searched else 0, parts, numbers)
        (copy, a_steps), (copy_b, b_steps) = self.contracting
        self.contract(
            how.grids[1], CONTRACTING,
            (
                left if copy else a[0], *a_steps, right if copy_b else b[0], *b_steps,
                *results, *how.work,
            ),
            how.shared[0],
        )  # fmt: skip
        if not how.joined:
            return
        (copy, a_steps), (copy_b, b_steps) = self.searching
        self.rescan(
            how.grids[2], CONTRACTING,
            (
                left if copy else a[0], *a_steps, how.held[0],
                right if copy_b else b[0], *b_steps, how.held[1],
                *how.whole, *results, *how.tile, index, found, *self.whole,
                *ids, *self.ids, self.of_b,
            ),
            how.shared[1],
        )  # fmt: skip


@lru_cache(4096)
def ready(
    device: torch.device,
    whole: tuple[int, int, int],
    shape: tuple[int, int, int],
    k: int,
    layouts: tuple[OperandLayout, OperandLayout, OperandLayout],
    of_b: bool,
    requested: tuple[bool, bool, bool],
) -> PreparedLaunch | PreparedPairs:
    """Prepare the contraction of a part, with sizes ``shape``, of a result with sizes ``whole``.
    ``requested``: whether values, indices and provenance ids are requested.
    """
    (a, b, ids), (value, index, marked) = layouts, requested
    searched = index or marked
    how = contraction_plan(
        shape, k, (a.near, b.near), (value, searched), cuda_launch.processors(device)
    )
    if (
        searched
        and a.kind == b.kind == BFLOAT16
        and cuda_pair_contraction.pays(shape, k, how.plan)
        and cuda_pair_contraction.available(device)
    ):
        strides = a.steps or NO_STEPS, b.steps or NO_STEPS, ids.steps or NO_STEPS
        return cuda_pair_contraction.prepared(device, whole, shape, k, strides, of_b)
    return _in_float32(device, whole, shape, k, layouts, of_b, how, (value, searched))


def _in_float32(
    device: torch.device,
    whole: tuple[int, int, int],
    shape: tuple[int, int, int],
    k: int,
    layouts: tuple[OperandLayout, OperandLayout, OperandLayout],
    of_b: bool,
    how: ContractionPlan,
    requested: tuple[bool, bool],
) -> PreparedLaunch:
    (a, b, ids), (batches, m, n), (value, searched) = layouts, shape, requested
    padded, tile = how.plan.padded, (how.plan.block, how.plan.rows, how.plan.columns)
    block, rows, columns = (f"{name} {size}" for name, size in zip(("KB", "BM", "BN"), tile))
    defines = (block, rows, columns, "INDEX") if searched else (block, rows, columns)
    copies = (m * padded, padded, 1), (n * padded, padded, 1)
    steps = a.steps or NO_STEPS, b.steps or NO_STEPS
    plane = whole[1] * whole[2], whole[2]
    return PreparedLaunch(
        device,
        how,
        cuda_launch.kernel(device, RESCAN_FILE, "pack", (block,)),
        cuda_launch.kernel(device, FILE, "contract", defines, how.shared[0]),
        cuda_launch.kernel(device, RESCAN_FILE, "rescan", (block,), tuning.SEARCH_SHARED_MAX_BYTES),
        ((*steps[0], a.kind, m, k, padded), (*steps[1], b.kind, n, k, padded)),
        -(-m // 32) if how.copied[0] else 0,
        (
            _reading(a.near is None, copies[0], steps[0]),
            _reading(b.near is None, copies[1], steps[1]),
        ),
        (
            _reading(how.copied[0], copies[0], steps[0]),
            _reading(how.copied[1], copies[1], steps[1]),
        ),
        plane if value else (m * n, n),
        plane,
        searched,
        ids.steps or NO_STEPS,
        of_b,
        batches <= cuda_launch.MAX_BLOCKS_YZ and how.plan.total < K_STRIDE_LIMIT // 2,
    )


def _reading(copy: bool, copied: Steps, steps: Steps) -> OperandRead:
    return OperandRead(copy, copied if copy else steps)


def _run(
    device: torch.device,
    shape: tuple[int, int, int],
    k: int,
    sides: tuple[_PlacedOperand, _PlacedOperand, _PlacedOperand],
    of_b: bool,
    out: Contraction,
) -> None:
    """Fill in the tensors of ``out`` that are not None: in one launch, or in parts that fit the
    available memory.
    """
    (a, b, ids), requested = sides, (out[0] is not None, out[1] is not None, out[2] is not None)
    layouts = a.layout, b.layout, ids.layout
    value, index, found = (0 if each is None else on_device(each) for each in out)
    whole = ready(device, shape, shape, k, layouts, of_b, requested)
    if whole.small:
        whole(a.place, b.place, ids.place, value, index, found)
        return

    def part(some: tuple[int, int, int]) -> PreparedLaunch | PreparedPairs:
        return ready(device, shape, some, k, layouts, of_b, requested)

    sizes = _fitting(shape, part, cuda_launch.available_bytes(device) // 2)
    for batch, row, column in product(*(range(0, n, size) for n, size in zip(shape, sizes))):
        at = batch, row, column
        i, m, n = (min(s, n - first) for first, n, s in zip(at, shape, sizes))
        corner = (batch * shape[1] + row) * shape[2] + column
        part((i, m, n))(
            a.layout.at(a.place, batch, row),
            b.layout.at(b.place, batch, column),
            ids.layout.at(ids.place, batch, column if of_b else row),
            value and value + 4 * corner,
            index and index + 8 * corner,
            found and found + 4 * corner,
        )


def _fitting(
    shape: tuple[int, int, int],
    part: Callable[[tuple[int, int, int]], PreparedLaunch | PreparedPairs],
    available_bytes: int,
) -> tuple[int, int, int]:
    """The numbers of matrices, rows and columns per launch that fit the workspace limit."""
    i, m, n = min(shape[0], cuda_launch.MAX_BLOCKS_YZ), *shape[1:]
    most = min(tuning.WORKSPACE_MAX_BYTES, available_bytes)
    while True:
        how = part((i, m, n))
        if how.countable and how.workspace_bytes <= most:
            break
        if i > 1:
            i = -(-i // 2)
        elif max(m, n) <= tuning.SPLIT_MIN_EXTENT:
            break
        elif m >= n:
            m = round_up(-(-m // 2), tuning.SPLIT_MIN_EXTENT)
        else:
            n = round_up(-(-n // 2), tuning.SPLIT_MIN_EXTENT)
    return i, m, n


class _PlacedOperand(NamedTuple):
    """Layout and addresses of an operand, with references to the tensors at these addresses."""

    layout: OperandLayout
    place: Place
    held: tuple[Tensor, ...]

    @classmethod
    def of(cls, x: Matrices, rows: int, inner: int) -> _PlacedOperand:
        if isinstance(x, Operand):
            data = x.data.contiguous()
            tables = tuple(table.long().contiguous() for table in x[1:])
            batch, row, k = (on_device(table) for table in tables)
            layout = OperandLayout(KINDS.get(data.dtype, 0), data.itemsize, None)
            return cls(layout, (on_device(data), batch, row, k), (data, *tables))
        steps = x.stride()
        layout = OperandLayout(
            KINDS.get(x.dtype, 0), x.itemsize, (steps[0], steps[rows], steps[inner])
        )
        return cls(layout, (on_device(x), 0, 0, 0), (x,))


NULL_OPERAND = _PlacedOperand(OperandLayout(0, 0, NO_STEPS), (0, 0, 0, 0), ())
