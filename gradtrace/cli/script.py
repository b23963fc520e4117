"""``SCRIPT.py:FUNCTION``: imports a user's script, and calls a function in it."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from typer import Argument

from gradtrace.cli.output import progress
from gradtrace.errors import GradtraceError, did_you_mean

Arguments = Annotated[
    list[str] | None, Argument(metavar="[-- ARGS]", help="Passed to it, as strings.")
]


def script_function(text: str) -> Any:
    """The argument that names a function, with the help text for what it returns."""
    return Argument(metavar="SCRIPT.py:FUNCTION", help=text)


@contextlib.contextmanager
def loaded(
    target: str, args: Sequence[str] | None, *written: Path | None
) -> Iterator[tuple[Callable[[], Any], dict[str, Any]]]:
    """Context with ``script.py:function``, bound to its arguments, and the script's globals.

    Inside, what Python prints goes to stderr, nothing is compiled, and errors are told with the
    line of the script; no file that is to be ``written`` may be the script.
    """
    from gradtrace.pytorch.global_switches import uncompiled

    path, name = _parsed(target)
    if path in [file.resolve() for file in written if file is not None]:
        raise GradtraceError(f"{path} is the script, which would be overwritten")
    given, before = args or (), (sys.argv, sys.path)
    sys.argv = [str(path), *given]  # for scripts that parse it when imported
    sys.path = [str(path.parent), *sys.path]
    progress(f"running {target}")
    try:
        with contextlib.redirect_stdout(sys.stderr), uncompiled():
            script = _imported(path)
            yield partial(_function(script, name), *given), vars(script)
    except (GradtraceError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also those that are derived so that nobody catches them
        raise GradtraceError(_blame(error, path)) from error
    finally:
        sys.argv, sys.path = before


def _parsed(target: str) -> tuple[Path, str]:
    """The file and the name in ``path/script.py:function``; the path may hold colons, too."""
    path, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier():
        raise GradtraceError(f"{target!r} names no function; write script.py:function")
    if not Path(path).is_file():
        raise GradtraceError(f"there is no script {path!r} (in {Path.cwd()})")
    return Path(path).resolve(), name


def _imported(path: Path) -> ModuleType:
    """The script as a module of its own name, by which processes that it spawns find it, too."""
    name = path.stem if path.stem not in sys.modules else "gradtrace_script"
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    exec(code, vars(module))
    return module


def _function(script: ModuleType, name: str) -> Callable[..., Any]:
    found = getattr(script, name, None)
    if not callable(found):
        own = [key for key, value in vars(script).items() if inspect.isfunction(value)]
        hint = did_you_mean(name, own)
        raise GradtraceError(f"{Path(script.__file__ or '').name} has no function {name!r}{hint}")
    function: Callable[..., Any] = found
    return function


def _blame(error: BaseException, path: Path) -> str:
    """``script.py, line 3: ValueError: ...``."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    where = f", line {lines[-1]}" if lines else ""
    told = " ".join("".join(traceback.format_exception_only(error)).split())
    return f"{path.name}{where}: {told} (gradtrace --debug ... shows more)"
