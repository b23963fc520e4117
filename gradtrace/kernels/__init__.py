"""Where the time goes: the contraction in (max, ×). The device is asked for here, once.

``reference`` is plain torch and the definition; whatever takes its place gives the same bits.
"""

from gradtrace.kernels.reference import argmax, largest, winner

__all__ = ["argmax", "largest", "winner"]
