"""The application: options that all commands share, error handling and exit codes."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import gradtrace
from gradtrace.cli.codes import BUG, INTERRUPTED, MEANING, UNREAD, WRONG
from gradtrace.cli.printing import say
from gradtrace.errors import GradtraceError
from gradtrace.printable import printable

DEBUG = "--debug"
ORDER = ("demo", "trace", "influence", "report", "check", "experiment", "bench", "ops", "doctor")
"""The order of commands in the help."""

PACKAGE = str(Path(gradtrace.__file__).parent)


def examples(*lines: str) -> str:
    """The examples at the end of a command's help."""
    return "\n".join(("Examples:", *(f"  {line}" for line in lines)))


class Guarded(TyperGroup):
    """Prints errors as one line, without a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands, those for newcomers first."""
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept ``--debug`` anywhere before ``--``."""
        end = args.index("--") if "--" in args else len(args)
        if DEBUG in args[:end]:
            args = [DEBUG, *(arg for arg in args[:end] if arg != DEBUG), *args[end:]]
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the arguments; errors are made printable, as they may contain any file name."""
        try:
            return super().make_context(*args, **options)
        except Exception as error:
            if _is_usage(error):
                _make_printable(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run a command; print its error, and exit with the code of it."""
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt as stop:
            say(f"gradtrace: {str(stop) or 'stopped'}")
            raise typer.Exit(INTERRUPTED) from stop
        except Exception as error:
            if _is_usage(error):
                _make_printable(error)
                raise
            if ctx.params.get("debug"):
                raise
            say(f"gradtrace: {error_line(error)}")
            raise typer.Exit(code_of(error)) from error


def _is_usage(error: Exception) -> bool:
    """Whether it is a usage error, which typer reports itself."""
    return hasattr(error, "exit_code") and hasattr(error, "format_message")


def _make_printable(error: Any) -> None:
    """Escape unprintable characters in the message of an error."""
    if isinstance(getattr(error, "message", None), str):
        error.message = printable(error.message)


def code_of(error: BaseException) -> int:
    """The exit code of an error: ``WRONG`` if the user can fix it, else ``BUG``."""
    return WRONG if isinstance(error, (GradtraceError, OSError)) else BUG


def error_line(error: BaseException) -> str:
    """The text of an error, in one line."""
    if code_of(error) == WRONG:
        return str(error)
    return (
        f"this is a bug: {type(error).__name__}: {error}; please report it with what "
        f"gradtrace {DEBUG} ... shows"
    )


app = typer.Typer(
    cls=Guarded,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\n".join(
        (
            "Exit codes:",
            *(f"  {code:<4} {meaning}" for code, meaning in MEANING.items()),
            "Results go to stdout, all else to stderr. NO_COLOR=1 turns colours off.",
        )
    ),
)


def _version(wanted: bool) -> None:
    if wanted:
        import torch

        print(f"gradtrace {gradtrace.__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show tracebacks; may stand anywhere.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """See which way gradient flows through a PyTorch model."""


# Entry point and exit ----------------------------------------------------------------------------


def main() -> None:
    """The entry point."""
    _open_streams()
    sys.exit(_flushed(_run()))


def _open_streams() -> None:
    """Replace closed streams, and characters that a stream's encoding lacks (such as ×)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _run() -> Any:
    """Run the command line; its exit code."""
    try:
        app(prog_name="gradtrace")
    except SystemExit as end:
        return UNREAD if any(isinstance(e, BrokenPipeError) for e in _chain(end)) else end.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return UNREAD
    except Exception as error:  # with --debug, or before a command was reached
        if DEBUG in sys.argv:
            _show(error)
        else:
            say(f"gradtrace: {error_line(error)}")
        return code_of(error)
    return 0


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__


def _show(error: Exception) -> None:
    """Print the traceback; for an error in the user's script, from the script on."""
    cause = error.__cause__ if isinstance(error, GradtraceError) and error.__cause__ else error
    found = cause.__traceback__
    own = found
    while own is not None and _ours(own):
        own = own.tb_next
    lines = "".join(traceback.format_exception(type(cause), cause, own or found)).splitlines()
    print("\n".join(map(printable, lines)), file=sys.stderr)
    if cause is not error:
        say(f"gradtrace: {error}")


def _ours(at: TracebackType) -> bool:
    name = at.tb_frame.f_code.co_filename
    return name.startswith((PACKAGE + os.sep, "<frozen ")) or "contextlib" in name


def _flushed(code: Any) -> Any:
    """Flush stdout; the exit code, or another one if the reader is gone or the disk is full."""
    try:
        sys.stdout.flush()
        return code
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return UNREAD
        say(f"gradtrace: {error}")
        return WRONG
