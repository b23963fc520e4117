"""The tuning constants of this package."""

from __future__ import annotations

import sys

RELATIVE_STEP = sys.float_info.epsilon ** (1 / 3)
"""The step of a difference: balances the truncation error h² of a central difference and its
rounding error ε/h."""

COARSER_STEP = 4.0
FINER_STEPS = (1 / 16, 1 / 256)
"""Other steps, as multiples of the first: they distinguish curvature or a kink from a wrong
gradient."""

NOISE_DEVIATIONS = 10.0
"""How many standard deviations of rounding noise a difference may be off by."""

SAMPLE_ELEMENTS = 64
"""The most elements that are checked of each parameter, by default."""

TOTAL_ELEMENTS = 1024
"""The most elements that are checked of all parameters in total, by default."""
