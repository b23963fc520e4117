"""``ablate``: a part's output is replaced, nothing else is, and the model is left as it was."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.autodiff.hooks import NEVER, HookWatch
from gradtrace.autodiff.labels import CUTS, label, labels_of
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.pytorch.module_calls import listeners_of
from gradtrace.tools.ablation import ablate
from gradtrace.tools.ablation_rules import ModuleRule


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _switches_are_put_back() -> Iterator[None]:
    yield
    assert CUTS == []
    assert torch.backends.mha.get_fastpath_enabled()


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.attn = nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, size), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Returns(nn.Module):
    """Returns what a function makes of its input times a weight."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, **_: Any) -> Any:
        return self.make(x * self.weight)


def state_of(model: nn.Module) -> Any:
    """All that ablate might leave behind."""
    return (
        {n: (p, p._version, p.requires_grad, p.grad) for n, p in model.named_parameters()},
        [
            (dict(vars(m)), {k: dict(v) for k, v in vars(m).items() if isinstance(v, dict)})
            for m in model.modules()
        ],
        torch.is_grad_enabled(),
        list(CUTS),
    )


# Zero -----------------------------------------------------------------------------------------


def test_zero_is_what_a_hook_that_zeroes_gives() -> None:
    model, x = Net(), torch.randn(5, 3)
    before = model(x)
    with ablate(model, "layers.1.mlp") as names:
        found = model(x)
        grads = torch.autograd.grad(found.sum(), list(model.parameters()), allow_unused=True)
    assert names == ("layers.1.mlp",)
    handle = model.layers[1].mlp.register_forward_hook(lambda m, a, out: out * 0)
    wanted = model(x)
    wanted_grads = torch.autograd.grad(wanted.sum(), list(model.parameters()))
    handle.remove()
    assert torch.equal(found, wanted) and not torch.allclose(found, before)
    for (name, _), grad, want in zip(model.named_parameters(), grads, wanted_grads):
        if name.startswith("layers.1.mlp"):
            assert grad is None and not want.any()
        else:
            assert torch.equal(grad, want)
    assert torch.equal(model(x), before)


def test_no_gradient_flows_through() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with ablate(model, "0"):
        inside = model[0](torch.randn(2, 3, requires_grad=True))
        out = model(torch.randn(2, 3, requires_grad=True))
    assert not inside.requires_grad and not inside.any()
    assert {id(p) for p in (model[1].weight, model[1].bias)} == {
        id(node.variable) for node in leaves_of(out)
    }


def leaves_of(tensor: Tensor) -> set[Any]:
    found, stack = set(), [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            found.add(node)
        stack += [child for child, _ in node.next_functions if child is not None]
    return found


def test_nothing_of_a_broken_module_is_left() -> None:
    module = Returns(lambda x: x / 0)
    with ablate(nn.ModuleDict({"part": module}), "part"):
        assert module(torch.tensor([0.0, 1.0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("grad", [False, True])
def test_the_module_runs_as_ever(grad: bool) -> None:
    seen = []

    def make(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), x.requires_grad))
        return x

    module = Returns(make)
    with torch.set_grad_enabled(grad):
        with ablate(nn.Sequential(module), "0"):
            assert not module(torch.ones(2)).requires_grad
        module(torch.ones(2))
    assert seen == [(grad, grad)] * 2


Pair = namedtuple("Pair", "first second")


@dataclass
class Plain:
    first: Tensor
    second: Any = None
    third: Any = field(init=False, default=None)


@dataclass(frozen=True)
class Frozen:
    first: Tensor
    second: Any = None


MAKES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x + 1),
    "list": lambda x: [x, [x]],
    "namedtuple": lambda x: Pair(x, None),
    "structseq": lambda x: torch.max(x, 1),
    "dict": lambda x: {"a": x, "b": {"c": (x,)}},
    "dataclass": lambda x: Plain(x, [x]),
    "frozen": lambda x: Frozen(x, {"a": x}),
    "packed": lambda x: pack_sequence([x, x[:1]]),
    "complex": lambda x: torch.complex(x, x),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "scalar": lambda x: x.sum(),
    "empty": lambda x: x[:0],
    "expanded": lambda x: x[:1].expand(7, 3),
}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = list(vars(value).values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("how", ["zero", "mean"])
def test_outputs_of_any_kind(kind: str, how: str) -> None:
    x = torch.randn(2, 3)
    module = Returns(MAKES[kind])
    model = nn.ModuleDict({"part": module})
    wanted = module(x)
    with contextlib.ExitStack() as stack:
        if kind == "scalar" and how == "mean":
            stack.enter_context(pytest.raises(GradtraceError, match="one sample"))
        stack.enter_context(ablate(model, "part", how=how))
        found = module(x)
        assert type(found) is type(wanted)
        assert len(tensors_in(found)) == len(tensors_in(wanted)) > 0
        for ours, theirs in zip(tensors_in(found), tensors_in(wanted)):
            assert ours.shape == theirs.shape and ours.dtype is theirs.dtype
            assert not ours.requires_grad
            if not theirs.is_floating_point() and not theirs.is_complex():
                assert torch.equal(ours, theirs)
            elif how == "zero":
                assert not ours.any()
            elif kind == "packed":  # two samples have the first step, one has the second
                first = theirs.detach()[:2].mean(0, keepdim=True).expand(2, 3)
                assert torch.equal(ours, torch.cat([first, theirs.detach()[2:]]))
            else:
                assert torch.equal(ours, theirs.detach().mean(0, keepdim=True).expand_as(theirs))
        for ours in tensors_in(found):
            ours.add_(1)  # memory of its own, each element


TWICE: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda y: (y, y),
    "nested": lambda y: {"a": (1, [y]), "b": Frozen(y)},
    "one container": lambda y: Pair(*[[y]] * 2),
}


@pytest.mark.parametrize("how", ["zero", "mean", "values", "remove"])
@pytest.mark.parametrize("kind", TWICE)
def test_one_tensor_returned_twice_stays_one(kind: str, how: str) -> None:
    module, x = Returns(TWICE[kind]), torch.randn(2, 3, requires_grad=True)
    model = nn.ModuleDict({"part": module})
    options: Any = {"how": how} if how != "values" else {"how": "mean", "values": {"part": 0.5}}
    with ablate(model, "part", **options):
        found = module(x)
    first, second = tensors_in(found)
    assert first is second
    if kind == "one container":
        assert found.first is found.second
    before = first.clone()
    first.mul_(3)
    loss = (second * second).sum()  # of what was written through the first
    assert torch.equal(loss, (3 * before).pow(2).sum())
    if how == "remove":
        (grad,) = torch.autograd.grad(loss, x)
        assert torch.allclose(grad, 18 * x)


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda y: (y, y[:, 0]),
    "reversed order": lambda y: {"last": y[:, -1], "all": [y]},
    "flat": lambda y: (y.flatten(1), y),
    "two slices": lambda y: (y[:, :3], y[:, 2:]),
    "expanded": lambda y: (y, y[:, :1].expand(-1, 4)),
    "three": lambda y: (y[:, 1:], y[:, :2], y[:, 1]),
    "another shape": lambda y: (y, y.view(2, 2, 2)),
}


@pytest.mark.parametrize("how", ["zero", "mean", "values"])
@pytest.mark.parametrize("kind", VIEWS)
def test_views_of_one_memory_stay_that(kind: str, how: str) -> None:
    """What is written to one of them is in the others, with its gradient."""
    module, x = Returns(VIEWS[kind]), torch.randn(2, 4)
    scale = torch.tensor(3.0, requires_grad=True)
    options: Any = {"how": how} if how != "values" else {"how": "mean", "values": {"part": 0.5}}

    def after(written: int) -> list[Tensor]:
        with ablate(nn.ModuleDict({"part": module}), "part", **options):
            found = tensors_in(module(x.clone()))
        found[written].add_(1).mul_(scale)
        return found

    def wanted(written: int) -> list[Tensor]:
        mean = 2 * x.mean(0, keepdim=True).expand(2, 4)
        y = {"zero": torch.zeros(2, 4), "mean": mean, "values": torch.full((2, 4), 0.5)}[how]
        found = tensors_in(VIEWS[kind](y.clone()))
        found[written].add_(1).mul_(scale)
        return found

    for written in range(1 if kind == "expanded" else 2):  # PyTorch does not write to that
        for ours, theirs in zip(after(written), wanted(written)):
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours.detach(), theirs.detach())
            assert ours.requires_grad == theirs.requires_grad
            if theirs.requires_grad:
                grad = functools.partial(torch.autograd.grad, inputs=scale, retain_graph=True)
                one, two = (grad(each.sum())[0] for each in (ours, theirs))
                torch.testing.assert_close(one, two)


@pytest.mark.parametrize("given", [False, True])
def test_views_whose_means_differ(given: bool) -> None:
    """One of them has samples elsewhere; values of the user's are kept as they are, apart."""
    module, x = Returns(lambda y: (y, y.t())), torch.randn(3, 3)
    model = nn.ModuleDict({"part": module})
    if not given:
        with (
            pytest.raises(GradtraceError, match="'part' returns tensors that overlap in memory"),
            ablate(model, "part", how="mean"),
        ):
            module(x)
        return
    with ablate(model, "part", how="mean", values={"part": [1.0, 2.0]}):
        one, two = module(x)
    assert (one == 1).all() and (two == 2).all()


def test_parts_of_one_memory_that_do_not_overlap_are_apart() -> None:
    module = Returns(lambda y: y.chunk(2, -1))
    with ablate(nn.ModuleDict({"part": module}), "part"):
        one, two = module(torch.randn(3, 4))
    assert one.is_contiguous() and one.untyped_storage().data_ptr() != two.data_ptr()


def test_different_values_for_one_tensor_are_different_tensors() -> None:
    module, given = Returns(lambda y: (y, y, y, y)), torch.ones(3)
    model = nn.ModuleDict({"part": module})
    with ablate(model, "part", how="mean", values={"part": [1.0, given, 1.0, given]}):
        a, b, c, d = module(torch.ones(2, 3))
    assert a is c and b is d and a is not b


def test_what_is_not_floating_stays() -> None:
    indices, mask = torch.arange(3), torch.tensor([True, False])
    thing = object()
    module = Returns(lambda x: (indices, x, mask, None, "text", 3, 0.5, thing))
    with ablate(nn.ModuleDict({"part": module}), "part"):
        found = module(torch.ones(2))
    assert found[0] is indices and found[2] is mask and found[-1] is thing
    assert found[3:7] == (None, "text", 3, 0.5)
    assert not found[1].any()


def test_the_modules_own_result_is_not_written_to() -> None:
    kept = {"a": torch.ones(2), "b": [torch.ones(2)]}
    part = Plain(torch.ones(2))
    module = Returns(lambda x: (kept, part))
    with ablate(nn.ModuleDict({"m": module}), "m"):
        found = module(torch.ones(2))
    assert not found[0]["a"].any() and kept["a"].all() and kept["b"][0].all() and part.first.all()


@pytest.mark.parametrize("how", ["zero", "mean", "remove"])
@pytest.mark.parametrize(
    "make", [lambda x: None, lambda x: (), lambda x: {"n": x.int()}, lambda x: object()]
)
def test_an_output_in_which_nothing_is_found(how: str, make: Callable[..., Any]) -> None:
    module = Returns(make)
    with (
        pytest.raises(GradtraceError, match="'part'"),
        ablate(nn.ModuleDict({"part": module}), "part", how=how),
    ):
        module(torch.ones(2))


@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers(batch_first: bool) -> None:
    lstm = nn.LSTM(3, 4, num_layers=2, batch_first=batch_first)
    model = nn.ModuleDict({"lstm": lstm})
    x = torch.randn(5, 6, 3)
    wanted, (h, c) = lstm(x)
    with ablate(model, "lstm"):
        out, state = lstm(x)
    assert not out.any() and not state[0].any() and not state[1].any()
    assert out.shape == (5, 6, 4) and state[1].shape == (2, 5 if batch_first else 6, 4)
    with ablate(model, "lstm", how="mean"):
        out, state = lstm(x)
    dim = 0 if batch_first else 1
    assert torch.equal(out, wanted.mean(dim, keepdim=True).expand_as(wanted))
    assert torch.equal(state[0], h.mean(1, keepdim=True).expand_as(h))
    assert torch.equal(state[1], c.mean(1, keepdim=True).expand_as(c))


def test_packed_sequences_through_a_model() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4)
            self.head = nn.Linear(4, 1)

        def forward(self, parts: list[Tensor]) -> Tensor:
            out, _ = self.rnn(pack_sequence(parts))
            return self.head(pad_packed_sequence(out)[0])

    model = Packed()
    parts = [torch.randn(n, 3) for n in (4, 2)]
    with ablate(model, "rnn"):
        assert torch.equal(model(parts), model.head.bias.expand(4, 2, 1))


@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_the_mean_of_packed_sequences(kind: Any, enforce_sorted: bool) -> None:
    rnn = kind(3, 4, num_layers=2, bidirectional=True)
    parts = [torch.randn(n, 3) for n in ((5, 4, 2) if enforce_sorted else (2, 5, 4))]
    packed = pack_sequence(parts, enforce_sorted)
    (wanted, lengths), state = (lambda out, h: (pad_packed_sequence(out), h))(*rnn(packed))
    with ablate(nn.ModuleDict({"rnn": rnn}), "rnn", how="mean"):
        out, found = rnn(packed)
    assert torch.equal(out.batch_sizes, packed.batch_sizes)
    ours, _ = pad_packed_sequence(out)
    for step in range(5):
        there = lengths > step
        mean = wanted[step, there].mean(0)
        assert torch.allclose(ours[step, there], mean.expand(int(there.sum()), 8), atol=1e-6)
    for h, want in zip(tensors_in(found), tensors_in(state)):
        assert torch.allclose(h, want.mean(1, keepdim=True).expand_as(want), atol=1e-6)


D = 4
LAYOUTS: dict[str, Callable[[bool], tuple[nn.Module, int]]] = {
    "rnn": lambda first: (nn.RNN(D, D, batch_first=first), 1),
    "attention": lambda first: (nn.MultiheadAttention(D, 2, batch_first=first), 3),
    "encoder layer": lambda f: (nn.TransformerEncoderLayer(D, 2, 6, 0.0, batch_first=f), 1),
    "decoder layer": lambda f: (nn.TransformerDecoderLayer(D, 2, 6, 0.0, batch_first=f), 2),
    "encoder": lambda f: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 6, 0.0, batch_first=f), 2),
        1,
    ),
    "decoder": lambda f: (
        nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 6, 0.0, batch_first=f), 2),
        2,
    ),
    "transformer": lambda f: (nn.Transformer(D, 2, 1, 1, 6, 0.0, batch_first=f), 2),
}


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_mean_is_over_samples(kind: str, first: bool, training: bool) -> None:
    layer, arguments = LAYOUTS[kind](first)
    model = nn.ModuleDict({"part": layer.train(training)})
    x, dim = torch.randn(5, 3, D), 0 if first else 1
    wanted = layer(*[x] * arguments)
    with ablate(model, "part", how="mean"):
        found = layer(*[x] * arguments)
    if isinstance(wanted, tuple):
        rest = 1 if kind == "rnn" else 0  # of states, and of weights
        mean = wanted[1].mean(rest, keepdim=True).expand_as(wanted[1])
        assert torch.allclose(found[1], mean, atol=1e-6)
        found, wanted = found[0], wanted[0]
    mean = wanted.detach().mean(dim, keepdim=True).expand_as(wanted)
    assert torch.allclose(found, mean, atol=1e-6) and not found.requires_grad
    with (
        pytest.raises(GradtraceError, match=r"module 'part' .*one sample .*\(5, 4\).*how='zero'"),
        ablate(model, "part", how="mean"),
    ):
        layer(*[x[:, 0]] * arguments)
    with ablate(model, "part", how="mean", values={"part": 0.5}):
        layer(*[x[:, 0]] * arguments)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("part", ["linear1", "linear2", "norm1", "dropout1", "self_attn"])
def test_the_mean_of_a_part_of_a_layer(part: str, first: bool) -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 6, 0.0, batch_first=first)
    model, x = nn.Sequential(nn.Sequential(layer)), torch.randn(5, 3, D)
    seen: list[Any] = []
    handle = layer.get_submodule(part).register_forward_hook(lambda m, a, out: seen.append(out))
    model(x)
    with ablate(model, f"0.0.{part}", how="mean"):
        model(x)
    wanted, found = (out[0] if isinstance(out, tuple) else out for out in seen)
    handle.remove()
    dim = 0 if first else 1
    assert torch.allclose(found, wanted.mean(dim, keepdim=True).expand_as(wanted), atol=1e-6)
    with (
        pytest.raises(GradtraceError, match="one sample without a batch dimension"),
        ablate(model, f"0.0.{part}", how="mean"),
    ):
        model(x[:, 0])


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


@pytest.mark.parametrize(
    ("part", "call", "says"),
    [
        (nn.Tanh(), lambda part: part(torch.randn(3)), "may be samples, or the features of one"),
        (nn.Tanh(), lambda part: torch.vmap(part)(torch.randn(2, 3)), "inside torch.vmap"),
        (Sparse(), lambda part: part(torch.randn(3, 3)), "layout torch.sparse_coo"),
    ],
    ids=["one dimension", "vmap", "sparse"],
)
def test_where_samples_do_not_show(part: nn.Module, call: Any, says: str) -> None:
    model = nn.ModuleDict({"part": part})
    with (
        pytest.raises(GradtraceError, match=rf"module 'part' .*{says}"),
        ablate(model, "part", how="mean"),
    ):
        call(part)
    if not isinstance(part, Sparse):
        with ablate(model, "part", how="mean", batch_dim=0):
            assert call(part).std(-1).max() < 1e-6


@pytest.mark.parametrize(
    ("part", "shape"),
    [
        (nn.Conv1d(3, 3, 1), (3, 5)),
        (nn.Conv2d(3, 3, 1), (3, 5, 5)),
        (nn.MaxPool2d(2), (3, 4, 4)),
        (nn.AdaptiveAvgPool1d(2), (3, 4)),
        (nn.RNNCell(3, 4), (3,)),
        (nn.LSTMCell(3, 4), (3,)),
        (nn.Linear(3, 4), (3,)),
        (nn.LayerNorm((2, 3)), (2, 3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_sample_has_no_mean(part: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.ModuleDict({"part": part})
    x = torch.randn(2, *shape)
    wanted = part(x)
    with ablate(model, "part", how="mean"):
        found = part(x)
    for ours, theirs in zip(tensors_in(found), tensors_in(wanted)):
        assert torch.allclose(ours, theirs.mean(0, keepdim=True).expand_as(theirs))
    with (
        pytest.raises(GradtraceError, match=r"module 'part' .*one sample without a batch"),
        ablate(model, "part", how="mean"),
    ):
        part(x[0])


class Head(nn.Module):
    """A layer that accepts one sample, before or after parts of which the shape does not say it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer, self.act, self.last = nn.ReLU(), layer, nn.GELU(), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(self.before(x))
        return self.last(self.act(out[0] if isinstance(out, tuple) else out))  # type: ignore[no-any-return]


@pytest.mark.parametrize("part", ["before", "act", "last"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(3, 3, 1), (3, 5)),
        (nn.ConvTranspose2d(3, 3, 1), (3, 5, 5)),
        (nn.GRU(5, 5, batch_first=True), (4, 5)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_sample_in_another_layer(layer: nn.Module, shape: Any, part: str) -> None:
    """Channels or time steps of the one sample were averaged over."""
    model, x = Head(layer), torch.randn(2, *shape)
    with ablate(model, part, how="mean"):
        model(x)
    with (
        pytest.raises(GradtraceError, match=rf"module '{part}' .*module 'layer' .*batch_dim="),
        ablate(model, part, how="mean"),
    ):
        model(x[0])
    with ablate(model, part, how="mean", batch_dim=0):
        model(x[0])


class Timed(nn.Module):
    """Has time first; what its head returns does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head, self.conv = nn.GRU(3, 3), nn.Linear(3, 2), nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.rnn(self.conv(x.permute(1, 2, 0)).permute(2, 0, 1))
        self.last = self.head(state[0])
        return label(self.head(out), -1, ["a", "b"])


def test_where_it_does_not_show_batch_dim_says() -> None:
    model, x = Timed(), torch.randn(5, 4, 3)
    wanted = model(x).detach()
    for name in ("head", "label:a"):
        with (
            pytest.raises(GradtraceError, match=r"\(5, 4, 2\).*as in 'rnn'.*batch_dim=1"),
            ablate(model, name, how="mean"),
        ):
            model(x)
    for dim in (1, -2, {"head": 1}, {"h*": 1}):
        with ablate(
            model, *(dim if isinstance(dim, dict) else ["head"]), how="mean", batch_dim=dim
        ):
            found = model.head(model.rnn(model.conv(x.mT).mT)[0]).detach()
            shown = model.head(torch.randn(5, 4, 3))
        assert torch.equal(shown, shown[:, :1].expand_as(shown)) and found.shape == wanted.shape
    with ablate(model, "label:a", how="mean", batch_dim=1):
        found = model(x)
    assert torch.allclose(found[..., :1], wanted[..., :1].mean(1, keepdim=True).expand(5, 4, 1))
    assert torch.equal(found[..., 1:], wanted[..., 1:])
    with ablate(model, "conv", how="mean"):  # has samples first
        model(x)
    for given, says in [
        ({"dim": 7}, "no dimension 7"),
        ({"dim": {"haed": 1}}, r"batch_dim\['haed'\] is not ablated; did you mean 'head'"),
        ({"dim": 1.0}, "batch_dim is a number"),
        ({"dim": 1, "how": "zero"}, "say how='mean'"),
        ({"dim": -1, "name": "label:a"}, "marks slices along dimension 2.*samples"),
    ]:
        name, how = given.get("name", "head"), given.get("how", "mean")
        with (
            pytest.raises(GradtraceError, match=says),
            ablate(model, name, how=how, batch_dim=given["dim"]),  # type: ignore[arg-type]
        ):
            model(x)


# In place -------------------------------------------------------------------------------------


class Doubles(nn.Module):
    """Writes to its input through a view of it, and returns something else."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, :2].mul_(2)
        return x.sin()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3).double())

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.seen.add_(x.mean(0))
        x.add_(1)
        return {"out": [x, x], "more": (x * 2, None)}


class Aside(nn.Module):
    """Keeps a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3).double())

    def forward(self, x: Tensor) -> Tensor:
        self.term = x.sum() * self.weight.sum()
        return x.clamp_(min=0)


IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "view": Doubles,
    "nested": Counts,
    "identity": nn.Identity,
    "dropout": lambda: nn.Dropout(0.5).eval(),
    "aside": Aside,
    "inside": lambda: nn.Sequential(nn.Identity(), nn.LeakyReLU(0.1, inplace=True)),
}


@pytest.mark.parametrize("how", ["zero", "mean", "values", "remove"])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_the_gradient_is_that_of_the_ablated_loss(kind: str, how: str) -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act = nn.Linear(3, 3).double(), IN_PLACE[kind]()
            self.b = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).clone()
            out = tensors_in(self.act(h))[0]
            rest = self.act.term if how != "remove" and kind == "aside" else 0.0
            return self.b(out) + h + rest

    model, x = Uses(), torch.randn(4, 3).double()
    options: Any = {"how": how} if how != "values" else {"how": "mean", "values": {"act": 0.3}}

    def loss() -> Tensor:
        with ablate(model, "act", **options):
            return model(x).pow(2).sum()

    def hooked() -> Tensor:
        def instead(_: Any, __: Any, out: Any) -> Any:
            one = tensors_in(out)[0]
            if how == "zero":
                return torch.zeros_like(one)
            mean = one.detach().mean(0).expand_as(one)
            return mean.clone() if how == "mean" else torch.full_like(one, 0.3)

        handle = model.act.register_forward_hook(instead)
        found = model(x).pow(2).sum()
        handle.remove()
        return found

    wanted = torch.autograd.grad(loss(), model.a.bias)[0]
    if how == "mean":  # what the mean depends on has no gradient, so differences are of no use
        assert torch.allclose(wanted, torch.autograd.grad(hooked(), model.a.bias)[0])
        return
    with torch.no_grad():
        for at in range(3):
            model.a.bias[at] += 1e-6
            above = float(loss())
            model.a.bias[at] -= 2e-6
            below = float(loss())
            model.a.bias[at] += 1e-6
            assert abs((above - below) / 2e-6 - float(wanted[at])) < 1e-4
    if how != "remove":
        assert torch.allclose(loss(), hooked())


# Mean -----------------------------------------------------------------------------------------


def test_mean_knows_nothing_of_the_sample() -> None:
    model, x = Net(), torch.randn(6, 3, requires_grad=True)
    with ablate(model, "head", how="mean"):
        out = model(x)
    assert torch.equal(out, model(x).mean(0).expand(6, 2)) and not out.requires_grad
    with ablate(model, "embed", how="mean"):
        out = model(x)
    assert torch.allclose(out, out[:1].expand(6, 2))
    assert x.grad is None
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(out.sum(), list(model.parameters()), allow_unused=True)
    assert {n for n, g in zip([n for n, _ in model.named_parameters()], grads) if g is None} == {
        n for n in names if n.startswith("embed")
    }


@pytest.mark.parametrize(
    "value",
    [torch.arange(4.0), torch.randn(6, 4), torch.randn(1, 1), 0.25, torch.randn(4).double()],
    ids=["row", "whole", "one", "number", "double"],
)
def test_values_are_broadcast(value: Any) -> None:
    model, x = Net(), torch.randn(6, 3)
    given = torch.as_tensor(value).requires_grad_()
    with ablate(model, "layers.0.attn", how="mean", values={"layers.0.attn": value}):
        out = model(x)
        (inside,) = [model.layers[0].attn(torch.randn(6, 4))]
    wanted = given.detach().float().expand(6, 4)
    assert torch.equal(inside, wanted) and not inside.requires_grad
    inside.zero_()
    handle = model.layers[0].attn.register_forward_hook(lambda *_: wanted)
    assert torch.equal(out, model(x))
    handle.remove()


def test_values_by_pattern_and_for_some_names_only() -> None:
    model, x = Net(), torch.randn(6, 3)
    values = {"layers.*.attn": 1.0, "layers.1.attn": 2.0}
    with ablate(model, "layers.*.attn", "head", how="mean", values=values) as names:
        out = model(x)
        found = [layer.attn(torch.randn(2, 4)).unique().tolist() for layer in model.layers]
    assert names == ("layers.0.attn", "layers.1.attn", "head")
    assert found == [[1.0], [2.0]]
    assert torch.equal(out, out[:1].expand(6, 2)) and out.unique().numel() == 2


def test_several_values_for_several_tensors() -> None:
    model = nn.ModuleDict({"rnn": nn.GRU(3, 4)})
    with ablate(model, "rnn", how="mean", values={"rnn": (1.0, torch.full((4,), 2.0))}):
        out, state = model["rnn"](torch.randn(5, 2, 3))
    assert (out == 1).all() and (state == 2).all()
    with (
        pytest.raises(GradtraceError, match=r"values\['rnn'\] holds 1 values"),
        ablate(model, "rnn", how="mean", values={"rnn": [1.0]}),
    ):
        model["rnn"](torch.randn(5, 2, 3))


def test_values_that_do_not_fit() -> None:
    model = Net()
    for shape in [(5,), (7, 4), (1, 6, 4)]:
        with (
            pytest.raises(GradtraceError, match=r"module 'embed' has shape .*to \(6, 4\)"),
            ablate(model, "embed", how="mean", values={"embed": torch.zeros(shape)}),
        ):
            model(torch.randn(6, 3))
    with pytest.raises(UnknownName, match=r"values\['emebd'\].*did you mean 'embed'"):
        ablate(model, "embed", how="mean", values={"emebd": 1.0}).__enter__()
    for bad in (float("nan"), [0.0, torch.tensor([1.0, float("inf")])]):
        with pytest.raises(GradtraceError, match=r"values\['embed'\] has .* NaN or infinite"):
            ablate(model, "embed", how="mean", values={"embed": bad})
    for how in ("zero", "remove"):
        with pytest.raises(GradtraceError, match="say how='mean'"):
            ablate(model, "embed", how=how, values={"embed": 1.0})


def test_the_mean_of_one_sample_is_refused() -> None:
    model = Net()
    with (
        pytest.raises(GradtraceError, match="'embed' holds one sample"),
        ablate(model, "embed", how="mean"),
    ):
        model(torch.randn(1, 3))
    with ablate(model, "embed", how="mean", values={"embed": 0.0}):
        model(torch.randn(1, 3))
    with ablate(model, "embed", how="mean"):
        assert model(torch.randn(0, 3)).shape == (0, 2)
    module = Returns(lambda x: (x, x[:1]))  # one tensor of several is for all samples
    with ablate(nn.ModuleDict({"part": module}), "part", how="mean"):
        assert module(torch.ones(2, 3))[1].shape == (1, 3)


# Remove ---------------------------------------------------------------------------------------


def test_remove_passes_the_input_and_its_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Tanh())
    x = torch.randn(4, 3, requires_grad=True)
    with ablate(model, "1", how="remove"):
        out = model(x)
    wanted = model[2](model[0](x))
    assert torch.equal(out, wanted)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(wanted.sum(), x)[0])


class Draws(nn.Module):
    """Counts, draws random numbers and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.calls: list[Tensor] = []
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        self.kept = F.dropout(self.norm(x)) + torch.rand(3)
        self.calls.append(self.kept)
        cache["seen"] = self.kept
        return self.kept


def test_a_removed_module_does_not_run() -> None:
    model = nn.ModuleDict({"part": Draws()})
    part = model["part"]
    x, cache = torch.randn(2, 3), {}
    random, stats = torch.get_rng_state(), copy.deepcopy(part.state_dict())
    with ablate(model, "part", how="remove"):
        out = part(x, cache)
    assert torch.equal(out, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert part.calls == [] and part.kept is None and cache == {}
    for name, value in part.state_dict().items():
        assert torch.equal(value, stats[name])


def test_a_removed_module_may_be_written_over() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.part(x)
            y += 1
            return x * y

    x = torch.randn(2, 3)
    kept = x.clone()
    with ablate(model := Writes(), "part", how="remove"):
        assert torch.equal(model(x), kept * (kept + 1))
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    "part", [nn.Identity(), nn.Dropout().eval(), nn.ReLU(inplace=True), nn.Sequential()]
)
def test_a_module_that_returns_its_input_is_removed_as_if_it_were_not_there(
    part: nn.Module,
) -> None:
    """What is written to its output is written to its input, with the module and without it."""
    x = torch.rand(2, 3, requires_grad=True)
    h = x * 2
    with ablate(nn.ModuleDict({"part": part}), "part", how="remove"):
        out = part(h)
    out.mul_(5)
    assert out is h
    assert torch.allclose(torch.autograd.grad((h * out).sum(), x)[0], 200 * x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("part", "args"),
    [
        (nn.LSTM(4, 4, 2, dropout=0.5), (torch.randn(5, 2, 4),)),
        (nn.GRU(4, 4, batch_first=True), (torch.randn(5, 2, 4),)),
        (nn.MultiheadAttention(4, 2, 0.1, batch_first=True), (torch.randn(5, 2, 4),) * 3),
    ],
    ids=["lstm", "gru", "attention"],
)
def test_remove_where_several_are_returned(part: nn.Module, args: Any, training: bool) -> None:
    part.train(training)
    wanted = part(*args)
    with ablate(nn.ModuleDict({"part": part}), "part", how="remove"):
        found = part(*args)
    assert type(found) is tuple and torch.equal(found[0], args[0])
    rest = tensors_in(found[1])
    assert [t.shape for t in rest] == [t.shape for t in tensors_in(wanted[1])]
    assert rest and not any(t.any() for t in rest)


def test_remove_hands_on_what_the_module_would() -> None:
    class Cache:
        def __init__(self) -> None:
            self.tensor = torch.ones(2)

    class Hands(nn.Module):
        def forward(self, *, hidden: Tensor, bias: Tensor, ids: Tensor, cache: Cache) -> Any:
            return {"h": hidden * 2, "bias": bias, "ids": ids, "cache": cache, "new": bias + 1}

    model = nn.ModuleDict({"part": Hands()})
    given = {"hidden": torch.randn(2), "bias": torch.randn(3), "ids": torch.arange(4)}
    cache = Cache()
    with ablate(model, "part", how="remove"):
        found = model["part"](**given, cache=cache)
    assert torch.equal(found["h"], given["hidden"])
    assert found["bias"] is given["bias"] and found["ids"] is given["ids"]
    assert found["cache"] is cache and type(cache.tensor) is Tensor
    assert type(found["new"]) is Tensor and found["new"].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("part", "args", "says"),
    [
        (nn.Linear(3, 2), torch.ones(4, 3), r"'part' .*shape \(4, 3\) .*shape \(4, 2\).*'zero'"),
        (nn.Embedding(5, 2), torch.arange(3), "'part' is given no floating tensor.*'zero'"),
        (Returns(lambda x: (x, x.argmax())), torch.ones(3), "'part' also returns.*int64.*'zero'"),
        (Returns(lambda x: x * x.item()), torch.ones(1), "'part' .*without running it.*'zero'"),
    ],
    ids=["shape", "no input", "integers", "opaque"],
)
def test_what_cannot_be_removed(part: nn.Module, args: Tensor, says: str) -> None:
    model = nn.ModuleDict({"part": part})
    with pytest.raises(GradtraceError, match=says), ablate(model, "part", how="remove"):
        part(args)
    assert "forward" not in vars(part)


def test_remove_follows_the_dtype_of_autocast() -> None:
    model = nn.ModuleDict({"part": nn.Linear(3, 3)})
    x = torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16), ablate(model, "part", how="remove"):
        out = model["part"](x)
    assert torch.equal(out, x.bfloat16())


def test_remove_beside_hooks_that_cannot_be_copied() -> None:
    class Counter:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.calls = 0

        def count(self, *_: object) -> None:
            with self.lock:
                self.calls += 1

    model, counter = nn.Sequential(nn.Sequential(nn.Linear(3, 3))), Counter()
    model[0].register_forward_hook(counter.count)
    model[0][0].register_forward_pre_hook(counter.count)
    x = torch.randn(2, 3)
    with gt.watch(model), ablate(model, "0", how="remove"):
        assert torch.equal(model(x), x)
    assert counter.calls == 1  # not on the copy


def test_a_part_of_what_is_removed_is_gone_with_it() -> None:
    model, x = Net(), torch.randn(2, 3)
    with ablate(model, "layers.0", "layers.0.mlp", how="remove"):
        out = model(x)
    assert torch.equal(out, model.head(model.layers[1](model.embed(x))))


# Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (["layers.*.mlp"], ("layers.0.mlp", "layers.1.mlp")),
        (["layers.*"], ("layers.0", "layers.1")),
        (["*"], ("embed", "head")),  # the list is never called
        (["**.mlp"], ("layers.0.mlp", "layers.1.mlp")),
        (["layers.1.**.0"], ("layers.1.mlp.0",)),
        (["layers.[1-9].attn"], ("layers.1.attn",)),
        (["head", "layers.?.attn", "head"], ("head", "layers.0.attn", "layers.1.attn")),
        ([""], ("",)),
    ],
)
def test_names_and_patterns(asked: list[str], found: tuple[str, ...]) -> None:
    model = Net()
    modules = dict(model.named_modules())
    with ablate(model, *asked) as names:
        assert names == found
        for name, module in modules.items():
            heard = [each for each in listeners_of(module) if isinstance(each, ModuleRule)]
            assert bool(heard) == (name in found)
        model(torch.randn(2, 3))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["layers.0.mpl"], "no module 'layers.0.mpl'.*did you mean 'layers.0.mlp'"),
        (["head", "zzz"], "no module 'zzz'.*there are 'embed', 'layers', .*, \\.\\.\\."),
        (["layers.*.zzz"], r"no module 'layers\.\*\.zzz'"),
        (["**.tail"], "no module"),
    ],
)
def test_unknown_names(names: list[str], says: str) -> None:
    model = Net()
    before = state_of(model)
    with pytest.raises(UnknownName, match=says), ablate(model, *names):
        raise AssertionError("entered")
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ablate(Net()), "names of modules after the model"),
        (lambda: ablate(Net(), 3), "names of modules after the model"),
        (lambda: ablate(Net(), nn.Linear(2, 2)), "names of modules after the model"),
        (lambda: ablate("embed", Net()), "takes a torch.nn.Module first, got str"),
        (lambda: ablate(Net(), "embed", how="noise"), "'zero' or 'mean' or 'remove', got 'noise'"),
        (lambda: ablate(Net(), "label:a", how="remove"), "'label:a' is a slice.*'zero' or 'mean'"),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(GradtraceError, match=says):
        make()


def test_a_list_of_modules_is_never_called() -> None:
    for name in ("layers", "l*s"):
        with (
            pytest.raises(GradtraceError, match=r"'layers' is a ModuleList.*'layers\.\*'"),
            ablate(Net(), name),
        ):
            pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2), traced)
    for name in "02":
        with pytest.raises(GradtraceError, match="is TorchScript"), ablate(model, name):
            pass
    with ablate(model, "1"):
        assert torch.equal(model(torch.ones(1, 2)), traced(torch.zeros(1, 2)))


def test_shared_modules_go_under_all_their_names() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) + x

    model, x = Shared(), torch.randn(2, 3)
    before = state_of(model)
    for asked, found in [("a", ("a",)), ("b", ("b",)), ("?", ("a", "b"))]:
        with ablate(model, asked) as names:
            assert names == found and torch.equal(model(x), x)
        assert state_of(model) == before


def test_a_cell_called_many_times() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.RNNCell(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = x[0]
            for step in x:
                h = h + self.cell(step, h)
            return h

    x = torch.randn(5, 2, 3)
    with ablate(model := Loop(), "cell"):
        assert torch.equal(model(x), x[0])


# What is left behind --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["zero", "mean", "remove"])
@pytest.mark.parametrize(
    "error", [None, ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration]
)
def test_the_model_is_as_before(how: str, error: type[BaseException] | None) -> None:
    model = Net()
    model.layers[0].register_forward_hook(lambda *_: None)
    before, x = state_of(model), torch.randn(2, 3)
    wanted = model(x)
    with contextlib.suppress(error or ZeroDivisionError), ablate(model, "layers.*", how=how):
        assert not torch.equal(model(x), wanted)
        if error is not None:
            raise error
    assert state_of(model) == before
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_inside_the_module(error: type[BaseException]) -> None:
    def fail(x: Tensor) -> Tensor:
        raise error

    model = nn.Sequential(nn.Linear(2, 2), Returns(fail))
    before = state_of(model)
    with pytest.raises(error), ablate(model, "0", "1"):
        model(torch.ones(1, 2))
    assert state_of(model) == before


def test_an_error_while_entering(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    before = state_of(model)

    class Interrupted(list[Any]):
        def append(self, _: object) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gradtrace.autodiff.labels.CUTS", Interrupted())
        with pytest.raises(KeyboardInterrupt), ablate(model, "embed", "head", "label:a"):
            pass
    assert state_of(model) == before


def test_a_forward_of_the_instances_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    own = model[0].forward = lambda x: x + 1  # type: ignore[assignment]
    with ablate(model, "0"):
        assert not model(torch.ones(1, 2)).any()
    assert vars(model[0])["forward"] is own
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    with ablate(model, "0", how="remove"):
        assert torch.equal(model(torch.ones(1, 2)), torch.ones(1, 2))
    assert vars(model[0])["forward"] is own


def test_a_forward_put_there_inside_the_block() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    wanted = model(torch.ones(1, 2))
    with ablate(model, "0"):
        old = model[0].forward
        mine = model[0].forward = lambda x: old(x) + 1  # type: ignore[assignment]
        assert not model(torch.ones(1, 2)).any()
    assert vars(model[0])["forward"] is mine
    assert torch.equal(model(torch.ones(1, 2)), wanted + 1)
    model[0].forward = old
    assert torch.equal(model(torch.ones(1, 2)), wanted)
    with ablate(model, "0"):
        assert not model(torch.ones(1, 2)).any()
    assert vars(model[0])["forward"] is old


def test_nested_ablations() -> None:
    model, x = Net(), torch.randn(2, 3)
    before, wanted = state_of(model), model(x)
    with ablate(model, "layers.0"):
        once = model(x)
        with ablate(model, "layers.*"):
            assert torch.equal(model(x), model.head.bias.expand(2, 2))
        assert torch.equal(model(x), once)
        with pytest.raises(ValueError), ablate(model, "layers.0", "head"):
            assert not model(x).any()
            raise ValueError
        assert torch.equal(model(x), once)
    assert state_of(model) == before and torch.equal(model(x), wanted)


def test_each_ablation_acts_on_what_it_finds() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 3)
    with ablate(model, "0", how="mean", values={"0": x}):
        with ablate(model, "0", how="mean"):
            assert torch.equal(model(x), x.mean(0).expand(4, 3))
        with ablate(model, "0", how="remove"):
            assert torch.equal(model(2 * x), 2 * x)
        assert torch.equal(model(2 * x), x)
    with ablate(model, "0", how="remove"), ablate(model, "0"):
        assert not model(x).any()


@pytest.mark.parametrize("first", [0, 1])
def test_ablations_closed_in_any_order(first: int) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 3)
    before, wanted = state_of(model), model(x)
    both = [ablate(model, "0", how="mean", values={"0": value}) for value in (1.0, 2.0)]
    for each in both:
        each.__enter__()
    assert (model(x) == 2).all()
    both[first].__exit__(None, None, None)
    assert (model(x) == (1.0, 2.0)[1 - first]).all()
    both[1 - first].__exit__(None, None, None)
    assert state_of(model) == before and torch.equal(model(x), wanted)


def test_a_generator_that_is_left() -> None:
    model, x = Net(), torch.randn(2, 3)
    before = state_of(model)

    def batches(name: str) -> Iterator[Tensor]:
        with ablate(model, name):
            while True:
                yield model(x)

    steps, other = batches("head"), batches("embed")
    assert not next(steps).any()
    next(other)
    steps.close()
    assert next(other).any()
    del other  # collected while open
    assert state_of(model) == before


def test_opened_again() -> None:
    model, x = Net(), torch.randn(2, 3)
    again = ablate(model, "head")
    for _ in range(2):
        with again:
            assert not model(x).any()
            with pytest.raises(GradtraceError, match="already open"):
                again.__enter__()
            assert not model(x).any()
    assert model(x).any()


def test_parameters_are_not_touched() -> None:
    model = Net()
    model.embed.requires_grad_(False)
    model.head.weight.grad = kept = torch.ones(2, 4)
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    before = state_of(model)
    for how in ("zero", "mean"):
        with ablate(model, "layers.*", "head", how=how):
            model(torch.randn(2, 3))
    assert state_of(model) == before and model.head.weight.grad is kept
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name])


def test_copies_and_files_made_inside_are_whole() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    wanted = model(x)
    model[1].forward = F.hardtanh  # type: ignore[assignment]
    with ablate(model, "*"):
        twin, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        assert not model(x).any()
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        assert torch.equal(other(x), F.hardtanh(model[0](x)))
        with torch.no_grad():
            other[0].weight.zero_()
            other[0].bias.fill_(0.5)
        assert torch.equal(other(x), torch.full((1, 2), 0.5))
    del model[1].forward
    assert torch.equal(model(x), wanted)


def test_the_signature_can_be_read() -> None:
    model = Net()
    wanted = inspect.signature(model.forward)
    with ablate(model, ""):
        assert inspect.signature(model.forward) == wanted
        assert not model(torch.ones(2, 3)).any()
        assert not model.forward(torch.ones(2, 3)).any()  # without hooks


def test_gradients_are_known_to_be_free_of_hooks() -> None:
    """Or else every node of a watched graph would be asked for some, which is slow."""
    model, hooks = Net(), HookWatch()
    with ablate(model, "layers.*.mlp"):
        model(torch.ones(2, 3))
    assert hooks.clear_since() != NEVER


@pytest.mark.parametrize("how", ["zero", "mean", "remove"])
def test_other_parameters_in_place_of_the_models(how: str) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
    other = {name: p.detach() + 1 for name, p in model.named_parameters()}
    with ablate(model, "0", how=how):
        found = functional_call(model, other, x)
    first = F.linear(x, other["0.weight"], other["0.bias"])
    instead = {"zero": first * 0, "mean": first.mean(0).expand(2, 3), "remove": x}[how]
    assert torch.allclose(found, F.linear(instead, other["1.weight"], other["1.bias"]))


# Parts that never come up ---------------------------------------------------------------------


def test_a_part_that_is_not_called_is_an_error_at_the_end() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)})
    x = torch.randn(3, 2, 4)
    before = state_of(model)
    with (
        pytest.raises(
            GradtraceError, match=r"'attn\.out_proj' was never called.*around it, 'attn'"
        ),
        ablate(model, "attn.out_proj"),
    ):
        model["attn"](x, x, x)
    assert state_of(model) == before
    with pytest.raises(ValueError, match="mine"), ablate(model, "attn.out_proj"):
        model["attn"](x, x, x)
        raise ValueError("mine")
    with ablate(model, "attn.out_proj"):
        pass  # the model did not run: an empty data set
    with ablate(model, "**"):
        model["attn"](x, x, x)  # one of those that the pattern stands for


def test_experts_of_which_one_runs() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[1](x)

    model = Routed()
    with ablate(model, "experts.*"):
        assert not model(torch.ones(1, 2)).any()
    with (
        pytest.raises(GradtraceError, match=r"'experts\.0' was never called"),
        ablate(model, "experts.1", "experts.0"),
    ):
        model(torch.ones(1, 2))


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("part", ["self_attn", "linear2", "norm1", "dropout1"])
def test_fused_encoders_do_not_pass_over_parts(part: str, masked: bool, grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 8)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None

    def run() -> Tensor:
        with torch.set_grad_enabled(grad):
            return model(x, src_key_padding_mask=mask)

    before = run()
    with ablate(model, f"layers.1.{part}"):
        found = run()
    assert torch.backends.mha.get_fastpath_enabled()
    module = model.layers[1].get_submodule(part)
    torch.backends.mha.set_fastpath_enabled(False)
    handle = module.register_forward_hook(
        lambda m, a, out: (out[0] * 0, out[1]) if isinstance(out, tuple) else out * 0
    )
    wanted = run()
    handle.remove()
    torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(found, wanted)
    assert not torch.allclose(found[0], before[0], atol=1e-3)
    assert torch.equal(run(), before)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_what_holds_a_fused_encoder_is_removed() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=mask)

    model = nn.ModuleDict({"holds": Holds()}).eval()
    x, mask = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad(), ablate(model, "holds", how="remove"):
        assert torch.equal(model["holds"](x, mask), x)


def test_what_is_beside_a_fused_layer_leaves_it_fused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.encode(x)
            return h, self.head(h)

    model, x = Model().eval(), torch.randn(2, 5, 8)
    calls: list[Any] = []
    plain = nn.TransformerEncoderLayer._sa_block
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            nn.TransformerEncoderLayer,
            "_sa_block",
            lambda *a, **k: calls.append(1) or plain(*a, **k),
        )
        wanted, _ = model(x)
        with ablate(model, "head"):
            found, out = model(x)
        assert calls == [] and torch.equal(found, wanted) and not out.any()
        with ablate(model, "encode.linear1"):
            model(x)
        assert calls == [1]


# Among others ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["zero", "mean", "remove"])
@pytest.mark.parametrize("inner", ["watch", "ablate"])
def test_with_watch(inner: str, how: str) -> None:
    model, x = Net(), torch.randn(3, 3)
    before = state_of(model)
    make = [lambda: gt.watch(model), lambda: ablate(model, "layers.0.mlp", how=how)]
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(m()) for m in (make if inner == "ablate" else make[::-1])]
        watch = next(each for each in found if not isinstance(each, tuple))
        loss = model(x).pow(2).sum()
    assert state_of(model) == before
    wanted = torch.autograd.grad(
        loss, list(model.parameters()), allow_unused=True, retain_graph=True
    )
    grads = watch.backward(loss)
    for (name, _), want in zip(model.named_parameters(), wanted):
        if want is None:
            assert name.startswith("layers.0.mlp") and name not in grads
        else:
            assert torch.allclose(grads[name], want, atol=1e-5)
    inside = {o.module for o in watch.graph(loss) if o.leaf is None}
    assert "layers.1.mlp.0" in inside and "layers.0.mlp.0" not in inside


def test_hooks_of_others_run() -> None:
    model, x = Net(), torch.randn(2, 3)
    seen: list[tuple[str, bool]] = []
    model.head.register_forward_pre_hook(lambda m, a: seen.append(("pre", bool(a[0].any()))))
    model.head.register_forward_hook(lambda m, a, out: seen.append(("post", bool(out.any()))))
    model.layers[1].register_full_backward_hook(lambda m, i, o: seen.append(("back", True)))
    model.layers[0].mlp.register_forward_hook(lambda m, a, k, out: out + 1, with_kwargs=True)
    with ablate(model, "head", "layers.0.mlp"):
        assert torch.equal(model.layers[0].mlp(torch.randn(2, 4)), torch.ones(2, 4))
        model(x)
    assert seen == [("pre", True), ("post", False)]
    with ablate(model, "layers.1.mlp"):
        model(x).sum().backward()
    assert seen[-1] == ("back", True)


@pytest.mark.parametrize("training", [False, True])
def test_training_and_evaluation(training: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).train(training)
    with ablate(model, "1"):
        assert not model(torch.randn(4, 3)).any()
    assert all(m.training is training for m in model.modules())
    assert int(model[1].num_batches_tracked) == training


def test_parametrized_modules() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
    before, x = state_of(model), torch.randn(2, 3)
    with ablate(model, "0"):
        assert torch.equal(model(x), model[1].bias.expand(2, 3))
    with ablate(model, "0.parametrizations.weight"):
        assert torch.equal(model[0](x), model[0].bias.expand(2, 3))
    with ablate(model, "0", how="remove"):
        assert torch.equal(model(x), model[1](x))
    assert state_of(model) == before


@pytest.mark.parametrize("inside", [False, True])
def test_wrappers_are_transparent(inside: bool) -> None:
    net, x = Net(), torch.randn(2, 3)
    model = nn.Sequential(nn.DataParallel(net)) if inside else nn.DataParallel(net)
    prefix = "0." if inside else ""
    with ablate(model, f"{prefix}layers.1.mlp", f"{prefix}head") as names:
        assert names == (f"{prefix}layers.1.mlp", f"{prefix}head")
        assert not model(x).any()
    with ablate(model, prefix.rstrip(".")):
        assert not model(x).any()
    assert model(x).any()


def test_copies_on_several_devices_are_refused() -> None:
    model = nn.DataParallel(Net())
    model.device_ids = [0, 1]
    with pytest.raises(GradtraceError, match="DataParallel on several devices"):
        ablate(model, "head")


@pytest.fixture
def dynamo() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore")
def test_compiled_modules(warm: bool) -> None:
    net, x = Net(), torch.randn(2, 3)
    wanted = net(x)
    with ablate(net, "layers.*.mlp"):
        ablated = net(x)
    model: Any = torch.compile(net, backend="aot_eager")
    net.layers[0].compile(backend="aot_eager")
    if warm:
        model(x)
    with ablate(model, "layers.*.mlp") as names:
        assert names == ("layers.0.mlp", "layers.1.mlp")
        assert torch.allclose(model(x), ablated)
    assert torch.allclose(model(x), wanted)
    assert torch._dynamo.eval_frame._stance.stance == "default"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_compiled_for_an_ablation() -> None:
    model, x = Heads(), torch.randn(5, 3)
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    fast: Any = torch.compile(model, backend=backend)
    wanted = fast(x)
    before = len(compiled)
    with ablate(fast, "label:a", "proj"):
        assert not fast(x).any()
    assert before == len(compiled) > 0
    assert torch.equal(fast(x), wanted) and len(compiled) == before


def test_checkpoints_recomputed_inside() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: label(self.net(x), 1, "c").sin(), x, use_reentrant=False)

    model, x = Checkpointed(), torch.randn(4, 3)
    for how in ("zero", "mean", "remove"):
        names = ["net.layers.0.mlp"] + (["label:c 1"] if how != "remove" else [])
        with ablate(model, *names, how=how):
            found = model(x).sum()
            grads = torch.autograd.grad(found, list(model.parameters()), allow_unused=True)
            plain = label(model.net(x), 1, "c").sin().sum()
            wanted = torch.autograd.grad(plain, list(model.parameters()), allow_unused=True)
        assert torch.equal(found, plain)
        for ours, theirs in zip(grads, wanted):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)


def test_ablations_on_several_threads() -> None:
    model, x = Net(), torch.randn(2, 3)
    before = state_of(model)
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(30):
                with ablate(model, name):
                    assert not model.get_submodule(name)(
                        torch.ones(2, 3 if name == "embed" else 4)
                    ).any()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in ("embed", "head", "head", "embed")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert state_of(model) == before
    assert model(x).any()


def test_a_model_called_on_another_thread() -> None:
    model = Net()
    found: list[Tensor] = []
    with ablate(model, "head"):
        thread = threading.Thread(target=lambda: found.append(model(torch.randn(2, 3))))
        thread.start()
        thread.join()
    assert not found[0].any()


# Labels ---------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Four heads, whose outputs are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = label(self.proj(x).view(-1, 4, 2), 1, ["a", "b", "b", None])
        return heads.pow(2).sum(1)


def heads_of(model: Heads, x: Tensor) -> Tensor:
    return model.proj(x).view(-1, 4, 2)


@pytest.mark.parametrize(
    ("names", "gone"),
    [
        (["label:a"], [0]),
        (["label:b"], [1, 2]),
        (["label:[ab]"], [0, 1, 2]),
        (["label:*"], [0, 1, 2]),
        (["label:a", "label:?"], [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("how", ["zero", "mean"])
def test_labelled_slices(names: list[str], gone: list[int], how: str) -> None:
    model, x = Heads(), torch.randn(5, 3)
    before = model(x)
    with ablate(model, *names, how=how) as found:
        assert found == tuple(names)
        out = model(x)
    heads = heads_of(model, x)
    instead = torch.zeros_like(heads) if how == "zero" else heads.detach().mean(0, keepdim=True)
    kept = torch.tensor([n not in gone for n in range(4)]).view(1, 4, 1)
    wanted = torch.where(kept, heads, instead).pow(2).sum(1)
    assert torch.allclose(out, wanted)
    (grad,) = torch.autograd.grad(out.sum(), model.proj.weight)
    (want,) = torch.autograd.grad(wanted.sum(), model.proj.weight)
    assert torch.allclose(grad, want)
    assert not grad.view(4, 2, 3)[gone].any() and grad.view(4, 2, 3)[3].any()
    assert torch.equal(model(x), before)


def test_labels_without_gradients() -> None:
    model, x = Heads(), torch.randn(5, 3)
    with torch.no_grad(), ablate(model, "label:*"):
        out = model(x)
    assert torch.equal(out, heads_of(model, x)[:, 3].pow(2)) and not out.requires_grad


def test_an_ablated_label_still_marks() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    with ablate(nn.Identity(), "label:t 1"):
        out = label(x, 1, "t")
    assert labels_of(out.grad_fn) == (1, ("t 0", "t 1", "t 2"))
    assert torch.equal(out[:, ::2], x[:, ::2]) and not out[:, 1].any()


def test_nothing_of_a_broken_slice_is_left() -> None:
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), 2.0]], requires_grad=True)
    with ablate(nn.Identity(), "label:bad"):
        out = label(x, 1, ["bad", "good"])
    out.sum().backward()
    assert out.tolist() == [[0.0, 1.0], [0.0, 2.0]]
    assert x.grad.tolist() == [[0.0, 1.0], [0.0, 1.0]]


def test_the_mean_of_steps_that_come_first() -> None:
    x = torch.randn(3, 4, 2)
    with ablate(nn.Identity(), "label:t 1", how="mean"):
        out = label(x, 0, "t")
    assert torch.equal(out[1], x[1].mean(0).expand(4, 2))
    assert torch.equal(out[::2], x[::2])


@pytest.mark.parametrize(
    ("tensor", "dim", "says"),
    [
        (torch.randn(3), 0, "'label:t 1' marks elements of a tensor of one dimension"),
        (torch.randn(1, 3), 1, "'label:t 1' holds one sample"),
        (torch.arange(3), 0, "'label:t 1' marks a tensor of torch.int64"),
    ],
)
def test_slices_without_a_mean(tensor: Tensor, dim: int, says: str) -> None:
    with (
        pytest.raises(GradtraceError, match=says),
        ablate(nn.Identity(), "label:t 1", how="mean"),
    ):
        label(tensor, dim, "t")


@pytest.mark.parametrize("value", [2.0, torch.full((2,), 2.0), torch.full((5, 1), 2.0)])
def test_values_for_slices(value: Any) -> None:
    x = torch.randn(5, 3, 2)
    for name in ("label:t 1", "label:t [1]"):
        with ablate(nn.Identity(), name, how="mean", values={name: value}):
            out = label(x, 1, "t")
        assert (out[:, 1] == 2).all() and torch.equal(out[:, ::2], x[:, ::2])
    with (
        pytest.raises(GradtraceError, match=r"slice of 'label:t 1' has shape \(3,\).*\(5, 2\)"),
        ablate(nn.Identity(), "label:t 1", how="mean", values={"label:t 1": torch.ones(3)}),
    ):
        label(x, 1, "t")


def test_a_misspelt_label_is_an_error_at_the_end() -> None:
    model, x = Heads(), torch.randn(5, 3)
    with (
        pytest.raises(UnknownName, match=r"no label 'c' came up.*there are 'a', 'b'"),
        ablate(model, "label:c"),
    ):
        model(x)
    with (
        pytest.raises(UnknownName, match=r"no label 'head 11'.*did you mean 'head 1'"),
        ablate(model, "label:head 11"),
    ):
        label(x, 1, "head")
    with (
        pytest.raises(UnknownName, match=r"no label 'a'.*there are none"),
        ablate(net := Net(), "label:a"),
    ):
        net(x)
    with pytest.raises(ValueError, match="mine"), ablate(model, "label:c"):
        model(x)
        raise ValueError("mine")
    with ablate(model, "label:c"):
        pass  # an empty data set


def test_labels_with_no_slices_or_no_elements() -> None:
    with (
        pytest.raises(UnknownName, match="there are none"),
        ablate(model := nn.Identity(), "label:t *"),
    ):
        assert label(model(torch.ones(2, 0)), 1, "t").shape == (2, 0)
    for how in ("zero", "mean"):
        with ablate(nn.Identity(), "label:t *", how=how):
            assert label(torch.ones(0, 3), 1, "t").shape == (0, 3)


def test_labels_in_place_afterwards() -> None:
    leaf = torch.randn(2, 3, requires_grad=True)
    x = leaf * 1
    with ablate(nn.Identity(), "label:t 1"):
        out = label(x, 1, "t")
    out += 1
    assert torch.equal(x, leaf) and (out[:, 1] == 1).all()
    assert torch.autograd.grad(out.sum(), leaf)[0].tolist() == [[1.0, 0.0, 1.0]] * 2


def test_nested_ablations_of_labels() -> None:
    x = torch.ones(2, 3)
    first, second = ablate(nn.Identity(), "label:t 0"), ablate(nn.Identity(), "label:t 1")
    first.__enter__()
    second.__enter__()
    assert label(x, 1, "t")[0].tolist() == [0.0, 0.0, 1.0]
    first.__exit__(None, None, None)
    assert label(x, 1, "t")[0].tolist() == [1.0, 0.0, 1.0]
    second.__exit__(None, None, None)
    assert label(x, 1, "t")[0].tolist() == [1.0, 1.0, 1.0]


def test_labels_and_modules_together() -> None:
    model, x = Heads(), torch.randn(5, 3)
    with ablate(
        model, "label:a", "proj", how="mean", values={"proj": 1.0, "label:a": 3.0}
    ) as names:
        out = model(x)
    assert names == ("label:a", "proj")
    assert torch.equal(out, torch.full((5, 2), 9.0 + 3))


def test_labels_on_another_thread() -> None:
    found: list[Tensor] = []
    with ablate(nn.Identity(), "label:t 0"):
        thread = threading.Thread(target=lambda: found.append(label(torch.ones(2), 0, "t")))
        thread.start()
        thread.join()
    assert found[0].tolist() == [0.0, 1.0]


def test_labels_under_vmap() -> None:
    x = torch.randn(4, 3)
    with ablate(nn.Identity(), "label:t 1"):
        out = torch.func.vmap(lambda x: label(x, 0, "t"))(x)
    assert not out[:, 1].any() and torch.equal(out[:, ::2], x[:, ::2])


def test_gradtrace_follows_an_ablated_graph() -> None:
    model = Heads()
    with gt.watch(model) as watch, ablate(model, "label:b", how="mean"):
        loss = model(torch.randn(5, 3)).sum()
    wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    for grad, want in zip(watch.backward(loss).values(), wanted):
        assert torch.allclose(grad, want, atol=1e-5)
    watch.program(loss)


# Real models ----------------------------------------------------------------------------------


def built(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    pytest.importorskip("transformers")
    from architectures import ARCHITECTURES

    model, loss = ARCHITECTURES[name]()
    return model.eval(), loss


def zeroed(module: nn.Module, args: Any, out: Any) -> Any:
    return (torch.zeros_like(out[0]), *out[1:]) if isinstance(out, tuple) else out * 0


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("gpt2", "transformer.h.1.attn"),
        ("gpt2", "transformer.h.0.mlp"),
        ("bert", "bert.encoder.layer.1.attention"),
        ("llama", "model.layers.0.self_attn"),
        ("mamba", "backbone.layers.1.mixer"),
        ("vit", "vit.**.1.attention"),
    ],
)
def test_zero_in_transformers(architecture: str, name: str) -> None:
    model, loss = built(architecture)
    before = loss(model)
    with ablate(model, name) as (found,):
        ablated = loss(model)
        grads = torch.autograd.grad(ablated, list(model.parameters()), allow_unused=True)
    handle = model.get_submodule(found).register_forward_hook(zeroed)
    wanted = loss(model)
    want = torch.autograd.grad(wanted, list(model.parameters()), allow_unused=True)
    handle.remove()
    assert torch.equal(ablated, wanted) and not torch.equal(ablated, before)
    for ours, theirs in zip(grads, want):
        zero = theirs is None or not theirs.any()
        assert (ours is None or not ours.any()) if zero else torch.allclose(ours, theirs)
    assert torch.equal(loss(model), before)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("gpt2", "transformer.h.1"),
        ("bert", "bert.encoder.layer.0"),
        ("llama", "model.layers.1"),
        ("t5", "encoder.block.1"),
        ("t5", "decoder.block.1"),
        ("opt", "model.decoder.layers.1"),
        ("mamba", "backbone.layers.1"),
        ("convnext", "convnext.encoder.stages.0.layers.0"),
    ],
)
def test_layers_removed_from_transformers(architecture: str, name: str) -> None:
    """As with the model that was built without the layer."""
    model, loss = built(architecture)
    before = loss(model)
    with ablate(model, name, how="remove"):
        found = loss(model)
    parent, _, key = name.rpartition(".")
    layers = model.get_submodule(parent)
    kept = [layer for n, layer in enumerate(layers) if n != int(key)]
    model.get_submodule(parent.rpartition(".")[0])._modules[parent.rpartition(".")[2]] = (
        nn.Sequential(*kept) if isinstance(layers, nn.Sequential) else nn.ModuleList(kept)
    )
    for attribute in ("num_hidden_layers", "n_layer", "num_layers"):
        with contextlib.suppress(AttributeError):
            setattr(model.config, attribute, len(kept))
    assert torch.allclose(found, loss(model)) and not torch.equal(found, before)


def test_model_outputs_of_transformers() -> None:
    model, _ = built("gpt2")
    tokens = torch.randint(3, 60, (2, 5))
    wanted = model.transformer(tokens)
    with ablate(model, "transformer", how="mean"):
        found = model.transformer(tokens)
        logits = model(tokens).logits
    assert type(found) is type(wanted) and found.keys() == wanted.keys()
    state = wanted.last_hidden_state.mean(0, keepdim=True).expand(2, 5, -1)
    assert torch.allclose(found.last_hidden_state, state, atol=1e-6)
    assert found["last_hidden_state"] is found.last_hidden_state is found[0]
    assert torch.equal(logits[0], logits[1])


def test_generation_by_transformers() -> None:
    model, _ = built("gpt2")
    tokens = torch.randint(3, 60, (2, 5))
    with ablate(model, "transformer.h.*.mlp", "transformer.h.*.attn"):
        found = model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert found.shape == (2, 8)
