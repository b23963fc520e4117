"""Influence over a data set, on one process or many, resumed after an interruption."""
