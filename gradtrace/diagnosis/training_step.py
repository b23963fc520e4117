"""What else keeps a model from learning, beside its gradient: the optimiser, gradients that are
left over, the mode of its modules; and what a diagnosis has not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, sqrt

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtrace.diagnosis.result import Finding, listed
from gradtrace.pytorch.plain_tensors import PLAIN
from gradtrace.pytorch.wrapped_modules import named_modules

Named = Sequence[tuple[str, Tensor]]

SAME_DIRECTION = 0.999
"""Gradients whose cosine is larger differ by a scale only: that of a GradScaler."""

LEFT_OVER_FACTOR = 10.0
"""``.grad`` that is so many times as long as the gradient is a sum over many losses. It may be as
long as that of the step before, where zero_grad() is called after the loss is computed."""

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
NORMS = nn.modules.batchnorm._NormBase


def optimiser_findings(optimizers: Sequence[Optimizer], parameters: Named) -> Iterator[Finding]:
    """Parameters that no optimiser has, and learning rates of 0."""
    if not optimizers:
        return
    groups = [group for each in optimizers for group in each.param_groups]
    held = {id(tensor): group for group in groups for tensor in group["params"]}
    wanted = [(name, tensor) for name, tensor in parameters if tensor.requires_grad]
    if missing := tuple(name for name, tensor in wanted if id(tensor) not in held):
        strange = len(held.keys() - {id(tensor) for _, tensor in parameters})
        other = f" It has {strange:,} tensors that are not of this model." if strange else ""
        yield Finding(
            "optimiser",
            "error",
            f"not in the optimiser: {listed(missing)}",
            missing[0].rpartition(".")[0],
            missing,
            evidence="They require grad, but no group of the optimiser has them, so that no step "
            f"moves them.{other}",
            advice="make the optimiser of model.parameters() after the model has all its modules "
            "and lies on its device"
            + (", and not of a copy of it." if strange else "; freeze what is meant to rest."),
        )
    for scheduled in (False, True):
        still = [
            name
            for name, tensor in wanted
            if (group := held.get(id(tensor))) is not None
            and float(group["lr"]) == 0.0
            and bool(group.get("initial_lr", 0.0)) is scheduled
        ]
        if still:
            yield _no_rate(tuple(still), scheduled)


def _no_rate(names: tuple[str, ...], scheduled: bool) -> Finding:
    return Finding(
        "learning rate",
        "note" if scheduled else "error",
        f"the learning rate is 0: {listed(names)}",
        parameters=names,
        evidence="A scheduler has set it to 0 for now."
        if scheduled
        else "The optimiser moves them by lr times their gradient, which is nothing.",
        advice="usually none, if this is the begin of a warm-up or the end of training."
        if scheduled
        else "set lr of the optimiser (and of each of its groups) above 0.",
    )


def left_over(parameters: Named, gradients: Mapping[int, Tensor]) -> Iterator[Finding]:
    """``.grad`` that is much longer than the gradient of this loss, and another one."""
    pairs = [
        (tensor.grad, gradients[id(tensor)])
        for _, tensor in parameters
        if id(tensor) in gradients and type(tensor.grad) in PLAIN
    ]
    dense = [(a.detach(), b) for a, b in pairs if a is not None and a.layout is b.layout]
    sums = [_products(a, b) for a, b in dense if a.layout is torch.strided and a.shape == b.shape]
    held, own, both = (sum(column) for column in zip(*sums)) if sums else (0.0, 0.0, 0.0)
    longer = 0 < own * LEFT_OVER_FACTOR**2 < held < inf
    if not longer or both > SAME_DIRECTION * sqrt(held * own):
        return
    yield Finding(
        "left over",
        "note",
        "gradients of many losses have been added up",
        evidence=f".grad has a norm of {sqrt(held):.2g}, {sqrt(held / own):,.0f} times that of the "
        "gradient of this loss, and loss.backward() adds to it.",
        advice="none, if gradients are accumulated over several batches; else call "
        "optimizer.zero_grad() in every step.",
    )


def _products(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """``Σ a²``, ``Σ b²``, ``Σ ab``."""
    x, y = a.double().reshape(-1), b.detach().to(a.device).double().reshape(-1)
    return float(x @ x), float(y @ y), float(x @ y)


def not_training(roots: Iterable[nn.Module]) -> Iterator[Finding]:
    """Modules that do something else in training, all of which are in evaluation mode."""
    modules = [(name, module) for root in roots for name, module in named_modules(root)]
    dropouts = [(n, m) for n, m in modules if isinstance(m, DROPOUTS) and m.p > 0]
    norms = [(n, m) for n, m in modules if isinstance(m, NORMS) and m.running_mean is not None]
    found = dropouts + norms
    if not found or any(module.training for _, module in modules):
        return
    off = "dropout does nothing" if dropouts else ""
    fixed = "batch norms use the statistics of earlier batches, and keep them" if norms else ""
    yield Finding(
        "mode",
        "note",
        "the model is in evaluation mode",
        found[0][0],
        evidence=f"{' and '.join(filter(None, (off, fixed)))} "
        f"(modules {listed(tuple(name for name, _ in found))}).".capitalize(),
        advice="call model.train() before training; none, if it is meant so.",
    )


def frozen_remark(parameters: Named) -> str:
    """Which parameters do not require grad; empty if all do."""
    names = tuple(name for name, tensor in parameters if not tensor.requires_grad)
    if not names:
        return ""
    count = sum(t.numel() for _, t in parameters if not t.requires_grad)
    total = sum(t.numel() for _, t in parameters)
    return (
        f"Frozen (requires_grad=False), so it does not learn: {listed(names)}; {count:,} of "
        f"{total:,} elements."
    )


def scope_remark(parameters: Named, optimiser: bool, left_out: Sequence[str]) -> str:
    """What "healthy" is about, and what was not looked at (``left_out``: because of this run)."""
    count = sum(tensor.requires_grad for _, tensor in parameters)
    rest = [] if optimiser else ["the optimiser (none was given: optimizer=)"]
    rest += ["whether labels and data are right", "other batches", *left_out]
    return (
        f"Looked at: the loss of this batch, and its gradient at {count:,} "
        f"parameter{'s' if count != 1 else ''}{', and the optimiser' if optimiser else ''}. "
        f"Not looked at: {', '.join(rest)}."
    )
