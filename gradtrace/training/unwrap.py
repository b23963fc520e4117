"""Models wrapped for distributed training, called without communication while they are measured.

Ranks that trace different batches would wait for each other in wrappers' collectives for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    wrappers = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    changed = list[tuple[dict[int, Any], int, Any]]()
    units = sharded_modules(model)
    try:
        for wrapper in wrappers:
            vars(wrapper)["forward"] = _alone(wrapper)
        for unit in units:
            unit.unshard()
            changed += _without_gathering(unit)
        yield
    finally:
        for hooks, key, hook in changed:
            hooks[key] = hook
        for unit in units:
            unit.reshard()
        for wrapper in wrappers:
            vars(wrapper).pop("forward", None)


def _alone(wrapper: DistributedDataParallel) -> Callable[..., Any]:
    """Calls the wrapped module, with tensors moved to its device as the wrapper does."""
    device = wrapper.device_ids and torch.device(wrapper.device_type, wrapper.device_ids[0])

    def forward(*args: Any, **kwargs: Any) -> Any:
        if device:
            args, kwargs = tree_map_only(Tensor, lambda x: x.to(device), (args, kwargs))
        return wrapper.module(*args, **kwargs)

    return forward


def _without_gathering(unit: Any) -> list[tuple[dict[int, Any], int, Any]]:
    """Replace FSDP's hooks by ones that only convert: (hooks, key, original hook) each."""
    policy = unit._get_fsdp_state()._mp_policy
    inputs = policy.param_dtype if policy.cast_forward_inputs else None

    def converted(value: Any, dtype: torch.dtype | None) -> Any:
        floating = (
            (lambda x: x.to(dtype) if x.is_floating_point() else x) if dtype else (lambda x: x)
        )
        return tree_map_only(Tensor, floating, value)

    before = lambda _, args, kwargs: converted((args, kwargs), inputs)  # noqa: E731
    after = lambda _, args, output: converted(output, policy.output_dtype)  # noqa: E731
    changed = list[tuple[dict[int, Any], int, Any]]()
    for hooks, hook in ((unit._forward_pre_hooks, before), (unit._forward_hooks, after)):
        for key in sharding_hooks(hooks):
            changed.append((hooks, key, hooks[key]))
            hooks[key] = hook
    return changed
