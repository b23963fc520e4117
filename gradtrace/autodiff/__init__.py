"""Reads PyTorch's autograd graph: nodes, hooks, traversal, backward pass, names and labels."""
