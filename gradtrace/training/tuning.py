"""Tuning constants of this package."""

from __future__ import annotations

FLUSH_STEPS = 1_000
"""Step times are written to the file at least every this many steps, traced or not."""

COUNTED_TOGETHER = 32
"""How long steps took is recorded of this many at a time."""

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

LOGGED_SHARES = 24
"""At most this many shares are logged as curves unless told otherwise: attention and feed-forward
layers of a transformer with 12 blocks."""

MAX_KEPT_CALLS = 16
"""The arguments of this many calls of the model are kept of a step, for its rerun."""

SPIKE_WINDOW = 100
"""A loss is compared with those of this many passes before it."""

SPIKE_WARM_UP = 20
"""Fewer losses than this are compared with none."""

SPIKE_FACTOR = 10.0
"""How many standard deviations above the median a loss is a spike."""

LEAST_DEVIATION = 0.025
"""The standard deviation of losses is taken to be at least this share of their median."""

LIMIT_STEPS = 32
"""The limit of spikes is computed anew after this many steps."""

SIZE_STEPS = 16
"""How large batches are is looked at in one of this many passes."""

LOOK_STEPS = 64
"""Whether passes draw random numbers is looked at in one of this many."""

CHECKED_ELEMENTS = 4_096
"""Only of parameters of up to this many elements it is checked that the gradient is finite."""

PARAMETERS_PER_CHECK, ELEMENTS_PER_CHECK = 16, 400_000
"""The gradient of one such parameter is checked for so many parameters, or so many elements, of the
model: its steps take longer, the more of either there are, and this is to take less than 1%."""

INCIDENT_FILES = 3
"""How many files of each trigger a run writes."""

INCIDENT_BYTES = 2 << 30
"""The most bytes of such a file, unless given; weights beyond it are left out."""
