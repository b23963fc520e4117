"""The application: options that all commands share, errors as one line, exit codes."""

from __future__ import annotations

import io
import os
import platform
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

import gradtrace
from gradtrace.cli.output import say
from gradtrace.errors import GradtraceError, printable, reason_of

FAILED, WRONG, BUG, INTERRUPTED, UNREAD = 1, 2, 3, 130, 141
CODES = {
    0: "all is well",
    FAILED: "something wrong was found: in a model, or a gradient",
    WRONG: "something is wrong with the question: an option, a file, the script itself",
    BUG: "a bug in gradtrace",
    INTERRUPTED: "stopped by Ctrl-C",
    UNREAD: "whoever read the output has gone, as in gradtrace trace ... | head",
}
"""Exit codes, and what they mean."""

DEBUG = "--debug"
ORDER = ("diagnose", "trace", "influence", "check", "demo")
"""The order of commands in the help."""

PACKAGE = str(Path(gradtrace.__file__).parent) + os.sep


def examples(*lines: str) -> str:
    """The examples at the end of a command's help."""
    return "\n".join(("Examples:", *(f"  {line}" for line in lines)))


class Guarded(TyperGroup):
    """Prints errors as one line, without a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands, the most wanted first."""
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def get_command(self, ctx: Any, name: str) -> Any:
        """A command; in the list its help is one line, which wraps to the terminal's width."""
        command = super().get_command(ctx, name)
        if command is not None and command.help and not command.short_help:
            command.short_help = " ".join(command.help.partition("\n\n")[0].split())
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept ``--debug`` anywhere before ``--``."""
        end = args.index("--") if "--" in args else len(args)
        if DEBUG in args[:end]:
            args = [DEBUG, *(arg for arg in args[:end] if arg != DEBUG), *args[end:]]
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the arguments."""
        with _errors_as_exits(debug=True):
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with _errors_as_exits(ctx.params.get("debug", False)):
            return super().invoke(ctx)


@contextmanager
def _errors_as_exits(debug: bool) -> Iterator[None]:
    """Print errors and exit with their codes; with ``debug`` they are raised. Errors of usage are
    printed by typer, but may hold any file name: these are made printable.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except (BrokenPipeError, KeyboardInterrupt) as stop:
        raise typer.Exit(ended(stop)) from stop
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # an error of usage
            error.message = printable(getattr(error, "message", ""))  # type: ignore[attr-defined]
            raise
        if debug:
            raise
        raise typer.Exit(ended(error)) from error


def ended(error: BaseException, debug: bool = False) -> int:
    """Print an error, in one line or with its traceback; its exit code."""
    if isinstance(error, BrokenPipeError):
        return UNREAD
    if isinstance(error, KeyboardInterrupt):
        say(f"gradtrace: {str(error) or 'stopped'}")
        return INTERRUPTED
    known = isinstance(error, (GradtraceError, OSError))  # the user can mend it
    if debug:
        _show_traceback(error)
    elif isinstance(error, FileNotFoundError) and error.filename is None:  # of os.getcwd()
        say("gradtrace: the current folder was removed: change to another one")
    elif known:
        say(f"gradtrace: {error}")
    else:
        bug = f"this is a bug: {type(error).__name__}: {reason_of(error)}"
        say(f"gradtrace: {bug}; please report it with what gradtrace {DEBUG} ... shows")
    return WRONG if known else BUG


app = typer.Typer(
    cls=Guarded,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\n".join(
        (
            "Exit codes:",
            *(f"  {code:<4} {meaning}" for code, meaning in CODES.items()),
            "Results go to stdout, all else to stderr. NO_COLOR=1 turns colours off.",
        )
    ),
)


def _version(wanted: bool) -> None:
    """Print the versions, and which kernels and devices there are."""
    if wanted:
        import torch

        from gradtrace.kernels import instruction_set

        kernels = instruction_set() or "not compiled: tracing is many times slower"
        gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        print(f"gradtrace {gradtrace.__version__}")
        print(f"torch {torch.__version__}, Python {platform.python_version()}")
        print(f"CPU kernels: {kernels}")
        print(f"CUDA devices: {', '.join(gpus) or 'none'}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show tracebacks; may stand anywhere.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Versions, kernels and devices."
        ),
    ] = False,
) -> None:
    """Find out why a PyTorch layer does not learn."""


# Entry point and exit ----------------------------------------------------------------------------


def main() -> None:
    """The entry point."""
    _open_streams()
    code = _flushed(_run())
    try:
        sys.stderr.flush()
    except OSError:  # Python would end with a code of its own
        _drop(sys.stderr)
    sys.exit(code)


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
    except SystemExit as end:  # rich and typer exit with 1 if a pipe is broken
        return UNREAD if isinstance(end.__context__, BrokenPipeError) else end.code
    except (Exception, KeyboardInterrupt) as error:  # with --debug, or before a command was reached
        return ended(error, DEBUG in sys.argv)
    return 0


def _show_traceback(error: BaseException) -> None:
    """Print the traceback; for an error in the user's script, from the script on."""
    cause = error.__cause__ if isinstance(error, GradtraceError) and error.__cause__ else error
    found = cause.__traceback__
    own = found
    while own is not None and _is_ours(own.tb_frame.f_code.co_filename):
        own = own.tb_next
    lines = "".join(traceback.format_exception(type(cause), cause, own or found)).splitlines()
    print("\n".join(map(printable, lines)), file=sys.stderr)
    if cause is not error:
        say(f"gradtrace: {error}")


def _is_ours(file: str) -> bool:
    return file.startswith((PACKAGE, "<frozen ")) or "contextlib" in file


def _flushed(code: Any) -> Any:
    """Flush stdout; the exit code, or another one if the reader is gone or the disk is full."""
    try:
        sys.stdout.flush()
        return code
    except OSError as error:
        _drop(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return UNREAD
        say(f"gradtrace: {error}")
        return WRONG


def _drop(stream: TextIO) -> None:
    """Let what waits to be written there be written nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
