"""Programs without gradients: the same as those with."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.recording import placeholders, record
from gradtrace.semirings import COUNT, ENTROPY, MAX


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(torch.softmax(q @ k.mT, -1) @ v) + x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), (6, 5)),
    "attention": (Attention, (2, 5, 8)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2)),
        (2, 2, 9, 9),
    ),
    "recurrent": (lambda: nn.GRU(4, 3), (5, 2, 4)),
}


@pytest.mark.parametrize("semiring", [MAX, COUNT, ENTROPY], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_values_do_not_depend_on_gradients(
    name: str, semiring: gt.semirings.Semiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().double()
    out = model(torch.randn(shape, dtype=torch.float64))
    loss = (out[0] if isinstance(out, tuple) else out).square().sum()
    names = dict(model.named_parameters())
    products = []

    def counted(a: Tensor, b: Tensor) -> Tensor:
        products.append(a.shape)
        return real(a, b)

    real = torch.matmul
    monkeypatch.setattr(torch, "matmul", counted)
    bare = gt.backward(loss, semiring, names=names)
    assert not products, "a product was computed for a gradient that nobody reads"
    monkeypatch.setattr(record, "_no_user_code", lambda *_: False)
    full = gt.backward(loss, semiring, names=names)
    for key, value in full.items():
        torch.testing.assert_close(bare[key], value, rtol=0, atol=0, equal_nan=True)


def test_hooks_and_functions_see_true_gradients() -> None:
    seen = SimpleQueue[Tensor]()  # what is put into a list would be taken out again
    w = torch.randn(3, 3, requires_grad=True)
    y = torch.randn(2, 3) @ w
    y.register_hook(lambda g: seen.put(g.clone()))
    gt.backward((y @ torch.ones(3, 3)).sum(), MAX, names={"w": w})
    assert torch.equal(seen.get_nowait(), torch.full((2, 3), 3.0))

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
            seen.put(grad.clone())
            return 2 * grad

    gt.backward((Twice.apply(w) @ torch.ones(3, 3)).sum(), MAX, names={"w": w})
    assert torch.equal(seen.get_nowait(), torch.full((3, 3), 3.0))


def test_errors_are_those_of_true_gradients() -> None:
    x = torch.randn(3, requires_grad=True)
    loss = F.linear(x, torch.randn(2, 3)).sum()
    loss.backward()
    with pytest.raises(gt.errors.FreedGraph):
        gt.backward(loss, MAX, names={"x": x})


def test_a_stand_in_has_no_pattern_and_no_memory() -> None:
    x = placeholders.like((1000, 1000), torch.float32, torch.device("cpu"))
    assert x.shape == (1000, 1000) and x.untyped_storage().nbytes() < 10_000
    assert bool(((x >= 0.5) & (x <= 1.5)).all()) and x[0].unique().numel() > 900
    assert placeholders.like((), torch.float64, torch.device("cpu")).shape == ()
    assert placeholders.like((0, 3), torch.float64, torch.device("cpu")).shape == (0, 3)
