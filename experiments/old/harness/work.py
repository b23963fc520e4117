"""Measures one cell and writes it to the journal, in any process."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

import torch

from gradtrace.errors import GradtraceError
from gradtrace.experiments.harness.code import code
from gradtrace.experiments.harness.findings import Cell, Tick
from gradtrace.experiments.harness.journal import Journal, JournalEntry, key
from gradtrace.experiments.harness.loading import ExperimentSource, load


class Failed(GradtraceError):
    """A cell that could not be measured."""


@dataclass
class TaskSpec:
    """An experiment with its journal: what a process needs to measure a cell."""

    source: ExperimentSource
    journal: Journal
    _same: bool = False  # whether this process's code was checked to be the journal's

    def do(self, cell: Cell, tick: Tick) -> None:
        """Measure a cell and write its row."""
        if not self._same and self.journal.header.get("code") != code(self.source):
            raise GradtraceError(
                f"{self.source.name} was edited after this run began; give the same command again"
            )
        self._same = True  # the code is loaded by now, or by the next line
        self.journal.append(cell, measured(self.source, cell, tick))


def measured(source: ExperimentSource, cell: Cell, tick: Tick) -> JournalEntry:
    """One cell's result, as JSON values; with one thread, since sums of floats depend on the number
    of threads, and a result must not.
    """
    experiment = load(source)
    try:
        with source.running(), _one_thread(), _seeded(key(cell)):
            begun = time.perf_counter()
            result = experiment.measure(json.loads(key(cell)), tick)
            seconds = time.perf_counter() - begun
        return JournalEntry(json.loads(json.dumps(result)), seconds)
    except (TypeError, ValueError) as error:
        raise Failed(f"{_named(cell)}: the result is not JSON: {error}") from error
    except GradtraceError as error:
        raise Failed(f"{_named(cell)}: {error}") from error


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _seeded(text: str) -> Iterator[None]:
    """Seed the global generators from a text, so that code that uses them is reproducible."""
    seed = int.from_bytes(sha256(text.encode()).digest()[:4], "big")
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before)


def _named(cell: Cell) -> str:
    text = key(cell)
    return f"cell {text if len(text) <= 120 else text[:117] + '...'}"
