"""Thresholds of the diagnosis."""

FAR_FACTOR = 1000.0
"""A fall by more than this from top to end counts as vanishing, a rise by more as exploding.
Healthy nets of 30 layers and tiny models of 23 architectures stay within 20."""

SCORES_FACTOR = 1e6
"""The same for modules that only a softmax hands a gradient to (queries and keys of attention,
routers). In healthy models, new or trained, they get up to 140,000 times less than the top."""

MOSTLY_DEAD_SHARE = 0.95
"""A module is mostly dead if this share of the gradient's entries at its output is 0, and the
operator above it (a ReLU) set this share of them to 0. For a healthy ReLU it is about a half."""

SEQUENCE_MIN_DEPTHS = 8
"""The uses of a leaf are examined as a sequence if they are at this many depths or more."""

MEDIAN_DEPTHS = 3
"""The number of depths of which the top is the median, and the least depth of a body that is
examined for a fall or a rise."""

UNDERFLOW_FACTOR = 2.0**10
"""A gradient that becomes 0 from within this factor of the smallest float underflowed: it vanished.
A larger one was multiplied by a slope or weight of 0: it is dead."""

STEADY_FACTOR = 1.05
"""A change by a smaller factor is neither a fall nor a rise."""

NAMED_MAX_MODULES = 3
"""The most modules that a sentence names."""
