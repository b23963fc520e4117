"""``printable``: escapes untrusted text (file contents, names, foreign errors) for output.

A name may hold terminal escapes, newlines that fake a log line, or bidirectional control
characters. Everything written to a terminal, a log or the text of an exception passes through
``printable``: ``GradtraceError`` does it for messages of errors, ``errors.caution`` for warnings,
and the command line's ``printing`` for everything that is printed. ``stdout_is_stderr`` keeps what
others print away from the results.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

HIDDEN = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")
"""Unicode categories that are shown as escapes: C0 and C1 controls, format characters (bidi marks
among them), lone surrogates, unassigned code points, line and paragraph separators."""


def printable(text: object) -> str:
    r"""The text with control and format characters (categories ``HIDDEN``) as escapes.

    >>> print(printable("a\x1b]0;title\x07b\u202ec\n"))
    a\x1b]0;title\x07b\u202ec\n
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in HIDDEN else char
        for char in text
    )


def listed(names: Iterable[str], most: int = 3, between: str = ", ") -> str:
    """The first ``most`` names, and how many more there are.

    >>> listed("abcd"), listed("ab"), listed("abc", 2, "; ")
    ('a, b, c and 1 more', 'a, b', 'a; b and 1 more')
    """
    names = [*names]
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(names[:most]) + more


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
