"""Find out why a PyTorch layer does not learn.

>>> import torch, gradtrace as gt
>>> model = torch.nn.Linear(3, 1)
>>> with gt.watch(model) as watch:
...     loss = model(torch.ones(2, 3)).sum()
>>> watch.backward(loss)
{'weight': tensor([[2., 2., 2.]]), 'bias': tensor([2.])}
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradtrace import errors, semirings, testing
    from gradtrace.autodiff.labels import label
    from gradtrace.session import backward, graph, trace
    from gradtrace.training.ablation import ablate
    from gradtrace.training.dataset import decompose, influence
    from gradtrace.training.gradcheck import check
    from gradtrace.training.load import load
    from gradtrace.training.monitor import Monitor
    from gradtrace.watching import diagnose, watch

__all__ = [  # plainly sorted
    "Monitor",
    "ablate",
    "backward",
    "check",
    "decompose",
    "diagnose",
    "errors",
    "graph",
    "influence",
    "label",
    "load",
    "semirings",
    "testing",
    "trace",
    "watch",
]
__version__ = "0.1.0"

_HOMES = {
    "Monitor": "training.monitor",
    "ablate": "training.ablation",
    "backward": "session",
    "check": "training.gradcheck",
    "decompose": "training.dataset",
    "diagnose": "watching",
    "graph": "session",
    "influence": "training.dataset",
    "label": "autodiff.labels",
    "load": "training.load",
    "trace": "session",
    "watch": "watching",
}
"""Where the names above are made, of those that are no modules themselves."""


_METHODS = {
    name: f"; it is a method of a watch: with gradtrace.watch(model) as watch: loss = ...; {call}"
    for name, call in {
        "conflicts": 'watch.conflicts({"ce": ce, "kl": kl})',
        "attribute": 'watch.attribute(logit, {"tokens": embedded})',
    }.items()
}
"""What to say of names that people look for here."""


class _Package(ModuleType):
    """Names are found when they are first asked for.

    To import PyTorch takes seconds, which neither ``gradtrace --help`` nor the shell's completion
    has.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _HOMES:
            value = getattr(import_module(f"gradtrace.{_HOMES[name]}"), name)
        elif name in __all__:
            value = import_module(f"gradtrace.{name}")
        else:
            how = _METHODS.get(name, "")
            raise AttributeError(f"module 'gradtrace' has no attribute {name!r}{how}")
        super().__setattr__(name, value)
        return value

    def __dir__(self) -> list[str]:
        dunders = {name for name in super().__dir__() if name.startswith("__")}
        return sorted({*dunders, *__all__})  # not the submodules that happen to be loaded


sys.modules[__name__].__class__ = _Package
