"""``timing``: measures whether the steps of a training loop slow down, and what grows with them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from math import inf
from time import perf_counter
from typing import Any, Generic, TypeVar

from torch import Tensor

from gradtrace.autodiff.nodes import root_of
from gradtrace.autodiff.traversal import walk
from gradtrace.errors import GradtraceError
from gradtrace.kernels import allocated_bytes, synchronise
from gradtrace.profiling import resource_meters, tuning
from gradtrace.profiling.resource_meters import Gauge, MeterKind, MeterSeries, Pauses, Rate, Read
from gradtrace.profiling.summary import Pace, pace
from gradtrace.pytorch import memory_limits

T = TypeVar("T")


class timing(Generic[T]):
    """Time the steps of a loop: do they slow down, and what grows with them?

    ::

        timing = gt.timing(loader)      # a loop over batches
        for epoch in range(3):
            for batch in timing:
                ...
        print(timing)

        with gt.timing() as timing:     # or a piece of each step
            for batch in loader:
                with timing.step():
                    ...

        with gt.timing() as timing:     # or a call at the end of each, as from a callback
            for batch in loader:
                ...
                timing.tick()

    A step costs about a microsecond. At intervals, between steps, meters are read: live tensors,
    Python objects, the process's memory, CUDA memory, pauses of the garbage collector, and the time
    of a fixed piece of work, which shows whether the machine became slower. That is not in the
    times of steps. ``timing.graph(loss)`` also counts the operators of the graph.

    Args:
        steps: What the loop runs over, such as a loader; None to time with ``step()`` or
            ``tick()``.
        warmup: How many steps at the beginning are left out.
        share: The most of the time that meters take, once a loop has run for some seconds; with 0
            they are read only at the end and by ``timing.look()``.
        synchronize: Whether a step waits for the GPU, which runs asynchronously; without, times are
            right on average if the loop reads the loss at intervals.

    >>> import gradtrace as gt
    >>> with gt.timing() as timing:
    ...     for _ in range(5):
    ...         with timing.step():
    ...             pass
    >>> print(timing.report().verdict)
    Too few steps to tell: 4 after 1 of warm-up, and at least 10 are needed.
    """

    def __init__(
        self,
        steps: Iterable[T] | None = None,
        *,
        warmup: int = 10,
        share: float = 0.01,
        synchronize: bool = False,
    ) -> None:
        if steps is not None and not isinstance(steps, Iterable):
            raise GradtraceError(
                f"timing takes what a loop runs over, got {type(steps).__name__}; or nothing: "
                "with gradtrace.timing() as timing: ... timing.tick()"
            )
        if warmup < 0 or not 0 <= share < 1:
            raise GradtraceError(
                f"warmup is a number of steps and share a part of 1, not {warmup} and {share}"
            )
        self.times = array("d")
        self.epochs = array("q")  # number of steps before each epoch
        self._steps, self._warmup, self._synchronize = steps, warmup, synchronize
        self._last: float | None = None
        self._begun = perf_counter()
        self._overhead_in_step = 0.0  # our own overhead within the current step, in seconds
        self._overhead_between = 0.0  # our own overhead between steps, in seconds
        self._loading = 0.0
        self._depth = 0
        self._pauses = Pauses()
        self._counted = Gauge([resource_meters.GRAPH], _operators, share)
        self._gauges = self._make_gauges(share)
        self._due, self._next = inf, (1 if share else inf)
        self._step = TimedStep(self)

    def _make_gauges(self, share: float) -> list[Gauge]:
        """The gauges that are read between steps."""
        meters, count = resource_meters, self.times.__len__
        found: list[tuple[list[MeterKind], Read]] = [
            ([meters.TENSORS, meters.STORAGE, meters.OBJECTS], meters.live),
            ([meters.CUDA], allocated_bytes),
            ([meters.RESIDENT], memory_limits.resident),
            ([meters.COLLECTOR], Rate(lambda: self._pauses.total, count)),
            ([meters.MACHINE], meters.work),
        ]
        if self._steps is not None:
            found.append(([meters.LOADING], Rate(lambda: self._loading, count)))
        return [Gauge(kinds, read, share / len(found)) for kinds, read in found]

    # Steps ---------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        """The items; a step is timed from when an item is yielded to when the next is requested."""
        if self._steps is None:
            raise GradtraceError("timing has nothing to run over: for batch in gt.timing(loader)")
        with self:
            self.epoch()
            begun = perf_counter()
            for item in self._steps:
                self._loading += perf_counter() - begun
                with self._step:
                    yield item
                begun = perf_counter()

    def __len__(self) -> int:
        return len(self.times)

    def __enter__(self) -> timing[T]:
        if not self._depth:
            self._pauses.__enter__()
        self._depth += 1
        self._last = perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._last = None
        if not self._depth:
            self.look()
            self._pauses.__exit__()

    def step(self) -> TimedStep:
        """Context manager that times a step, or a part of it: ``with timing.step(): ...``.

        A step that ends in an error is not counted.
        """
        return self._step

    def tick(self, loss: Tensor | None = None) -> None:
        """End a step, which began at the last tick, or when this timing was entered.

        Args:
            loss: Also counts the operators of its graph, as ``graph`` does.
        """
        if self._synchronize:
            synchronise()
        now, last = perf_counter(), self._last
        if loss is not None:
            self._note(loss)
        if last is not None:
            self._done(now - last)
        self._last = perf_counter()

    def epoch(self) -> None:
        """Begin an epoch; the time since the last step is not counted."""
        self.epochs.append(len(self.times))
        self._last = None if self._last is None else perf_counter()

    def graph(self, loss: Tensor) -> None:
        """Count the operators of a loss's graph, if a reading is due; before or after backward.

        Args:
            loss: Loss of the step.
        """
        if perf_counter() >= self._counted.due or len(self.times) + 1 >= self._next:
            begun = perf_counter()
            self._note(loss)
            self._overhead_in_step += perf_counter() - begun

    def look(self) -> None:
        """Read all gauges now, between two steps."""
        begun = perf_counter()
        self._read(everything=True)
        self._overhead_between += perf_counter() - begun

    def _note(self, loss: Tensor) -> None:
        root_of(loss)
        self._counted.take(len(self.times) + 1, loss)

    def _done(self, seconds: float) -> None:
        """Record a step, and read gauges that are due; runs in every step."""
        self.times.append(seconds - self._overhead_in_step)
        self._overhead_in_step = 0.0
        now = perf_counter()
        if now >= self._due or len(self.times) >= self._next:
            self._read()
            self._overhead_between += perf_counter() - now

    def _read(self, everything: bool = False) -> None:
        done, now = len(self.times), perf_counter()
        again = done >= self._next
        if again:
            self._next = tuning.READ_STEPS_FACTOR * max(done, 1)
        allowed = tuning.MAX_READING_SHARE * (now - self._begun)
        for gauge in self._gauges:
            if everything or now >= gauge.due or (again and gauge.spent <= allowed):
                gauge.take(done)
        self._due = min(gauge.due for gauge in self._gauges)

    # Results -------------------------------------------------------------------------------------

    @property
    def seen(self) -> dict[str, MeterSeries]:
        """The readings by gauge: ``{name: (kind, steps, values)}``."""
        gauges = (self._counted, *self._gauges)
        return {found.kind.name: found for gauge in gauges for found in gauge.series()}

    def report(self) -> Pace:
        """Whether the steps so far slow down, and what grows with them."""
        return pace(
            list(self.times),
            list(self.epochs),
            self.seen,
            warmup=self._warmup,
            overhead=_overhead(),
            reading=self._overhead_between,
        )

    def to_dict(self) -> dict[str, Any]:
        """The report, ready for JSON."""
        return self.report().to_dict()

    def __str__(self) -> str:
        return str(self.report())

    def __repr__(self) -> str:
        return f"timing({len(self.times):,} steps, {len(self.epochs):,} epochs)"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


class TimedStep:
    """Context manager that times one step of a ``timing``."""

    __slots__ = ("_begun", "_of")

    def __init__(self, of: timing[Any]) -> None:
        self._of, self._begun = of, 0.0

    def __enter__(self) -> None:
        if self._of._synchronize:
            synchronise()
        self._begun = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._of._synchronize:
            synchronise()
        seconds = perf_counter() - self._begun
        if kind is None:
            self._of._done(seconds)


def _operators(loss: Tensor) -> int:
    """The number of operators in the graph of a loss."""
    count = 0

    def visit(node: object, edges: object) -> None:
        nonlocal count
        count += 1

    walk(loss, visit)
    return count


def _overhead() -> float:
    """Seconds that timing an empty step takes, measured without gauges."""
    some: timing[None] = timing(share=0)
    step = some.step()
    begun = perf_counter()
    for _ in range(tuning.OVERHEAD_TRIAL_STEPS):
        with step:
            pass
    return (perf_counter() - begun) / tuning.OVERHEAD_TRIAL_STEPS
