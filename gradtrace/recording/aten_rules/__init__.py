"""What each ATen operation is as a map of the cotangent: one row of a table for each.

A rule looks at a call of which some arguments depend on the cotangent and says, for the result,
which chains of maps lead to it from those arguments. It knows nothing of semirings, nor of what
the call is part of. ``RULES`` is the table; what it lacks is opened with a decomposition, probed
(elementwise operations), moved (views), or written out as a matrix.
"""

from gradtrace.recording.aten_rules.batched_weights import BatchedWeights
from gradtrace.recording.aten_rules.call import (
    Call,
    Chains,
    Undecided,
    as_real,
    real_dtype,
    shape_of,
    spread,
)
from gradtrace.recording.aten_rules.decompositions import OPENED
from gradtrace.recording.aten_rules.distances import between
from gradtrace.recording.aten_rules.elementwise import kept, probe
from gradtrace.recording.aten_rules.movement import view
from gradtrace.recording.aten_rules.sparse import timed, times
from gradtrace.recording.aten_rules.table import RULES
from gradtrace.recording.aten_rules.unit_columns import dense

__all__ = [
    "OPENED",
    "RULES",
    "BatchedWeights",
    "Call",
    "Chains",
    "Undecided",
    "as_real",
    "between",
    "dense",
    "kept",
    "probe",
    "real_dtype",
    "shape_of",
    "spread",
    "timed",
    "times",
    "view",
]
