"""``watch.attribute``: gradient × input against autograd, rules and integrals by hand."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from architectures import in_float64
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, NoGraph, NonFinite, NotScalar, UnknownName
from gradtrace.tracing.kept_plans import forget

EMBEDDINGS = {
    "gpt2": "transformer.wte",
    "llama": "model.embed_tokens",
    "gpt_neox": "gpt_neox.embed_in",
    "opt": "model.decoder.embed_tokens",
    "bert": "bert.embeddings.word_embeddings",
    "distilbert": "distilbert.embeddings.word_embeddings",
    "t5": "encoder.embed_tokens",
    "bart": "model.encoder.embed_tokens",
    "mixtral": "model.embed_tokens",
    "mamba": "backbone.embeddings",
    "vit": "vit.embeddings.patch_embeddings",
    "resnet": "resnet.embedder",
}
"""The module whose output is the input: tokens, or patches."""


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_scores_are_autograds_gradient_times_input(name: str) -> None:
    """On twelve architectures, in float64, to 1e-9; and the same through the module's output."""
    model, loss_of = in_float64(name)
    model.eval()
    seen: list[Tensor] = []
    module = model.get_submodule(EMBEDDINGS[name])
    hook = module.register_forward_hook(lambda _, __, out: seen.append(out))
    with gt.watch(model) as watch:
        loss = loss_of(model)
    hook.remove()
    inputs = {f"tokens{n}": each for n, each in enumerate(seen)}
    found = watch.attribute(loss, inputs)
    grads = torch.autograd.grad(loss, seen, allow_unused=True)
    for (key, x), grad in zip(inputs.items(), grads):
        want = torch.zeros_like(x) if grad is None else grad * x.detach()
        torch.testing.assert_close(found.scores[key], want, rtol=1e-9, atol=1e-12)
    assert found.value == loss.item() and all(p.grad is None for p in model.parameters())


# By hand -----------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """``x₁ = x + A₁ x V₁``, ``x₂ = x₁ + A₂ x₁ V₂``, with A = softmax(x Q xᵀ); one head or two."""

    def __init__(self, batched: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.ParameterList(torch.randn(4, 4).double() for _ in range(2))
        self.v = nn.ParameterList(torch.randn(4, 4).double() for _ in range(2))
        self.batched = batched

    def forward(self, x: Tensor) -> Tensor:
        for q, v in zip(self.q, self.v):
            x = x + self.pattern(x, q) @ (x @ v)
        return x

    def pattern(self, x: Tensor, q: Tensor) -> Tensor:
        return (x @ q @ x.mT).softmax(-1)


@pytest.mark.parametrize("batched", [False, True])
def test_frozen_attention_by_hand(batched: bool) -> None:
    """With constant A, ``∂⟨c, x₂⟩/∂x = h + A₁ᵀ h V₁ᵀ`` where ``h = c + A₂ᵀ c V₂ᵀ``."""
    model = TwoLayers(batched)
    x = torch.randn(*(2,) * batched, 3, 4, dtype=torch.float64, requires_grad=True)
    c = torch.randn_like(x)
    with gt.watch(model) as watch:
        scalar = (model(x) * c).sum()
    with torch.no_grad():
        (q1, q2), (v1, v2) = model.q, model.v
        a1 = model.pattern(x, q1)
        x1 = x + a1 @ (x @ v1)
        h = c + model.pattern(x1, q2).mT @ c @ v2.mT
        want = (h + a1.mT @ h @ v1.mT) * x
    found = watch.attribute(scalar, {"x": x}, rule="frozen")
    torch.testing.assert_close(found.scores["x"], want)
    whole = watch.attribute(scalar, {"x": x})
    assert not torch.allclose(whole.scores["x"], want)
    assert found.sum == pytest.approx(scalar.item())  # it is linear now


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, "groups", "written"])
def test_frozen_norms_by_hand(norm: Any) -> None:
    """``(x - mean) · γ / s`` with constant s; without a mean for RMS norm."""
    torch.manual_seed(0)
    gain = torch.randn(6, dtype=torch.float64)
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    c = torch.randn(2, 6, dtype=torch.float64)

    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain

    if norm == "written":
        model: nn.Module = Written()
    elif norm == "groups":
        model = nn.GroupNorm(1, 6).double()
    else:
        model = norm(6, eps=1e-5).double()
    if norm != "written":
        model.weight.data = gain
    with gt.watch(model) as watch:
        scalar = (model(x) * c).sum()
    found = watch.attribute(scalar, {"x": x}, rule="frozen").scores["x"]
    with torch.no_grad():
        g = c * gain
        centred = norm in (nn.LayerNorm, "groups")
        mean = x.mean(-1, keepdim=True) if centred else torch.zeros(2, 1, dtype=x.dtype)
        s = ((x - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        g = (g - g.mean(-1, keepdim=True) if centred else g) * s
    torch.testing.assert_close(found, g * x.detach())


def test_frozen_architecture_is_the_one_with_detached_patterns() -> None:
    """GPT-2 with eager attention and norms rewritten by hand."""
    model, _ = in_float64("gpt2")
    model.eval()
    model.set_attn_implementation("eager")
    ids = torch.tensor([[5, 9, 3, 7]])
    with gt.watch(model) as watch:
        x = model.get_input_embeddings()(ids)
        scalar = model(inputs_embeds=x).logits[0, -1, 5]
    found = watch.attribute(scalar, {"tokens": x}, rule="frozen")

    softmax = torch.nn.functional.softmax

    def constant(x: Tensor, *args: Any, **more: Any) -> Tensor:
        return softmax(x, *args, **more).detach()

    def centred(x: Tensor, _: Any, w: Tensor, b: Tensor, eps: float) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        s = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt().detach()
        return (x - mean) * s * w + b

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", constant)
        patch.setattr(torch.nn.functional, "layer_norm", centred)
        leaf = x.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(inputs_embeds=leaf).logits[0, -1, 5], leaf)
    torch.testing.assert_close(found.scores["tokens"], grad * leaf.detach())


# Integrated gradients ----------------------------------------------------------------------------


def test_integrated_gradients_are_complete() -> None:
    """Within 1%; and by hand: ``∫ 2αx dα · x = x²`` for a sum of squares, by any midpoints."""
    x = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    start = torch.full_like(x, 0.5)
    found = gt.watch(nn.Identity()).attribute(
        lambda x: x.square().sum(), {"x": x}, integrated=3, baseline={"x": start}
    )
    torch.testing.assert_close(found.scores["x"], x.square() - 0.25)
    assert found.defect == pytest.approx(0, abs=1e-12) and found.points == 3

    model, _ = in_float64("gpt2")
    model.eval()
    ids = torch.tensor([[5, 9, 3, 7]])
    tokens = model.get_input_embeddings()(ids)

    def logits(tokens: Tensor) -> Tensor:
        last = model(inputs_embeds=tokens).logits[0, -1]
        return last[5] - last[9]  # type: ignore[no-any-return]

    forget()
    found = gt.watch(model).attribute(logits, {"tokens": tokens}, integrated=48)
    with torch.no_grad():
        assert found.value == pytest.approx(float(logits(tokens) - logits(tokens * 0)))
    assert abs(found.defect) < 0.01
    assert f"incomplete by {found.defect:.2%} (48 points)" in str(found)
    once = gt.watch(model).attribute(logits, {"tokens": tokens})
    assert abs(once.defect) > 0.01  # the gradient alone is not


# Divisions ---------------------------------------------------------------------------------------


def test_neurons_tokens_layers_and_heads_by_hand() -> None:
    """``f = w₂ · relu(W₁ x)``: the score of neuron j is ``w₂[j] relu'(·) (W₁ x)[j]``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 1, bias=False))
    model.double()
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    with gt.watch(model) as watch:
        scalar = model(x).sum()
    found = watch.attribute(scalar, {"x": x}, tokens={"x": list("abcd")})
    with torch.no_grad():
        want = model[1](model[0](x)) * model[2].weight[0]
    torch.testing.assert_close(found.at("1"), want)
    torch.testing.assert_close(found.at("0"), want)
    table = found.neurons("1")
    scores = dict(zip(table.column("neuron"), table.column("score")))
    assert [scores[n] for n in range(5)] == pytest.approx(want.sum((0, 1)).tolist())
    assert found.sum == pytest.approx(scalar.item())  # homogeneous
    assert [row.token for row in found.rows] == [*"abcd", *"abcd"]
    tokens = want.sum(-1).flatten().tolist()
    assert [row.score for row in found.rows] == pytest.approx(tokens)
    assert found.rows[5].position == "1, 1" and "token" in str(found).splitlines()[1]


@pytest.mark.parametrize("integrated", [None, 3])
def test_components_add_up(integrated: int | None) -> None:
    """Each output's elements, and layers one after another."""
    model, _ = in_float64("gpt2")
    model.eval()
    tokens = model.get_input_embeddings()(torch.tensor([[5, 9, 3, 7]])).detach()

    def logit(tokens: Tensor) -> Tensor:
        return model(inputs_embeds=tokens).logits[0, -1, 5]  # type: ignore[no-any-return]

    found = gt.watch(model).attribute(logit, {"tokens": tokens}, integrated=integrated)
    for module in ("transformer.ln_f", "transformer.h.0", "transformer.h.1"):
        assert float(found.at(module).sum()) == pytest.approx(found.sum)
    layers = found.by("layers")
    assert layers.column("score") == pytest.approx([found.sum] * 2)
    assert len(found.by("heads").rows) == 4
    routes = found.paths(k=3)
    assert len(routes) == 3 and all(path.name == "tokens" for path in routes)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_heads_of_a_decoder_that_inputs_do_not_reach(name: str) -> None:
    """The first self-attention of a decoder does not depend on what the encoder reads: its heads
    have score 0, and the others theirs. Checked against the part of the gradient in each head.
    """
    model, loss_of = in_float64(name)
    model.eval()
    projections = [
        n for n, _ in model.named_modules() if re.search(r"ttn\.out_proj$|ttention\.o$", n)
    ]
    joined: dict[str, Tensor] = {}
    seen: list[Tensor] = []
    hooks = [
        model.get_submodule(n).register_forward_pre_hook(
            lambda _, given, n=n: joined.update({n: given[0]})
        )
        for n in projections
    ]
    module = model.get_submodule(EMBEDDINGS[name])
    hooks.append(module.register_forward_hook(lambda _, __, out: seen.append(out)))
    with gt.watch(model) as watch:
        loss = loss_of(model)
    for hook in hooks:
        hook.remove()
    found = {row.name: row.score for row in watch.attribute(loss, {"tokens": seen[0]}).by("heads")}
    assert len(found) == 2 * len(projections)
    for (_, score), (n, head) in zip(found.items(), product(projections, range(2))):
        (grad,) = torch.autograd.grad(loss, joined[n], retain_graph=True)
        part = torch.zeros_like(grad).unflatten(-1, (2, -1))
        part[..., head, :] = grad.unflatten(-1, (2, -1))[..., head, :]
        (back,) = torch.autograd.grad(
            joined[n], seen[0], part.flatten(-2), retain_graph=True, allow_unused=True
        )
        want = 0.0 if back is None else float((back * seen[0].detach()).sum())
        assert score == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert 0.0 in found.values() and any(found.values())


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_steps_of_an_input(layer: type[nn.RNNBase]) -> None:
    """They are known by weights, which are no leaves of an attribution. What enters at time t
    or before passes step t.
    """
    torch.manual_seed(0)
    model = layer(3, 4).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    with gt.watch(model, composed=True) as watch:
        scalar = model(x)[0][-1].sum()
    found = watch.attribute(scalar, {"x": x})
    (grad,) = torch.autograd.grad(scalar, x)
    want = (grad * x.detach()).sum(-1).cumsum(0).tolist()
    assert found.by("steps").column("score") == pytest.approx(want)


def test_experts_of_an_input_are_those_of_its_own_routing() -> None:
    """Two inputs of one shape that go to different experts: nothing is kept of the first."""
    torch.manual_seed(0)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts, self.weight = 3, nn.Parameter(torch.randn(3, 4, 4).double())

        def forward(self, x: Tensor, expert: int) -> Tensor:
            return x @ self.weight[expert]

    model, x = Experts(), torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    for expert in (0, 2):
        with gt.watch(model) as watch:
            scalar = model(x, expert).sum() + x.sum()
        found = watch.attribute(scalar, {"x": x})
        scores = found.by("experts").column("score")
        want = float((x @ model.weight[expert]).sum().detach())
        assert scores == pytest.approx([want * (n == expert) for n in range(3)])


def test_inputs_keep_their_names() -> None:
    """Also inputs that are no leaves, as branches of sums and in paths."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(7, 4), "pos": nn.Embedding(3, 4)})
    with gt.watch(model) as watch:
        words, pos = model["words"](torch.tensor([1, 5, 2])), model["pos"](torch.arange(3))
        scalar = (words + pos).tanh().sum()
    found = watch.attribute(scalar, {"words": words, "pos": pos})
    assert found.trace.path("pos", (1, 2)).name == "pos"
    assert set(found.trace.leaves) == {"words", "pos"}


def test_a_watch_can_name_inputs() -> None:
    """``add/pos``, not leaf1, in every measure."""
    model = nn.Linear(3, 2)
    words, pos = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    with gt.watch(model, names={"words": words, "pos": pos}) as watch:
        loss = model(words + pos).square().sum()
    trace = watch.trace(loss)
    assert list(trace.leaves) == ["words", "pos", "weight", "bias"]
    assert set(watch.backward(loss)) == set(trace.leaves)
    with pytest.raises(UnknownName, match="does not require grad"):
        gt.watch(model, names={"x": torch.ones(2)})


def test_an_input_that_another_is_made_of_has_the_rest() -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    y = x * 2
    found = gt.watch(nn.Identity()).attribute((y * x).sum(), {"x": x, "y": y})
    assert found.scores["x"].tolist() == [8.0, 18.0]  # y · x, not through y
    assert found.scores["y"].tolist() == [8.0, 18.0]


def test_outputs_of_one_node_and_unreached_inputs() -> None:
    x = torch.arange(4.0, requires_grad=True)
    left, right = x.split(2)
    other = torch.ones(1, requires_grad=True)
    scalar = (left * 2).sum() + (right * 3).sum()
    found = gt.watch(nn.Identity()).attribute(scalar, {"right": right, "other": other, "x": x})
    assert found.scores["right"].tolist() == [6.0, 9.0]
    assert found.scores["x"].tolist() == [0.0, 2.0, 0.0, 0.0]  # what does not pass right
    assert found.unreached == ("other",) and found.scores["other"].tolist() == [0.0]
    assert "does not depend on other" in str(found)


def test_half_precision_and_pandas() -> None:
    x = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    found = gt.watch(nn.Identity()).attribute((x * 3).sum(), {"x": x})
    assert found.scores["x"].dtype is torch.float64 and found.sum == 9
    with torch.inference_mode():
        assert not found.at("").requires_grad
    assert found.to_pandas()["score"].tolist() == [9.0] and len(found.top(1)) == 1


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda w, x: w.attribute(x.sum(), {}), GradtraceError, "inputs by name"),
        (lambda w, x: w.attribute(x.sum(), x), GradtraceError, "inputs by name"),
        (lambda w, x: w.attribute(x.sum(), {"x": 3}), GradtraceError, "is a int"),
        (lambda w, x: w.attribute(x.sum(), {"x": x.detach()}), GradtraceError, "not require grad"),
        (lambda w, x: w.attribute(x.sum(), {"x": x.long()}), GradtraceError, "has no gradient"),
        (lambda w, x: w.attribute(x * 2, {"x": x}), NotScalar, "takes one number"),
        (lambda w, x: w.attribute(x.sum().detach(), {"x": x}), NoGraph, "no grad_fn"),
        (lambda w, x: w.attribute(x.sum(), {"x": x * 1}), GradtraceError, "depends on none"),
        (lambda w, x: w.attribute(x.sum(), {"x": x}, rule="lrp"), UnknownName, "rule is"),
        (lambda w, x: w.attribute(x.sum(), {"x": x}, integrated=4), GradtraceError, "a function"),
        (
            lambda w, x: w.attribute(torch.sum, {"x": x}, integrated=0),
            GradtraceError,
            "from 1 on",
        ),
        (lambda w, x: w.attribute(3.0, {"x": x}), NoGraph, "got float"),
        (lambda w, x: w.attribute(x.sum(), {"x": x, "y": x}), GradtraceError, "the same tensor"),
        (
            lambda w, x: w.attribute(lambda x: x * 2, {"x": x}, integrated=4),
            NotScalar,
            "takes one number",
        ),
        (
            lambda w, x: w.attribute(lambda x: x.sum().item(), {"x": x}, integrated=4),
            GradtraceError,
            "without .item()",
        ),
        (
            lambda w, x: w.attribute(torch.sum, {"x": x}, integrated=4, baseline={"X": x}),
            UnknownName,
            "there is no input 'X'",
        ),
        (
            lambda w, x: w.attribute(torch.sum, {"x": x}, integrated=4, baseline=x),
            GradtraceError,
            "takes the names of inputs",
        ),
        (
            lambda w, x: w.attribute(torch.sum, {"x": x}, integrated=4, baseline={"x": x[:2]}),
            GradtraceError,
            r"shape \(2,\), and the input \(3,\)",
        ),
        (
            lambda w, x: w.attribute(
                torch.sum, {"x": x}, integrated=4, baseline={"x": x.detach() / 0}
            ),
            NonFinite,
            r"baseline\['x'\] has elements that are NaN or infinite",
        ),
        (
            lambda w, x: w.attribute(torch.sum, {"x": x}, baseline={"x": x}),
            GradtraceError,
            "where integration starts",
        ),
        (
            lambda w, x: w.attribute(x.sum(), {"x": x}, tokens={"y": "ab"}),
            UnknownName,
            "no input",
        ),
        (
            lambda w, x: w.attribute(x.sum(), {"x": x}, tokens={"x": "abcd"}),
            GradtraceError,
            "4 words for 3 positions",
        ),
        (lambda w, x: w.attribute(x.sum(), {"x": x}).at("a"), UnknownName, "no path .* passes"),
        (lambda w, x: w.attribute(x.sum(), {"x": x}).paths("y"), UnknownName, "no input 'y'"),
    ],
)
def test_errors(ask: Any, error: type[Exception], words: str) -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(error, match=words):
        ask(gt.watch(nn.Identity()), x)
