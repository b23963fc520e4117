"""What gradtrace needs of PyTorch beside tensors: internals that it checks, process-wide switches,
calls of modules, side effects that are undone, memory limits.
"""
