"""The linear maps of each ATen operation with respect to the cotangent: one row of a table each.

A rule takes a call of which some arguments depend on the cotangent and returns the chains of maps
that lead from those arguments to the result. It does not know semirings, nor which formula the call
is part of. ``RULES`` is the table. Operations without a row are decomposed, probed with ones
(elementwise operations), recorded as gathers (views), or stored as a dense matrix.
"""

from gradtrace.recording.aten_rules.call import (
    BatchedWeights,
    Call,
    Chains,
    Undecided,
    as_real,
    broadcast_maps,
    real_dtype,
    shape_of,
)
from gradtrace.recording.aten_rules.decompositions import OPENED
from gradtrace.recording.aten_rules.elementwise import mask_map, probe
from gradtrace.recording.aten_rules.movement import overwritten, view
from gradtrace.recording.aten_rules.products import dense, distance_maps
from gradtrace.recording.aten_rules.sparse import matrix_times, times_matrix
from gradtrace.recording.aten_rules.table import RULES

__all__ = [
    "OPENED",
    "RULES",
    "BatchedWeights",
    "Call",
    "Chains",
    "Undecided",
    "as_real",
    "broadcast_maps",
    "dense",
    "distance_maps",
    "mask_map",
    "matrix_times",
    "overwritten",
    "probe",
    "real_dtype",
    "shape_of",
    "times_matrix",
    "view",
]
