"""``Session``: what can be asked of a loss, by the names of leaves and modules that are known."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.backward import RECENT, gradient, seed_of
from gradtrace.autodiff.loss_checks import admit, isolated
from gradtrace.autodiff.names import Gradients, LazyGradients, NameTable
from gradtrace.autodiff.traversal import walk
from gradtrace.errors import (
    GradtraceError,
    NonFinite,
    NotScalar,
    UnknownName,
    Unsupported,
    not_one_of,
)
from gradtrace.graphs.graph import Graph, build
from gradtrace.ir import interpreter, memory
from gradtrace.ir.nonfinite import maybe_nonfinite, refuse_nonfinite
from gradtrace.ir.optimise import simplified
from gradtrace.ir.program import Program
from gradtrace.kernels import backend_of
from gradtrace.pytorch.fsdp import ShardedModel
from gradtrace.recording.record import DENSE_MAX_ENTRIES, record
from gradtrace.recording.sharded import recorder_of
from gradtrace.semirings import SUM, Semiring
from gradtrace.trace import Trace
from gradtrace.types import RULES

T = TypeVar("T")

KEPT_MIN_BYTES = 1 << 24
"""The least number of bytes of gradients that a trace may keep."""


class Session:
    """Answers questions about losses, by the names of leaves and modules that it knows.

    Without a model these are the ``names`` of leaves; the functions of ``gradtrace.api`` are such
    sessions of one question.
    """

    _frames = 4  # from a warning to the user: this method, ``isolated``, the function, its caller

    def __init__(self, names: Mapping[str, Tensor] | None = None) -> None:
        self.name_table = NameTable.of(names)
        self._hooks = RECENT

    def _classes(self) -> Mapping[str, str]:
        """The class of each module, by name."""
        return {}

    def graph(self, loss: Tensor) -> Graph:
        """The computation graph behind the loss, with the module of each operator."""
        return build(loss, self.name_table, self._hooks)

    @isolated()
    def backward(
        self,
        loss: Tensor,
        semiring: Semiring = SUM,
        *,
        leaves: Iterable[str] | None = None,
        cotangent: Tensor | None = None,
        schedule: str = "kahn",
        nonfinite: str = "raise",
    ) -> Gradients:
        """``{name: value}`` for every leaf; see ``gradtrace.backward``."""
        if not isinstance(semiring, Semiring):
            raise GradtraceError(
                f"{semiring!r} is no semiring; pass one of gradtrace.semirings, such as "
                "gradtrace.semirings.MAX, or a subclass of gradtrace.semirings.Semiring"
            )
        _one_of("nonfinite", nonfinite, "raise", "allow")
        if isinstance(leaves, str):
            raise UnknownName(f"leaves is a list of names: leaves=[{leaves!r}]")
        table, hooks = self.name_table, self._hooks
        admit(loss, table, elements=semiring is not SUM)
        seed = seed_of(loss, cotangent)
        notes: tuple[str, ...] = ()
        if semiring is SUM:
            found = gradient(loss, seed, table, hooks, schedule)
            RECENT.refresh()
        else:
            memory.see_recording(loss)
            recorded = self._recorded(loss, seed, schedule, bare=True)
            found = list(interpreter.run(recorded, semiring).items())
            notes = tuple(dict.fromkeys(recorded.notes()))
        named = Gradients(*_named(found, table, loss), notes)
        if leaves is not None:
            named = Gradients({name: named[name] for name in leaves}, notes=notes)
        if notes:
            text = f"values of {semiring.name} are not exact. {'; '.join(notes)}"
            warnings.warn(text, stacklevel=self._frames)
        if semiring is SUM and nonfinite == "raise":
            with same_on_all_ranks(table.sharded):
                refuse_nonfinite(named, loss, seed, table, hooks)
        return named

    @isolated()
    def program(
        self,
        loss: Tensor,
        *,
        cotangent: Tensor | None = None,
        schedule: str = "kahn",
        dense_limit: int = DENSE_MAX_ENTRIES,
    ) -> Program:
        """The backward program of the loss; see ``gradtrace.program``."""
        admit(loss, self.name_table)
        return self._recorded(loss, seed_of(loss, cotangent), schedule, dense_limit)

    @isolated()
    def trace(
        self,
        loss: Tensor,
        *,
        rule: str = "greedy",
        granularity: str = "scalar",
        nonfinite: str = "raise",
        dense_limit: int = DENSE_MAX_ENTRIES,
    ) -> Trace:
        """The paths of the loss's gradient; see ``gradtrace.trace``."""
        _one_of("nonfinite", nonfinite, "raise", "allow")
        _one_of("rule", rule, *RULES)
        _one_of("granularity", granularity, "scalar", "operator")
        table, hooks = self.name_table, self._hooks
        admit(loss, table)
        if loss.dim() > 1:
            raise NotScalar(
                f"the loss has shape {tuple(loss.shape)}; trace one loss, or a vector with a loss "
                "for each sample, such as losses.flatten(1).mean(1)"
            )
        if not loss.numel():
            raise NotScalar("the loss is an empty vector; there is nothing to trace")
        seed = torch.ones_like(loss, memory_format=torch.preserve_format).detach()
        opaque, keep = granularity == "operator", kept_gradient_bytes(table, loss.device)
        memory.see_recording(loss, keep)
        recorded = self._recorded(loss, seed, "kahn", dense_limit, opaque, keep)
        named, aliases = _named([(leaf.tensor, leaf) for leaf in recorded.leaves], table, loss)
        gradients = LazyGradients({name: leaf.compute for name, leaf in named.items()}, aliases)
        if nonfinite == "raise":
            doubtful = {name: gradients[name] for name in maybe_nonfinite(named)}
            with same_on_all_ranks(table.sharded):
                refuse_nonfinite(doubtful, loss, seed, table, hooks)
        names = {leaf.value: name for name, leaf in named.items()}
        return Trace(recorded, gradients, rule, granularity, loss.numel(), self._classes(), names)

    def _recorded(self, loss: Tensor, seed: Tensor, *options: Any, **more: Any) -> Program:
        """The program of a loss; the options are those of ``record``."""
        more["make"] = recorder_of(loss, self.name_table)
        found = simplified(record(loss, seed, self.name_table, self._hooks, *options, **more))
        RECENT.refresh()
        return found


@contextmanager
def same_on_all_ranks(model: ShardedModel | None) -> Iterator[None]:
    """Raise ``NonFinite`` on all ranks that share a sharded model if one raises it within.

    Ranks gather parameters together, so that none may go on without the others.
    """
    found: NonFinite | None = None
    try:
        yield
    except NonFinite as error:
        found = error
    if model is not None and not model.agreed(found is None) and found is None:
        found = NonFinite("a gradient of another rank is not finite; its error says which")
    if found is not None:
        raise found


def _one_of(word: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise UnknownName(not_one_of(word, value, allowed))


def kept_gradient_bytes(table: NameTable, device: torch.device) -> int:
    """How many bytes of gradients a trace keeps: half the size of its leaves. A GPU's memory
    usually has one user, so there a quarter of the free memory, if that is more.
    """
    least = max(KEPT_MIN_BYTES, sum(x.numel() * x.itemsize for x, _ in table.leaves.values()) // 2)
    free = backend_of(device).spare_bytes()
    return least if free is None else max(min(least, free // 2), free // 4)


def _named(
    found: Sequence[tuple[Tensor, T]], table: NameTable, loss: Tensor
) -> tuple[dict[str, T], dict[str, str]]:
    """Results by leaf name, in the order of the name table, and ``{alias: name}`` for leaves with
    several names. Raises for complex leaves.
    """
    results = {id(leaf): result for leaf, result in found}
    known = {key: names for key, (_, names) in table.leaves.items() if key in results}
    labels = {key: names[0] for key, names in known.items()}
    if len(set(labels.values())) < len(found):
        # Leaves without a gradient are numbered too, as in the graph.
        labels = {id(leaf): name for leaf, name in table.label(_leaves(loss)).items()}
    for leaf, _ in found:
        if leaf.is_complex():
            raise Unsupported(
                f"leaf {labels[id(leaf)]} is complex; a path needs real numbers. Use its real and "
                "imaginary parts as leaves: torch.view_as_complex(parts)"
            )
    aliases = {other: labels[key] for key, names in known.items() for other in names[1:]}
    return {name: results[key] for key, name in labels.items() if key in results}, aliases


def _leaves(loss: Tensor) -> list[Tensor]:
    """The leaves of a loss in the order of its graph."""
    found: list[Tensor] = []

    def visit(node: nodes.Node, _: nodes.Edges) -> None:
        if type(node) is nodes.ACCUMULATE:
            found.append(node.variable)

    walk(loss, visit)
    return found
