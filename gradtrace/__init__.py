"""See which way gradient flows through a PyTorch model.

>>> import torch, gradtrace as gt
>>> model = torch.nn.Linear(3, 1)
>>> with gt.watch(model) as watch:
...     loss = model(torch.ones(2, 3)).sum()
>>> watch.backward(loss)
{'weight': tensor([[2., 2., 2.]]), 'bias': tensor([2.])}
"""

from gradtrace import errors, semirings
from gradtrace.api import backward, graph, program
from gradtrace.check import check
from gradtrace.semirings import SUM
from gradtrace.watching import watch

__all__ = ["SUM", "backward", "check", "errors", "graph", "program", "semirings", "watch"]
__version__ = "0.1.0"
