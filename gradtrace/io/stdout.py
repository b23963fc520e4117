"""What scripts print goes to stderr, so that stdout holds results alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """Redirect file descriptor 1 to stderr, so that what a user's script, its subprocesses and C
    code print does not mix with our results.
    """
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except OSError:  # closed
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
