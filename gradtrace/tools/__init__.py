"""Ablation, numerical gradient checks, self-test, the catalogue of operators, users' scripts."""
