"""The application: options that all commands share, errors as one line, exit codes."""

from __future__ import annotations

import io
import os
import platform
import sys
import traceback
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import gradtrace
from gradtrace.cli.output import say, write
from gradtrace.errors import GradtraceError, reason_of

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


def examples(*lines: str) -> str:
    """The examples at the end of a command's help."""
    return "\n".join(("Examples:", *(f"  {line}" for line in lines)))


class Guarded(TyperGroup):
    """Ends with one of the exit codes above, and prints an error as one line."""

    def main(self, args: Any = None, *more: Any, **options: Any) -> Any:
        """Run a command, which returns its exit code, or nothing where that is 0."""
        words = sys.argv[1:] if args is None else [*args]
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # characters that it lacks, such as ×
        try:
            code = super().main(words, *more, **{**options, "standalone_mode": False})
            sys.stdout.flush()
        except SystemExit as end:  # so rich and typer end where nobody reads
            code = UNREAD if isinstance(end.__context__, BrokenPipeError) else end.code
        except (Exception, KeyboardInterrupt) as error:
            code = ended(error, DEBUG in words)
        sys.exit(code)


def ended(error: BaseException, debug: bool) -> int:
    """Print an error, in one line or with its traceback, too; its exit code."""
    if isinstance(error, OSError):
        with suppress(OSError):  # what could not be written is not tried again as Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return UNREAD
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return INTERRUPTED
    if hasattr(error, "format_message"):  # of typer: a wrong command, option or value
        command = getattr(error.ctx, "command_path", "gradtrace")  # type: ignore[attr-defined]
        say(f"gradtrace: {error.format_message()} ({command} --help says more)")
        return WRONG
    if debug:
        write("".join(traceback.format_exception(error)), sys.stderr)
    if isinstance(error, (GradtraceError, OSError)):
        say(f"gradtrace: {error}")
        return WRONG
    told = f"{type(error).__name__}: {reason_of(error)}"
    say(f"gradtrace: this is a bug: {told}; please report what gradtrace {DEBUG} ... shows")
    return BUG


app = typer.Typer(
    cls=Guarded,
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


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show tracebacks.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Versions, kernels and devices."
        ),
    ] = False,
) -> None:
    """Find out why a PyTorch layer does not learn."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """The entry point."""
    app(prog_name="gradtrace")
