"""Rules for common types of nodes, whose maps are known without recording their formula.

Recording a formula takes several times as long as running it, if it is small. Most nodes of most
models are products with a saved operand, elementwise functions, views, sums, or one ATen operation
on saved tensors: for these the maps follow from the node's result or its saved tensors. Each rule
must give the same maps as recording the formula (``formula``). A rule reads each saved tensor at
most once, because checkpoints return it once only, and none before it returns None.
"""

from __future__ import annotations

from gradtrace.recording.node_rules.base import Chain, Edge, NodeRule, same, summed
from gradtrace.recording.node_rules.table import MULTI_OUTPUT_RULES, NODES

__all__ = ["MULTI_OUTPUT_RULES", "NODES", "Chain", "Edge", "NodeRule", "same", "summed"]
