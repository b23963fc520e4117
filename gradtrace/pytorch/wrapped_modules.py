"""A model's modules and parameters by the user's names, as if no wrapper (DDP, compile) were there.

Also recognises what ``torch.distributed.fsdp`` has sharded.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradtrace.errors import Unsupported
from gradtrace.pytorch.dtensor import is_dtensor

WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""Wrapper modules by class, and the attribute of the wrapped module, whose names are the user's."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module, without wrappers, and not a weak reference to it."""
    if type(model) in weakref.ProxyTypes:  # as of a part to what contains it
        model = model._apply.__self__  # type: ignore[attr-defined]
    while type(model).__name__ in WRAPPERS:
        model = model._modules[WRAPPERS[type(model).__name__]]  # type: ignore[assignment]
    return model


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its names, as if there were no wrappers."""
    pending: list[tuple[str, nn.Module, frozenset[int]]] = [("", model, frozenset())]
    while pending:  # a generator for each module would hand on what those inside it yield
        name, module, above = pending.pop()
        module = unwrapped(module)
        if id(module) in above:
            continue  # a cycle: a module that contains one of its ancestors
        yield name, module
        if module._modules:
            inside, children = above | {id(module)}, module._modules.items()
            pending += [(join(name, key), c, inside) for key, c in children if c is not None][::-1]


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter under each of its names, in the model's order, as without wrappers."""
    for name, module in named_modules(model):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield join(name, key), parameter


def user_class(module: nn.Module) -> type:
    """The user's class of a module; ``fully_shard`` replaces it by a subclass."""
    kinds = type(module).__mro__
    return kinds[2] if kinds[1].__name__ == "FSDPModule" else kinds[0]


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that ``torch.distributed.fsdp.fully_shard`` was applied to."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported if anything is sharded
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [m for m in model.modules() if isinstance(m, kind)]


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether parameters are DTensors, but not those of ``fully_shard``: its ranks compute each
    loss together.
    """
    units = {id(p) for module in sharded_modules(model) for p in module.parameters()}
    return any(is_dtensor(p) and id(p) not in units for _, p in named_parameters(model))


def sharding_hooks(hooks: Mapping[int, Any]) -> list[int]:
    """The keys of the hooks of FSDP, which gather and free a module's parameters."""
    home = "torch.distributed.fsdp"
    return [k for k, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith(home)]


def refuse_flat(model: nn.Module) -> None:
    """Raise for FSDP1, whose parameters are slices of one flat tensor without the user's names."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise Unsupported(
            "the model is wrapped in FullyShardedDataParallel, whose parameters are slices of one "
            "flat tensor: shard it with torch.distributed.fsdp.fully_shard, or load its full state "
            "dict into a plain module and trace that"
        )


def refuse_lazy(name: str, tensor: Tensor) -> None:
    """Raise for a parameter or buffer of a lazy module that was not called yet."""
    if is_lazy(tensor):
        raise Unsupported(f"{name} has no shape yet: call the model once, with a batch, before")


def join(name: str, key: str) -> str:
    """``encoder`` and ``weight``: ``encoder.weight``."""
    return f"{name}.{key}" if name else key


def within(name: str, module: str) -> bool:
    """Whether ``name``, of a module or parameter, is ``module`` or inside it."""
    return not module or name == module or name.startswith(module + ".")


@lru_cache(65_536)
def ancestors(name: str) -> tuple[str, ...]:
    """``a.b.c``: ``a``, ``a.b``, ``a.b.c``."""
    parts = name.split(".")
    return tuple(".".join(parts[:n]) for n in range(1, len(parts) + 1))
