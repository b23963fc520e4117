"""The command line: ``gradtrace diagnose | trace | influence | check | demo``.

Results go to stdout, progress, remarks and errors to stderr; ``app.CODES`` lists the exit codes.
These modules import nothing heavy when they are loaded, so that help and completion are fast:
importing PyTorch alone takes seconds.
"""

from gradtrace.cli import check, demo, diagnose, influence, trace
from gradtrace.cli.app import app, main

__all__ = ["app", "check", "demo", "diagnose", "influence", "main", "trace"]
