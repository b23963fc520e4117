"""The batch dimension of what a module returns, or of a labelled tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.errors import GradtraceError
from gradtrace.pytorch.internals import is_vmapped
from gradtrace.pytorch.module_calls import Listener

LAYERS = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoderLayer,
    nn.TransformerDecoder,
    nn.Transformer,
)
"""Layers with a known batch dimension, for their outputs and for the modules inside them."""

POINTWISE = frozenset({"torch.nn.modules.activation", "torch.nn.modules.dropout"})
"""Where PyTorch has modules that work on tensors of any shape."""


def batch_first(module: nn.Module) -> bool | None:
    """Whether the batch dimension comes before time, in ``LAYERS``; None for other modules."""
    if isinstance(module, nn.RNNCellBase):
        return True
    parts = module.modules() if isinstance(module, LAYERS) else ()
    own = (m.batch_first for m in parts if isinstance(m, (nn.RNNBase, nn.MultiheadAttention)))
    return next(own, None)


def _spatial(module: nn.Module | None) -> int | None:
    """The number of spatial dimensions of PyTorch's layers that accept unbatched input, or None."""
    kinds = [k for k in type(module).__mro__ if k.__module__.startswith("torch.nn.modules.")]
    for kind in kinds:
        if kind.__name__[-2:] in ("1d", "2d", "3d") and "BatchNorm" not in kind.__name__:
            return int(kind.__name__[-2])
    return None


def _features(module: nn.Module | None) -> int:
    """The number of last dimensions that are features, of PyTorch's layers that have such."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return len(module.normalized_shape)
    return int(isinstance(module, (nn.Linear, nn.Bilinear, nn.Embedding)))


def _batched_dims(module: nn.Module) -> int | None:
    """The number of dimensions of a batch, for layers that also accept one sample; None: others."""
    if isinstance(module, LAYERS):
        return 2 if isinstance(module, nn.RNNCellBase) else 3
    spatial = _spatial(module) if isinstance(module, nn.modules.conv._ConvNd) else None
    return None if spatial is None else spatial + 2


def _first_input(args: Any, kwargs: Any) -> Any:
    named = [kwargs[key] for key in ("input", "query", "src", "tgt") if key in kwargs]
    return next(iter((*args, *named)), None)


class SingleSamples(Listener):
    """Notices layers that are given one sample without a batch dimension: what others return then
    has no samples along dimension 0.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.names = {m: name for name, m in modules.items() if _batched_dims(m) is not None}
        self._one = ""  # a layer that was given one sample
        self._assumed = ""  # what was taken to have samples along dimension 0

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called when a layer's forward pass begins."""
        first, dims = _first_input(args, kwargs), _batched_dims(module)
        if dims is None or not isinstance(first, Tensor) or first.dim() != dims - 1:
            return
        if not is_vmapped(first):
            name = self.names.get(module, type(module).__name__)
            self._one = f"module {name!r} (shape {tuple(first.shape)})"
            self._check()

    def assume_first(self, what: str) -> None:
        """``what`` is taken to have samples along dimension 0."""
        self._assumed = what
        self._check()

    def _check(self) -> None:
        if self._one and self._assumed:
            raise GradtraceError(
                f"{self._assumed} may have no samples along dimension 0: {self._one} works on one "
                "sample without a batch dimension here. Use batches, how='zero', or give values; "
                "or say with batch_dim= which dimension samples are"
            )


@dataclass(frozen=True, eq=False)
class BatchDim:
    """Finds the batch dimension of a module's outputs, or of a labelled tensor."""

    what: str
    module: nn.Module | None = None
    above: Sequence[nn.Module] = ()  # the modules that contain it, outermost first
    given: int | None = None  # the user's batch_dim
    timed: str | None = None  # the name of a layer of the model that has time first
    singles: SingleSamples | None = None

    def check(self, args: Any, kwargs: Any) -> None:
        """Raise an error if a layer is called with one sample without a batch dimension."""
        if not self._is_layer():
            return
        assert self.module is not None
        first, whole = _first_input(args, kwargs), _batched_dims(self.module)
        if isinstance(first, Tensor) and whole is not None and first.dim() == whole - 1:
            self._refuse_one(first)

    def of(self, tensor: Tensor, number: int) -> int:
        """The batch dimension of output ``number``."""
        if self._is_layer():
            return self._in_layer(number)
        if self.given is not None:
            return self._as_given(self.given, tensor)
        self._refuse_hidden(tensor)
        size = _spatial(self.module)
        if size is not None and tensor.dim() == size + 2:
            return 0
        if size is not None and tensor.dim() == size + 1:
            self._refuse_one(tensor)
        if tensor.dim() <= _features(self.module):
            self._refuse_one(tensor)
        firsts = (batch_first(module) for module in reversed(self.above))
        first = next((each for each in firsts if each is not None), None)
        if first is not None:
            if tensor.dim() == 2:
                self._refuse_one(tensor)
            return 0 if first or tensor.dim() != 3 else 1
        if tensor.dim() > 2 and self.timed is not None:
            raise GradtraceError(
                f"{self.what} has shape {tuple(tensor.shape)}, where dimension 0 may be samples or "
                f"time, as in {repr(self.timed) if self.timed else 'the model itself'}: say with "
                "batch_dim=0 or batch_dim=1 which dimension samples are"
            )
        if self.singles is not None:
            self.singles.assume_first(f"{self.what} (shape {tuple(tensor.shape)})")
        return 0

    def _refuse_hidden(self, tensor: Tensor) -> None:
        """Raise an error if the tensor does not show which dimension samples are."""
        shape = tuple(tensor.shape)
        if tensor.layout is not torch.strided:
            raise GradtraceError(
                f"{self.what} has the layout {tensor.layout}, over which no mean is taken; use "
                "how='zero', or give values"
            )
        if is_vmapped(tensor):
            raise GradtraceError(
                f"{self.what} runs inside torch.vmap, where samples may be hidden (shape {shape}): "
                "say with batch_dim=0 that dimension 0 is samples, or call the model outside"
            )
        if tensor.dim() == 1 and type(self.module).__module__ in POINTWISE:
            raise GradtraceError(
                f"{self.what} has shape {shape}, which may be samples, or the features of one: say "
                "with batch_dim=0 that they are samples; one sample has no mean over samples"
            )

    def _is_layer(self) -> bool:
        """Whether it is one of PyTorch's layers, with ``forward`` not overridden."""
        own = getattr(type(self.module), "forward", None)
        home = str(getattr(own, "__module__", ""))
        return isinstance(self.module, LAYERS) and home.startswith("torch.nn.")

    def _in_layer(self, number: int) -> int:
        assert self.module is not None
        if isinstance(self.module, nn.RNNBase) and number:
            return 1  # states have layers first
        if isinstance(self.module, nn.MultiheadAttention) and number:
            return 0  # weights have samples first
        return 0 if batch_first(self.module) else 1

    def _as_given(self, dim: int, tensor: Tensor) -> int:
        dims = max(tensor.dim(), 1)
        if not -dims <= dim < dims:
            raise GradtraceError(
                f"{self.what} has shape {tuple(tensor.shape)}, and so no dimension {dim}, as "
                "batch_dim says"
            )
        return dim % dims

    def _refuse_one(self, tensor: Tensor) -> None:
        raise GradtraceError(
            f"{self.what} works on one sample without a batch dimension here (shape "
            f"{tuple(tensor.shape)}), and one sample has no mean over samples; use batches, "
            "how='zero', or give values"
        )
