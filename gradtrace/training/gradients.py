"""Norms of gradients after each backward pass, read a pass late where that would wait for a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf, isfinite, nan, sqrt
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradtrace.errors import listed
from gradtrace.kernels.sync import AsyncCopy

RECENT, WARM_UP = 100, 20
"""A norm is compared with the median of so many before it, once there are so many."""

SHOWN = 6
"""How many modules a report on norms names."""


class Pass(NamedTuple):
    """A backward pass whose gradient is looked at: its number in the step, and what to keep of it
    if it is bad.
    """

    micro: int
    loss: AsyncCopy
    scale: AsyncCopy | float
    scaled: bool  # by a scaler, which skips steps whose gradients are not finite
    kept: Any


Bad = Callable[[Pass, str, str, str], object]
"""Called with a bad pass: why, more words, and the module whose norm grew most."""


class Gradients:
    """Looks at losses and gradients of backward passes; ``bad`` is called for those to keep."""

    def __init__(self, model: nn.Module, spike: float, bad: Bad) -> None:
        self.model, self.spike, self._bad = model, spike, bad
        self._named = list[tuple[str, Tensor]]()
        self._recent = dict[int, deque[list[float]]]()  # norms by parameter, by number in the step
        self._late: tuple[Pass, list[AsyncCopy], list[list[int]]] | None = None
        self._lasting = ""  # what was bad in the pass before, which is told once
        self.parameters: dict[str, Tensor] | None = None  # a GPU's, as they were in ``_late``

    def follow(self, loss: Tensor, one: Pass) -> None:
        """Look at the loss, and at the gradients when its backward pass has ended."""
        if not loss.is_cuda:
            if not isfinite(value := float(one.loss.read())):
                self._found(one, "loss", f"the loss is {value}")
                return
            self._lasting = self._lasting.replace("loss", "")
        if not loss.requires_grad:
            return
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def begins(_: Tensor) -> None:  # queued twice: DDP has its own callback, queued meanwhile
            queue(lambda: queue(lambda: self._ended(one)))

        loss.register_hook(begins)  # type: ignore[no-untyped-call]

    def _ended(self, one: Pass) -> None:
        self.read()
        if not self._named:
            parameters = self.model.named_parameters()
            self._named = [(name, each) for name, each in parameters if each.requires_grad]
        found = self._norms()
        self._late = one, *found
        if any(parameter.is_cuda for _, parameter in self._named):
            self._keep_parameters()
        else:
            self.read()

    def _norms(self) -> tuple[list[AsyncCopy], list[list[int]]]:
        """The norms of gradients, by device and dtype, with the places of their parameters."""
        groups = dict[Any, list[int]]()
        for place, (_, each) in enumerate(self._named):
            if each.grad is not None:
                groups.setdefault((each.grad.device, each.grad.dtype), []).append(place)
        copies = []
        for places in groups.values():
            grads = [_values(self._named[place][1].grad) for place in places]
            half = torch.float32 if grads[0].itemsize == 2 else None
            copies.append(AsyncCopy(torch.stack(torch._foreach_norm(grads, 2, half))))
        return copies, list(groups.values())

    def _keep_parameters(self) -> None:
        """Copy the parameters: the optimiser will have moved them when this pass is judged."""
        if self.parameters is None:
            self.parameters = {name: each.detach().clone() for name, each in self._named}
        mine = list(self.parameters.values())
        torch._foreach_copy_(mine, [each.detach() for _, each in self._named])

    def read(self) -> None:
        """Judge the pass that waits, if there is one."""
        late, self._late = self._late, None
        if late is None:
            return
        one, copies, places = late
        scale = abs(float(one.scale if isinstance(one.scale, float) else one.scale.read()))
        norms = [0.0] * len(self._named)
        for copy, group in zip(copies, places):
            for place, norm in zip(group, copy.read().tolist()):
                norms[place] = norm / scale
        self._judge(one, float(one.loss.read()) / scale, norms)

    def _judge(self, one: Pass, loss: float, norms: list[float]) -> None:
        recent = self._recent.setdefault(one.micro, deque(maxlen=RECENT))
        total, usual = _norm(norms), inf
        if len(recent) >= WARM_UP:
            usual = median(map(_norm, recent))
        why = ""
        if not isfinite(loss):
            why = f"the loss is {loss}"
        elif not isfinite(total) and not one.scaled:
            bad = [name for (name, _), norm in zip(self._named, norms) if not isfinite(norm)]
            why = f"the loss is {loss:.4g} and the gradient of {listed(bad, 2)} is not finite"
        elif total > self.spike * usual > 0:
            times = f"{total / usual:,.0f} times the usual {usual:.3g}"
            why = f"the gradient has norm {total:.4g}, {times}"
        words = self._words(norms, recent) if why else ("", "")
        self._found(one, "gradient" if why else "", why, *words)
        if isfinite(total):
            recent.append(norms)

    def _found(self, one: Pass, kind: str, why: str, words: str = "", module: str = "") -> None:
        """What is bad in a pass, if anything is."""
        lasting, self._lasting = self._lasting, kind
        if kind and not lasting:
            self._bad(one, why, words, module)

    def _words(self, norms: list[float], recent: Sequence[list[float]]) -> tuple[str, str]:
        """The norms by module, now and usually, what grew most first; and the first module."""
        modules = dict[str, list[int]]()
        for place, (name, _) in enumerate(self._named):
            modules.setdefault(name.rpartition(".")[0], []).append(place)
        found = []
        for module, places in modules.items():
            now = _norm([norms[place] for place in places])
            usual = [_norm([each[place] for place in places]) for each in recent]
            found.append((now, median(usual) if usual else nan, module or "(model)"))
        found.sort(key=lambda each: -(each[0] / each[1] if each[1] > 0 else inf))
        rows = [f"{name}: {now:.3g}, usually {usual:.3g}" for now, usual, name in found[:SHOWN]]
        return "Norms of gradients by module: " + "; ".join(rows) + ".", found[0][2]


def _values(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.coalesce().values() if grad.is_sparse else grad.detach()


def _norm(norms: Sequence[float]) -> float:
    return sqrt(sum(each * each for each in norms)) if all(map(isfinite, norms)) else nan
