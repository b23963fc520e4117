"""The line of the user's code that runs an operation, found on the stack of calls."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Iterable
from inspect import unwrap
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch


class SourceLine(NamedTuple):
    """A line of a file; as text ``train.py:41: h = self.encoder(x).detach()``."""

    file: str
    number: int
    code: CodeType | None = None
    at: int = -1  # of the instruction

    @property
    def expression(self) -> str:
        """The call or operation of the line that ran: ``0.1 * kl``. Empty if it is not known,
        as before Python 3.11, or spreads over lines.
        """
        positions: Iterable[Any] = getattr(self.code, "co_positions", tuple)()
        first, last, start, end = next(islice(positions, self.at // 2, None), (None,) * 4)
        if first is None or first != last or start is None or end is None:
            return ""
        text = linecache.getline(self.file, first).encode()[start:end]
        return text.decode(errors="replace").strip()

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.number).strip()
        place = f"{Path(self.file).name}:{self.number}"
        return f"{place}: {code}" if code else place


USER, LIBRARY, FUNCTION, CHECKPOINT, SAMPLE, TORCH = range(6)
"""Kinds of frames: the user's code, a library's, ``Function.apply``, a reentrant checkpoint,
``sample()`` of a distribution, and others of PyTorch or gradtrace.
"""

_TORCH = str(Path(torch.__file__).parent)
_DISTRIBUTIONS = str(Path(_TORCH, "distributions"))
_SWITCHES = tuple(
    str(Path(_TORCH, *at)) for at in (("autograd", "grad_mode"), ("utils", "_context"))
)
_OWN = str(Path(__file__).parents[1])
_DEMO = str(Path(_OWN, "cli", "planted.py"))  # its network is like a user's
_LIBRARIES = (_TORCH, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
_KINDS: dict[int, tuple[int, CodeType]] = {}
"""By id of the code, which is kept, so that no other has its id: its hash is that of all its names
and constants, and some 50 frames are looked at in each operation.
"""


def _kind(code: CodeType) -> int:
    file = code.co_filename
    if file.startswith(_TORCH):
        if code.co_name == "forward" and file.endswith("checkpoint.py"):
            return CHECKPOINT
        if code.co_name == "sample" and file.startswith(_DISTRIBUTIONS):
            return SAMPLE
        return FUNCTION if code.co_name == "apply" and file.endswith("function.py") else TORCH
    if file.startswith(_OWN):
        return USER if file == _DEMO else TORCH
    outside = file.startswith(("<frozen", *_LIBRARIES)) or "site-packages" in file
    return LIBRARY if outside else USER


class Drawn(NamedTuple):
    """A distribution from which a sample is drawn, and whether it has an ``rsample()``."""

    name: str
    rsample: bool

    @classmethod
    def of(cls, frame: FrameType) -> Drawn:
        """That of a frame of ``sample()``."""
        found = frame.f_locals.get("self")
        return cls(type(found).__name__, bool(getattr(found, "has_rsample", False)))


class Place(NamedTuple):
    """Where an operation runs: the user's line (of the library that calls PyTorch, if no code of
    the user's does), inside which custom function (``""``, ``"function"``, ``"checkpoint"``), of
    which distribution's ``sample()`` it is a part, and the line that calls the checkpoint.
    """

    line: SourceLine | None
    inside: str
    drawn: Drawn | None = None
    around: SourceLine | None = None


def block_line(frame: FrameType | None, word: str) -> SourceLine | None:
    """The user's innermost ``with`` statement or decorator that has this word in it, around what
    runs; None if it is not written so (an ``ExitStack``, a context that has a name).
    """
    while frame is not None:
        code, number = frame.f_code, frame.f_lineno
        if _kind(code) == USER:
            least = _indent(linecache.getline(code.co_filename, number)) + 1
            for line in range(number, code.co_firstlineno - 1, -1):
                text = linecache.getline(code.co_filename, line)
                begins = text.lstrip().startswith
                around = begins(("with ", "async with ")) and _indent(text) < least
                if word in text and (around or (begins("@") and _indent(text) <= least)):
                    return SourceLine(code.co_filename, line)
                if text.strip() and not begins(("#", ")", "]", "}")):
                    least = min(least, _indent(text))
        frame = frame.f_back
    return None


def decorator_line(frame: FrameType | None) -> SourceLine | None:
    """The user's ``@torch.no_grad()`` whose function is being entered; None if gradients are
    turned off in another way.
    """
    while frame is not None and _kind(frame.f_code) == TORCH:
        if frame.f_code.co_name == "decorate_context":
            code = getattr(unwrap(frame.f_locals["func"]), "__code__", None)
            return None if code is None else _decorator(code)
        frame = frame.f_back
    return None


def switched_by(frame: FrameType | None) -> str:
    """The function of a library, or of PyTorch, that turns gradients off; "" if the user does."""
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, *_SWITCHES)):
        if frame.f_code.co_name == "decorate_context":
            function = unwrap(frame.f_locals["func"])
            code = getattr(function, "__code__", None)
            return "" if code is None or _kind(code) == USER else function.__qualname__
        frame = frame.f_back
    if frame is None or _kind(frame.f_code) == USER:
        return ""
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))


def _decorator(code: CodeType) -> SourceLine | None:
    """The line above a user's function that turns gradients off."""
    number = code.co_firstlineno
    while _kind(code) == USER:
        text = linecache.getline(code.co_filename, number).lstrip()
        if text.startswith("@") and "grad" in text:
            return SourceLine(code.co_filename, number)
        if not text or text.startswith(("def ", "async def ")):
            break
        number += 1
    return None


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def place(frame: FrameType | None = None, functions: bool = True) -> Place:
    """The innermost line outside PyTorch, installed packages and gradtrace; without ``functions``
    it is not looked for custom functions, whose forward passes run without gradients.

    >>> place().inside
    ''
    """
    at = frame or sys._getframe(1)
    mine: SourceLine | None = None
    other: SourceLine | None = None
    inside, drawn, around = "", None, None
    step: FrameType | None = at
    kinds = _KINDS
    while step is not None:
        code = step.f_code
        known = kinds.get(id(code))
        if known is None:
            known = kinds[id(code)] = _kind(code), code
        kind = known[0]
        if kind == TORCH:
            pass
        elif kind == USER:
            if mine is None:
                mine = SourceLine(code.co_filename, step.f_lineno, code, step.f_lasti)
            if not functions:
                break
            if inside == "checkpoint" and around is None:
                around = SourceLine(code.co_filename, step.f_lineno, code, step.f_lasti)
        elif kind == CHECKPOINT:
            inside = "checkpoint"
        elif kind == FUNCTION:
            inside = inside or "function"
        elif kind == SAMPLE:
            drawn = Drawn.of(step) if mine is None else drawn
        elif other is None:
            other = SourceLine(code.co_filename, step.f_lineno)
        step = step.f_back
    return Place(mine or other, inside, drawn, around)
