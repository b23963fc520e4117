"""Ablation: what takes the place of a part, what is put back, and what it costs the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.autodiff import labels
from gradtrace.errors import GradtraceError, NotScalar, UnknownName


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    torch.manual_seed(0)
    fast = torch.backends.mha.get_fastpath_enabled()
    yield
    assert not labels.CUTS and torch.backends.mha.get_fastpath_enabled() == fast


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Net(nn.Module):
    """Blocks with residuals, a head that is labelled, and a module that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.out, self.unused = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        x = gt.label(x.view(-1, 2, 2), 1, "slot").flatten(1)
        out: Tensor = self.out(x)
        return out


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    out: Tensor = model(x).pow(3).mean()
    return out


def replaced(model: nn.Module, names: list[str], value: Callable[[Tensor], Tensor]) -> Tensor:
    """The loss with hooks of our own, as an oracle."""
    handles = [
        model.get_submodule(name).register_forward_hook(lambda m, a, out: value(out.detach()))
        for name in names
    ]
    loss = loss_of(model)
    for handle in handles:
        handle.remove()
    return loss


# What is replaced --------------------------------------------------------------------------------

LAYERS, NORMS = [f"layers.{n}" for n in range(3)], [f"layers.{n}.norm" for n in range(3)]
MLPS = ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]
NAMED: dict[str, tuple[Any, tuple[str, ...], list[str]]] = {
    "name": ("layers.1", ("layers.1",), ["layers.1"]),
    "pattern": ("layers.*.mlp", ("layers.*.mlp",), MLPS),
    "class": (nn.LayerNorm, ("class:LayerNorm",), NORMS),
    "list": (["embed", nn.LayerNorm], ("embed", "class:LayerNorm"), ["embed", *NORMS]),
    "groups": ({"a": ["layers.0.mlp", "layers.1.mlp"], "b": "layers.2.mlp"}, ("a", "b"), MLPS),
    "layers": ("layers", (*LAYERS,), LAYERS),
    "a list of modules": (["layers"], ("layers",), LAYERS),
}
HOWS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "zero": ("zero", torch.zeros_like),
    "mean": ("mean", lambda x: x.mean(0, keepdim=True).expand_as(x)),
    "number": (0.5, lambda x: torch.full_like(x, 0.5)),
    "tensor": (torch.arange(4.0), lambda x: torch.arange(4.0).expand_as(x)),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("by", NAMED)
def test_as_hooks_would_replace_them(by: str, how: str) -> None:
    model = Net()
    before, (wanted, names, modules) = loss_of(model), NAMED[by]
    expected = replaced(model, modules, HOWS[how][1])
    expected_grads = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    with gt.ablate(model, wanted, HOWS[how][0]) as found:
        loss = loss_of(model)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert found == names and torch.equal(loss, expected) and not torch.equal(loss, before)
    assert torch.equal(loss_of(model), before)
    for ours, theirs in zip(grads, expected_grads):
        assert (ours is None) == (theirs is None) or not (ours if theirs is None else theirs).any()
        assert ours is None or theirs is None or torch.allclose(ours, theirs)


@pytest.mark.parametrize("how", ["zero", "mean"])
@pytest.mark.parametrize("by", ["slot 1", "label:slot 1", "slot ?", "labels"])
def test_labelled_slices(by: str, how: str) -> None:
    model = Net()
    hidden = torch.zeros(5, 4)

    def keep(module: nn.Module, args: Any) -> None:
        hidden.copy_(args[0].detach())

    with gt.ablate(model, ["slot 1", "slot 0"]), torch.no_grad():
        loss_of(model)
    handle = model.out.register_forward_pre_hook(keep)
    loss_of(model)
    whole = hidden.clone()
    with gt.ablate(model, by, how):
        loss_of(model)
    handle.remove()
    gone = torch.zeros(5, 4) if how == "zero" else whole.mean(0).expand(5, 4)
    first = whole[:, :2] if "1" in by else gone[:, :2]
    assert torch.allclose(hidden, torch.cat([first, gone[:, 2:]], 1))


class Returns(nn.Module):
    """Returns what it is made with, and a scalar of it."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (lambda x: (x, [x + 1, {"a": x}]), lambda out: [out[0], out[1][0], out[1][1]["a"]]),
        (lambda x: (x, x.long()), lambda out: [out[0]]),
    ],
    ids=["nested", "integers stay"],
)
def test_outputs_of_any_kind(make: Any, left: Any) -> None:
    model, x = nn.Sequential(Returns(make)), torch.ones(2, 2)
    with gt.ablate(model, "0"):
        out = model(x)
    assert type(out) is type(make(x)) and all(not part.any() for part in left(out))
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Tensor):
        assert out[1].all()


def test_recurrent_states_have_layers_first() -> None:
    model, x = nn.ModuleDict({"lstm": nn.LSTM(2, 3, 2, batch_first=True)}), torch.randn(4, 5, 2)
    wanted, (h, _) = model["lstm"](x)
    with gt.ablate(model, "lstm", "mean"):
        found, (state, _) = model["lstm"](x)
    assert torch.allclose(found, wanted.mean(0, keepdim=True).expand_as(wanted))
    assert torch.allclose(state, h.mean(1, keepdim=True).expand_as(h))


# Heads -------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Written by hand: the projection of what the heads have made is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.out, self.qkv = 2, nn.Linear(8, 8), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = (q @ k.transpose(2, 3)).softmax(-1) @ v
        out: Tensor = self.out(heads.transpose(1, 2).reshape(x.shape))
        return out


def attention(kind: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    if kind == "by hand":
        x = torch.randn(2, 4, 8)
        return nn.Sequential(Attention()), lambda model: loss_of(model, x)
    pytest.importorskip("transformers")
    from architectures import ARCHITECTURES

    model, loss = ARCHITECTURES[kind]()
    return model.eval(), loss


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "t5", "deberta_v2", "by hand"])
def test_heads_that_tables_print_can_be_taken_away(kind: str) -> None:
    """And then no gradient comes through them any more, nor through any other head less."""
    model, loss_fn = attention(kind)
    with gt.watch(model) as watch:
        loss = loss_fn(model)
    names = list(watch.trace(loss).mass("heads").names)
    assert set(names) == set(gt.ablate(model, "heads").components)
    with gt.ablate(model, names[1]), gt.watch(model) as watch:
        without = loss_fn(model)
    shares = watch.trace(without).mass("heads").shares
    assert not torch.equal(loss, without)
    assert {name for name in names if not shares.get(name)} == {names[1]}


# Put back, nested, elsewhere ---------------------------------------------------------------------


def test_everything_is_put_back_after_an_error() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    before = loss_of(model, torch.ones(2, 3, 8))
    with pytest.raises(ValueError, match="mine"), gt.ablate(model, ["linear1", "norm1"], 1.0):
        loss_of(model, torch.ones(2, 3, 8))
        raise ValueError("mine")
    assert torch.equal(loss_of(model, torch.ones(2, 3, 8)), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.filterwarnings("ignore:.*nested tensor")
def test_fused_layers_do_not_pass_over_their_parts() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 3, 8)
    with torch.no_grad():
        before = loss_of(model, x)
        for part in ("layers.1.linear2", "layers.0.self_attn"):
            with gt.ablate(model, part):
                assert not torch.equal(loss_of(model, x), before)


def test_nested_and_checkpointed_and_watched() -> None:
    model = Net()
    with gt.ablate(model, "layers.0.mlp"), gt.ablate(model, "layers.1.mlp", "mean"):
        with gt.watch(model) as watch:
            loss = checkpoint(loss_of, model, X, use_reentrant=False)
        table = watch.trace(loss).mass("layers")
        torch.autograd.backward(loss)
    assert model.layers[0].mlp.weight.grad is None and model.embed.weight.grad.any()
    assert set(table.names) == {"layers.0", "layers.1", "layers.2"}


# Effects -----------------------------------------------------------------------------------------

BATCHES = [torch.randn(6, 3, generator=torch.Generator().manual_seed(n)) for n in range(8)]


@pytest.mark.parametrize("by", ["layers", "labels", ["embed", "layers.*.mlp"], "modules"])
def test_effects_are_those_of_each_component_by_itself(by: Any) -> None:
    model = Net()
    table = gt.ablate(model, by).effects(loss_of, BATCHES)
    names = {"labels": ("slot 0", "slot 1")}.get(str(by), table.names)
    assert set(table.names) == set(names) and "unused" not in table.names
    for row in table:
        with torch.no_grad(), gt.ablate(model, [row.component]):
            without = torch.stack([loss_of(model, x) for x in BATCHES])
        rises = (without - torch.stack([loss_of(model, x) for x in BATCHES])).detach()
        assert row.rise == pytest.approx(float(rises.mean()), abs=1e-6)
        assert rises.min() <= row.low <= row.rise <= row.high <= rises.max()
    assert table.column("rise") == sorted(table.column("rise"), reverse=True)
    assert ("never called: unused" in table.notes) == (by == "modules")
    assert gt.ablate(model, by).effects(loss_of, BATCHES).rows == table.rows


def test_effects_disturb_nothing_and_compare_like_with_like() -> None:
    """A dropout draws the same with and without; a part that does nothing has no effect."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Identity())
    model.append(nn.Linear(4, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draws = torch.get_rng_state()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        model.train(not model.training)
        return model(x).square().mean() + 0 * torch.rand(())

    table = gt.ablate(model, {"2": "2", "1 twice": ["1", "1"]}).effects(loss, BATCHES[:1])
    assert torch.equal(torch.get_rng_state(), draws) and model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert table["2"].rise != 0 and str(table["2"].low) == "nan"
    none = gt.ablate(nn.Sequential(nn.Dropout(), nn.Flatten()), "1", how=1.0)
    assert none.effects(lambda m, x: m[0](x).sum() + 0 * m(x).sum(), BATCHES)["1"].rise == 0


# Errors ------------------------------------------------------------------------------------------

TIMED = nn.Sequential(nn.LSTM(3, 2, 2))
ERRORS: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "no model": (GradtraceError, "not a int", lambda: gt.ablate(3, "a")),  # type: ignore[arg-type]
    "how": (GradtraceError, "not 'remove'", lambda: gt.ablate(Net(), "out", "remove")),
    "no name": (GradtraceError, "not 3", lambda: gt.ablate(Net(), [3])),
    "a module": (GradtraceError, "names, patterns", lambda: gt.ablate(Net(), Net())),
    "no class": (
        UnknownName,
        "'class:LSTM' here; did you mean 'class:L",
        lambda: gt.ablate(Net(), nn.LSTM),
    ),
    "time first": (GradtraceError, "which is time in '0'", lambda: gt.ablate(TIMED, "0", "mean")),
    "no fit": (GradtraceError, "the value for 'out'", lambda: run(Net(), "out", torch.ones(3))),
    "a vector": (
        NotScalar,
        "must return one number",
        lambda: gt.ablate(Net(), "out").effects(lambda m, x: m(x), BATCHES),
    ),
    "misspelt": (UnknownName, r"did you mean 'embed'", lambda: run(Net(), "embd")),
    "misspelt label": (UnknownName, "did you mean 'slot 1'", lambda: run(Net(), "slott 1")),
    "not called": (GradtraceError, "'unused' was never called", lambda: run(Net(), "unused")),
    "no heads": (
        GradtraceError,
        "no heads are known.*gradtrace.label",
        lambda: run(Net(), "heads"),
    ),
    "one sample": (GradtraceError, "one sample", lambda: run(Net(), "out", "mean", X[:1])),
    "mean of slices": (
        GradtraceError,
        "slices along dimension 0",
        lambda: run(nn.Sequential(Returns(lambda x: gt.label(x, 0, "row"))), "row 1", "mean"),
    ),
    "heads of a fused module": (
        GradtraceError,
        "what nn.MultiheadAttention has inside is never called",
        lambda: run(nn.TransformerEncoderLayer(4, 2, 4), "heads", x=torch.ones(2, 3, 4)),
    ),
    "no tensor": (
        GradtraceError,
        "no floating tensor",
        lambda: run(nn.Sequential(Returns(lambda x: x.long())), "0"),
    ),
    "no head": (UnknownName, "never called, or given", lambda: run(Net(), "attn head 1")),
    "no batch": (GradtraceError, "no batch", lambda: gt.ablate(Net(), "out").effects(loss_of, [])),
    "effect of none": (
        UnknownName,
        "did you mean 'embed'",
        lambda: gt.ablate(Net(), "embd").effects(loss_of, BATCHES),
    ),
}


def run(model: nn.Module, by: Any, how: Any = "zero", x: Tensor = X) -> None:
    with gt.ablate(model, by, how):
        loss_of(model, x)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_and_what_to_do(name: str) -> None:
    kind, text, call = ERRORS[name]
    with pytest.raises(kind, match=text):
        call()
