"""Where the time goes: the contraction in (max, ×). The device is asked for here, once.

``reference`` is plain torch and the definition; ``contract`` takes its place where there is a
compiled library, and gives the same bits.
"""

from gradtrace.kernels.contract import contraction, largest, survivors, winner
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
