"""Tuning constants of this package."""

from __future__ import annotations

FLUSH_STEPS = 1_000
"""Step times are written to the file at least every this many steps, traced or not."""

RECENT_STEPS = 101
"""The typical step time is the median of this many recent steps."""

MAX_SLOWDOWN_STEPS = 10
"""The slow-down of a watched step is counted up to this many typical steps; anything longer has
another cause, such as an evaluation."""

MAX_RUN_STEPS = 1 << 40
"""More steps than any run has, for "never"."""

MAX_NOTED_CALLS = 1 << 20
"""A watch that has recorded more module calls than this is replaced: none of them led to a step."""

VIEW_SAMPLE_PATHS = 1_000
"""Paths of this many elements are in the view of a traced step."""

EXACT_MAX_ELEMENTS = 30_000_000
"""Up to this many elements a Monitor counts all of them unless told otherwise. On a CPU following a
sample takes less time than that from 10 (transformers) to beyond 25 million elements (ResNet-50).
"""

SAMPLED_ELEMENTS = 10_000
"""How many elements it samples above that: a standard error of at most 0.5% of all elements."""
