"""A training step that went wrong, with all that is needed to run it again, in one file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, nan
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.errors import GradtraceError, printable
from gradtrace.io import container, schemas
from gradtrace.io.strict_json import json_value
from gradtrace.io.validation import unfit
from gradtrace.pytorch.random_state import RandomState
from gradtrace.training.forward_keeper import Call
from gradtrace.training.nested_files import decoded, encoded, missing_in, storable
from gradtrace.training.rerun import Beginning, LossOf, Rerun, called_again, same_number
from gradtrace.training.tuning import INCIDENT_BYTES

KIND = "incident"
RANDOM, STATE, DATA = "random:", "state:", "data:"
"""Beginnings of the names of tensors in the file."""

DTYPES = {str(each).removeprefix("torch."): each for each in (torch.bfloat16, torch.float16)}


@dataclass(eq=False)
class Incident:
    """A step of training at which a trigger of ``gradtrace.Monitor`` fired.

    ``print`` it to read what was found. ``step`` and ``micro`` (the backward pass of the step),
    ``rank``, ``trigger`` ("spike" or "nonfinite"), ``of`` ("loss" or "gradient"), ``evidence`` and
    ``loss`` say what was seen; ``words`` and ``diagnosis`` (as ``Diagnosis.to_dict``) what the
    rerun found; ``same`` whether it gave the loss of training bit for bit. ``batch`` is what was
    given to ``monitor.step(..., batch=)``, ``calls`` are the arguments of the model's calls.
    """

    step: int
    micro: int
    rank: int
    trigger: str
    of: str
    evidence: str
    loss: float
    scale: float
    beginning: Beginning
    calls: Sequence[Call] = ()
    has_batch: bool = False
    batch: Any = ()
    seeds: Sequence[Tensor | None] | None = None  # d loss / d output, by output of the calls
    expected: float = nan  # what a rerun by calls alone gives
    words: str = ""
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    same: bool = False
    notes: tuple[str, ...] = ()
    _tree: Any = None  # batch, calls and seeds as in the file
    _tensors: list[Tensor] = field(default_factory=list)

    def __str__(self) -> str:
        again = "the same loss" if self.same else "not the loss of training"
        ran = f"Run again, the step gave {again}." if self.words else "It was not run again."
        where = f" (process {self.rank})" if self.rank else ""
        head = f"Step {self.step:,}{where}: {self.evidence}. {ran}"
        lines = [head, *self.notes, "", *self.words.split("\n")]
        return "\n".join(map(printable, lines)).rstrip()

    def to_dict(self) -> dict[str, Any]:
        """What was seen and found, as JSON values; without batch and weights."""
        seen = {name: getattr(self, name) for name in SEEN}
        return json_value({**seen, "notes": self.notes, "diagnosis": self.diagnosis})  # type: ignore[no-any-return]

    # Running it again ----------------------------------------------------------------------------

    def load_into(self, model: nn.Module) -> None:
        """Set parameters, buffers and modes of a model, and all random number generators, to what
        they were at the beginning of the step.

        Args:
            model: Model of the same structure; it is changed.
        """
        self.beginning.load(model)

    def rerun(
        self, model: nn.Module, loss_of: LossOf | None = None, *, composed: bool | None = None
    ) -> Rerun:
        """Run the step again with this model, and diagnose it.

        The model gets the weights of the step for the time of the rerun; nothing is left changed. A
        file without weights is run with those that the model has.

        Args:
            model: Model of the same structure.
            loss_of: Computes the loss from the batch, as ``rerun=`` of ``monitor.step`` did;
                without it the model is called with the arguments of training.
            composed: As for ``gradtrace.watch``; None is False where all parameters are on the CPU.

        Returns:
            Its loss, its diagnosis, and whether the loss has the same bits as in training.
        """
        batch, calls, seeds = self._data(model)
        given = batch if loss_of is not None and self.has_batch else calls
        for absent in missing_in(given)[:1]:
            raise GradtraceError(
                f"the batch has a {absent.what}, which files cannot hold: put it into "
                "incident.batch and run it again, or pass batch= of tensors, numbers and text"
            )

        def compute() -> Any:
            if loss_of is None:
                return called_again(model, calls, seeds)
            if not self.has_batch:
                return loss_of()
            return loss_of(*batch) if isinstance(batch, tuple) else loss_of(batch)

        value, diagnosis = self.beginning.run(model, compute, composed)
        return Rerun(value, diagnosis, self._is_same(value, loss_of is None))

    def _data(self, model: nn.Module) -> tuple[Any, Any, Any]:
        """Batch, calls and seeds on the model's device."""
        if self._tree is None:
            return self.batch, self.calls, self.seeds
        device = next((each.device for each in model.parameters()), None)
        batch, calls, seeds = decoded(self._tree, self._tensors, device)
        given = self.batch if missing_in(batch) else batch  # what the user has put in
        return given, [Call(*each) for each in calls], seeds

    def _is_same(self, value: float, by_calls: bool) -> bool:
        """Whether a loss is that of training; with the scale that it had there, or without."""
        if by_calls:
            return same_number(value, self.expected)
        if same_number(value, self.loss):
            return True
        scaled = (value, value / self.scale) if self.scale != 1 else ()
        return any(isclose(each, self.loss, rel_tol=1e-6) for each in scaled)

    def found(self, rerun: Rerun) -> None:
        """Keep what a rerun has found."""
        self.words, self.diagnosis = str(rerun.diagnosis), rerun.diagnosis.to_dict()
        self.same = rerun.same

    # Files ---------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], most: int = INCIDENT_BYTES) -> None:
        """Write one file; what would exceed ``most`` is left out with a note, weights first, then
        the batch.

        Args:
            path: File to write.
            most: About the most bytes that it may have.
        """
        tensors: list[Tensor] = []
        calls = [[list(call.args), call.kwargs] for call in self.calls]
        batch = self.batch if self.has_batch else None
        tree = encoded([batch, calls, self.seeds], tensors)
        notes = list(self.notes)
        if _bytes(tensors) > most:
            tree, tensors = encoded([None, [], None], []), []
            notes.append(f"The batch is not in this file: it is over {most:,} bytes.")
        state = {n: tensor for n, tensor in self.beginning.state.items() if storable(tensor)}
        if len(state) < len(self.beginning.state):
            notes.append("Parameters that are sharded, sparse or complex are not in this file.")
        if _bytes(state.values()) + _bytes(tensors) > most:
            notes.append(
                f"The weights are not in this file: they have {_bytes(state.values()):,} bytes, "
                f"over {most:,} (incident_bytes= of the Monitor)."
            )
            state = {}
        self.notes = tuple(notes)
        held = {f"{RANDOM}{n}": each for n, each in self.beginning.random.tensors().items()}
        held |= {f"{STATE}{name}": each for name, each in state.items()}
        held |= {f"{DATA}{n}": each for n, each in enumerate(tensors)}
        container.write(path, KIND, self._meta(tree), held)

    def _meta(self, tree: Any) -> dict[str, Any]:
        names = {dtype: name for name, dtype in DTYPES.items()}
        autocast = self.beginning.autocast
        return {
            **{name: getattr(self, name) for name in SEEN},
            "notes": list(self.notes),
            "diagnosis": json_value(self.diagnosis),
            "evaluating": list(self.beginning.evaluating),
            "autocast": {kind: names[dtype] for kind, dtype in autocast.items() if dtype in names},
            "data": tree,
        }


SEEN = (
    *("step", "micro", "rank", "trigger", "of", "evidence", "loss", "scale", "has_batch"),
    *("expected", "words", "same"),
)
"""Fields that are metadata as they are."""


def load_incident(path: str | os.PathLike[str]) -> Incident:
    """Read a file that a trigger of ``gradtrace.Monitor`` has written; ``print`` it to read it.

    ``found.rerun(model, loss_of)`` runs the step again. Nothing in a file is executed.

    Args:
        path: File that a trigger wrote.

    Returns:
        The step as it was kept: batch, random state, weights and diagnosis, as far as the file has
        them.
    """
    with container.about(path):
        contents = container.read(path, KIND, schemas.INCIDENT)
        meta, tensors = contents.meta, contents.tensors
        parts = {kind: _part(tensors, kind) for kind in (RANDOM, STATE, DATA)}
        data = list(parts[DATA].values())
        if sum(map(len, parts.values())) != len(tensors) or list(parts[DATA]) != [
            str(n) for n in range(len(data))
        ]:
            unfit("its tensors are others")
        batch, calls, seeds = _parsed(meta["data"], data)
        try:
            random = RandomState.of(parts[RANDOM])
        except ValueError as error:
            unfit(str(error))
        autocast = {kind: DTYPES[name] for kind, name in meta["autocast"].items()}
        beginning = Beginning(random, autocast, parts[STATE], meta["evaluating"])
        return Incident(
            **{name: meta[name] for name in SEEN},
            beginning=beginning,
            batch=batch,
            calls=[Call(*each) for each in calls],
            seeds=seeds,
            diagnosis=meta["diagnosis"],
            notes=tuple(meta["notes"]),
            _tree=meta["data"],
            _tensors=data,
        )


def _part(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    found = tensors.items()
    return {name.removeprefix(kind): each for name, each in found if name.startswith(kind)}


def _parsed(tree: Any, tensors: list[Tensor]) -> tuple[Any, list[Any], Any]:
    found = decoded(tree, tensors)
    if type(found) is not list or len(found) != 3:
        unfit("the batch is none that was written")
    batch, calls, seeds = found
    for call in calls if type(calls) is list else [None]:
        if type(call) is not list or [type(each) for each in call] != [list, dict]:
            unfit("a call is none that was written")
    each_fits = type(seeds) is list and all(
        each is None or isinstance(each, Tensor) for each in seeds
    )
    if seeds is not None and not each_fits:
        unfit("the gradients of the outputs are none that were written")
    return batch, calls, seeds


def _bytes(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
