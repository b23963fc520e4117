"""Type aliases shared by all packages."""

from __future__ import annotations

from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
