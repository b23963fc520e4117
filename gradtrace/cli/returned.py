"""What a script's function returned: a model, a loss or a function for it, a loader, optimisers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gradtrace.errors import GradtraceError

if TYPE_CHECKING:
    from gradtrace.watching import watch

LOSS = (("loss",), ("model", "loss"), ("model", "loss_fn"))
"""What functions may return if one loss is asked about."""


def parts(returned: Any, target: str, *forms: tuple[str, ...]) -> dict[str, Any]:
    """What a function returned, by kind, and a list of the ``optimizers`` beside it.

    All but optimisers must be what one of the ``forms`` names; the order does not matter.
    """
    given = returned if type(returned) in (tuple, list) else (returned,)
    named = [(kind_of(each), each) for each in given]
    found = {kind: each for kind, each in named if kind != "optimizer"}
    optimizers = [each for kind, each in named if kind == "optimizer"]
    if {*found} not in map(set, forms) or len(found) + len(optimizers) < len(named):
        told, *wanted = map(_listed, ([type(each).__name__ for each in given], *forms))
        raise GradtraceError(f"{target} returned {told}; return {' or '.join(wanted)}")
    return {**found, "optimizers": optimizers}


def _listed(names: Iterable[str]) -> str:
    """``name``, or ``(name, name)``."""
    text = ", ".join(names)
    return f"({text})" if "," in text else text


def kind_of(value: Any) -> str:
    """What one thing that was returned is."""
    from torch import Tensor, nn
    from torch.optim import Optimizer

    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(loss_in(value), (Tensor, float)):
        return "loss"
    if isinstance(value, Iterable) or hasattr(value, "__getitem__"):
        return "loader"
    return "loss_fn" if callable(value) else "nothing known"


def loss_in(value: Any) -> Any:
    """The ``loss`` of a dict or of a model's output; what has none is itself the loss."""
    if isinstance(value, Mapping):
        return value.get("loss", value)
    return getattr(value, "loss", value)


def watched(
    call: Callable[[], Any], target: str, known: Mapping[str, Any], diagnose: bool
) -> tuple[Any, watch, list[Any]]:
    """The loss that a function returns, or its ``loss_fn``; the watch that saw it being computed;
    and the optimisers. A model that is not returned is looked for in what is ``known``.
    """
    from gradtrace.cli.discovery import Discovery
    from gradtrace.training.gradcheck import takes_model
    from gradtrace.watching import watch

    with Discovery(diagnose=diagnose) as discovery:
        returned = call()
    found = parts(returned, target, *LOSS)
    if "loss" in found:
        loss = loss_in(found["loss"])
        discovery.resolve_names(loss, found.get("model"), known)
        return loss, discovery, found["optimizers"]
    model, loss_fn = found["model"], found["loss_fn"]
    with watch(model, diagnose=diagnose) as seen:
        loss = loss_in(loss_fn(model) if takes_model(loss_fn) else loss_fn())
    return loss, seen, found["optimizers"]
