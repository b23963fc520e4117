"""The closed algebra of structured linear maps, one word a file.

A map knows nothing of the operator it came from, and nothing of the semiring it is pulled in.
"""

from gradtrace.maps.base import Map
from gradtrace.maps.beside import Beside, copied, narrowed
from gradtrace.maps.contract import Contract
from gradtrace.maps.convolve import Convolve, Windows
from gradtrace.maps.dense import Dense
from gradtrace.maps.distances import Distances
from gradtrace.maps.index import Index, Slot, gather, tiled, tiling
from gradtrace.maps.normaliser import Normaliser
from gradtrace.maps.opaque import Opaque
from gradtrace.maps.reduce import Reduce
from gradtrace.maps.scale import Identity, Scale
from gradtrace.maps.scan import Scan
from gradtrace.maps.scatter import Scatter
from gradtrace.maps.sparse import Around, Sparse

__all__ = [
    "Around",
    "Beside",
    "Contract",
    "Convolve",
    "Dense",
    "Distances",
    "Identity",
    "Index",
    "Map",
    "Normaliser",
    "Opaque",
    "Reduce",
    "Scale",
    "Scan",
    "Scatter",
    "Slot",
    "Sparse",
    "Windows",
    "copied",
    "gather",
    "narrowed",
    "tiled",
    "tiling",
]
