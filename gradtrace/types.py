"""Type aliases and names shared by all packages."""

from __future__ import annotations

from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]

RULES = ("greedy", "edge", "viterbi")
"""The rules by which a path chooses: by what each user hands back, by single edges, by the product.
"""
