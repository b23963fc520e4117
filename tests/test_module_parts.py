"""Heads, experts, layers and time steps: against labels, rewritten models, and by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import in_float64
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import UnknownName
from gradtrace.traced import Trace


def traced(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], **how: Any) -> Trace:
    with gt.watch(model) as watch:
        loss = loss_of(model)
    return watch.trace(loss, **how)


def assert_equal_shares(
    first: Mapping[str, float], second: Mapping[str, float], exact: bool = True
) -> None:
    assert list(first) == list(second) and len(first) > 1
    for name, share in first.items():
        want = share if exact else pytest.approx(share, rel=1e-6, abs=1e-12, nan_ok=True)
        assert second[name] == want or (share != share and second[name] != second[name]), name


# Heads -------------------------------------------------------------------------------------------


def test_two_heads_by_hand() -> None:
    """``y = Σ_h out_h W_hᵀ + b``: through head h comes the gradient of ``⟨∂L/∂y, out_h W_hᵀ⟩``."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(6, 2, batch_first=True).double()
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    trace = traced(attention, lambda m: m(x, x, x)[0].tanh().square().sum())
    found = trace.decompose("heads")
    assert [each.name for each in found] == ["head 0", "head 1"]

    qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = (part.view(3, 4, 2, 3).transpose(1, 2) for part in qkv.chunk(3, -1))
    out = (q @ k.mT / 3**0.5).softmax(-1) @ v  # (batch, head, time, size)
    w = attention.out_proj.weight.view(6, 2, 3)
    parts = torch.einsum("bhtd,ohd->hbto", out, w)
    y = (parts.sum(0) + attention.out_proj.bias).detach().requires_grad_()
    (cotangent,) = torch.autograd.grad(y.tanh().square().sum(), y)
    leaves = {"leaf0": x, "in_proj_weight": attention.in_proj_weight}
    for head in range(2):
        term = (parts[head] * cotangent).sum()
        grads = torch.autograd.grad(term, list(leaves.values()), retain_graph=True)
        for (name, _), grad in zip(leaves.items(), grads):
            torch.testing.assert_close(found.gradient(f"head {head}", name), grad)
    none = found.gradient("head 0", "out_proj.weight")  # that is no part of a head
    assert not bool(none.any())


PROJECTIONS = {
    "gpt2": "c_proj",
    "llama": "o_proj",
    "bert": "output.dense",
    "t5": "o",
    "mixtral": "o_proj",
    "vit": "o_proj",
}
"""The submodule that projects the joined heads, beside or below the attention."""


def label_heads(model: nn.Module, heads: Mapping[str, list[str]], projection: str) -> None:
    """Label what goes into the output projections, as a user would."""
    for attention, names in heads.items():
        above = attention if projection.count(".") == 0 else attention.rpartition(".")[0]
        module = model.get_submodule(f"{above}.{projection}")

        def before(_: nn.Module, args: Any, names: list[str] = names) -> Any:
            each = args[0].shape[-1] // len(names)
            return gt.label(args[0], -1, [n for n in names for _ in range(each)])

        module.register_forward_pre_hook(before)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_heads_are_the_labels_of_a_rewritten_model(name: str) -> None:
    model, loss_of = in_float64(name)
    model.eval()
    plain = traced(model, loss_of)
    table = plain.influence("heads")
    heads: dict[str, list[str]] = {}
    for head in sorted(table.names):
        heads.setdefault(head.rpartition(" head ")[0], []).append(head)
    assert all(len(names) == 2 for names in heads.values())
    label_heads(model, heads, PROJECTIONS[name])
    labelled = traced(model, loss_of)
    want = labelled.influence("labels").shares
    assert_equal_shares({n: want[n] for n in table.names}, table.shares)
    shares = labelled.decompose("labels").shares
    found = plain.decompose("heads").shares
    assert_equal_shares({n: shares[n] for n in found}, found, exact=False)


class Attention(nn.Module):
    """Written by hand; ``names`` label its heads, ``n_head`` says how many there are."""

    def __init__(self, heads: int, names: list[str] | None = None) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.n_head, self.names = heads, names

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], self.n_head, -1)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.names is not None:
            out = gt.label(out, 1, self.names)
        return self.proj(out.transpose(1, 2).contiguous().view(x.shape))


class Repeated(nn.Module):
    """One attention, called three times, with residual connections."""

    def __init__(self, heads: int, names: list[str] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = Attention(heads, names)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.attn(x)
        return x


@pytest.mark.parametrize("heads", [1, 4])
def test_every_measure_takes_heads(heads: int) -> None:
    """Shared weights, a vector of losses, samples, masses, all rules; a head of size 1."""
    names = [f"attn head {n}" for n in range(heads)]
    x = torch.randn(4, 3, 8)

    def losses(model: nn.Module) -> Tensor:
        return model(x).square().mean((1, 2))  # type: ignore[no-any-return]

    plain, labelled = traced(Repeated(heads), losses), traced(Repeated(heads, names), losses)
    for ask in (
        lambda t, kind: t.influence(kind).shares,
        lambda t, kind: t.influence(kind, sample=50).shares,
        lambda t, kind: t.influence(kind, of="attn.qkv.weight").shares,
        lambda t, kind: t.mass(kind).shares,
        lambda t, kind: t.decompose(kind).shares,
    ):
        found, want = ask(plain, "heads"), ask(labelled, "labels")
        assert set(found) == set(want) == set(names)
        for name in names:
            assert found[name] == pytest.approx(want[name], rel=1e-4, nan_ok=True)


def test_heads_can_be_grouped_and_chosen() -> None:
    x = torch.randn(2, 3, 8)
    trace = traced(Repeated(4), lambda m: m(x).square().mean())
    whole = trace.decompose("heads").shares
    some = trace.decompose({"even": ["attn head 0", "head:attn head 2"], "all": "head:*"})
    assert some["all"].share > 0 and list(trace.influence(["head:*3"]).shares) == ["head:*3"]
    assert trace.decompose(["head:attn head 1"]).shares["head:attn head 1"] == pytest.approx(
        whole["attn head 1"]
    )


def test_heads_that_are_modules() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
            self.proj = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.proj(torch.cat([head(x) for head in self.heads], -1))  # type: ignore[no-any-return]

    x = torch.randn(3, 4, requires_grad=True)
    trace = traced(Heads(), lambda m: m(x).square().sum())
    want = trace.influence(["heads.0", "heads.1"])
    assert trace.influence("heads").shares == want.shares


class LinearAttention(nn.Module):
    """Heads of which nothing is said."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)  # type: ignore[no-any-return]


def test_unknown_heads_are_refused_by_name() -> None:
    x = torch.randn(2, 3, 8)
    both = nn.ModuleDict({"first": Attention(2), "second": LinearAttention()})
    trace = traced(both, lambda m: m["first"](x).sum() + m["second"](x[..., :4]).sum())
    words = r"heads of second \(a LinearAttention\) are not known.*gradtrace\.label"
    with pytest.raises(UnknownName, match=words):
        trace.influence("heads")
    assert len(trace.influence(["head:*"])) == 1  # those that are known
    with pytest.raises(UnknownName, match=r"heads of the model \(a LinearAttention\)"):
        traced(LinearAttention(), lambda m: m(x[..., :4]).sum()).influence("heads")
    with pytest.raises(UnknownName, match="the heads are not known"):
        traced(nn.Linear(8, 2), lambda m: m(x).sum()).decompose("heads")
    w = torch.ones(2, requires_grad=True)
    for kind in ("heads", "experts", "layers", "steps"):
        with pytest.raises(UnknownName, match=f"{kind} are found from the modules of a watched"):
            gt.trace(w.sum()).influence(kind)


# Experts -----------------------------------------------------------------------------------------


class Stacked(nn.Module):
    """Experts stacked in two parameters, multiplied one by one, in one batch or row by row."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_experts, self.how = 4, how
        self.up = nn.Parameter(torch.randn(4, 5, 6, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(4, 6, 5, dtype=torch.float64))

    def forward(self, x: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        if self.how == "batched":
            every = torch.bmm(torch.bmm(x.expand(4, -1, -1), self.up.mT).tanh(), self.down.mT)
            mask = F.one_hot(chosen, 4).double() * gate
            return torch.einsum("end,ne->nd", every, mask)
        if self.how == "gathered":
            inner = torch.bmm(self.up[chosen], x.unsqueeze(-1)).tanh()
            return torch.bmm(self.down[chosen], inner).squeeze(-1) * gate
        out = torch.zeros_like(x)
        hit = chosen.unique()  # by tensors, as transformers does, or by numbers
        for e in hit if self.how == "tensors" else hit.tolist():
            rows = (chosen == e).nonzero().flatten()
            mine = F.linear(F.linear(x[rows], self.up[e]).tanh(), self.down[e])
            out = out.index_add(0, rows, mine * gate[rows])
        return out


class Expert(nn.Module):
    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up.detach().clone()), nn.Parameter(down.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.up).tanh(), self.down)


class Listed(nn.Module):
    """The same, of modules."""

    def __init__(self, stacked: Stacked) -> None:
        super().__init__()
        self.experts = nn.ModuleList(map(Expert, stacked.up, stacked.down))

    def forward(self, x: Tensor, gate: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in sorted(set(chosen.tolist())):
            rows = (chosen == e).nonzero().flatten()
            out = out.index_add(0, rows, self.experts[e](x[rows]) * gate[rows])
        return out


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(3, 6).double()
        self.router = nn.Linear(6, 4).double()
        self.moe = experts

    def forward(self, x: Tensor, allowed: int = 4) -> Tensor:
        h = self.embed(x)
        gate, chosen = self.router(h)[:, :allowed].softmax(-1).max(-1)
        return h + self.moe(h, gate.unsqueeze(-1), chosen)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["loop", "tensors", "batched", "gathered"])
@pytest.mark.parametrize("allowed", [2, 4])
def test_stacked_experts_are_those_of_a_list(how: str, allowed: int) -> None:
    """Also where two of the four are never chosen."""
    x = torch.randn(9, 3, dtype=torch.float64)

    def loss(model: nn.Module) -> Tensor:
        return model(x, allowed).square().mean()  # type: ignore[no-any-return]

    stacked = Stacked(how)
    listed = traced(Mixture(Listed(stacked)), loss)
    found = traced(Mixture(stacked), loss)
    names = [f"moe expert {n}" for n in range(4)]
    table, want = found.decompose("experts"), listed.decompose("experts")
    assert list(table.shares) == names
    assert list(want.shares) == [f"moe.experts.{n}" for n in range(4)]
    for name, other in zip(names, want.shares):
        for leaf in ("embed.weight", "embed.bias", "router.weight"):
            mine, theirs = table.gradient(name, leaf), want.gradient(other, leaf)
            torch.testing.assert_close(mine, theirs)
    if how != "batched":
        for mine, theirs in zip(table.shares.values(), want.shares.values()):
            assert mine == pytest.approx(theirs, nan_ok=True)
        ours, theirs_ = found.influence("experts"), listed.influence("experts")
        for name, other in zip(names, want.shares):
            assert ours[name].through == theirs_[other].through


@pytest.mark.parametrize("how", ["tensors", "gathered"])
def test_which_experts_were_chosen_is_found_anew(how: str) -> None:
    """Two losses of one structure, whose tokens went to other experts."""
    x = torch.randn(5, 3, dtype=torch.float64)
    model = Mixture(Stacked(how))
    for wanted in (0, 3):
        with torch.no_grad():
            model.router.bias.copy_(torch.eye(4)[wanted] * 100)
        trace = traced(model, lambda m: m(x).square().mean())
        shares = trace.influence("experts").shares
        assert not trace.kept.selections  # which are kept for all losses of this structure
        hit = [name for name, share in shares.items() if share > 0]
        assert hit == [f"moe expert {wanted}"]


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_grouped_products_have_the_experts_of_a_loop(name: str) -> None:
    from architectures import ARCHITECTURES

    model, loss_of = ARCHITECTURES[name]()
    model.eval()
    found = {}
    for how in ("grouped_mm", "batched_mm", "eager"):
        model.config._experts_implementation = how  # type: ignore[union-attr]
        trace = traced(model, loss_of)
        operators = {block.operator for block in trace.program.blocks}
        if how == "grouped_mm" and "GroupedMmBackward0" not in operators:
            pytest.skip("this PyTorch or transformers has no grouped product")
        found[how] = trace.decompose("experts").shares
    assert len(found["eager"]) == 8
    for how in ("grouped_mm", "batched_mm"):
        assert found[how] == pytest.approx(found["eager"], rel=1e-3, nan_ok=True)


def test_experts_that_are_not_understood_are_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_experts, self.w = 2, nn.Parameter(torch.randn(2, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("nd,edf->nf", x, self.w.cumsum(1))

    trace = traced(nn.Sequential(Odd()), lambda m: m(torch.randn(2, 3)).sum())
    with pytest.raises(UnknownName, match=r"experts of 0 \(a Odd\) are not known"):
        trace.influence("experts")


# Layers ------------------------------------------------------------------------------------------


def test_layers_are_entries_of_lists() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
    )
    x = torch.randn(2, 3, 8)
    trace = traced(model, lambda m: m(x).square().mean())
    names = [f"layers.{n}" for n in range(3)]
    assert trace.influence("layers").shares == trace.influence(names).shares
    assert len(trace.influence("heads")) == 6
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with pytest.raises(UnknownName, match="the layers are not known"):
        traced(plain, lambda m: m(torch.randn(2, 3)).sum()).influence("layers")


# Steps -------------------------------------------------------------------------------------------


class Looped(nn.Module):
    """A recurrent layer of the same weights, as calls of cells, layer by layer."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        kinds = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN_TANH": nn.RNNCell}
        self.back = layer.bidirectional
        self.cells = nn.ModuleList()
        for n in range(layer.num_layers):
            for end in ("", "_reverse")[: 1 + self.back]:
                weight = getattr(layer, f"weight_ih_l{n}{end}")
                cell = kinds[layer.mode](weight.shape[1], layer.hidden_size, dtype=weight.dtype)
                for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                    getattr(cell, kind).data = getattr(layer, f"{kind}_l{n}{end}").data
                self.cells.append(cell)

    def forward(self, x: Tensor) -> Tensor:
        cells = iter(self.cells)
        for first in cells:
            sides = [self._run(first, x)]
            if self.back:
                sides.append(self._run(next(cells), x.flip(0)).flip(0))
            x = torch.cat(sides, -1)
        return x

    def _run(self, cell: nn.Module, x: Tensor) -> Tensor:
        state, out = None, []
        for part in x.unbind():
            state = cell(part, state)
            out.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(out)


@pytest.mark.parametrize(
    ("kind", "layers", "back", "last"),
    [
        ("LSTM", 1, False, True),
        ("LSTM", 2, True, False),
        ("GRU", 2, True, True),
        ("GRU", 1, False, False),
        ("RNN", 2, False, True),
    ],
)
def test_steps_of_recurrent_layers_are_calls_of_cells(
    kind: str, layers: int, back: bool, last: bool
) -> None:
    """The gradient through every step, from the input; also where only the last state is used."""
    torch.manual_seed(0)
    layer = getattr(nn, kind)(3, 4, layers, bidirectional=back).double()
    steps = 4
    x = torch.randn(steps, 2, 3, dtype=torch.float64, requires_grad=True)

    def of_layer(model: nn.Module) -> Tensor:
        out = model(x)[0]
        return (out[-1] if last else out).square().sum()  # type: ignore[no-any-return]

    def of_cells(model: nn.Module) -> Tensor:
        out = model(x)
        return (out[-1] if last else out).square().sum()  # type: ignore[no-any-return]

    table = traced(layer, of_layer).decompose("steps")
    assert [each.name for each in table] == [f"step {t}" for t in range(steps)]
    looped = traced(Looped(layer), of_cells)
    count = layers * (1 + back)
    for t in range(steps):
        backwards = [f"step:cells.{n} step {steps - 1 - t}" for n in range(1, count, 2)]
        forwards = [f"step:cells.{n} step {t}" for n in range(0, count, 1 + back)]
        want = looped.decompose({"t": [*forwards, *(backwards if back else ())]})
        found, other = table.gradient(f"step {t}", "leaf0"), want.gradient("t", "leaf0")
        torch.testing.assert_close(found, other)


def test_a_cell_of_ones_own_with_modules_inside() -> None:
    class GatedCell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.keep = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return (self.read(x) + self.keep(self.keep(h))).tanh()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = GatedCell()

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(2, 4)
            for part in x:
                h = self.cell(part, h)
            return h

    torch.manual_seed(0)
    x = torch.randn(4, 2, 3, requires_grad=True)
    trace = traced(Net(), lambda m: m(x).square().sum())
    table = trace.decompose("steps")
    assert list(table.shares) == [f"cell step {t}" for t in range(4)]
    for t in range(4):  # through step t comes what x[0] to x[t] give
        grad = table.gradient(f"cell step {t}", "leaf0")
        torch.testing.assert_close(grad[: t + 1], trace.gradients["leaf0"][: t + 1])
        assert not bool(grad[t + 1 :].any())


def test_frozen_recurrent_weights_are_refused() -> None:
    layer = nn.GRU(3, 4)
    layer.weight_hh_l0.requires_grad_(False)
    trace = traced(nn.Sequential(layer), lambda m: m(torch.randn(3, 2, 3))[0].sum())
    with pytest.raises(UnknownName, match=r"steps of 0 \(a GRU\) are not known.*require grad"):
        trace.influence("steps")
