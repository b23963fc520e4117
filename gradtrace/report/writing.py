"""Combines views into reports, and writes these to files."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from gradtrace.errors import GradtraceError
from gradtrace.io import container
from gradtrace.io.validation import unfit
from gradtrace.report.checking import check
from gradtrace.report.encode import contained, read
from gradtrace.report.model import Report, Timing, Training, View, plain, revived
from gradtrace.report.page import page

SCHEMA = 1
"""Version of the data that the page reads."""


def report(
    views: Sequence[View],
    names: str | Sequence[str] | None = None,
    training: Training | None = None,
    timing: Timing | None = None,
) -> Report:
    """A report of zero, one or two traces, under ``names`` or their own names."""
    titled = _titled(views, names)
    title = " and ".join(view.name for view in titled) or _alone(names)
    return Report(SCHEMA, title, _made(), titled, training, timing)


def write(path: str | os.PathLike[str], contents: Report) -> None:
    """Write a report to a file, atomically."""
    container.put(path, page(contents))


def _titled(views: Sequence[View], names: str | Sequence[str] | None) -> tuple[View, ...]:
    given = [names] if isinstance(names, str) else list(names or ())
    if not all(isinstance(name, str) for name in given):
        raise GradtraceError(f"name={names!r}: a report's name is text, or one for each trace")
    if len(given) > max(1, len(views)):
        raise GradtraceError(f"{len(given)} names for {len(views)} traces: give one for each")
    found: list[View] = []
    for n, view in enumerate(views):
        name = given[n] if n < len(given) else view.name
        if n and name == found[0].name:
            name = f"{name} (2)"  # names must differ
        found.append(replace(view, name=name))
    return tuple(found)


def _alone(names: str | Sequence[str] | None) -> str:
    """The title of a report without traces."""
    given = [names] if isinstance(names, str) else list(names or ())
    return given[0] if given else "Training"


def _made() -> tuple[tuple[str, str], ...]:
    return (
        ("gradtrace", str(sys.modules["gradtrace"].__version__)),
        ("torch", str(torch.__version__)),
        ("Python", platform.python_version()),
    )


# In files of traces -------------------------------------------------------------------------------


def saved(view: View) -> torch.Tensor:
    """Encode a view as a tensor of bytes."""
    return torch.frombuffer(bytearray(contained(plain(view))), dtype=torch.uint8)


def loaded(data: torch.Tensor) -> View:
    """The inverse of ``saved``, with each field checked; raises ``SchemaMismatch``."""
    if data.dtype != torch.uint8 or data.dim() != 1:
        unfit("the view is no row of bytes")
    found = revived(View, read(data.numpy().tobytes()))
    assert isinstance(found, View)
    check(found)
    return found
