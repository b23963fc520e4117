"""Exceptions and warnings; messages name the place in the user's model and what to do next."""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

WITHIN = (os.path.dirname(__file__) + os.sep, contextlib.__file__)
"""The files that a warning does not name: those of gradtrace, and what its decorators run in."""


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


def did_you_mean(
    name: object, known: Iterable[str], most: int = 8, show: Callable[[str], str] = str
) -> str:
    """``; did you mean ...?`` for similar names; else a list of the first ``most`` that are known.

    >>> did_you_mean("lsmt", ["lstm", "gru"]), did_you_mean("x", ["lstm", "gru"], 1, repr)
    ('; did you mean lstm?', "; there are 'lstm', ...")
    """
    names = [each for each in known if each]
    if isinstance(name, str) and (found := get_close_matches(name, names, n=3)):
        return f"; did you mean {' or '.join(map(show, found))}?"
    listed = [*map(show, names[:most]), *(["..."] if names[most:] else [])]
    return f"; there are {', '.join(listed) or 'none'}" if most else ""


def not_one_of(word: str, value: object, allowed: Sequence[str]) -> str:
    """What is wrong with an option that is none of ``allowed``.

    >>> not_one_of("rule", "egde", ("greedy", "edge", "viterbi"))
    "rule is 'greedy', 'edge' or 'viterbi', not 'egde'; did you mean 'edge'?"
    """
    *others, last = map(repr, allowed)
    hint = did_you_mean(value, allowed, 0, repr) if isinstance(value, str) else ""
    return f"{word} is {', '.join(others)} or {last}, not {value!r}{hint}"


UPDATE = "update gradtrace (pull its clone and pip install . again, or take a newer release)"
"""The advice for files and data of a newer version."""


def needs(what: str, *packages: str) -> str:
    """The message for missing packages; names the packages themselves, which any index has.

    >>> needs("to_pandas()", "pandas")
    'to_pandas() needs pandas, which is not installed: pip install pandas'
    """
    named = " and ".join(packages)
    verb = "is" if len(packages) == 1 else "are"
    return f"{what} needs {named}, which {verb} not installed: pip install {' '.join(packages)}"


def reason_of(error: BaseException) -> str:
    """The text of an exception; where it has none, or none that can be read, its type.

    >>> reason_of(ValueError("too long")), reason_of(AssertionError())
    ('too long', 'AssertionError, which came without a text')
    """
    kind = type(error).__name__
    try:
        return str(error) or f"{kind}, which came without a text"
    except Exception:
        return f"{kind}, whose text cannot be read"


class GradtraceError(Exception):
    """The base class of gradtrace's errors; the text is always printable."""

    def __str__(self) -> str:
        return printable(super().__str__())


class NoGraph(GradtraceError):
    """The loss carries no computation graph (no ``grad_fn``)."""


class NotScalar(GradtraceError):
    """The loss has several elements, and no weights for them were given."""


class FreedGraph(GradtraceError):
    """The tensors that an operator saved for its backward pass were freed or overwritten."""


class NonFinite(GradtraceError):
    """A gradient holds NaN or an infinity."""


class UnknownName(GradtraceError, KeyError):
    """A name that no leaf, module or schedule of this graph has."""

    def __str__(self) -> str:
        return printable(self.args[0]) if self.args else ""


class Unsupported(GradtraceError):
    """A graph that cannot be followed exactly: complex leaves, sparse gradients, opaque nodes."""


class NotLinear(Unsupported):
    """A backward formula, or a hook, that is not linear in the gradient it receives."""


class TooLarge(GradtraceError):
    """An operator without a structured rule is too large to be written out as a matrix."""


class TooDeep(GradtraceError):
    """The recursive schedule met a graph deeper than the interpreter's stack."""


class IncompatibleTorch(GradtraceError, ImportError):
    """A version of torch with internals that gradtrace does not support."""


class OutOfRange(GradtraceError):
    """A value is too large or too small for a float."""


class BadFile(GradtraceError):
    """A file that cannot be read or written: missing, torn, of another kind, no space left."""


class RankFailed(GradtraceError):
    """Another process of a ``torch.distributed`` group failed, ended, or never joined."""


def caution(text: str, *more: str) -> None:
    """Warn without interrupting a training run: if warnings are errors, print to stderr instead.

    ``more`` are further lines. The warning names the line outside of gradtrace that led here: of
    the user's loop, or of a trainer.
    """
    text = "\n".join(map(printable, (text, *more)))
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(WITHIN):
        frame, level = frame.f_back, level + 1
    try:
        warnings.warn(text, stacklevel=level)
    except Warning:
        print(f"gradtrace: {text}", file=sys.stderr)
