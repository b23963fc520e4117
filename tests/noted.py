"""Imitates a CUDA graph without a GPU: ATen calls are noted, and made again on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from backends import CPU
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from waits import SEEN

from gradtrace.kernels import Reference
from gradtrace.kernels.capture import NotCapturable

EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


class NotedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls whose results are written to the memory of the first ones. What a CUDA graph could not
    make, such as a look at an element, is refused.
    """

    nbytes = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        masks = [
            x for x in tree_leaves(args[1:]) if isinstance(x, Tensor) and x.dtype is torch.bool
        ]
        if name in SEEN or (name in ("index", "index_put", "index_put_") and masks):
            raise NotCapturable(f"{name} looks at elements")
        found = func(*args, **kwargs)
        inside = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs))
                  if isinstance(x, Tensor)}  # fmt: skip
        fresh = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        own = [x for x in fresh if x.untyped_storage().data_ptr() not in inside]
        if name not in EMPTY:
            # a view of memory that is static needs not be made again
            if own or func._schema.is_mutable:
                self.calls.append((func, args, kwargs, fresh if own else []))
        else:
            self.kept = [*getattr(self, "kept", []), *fresh]
        return found

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, results in self.calls:
            found = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for there, new in zip(results, found):
                if there is not new and there.numel():
                    there.copy_(new)


class NotingGpu(Reference):
    """Plain torch in the place of a GPU that has graphs: nobody looks at elements."""

    synchronises = True

    def __init__(self) -> None:
        super().__init__(CPU)
        self.graphs: list[NotedGraph] = []
        self._noting: NotedGraph | None = None

    def captured(self, run: Callable[[], object]) -> NotedGraph:
        graph = self._noting = NotedGraph()
        try:
            with graph:
                run()
        finally:
            self._noting = None
        self.poison(graph)
        self.graphs.append(graph)
        return graph

    def _kernel(self, run: Callable[..., Any], *given: Any) -> Any:
        """Something for which a GPU has a kernel, as one call."""
        if self._noting is None:
            return run(*given)
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            found = run(*given)
        self._noting.calls.append((run, given, {}, tree_leaves(found)))
        return found

    def tally_piece(self, ids: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._kernel(super().tally_piece, ids, gradient, count)
        return found

    def measure_piece(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._kernel(super().measure_piece, gradient)
        return found

    @staticmethod
    def poison(graph: NotedGraph) -> None:
        """A capture computes nothing: results are not there before the first replay."""
        for _, _, _, results in graph.calls:
            for x in results:
                if x.is_floating_point():
                    x.fill_(float("nan"))
                else:
                    x.zero_()
