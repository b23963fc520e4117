"""``rule="attnlrp"``: relevance by hand, rule by rule, with its divisions written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import in_float64
from test_attribution import EMBEDDINGS, TwoLayers
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.attribution.lrp import ELEMENTWISE, PRODUCTS, ratio
from gradtrace.errors import Unsupported


def relevance(watch: Any, scalar: Tensor, x: Tensor) -> Any:
    return watch.attribute(scalar, {"x": x}, rule="attnlrp")


# By hand -----------------------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """``z = x w``: ``R[i] = Σ_j x[i] w[i,j] R[j] / z[j]``."""
    return x * ((r / (x @ w)) @ w.mT)


def bilinear(a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """``o = a b``: ``R[a_ij] = Σ_p a[i,j] b[j,p] R[i,p] / 2 o[i,p]``, and so for b."""
    share = torch.einsum("...ij,...jp,...ip->...ijp", a, b, r / (2 * (a @ b)))
    return share.sum(-1), share.sum(-3)


def attention(x: Tensor, q: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """Relevance of x, of that of ``y = x + A (x v)`` with ``A = softmax(s)``, ``s = (x q) xᵀ``."""
    s = (x @ q) @ x.mT
    a = s.softmax(-1)
    o = a @ (x @ v)
    y = x + o
    r_a, r_v = bilinear(a, x @ v, r * o / y)
    r_s = s * (r_a - a * r_a.sum(-1, keepdim=True))
    r_q, r_k = bilinear(x @ q, x.mT, r_s)
    return r * x / y + linear(x, v, r_v) + linear(x, q, r_q) + r_k.mT


@pytest.mark.parametrize("batched", [False, True])
def test_two_layers_of_attention_by_hand(batched: bool) -> None:
    model = TwoLayers(batched)
    x = torch.randn(*(2,) * batched, 3, 4, dtype=torch.float64, requires_grad=True)
    c = torch.randn_like(x)
    with gt.watch(model) as watch:
        scalar = (model(x) * c).sum()
    with torch.no_grad():
        (q1, q2), (v1, v2) = model.q, model.v
        x1 = x + model.pattern(x, q1) @ (x @ v1)
        x2 = x1 + model.pattern(x1, q2) @ (x1 @ v2)
        want = attention(x, q1, v1, attention(x1, q2, v2, x2 * c))
    found = relevance(watch, scalar, x)
    torch.testing.assert_close(found.scores["x"], want, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(watch.attribute(scalar, {"x": x}).scores["x"], want)
    assert found.defect == pytest.approx((want.sum() - scalar).item() / abs(scalar.item()))
    assert f"off by {found.defect:.2%}" in str(found)


class Gated(nn.Module):
    """``x + down(silu(gate(n)) · up(n))`` with ``n = norm(x)``, as in Llama."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.gate, self.up = (nn.Linear(4, 6, bias=False) for _ in range(2))
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class WrittenNorm(nn.Module):
    """RMS norm as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("norm", ["rms", "written", "layer"])
def test_gates_and_norms_by_hand(norm: str) -> None:
    """Half to each factor, ``R_in = R_out`` through SiLU and RMS norm; layer norm: its mean is
    linear, its deviation constant.
    """
    torch.manual_seed(0)
    made = {"rms": nn.RMSNorm(4, 1e-6), "written": WrittenNorm(), "layer": nn.LayerNorm(4, 1e-6)}
    model = Gated(made[norm]).double()
    nn.init.normal_(model.norm.weight)  # type: ignore[arg-type]
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    c = torch.randn_like(x)
    with gt.watch(model) as watch:
        scalar = (model(x) * c).sum()
    with torch.no_grad():
        n = model.norm(x)
        g, u, d = (layer.weight.mT for layer in (model.gate, model.up, model.down))
        h = F.silu(n @ g) * (n @ u)
        o = h @ d
        y = x + o
        r_h = linear(h, d, (y * c) * o / y)
        r_n = linear(n, g, r_h / 2) + linear(n, u, r_h / 2)
        if norm == "layer":
            centre = torch.eye(4, dtype=torch.float64) - 0.25
            r_n = linear(x, centre, r_n)
        want = (y * c) * x / y + r_n
    found = relevance(watch, scalar, x)
    torch.testing.assert_close(found.scores["x"], want, rtol=1e-9, atol=1e-12)
    assert found.defect == pytest.approx(0, abs=1e-12)  # all these rules conserve


class WrittenGelu(nn.Module):
    """In several operators, as GPT-2's."""

    def forward(self, x: Tensor) -> Tensor:
        inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


FUNCTIONS: dict[str, Any] = {
    "GeluBackward0": nn.GELU(),
    "SiluBackward0": F.silu,
    "MishBackward0": F.mish,
    "HardswishBackward0": F.hardswish,
    "HardsigmoidBackward0": F.hardsigmoid,
    "SoftplusBackward0": F.softplus,
    "ErfBackward0": torch.erf,
    "SinBackward0": torch.sin,
    "CosBackward0": torch.cos,
    "LogBackward0": torch.log,
    "TanhBackward0": torch.tanh,
    "SigmoidBackward0": torch.sigmoid,
    "ExpBackward0": torch.exp,
    "SqrtBackward0": torch.sqrt,
    "PowBackward0": lambda x: x**3,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_identity_rule(name: str) -> None:
    """``R_in = R_out``: the relevance of each x is ``f(x) c``."""
    x = torch.tensor([0.3, 1.2, 2.5], dtype=torch.float64, requires_grad=True)
    c = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    with gt.watch(nn.Identity()) as watch:
        y = FUNCTIONS[name](x)
        scalar = (y * c).sum()
    assert y.grad_fn.name() == name
    torch.testing.assert_close(relevance(watch, scalar, x).scores["x"], (y * c).detach())


@pytest.mark.parametrize("function", [nn.ReLU(), nn.LeakyReLU(), WrittenGelu()])
def test_functions_of_degree_one_and_written_ones(function: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), function).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    with gt.watch(model) as watch:
        scalar = model(x)[0].sum()
    with torch.no_grad():
        want = linear(x, model[0].weight.mT, model(x) * torch.tensor([[1.0], [0.0]]))
    torch.testing.assert_close(relevance(watch, scalar, x).scores["x"], want)


def test_at_zero() -> None:
    """Where x is 0, relevance is 0, not NaN."""
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    with gt.watch(nn.Identity()) as watch:
        scalar = (F.gelu(x) * x.sigmoid()).sum()
    assert relevance(watch, scalar, x).scores["x"].tolist() == [0, 0]


# Architectures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_defect_of_architectures(name: str) -> None:
    """How far relevance is from the logit is said; the graph conserves what there is."""
    model, _ = in_float64(name)
    model.eval()
    with gt.watch(model) as watch:
        tokens = model.get_submodule(EMBEDDINGS[name])(torch.tensor([[5, 9, 3, 7]]))
        scalar = model(inputs_embeds=tokens).logits[0, -1, 5]
    found = watch.attribute(scalar, {"tokens": tokens}, rule="attnlrp")
    assert f"off by {found.defect:.2%}" in str(found)
    limit = 1e-6 if name == "llama" else 1e-12  # Llama's norms are in float32
    assert found.graph(nodes=1, edges=1).defect < limit
    assert found.scores["tokens"].abs().sum() > 0
    assert all(p.grad is None for p in model.parameters())


def test_llama_is_the_model_with_rules_written_into_it() -> None:
    """Halved and constant gradients, by hooks and detached values in the forward pass."""

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return g / 2

    def norm(self: Any, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).detach()
        return self.weight * x * scale  # type: ignore[no-any-return]

    def mlp(self: Any, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        act = gate * (F.silu(gate) / gate).detach()
        return self.down_proj(Half.apply(act * self.up_proj(x)))  # type: ignore[no-any-return]

    matmul = torch.matmul

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = Half.apply(matmul(q, k.mT)) * scaling
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        out = Half.apply(matmul(scores.masked_fill(later, -torch.inf).softmax(-1), v))
        return out.transpose(1, 2).contiguous(), None

    model, _ = in_float64("llama")
    model.eval()
    ids = torch.tensor([[5, 9, 3, 7]])
    with gt.watch(model) as watch:
        tokens = model.get_input_embeddings()(ids)
        scalar = model(inputs_embeds=tokens).logits[0, -1, 5]
    found = watch.attribute(scalar, {"tokens": tokens}, rule="attnlrp")
    from transformers.models.llama import modeling_llama as llama

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama.LlamaRMSNorm, "forward", norm)
        patch.setattr(llama.LlamaMLP, "forward", mlp)
        patch.setattr(llama, "eager_attention_forward", attend)
        model.set_attn_implementation("eager")
        leaf = tokens.detach().clone().requires_grad_()
        again = model(inputs_embeds=leaf).logits[0, -1, 5]
        (grad,) = torch.autograd.grad(again, leaf)
    torch.testing.assert_close(again, scalar)
    torch.testing.assert_close(found.scores["tokens"], grad * leaf.detach())


def test_fused_attention_is_refused() -> None:
    """Where the forward pass ran outside the watch, factors are not known apart."""
    x = torch.randn(1, 1, 3, 4, requires_grad=True)
    scalar = F.scaled_dot_product_attention(x, x, x).sum()
    with pytest.raises(Unsupported, match="inside gradtrace"):
        relevance(gt.watch(nn.Identity()), scalar, x)


# Rules one by one --------------------------------------------------------------------------------

MULTIPLIED: dict[str, Any] = {
    "MulBackward0": lambda x: x * (2 * x),
    "MmBackward0": lambda x: x @ (2 * x),
    "BmmBackward0": lambda x: torch.bmm(x[None], 2 * x[None]),
    "DotBackward0": lambda x: torch.dot(x[0], 2 * x[1]),
    "MvBackward0": lambda x: torch.mv(x, 2 * x[0]),
    "AddmmBackward0": lambda x: torch.addmm(x, x, 2 * x),
    "BaddbmmBackward0": lambda x: torch.baddbmm(x[None], x[None], 2 * x[None]),
    "AddbmmBackward0": lambda x: torch.addbmm(x, x[None], 2 * x[None]),
    "AddcmulBackward0": lambda x: torch.addcmul(x, x, 2 * x),
    "AddmvBackward0": lambda x: torch.addmv(x[0], x, 2 * x[1]),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_products_hand_half_to_each_factor(name: str) -> None:
    """So relevance adds up to the scalar; gradient × input would count products twice."""
    x = torch.tensor([[0.3, -1.2], [2.5, 0.7]], dtype=torch.float64, requires_grad=True)
    with gt.watch(nn.Identity()) as watch:
        y = MULTIPLIED[name](x)
        scalar = y.sum()
    assert y.grad_fn.name() == name
    found = relevance(watch, scalar, x).scores["x"].sum()
    torch.testing.assert_close(found, scalar.detach())


def test_every_product_is_tried() -> None:
    assert MULTIPLIED.keys() == PRODUCTS.keys() - {"MatmulBackward0"}


def test_a_denominator_is_a_constant() -> None:
    x = torch.tensor([0.3, 1.2, 2.5], dtype=torch.float64, requires_grad=True)
    with gt.watch(nn.Identity()) as watch:
        scalar = (x / (1 + x.sum())).sum()
    want = (x / (1 + x.sum())).detach()
    torch.testing.assert_close(relevance(watch, scalar, x).scores["x"], want)


@pytest.mark.parametrize("function", [torch.tanh, torch.sigmoid])
def test_saturated_functions_keep_relevance(function: Any) -> None:
    """Their result is 1 in all digits, where the inverse function is infinite."""
    x = torch.tensor([60.0], dtype=torch.float64, requires_grad=True)
    with gt.watch(nn.Identity()) as watch:
        scalar = function(x).sum()
    assert 0.9 < float(relevance(watch, scalar, x).scores["x"]) < 4


@pytest.mark.parametrize(
    "function",
    [
        F.silu,
        F.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        F.softplus,
        lambda x: F.softplus(x, 3.0, 2.0),
    ],
)
def test_the_factor_of_a_function_has_its_options(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(-2, 3, 12, dtype=torch.float64, requires_grad=True)
    y = function(x)
    node: Any = y.grad_fn
    torch.testing.assert_close(ELEMENTWISE[node.name()](node) * x, y, rtol=1e-12, atol=1e-12)


def test_a_factor_keeps_its_sign_where_the_input_is_nearly_zero() -> None:
    tiny = torch.tensor([1e-30, -1e-30])
    assert (ratio(tiny, tiny) > 0).all() and (ratio(-tiny, tiny) < 0).all()
