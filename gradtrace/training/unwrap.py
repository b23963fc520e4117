"""Models wrapped for distributed training, called without communication while they are measured.

Ranks that trace different batches would wait for each other in wrappers' collectives for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from gradtrace.errors import Unsupported
from gradtrace.pytorch.wrapped_modules import (
    is_tensor_parallel,
    refuse_flat,
    sharded_modules,
    sharding_hooks,
)


@contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    """Within, forward passes do not communicate. All ranks that share a model enter it: parameters
    sharded by ``fully_shard`` are gathered first, and must fit in memory.
    """
    refuse_flat(model)
    if is_tensor_parallel(model):
        raise Unsupported("the model is tensor parallel: load its full state dict into a plain one")
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                vars(module)["forward"] = _alone(module)
                stack.callback(vars(module).pop, "forward")
        for unit in sharded_modules(model):
            unit.unshard()
            stack.callback(unit.reshard)
            for hooks, key, hook in _converting(unit):
                stack.callback(hooks.__setitem__, key, hooks[key])
                hooks[key] = hook
        yield


def _alone(wrapper: DistributedDataParallel) -> Callable[..., Any]:
    """Calls the wrapped module, with tensors moved to its device as the wrapper does."""
    device = wrapper.device_ids and torch.device(wrapper.device_type, wrapper.device_ids[0])

    def forward(*args: Any, **kwargs: Any) -> Any:
        if device:
            args, kwargs = tree_map_only(Tensor, lambda x: x.to(device), (args, kwargs))
        return wrapper.module(*args, **kwargs)

    return forward


def _converting(unit: Any) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """What to put in place of FSDP's hooks: (hooks, key, hook that only converts to its dtypes)."""
    policy = unit._get_fsdp_state()._mp_policy
    inputs = policy.param_dtype if policy.cast_forward_inputs else None

    def to(value: Any, dtype: torch.dtype | None) -> Any:
        floating = lambda x: x.to(dtype) if dtype and x.is_floating_point() else x  # noqa: E731
        return tree_map_only(Tensor, floating, value)

    for key in sharding_hooks(unit._forward_pre_hooks):
        yield unit._forward_pre_hooks, key, lambda _, *given: to(given, inputs)
    for key in sharding_hooks(unit._forward_hooks):
        yield unit._forward_hooks, key, lambda _, args, out: to(out, policy.output_dtype)
