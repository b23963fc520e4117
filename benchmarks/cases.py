"""The losses that are timed."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def tanh_network(layers: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The chapter's Figure 1.2: 10 in, 20 units a layer, 15 out, tanh, one sample."""
    sizes = [10, *[20] * layers]
    parts: list[nn.Module] = []
    for a, b in pairwise(sizes):
        parts += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(20, 15)), torch.randn(1, 10), torch.randn(1, 15)


def gpt2() -> tuple[nn.Module, Tensor]:
    """A transformer of the size of GPT-2 (12 layers, 768 wide), 128 tokens, random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    model = GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLM")).eval()
    return model, torch.randint(0, 50257, (1, 128))


def chain(operators: int) -> tuple[Tensor, Tensor]:
    """One operator after the other."""
    leaf = torch.ones(4, requires_grad=True)
    x = leaf
    for _ in range(operators - 1):
        x = x.neg()
    return x.sum(), leaf


def branches(operators: int) -> tuple[Tensor, Tensor]:
    """As many operators side by side, between one leaf and one sum."""
    leaf = torch.ones(4, requires_grad=True)
    return torch.stack([leaf.neg() for _ in range(operators - 2)]).sum(), leaf
