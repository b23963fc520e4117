"""Training steps in which parameters get no gradient, each by another mistake.

Each function makes ``(model, step)``; ``step()`` returns the loss. The line to be named ends in
``# HERE``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Step = Callable[[], Any]


class Case(NamedTuple):
    make: Callable[[], tuple[nn.Module, Step]]
    reason: str
    silent: tuple[str, ...]  # modules whose parameters are silent
    line: bool  # whether a line is to be named


CASES: dict[str, Case] = {}


def case(reason: str, *silent: str, line: bool = True) -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        CASES[make.__name__] = Case(make, reason, silent, line)
        return make

    return keep


class Net(nn.Module):
    """Two layers; ``between`` is what happens between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.enc, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.enc(x)))


def data(rows: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.arange(rows) % 3


def training(model: nn.Module) -> tuple[nn.Module, Step]:
    x, y = data()
    return model, lambda: F.cross_entropy(model(x), y)


# Detached ----------------------------------------------------------------------------------------


@case("output detached", "enc")
def detach_in_forward() -> Any:
    class Detaching(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x).detach()  # HERE
            return self.head(torch.relu(h))

    return training(Detaching())


def stop(h: Tensor) -> Tensor:
    return h.detach()  # HERE


@case("output detached", "enc")
def detach_in_a_helper() -> Any:
    return training(Net(lambda h: stop(h) * 2))


@case("output detached", "enc")
def data_attribute() -> Any:
    return training(Net(lambda h: h.data + 1))  # HERE


@case("output detached", "enc")
def numpy_round_trip() -> Any:
    def between(h: Tensor) -> Tensor:
        numbers = h.detach().numpy()  # HERE
        return torch.from_numpy(np.tanh(numbers))

    return training(Net(between))


@case("output detached", "enc")
def tensor_copies() -> Any:
    def between(h: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.tensor(h)  # HERE

    return training(Net(between))


@case("output detached", "gate")
def item_as_a_scale() -> Any:
    class Gated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            scale = self.gate(x).sigmoid().mean().item()  # HERE
            return self.head(self.enc(x) * scale)

    return training(Gated())


@case("output detached", "enc", "head")
def loss_made_of_a_number() -> Any:
    model = Net()
    x, y = data()

    def step() -> Tensor:
        return torch.tensor(F.cross_entropy(model(x), y).item(), requires_grad=True)  # HERE

    return model, step


@case("output detached", "enc", "head")
def accuracy_as_loss() -> Any:
    model = Net()
    x, y = data()

    def step() -> Tensor:
        guess = model(x).argmax(-1)  # HERE
        return (guess != y).float().mean().requires_grad_()

    return model, step


@case("output detached", "enc")
def argmax_into_an_embedding() -> Any:
    class Quantised(Net):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Embedding(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.codes(self.enc(x).argmax(-1)))  # HERE

    return training(Quantised())


@case("output detached", "enc")
def cast_to_integers() -> Any:
    return training(Net(lambda h: (h * 10).long().float() / 10))  # HERE


@case("output detached", "enc")
def a_comparison() -> Any:
    return training(Net(lambda h: (h > 0).float()))  # HERE


@case("output detached", "")
def parameter_made_of_data() -> Any:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            self.scale = nn.Parameter(self.scale.data * 0.9)  # HERE
            return self.head(self.enc(x) * self.scale)

    return training(Scaled())


@case("output detached", "rnn")
def hidden_state_of_a_list() -> Any:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRUCell(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.rnn(x).tolist()  # HERE
            return self.head(torch.tensor(rows))

    return training(Recurrent())


@case("output detached", "enc")
def indices_of_the_largest() -> Any:
    """Of two outputs, one has a gradient and the other is used."""
    return training(Net(lambda h: torch.arange(6.0)[h.topk(6).indices]))  # HERE


@case("output detached", "enc")
def detached_in_place() -> Any:
    return training(Net(lambda h: (h * 2).detach_().requires_grad_()))  # HERE


@case("output detached", "enc")
def copy_of_a_module() -> Any:
    class Copied(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(copy.deepcopy(self.enc)(x))  # HERE

    return training(Copied())


# Without grad mode -------------------------------------------------------------------------------


@case("called under no_grad", "enc")
def no_grad_in_forward() -> Any:
    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():  # HERE
                h = self.enc(x)
            return self.head(h)

    return training(Frozen())


@case("called under no_grad", "enc.0", "enc.1")
def no_grad_as_a_decorator() -> Any:
    class Encoder(nn.Sequential):
        @torch.no_grad()  # HERE
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.enc = Encoder(nn.Linear(4, 6), nn.LayerNorm(6))

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            return self.head(h)

    return training(Frozen())


@case("called under no_grad", "enc")
def no_grad_by_a_call() -> Any:
    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.no_grad()(self.enc)(x)  # HERE
            return self.head(h)

    return training(Frozen())


@case("multiplied by zero", "other")
def weight_of_an_average_that_is_zero() -> Any:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.lerp(self.enc(x), self.other(x), 0.0))  # HERE

    return training(Mixed())


@case("multiplied by zero", "other")
def product_that_is_added() -> Any:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            gate = torch.zeros(6)
            return self.head(torch.addcmul(self.enc(x), self.other(x), gate))  # HERE

    return training(Mixed())


@case("called under no_grad", "enc", "head")
def evaluation_switch_left_on() -> Any:
    model = Net()
    x, y = data()

    def step() -> Tensor:
        torch.set_grad_enabled(False)  # HERE
        try:
            return F.cross_entropy(model(x), y)
        finally:
            torch.set_grad_enabled(True)

    return model, step


@case("called under inference_mode", "enc")
def inference_mode_in_forward() -> Any:
    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():  # HERE
                if len(x):
                    h = x

                # what is frozen
                h = self.enc(h)
            return self.head(h.clone())

    return training(Frozen())


@case("called under inference_mode", "enc")
def inference_mode_as_a_decorator() -> Any:
    @torch.inference_mode()  # HERE
    def between(model: Net, x: Tensor) -> Tensor:
        return model.enc(x).tanh()

    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(between(self, x).clone())

    return training(Frozen())


@case("called under inference_mode", "enc")
def inference_mode_without_a_line() -> Any:
    mode = torch.inference_mode()

    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            with mode:
                h = self.enc(x)  # HERE
            return self.head(h.clone())

    return training(Frozen())


@case("output detached", "enc")
def detached_in_vmap() -> Any:
    class Frozen(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.vmap(lambda row: self.enc(row).detach())(x)  # HERE
            return self.head(h)

    return training(Frozen())


@case("loss is constant", "enc", "head")
def margins_that_are_met() -> Any:
    model, (x, _) = Net(), data()
    return model, lambda: torch.relu(model(x) - 100).mean() / 2  # HERE


@case("loss is constant", "enc", "head")
def margins_of_a_loss_function() -> Any:
    model, (x, _) = Net(), data()
    ones = torch.ones(5)
    return model, lambda: F.margin_ranking_loss(model(x)[:, 0], ones * 99, -ones)  # HERE


@case("called under inference_mode", "enc", "head")
def inference_mode_around_the_step() -> Any:
    model = Net()
    x, y = data()

    def step() -> Tensor:
        with torch.inference_mode():  # HERE
            return F.cross_entropy(model(x), y)

    return model, step


# Not used ----------------------------------------------------------------------------------------


@case("module never called", "extra", line=False)
def layer_left_out() -> Any:
    class Extra(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(6, 6)

    return training(Extra())


@case("module never called", "blocks.2", line=False)
def off_by_one_in_a_loop() -> Any:
    class Blocks(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            for k in range(len(self.blocks) - 1):
                h = h + self.blocks[k](h).tanh()
            return self.head(h)

    return training(Blocks())


@case("not used in the forward pass", "", line=False)
def forgotten_parameter() -> Any:
    class Forgotten(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

    return training(Forgotten())


@case("replaced in the forward pass", "", line=False)
def parameter_made_anew() -> Any:
    class Anew(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            self.scale = nn.Parameter(torch.full((6,), 0.5))
            return self.head(self.enc(x) * self.scale)

    return training(Anew())


@case("replaced in the forward pass", "head")
def weight_made_of_itself() -> Any:
    class Decayed(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.head.bias.requires_grad:
                self.head.bias.requires_grad_(False)
            self.head.weight = nn.Parameter(self.head.weight.clone() * 0.99)  # HERE
            return self.head(self.enc(x))

    return training(Decayed())


@case("output never reaches the loss", "extra")
def wrong_variable_returned() -> Any:
    class Wrong(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            out = h + self.extra(h)  # HERE
            del out
            return self.head(h)

    return training(Wrong())


@case("output never reaches the loss", "aux")
def auxiliary_loss_not_added() -> Any:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.aux = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            self.aux_loss = self.aux(h).square().mean()  # HERE
            return self.head(h)

    return training(Two())


@case("output never reaches the loss", "enc")
def loss_of_a_stale_output() -> Any:
    class Cached(Net):
        kept = torch.randn(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)  # HERE
            out = self.head(self.kept)
            self.kept = h
            return out

    return training(Cached())


# Checkpoints and custom functions ----------------------------------------------------------------


@case("reentrant checkpoint without an input that requires grad", "enc")
def reentrant_checkpoint() -> Any:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                h = checkpoint(self.enc, x, use_reentrant=True)  # HERE
            return self.head(h)

    return training(Checkpointed())


@case("reentrant checkpoint without an input that requires grad", "blocks.0", "blocks.1")
def reentrant_checkpoint_over_a_frozen_embedding() -> Any:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 6).requires_grad_(False)
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for block in self.blocks:
                    h = checkpoint(block, h, use_reentrant=True)  # HERE
            return self.head(h)

    model, y = Checkpointed(), torch.tensor([0, 1, 2])
    return model, lambda: F.cross_entropy(model(torch.tensor([1, 4, 6])), y)


@case("reentrant checkpoint without an input that requires grad", "blocks.0", "blocks.1")
def reentrant_checkpoint_of_blocks() -> Any:
    """The line that calls the checkpoint is named, not that of the block in it."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(4, 4) for _ in range(2))
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=True)  # HERE
            return self.head(x)

    return training(Checkpointed())


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()  # HERE

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@case("custom function returns no gradient", "enc")
def function_without_gradient() -> Any:
    return training(Net(lambda h: Rounded.apply(h)))


# Gradients of exactly zero -----------------------------------------------------------------------


@case("multiplied by zero", "enc", "head")
def class_weights_of_zero() -> Any:
    model = Net(torch.tanh)
    x, y = data()
    weight = torch.tensor([0.0, 0.0, 1.0])

    def step() -> Tensor:
        return F.cross_entropy(model(x), y % 2, weight, reduction="sum")  # HERE

    return model, step


@case("multiplied by zero", "aux")
def loss_weight_of_zero() -> Any:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.aux = nn.Linear(6, 1)

    model = Two()
    x, y = data()

    def step() -> Tensor:
        h = model.enc(x)
        aux = model.aux(h).square().mean()
        return F.cross_entropy(model.head(h), y) + 0.0 * aux  # HERE

    return model, step


@case("multiplied by zero", "enc")
def mask_of_zeros() -> Any:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.enc(x) * self.mask + x.sum())  # HERE

    return training(Masked())


@case("dead ReLU", "enc")
def negative_bias() -> Any:
    class Dead(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.enc(x)))  # HERE

    model = Dead()
    nn.init.constant_(model.enc.bias, -50.0)
    return training(model)


@case("dead ReLU", "enc")
def clamped_at_zero() -> Any:
    model = Net(lambda h: (h - 40).clamp(min=0))  # HERE
    return training(model)


@case("saturated", "enc")
def saturated_sigmoid() -> Any:
    return training(Net(lambda h: torch.sigmoid(h * 1e4 + 1e5)))  # HERE


@case("saturated", "enc")
def softmax_in_float16() -> Any:
    def between(h: Tensor) -> Tensor:
        shifted = h * 0.01 + torch.tensor([0.0, 60, 0, 0, 0, 0])
        return torch.softmax(shifted.half(), -1).float()  # HERE

    return training(Net(between))


@case("saturated", "enc")
def clamp_outside_its_range() -> Any:
    return training(Net(lambda h: torch.clamp(h + 100, -1, 1)))  # HERE


@case("derivative is zero", "enc")
def rounding() -> Any:
    return training(Net(lambda h: torch.round(h * 4) / 4))  # HERE


@case("derivative is zero", "enc")
def sign() -> Any:
    return training(Net(lambda h: torch.sign(h)))  # HERE


@case("not selected", "other")
def condition_that_is_never_true() -> Any:
    class Where(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            return self.head(torch.where(h > 1e6, self.other(x), h))  # HERE

    return training(Where())


@case("not selected", "enc")
def everything_masked() -> Any:
    def between(h: Tensor) -> Tensor:
        return h.masked_fill(torch.ones_like(h, dtype=torch.bool), 0.5)  # HERE

    return training(Net(between))


@case("underflow", "enc")
def float16_without_a_scale() -> Any:
    class Half(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x).half()
            return self.head(h.float()) * 1e-6  # HERE

    model = Half()
    x, _ = data()
    return model, lambda: model(x).mean() * 1e-4


class Routed(nn.Module):
    """Experts by index; ``chosen`` says which row goes to which."""

    def __init__(self, chosen: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        out, chosen = torch.zeros_like(x), self.chosen(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]))  # HERE
        return self.head(out)


@case("got no samples", "experts.2")
def expert_that_is_never_chosen() -> Any:
    return training(Routed(lambda x: torch.arange(len(x)) % 2))


@case("not selected", "experts.1")
def expert_whose_gate_is_closed() -> Any:
    class Dense(Routed):
        def forward(self, x: Tensor) -> Tensor:
            outs = torch.stack([expert(x) for expert in self.experts])  # HERE
            return self.head(torch.einsum("bn,nbi->bi", self.chosen(x), outs))

    return training(Dense(lambda x: torch.eye(3)[torch.arange(len(x)) % 2 * 2]))


@case("got no samples", "enc")
def boolean_mask_without_a_hit() -> Any:
    model = Net()
    x, y = data()

    def step() -> Tensor:
        few = x[x[:, 0] > 1e6]
        h = model.enc(few)  # HERE
        return F.cross_entropy(model.head(torch.ones(5, 6) + h.sum()), y)

    return model, step


# Hooks, copies, numbers --------------------------------------------------------------------------


@case("a hook returns zeros", "enc")
def hook_on_an_activation() -> Any:
    def between(h: Tensor) -> Tensor:
        h = h.relu()  # HERE
        h.register_hook(lambda gradient: gradient * 0)
        return h

    return training(Net(between))


@case("a hook returns zeros", "enc", line=False)
def hook_on_a_parameter() -> Any:
    model = Net(torch.tanh)
    for parameter in model.enc.parameters():
        parameter.register_hook(torch.zeros_like)
    return training(model)


@case("cut off", "scale")
def wrapped_as_a_parameter_again() -> Any:
    class Wrapping(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(6, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale.weight * 2  # HERE
            return self.head(self.enc(x) * nn.Parameter(scale))

    return training(Wrapping())


@case("output detached", "enc")
def memory_of_another_shape() -> Any:
    def between(h: Tensor) -> Tensor:
        empty = torch.zeros_like(h)
        empty.data = h.data  # HERE
        return empty

    return training(Net(between))


@case("output detached", "enc", "head")
def losses_added_up_as_numbers() -> Any:
    model = Net(torch.tanh)
    x, y = data()

    def step() -> Tensor:
        total = 0.0
        for n in range(2):
            total += F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]).item()  # HERE
        return torch.tensor(total, requires_grad=True)

    return model, step


@case("softmax over one class", "enc", "head", line=False)
def one_output_for_several_classes() -> Any:
    model = Net(torch.tanh)
    model.head = nn.Linear(6, 1)
    x, _ = data()
    return model, lambda: F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(9, 4), nn.LSTM(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():  # HERE
            hidden = self.rnn(self.words(x))[0]
        return self.head(hidden.clone())


@case("called under inference_mode", "words", "rnn")
def recurrent_layer_in_inference_mode() -> Any:
    """Its operations write in place, to tensors whose changes are not counted."""
    model, x = Reader(), torch.arange(10).reshape(5, 2) % 9
    return model, lambda: F.cross_entropy(model(x).flatten(0, 1), torch.arange(10) % 3)


@case("output detached", "enc")
def written_past_the_graph() -> Any:
    class Written(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(len(x), 6)
            out.data.copy_(self.enc(x))  # HERE
            return self.head(out)

    return training(Written())


@case("dead ReLU", "enc")
def relu6_that_is_closed() -> Any:
    class Closed(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = F.relu6(self.enc(x) - 1e3)  # HERE
            return self.head(h + x.mean())

    return training(Closed())


@case("dead ReLU", "enc")
def maximum_with_zero() -> Any:
    class Closed(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.maximum(self.enc(x) - 1e3, torch.zeros(()))  # HERE
            return self.head(h + x.mean())

    return training(Closed())


@case("softmax over one class", "enc", "out")
def chance_of_the_only_class() -> Any:
    """It is 1, and lies outside of the bounds that are to keep the logarithm finite."""
    model = nn.ModuleDict({"enc": nn.Linear(4, 6), "out": nn.Linear(6, 1)})
    x, y = data()

    def step() -> Tensor:
        chance = model["out"](model["enc"](x)).softmax(-1)
        chance = chance.squeeze(1).clamp(1e-6, 1 - 1e-6)  # HERE
        return F.binary_cross_entropy(chance, (y > 0).float())

    return model, step


@case("called under no_grad", "first", "second")
def no_grad_around_others() -> Any:
    """The outermost is to blame, not one inside it, nor the end of an ``enable_grad``."""

    class Nested(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():  # HERE
                h = self.first(x)
                with torch.no_grad():
                    h = h - h.mean()
                with torch.enable_grad():
                    h.norm()
                h = self.second(h)
            return self.head(self.enc(h))

    return training(Nested())


@case("output detached", "policy")
def log_probability_that_is_read() -> Any:
    """The sample is cut off too, and is used for nothing but the number."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.value = nn.Linear(4, 3), nn.Linear(4, 1)

    model = Agent()
    x, _ = data()

    def step() -> Tensor:
        chances = torch.distributions.Categorical(logits=model.policy(x))
        action = chances.sample()
        logs = [each.item() for each in chances.log_prob(action)]  # HERE
        value = model.value(x).squeeze(1)
        return value.square().mean() - (torch.tensor(logs) * (1 - value.detach())).mean()

    return model, step
