"""The one word that every layer shares."""

from __future__ import annotations

from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
