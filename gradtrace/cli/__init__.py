"""The command line: ``gradtrace demo | diagnose | trace | influence | decompose | ...``.

Results go to stdout, progress, remarks and errors to stderr. ``codes`` lists the exit codes. These
modules import nothing heavy at load time, so that help and shell completion are fast: importing
PyTorch alone takes seconds.
"""

from gradtrace.cli import (
    attribute,
    check,
    conflicts,
    decompose,
    demo,
    diagnose,
    influence,
    report,
    trace,
)
from gradtrace.cli.app import app, main

__all__ = [
    "app",
    "attribute",
    "check",
    "conflicts",
    "decompose",
    "demo",
    "diagnose",
    "influence",
    "main",
    "report",
    "trace",
]
