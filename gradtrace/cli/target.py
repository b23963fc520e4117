"""``SCRIPT.py:FUNCTION``: finds and calls a function of the user's."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from gradtrace.errors import GradtraceError, did_you_mean
from gradtrace.tools import user_script

SCRIPT = "gradtrace_script"
"""The name under which a user's script is imported, so that it shadows no other module."""

Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Passed to it, as strings.")
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


@dataclass(frozen=True)
class Target:
    """A function in a script."""

    path: Path
    name: str

    @classmethod
    def of(cls, text: str) -> Target:
        """Parse ``path/script.py:function``, where the path may contain a drive letter's colon."""
        path, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier():
            raise GradtraceError(f"{text!r} names no function; write script.py:function")
        if not Path(path).is_file():
            raise GradtraceError(f"there is no script {path!r} (in {Path.cwd()})")
        return cls(Path(path).resolve(), name)

    @contextlib.contextmanager
    def running(self, args: Sequence[str]) -> Iterator[ModuleType]:
        """Context with the script imported, in which its code can run."""
        argv = sys.argv
        with user_script.running(self.path), _stdout_is_stderr():
            sys.argv = [str(self.path), *args]  # for scripts that parse it at import
            try:
                yield user_script.imported(self.path, SCRIPT)
            finally:
                sys.argv = argv
                sys.modules.pop(SCRIPT, None)

    def call(self, script: ModuleType, args: Sequence[str]) -> Any:
        """Call the function; its return value."""
        function = self._function(script)
        signature = _signature(function)
        try:
            if signature is not None:
                signature.bind(*args)
        except TypeError as error:
            raise GradtraceError(
                f"{self.name}{signature} was given {len(args)} arguments after --: {error}"
            ) from error
        return function(*args)

    def _function(self, script: ModuleType) -> Callable[..., Any]:
        found = getattr(script, self.name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
        own = [key for key, value in vars(script).items() if inspect.isfunction(value)]
        where, near = self.path.name, did_you_mean(self.name, own)
        raise GradtraceError(f"{where} has no function {self.name!r}{near}")


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function; None for those in C that have none."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


@contextlib.contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Redirect file descriptor 1 to stderr, so that output of the script's subprocesses and C code
    does not mix with our results.
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
