"""PyTorch's graph: nodes, hooks, orders of traversal, the gradient, the user's names."""
