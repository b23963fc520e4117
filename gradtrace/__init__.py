"""gradtrace: see which way gradient flows through a PyTorch model."""

from gradtrace import atlas, errors, gradient, semirings
from gradtrace.api import backward, graph, program
from gradtrace.semirings import SUM
from gradtrace.watching import watch

__all__ = ["SUM", "backward", "errors", "graph", "program", "semirings", "watch"]
__version__ = "0.1.0"
