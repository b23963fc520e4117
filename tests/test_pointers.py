"""Compiled kernels are handed nothing that they cannot read: a bad operand is an error."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from backends import ops
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from gradtrace.errors import GradtraceError
from gradtrace.kernels import backend_of, cpu_backend, cpu_contraction, cpu_library, pointers
from gradtrace.kernels.operands import GroupSums, LowRankLines, Operand, TensorLines
from gradtrace.tracing import aggregate
from gradtrace.tracing.provenance import words_of

needs_library = pytest.mark.skipif(cpu_library.library() is None, reason="no compiled library")


def freed(x: Tensor) -> Tensor:
    """The second half of memory that was given back, as sharded training does between uses."""
    y = torch.stack([x, x])[1]
    y.untyped_storage().resize_(0)
    return y


def faked(x: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


def negated(x: Tensor) -> Tensor:
    """A real tensor that is negated when it is read."""
    return torch.complex(x, x).conj().imag


UNREADABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "zero tensor": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "part of a zero tensor": lambda x: torch._efficientzerotensor((9, *x.shape), dtype=x.dtype)[3],
    "wrapper subclass": lambda x: TwoTensor(x.clone(), x.clone()),
    "meta": lambda x: x.to("meta"),
    "fake": faked,
    "freed": freed,
    "sparse": lambda x: x.to_sparse(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "negated lazily": negated,
    "another dtype": lambda x: x.half(),
    "integers": lambda x: x.long(),
    "too short": lambda x: x[..., :-1].contiguous(),
    "not side by side": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_address_is_given_only_of_what_can_be_read(kind: str) -> None:
    x = torch.ones(4, 6)
    assert pointers.flat(x, torch.float32, 24) == x.data_ptr() == pointers.on_device(x)
    with pytest.raises(GradtraceError, match=r"a kernel was given a \w+ of shape"):
        pointers.flat(UNREADABLE[kind](x), torch.float32, 24)


@pytest.mark.parametrize("kind", list(UNREADABLE)[:-4])
def test_nor_for_a_gpu(kind: str) -> None:
    with pytest.raises(GradtraceError, match=r"a kernel was given a \w+ of shape"):
        pointers.on_device(UNREADABLE[kind](torch.ones(4, 6)))


def test_nothing_has_no_place_and_needs_none() -> None:
    assert pointers.flat(torch.empty(0, 3), torch.float32, 0) == 0
    assert pointers.flat(torch.empty(3, 0)[2], torch.float32, 0) == 0  # two past the beginning
    with pytest.raises(GradtraceError):
        pointers.address(torch.ones(3), torch.float32, 4)
    with pytest.raises(GradtraceError):
        pointers.address(torch.ones(3), torch.float32, -1)


def ints(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int32)


def lines(x: Tensor) -> LowRankLines:
    return LowRankLines(torch.ones(4, 6), [torch.ones(4, 6)], [torch.ones(4, 6)], x)


def _batch(x: Tensor) -> Any:
    batch = backend_of(torch.ones(1)).tally_batch(x)
    assert batch is not None
    return None if batch.measure(x) is None else batch.counted()


ENTRIES: dict[str, Callable[[Tensor], Any]] = {
    "contraction, left": lambda x: ops.contract(x[None], torch.ones(1, 6, 3)),
    "contraction, right": lambda x: ops.contract(torch.ones(1, 3, 4), x[None]),
    "contraction, windows": lambda x: ops.contract(
        Operand(x.reshape(-1), torch.zeros(1).long(), torch.arange(4), torch.arange(6)),
        torch.ones(1, 6, 3),
    ),
    "merge, size": lambda x: ops.merge(x, ints(4, 6), torch.ones(4, 6), 2),
    "merge, value": lambda x: ops.merge(torch.ones(4, 6), ints(4, 6), x, 2),
    "tally": lambda x: ops.tally(ints(4, 6), x, 2),
    "measured": ops.measure,
    "measured with others": lambda x: _batch(x),
    "reduce": lambda x: ops.reduce(x, ints(4, 6), (0,)),
    "scatter": lambda x: ops.scatter(x.reshape(-1), ints(24), torch.arange(24), 24),
    "normalise": lambda x: ops.normalise(lines(x)),
    "products, left": lambda x: ops.contract_lines(
        TensorLines(x.reshape(-1), torch.zeros(2).long(), 1),
        TensorLines(torch.ones(24), torch.zeros(2).long(), 1),
        20,
    ),
    "products, right": lambda x: ops.contract_lines(
        TensorLines(torch.ones(24), torch.zeros(2).long(), 1),
        TensorLines(x.reshape(-1), torch.zeros(2).long(), 1),
        20,
    ),
    "others": lambda x: ops.normalise_at(
        torch.ones(2, 3), torch.ones(2, 4, 6), x, torch.zeros(3).long(), torch.zeros(3).long()
    ),
}


@needs_library
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", ["zero tensor", "part of a zero tensor", "wrapper subclass"])
def test_every_kernel_survives_what_has_no_memory(entry: str, kind: str) -> None:
    """An error of Python's, or the result for zeros, where PyTorch wrote them out on the way."""
    bad = UNREADABLE[kind](torch.ones(4, 6))
    try:
        found = ENTRIES[entry](bad)
    except (GradtraceError, RuntimeError):
        return
    assert kind != "wrapper subclass"
    for got, wanted in zip(found or (), ENTRIES[entry](torch.zeros(4, 6)) or ()):
        assert (got is None and wanted is None) or torch.equal(got, wanted)


def added(
    totals: int = 2,
    places: Sequence[int] = (0, 1),
    pairs: int = 2,
    sums: int = 6,
    size: int | None = None,
    rows: Sequence[int] = (1, 3, 5),
    owned: int = 2,
) -> GroupSums:
    """Two leaves, of two pairs and three marks each, added up for three components."""
    counts = torch.ones(6, dtype=torch.int64)
    leaf = aggregate.Counts(counts, torch.ones(sums, dtype=torch.float64), rows, 1, 0, 0, 0, size)
    reach = aggregate.Reach(words_of([7, 7]), np.array([[0], [owned]]))
    backend = backend_of(counts)
    both = aggregate.grouped([leaf, leaf], backend)
    return both.added(aggregate.LeafSums(pairs, reach, places, np.ones(totals), [1, 2, 4]), backend)


@needs_library
def test_what_is_refused_differs_from_what_is_added_up() -> None:
    assert added().through.shape == (2, 3, 2)


SIZES: dict[str, Callable[[], Any]] = {
    "fewer marks than elements": lambda: ops.merge(torch.ones(9), ints(8), torch.ones(9), 2),
    "fewer others": lambda: ops.merge(torch.ones(9), ints(9), torch.ones(9), ints(8)),
    "wide marks": lambda: ops.merge(torch.ones(9), ints(9).long(), torch.ones(9), 2),
    "fewer marks counted": lambda: ops.tally(ints(8), torch.ones(9), 2),
    "wide marks counted": lambda: ops.tally(ints(9).long(), torch.ones(9), 2),
    "fewer targets": lambda: ops.scatter(torch.ones(9), ints(9), torch.arange(8), 9),
    "fewer marks scattered": lambda: ops.scatter(torch.ones(9), ints(8), torch.arange(9), 9),
    "wide marks reduced": lambda: ops.reduce(torch.ones(3, 3), ints(3, 3).long(), (0,)),
    "other k": lambda: ops.contract(torch.ones(1, 2, 3), torch.ones(1, 4, 2)),
    "other batch": lambda: ops.contract(torch.ones(2, 2, 3), torch.ones(1, 3, 2)),
    "other marks": lambda: ops.contract(
        torch.ones(1, 2, 3), torch.ones(1, 3, 2), ids=ints(1, 2, 2)
    ),
    "a line past the end": lambda: ops.contract_lines(
        TensorLines(torch.ones(9), torch.tensor([5]), 1),
        TensorLines(torch.ones(9), torch.tensor([0]), 1),
        5,
    ),
    "a line before the start": lambda: ops.contract_lines(
        TensorLines(torch.ones(9), torch.tensor([0]), 1),
        TensorLines(torch.ones(9), torch.tensor([-1]), 1),
        5,
    ),
    "no such line": lambda: ops.normalise_at(
        torch.ones(2, 1),
        torch.ones(2, 3, 4),
        torch.ones(3, 4),
        torch.tensor([3]),
        torch.tensor([0]),
    ),
    "fewer totals than leaves": lambda: added(totals=1),
    "fewer places than leaves": lambda: added(places=[0]),
    "no such leaf": lambda: added(places=[0, 2]),
    "no such pair": lambda: added(pairs=1),
    "fewer sums than counts": lambda: added(sums=5),
    "more entries than counts": lambda: added(size=7),
    "no marks": lambda: added(rows=()),
    "no such component": lambda: added(owned=4),
    "no such element": lambda: ops.normalise_at(
        torch.ones(2, 1),
        torch.ones(2, 3, 4),
        torch.ones(3, 4),
        torch.tensor([0]),
        torch.tensor([4]),
    ),
}


@needs_library
@pytest.mark.parametrize("case", SIZES)
def test_operands_that_do_not_fit_together_are_refused(case: str) -> None:
    with pytest.raises(GradtraceError):
        SIZES[case]()


@needs_library
def test_the_library_itself_refuses_null_pointers_and_sizes_that_overflow() -> None:
    """What Python let through would be caught there: each function, every pointer null."""
    library = cpu_library.library()
    assert library is not None
    bad, huge, none = 3, 1 << 62, None
    assert library.gradtrace_merge(0, 4, none, none, none, none, 0, 0, 1) == bad
    assert library.gradtrace_merge(0, -1, none, none, none, none, 0, 0, 1) == bad
    assert library.gradtrace_tally(0, 4, none, none, 2, none, none, 1) == bad
    assert library.gradtrace_magnitude(0, 4, none, none, none, 1) == bad
    assert library.gradtrace_reduce(0, none, none, none, none, none, 1) == bad
    levels = (ctypes.c_int64 * 12)(*[huge] * 12)
    assert library.gradtrace_reduce(0, none, none, levels, none, none, 1) == bad
    assert library.gradtrace_scatter(0, 4, none, none, none, 4, none, none) == bad
    assert library.gradtrace_sparse(0, none, none, none, none, none, none, none, none, 1) == bad
    assert library.gradtrace_normalise(0, 2, 2, 1, none, none, none, none, 1) == bad
    nowhere = (ctypes.c_int64 * 15)()
    assert library.gradtrace_normalise(0, 2, 2, 1, nowhere, none, none, none, 1) == bad
    assert library.gradtrace_normalise(0, 2, 2, 7, nowhere, none, none, none, 1) == bad
    assert library.gradtrace_normalise(0, huge, 8, 1, nowhere, none, none, none, 1) == bad
    assert library.gradtrace_groups(none) == bad
    for sizes in ([0] * 22, [4] * 8 + [0] * 14, [huge] * 8 + [0] * 14, [-1] * 8 + [0] * 14):
        assert library.gradtrace_groups(cpu_backend._GROUPS.pack(*sizes)) == bad
    assert library.gradtrace_contract(none) == bad
    call = ctypes.create_string_buffer(cpu_contraction._CALL.pack(*[0] * 44))
    assert library.gradtrace_contract(call) == bad
    sizes = [0] * 27 + [huge] * 4 + [0] * 13
    call = ctypes.create_string_buffer(cpu_contraction._CALL.pack(*sizes))
    assert library.gradtrace_contract(call) == bad
    for name in ("products_float", "others_float"):
        letters = cpu_library.SIGNATURES[name]
        given = [none if letter == "p" else 4 if letter == "n" else 1 for letter in letters]
        assert getattr(library, f"gradtrace_{name}")(*given) == bad


def test_low_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python has a fixed place in memory, small tensors lie below 4 GiB."""
    monkeypatch.setattr(pointers, "MIN_ADDRESS", 1 << 63)
    x, freed = torch.arange(6.0), torch.arange(6.0)
    later = freed[2:]
    freed.untyped_storage().resize_(0)
    assert pointers._pointer(x, torch.float32) == x.data_ptr()
    assert pointers._pointer(x[2:], torch.float32) == 0  # may be an offset from nowhere
    assert pointers.address(x[2:], torch.float32, 4) == x.data_ptr() + 8
    for gone in (freed, later):
        assert pointers._pointer(gone, torch.float32) == 0
        with pytest.raises(GradtraceError):
            pointers.address(gone, torch.float32, 4)
