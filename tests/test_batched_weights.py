"""What many nodes ask for at once is what each would get alone, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import programs
import pytest
import torch
import torch.nn.functional as F
from backends import imitate_gpu
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.ir.program import Program
from gradtrace.recording.aten_rules import call
from gradtrace.recording.aten_rules.call import BatchedWeights


def recorded(loss: Tensor) -> Program:
    return programs.program(loss, cotangent=torch.ones_like(loss))


def tensors(program: Program) -> list[list[Tensor]]:
    """All that the maps refer to, map by map."""
    maps = program.maps
    return [
        [x for x in _values(map_) if isinstance(x, Tensor)] for map_ in maps if list(map_.tensors())
    ]


def _values(map_: object) -> list[object]:
    found: list[object] = []
    for kind in type(map_).__mro__:
        for name in getattr(kind, "__slots__", ()):
            value = getattr(map_, name)
            found.extend(value if isinstance(value, tuple) else (value,))
    return found


def assert_same(one: Program, other: Program) -> None:
    """The tensors of both have the same bits and lie in memory alike."""
    for mine, theirs in zip(tensors(one), tensors(other), strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
            assert torch.equal(_bits(x), _bits(y))
    for leaf, same in zip(one.leaves, other.leaves, strict=True):
        assert torch.equal(_bits(leaf.compute()), _bits(same.compute()))


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def normed(x: Tensor) -> Tensor:
    """Three norms that are alike, and one that is not."""
    width = x.shape[-1]
    gains = [torch.linspace(0.5, 1.5, width, dtype=x.dtype) + n for n in range(3)]
    for gain in gains:
        x = F.layer_norm(x, (width,), gain.requires_grad_(), gain.detach())
    return F.layer_norm(x, x.shape[-2:])


def bent(x: Tensor) -> Tensor:
    """Hyperbolic tangents that are alike, and one that is not."""
    return (x.tanh() * 2).tanh().tanh().sum(0).tanh()


FORMS: dict[str, Callable[[], Tensor]] = {
    "aligned": lambda: torch.randn(2, 16, 16),
    "wide": lambda: torch.randn(2, 16, 16, dtype=torch.float64),
    "narrow": lambda: torch.randn(2, 16, 32).bfloat16(),
    "half": lambda: torch.randn(2, 16, 32).half(),
    "odd": lambda: torch.randn(3, 5, 7),
    "turned": lambda: torch.randn(16, 16, 2).permute(2, 1, 0),
    "spread": lambda: torch.randn(2, 16, 16, 2)[..., 0],
    "expanded": lambda: torch.randn(1, 1, 16).expand(2, 16, 16),
    "empty": lambda: torch.randn(0, 4, 16),
    "not finite": lambda: (
        torch.randn(2, 16, 16)
        .index_fill_(1, torch.tensor([3]), float("nan"))
        .index_fill_(1, torch.tensor([5]), float("inf"))
    ),
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Program]:
    """Record with nothing worked out for several nodes at once."""

    def record(loss: Tensor) -> Program:
        with monkeypatch.context() as patch:
            patch.setattr(call, "_can_batch", lambda x: False)
            return recorded(loss)

    return record


@pytest.mark.parametrize("model", [normed, bent])
@pytest.mark.parametrize("form", FORMS)
def test_together_is_as_alone(
    form: str, model: Callable[[Tensor], Tensor], alone: Callable[[Tensor], Program]
) -> None:
    torch.manual_seed(0)
    x = FORMS[form]()
    loss = model(x.requires_grad_() if x.is_leaf else x.detach().requires_grad_())
    assert_same(recorded(loss), alone(loss))


def test_those_that_are_alike_share_memory() -> None:
    """Or nothing above would show anything."""
    for model, alike in ((normed, 3), (bent, 2)):
        x = torch.randn(2, 16, 16, requires_grad=True)
        weights = [
            map_[0].untyped_storage().data_ptr()
            for map_ in tensors(recorded(model(x)))
            if map_[0].shape == x.shape
        ]
        assert max(weights.count(place) for place in weights) >= alike


def test_a_tanh_of_a_number(alone: Callable[[Tensor], Program]) -> None:
    x = torch.tensor(0.3, requires_grad=True)
    assert_same(recorded(x.tanh().tanh()), alone(x.tanh().tanh()))


def test_only_so_much_lies_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def doubled(x: Tensor) -> tuple[Tensor]:
        sizes.append(len(x))
        return (x * 2,)

    monkeypatch.setattr(call, "STACK_MAX_BYTES", 200)
    given, found = [torch.full((16,), float(n)) for n in range(7)], dict[int, float]()
    asked = BatchedWeights()
    for n, x in enumerate(given):
        asked.request(doubled, (x,), lambda y, n=n: found.update({n: y.sum().item()}))
    asked.flush()
    assert sizes == [3, 3, 1]
    assert found == {n: 32.0 * n for n in range(7)}
    asked.flush()  # nothing is left to do
    assert len(sizes) == 3


def test_large_tensors_are_laid_side_by_side_on_a_gpu_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = torch.zeros(call.BATCH_MAX_BYTES // 4 + 16)
    assert not call._can_batch(large)
    imitate_gpu(monkeypatch)
    assert call._can_batch(large)


def test_influence_of_layers_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.randn(4, 16)
    with gt.watch(model) as watch:
        loss = model(x).square().mean()
    found = [watch.trace(loss).influence().to_dict()]
    monkeypatch.setattr(call, "_can_batch", lambda x: False)
    found.append(watch.trace(loss).influence().to_dict())
    assert found[0] == found[1]
