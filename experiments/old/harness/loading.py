"""Imports an experiment by its name or file, and checks its interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from gradtrace.errors import GradtraceError
from gradtrace.experiments.harness.findings import Experiment
from gradtrace.tools import user_script

PARTS = ("Question", "Expectation", "Method", "Seeds")
OPTIONAL = ("Limits",)
"""The first words of the paragraphs of an experiment's docstring."""

KINDS: dict[str, tuple[Any, str]] = {
    "QUICK": (Mapping, "a dict of settings"),
    "FULL": (Mapping, "a dict of settings"),
    "SEEDS": (tuple, "Seeds(quick=1, full=5)"),
    "TIMED": (bool, "True or False"),
    "cells": (Callable, "a function of settings and seeds"),
    "measure": (Callable, "a function of a cell and a tick"),
    "conclude": (Callable, "a function of rows"),
}
"""The names that a module must define, with their types."""


class ExperimentSource(NamedTuple):
    """The location of an experiment: what another process needs to load it."""

    name: str
    place: str  # a module's dotted name, or a path that ends in .py

    @classmethod
    def of(cls, path: Path) -> ExperimentSource:
        """The source of a user's file."""
        if not path.is_file():
            raise GradtraceError(f"there is no file {str(path)!r} (in {Path.cwd()})")
        return cls(path.stem, str(path.resolve()))

    @property
    def typed(self) -> str:
        """The name in the command; for a file without its folder, which should not be on a page."""
        return Path(self.place).name if self.own else self.name

    @property
    def own(self) -> bool:
        """Whether it is a user's file."""
        return self.place.endswith(".py")

    def running(self) -> AbstractContextManager[None]:
        """Context in which the experiment's code runs: see ``user_script.running``."""
        if self.own:
            return user_script.running(Path(self.place))
        module = import_module(self.place)
        return user_script.running(Path(module.__file__ or self.place), beside=False)


@cache
def load(source: ExperimentSource) -> Experiment:
    """The module of an experiment; raises an error that names what is missing."""
    with source.running():
        if source.own:
            path = Path(source.place)
            unique = sha256(source.place.encode()).hexdigest()[:12]
            module = user_script.imported(path, f"gradtrace_experiment_{unique}")
        else:
            module = import_module(source.place)
    for name, (kind, words) in KINDS.items():
        if not isinstance(getattr(module, name, None), kind):
            raise GradtraceError(
                f"{source.name} is no experiment: it needs {name}, {words} "
                "(gradtrace.experiments.harness.findings says how one is written)"
            )
    experiment = cast(Experiment, module)
    about(experiment, source.name)
    return experiment


def about(experiment: Experiment, name: str) -> dict[str, str]:
    """``{"question": ..., "expectation": ..., "method": ..., "seeds": ...}`` of the docstring, and
    ``"limits"`` where it has such a paragraph.
    """
    paragraphs = inspect.cleandoc(experiment.__doc__ or "").split("\n\n")
    found = {}
    for part in PARTS + OPTIONAL:
        texts = [text for text in paragraphs if text.startswith(f"{part}:")]
        if not texts and part in OPTIONAL:
            continue
        if not texts:
            raise GradtraceError(
                f"{name}: its docstring has a paragraph each that starts with "
                f"{', '.join(f'{p}:' for p in PARTS)}; {part}: is missing"
            )
        found[part.lower()] = " ".join(texts[0].partition(":")[2].split())
    return found
