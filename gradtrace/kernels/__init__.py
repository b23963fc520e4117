"""Kernels of the (max, ×) contraction, where most of the time is spent.

``max_contraction`` dispatches on the device. ``reference`` defines the result in plain torch; the
compiled CPU library and the GPU kernels return the same bits. A map that knows the strides of its
operands may call ``cuda_contraction.carried`` first, which needs no views of them.
"""

from gradtrace.kernels.max_contraction import contraction, largest, survivors, winner
from gradtrace.kernels.reference import Contraction, Matrices, Operand, argmax

__all__ = [
    "Contraction",
    "Matrices",
    "Operand",
    "argmax",
    "contraction",
    "largest",
    "survivors",
    "winner",
]
