"""Launches of a pass as a CUDA graph, with memory of its own for results and workspaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch, cuda_tally
from gradtrace.kernels.capture import NotCapturable


class CudaGraph:
    """A captured graph; see ``Captured``. Replays wait for one another, on whatever stream."""

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device, held: list[Tensor]):
        self._graph, self._device, self._held = graph, device, held
        self._done: torch.cuda.Event | None = None
        self.nbytes = _reserved(graph)

    def replay(self) -> None:
        """``Captured.replay``."""
        stream = torch.cuda.current_stream(self._device)
        if self._done is None:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            stream.wait_event(self._done)
        self._graph.replay()
        self._done.record(stream)


def capture(device: torch.device, run: Callable[[], object]) -> CudaGraph:
    """The launches of ``run``, which are noted and not made. Raises ``NotCapturable``."""
    with torch.cuda.device(device):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        _taken(device, stream)  # workspaces that other launches use
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    run()
                except RuntimeError as error:  # out of memory, or what cannot be captured
                    raise NotCapturable(_of_the_gpu(error)) from error
                finally:
                    _end(graph, device)
        finally:
            held = _taken(device, stream)
        torch.cuda.current_stream(device).wait_stream(stream)
    return CudaGraph(graph, device, held)


def _taken(device: torch.device, stream: torch.cuda.Stream) -> list[Tensor]:
    """The workspaces that are cached for a stream, which are not used for other launches any
    more.
    """
    number = int(stream.cuda_stream)
    found = [cuda_launch.WORKSPACES.taken(device, number), cuda_tally.taken(device, number)]
    return [each for each in found if each is not None]


END_ALLOCATION = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
"""The function of PyTorch that ends a pool's allocations, by its name today and in torch 2.6."""


def _end(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    try:
        graph.capture_end()
    except RuntimeError as error:  # a call that cannot be captured has ended it
        pool: Any = graph.pool()
        ends = (getattr(torch._C, name) for name in END_ALLOCATION if hasattr(torch._C, name))
        next(ends)(device.index, pool)
        raise NotCapturable(_of_the_gpu(error)) from error


def _of_the_gpu(error: Exception) -> str:
    return f"of the GPU: {(str(error).splitlines() or [type(error).__name__])[0]}"


def _reserved(graph: torch.cuda.CUDAGraph) -> int:
    """The bytes of the graph's memory pool."""
    pool = tuple(graph.pool())
    try:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(
            each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == pool
        )
    except (RuntimeError, KeyError) as error:  # another allocator
        raise NotCapturable("it is not known what memory it takes") from error
