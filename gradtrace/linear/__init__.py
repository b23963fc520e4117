"""What each ATen operation is as a map of the cotangent: one row of a table for each.

A rule looks at a call of which some arguments depend on the cotangent and says, for the result,
which chains of maps lead to it from those arguments. It knows nothing of semirings, nor of what
the call is part of. ``RULES`` is the table; what it lacks is opened with a decomposition, probed
(elementwise operations), moved (views), or written out as a matrix.
"""

from gradtrace.linear.call import Call, Chains, Undecided, as_real, real_dtype, shape_of, spread
from gradtrace.linear.distances import between
from gradtrace.linear.elementwise import kept, probe
from gradtrace.linear.general import dense
from gradtrace.linear.movement import view
from gradtrace.linear.opened import OPENED
from gradtrace.linear.sparse import timed, times
from gradtrace.linear.table import RULES
from gradtrace.linear.together import Together

__all__ = [
    "OPENED",
    "RULES",
    "Call",
    "Chains",
    "Together",
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
