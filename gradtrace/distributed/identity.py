"""The identity of a measurement: a model, its weights, its mode and the code of a loss function.

Counts of one model must not be added to those of another. So a checkpoint stores a
``RunIdentity``, and a run that continues it compares.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.distributed import digests
from gradtrace.distributed.code_walk import code_digests
from gradtrace.distributed.model_tensors import named_tensors, tensor_digests
from gradtrace.pytorch.wrapped_modules import named_modules, refuse_lazy, unwrapped, user_class


@dataclass(frozen=True)
class RunIdentity:
    """Short texts and digests that identify a model and a loss function."""

    gradtrace: str
    python: str
    model: str  # its class
    tensors: str  # names, shapes and types of parameters and buffers
    values: str  # 8 hexadecimal digits for each of them
    modules: str  # classes, code and settings of modules
    mode: str  # which modules are in training
    loss: str

    def differences(self, now: RunIdentity, names: list[str]) -> list[str]:
        """What has changed since, as text; ``names`` are the names of the model's tensors now."""
        for field, what, a in (
            ("gradtrace", "gradtrace", ""),
            ("python", "Python", ""),
            ("model", "the model", "a "),
        ):
            before, after = getattr(self, field), getattr(now, field)
            if before != after:
                return [f"{what} (it was {a}{before}, this is {a}{after})"]
        changed = [
            text for field, text in CHANGES.items() if getattr(self, field) != getattr(now, field)
        ]
        if self.tensors == now.tensors and self.values != now.values:
            changed.insert(0, _values(self.values, now.values, names))
        return changed


CHANGES = {
    "tensors": "the model's parameters and buffers (names, shapes, dtypes, which are shared)",
    "modules": "the code or the settings of the model's modules",
    "mode": "the mode of modules (model.train() and model.eval()) or torch.autocast around it",
    "loss": "the loss function (its code, or constants that it uses)",
}
"""What has changed if a field of two identities differs."""


def _values(before: str, now: str, names: list[str]) -> str:
    odd = [name for n, name in enumerate(names) if before[8 * n : 8 * n + 8] != now[8 * n :][:8]]
    more = f" and {len(odd) - 1:,} more" if len(odd) > 1 else ""
    return f"the values of weights or buffers ({odd[0] if odd else 'all'}{more})"


def identity(model: nn.Module, loss_fn: Callable[..., Any]) -> tuple[RunIdentity, list[str]]:
    """The identity of a measurement, and the names of the model's tensors."""
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        refuse_lazy(name, tensor)
    modules, loss = code_digests(model, loss_fn)
    return RunIdentity(
        gradtrace=sys.modules["gradtrace"].__version__,
        python=".".join(platform.python_version_tuple()[:2]),
        model=digests.named(user_class(unwrapped(model))),
        tensors=digests.digest(
            *((n, str(t.dtype), tuple(t.shape), t.requires_grad) for n, t in tensors.items()),
            _shared(tensors),
        ),
        values="".join(each[:8] for each in tensor_digests(tensors).values()),
        modules=modules,
        mode=digests.digest(
            _autocast(model), *((name, module.training) for name, module in named_modules(model))
        ),
        loss=loss,
    ), list(tensors)


def _shared(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tied weights, each with the first name of its tensor."""
    first: dict[int, str] = {}
    return [
        f"{first[id(tensor)]} {name}"
        for name, tensor in tensors.items()
        if first.setdefault(id(tensor), name) != name
    ]


def _autocast(model: nn.Module) -> list[str]:
    """The dtypes of ``torch.autocast`` around the call, on the devices of a model."""
    kinds = sorted({tensor.device.type for tensor in (*model.parameters(), *model.buffers())})
    on = [kind for kind in kinds if torch.amp.is_autocast_available(kind)]
    return [f"{x} {torch.get_autocast_dtype(x)}" for x in on if torch.is_autocast_enabled(x)]
