"""What a script's function returned: a loss, a model, a loss function, a loader, optimisers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtrace.errors import GradtraceError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gradtrace.watching import watch

LOSS = "return a loss, a model and its loss, or (model, loss_fn)"
PARTS = "return (model, loss_fn, loader), where loss_fn(model, batch) gives a loss"


def kind_of(value: Any) -> str:
    """The type of what a function returned, or the types in a tuple or list, for messages."""
    if type(value) in (tuple, list):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__


class Watched(NamedTuple):
    """A loss, the watch that saw its forward pass, and the optimisers beside it."""

    loss: Any
    watch: watch
    optimizers: list[Optimizer]


def watched(
    call: Callable[[], Any], name: str, known: Mapping[str, Any], diagnose: bool = False
) -> Watched:
    """Call a function while all modules are watched. With ``diagnose`` its loss may be a float: all
    that is asked is what is wrong with it.
    """
    from gradtrace.cli.discovery import Discovery
    from gradtrace.training.gradcheck import takes_model
    from gradtrace.watching import watch

    with Discovery(diagnose=diagnose) as discovery:
        returned = call()
    optimizers, rest = _without_optimizers(returned)
    model, rest = _parted(rest, name)
    loss = rest if diagnose and isinstance(rest, float) else _loss(rest)
    if loss is not None:
        discovery.resolve_names(loss, model, known)
        return Watched(loss, discovery, optimizers)
    if model is None or not callable(rest):
        raise GradtraceError(f"{name} returned {kind_of(returned)}; {LOSS}")
    with watch(model, diagnose=diagnose) as later:
        given = rest(model) if takes_model(rest) else rest()
    loss = _loss(given)
    if loss is None:
        raise GradtraceError(
            f"the loss_fn that {name} returned gave {kind_of(given)}, not a loss; {LOSS}"
        )
    return Watched(loss, later, optimizers)


def model_and_loss_fn(returned: Any, name: str) -> tuple[nn.Module, Callable[..., Any]]:
    """The model and the loss function, which were returned in any order."""
    from torch import nn

    _, made = _without_optimizers(returned)
    if type(made) not in (tuple, list) or len(made) != 2 or not all(map(callable, made)):
        raise GradtraceError(
            f"{name} returned {kind_of(returned)}; return (model, loss_fn): the loss is computed "
            "many times"
        )
    first, second = made
    return (first, second) if isinstance(first, nn.Module) else (second, first)


def model_loss_fn_loader(made: Any, name: str) -> tuple[Any, Any, Any]:
    """The model, the loss function and the loader, which were returned in any order."""
    from torch import nn
    from torch.utils.data import Dataset, IterableDataset

    if not isinstance(made, (tuple, list)) or len(made) != 3:
        raise GradtraceError(f"{name} returned {kind_of(made)}; {PARTS}")
    models = [x for x in made if isinstance(x, nn.Module)]
    others = [x for x in made if not isinstance(x, nn.Module)]
    loaders = [x for x in others if isinstance(x, Iterable) or hasattr(x, "__getitem__")]
    functions = [x for x in others if callable(x) and not any(x is each for each in loaders)]
    if not len(models) == len(functions) == len(loaders) == 1:
        raise GradtraceError(f"{name} returned {kind_of(tuple(made))}; {PARTS}")
    (loader,) = loaders
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise GradtraceError(
            f"{name} returned a {type(loader).__name__}, which has samples and no batches: "
            "return DataLoader(data, batch_size=...)"
        )
    return models[0], functions[0], loader


def _without_optimizers(returned: Any) -> tuple[list[Optimizer], Any]:
    """The optimisers among what a function returned, and the rest."""
    from torch.optim import Optimizer

    if type(returned) not in (tuple, list):
        return [], returned
    found = [part for part in returned if isinstance(part, Optimizer)]
    rest = [part for part in returned if not isinstance(part, Optimizer)]
    if not found:
        return [], returned
    return found, rest[0] if len(rest) == 1 else tuple(rest)


def _parted(returned: Any, name: str) -> tuple[nn.Module | None, Any]:
    """Split a return value into the model, if there is one, and the rest."""
    from torch import nn

    if not isinstance(returned, (tuple, list)) or _loss(returned) is not None:
        return None, returned
    models = [part for part in returned if isinstance(part, nn.Module)]
    rest = [part for part in returned if not isinstance(part, nn.Module)]
    if len(models) != 1 or len(rest) != 1:
        raise GradtraceError(f"{name} returned {kind_of(returned)}; {LOSS}")
    return models[0], rest[0]


def _loss(value: Any) -> Tensor | None:
    """The tensor itself, or the ``loss`` of an output or a dict."""
    from torch import Tensor, nn

    if isinstance(value, Mapping) and "loss" in value:
        value = value["loss"]
    elif not isinstance(value, (Tensor, nn.Module)):
        value = getattr(value, "loss", value)
    return value if isinstance(value, Tensor) else None
