"""Access to PyTorch outside the autograd graph: checks of internals, process-wide switches, module
calls, undoing of side effects, memory limits.
"""
