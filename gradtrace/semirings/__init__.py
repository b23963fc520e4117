"""Semirings: generalisations of (+, ×) in back-propagation.

Back-propagation sums, over all paths, the product of the local derivatives along each. A semiring
replaces the sum by ⊕ and the product by ⊗, and ``lift`` turns a derivative into its value:
``out[i] = ⊕ⱼ lift(J[i, j]) ⊗ in[j]``.

| semiring | value of a leaf element |
|---|---|
| ``SUM`` | the gradient |
| ``ABS`` | ``Σ |weight|`` over its paths |
| ``MAX`` | the largest ``|weight|`` |
| ``EXTREMES`` | the most positive and the most negative weight |
| ``COUNT`` | how many paths have a weight that is not 0 |
| ``ENTROPY`` | ``Σ |weight|`` and ``−Σ |weight|·log |weight|`` |
| ``TopK(k)`` | the k largest ``|weight|`` |
| ``BOOL`` | whether any path has a weight that is not 0 |
"""

from gradtrace.semirings.additive import ABS, COUNT, ENTROPY, SUM, Abs, Count, Entropy, Sum
from gradtrace.semirings.base import Semiring, Value
from gradtrace.semirings.selective import BOOL, EXTREMES, MAX, Bool, Extremes, Max, TopK

__all__ = [
    "ABS",
    "BOOL",
    "COUNT",
    "ENTROPY",
    "EXTREMES",
    "MAX",
    "SUM",
    "Abs",
    "Bool",
    "Count",
    "Entropy",
    "Extremes",
    "Max",
    "Semiring",
    "Sum",
    "TopK",
    "Value",
]
