"""Tuning constants of this package."""

from __future__ import annotations

# Tests for a trend --------------------------------------------------------------------------------

CONFIDENCE_LEVEL = 0.95
"""Of all intervals; a test is significant if its p is below ``1 - CONFIDENCE_LEVEL``."""

TREND_BLOCKS = 32
"""A long series is tested by the medians of this many blocks."""

MIN_TREND_POINTS = 10
"""Series with fewer numbers are too short to test for a trend."""

SHIFT_PAIR_SHARE = 0.95
"""Two parts of a series differ if the later number is larger (smaller) in this share of pairs."""

# Summaries ----------------------------------------------------------------------------------------

MAX_STEADY_CHANGE_SHARE = 0.05
"""If the upper end of the relative change over all steps is below this, steps do not slow down."""

MIN_READINGS, MIN_EXACT_READINGS = 5, 3
"""The fewest readings of a gauge for a result; and of an exact count."""

MAX_COUNT_BLOCKS = 200
"""The readings of a count are tested by the medians of at most this many blocks."""

PER_THOUSAND_FROM_STEPS = 200
"""From this many steps on, changes are stated per 1,000 steps."""

# Meters -------------------------------------------------------------------------------------------

READ_STEPS_FACTOR = 2
"""Gauges are read at least whenever the number of steps has grown by this factor, ..."""

MAX_READING_SHARE = 0.1
"""... unless readings have taken this share of the time, as they would in a short loop."""

WORK_ADDITIONS = 2_000
"""The fixed piece of work that shows the machine's speed is a sum of this many numbers."""

OVERHEAD_TRIAL_STEPS = 2_000
"""The overhead of timing is measured over this many empty steps."""
