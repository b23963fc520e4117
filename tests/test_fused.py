"""What PyTorch fuses, opened: see ``gradtrace.recording.aten_rules.decompositions``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradtrace as gt
from gradtrace.recording.aten_rules.decompositions import gru_cell, lstm_cell


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("given", ["h", "c", "hc"])
def test_back_through_an_lstm_cell(given: str) -> None:
    gates, before = numbers(3, 20, seed=0), numbers(3, 5, seed=1)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * before + i * g
    outs = {"h": o * after.tanh(), "c": after}
    sent = {name: numbers(3, 5, seed=2 + ord(name)).detach() for name in given}
    wanted = torch.autograd.grad([outs[name] for name in given], [gates, before], [*sent.values()])
    workspace = torch.cat([i, f, g, o], 1).detach()
    found = lstm_cell(
        sent.get("h"), sent.get("c"), before.detach(), after.detach(), workspace, True
    )
    torch.testing.assert_close(found, (*wanted, wanted[0].sum(0)))
    assert lstm_cell(sent.get("h"), sent.get("c"), before, after, workspace, False)[2] is None


def test_back_through_a_gru_cell() -> None:
    inputs, states, h = numbers(3, 15, seed=0), numbers(3, 15, seed=1), numbers(3, 5, seed=2)
    (ir, iz, new), (hr, hz, hidden) = inputs.chunk(3, 1), states.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (new + r * hidden).tanh()
    to_h = numbers(3, 5, seed=3).detach()
    wanted = torch.autograd.grad((1 - z) * n + z * h, [inputs, states, h], to_h)
    workspace = torch.cat([r, z, n, h, hidden], 1).detach()
    found = gru_cell(to_h, workspace, True)
    torch.testing.assert_close(found, (*wanted, wanted[0].sum(0), wanted[1].sum(0)))
    assert gru_cell(to_h, workspace, False)[3:] == (None, None)


class FusedCell(torch.autograd.Function):
    """An LSTM's or a GRU's cell with the backward formula of the one that is fused on GPUs."""

    @staticmethod
    def forward(ctx: Any, kind: str, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.kind, (outs, saved) = kind, CELLS[kind](*given)
        ctx.save_for_backward(*saved)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kind == "LSTM":
            return None, *lstm_cell(grads[0], grads[1], *ctx.saved_tensors, False)[:2]
        return None, *gru_cell(grads[0], *ctx.saved_tensors, False)[:3]


def lstm(gates: Tensor, before: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * before + i * g
    return (o * after.tanh(), after), (before, after, torch.cat([i, f, g, o], 1))


def gru(inputs: Tensor, states: Tensor, h: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """As PyTorch computes it on the CPU."""
    (ir, iz, new), (hr, hz, hidden) = inputs.chunk(3, 1), states.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (new + r * hidden).tanh()
    return ((h - n) * z + n,), (torch.cat([r, z, n, h, hidden], 1),)


CELLS: dict[str, Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]] = {
    "LSTM": lstm,
    "GRU": gru,
}


def unrolled(kind: str, fused: bool) -> gt.Trace:
    """Three steps of a cell on the same input, and a way past it."""
    x, w = numbers(2, 3, seed=0), numbers(3, 12 if kind == "LSTM" else 9, seed=1)
    v = numbers(3, w.shape[1], seed=2)
    h = c = torch.zeros(2, 3, dtype=torch.float64)
    for _ in range(3):
        given = (x @ w + h @ v, c) if kind == "LSTM" else (x @ w, h @ v, h)
        outs = FusedCell.apply(kind, *given) if fused else CELLS[kind](*given)[0]  # type: ignore[no-untyped-call]
        h, c = outs[0], outs[-1]
    return gt.trace((h * x).sum() + (x * x).sum(), names={"x": x, "w": w, "v": v})


def test_a_fused_lstm_cell_has_the_mass_of_its_parts() -> None:
    """Any two elements of a cell are joined by one route."""
    fused, parts = (unrolled("LSTM", each) for each in (True, False))
    for p in (1, 2, 8):
        wanted = parts.mass({"product": "operator:MmBackward0"}, p=p)
        found = fused.mass({"product": "operator:MmBackward0"}, p=p)
        assert found.about["mass"] == pytest.approx(wanted.about["mass"], rel=1e-12)
        assert found.shares == pytest.approx(wanted.shares, rel=1e-12)


def test_a_gru_has_more_mass_where_it_is_not_fused() -> None:
    """As docs/limits.md says: ``(h - n) · z + n`` joins n with the result by 1 and by -z."""
    fused, parts = (unrolled("GRU", each) for each in (True, False))
    name = {"product": "operator:MmBackward0"}
    assert fused.decompose(name).shares == pytest.approx(parts.decompose(name).shares)
    assert fused.mass(name).about["mass"] < 0.99 * parts.mass(name).about["mass"]


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def close(found: Tensor, wanted: Tensor) -> None:
    """Fused kernels round half precisions at other places."""
    share = {torch.float16: 2**-7, torch.bfloat16: 2**-4}.get(wanted.dtype)
    if share is None:
        torch.testing.assert_close(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=0, atol=share * float(wanted.abs().max()))


@ON_A_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_recurrent_layers_on_a_gpu_need_no_matrices(
    kind: type[nn.Module], biased: bool, dtype: torch.dtype
) -> None:
    """No operator is written out as a matrix, and gradients are autograd's."""
    torch.manual_seed(0)
    more = {} if "Cell" in kind.__name__ else {"num_layers": 2}
    model = kind(6, 5, bias=biased, **more).to("cuda", dtype)
    x = torch.randn(4, 6, device="cuda", dtype=dtype)
    with gt.watch(model) as watch:
        found = model(x if "Cell" in kind.__name__ else x.expand(7, 4, 6))
        loss = sum(y.float().square().mean() for y in flat(found))
    programs.of(watch)(loss, dense_limit=0)
    trace = watch.trace(loss)
    names, weights = zip(*model.named_parameters())
    wanted = torch.autograd.grad(loss, weights)
    for name, theirs in zip(names, wanted):
        close(trace.gradients[name], theirs)
    assert trace.influence().rows


def flat(found: Tensor | tuple[object, ...]) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [y for part in found if isinstance(part, (Tensor, tuple)) for y in flat(part)]


def attend(q: Tensor, k: Tensor, v: Tensor, masked: bool, causal: bool) -> None:
    """No operator is written out as a matrix, and gradients are autograd's."""
    size = q.shape[-2], k.shape[-2]
    mask = torch.randn(size, device=q.device, dtype=q.dtype) if masked else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    loss = out.float().square().mean()
    given = {"q": q, "k": k, "v": v}
    programs.program(loss, names=given, dense_limit=0)
    trace = gt.trace(loss, names=given)
    for name, theirs in zip(given, torch.autograd.grad(loss, [*given.values()])):
        close(trace.gradients[name], theirs)
    assert trace.influence("operators").rows


def heads(device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, 4, n, 16, device=device, dtype=dtype, requires_grad=True) for n in (6, 6, 6)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("masked", "causal"), [(False, False), (True, False), (False, True)])
def test_attention_on_the_cpu(masked: bool, causal: bool, dtype: torch.dtype) -> None:
    attend(*heads("cpu", dtype), masked, causal)


@ON_A_GPU
@pytest.mark.parametrize(("masked", "causal"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_on_a_gpu(kind: str, dtype: torch.dtype, masked: bool, causal: bool) -> None:
    if kind != "EFFICIENT_ATTENTION" and dtype is torch.float32:
        pytest.skip("for half precisions")
    if kind == "FLASH_ATTENTION" and masked:
        pytest.skip("takes no mask")
    with sdpa_kernel(getattr(SDPBackend, kind)):
        attend(*heads("cuda", dtype), masked, causal)
