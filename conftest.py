"""Doctests: modules without one are not imported for it.

Else each worker imports all that integrations need.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent / "gradtrace"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Whether a module of the package has no example."""
    if collection_path.suffix != ".py" or PACKAGE not in collection_path.parents:
        return None
    return True if ">>>" not in collection_path.read_text(encoding="utf-8") else None
