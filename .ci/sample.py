"""A plugin of pytest's: ``GRADTRACE_SAMPLE=6:2.8.0 pytest -p sample`` runs one test in six.

Which ones, the text behind the colon decides, so that every cell of the matrix runs other ones and
the same cell the same again. Those whose names begin with a word of GRADTRACE_ALWAYS all run.
"""

from __future__ import annotations

import os
import zlib

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a share of the tests."""
    share, _, salt = os.environ.get("GRADTRACE_SAMPLE", "1").partition(":")
    always = tuple(os.environ.get("GRADTRACE_ALWAYS", "").split())
    kept = {
        item
        for item in items
        if item.nodeid.startswith(always)
        or zlib.crc32((salt + item.nodeid).encode()) % int(share) == 0
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
