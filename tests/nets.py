"""Small networks that tests share, with weights that are the same everywhere.

``NETS[name](seed)`` makes ``(model, loss, batch)``: the loss is ``loss(model, batch)``, a batch is
a tuple of tensors with its samples first. All is float64 (``half`` is bfloat16), attention is
eager, nothing is random: every weight is an odd integer over a power of two, drawn by the small
generator below from the seed and the tensor's name, so that only ``ties`` has ties. ``BROKEN`` are
networks in which something is wrong.

`transformers` is imported by the functions that need it, not by this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from math import floor, log2, prod
from typing import Any
from zlib import crc32

import torch
from architectures import _float64 as float64_throughout
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]
Made = tuple[nn.Module, Loss, Batch]

NETS: dict[str, Callable[[int], Made]] = {}
BROKEN: dict[str, Callable[[], Made]] = {}

DIGITS, FEW_DIGITS = 20, 7
"""Bits of the integers that numbers are made of; the few fit into a bfloat16."""


def net(make: Callable[[int], Made]) -> Callable[[int], Made]:
    NETS[make.__name__] = make
    return make


def broken(make: Callable[[], Made]) -> Callable[[], Made]:
    BROKEN[make.__name__] = make
    return make


# Numbers -----------------------------------------------------------------------------------------


class Numbers:
    """A linear congruential generator: the same integers on every machine."""

    def __init__(self, seed: int, name: str) -> None:
        self.state = (seed << 32) + crc32(name.encode())
        for _ in range(3):
            self.draw(1)

    def draw(self, bits: int) -> int:
        """A number of so many bits."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.state >> (64 - bits)

    def odd(self, shape: tuple[int, ...], bits: int = DIGITS) -> Tensor:
        """Odd multiples of ``2**-bits``, from -1 to 1."""
        found = [(self.draw(bits + 1) | 1) - 2**bits for _ in range(prod(shape))]
        return torch.tensor(found, dtype=torch.float64).reshape(shape) / 2**bits

    def below(self, limit: int, shape: tuple[int, ...]) -> Tensor:
        """Integers from 0 on: classes, words."""
        found = [self.draw(DIGITS) % limit for _ in range(prod(shape))]
        return torch.tensor(found).reshape(shape)


def filled(model: nn.Module, seed: int, bits: int = DIGITS) -> nn.Module:
    """The model with weights by name: those of norms around 1, matrices by their inputs."""
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            drawn = Numbers(seed, name).odd(tuple(weight.shape), bits)
            if weight.dim() >= 2 and isinstance(weight, nn.Parameter):
                inputs = weight.numel() // weight.shape[0]
                weight.copy_(drawn / 2 ** floor(log2(inputs) / 2))
            elif isinstance(weight, nn.Parameter) or "running" in name:
                around = name.endswith(("weight", "running_var"))
                weight.copy_(around + drawn / 2)
    return model


def floats(seed: int, *shape: int, bits: int = DIGITS) -> Tensor:
    return 2 * Numbers(seed, "input").odd(shape, bits)


def integers(seed: int, limit: int, *shape: int, name: str = "target") -> Tensor:
    return Numbers(seed, name).below(limit, shape)


def classified(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of what the model makes of the first tensor, at the second."""
    inputs, target = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), target.flatten())


def squared(model: nn.Module, batch: Batch) -> Tensor:
    inputs, target = batch
    return ((model(inputs) - target) ** 2).mean()


# Written by hand ---------------------------------------------------------------------------------


@net
def mlp(seed: int) -> Made:
    model = nn.Sequential(
        nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)
    ).double()
    return filled(model, seed), classified, (floats(seed, 3, 6), integers(seed, 4, 3))


@net
def chain(seed: int) -> Made:
    layers = [nn.LeakyReLU(0.75) if n % 2 else nn.Linear(3, 3) for n in range(300)]
    model = filled(nn.Sequential(*layers).double(), seed)
    with torch.no_grad():
        for layer in layers[::2]:  # near the identity, else nothing arrives
            layer.weight.copy_(torch.eye(3) + layer.weight / 4)
            layer.bias.div_(8)
    target = Numbers(seed, "target").odd((2, 3))
    return model, squared, (floats(seed, 2, 3), target)


class Residual(nn.Module):
    """Two convolutions around which the input goes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(h)) + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    """A stem, two residual blocks, the mean over all pixels, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.block1, self.block2 = Residual(4, 4), Residual(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.stem(x)))
        return self.head(self.block2(self.block1(h)).mean((2, 3)))


def _resnet(seed: int, training: bool) -> Made:
    model = filled(ResNet().double(), seed).train(training)
    return model, classified, (floats(seed, 2, 2, 4, 4), integers(seed, 3, 2))


@net
def resnet_train(seed: int) -> Made:
    return _resnet(seed, True)


@net
def resnet_eval(seed: int) -> Made:
    return _resnet(seed, False)


class Recurrent(nn.Module):
    """A recurrent layer, its last output through a linear one."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.rnn, self.head = layer, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def _recurrent(seed: int, layer: nn.RNNBase) -> Made:
    model = filled(Recurrent(layer).double(), seed)
    return model, classified, (floats(seed, 2, 4, 4), integers(seed, 3, 2))


@net
def lstm(seed: int) -> Made:
    return _recurrent(seed, nn.LSTM(4, 5, num_layers=2, batch_first=True))


@net
def gru(seed: int) -> Made:
    return _recurrent(seed, nn.GRU(4, 5, num_layers=2, batch_first=True))


class Experts(nn.Module):
    """Each token goes to two of four experts, weighted by the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            token, place = (chosen == n).nonzero(as_tuple=True)
            result.index_add_(0, token, weights[token, place, None] * expert(x[token]))
        return result


class Mixture(nn.Module):
    """A layer, a mixture of experts with a way around it, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.moe, self.head = Experts(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        return self.head(h + self.moe(self.norm(h)))


@net
def experts(seed: int) -> Made:
    model = filled(Mixture().double(), seed)
    return model, classified, (floats(seed, 6, 5), integers(seed, 3, 6))


class Tied(nn.Module):
    """Words in and words out by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 6), nn.LayerNorm(6)
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        h = self.embed(words)
        return self.out(h + torch.tanh(self.mix(self.norm(h))).cumsum(1))


@net
def tied(seed: int) -> Made:
    model = filled(Tied().double(), seed)
    return model, classified, (integers(seed, 9, 2, 4, name="input"), integers(seed, 9, 2, 4))


@net
def convolution(seed: int) -> Made:
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2, padding=1)]
    layers += [nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(6, 3)]
    model = filled(nn.Sequential(*layers).double(), seed)
    return model, classified, (floats(seed, 2, 1, 8, 8), integers(seed, 3, 2))


@net
def half(seed: int) -> Made:
    """In bfloat16; numbers have so few digits that a product of matrices is exact up to its last
    rounding, in whatever order its terms are added.
    """
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)]
    model = filled(nn.Sequential(*layers), seed, FEW_DIGITS).bfloat16()
    target = Numbers(seed, "target").odd((2, 2), FEW_DIGITS)
    batch = (floats(seed, 2, 4, bits=FEW_DIGITS).bfloat16(), target.bfloat16())
    return model, squared, batch


class Cube(torch.autograd.Function):
    """x³, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


class Tricks(nn.Module):
    """In-place operations, views, a checkpoint, a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        left, right = h.view(-1, 2, 3).unbind(1)
        h = torch.cat([left * self.scale, right.sin()], 1)
        h[:, 1::2] *= h[:, ::2].detach() + 2
        h[:, 0] += right[:, 2]
        h = h + checkpoint(self.block, h, use_reentrant=False)
        return self.head(Cube.apply(h).tanh_().t().contiguous().t())

    def block(self, h: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(h)).mul_(h)


@net
def tricks(seed: int) -> Made:
    model = filled(Tricks().double(), seed)
    return model, classified, (floats(seed, 3, 4), integers(seed, 2, 3))


class Ties(nn.Module):
    """Contributions that are equal, whatever the weights: the first of a sum's terms counts, and
    the lowest of an operator's elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.left, self.right, self.upper = nn.Softsign(), nn.Softsign(), nn.Softsign()
        self.lower, self.early, self.late = nn.Softsign(), nn.Softsign(), nn.Softsign()

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = self.left(h) + self.right(h)
        pair = h.expand(2, *h.shape)
        h = self.upper(pair[0]) + self.lower(pair[1])
        h = torch.cat([self.early(h), self.late(h)]).cumsum(0)
        return self.head(h[: len(x)] + h[len(x) :])


@net
def ties(seed: int) -> Made:
    model = filled(Ties().double(), seed)
    return model, classified, (floats(seed, 3, 4), integers(seed, 2, 3))


# By transformers ---------------------------------------------------------------------------------

WORDS, LENGTH = 11, 4
TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _language(name: str, head: str, seed: int, config: Mapping[str, Any]) -> Made:
    """A model of `transformers` in float64 throughout, without dropout."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    with float64_throughout():
        settings = getattr(transformers, f"{name}Config")(
            **config, attn_implementation="eager", use_cache=False
        )
        model: nn.Module = getattr(transformers, f"{name}{head}")(settings).eval().double()
    for name, weight in model.named_parameters():  # a softmax does not see them: all is rounding
        weight.requires_grad_(not name.endswith(("key.bias", "c_attn.bias")))
    words = integers(seed, WORDS, 2, LENGTH, name="input")
    return filled(model, seed), spoken, (words, integers(seed, WORDS, 2, LENGTH))


def spoken(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a language model; a decoder that is apart reads the words backwards."""
    words, target = batch
    apart = {"decoder_input_ids": words.flip(1)} if hasattr(model, "decoder") else {}
    with float64_throughout():
        return F.cross_entropy(model(words, **apart).logits.flatten(0, 1), target.flatten())


@net
def gpt2(seed: int) -> Made:
    return _language("GPT2", "LMHeadModel", seed, TEXT | {"n_inner": 12})


@net
def llama(seed: int) -> Made:
    return _language("Llama", "ForCausalLM", seed, TEXT | {"num_key_value_heads": 1})


@net
def bert(seed: int) -> Made:
    return _language("Bert", "ForMaskedLM", seed, TEXT | {"num_hidden_layers": 1})


@net
def t5(seed: int) -> Made:
    sizes = {"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 2}
    config = sizes | {"num_layers": 1, "num_decoder_layers": 1, "pad_token_id": 0}
    more = {"relative_attention_num_buckets": 4, "relative_attention_max_distance": 8}
    return _language("T5", "ForConditionalGeneration", seed, config | more)


# Broken ------------------------------------------------------------------------------------------


class Body(nn.Module):
    """Two layers; ``between`` is what happens between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.head, self.between = nn.Linear(4, 6), nn.Linear(6, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.enter(x)))


def _with(model: nn.Module, loss: Loss = classified) -> Made:
    return filled(model.double(), 0), loss, (floats(0, 5, 4), integers(0, 3, 5))


@broken
def detached() -> Made:
    return _with(Body(lambda h: torch.relu(h.detach())))


@broken
def without_gradient() -> Made:
    def between(h: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.tanh(h)

    return _with(Body(between))


@broken
def dead() -> Made:
    return _with(Body(lambda h: torch.relu(h - 100)))


@broken
def saturated() -> Made:
    return _with(Body(lambda h: torch.sigmoid(1000 + h)))


@broken
def rounded() -> Made:
    return _with(Body(lambda h: torch.sign(h)))


@broken
def times_zero() -> Made:
    return _with(Body(lambda h: h * 0.0 + 1.0))


@broken
def unused() -> Made:
    model = Body(torch.tanh)
    model.add_module("spare", nn.Linear(6, 3))
    return _with(model)


@broken
def one_class() -> Made:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return -model(batch[0])[:, :1].log_softmax(1).mean()

    return _with(Body(torch.tanh), loss)


@broken
def logarithm() -> Made:
    return _with(Body(lambda h: torch.log(torch.relu(h))))


@broken
def root() -> Made:
    return _with(Body(lambda h: torch.sqrt((h - h.mean(0, keepdim=True))[:1] ** 2 * 0) + h))
