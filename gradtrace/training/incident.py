"""An incident: a training step that went wrong, with all that is needed to look at it again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gradtrace.diagnosis.result import Diagnosis, Finding
from gradtrace.errors import BadFile, GradtraceError, printable
from gradtrace.files import naming, replacing
from gradtrace.pytorch.wrapped_modules import unwrapped
from gradtrace.training.gradients import Pass
from gradtrace.training.state import State, set_state, state_of, undisturbed
from gradtrace.types import unravel
from gradtrace.watching import watch

LossFn: TypeAlias = Callable[[nn.Module, Any], Tensor]
"""Computes the loss of a batch: ``loss_fn(model, batch)``."""

ADVICE = "look at the batch first: a spike by values far from the others is no fault of the model"
SHOWN = 4
"""How many tensors of a batch are described."""


def beginning(model: nn.Module) -> State:
    """What a forward pass begins with: buffers, modes, random states and autocast."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    autocast = {kind: str(torch.get_autocast_dtype(kind)).partition(".")[2] for kind in kinds}
    return {**state_of(unwrapped(model)), "autocast": autocast}


@dataclass(eq=False)
class Incident:
    """A step at which a ``Monitor`` saw a loss or a gradient that was not finite, or a spike.

    ``print`` it to read it. ``why`` is what was seen, ``words`` what was known of it then, and
    ``module`` that whose norm grew most; ``batch`` is what ``monitor.step(loss, batch=)`` was
    given, ``left_out`` what of it no file can hold; ``state`` has parameters and buffers as they
    were before the forward pass, and ``began`` all else that it began with.
    """

    step: int
    why: str
    words: str
    module: str
    batch: Any
    left_out: list[str]
    state: dict[str, Any]
    began: State

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
        try:
            model.load_state_dict(self.state)
        except RuntimeError as error:
            raise GradtraceError(f"the incident is of another model: {error}") from error
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
        batch = tree_map_only(Tensor, lambda x: x.to(device), self.batch)
        with undisturbed(model), ExitStack() as stack:
            stack.callback(model.load_state_dict, deepcopy(model.state_dict()))
            self.load_into(model)
            for kind, dtype in self.began["autocast"].items():
                stack.enter_context(torch.autocast(kind, getattr(torch, dtype)))
            stack.enter_context(torch.enable_grad())
            with watch(model, diagnose=True, composed=device.type != "cpu") as watched:
                loss = loss_fn(model, batch)
            found: Diagnosis = watched.diagnose(loss)
        title, seen = f"step {self.step:,}: {self.why}", self.words.replace("\n", " ")
        ours = Finding("incident", "warning", title, self.module, evidence=seen, advice=ADVICE)
        return found if found.nonfinite else replace(found, findings=(ours, *found.findings))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the incident, whole or not at all.

        Args:
            path: File to write.
        """
        with replacing(path) as new:
            torch.save({"gradtrace": "incident", "version": 1, **vars(self)}, new)


def made(
    model: nn.Module, one: Pass, why: str, words: str, module: str, moved: Mapping[str, Tensor]
) -> Incident:
    """The incident of a pass; ``moved`` has parameters as they were, where they have moved."""
    left_out = list[str]()
    batch = storable(one.batch, left_out)
    words = "\n".join(filter(None, [words, *(f"Of the batch: {each}." for each in ranges(batch))]))
    now = unwrapped(model).state_dict()
    before = {**moved, **one.began["buffers"]}
    state = storable({name: before.get(name, each) for name, each in now.items()}, [])
    began = storable(one.began, [])
    return Incident(one.step, why, words, module, batch, left_out, state, began)


def load_incident(path: str | os.PathLike[str]) -> Incident:
    """Read a file that a ``Monitor`` has kept of a step; nothing in it is executed.

    Args:
        path: A file in the Monitor's ``folder``.

    Returns:
        The incident.
    """
    with naming(path, "read") as at, open(at, "rb") as file:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torn files raise half a dozen kinds
            raise BadFile(f"{os.fspath(path)!r} is torn, or no incident: {error}") from error
    if not isinstance(found, dict) or found.pop("gradtrace", "") != "incident":
        raise BadFile(f"{os.fspath(path)!r} is no incident of a gradtrace.Monitor")
    if found.pop("version") != 1:
        raise BadFile(f"{os.fspath(path)!r} is of a newer gradtrace: update gradtrace")
    return Incident(**found)


# What a file can hold -----------------------------------------------------------------------------


def storable(value: Any, left_out: list[str], name: str = "batch") -> Any:
    """What of a value a file can hold, on the CPU; ``left_out`` gets names and types of the rest.

    >>> left_out = []
    >>> storable({"x": (1, "a"), "f": len}, left_out), left_out
    ({'x': (1, 'a'), 'f': None}, ['f (builtin_function_or_method)'])
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    for plain in (bool, int, float, str):  # of a subclass, the plain value
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, Mapping):
        return {key: storable(each, left_out, str(key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [storable(each, left_out, f"{name}[{n}]") for n, each in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if value is not None:
        left_out.append(f"{name} ({type(value).__name__})")
    return None


def ranges(batch: Any) -> Iterator[str]:
    """A line on the numbers of each tensor of a batch, of the first few."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and not x.is_complex()]
    for x in tensors[:SHOWN]:
        kind = str(x.dtype).removeprefix("torch.")
        yield f"{kind} of shape {tuple(x.shape)}, {_range(x)}"


def _range(x: Tensor) -> str:
    finite = x[x.isfinite()].double()
    if not finite.numel():
        return "none of it finite"
    text, lost = f"{finite.min():.4g} to {finite.max():.4g}", x.numel() - finite.numel()
    text += f", {lost:,} not finite" if lost else ""
    size, usual = float(finite.abs().max()), float(finite.abs().median())
    if x.is_floating_point() and size > 100 * usual > 0:
        place = unravel(int(x.double().nan_to_num(0, 0, 0).abs().argmax()), tuple(x.shape))
        text += f"; that at {place} is {size / usual:,.0f} times the median |value|"
    return text
