"""Transformers of the builds of GPT-2 and Llama, of any size, with random weights and a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Problem(NamedTuple):
    """A model, and a function that runs it forward to a loss."""

    model: nn.Module
    loss: Callable[[], Tensor]


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
