"""An incident: a training step that went wrong, with all that is needed to look at it again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradtrace.diagnosis.result import Diagnosis, Finding
from gradtrace.errors import BadFile, GradtraceError, did_you_mean, printable
from gradtrace.files import naming, replacing
from gradtrace.training.state import State, set_state, state_of, undisturbed
from gradtrace.types import unravel
from gradtrace.watching import watch

LossFn: TypeAlias = Callable[[nn.Module, Any], Tensor]
"""Computes the loss of a batch: ``loss_fn(model, batch)``."""

WRAPPED = {"DistributedDataParallel": "module", "DataParallel": "module"}
WRAPPED["OptimizedModule"] = "_orig_mod"
FINDING = ("kind", "severity", "title", "module", "evidence", "advice")
ADVICE = "look at the batch first: a spike by values far from the others is no fault of the model"
SHOWN = 4
"""How many tensors of a batch are described."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module, whose names a state_dict has."""
    while (name := WRAPPED.get(type(model).__name__)) is not None:
        model = getattr(model, name)
    return model


def beginning(model: nn.Module) -> State:
    """What a forward pass begins with: buffers, modes, random states and autocast."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    autocast = {kind: str(torch.get_autocast_dtype(kind)).partition(".")[2] for kind in kinds}
    return {**state_of(unwrapped(model)), "autocast": autocast}


@dataclass(eq=False)
class Incident:
    """A step at which a ``Monitor`` saw a loss or a gradient that was not finite, or a spike.

    ``print`` it to read it. ``why`` is what was seen, ``words`` what was known of it then;
    ``batch`` is what ``monitor.step(loss, batch=)`` was given, ``left_out`` what of it no file can
    hold; ``state`` has parameters and buffers as they were before the forward pass.
    """

    step: int
    why: str
    words: str
    batch: Any
    left_out: tuple[str, ...]
    state: Mapping[str, Tensor]
    began: State
    findings: Sequence[Mapping[str, Any]] = ()

    def __str__(self) -> str:
        lost = [f"Left out of the batch: {', '.join(self.left_out)}."] if self.left_out else []
        lines = [f"Step {self.step:,}: {self.why}", *self.words.split("\n"), *lost]
        return "\n".join(map(printable, lines)).rstrip()

    def load_into(self, model: nn.Module) -> None:
        """Set parameters, buffers, modes and all random generators to what they were before the
        step.

        Args:
            model: A model of the same structure; it is changed.
        """
        model = unwrapped(model)
        there = model.state_dict()
        for name, tensor in self.state.items():
            if name not in there:
                raise GradtraceError(f"the model has no {name!r}{did_you_mean(name, there)}")
            if there[name].shape != tensor.shape:
                sizes = tuple(tensor.shape), tuple(there[name].shape)
                raise GradtraceError(f"{name!r} had shape {sizes[0]} and has {sizes[1]} here")
        model.load_state_dict(self.state, strict=False)
        set_state(model, self.began)

    def diagnose(self, model: nn.Module, loss_fn: LossFn) -> Diagnosis:
        """Run the forward pass of the step again, and say what is wrong with it.

        Args:
            model: A model of the same structure; it is left as it was.
            loss_fn: ``loss_fn(model, batch)`` computes the loss, as in training.

        Returns:
            The findings; of a spike, what the Monitor saw comes first.
        """
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        with undisturbed(model), _parameters_kept(model), ExitStack() as stack:
            self.load_into(model)
            for kind, dtype in self.began["autocast"].items():
                stack.enter_context(torch.autocast(kind, getattr(torch, dtype)))
            stack.enter_context(torch.enable_grad())
            with watch(model, diagnose=True, composed=device.type != "cpu") as watched:
                loss = loss_fn(model, _moved(self.batch, device))
            found: Diagnosis = watched.diagnose(loss)
        seen = tuple(Finding(**each) for each in self.findings)
        return found if found.nonfinite else replace(found, findings=(*seen, *found.findings))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the incident, whole or not at all.

        Args:
            path: File to write; its folder is made.
        """
        with naming(path, "written") as at:
            at.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            torch.save({"gradtrace": "incident", "version": 1, **vars(self)}, new)


def made(
    model: nn.Module,
    step: int,
    why: str,
    words: str,
    module: str,
    batch: Any,
    began: State,
    parameters: Mapping[str, Tensor],
) -> Incident:
    """The incident of a step; ``parameters`` as they were, where they have moved since."""
    kept, lost = storable(batch)
    evidence = [*([words] if words else []), *(f"Of the batch: {each}." for each in ranges(kept))]
    state, _ = storable(unwrapped(model).state_dict())
    before, _ = storable({**parameters, **began["buffers"]})
    state |= {name: each for name, each in before.items() if name in state}
    key, keys, *rest = began["numpy"]
    began, _ = storable({**began, "numpy": [key, [*map(int, keys)], *rest]})
    title, seen = f"step {step:,}: {why}", " ".join(evidence)
    finding = dict(zip(FINDING, ("incident", "warning", title, module, seen, ADVICE)))
    return Incident(step, why, "\n".join(evidence), kept, tuple(lost), state, began, [finding])


def load_incident(path: str | os.PathLike[str]) -> Incident:
    """Read a file that a ``Monitor`` has kept of a step; nothing in it is executed.

    Args:
        path: A file in the Monitor's ``folder``.

    Returns:
        The incident.
    """
    with naming(path, "read") as at:
        size = at.stat().st_size
    try:
        found = torch.load(at, map_location="cpu", weights_only=True) if size else {}
    except Exception as error:  # torn files raise half a dozen kinds
        raise BadFile(f"{os.fspath(path)!r} is torn, or no incident: {error}") from error
    if not isinstance(found, dict) or found.pop("gradtrace", "") != "incident":
        raise BadFile(f"{os.fspath(path)!r} is no incident of a gradtrace.Monitor")
    if found.pop("version") != 1:
        raise BadFile(f"{os.fspath(path)!r} is of a newer gradtrace: update gradtrace")
    return Incident(**found)


@contextmanager
def _parameters_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards parameters are as before."""
    before = [(each, each.detach().clone()) for each in model.parameters()]
    try:
        yield
    finally:
        for parameter, value in before:
            parameter.data.copy_(value)


# What a file can hold -----------------------------------------------------------------------------


def storable(value: Any, name: str = "batch") -> tuple[Any, list[str]]:
    """What of a value a file can hold, on the CPU, and what is left out: its name and its type.

    >>> storable({"x": (1, "a"), "f": len})
    ({'x': (1, 'a')}, ['f (builtin_function_or_method)'])
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True), []
    for plain in (bool, int, float, str):  # of a subclass, the plain value
        if isinstance(value, plain):
            return plain(value), []
    if value is None:
        return None, []
    if isinstance(value, Mapping):
        items = {key: storable(each, str(key)) for key, each in value.items()}
        held = {key: part for key, (part, lost) in items.items() if part is not None or not lost}
        return held, list(chain.from_iterable(lost for _, lost in items.values()))
    if isinstance(value, (list, tuple)):
        found = [storable(each, f"{name}[{n}]") for n, each in enumerate(value)]
        parts = [part for part, _ in found]
        kept = tuple(parts) if isinstance(value, tuple) else parts
        return kept, list(chain.from_iterable(lost for _, lost in found))
    return None, [f"{name} ({type(value).__name__})"]


def ranges(batch: Any) -> Iterator[str]:
    """A line on the numbers of each tensor of a batch, of the first few."""
    for tensor in _tensors(batch)[:SHOWN]:
        if tensor.numel():
            kind = str(tensor.dtype).removeprefix("torch.")
            yield f"{kind} of shape {tuple(tensor.shape)}, {_range(tensor.detach())}"


def _range(x: Tensor) -> str:
    if x.is_complex() or x.dtype == torch.bool:
        return "complex or bool"
    finite = x[x.isfinite()].double()
    bad = f", {x.numel() - finite.numel():,} not finite" if finite.numel() < x.numel() else ""
    if not finite.numel():
        return "none of it finite"
    low, high = float(finite.min()), float(finite.max())
    text = f"{low:.4g} to {high:.4g}{bad}"
    size, usual = float(finite.abs().max()), float(finite.abs().median())
    if x.is_floating_point() and size > 100 * usual > 0:
        at = int(x.double().abs().nan_to_num(0, 0, 0).argmax())
        place = unravel(at, tuple(x.shape))
        text += f"; that at {place} is {size / usual:,.0f} times the median |value|"
    return text


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, Mapping) else value
    several = isinstance(inside, (list, tuple)) or isinstance(value, Mapping)
    return [x for each in inside for x in _tensors(each)] if several else []


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    return type(value)(_moved(x, device) for x in value) if type(value) in (list, tuple) else value
