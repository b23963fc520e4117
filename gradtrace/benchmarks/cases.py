"""The models and graphs that are measured, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtrace.experiments.branching import ENDS, branching
from gradtrace.experiments.layers import network


class Problem(NamedTuple):
    """A model, and a function that runs it forward to a loss."""

    model: nn.Module
    loss: Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """A model that is traced. ``trace`` is the most an influence trace should take, over
    ``loss.backward()``; ``sample`` the same for so many sampled paths as ``paths``; ``needs`` the
    package that it comes from.
    """

    name: str
    make: Callable[[], Problem]
    trace: float | None = None
    sample: float | None = None
    paths: int = 0
    needs: str = ""


def _fit(model: nn.Module, x: Tensor, y: Tensor) -> Problem:
    return Problem(model, lambda: F.mse_loss(model(x), y))


# Real sizes --------------------------------------------------------------------------------------


def perceptron(sizes: tuple[int, ...], batch: int) -> Problem:
    """Layers of tanh units, the last without, and cross entropy."""
    parts: list[nn.Module] = []
    for a, b in pairwise(sizes):
        parts += [nn.Linear(a, b), nn.Tanh()]
    model = nn.Sequential(*parts[:-1])
    x, y = torch.randn(batch, sizes[0]), torch.randint(0, sizes[-1], (batch,))
    return Problem(model, lambda: F.cross_entropy(model(x), y))


class Residual(nn.Module):
    """Layers ``x + tanh(linear(x))``, and an output layer."""

    def __init__(self, layers: int, units: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(units, units) for _ in range(layers))
        self.output = nn.Linear(units, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        found: Tensor = self.output(x)
        return found


def residual(layers: int, units: int, batch: int) -> Problem:
    """``Residual`` with cross entropy: branches that are small, many of them."""
    model = Residual(layers, units)
    x, y = torch.randn(batch, units), torch.randint(0, 10, (batch,))
    return Problem(model, lambda: F.cross_entropy(model(x), y))


def cells(units: int, steps: int, batch: int) -> Problem:
    """An LSTM layer alone: PyTorch runs one operator, which is taken apart."""
    model, x = nn.LSTM(units, units), torch.randn(steps, batch, units)
    return Problem(model, lambda: model(x)[0].square().mean())


class Recurrent(nn.Module):
    """A language model: embedding, one LSTM layer, output layer."""

    def __init__(self, words: int, units: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, units)
        self.lstm = nn.LSTM(units, units)
        self.output = nn.Linear(units, words)

    def forward(self, ids: Tensor) -> Tensor:  # (time, batch) -> (time, batch, words)
        """Logits of the next word at every step."""
        found: Tensor = self.output(self.lstm(self.embed(ids))[0])
        return found


def recurrent(words: int, units: int, steps: int, batch: int) -> Problem:
    """``Recurrent`` on random words, with cross entropy."""
    model = Recurrent(words, units)
    ids = torch.randint(0, words, (steps + 1, batch))
    return Problem(model, lambda: F.cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten()))


def gpt2(tokens: int, **sizes: int) -> Problem:
    """A transformer of GPT-2's build, and of its size (12 layers, 768 wide) unless told."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    config = GPT2Config(loss_type="ForCausalLM", **sizes)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, config.vocab_size, (1, tokens))
    return Problem(model, lambda: model(input_ids=ids, labels=ids).loss)


def llama(tokens: int, dtype: torch.dtype, **sizes: int) -> Problem:
    """A transformer of Llama's build: 1.1 billion parameters, 8 heads of keys, unless told."""
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    logging.set_verbosity_error()
    config = LlamaConfig(
        **{
            "vocab_size": 32_000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            **sizes,
        }
    )
    with _default(dtype):  # not cast afterwards: tables of angles stay in float32
        model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, config.vocab_size, (1, tokens))
    return Problem(model, lambda: model(input_ids=ids, labels=ids).loss)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def resnet(pixels: int, **sizes: list[int] | int) -> Problem:
    """A residual convolution network, ResNet-50 unless told otherwise; batch norm as in use."""
    from transformers import ResNetConfig, ResNetForImageClassification, logging

    logging.set_verbosity_error()
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000, **sizes)).eval()
    x, y = torch.randn(1, 3, pixels, pixels), torch.randint(0, 1000, (1,))
    return Problem(model, lambda: F.cross_entropy(model(pixel_values=x).logits, y))


FULL = (
    Case("784-512-512-10 tanh, batch 32", lambda: perceptron((784, 512, 512, 10), 32), trace=4.0),
    Case("300 layers of 20 units, tanh", lambda: deep(300), trace=4.0),
    Case(
        "GPT-2 size, 128 tokens",
        lambda: gpt2(128),
        trace=2.0,
        sample=1.1,
        paths=10_000,
        needs="transformers",
    ),
    Case("LSTM 10,000 × 1,000, batch 1", lambda: recurrent(10_000, 1_000, 35, 1), trace=4.0),
    Case("LSTM 10,000 × 1,000, batch 4", lambda: recurrent(10_000, 1_000, 35, 4), trace=1.6),
    Case("LSTM 10,000 × 1,000, batch 20", lambda: recurrent(10_000, 1_000, 35, 20), trace=4.0),
    Case("ResNet-50, 224 pixels", lambda: resnet(224), trace=5.0, needs="transformers"),
    Case("50 residual layers of 32 units, batch 32", lambda: residual(50, 32, 32)),
    Case(
        "GPT-2 build of 4 layers, 64 wide, 64 tokens",
        lambda: gpt2(64, n_embd=64, n_layer=4, n_head=4, vocab_size=1_000, n_positions=64),
        needs="transformers",
    ),
    Case("LSTM of 32 units alone, 50 steps, batch 8", lambda: cells(32, 50, 8)),
)

SMALL = (
    Case("20-16-10 tanh, batch 4", lambda: perceptron((20, 16, 10), 4)),
    Case(
        "GPT-2 build, 8 tokens",
        lambda: gpt2(8, vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=8),
        paths=20,
        needs="transformers",
    ),
    Case("LSTM 30 × 8, batch 2", lambda: recurrent(30, 8, 3, 2)),
    Case("2 residual layers of 8 units, batch 4", lambda: residual(2, 8, 4)),
    Case("LSTM of 8 units alone, 3 steps, batch 2", lambda: cells(8, 3, 2)),
    Case(
        "ResNet build, 32 pixels",
        lambda: resnet(32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        needs="transformers",
    ),
)


# The chapter's networks --------------------------------------------------------------------------


def deep(layers: int) -> Problem:
    """Figure 1.2: 10 in, 20 units a layer, 15 out, tanh, one sample."""
    return _fit(*network(layers, seed=0))


def branched(seed: int, layers: int = 1) -> Problem:
    """Figure 1.3: a randomly expanded layer between 10 inputs and 10 outputs, one sample.

    With more than one, so many expanded layers follow each other: the chapter has one, which cannot
    become large.
    """
    model = branching(seed, layers=layers)
    draw = torch.Generator().manual_seed(seed)
    return _fit(model, torch.randn(1, ENDS, generator=draw), torch.randn(1, ENDS, generator=draw))


# Large graphs ------------------------------------------------------------------------------------


def chain(operators: int) -> tuple[Tensor, Tensor]:
    """A loss behind one operator after the other, and its leaf."""
    leaf = torch.ones(4, requires_grad=True)
    x = leaf
    for _ in range(operators - 1):
        x = x.neg()
    return x.sum(), leaf


def branches(operators: int) -> tuple[Tensor, Tensor]:
    """As many operators side by side, between one leaf and one sum."""
    leaf = torch.ones(4, requires_grad=True)
    return torch.stack([leaf.neg() for _ in range(operators - 2)]).sum(), leaf
