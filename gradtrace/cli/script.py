"""``SCRIPT.py:FUNCTION``: imports a user's script, and calls a function in it."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from typer import Argument

from gradtrace.cli.output import stdout_is_stderr
from gradtrace.errors import GradtraceError, did_you_mean, reason_of

Arguments = Annotated[
    list[str] | None, Argument(metavar="[-- ARGS]", help="Passed to it, as strings.")
]


def functions(incomplete: str) -> list[str]:
    """Shell completion: the functions of a script, which is parsed and not run. The shell completes
    file names itself.
    """
    path, colon, start = incomplete.rpartition(":")
    if not colon or not Path(path).is_file():
        return []
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f"{path}:{name}" for name in names if name.startswith(start)]


def script_function(text: str) -> Any:
    """The argument that names a function, with the help text for what it returns."""
    return Argument(metavar="SCRIPT.py:FUNCTION", help=text, autocompletion=functions)


@dataclass(frozen=True)
class Script:
    """A function in a script, and the arguments to call it with."""

    path: Path
    name: str
    args: Sequence[str]

    @classmethod
    def of(cls, text: str, args: Sequence[str] | None, *written: Path | None) -> Script:
        """Parse ``path/script.py:function``, where the path may contain a drive letter's colon.

        The files that are to be ``written`` must be others, each another one.
        """
        path, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier():
            raise GradtraceError(f"{text!r} names no function; write script.py:function")
        if not Path(path).is_file():
            raise GradtraceError(f"there is no script {path!r} (in {Path.cwd()})")
        places = [realpath(file) for file in written if file is not None]
        if realpath(path) in places:
            raise GradtraceError(f"{path} is the script, which would be overwritten")
        if len({*places}) < len(places):
            raise GradtraceError(f"{places[0]} is to be written twice; give two names")
        return cls(Path(path).resolve(), name, args or ())

    @contextlib.contextmanager
    def running(self) -> Iterator[ModuleType]:
        """Context with the script imported, in which its code can run: what it prints goes to
        stderr, and its errors are told with their line.
        """
        argv, folder = sys.argv, str(self.path.parent)
        sys.path.insert(0, folder)
        sys.argv = [str(self.path), *self.args]  # for scripts that parse it when imported
        name = self.path.stem if self.path.stem not in sys.modules else "gradtrace_script"
        try:
            with stdout_is_stderr(), contextlib.redirect_stdout(sys.stderr):
                yield _imported(self.path, name)
        except (GradtraceError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # also those that are derived so that nobody catches them
            raise GradtraceError(_blame(error, self.path)) from error
        finally:
            sys.argv = argv
            sys.modules.pop(name, None)
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)

    def call(self, script: ModuleType) -> Any:
        """Call the function; its return value."""
        function = getattr(script, self.name, None)
        if not callable(function):
            own = [key for key, value in vars(script).items() if inspect.isfunction(value)]
            hint = did_you_mean(self.name, own)
            raise GradtraceError(f"{self.path.name} has no function {self.name!r}{hint}")
        with contextlib.suppress(ValueError):  # it is written in C
            signature = inspect.signature(function)
            try:
                signature.bind(*self.args)
            except TypeError as error:
                raise GradtraceError(
                    f"{self.name}{signature} was given {len(self.args)} arguments after --: {error}"
                ) from error
        return function(*self.args)


def _imported(path: Path, name: str) -> ModuleType:
    """Import a file by its own name, by which processes that it spawns find it, too."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise GradtraceError(f"{path.name} is not a Python script")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _blame(error: BaseException, path: Path) -> str:
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
