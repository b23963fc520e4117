"""Records the backward program of a loss: which linear maps lead from the loss to its leaves."""
