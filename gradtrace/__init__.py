"""See which way gradient flows through a PyTorch model.

>>> import torch, gradtrace as gt
>>> model = torch.nn.Linear(3, 1)
>>> with gt.watch(model) as watch:
...     loss = model(torch.ones(2, 3)).sum()
>>> watch.backward(loss)
{'weight': tensor([[2., 2., 2.]]), 'bias': tensor([2.])}
"""

from gradtrace import errors, semirings, testing
from gradtrace.ablation import ablate
from gradtrace.api import backward, enumerate_paths, graph, program, trace
from gradtrace.check import check
from gradtrace.dataset import influence
from gradtrace.labels import label
from gradtrace.monitor import Monitor
from gradtrace.saving import load
from gradtrace.semirings import SUM
from gradtrace.timing import timing
from gradtrace.watching import watch

__all__ = [  # noqa: RUF022  # plainly sorted
    "Monitor",
    "SUM",
    "ablate",
    "backward",
    "check",
    "enumerate_paths",
    "errors",
    "graph",
    "influence",
    "label",
    "load",
    "program",
    "semirings",
    "testing",
    "timing",
    "trace",
    "watch",
]
__version__ = "0.1.0"
