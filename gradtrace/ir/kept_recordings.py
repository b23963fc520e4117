"""Recordings that are kept to be replayed (``recording.replay``): bounded, for several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from gradtrace.autodiff.graph_shape import GraphShape, Mismatch
from gradtrace.errors import GradtraceError
from gradtrace.ir.program import Block, Program, ProgramFacts

MAX_RECORDINGS = 64
"""The most recordings that are kept; the one that was used least recently goes first."""

MAX_STEPS = 500_000
"""The most steps of all recordings that are kept together."""

MAX_FAILURES = 8
"""A recording that failed to replay so many times and never did is forgotten."""


@dataclass(eq=False)
class KeptRecording:
    """A recorded program without its tensors, and how often it was replayed."""

    graph: GraphShape
    root: int
    size: int
    blocks: list[Block]
    facts: ProgramFacts
    hits: int = 0
    failures: int = 0

    @property
    def steps(self) -> int:
        """The number of steps of the program."""
        return sum(len(block.steps) + len(block.merges) for block in self.blocks)


R = TypeVar("R", bound=KeptRecording)


class RecordingCache:
    """Kept recordings by what is quickly read of a loss."""

    def __init__(self, recordings: int = MAX_RECORDINGS, steps: int = MAX_STEPS) -> None:
        self.max_recordings, self.max_steps = recordings, steps
        self._lock = Lock()
        self._kept: OrderedDict[KeptRecording, Hashable] = OrderedDict()  # the key of each
        self.hits = 0

    def replayed(
        self, key: Hashable, kind: type[R], attempt: Callable[[R], Program]
    ) -> tuple[Program | None, str]:
        """The program that a recording of this key makes, if one does, and else why none did."""
        candidates = [kept for kept in self.all(key) if isinstance(kept, kind)]
        reason = "its first loss"
        for n, kept in enumerate(candidates):
            try:
                program = attempt(kept)
            except (Mismatch, GradtraceError, RuntimeError) as error:
                # an error of PyTorch's or ours: recording will raise it too, and say where
                if not n:
                    reason = str(error) if isinstance(error, Mismatch) else "an error"
                self._count(kept, failed=True)
            else:
                self._count(kept, failed=False)
                return program, ""
        return None, reason

    def _count(self, kept: KeptRecording, failed: bool) -> None:
        with self._lock:
            self.hits += not failed
            kept.hits += not failed
            kept.failures += failed
            if kept in self._kept and not failed:
                self._kept.move_to_end(kept)
            if not kept.hits and kept.failures >= MAX_FAILURES:
                self._kept.pop(kept, None)

    def add(self, key: Hashable, new: KeptRecording) -> None:
        """Keep a recording, in place of one of the same program."""
        with self._lock:
            for kept, its in [*self._kept.items()]:
                if its == key and kept.graph == new.graph and kept.blocks == new.blocks:
                    del self._kept[kept]
            self._kept[new] = key
            while len(self._kept) > 1 and (
                len(self._kept) > self.max_recordings
                or sum(each.steps for each in self._kept) > self.max_steps
            ):
                self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forget all recordings."""
        with self._lock:
            self._kept.clear()
            self.hits = 0

    def all(self, key: Hashable = None) -> list[KeptRecording]:
        """Those that are kept now, with a key or all, the most recently used first."""
        with self._lock:
            kept = [*reversed(self._kept.items())]
        return [each for each, its in kept if key is None or its == key]


RECORDINGS = RecordingCache()
"""The recordings of this process."""
