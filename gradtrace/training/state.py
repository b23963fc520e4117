"""What a forward pass may change beside its graph: buffers, random numbers, modes of modules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

State = dict[str, Any]


def state_of(model: nn.Module) -> State:
    """A copy of a model's buffers and modes, and of the states of the random generators."""
    known = ((name, buffer) for name, buffer in model.named_buffers() if not is_lazy(buffer))
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    kind, keys, *rest = np.random.get_state()
    return {
        "buffers": {name: buffer.detach().clone() for name, buffer in known},
        "training": {name: module.training for name, module in model.named_modules()},
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys), *rest],
    }


def set_state(model: nn.Module, state: State) -> None:
    """Put them back; graphs that hold buffers remain valid, as no version counter moves."""
    for name, buffer in model.named_buffers():
        if name in state["buffers"] and buffer.shape == state["buffers"][name].shape:
            buffer.data.copy_(state["buffers"][name])
    for name, module in model.named_modules():
        module.training = state["training"].get(name, module.training)
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"]:
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))


def seed_all(seed: int) -> None:
    """Seed the random generators of PyTorch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers, modes and random numbers are as before. What else a forward pass changes,
    as lists and attributes of Python, stays changed.

    >>> with undisturbed(nn.Dropout()):
    ...     a = torch.rand(1)
    >>> bool(a == torch.rand(1))
    True
    """
    state = state_of(model)
    try:
        yield
    finally:
        set_state(model, state)
