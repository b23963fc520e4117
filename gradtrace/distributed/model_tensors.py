"""Parameters and buffers of a model by name, and their digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gradtrace.distributed import digests
from gradtrace.pytorch.wrapped_modules import join, named_modules


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of each of some tensors."""
    found = {name: digests.new() for name in tensors}
    digests.add_tensors([(found[name], tensor) for name, tensor in tensors.items()])
    return {name: state.hexdigest() for name, state in found.items()}


def used_buffers(module: nn.Module) -> bool:
    """Whether a module uses its buffers: norms in training do not use their running statistics."""
    return not (module.training and isinstance(module, _NormBase))


def named_tensors(
    model: nn.Module, with_buffers: Callable[[nn.Module], bool] = used_buffers
) -> dict[str, Tensor]:
    """Parameters, and buffers of the modules for which ``with_buffers`` is true."""
    return {
        join(name, key): tensor
        for name, module in named_modules(model)
        for table in (module._parameters, module._buffers if with_buffers(module) else {})
        for key, tensor in table.items()
        if tensor is not None
    }
