"""Where the time goes: the contraction in (max, ×). ``contract`` asks for the device, once.

``reference`` is plain torch and the definition; ``contract`` takes its place where there is a
compiled library or a GPU, and gives the same bits. A map that knows how its operands lie may ask
``gpu`` first, which needs no views of them.
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
