"""``SCRIPT.py:FUNCTION``: a function of the user's, found and called."""

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

from gradtrace.errors import GradtraceError, close
from gradtrace.tools import user_script

SCRIPT = "gradtrace_script"
"""The name under which a user's script is imported, so that it hides no other module."""

Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Passed to it, as strings.")
]


def functions(incomplete: str) -> list[str]:
    """For the shell: the functions of a script, read and not run. Files it finds by itself."""
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
        """``path/script.py:function``; a drive letter's colon is not the one."""
        path, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier():
            raise GradtraceError(f"{text!r} names no function; write script.py:function")
        if not Path(path).is_file():
            raise GradtraceError(f"there is no script {path!r} (in {Path.cwd()})")
        return cls(Path(path).resolve(), name)

    @contextlib.contextmanager
    def running(self, args: Sequence[str]) -> Iterator[ModuleType]:
        """The script, imported, while code of it runs."""
        argv = sys.argv
        with user_script.running(self.path), _stdout_is_stderr():
            sys.argv = [str(self.path), *args]  # for scripts that parse it where they begin
            try:
                yield user_script.imported(self.path, SCRIPT)
            finally:
                sys.argv = argv
                sys.modules.pop(SCRIPT, None)

    def call(self, script: ModuleType, args: Sequence[str]) -> Any:
        """What the function returns."""
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
        where, near = self.path.name, close(self.name, own)
        raise GradtraceError(f"{where} has no function {self.name!r}{near}")


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """None of what is written in C, which has none to go by."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


@contextlib.contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """What a script's subprocesses and its code in C print is no result of ours either."""
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
