"""Tests that cannot run with a sanitizer's allocator (`make sanitize`)."""

from __future__ import annotations

import os

import pytest

UNSANITIZED = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer keeps memory that is freed, and ends the process where none is left",
)
