"""``decompose`` over a data set: as ``influence``, batch by batch, resumable, interruptible."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from gradtrace.autodiff.loss_checks import isolated
from gradtrace.components.components import Components, spelt
from gradtrace.distributed.dataset_influence import LossFn, RunOptions, over_batches
from gradtrace.distributed.summed_tables import SummedTables
from gradtrace.measures.decompose import decomposed
from gradtrace.table import Table
from gradtrace.tracing.counting import component_finder
from gradtrace.watch import watch


def decompose(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Any],
    *,
    components: Components = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    group: Any = None,
    sharded: bool | None = None,
) -> Table:
    """The gradient through each component, ``trace.decompose``, over a data set.

    Shares are ``Σ ⟨g_C, g⟩ / Σ ⟨g, g⟩`` over losses, with standard
    errors. Sums are kept, no gradients. Checkpoints, Ctrl-C, progress and ranks are as for
    ``gradtrace.influence``.

    Args:
        model: The model; it, its mode and its gradients are not changed.
        loss_fn: ``loss_fn(model, batch)`` returns one loss, or a vector with a loss for each
            sample.
        loader: Batches.
        components: Modules, groups or kinds of parts, as for ``Trace.influence``.
        checkpoint: File to write to after every batch; a run that finds it continues.
        progress: Whether to show a progress bar; by default on a terminal.
        group: Process group whose ranks share the batches; False is this process alone.
        sharded: Whether the loader gives each rank its own part, as one with a DistributedSampler
            does.

    Returns:
        Shares with standard errors; ``about["interrupted"]`` says whether Ctrl-C stopped it.

    >>> import torch, gradtrace as gt
    >>> _ = torch.manual_seed(0)
    >>> class Two(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.a, self.b = (torch.nn.Linear(2, 2) for _ in range(3))
    ...     def forward(self, x):
    ...         x = self.first(x)
    ...         return self.a(x) + self.b(x).tanh()
    >>> def losses(model, x):
    ...     return model(x).square().sum(1)
    >>> split = gt.decompose(Two(), losses, [torch.randn(4, 2)] * 3, components=["a", "b"])
    >>> split.about["losses"], round(split.shares["a"] + split.shares["b"], 6)
    (12, 1.0)
    """
    components = spelt(components)

    def measure(watched: watch, loss: Tensor, number: int) -> SummedTables:
        trace = watched.trace(loss)
        with isolated():  # a batch may pass none of the components
            found = decomposed(trace, component_finder(trace).choose(components), components)
        return SummedTables((Table.total([found]),))  # without the graph of the batch

    found = over_batches(
        "decomposition",
        {"components": components},
        (model, loss_fn, loader),
        measure,
        RunOptions(checkpoint, progress, group, sharded),
    )
    assert isinstance(found, SummedTables)
    return found.total()
