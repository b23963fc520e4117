"""Calls models wrapped for distributed training without communication, while they are measured.

DistributedDataParallel and FSDP communicate with the other ranks in every forward pass. Ranks that
trace different numbers of batches would deadlock, so the user's own module is called instead.
Parameters sharded by ``fully_shard`` are gathered for the duration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from gradtrace.distributed.model_tensors import named_tensors, tensor_digests
from gradtrace.pytorch.module_calls import Forward, Listener, listen
from gradtrace.pytorch.wrapped_modules import refuse_flat, sharded_modules, sharding_hooks

Hook = Callable[..., Any]


@contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    """Within this context, forward passes of a model do not communicate with other ranks.

    All ranks that share its parameters must enter it. Sharded parameters are gathered first, so the
    whole model must fit in memory.
    """
    refuse_flat(model)
    with ExitStack() as stack:
        wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        stack.callback(listen(_SingleProcess(), wrappers))
        stack.enter_context(gathered(model))
        yield


# DistributedDataParallel --------------------------------------------------------------------------


class _SingleProcess(Listener):
    """Calls the wrapped module directly, with tensors moved to its device as the wrapper does."""

    def around(self, module: nn.Module, forward: Forward) -> Forward:
        """The function that runs in place of the wrapper's ``forward``."""
        assert isinstance(module, DistributedDataParallel)
        inner = module.module
        device = module.device_ids and torch.device(module.device_type, module.device_ids[0])

        def alone(*args: Any, **kwargs: Any) -> Any:
            if device:
                args, kwargs = tree_map_only(Tensor, lambda x: x.to(device), (args, kwargs))
            return inner(*args, **kwargs)

        return alone


# fully_shard --------------------------------------------------------------------------------------


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within this context, a model sharded by ``fully_shard`` has all its parameters on every rank.

    All ranks must enter it. Forward passes then do not communicate: FSDP's hooks are replaced by
    ones that only convert tensors, by its mixed-precision policy. Other models are not changed.
    """
    modules = sharded_modules(model)
    done = []
    try:
        for module in modules:
            module.unshard()
            done.append((module, _unhooked(module)))
        yield
    finally:
        for module, hooks in done:
            for table, key, hook in hooks:
                table[key] = hook
            module.reshard()


def _unhooked(module: Any) -> list[tuple[dict[int, Hook], int, Hook]]:
    """Replace FSDP's hooks by ones that only convert; returns (table, key, original hook) each."""
    policy = module._get_fsdp_state()._mp_policy
    inputs = policy.param_dtype if policy.cast_forward_inputs else None

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _converted((args, kwargs), inputs)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return _converted(output, policy.output_dtype)

    found = []
    for table, hook in ((module._forward_pre_hooks, before), (module._forward_hooks, after)):
        for key in sharding_hooks(table):
            found.append((table, key, table[key]))
            table[key] = hook
    return found


def _converted(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, value)


# Whether ranks have the same model ----------------------------------------------------------------


def digest(model: nn.Module) -> dict[str, str]:
    """Digests of the values of a model's tensors, by name, to compare ranks.

    Buffers (running statistics) count only where they are used: in modules in evaluation mode.
    """
    return tensor_digests(named_tensors(model, lambda module: not module.training))
