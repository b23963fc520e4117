"""Structured linear maps, one kind for each file: the Jacobians of all operators.

A map does not depend on the operator it was recorded from, nor on the semiring it is applied in.
"""

from gradtrace.linops.base import Map
from gradtrace.linops.columns import LowRankColumns
from gradtrace.linops.contraction import Contract
from gradtrace.linops.convolution import Convolve, Windows
from gradtrace.linops.cumsum import Scan
from gradtrace.linops.dense import Dense
from gradtrace.linops.diag_low_rank import Normaliser
from gradtrace.linops.distances import Distances
from gradtrace.linops.elementwise import Scale
from gradtrace.linops.gather import Cut, Identity, Index, Slot, gather, nothing, tiled, tiling
from gradtrace.linops.reduce import Reduce
from gradtrace.linops.scatter import Scatter
from gradtrace.linops.side_by_side import SideBySide, copied
from gradtrace.linops.sparse import Around, Sparse
from gradtrace.linops.transpose import column_sums, is_permutation, transposed

__all__ = [
    "Around",
    "Contract",
    "Convolve",
    "Cut",
    "Dense",
    "Distances",
    "Identity",
    "Index",
    "LowRankColumns",
    "Map",
    "Normaliser",
    "Reduce",
    "Scale",
    "Scan",
    "Scatter",
    "SideBySide",
    "Slot",
    "Sparse",
    "Windows",
    "column_sums",
    "copied",
    "gather",
    "is_permutation",
    "nothing",
    "tiled",
    "tiling",
    "transposed",
]
