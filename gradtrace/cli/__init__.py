"""The command line: ``gradtrace demo | trace | influence | report | check | experiment | ...``.

Results go to stdout, progress, remarks and errors to stderr. ``codes`` says what exit codes mean.
Files here import nothing heavy when they are loaded, so that help and the shell's completion come
at once: PyTorch alone takes seconds.
"""

from gradtrace.cli import bench, check, demo, doctor, experiment, influence, ops, report, trace
from gradtrace.cli.app import app, main

__all__ = [
    "app",
    "bench",
    "check",
    "demo",
    "doctor",
    "experiment",
    "influence",
    "main",
    "ops",
    "report",
    "trace",
]
