"""An experiment by its name or file, imported and checked."""

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
"""What paragraphs of a docstring start with."""

KINDS: dict[str, tuple[Any, str]] = {
    "QUICK": (Mapping, "a dict of settings"),
    "FULL": (Mapping, "a dict of settings"),
    "SEEDS": (tuple, "Seeds(quick=1, full=5)"),
    "TIMED": (bool, "True or False"),
    "cells": (Callable, "a function of settings and seeds"),
    "measure": (Callable, "a function of a cell and a tick"),
    "conclude": (Callable, "a function of rows"),
}
"""The names that a module must have, and what each is."""


class ExperimentSource(NamedTuple):
    """Where an experiment comes from: all that another process needs to load it."""

    name: str
    place: str  # a module's dotted name, or a path that ends in .py

    @classmethod
    def of(cls, path: Path) -> ExperimentSource:
        """A file of the user's."""
        if not path.is_file():
            raise GradtraceError(f"there is no file {str(path)!r} (in {Path.cwd()})")
        return cls(path.stem, str(path.resolve()))

    @property
    def typed(self) -> str:
        """As one types it; of a file its name alone, since a page is no place for one's folders."""
        return Path(self.place).name if self.own else self.name

    @property
    def own(self) -> bool:
        """Whether it is a file of the user's."""
        return self.place.endswith(".py")

    def running(self) -> AbstractContextManager[None]:
        """Around code of the experiment: see ``scripts.running``."""
        if self.own:
            return user_script.running(Path(self.place))
        module = import_module(self.place)
        return user_script.running(Path(module.__file__ or self.place), beside=False)


@cache
def load(source: ExperimentSource) -> Experiment:
    """The module of an experiment; an error says what it lacks."""
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
    """``{"question": ..., "expectation": ..., "method": ..., "seeds": ...}`` of the docstring."""
    paragraphs = inspect.cleandoc(experiment.__doc__ or "").split("\n\n")
    found = {}
    for part in PARTS:
        texts = [text for text in paragraphs if text.startswith(f"{part}:")]
        if not texts:
            raise GradtraceError(
                f"{name}: its docstring has a paragraph each that starts with "
                f"{', '.join(f'{p}:' for p in PARTS)}; {part}: is missing"
            )
        found[part.lower()] = " ".join(texts[0].partition(":")[2].split())
    return found
