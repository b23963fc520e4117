"""TF32 is off in products that must be exact, and as it was afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gradtrace as gt
from gradtrace.kernels.precision import exact, without_tf32
from gradtrace.semirings import ABS, ENTROPY, SUM, Semiring

BACKENDS: Any = torch.backends  # whose newer names mypy does not know
MATMUL = BACKENDS.cuda.matmul


def by_the_new() -> None:
    MATMUL.fp32_precision = "tf32"


def everywhere() -> None:
    general("tf32")


def general(precision: str) -> None:
    with BACKENDS.__allow_nonbracketed_mutation():
        BACKENDS.fp32_precision = precision


def convolutions(allow: bool) -> None:
    with BACKENDS.__allow_nonbracketed_mutation():
        BACKENDS.cudnn.allow_tf32 = allow


def by_the_old() -> None:
    MATMUL.allow_tf32 = True


def by_name() -> None:
    torch.set_float32_matmul_precision("medium")


def high() -> None:
    torch.set_float32_matmul_precision("high")


NEW = hasattr(MATMUL, "fp32_precision")  # the interface of torch 2.9 and newer
OLD_WAYS: list[Callable[[], None]] = [by_the_old, by_name, high]
WAYS = [by_the_new, everywhere, *OLD_WAYS] if NEW else OLD_WAYS


def state() -> tuple[str, ...]:
    """All that a user can read."""
    return (*by_the_new_names(), *by_the_old_names())


def by_the_new_names() -> tuple[str, ...]:
    if not NEW:
        return ()
    names = (MATMUL, BACKENDS, BACKENDS.mkldnn.matmul, BACKENDS.cudnn.conv)
    return tuple(name.fp32_precision for name in names)


def by_the_old_names() -> tuple[str, ...]:
    found = []
    readers: list[Callable[[], object]] = [
        torch.get_float32_matmul_precision,
        lambda: MATMUL.allow_tf32,
        lambda: BACKENDS.cudnn.allow_tf32,
    ]
    for read in readers:
        try:
            found.append(str(read()))
        except RuntimeError:  # of a user of the new interface
            found.append("refused")
    return tuple(found)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As torch starts, before and after: other tests of this process set precisions too. Some
    settings cannot be assigned to, as after an import of PyTorch's own test suite.
    """
    monkeypatch.setattr(BACKENDS, "__allow_nonbracketed_mutation_flag", False)
    reset()
    yield
    reset()


def reset() -> None:
    torch.set_float32_matmul_precision("highest")
    convolutions(True)
    if NEW:
        general("none")
        MATMUL.fp32_precision = "none"
        BACKENDS.mkldnn.matmul.fp32_precision = "none"
        BACKENDS.cudnn.conv.fp32_precision = "tf32"
        assert by_the_new_names() == ("none", "none", "none", "tf32")
    assert by_the_old_names() == ("highest", "False", "True")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.__name__))
def test_tf32_is_off_for_the_moment(way: Callable[[], None], clean: None) -> None:
    way()
    before = state()
    assert on()
    with without_tf32():
        assert off()
        with without_tf32():
            assert off()
        assert off()
    assert state() == before
    with pytest.raises(ZeroDivisionError), without_tf32():
        raise ZeroDivisionError
    assert state() == before


def on() -> bool:
    return bool(MATMUL.fp32_precision == "tf32" if NEW else MATMUL.allow_tf32)


def off() -> bool:
    if MATMUL.allow_tf32:  # on a torch with both interfaces they agree, or this would raise
        return False
    if NEW:
        return "tf32" not in (MATMUL.fp32_precision, BACKENDS.cudnn.conv.fp32_precision)
    return not BACKENDS.cudnn.allow_tf32


class OldMatmul:
    """``torch.backends.cuda.matmul`` as it was in torch 2.8."""

    @property
    def allow_tf32(self) -> bool:
        return torch.get_float32_matmul_precision() != "highest"

    @allow_tf32.setter
    def allow_tf32(self, value: bool) -> None:
        torch.set_float32_matmul_precision("high" if value else "highest")


@pytest.mark.parametrize("way", OLD_WAYS, ids=lambda way: str(way.__name__))
def test_a_torch_that_has_the_old_interface_alone(
    way: Callable[[], None], clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKENDS.cuda, "matmul", OldMatmul())
    way()
    before = by_the_old_names()
    with without_tf32():
        assert by_the_old_names() == ("highest", "False", "False")
    assert by_the_old_names() == before
    torch.set_float32_matmul_precision("highest")
    convolutions(False)
    with without_tf32():
        assert by_the_old_names() == ("highest", "False", "False")
    assert by_the_old_names() == ("highest", "False", "False")


@pytest.mark.skipif(not NEW, reason="this torch has no torch.backends.cuda.matmul.fp32_precision")
def test_where_it_is_off_nothing_is_touched(clean: None) -> None:
    for precision in ("none", "ieee"):
        MATMUL.fp32_precision = BACKENDS.cudnn.conv.fp32_precision = precision
        before = state()
        with without_tf32():
            assert state() == before
        assert state() == before


def test_on_the_cpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrace.kernels.precision.without_tf32", lambda: 1 / 0)
    with exact(torch.ones(2)):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.__name__))
@pytest.mark.parametrize("semiring", [ABS, ENTROPY, SUM], ids=lambda s: str(s.name))
def test_products_on_a_gpu(way: Callable[[], None], semiring: Semiring, clean: None) -> None:
    x, w = (torch.rand(512, 512, device="cuda") + 1 for _ in range(2))
    wanted = semiring.contract("mk,kn->mn", semiring.lift(x.double()), w.double())
    way()
    found = semiring.contract("mk,kn->mn", semiring.lift(x), w)
    error = max(float(((a - b).abs() / b.abs().amax()).amax()) for a, b in zip(found, wanted))
    assert (error < 1e-5) == (semiring is not SUM)  # that is as the user has asked for


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_convolutions_on_a_gpu(clean: None) -> None:
    x = torch.rand(8, 64, 20, 20, device="cuda", requires_grad=True)
    w = torch.rand(64, 64, 3, 3, device="cuda") + 1
    found, wanted = (
        gt.backward(torch.conv2d(a, b).sum(), ABS, names={"x": a})["x"]
        for a, b in ((x, w), (x.detach().double().requires_grad_(), w.double()))
    )
    assert float(((found - wanted).abs() / wanted).amax()) < 1e-4


@pytest.mark.parametrize("allow", [False, True])
def test_the_old_name_of_cudnn_can_be_read_meanwhile(allow: bool, clean: None) -> None:
    """As ``torch.backends.cudnn.flags`` does, which a watched RNN needs."""
    convolutions(allow)
    with without_tf32():
        assert BACKENDS.cudnn.allow_tf32 is False
    assert BACKENDS.cudnn.allow_tf32 is allow
