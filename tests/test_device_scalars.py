"""Numbers of the CPU that meet tensors of a GPU, without one: PyTorch's fake tensors say where what
they stand for would lie, and refuse what a GPU would refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import programs
import pytest
import torch
from backends import ops
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import gradtrace as gt
from gradtrace import semirings
from gradtrace.ir.passes import merge_routes
from gradtrace.kernels import cpu_backend, cpu_library
from gradtrace.linops import Scale
from gradtrace.linops.indexing import nearby, picked
from gradtrace.recording import record
from gradtrace.recording.aten_rules.elementwise import weigh
from gradtrace.semirings import ABS, BOOL, COUNT, ENTROPY, EXTREMES, MAX, SUM, Max, Semiring, TopK

GPU = torch.device("cuda", 0)
TWO = torch.tensor(2.0)
SEMIRINGS: list[Semiring] = [
    *(SUM, MAX, ABS, COUNT, ENTROPY, EXTREMES, BOOL),
    *(TopK(3), Max(log=True)),
]


@pytest.fixture
def fakes() -> Iterator[None]:
    """Tensors on a GPU that is not there; those of the CPU are true."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def far(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=GPU)


def test_a_fake_refuses_what_a_gpu_refuses(fakes: None) -> None:
    assert (far(3) * TWO).device == GPU
    with pytest.raises(RuntimeError, match=r"devices|not on the expected device"):
        TWO.expand(3) * far(3)


def test_a_number_of_the_cpu_weighs_elements_of_a_gpu(fakes: None) -> None:
    scale, x, at = Scale(TWO, (3, 4)), far(3, 4), torch.zeros(2, dtype=torch.int64, device=GPU)
    marks = far(3, 4, dtype=torch.int32)
    value, handed = scale.select(x, marks, True)
    found = [scale.apply(x), *scale.best(x), *scale.best(x, at), value, handed]
    found += [scale.entry(at, at), *scale.rows(at), picked(TWO, (3, 4), at)]
    for each in found:
        assert each is not None and each.device == GPU


@pytest.mark.parametrize("semiring", SEMIRINGS, ids=lambda s: str(s.name))
def test_in_every_semiring(fakes: None, semiring: Semiring) -> None:
    found = Scale(TWO, (3, 4)).apply_in(semiring.weigh(far(3, 4)), semiring)
    assert {part.device for part in found} == {GPU}


def test_every_semiring_is_tried() -> None:
    known = {type(s) for s in SEMIRINGS}
    assert {type(s) for s in vars(semirings).values() if isinstance(s, Semiring)} <= known


@pytest.mark.parametrize("weight", [1j, torch.tensor(2 - 1j), TWO, -1])
def test_a_complex_number(weight: Tensor | complex) -> None:
    x = torch.ones(3, dtype=torch.complex64, device="meta")  # a fake cannot be indexed
    chain, _ = weigh(x, x, weight)
    y = torch.view_as_real(x)
    for step in chain:
        for name in step.tensors():
            kind = getattr(step, name)
            assert not kind.dim() or kind.is_meta
        y = step.apply(y)
    assert y.is_meta


def test_weights_that_are_merged() -> None:
    with torch.device("meta"):
        target, weight = merge_routes._targets_and_weights(
            [Scale(TWO, (3,)), Scale(3.0, (3,))], torch.float32
        )
    assert target.is_meta and weight.is_meta


ODD = [2.5, -0.0, math.inf, -math.inf, math.nan, 1e-45]
KINDS = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_number_is_the_same(dtype: torch.dtype) -> None:
    """Where there is memory to look at: filled in, nothing is rounded."""
    made = torch.full
    for number in ODD:
        x = torch.tensor(number, dtype=dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "full", lambda *a, device, **k: made(*a, **k))
            there = nearby(x, torch.device("meta"))
        assert there.dtype is dtype and there.device.type == "cpu"
        bits, wanted = (y.reshape(1).view(torch.uint8) for y in (there, x))
        assert torch.equal(bits, wanted) or (there.isnan() and x.isnan())
    assert nearby(torch.tensor((1 << 62) + 1), torch.device("meta")).dtype is torch.int64


def test_what_has_dimensions_or_is_there_stays() -> None:
    x, y = torch.ones(1), torch.tensor(1.0)
    assert nearby(x, torch.device("meta")) is x
    assert nearby(y, torch.device("cpu")) is y
    assert nearby(y, torch.device("meta")).device.type == "meta"


def test_marks_of_another_device_go_to_no_kernel() -> None:
    """The CPU's kernels read memory where they are told to."""
    if cpu_library.library() is None:
        pytest.skip("without compiled kernels")
    size, marks = torch.ones(3), torch.ones(3, dtype=torch.int32, device="meta")
    assert cpu_backend._serves(size)
    assert not cpu_backend._serves(size, marks)
    with pytest.raises(RuntimeError):  # plain torch says that they do not go together
        ops.merge(size, marks, torch.ones(3), 2)


def test_a_leaf_without_dimensions_may_be_on_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the program is the one of a single device."""
    model = nn.Linear(2, 2, bias=False)
    with gt.watch(model) as watch:
        loss = model(torch.ones(2)).sum()
    right, far = record.ProgramRecorder._leaf, torch.empty((), device="meta", requires_grad=True)
    monkeypatch.setattr(
        record.ProgramRecorder, "_leaf", lambda self, _, *given: right(self, far, *given)
    )
    (leaf,) = programs.of(watch)(loss).leaves
    assert leaf.tensor is far and leaf.device is None
