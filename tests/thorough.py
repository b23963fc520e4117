"""How much of the tests is run: what a change needs, or everything (`make test THOROUGH=1`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

THOROUGH = os.environ.get("GRADTRACE_THOROUGH", "0") not in ("", "0")
"""Whether everything is run. Tests marked `thorough` are run only then."""


def few(count: int, thorough: int) -> int:
    """``count``, in the thorough run ``thorough``: examples, graphs, seeds, steps."""
    return thorough if THOROUGH else count


def some(cases: Iterable[T], most: int) -> list[T]:
    """At most ``most`` of the cases, spread evenly from the first to the last; in the thorough run
    all of them.
    """
    found = list(cases)
    if THOROUGH or len(found) <= most:
        return found
    if most == 1:
        return found[:1]
    return [found[n * (len(found) - 1) // (most - 1)] for n in range(most)]
