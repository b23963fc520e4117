"""``SCRIPT.py:FUNCTION``: finds and calls a function of the user's."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from gradtrace.errors import GradtraceError, did_you_mean
from gradtrace.io.stdout import stdout_is_stderr
from gradtrace.tools import user_script

if TYPE_CHECKING:
    from torch.optim import Optimizer

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
class Target:
    """A function in a script, and the arguments to call it with."""

    path: Path
    name: str
    args: Sequence[str]

    @classmethod
    def of(cls, text: str, args: Sequence[str] | None, *written: Path | None) -> Target:
        """Parse ``path/script.py:function``, where the path may contain a drive letter's colon.

        The files that are to be ``written`` must be others, each another one.
        """
        path, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier():
            raise GradtraceError(f"{text!r} names no function; write script.py:function")
        if not Path(path).is_file():
            raise GradtraceError(f"there is no script {path!r} (in {Path.cwd()})")
        found = cls(Path(path).resolve(), name, args or ())
        found._spare([realpath(file) for file in written if file is not None])
        return found

    def _spare(self, written: Sequence[str]) -> None:
        if realpath(self.path) in written:
            raise GradtraceError(
                f"{self.path.name} is the script, which would be overwritten; give another name"
            )
        if len({*written}) < len(written):
            raise GradtraceError(f"{written[0]} is to be written twice; give two names")

    @contextlib.contextmanager
    def running(self) -> Iterator[ModuleType]:
        """Context with the script imported, in which its code can run."""
        argv = sys.argv
        with user_script.running(self.path), stdout_is_stderr():
            sys.argv = [str(self.path), *self.args]  # for scripts that parse it at import
            try:
                with user_script.main(self.path) as script:
                    yield script
            finally:
                sys.argv = argv

    def call(self, script: ModuleType) -> Any:
        """Call the function; its return value."""
        function = self._function(script)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # written in C
            return function(*self.args)
        try:
            signature.bind(*self.args)
        except TypeError as error:
            raise GradtraceError(
                f"{self.name}{signature} was given {len(self.args)} arguments after --: {error}"
            ) from error
        return function(*self.args)

    def _function(self, script: ModuleType) -> Callable[..., Any]:
        found = getattr(script, self.name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
        own = [key for key, value in vars(script).items() if inspect.isfunction(value)]
        hint = did_you_mean(self.name, own)
        raise GradtraceError(f"{self.path.name} has no function {self.name!r}{hint}")


def kind_of(value: Any) -> str:
    """The type of what a function returned, or the types in a tuple or list, for messages."""
    if type(value) in (tuple, list):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__


def without_optimizers(returned: Any) -> tuple[list[Optimizer], Any]:
    """The optimisers among what a function returned, and the rest."""
    from torch.optim import Optimizer

    if type(returned) not in (tuple, list):
        return [], returned
    found = [part for part in returned if isinstance(part, Optimizer)]
    rest = [part for part in returned if not isinstance(part, Optimizer)]
    if not found:
        return [], returned
    return found, rest[0] if len(rest) == 1 else tuple(rest)
