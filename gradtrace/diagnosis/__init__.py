"""Why a model does not learn: parameters without gradient, NaN, and where they come from.

``forward_recorder`` writes down the forward pass with the lines of the user's code, also what
autograd does not see; ``backward_sizes`` measures one backward pass. ``silent`` finds what cuts a
parameter off the loss, ``zeros`` what makes a gradient 0; ``diagnose`` puts the findings together.
"""

from gradtrace.diagnosis.diagnose import Subject, diagnosed
from gradtrace.diagnosis.forward_record import ForwardRecord
from gradtrace.diagnosis.forward_recorder import ForwardRecorder
from gradtrace.diagnosis.result import (
    Diagnosis,
    Finding,
    NonFiniteValue,
    Reason,
    SilentParameter,
)

__all__ = [
    "Diagnosis",
    "Finding",
    "ForwardRecord",
    "ForwardRecorder",
    "NonFiniteValue",
    "Reason",
    "SilentParameter",
    "Subject",
    "diagnosed",
]
