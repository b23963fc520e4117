"""Measures cells serially, in worker processes, or on a Ray cluster.

Each function is an iterator over finished cells, with the error of those that failed. If it is
stopped (Ctrl-C, a full disk), the worker processes end at once; rows already written are kept.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from gradtrace.errors import GradtraceError, needs
from gradtrace.experiments.harness.findings import Cell, Tick
from gradtrace.experiments.harness.work import Failed, TaskSpec, measured


class FinishedTask(NamedTuple):
    """A cell that was measured, or failed."""

    cell: Cell
    error: Failed | None = None


def serial(
    work: TaskSpec, cells: Sequence[Cell], tick: Tick
) -> Generator[FinishedTask, None, None]:
    """Measure cells one after the other, in this process."""
    for cell in cells:
        try:
            work.do(cell, tick)
            yield FinishedTask(cell)
        except Failed as error:
            yield FinishedTask(cell, error)


# Processes ----------------------------------------------------------------------------------------


def processes(
    work: TaskSpec, cells: Sequence[Cell], workers: int
) -> Generator[FinishedTask, None, None]:
    """Measure cells in ``workers`` processes, each with one thread and its own journal file."""
    context = get_context("spawn")
    alive, leash = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(workers, len(cells)), context, _begin, (alive, work))
    try:
        with _deaf():  # the processes are started here
            futures = {pool.submit(_do, cell): cell for cell in cells}
        for future in as_completed(futures):
            yield FinishedTask(futures[future], _error(future))
    except BrokenProcessPool as error:
        raise GradtraceError(
            "a worker process was killed (out of memory?); the rows written so far are kept: run "
            "the same command again, perhaps with fewer --workers"
        ) from error
    finally:
        leash.close()  # workers detect it and exit, whatever they are doing
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _deaf() -> Iterator[None]:
    """Block SIGINT, so that processes started meanwhile ignore Ctrl-C from the beginning: during
    their import of torch it would print a traceback. This process receives it afterwards.
    """
    mask = getattr(signal, "pthread_sigmask", None)  # not on Windows
    if mask is None:
        yield
        return
    before = mask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        mask(signal.SIG_SETMASK, before)


def _error(future: Future[None]) -> Failed | None:
    try:
        future.result()
    except Failed as error:
        return error
    return None


_work: TaskSpec | None = None
"""The task of a worker process."""


def _begin(alive: Connection, work: TaskSpec) -> None:
    """Set up a worker: it ignores Ctrl-C, and exits when its parent ends for whatever reason."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    threading.Thread(target=_watch, args=(alive,), daemon=True).start()


def _watch(alive: Connection) -> None:
    """Exit when the pipe becomes readable: nothing is ever sent, so the parent has ended."""
    alive.poll(None)
    os._exit(1)


def _do(cell: Cell) -> None:
    assert _work is not None
    _work.do(cell, _silent)


def _silent(text: str) -> None:
    """Ignore the ticks of a worker."""


# Ray ----------------------------------------------------------------------------------------------


def needs_ray() -> Any:
    """The module ``ray``; raises an error that says how to install it."""
    if importlib.util.find_spec("ray") is None:
        raise GradtraceError(needs("--ray", "ray"))
    return importlib.import_module("ray")


def clustered(
    work: TaskSpec, cells: Sequence[Cell], workers: int | None
) -> Generator[FinishedTask, None, None]:
    """Measure cells on a Ray cluster (that of RAY_ADDRESS, or one started here); this process
    writes the rows. Each task takes one CPU.
    """
    ray = needs_ray()
    began = not ray.is_initialized()
    if began:
        own = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers}
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", **own)
    try:
        task = ray.remote(num_cpus=1, max_retries=0)(_remote)
        pending = {task.remote(work.source, cell): cell for cell in cells}
        while pending:
            ready, _ = ray.wait(list(pending))
            for reference in ready:
                cell = pending.pop(reference)
                entry = _fetched(ray, reference)
                if isinstance(entry, Failed):
                    yield FinishedTask(cell, entry)
                else:
                    work.journal.append(cell, entry)
                    yield FinishedTask(cell)
    finally:
        if began:
            ray.shutdown()


def _remote(source: Any, cell: Cell) -> Any:
    """The entry, or the error as a value: Ray would wrap a raised error."""
    try:
        return measured(source, cell, _silent)
    except Failed as error:
        return error


def _fetched(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        return Failed(f"a Ray task ended: {' '.join(str(error).split())}")
