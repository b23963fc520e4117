"""Influence over a data set, on one or several processes, resumable after an interruption."""
