"""Norms of gradients after each backward pass, read a pass late where that would wait for a GPU."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import hypot, inf, isfinite, nan
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.errors import listed
from gradtrace.kernels.sync import AsyncCopy

RECENT, WARM_UP = 100, 20
"""A norm is compared with the median of so many before it, once there are so many."""

SHOWN = 6
"""How many modules a report on norms names."""


@dataclass(eq=False)
class Pass:
    """A backward pass that is looked at, and what an incident keeps of it."""

    step: int
    number: int  # in its step
    batch: Any
    began: Any
    loss: AsyncCopy
    scale: AsyncCopy
    scaled: bool  # by a scaler, which skips steps whose gradients are not finite


Norms = tuple[float, list[float]]
"""That of all gradients, and those of parameters."""


class Gradients:
    """Looks at losses and gradients of backward passes. For those to keep ``bad`` is called: with
    why, more words, the module whose norm grew most, and parameters that have moved since.
    """

    def __init__(self, model: nn.Module, spike: float, bad: Callable[..., object]) -> None:
        self.model, self.spike, self._bad = model, spike, bad
        self._named = list[tuple[str, Tensor]]()
        self._recent = defaultdict[int, deque[Norms]](lambda: deque(maxlen=RECENT))
        self._late: tuple[Pass, list[tuple[list[int], AsyncCopy]]] | None = None
        self._lasts = False  # whether the pass before was bad: what lasts is told once
        self._moved = dict[str, Tensor]()  # a GPU's, as they were in the pass that waits

    def follow(self, loss: Tensor, one: Pass) -> None:
        """Look at a pass when its backward has ended; at a loss on the CPU at once."""
        if not loss.is_cuda and not isfinite(float(one.loss.read())):
            self._judge(one, [])
        elif loss.requires_grad:
            queue = torch.autograd.Variable._execution_engine.queue_callback
            # queued twice: DDP has its own callback, queued meanwhile
            loss.register_hook(lambda _: queue(lambda: queue(lambda: self._ended(one))))  # type: ignore[no-untyped-call]

    def _ended(self, one: Pass) -> None:
        self.read()
        if not self._named:
            parameters = self.model.named_parameters()
            self._named = [(name, each) for name, each in parameters if each.requires_grad]
        self._late = one, self._norms()
        if any(parameter.is_cuda for _, parameter in self._named):
            self._keep_parameters()
        else:
            self.read()

    def _norms(self) -> list[tuple[list[int], AsyncCopy]]:
        """The norms of gradients, by device and dtype, with the places of their parameters."""
        groups = defaultdict[Any, list[tuple[int, Tensor]]](list)
        for place, (_, each) in enumerate(self._named):
            if (grad := each.grad) is not None:
                values = grad.coalesce().values() if grad.is_sparse else grad.detach()
                groups[grad.device, grad.dtype].append((place, values))
        found = []
        for (_, dtype), group in groups.items():
            places, grads = zip(*group)
            half = torch.float32 if dtype.itemsize == 2 else None
            norms = torch.stack(torch._foreach_norm(grads, 2, half))
            found.append(([*places], AsyncCopy(norms)))
        return found

    def _keep_parameters(self) -> None:
        """Copy the parameters: the optimiser will have moved them when this pass is judged."""
        if not self._moved:
            self._moved = {name: each.detach().clone() for name, each in self._named}
        mine = list(self._moved.values())
        torch._foreach_copy_(mine, [each.detach() for _, each in self._named])

    def read(self) -> None:
        """Judge the pass that waits, if there is one."""
        late, self._late = self._late, None
        if late is not None:
            one, groups = late
            norms, scale = [0.0] * len(self._named), abs(one.scale.read())
            for places, copy in groups:
                for place, norm in zip(places, (copy.read() / scale).tolist()):
                    norms[place] = norm
            self._judge(one, norms)

    def _judge(self, one: Pass, norms: list[float]) -> None:
        """Tell a bad pass with its cause, unless the one before was bad as well."""
        recent, why = self._recent[one.number], ""
        total, usual = hypot(*norms), inf
        if len(recent) >= WARM_UP:
            usual = median(each for each, _ in recent)
        loss = float(one.loss.read() / one.scale.read())
        if not isfinite(loss):
            why = f"the loss is {loss}"
        elif not isfinite(total) and not one.scaled:
            bad = [name for (name, _), norm in zip(self._named, norms) if not isfinite(norm)]
            why = f"the loss is {loss:.4g} and the gradient of {listed(bad, 2)} is not finite"
        elif 0 < self.spike * usual < total < inf:
            why = f"the gradient has norm {total:.4g}, {total / usual:,.0f} times the usual"
            why += f" {usual:.3g}"
        if why and not self._lasts:
            self._bad(one, why, *self._words(norms, recent), self._moved)
        self._lasts = bool(why)
        if norms and isfinite(total):
            recent.append((total, norms))

    def _words(self, norms: list[float], recent: Sequence[Norms]) -> tuple[str, str]:
        """The norms by module, now and usually, what grew most first; and the first module."""
        modules = defaultdict[str, list[int]](list)
        for place, (name, _) in enumerate(self._named if norms else ()):
            modules[name.rpartition(".")[0] or "(model)"].append(place)
        found = []
        for module, places in modules.items():
            each_time = [norms, *(each for _, each in recent)]
            now, *past = (hypot(*(each[n] for n in places)) for each in each_time)
            found.append((now, median(past) if past else nan, module))
        found.sort(key=lambda each: -(each[0] / each[1] if each[1] > 0 else inf))
        rows = [f"{name}: {now:.3g}, usually {usual:.3g}" for now, usual, name in found[:SHOWN]]
        if not rows:
            return "", ""
        return f"Norms of gradients by module: {'; '.join(rows)}.", found[0][2]
