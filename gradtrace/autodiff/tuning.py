"""Limits of traversal, and of comparing weights."""

FREE_SPAN_NODES = 32
"""About this many nodes may free one another by recursion before a tuple interrupts the chain."""

COMPARE_ALL_MAX_ELEMENTS, SAMPLE_ELEMENTS = 1 << 16, 1 << 12
"""Tensors of at most this many elements are compared in full; of larger ones, at most so many
evenly spaced elements."""

STACK_RESERVE_FRAMES = 50
"""Frames of Python's stack that the recursive schedule leaves to the formulas."""

NOTED_CALLS = 1 << 18
"""Of a watch that stays open, so many entries of earlier module calls are kept, and at most twice
as many before a forward pass begins."""
