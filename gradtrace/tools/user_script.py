"""Imports and runs a user's Python files; errors in them name the file and the line."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from gradtrace.errors import GradtraceError, reason_of

SCRIPT = "gradtrace_script"
"""The name under which a script is imported, so that it shadows no other module."""

PLACE = "GRADTRACE_SCRIPT"
"""The variable of the environment that tells spawned processes where it is."""

SPAWNED = str(Path(__file__).parent / "spawned")
"""The folder where these find a module of its name, which imports it."""


@contextlib.contextmanager
def running(path: Path, *, beside: bool = True) -> Iterator[None]:
    """Context in which a user's code runs.

    Its folder is on ``sys.path`` (unless ``beside`` is False), its standard output goes to standard
    error, so as not to mix with our results, and its errors are reported with their line.
    """
    folder = str(path.parent)
    if beside:
        sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (GradtraceError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # also those that libraries derive so that nobody catches them
        raise GradtraceError(blame(error, path)) from error
    finally:
        if beside:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)


def blame(error: BaseException, path: Path) -> str:
    """``script.py, line 3: ValueError: ...``."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines = [error.lineno]
    where = f", line {lines[-1]}" if lines else ""
    kind, reason = type(error).__name__, reason_of(error)
    told = reason if reason.startswith(f"{kind}, ") else f"{kind}: {reason}"
    if isinstance(error, ImportError) and "relative import" in reason:
        told += "; a script is no part of a package: give one beside it that imports from it"
    return f"{path.name}{where}: {told} (gradtrace --debug ... shows more)"


def imported(path: Path, name: str) -> ModuleType:
    """Import a file as a module of this name, which should not shadow another module."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise GradtraceError(f"{path.name} is not a Python script")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def main(path: Path) -> Iterator[ModuleType]:
    """The script of a command, imported as ``SCRIPT``, also for processes that it spawns: workers
    of a DataLoader import the classes that they are given by the name of their module.
    """
    os.environ[PLACE] = str(path)
    sys.path.append(SPAWNED)
    try:
        yield imported(path, SCRIPT)
    finally:
        sys.modules.pop(SCRIPT, None)
        os.environ.pop(PLACE, None)
        with contextlib.suppress(ValueError):
            sys.path.remove(SPAWNED)
