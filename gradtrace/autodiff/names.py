"""The user's names in a graph: leaves by tensor, modules by the sequence numbers of nodes.

Each thread counts its own sequence numbers, and a node does not say on which thread it was made.
Module calls on other threads than the watch's annotate the nodes that made their inputs and
outputs, so the nodes between these are known. Other nodes of other threads are recognised by
contradiction: on one thread each number is used once, and a node has a greater number than its
arguments. They belong to no module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from gradtrace.autodiff import tuning
from gradtrace.autodiff.nodes import (
    ACCUMULATE,
    VIEWS,
    Edges,
    Node,
    annotations_of,
    edges_of,
    explain,
    name_of,
    replaced,
    root_of,
    sequence_of,
)
from gradtrace.autodiff.traversal import pending
from gradtrace.errors import GradtraceError, UnknownName, Unsupported, did_you_mean, printable
from gradtrace.pytorch.fsdp import ShardedModel


class ModuleCall(NamedTuple):
    """A call of a module: its name (``""`` outside any) and which call of it this was, from 0."""

    module: str
    call: int


NO_MODULE = ModuleCall("", 0)
"""For nodes that were made outside any module call."""

OUTSIDE = ModuleCall("", 0)
"""For nodes that were made while the watch was not open; equals ``NO_MODULE``, but is not it."""


@dataclass(eq=False)
class CallRanges:
    """The innermost module call for each range of a thread's sequence numbers.

    ``starts`` ascends; nodes with sequence numbers in ``[starts[i], starts[i + 1])`` were made by
    the call ``places[i]``.
    """

    starts: list[int] = field(default_factory=list)
    places: list[ModuleCall] = field(default_factory=list)

    def enter(self, sequence: int, place: ModuleCall) -> None:
        """Nodes from this sequence number on belong to ``place``."""
        self.starts.append(sequence)
        self.places.append(place)

    def forget(self) -> None:
        """Forget calls of long ago, if there are many."""
        if len(self.starts) > 2 * tuning.NOTED_CALLS:
            del self.starts[: -tuning.NOTED_CALLS], self.places[: -tuning.NOTED_CALLS]

    def place_at(self, number: int) -> ModuleCall:
        """The innermost module call that a node of this sequence number was made in."""
        at = bisect_right(self.starts, number) - 1
        return self.places[at] if at >= 0 else OUTSIDE

    def since(self, number: int) -> CallRanges:
        """The ranges from that of a sequence number on; calls of each module are counted from the
        first of these.
        """
        first = max(bisect_right(self.starts, number) - 1, 0)
        found = CallRanges(self.starts[first:], self.places[first:])
        least: dict[str, int] = {}
        for place in found.places:  # a module that calls itself comes back to an earlier call
            if place is not NO_MODULE and place is not OUTSIDE:
                least[place.module] = min(place.call, least.get(place.module, place.call))
        for at, place in enumerate(found.places):
            if place is not NO_MODULE and place is not OUTSIDE and least[place.module]:
                found.places[at] = ModuleCall(place.module, place.call - least[place.module])
        return found


@dataclass(eq=False)
class ThreadCall(CallRanges):
    """One call of a module on a thread other than the watch's, and the calls inside it.

    The nodes that made its input and output tensors are annotated with it (``nodes.annotate``).
    """


GIVEN, MADE = "given", "made"
"""Annotations of the nodes that made the inputs and the outputs of a ``ThreadCall``."""


@dataclass
class NameTable(CallRanges):
    """Names of leaves, and the module calls on the thread of the watch.

    Each thread has its own sequence numbers, so these do not identify the module calls of nodes
    made on other threads; ``off_thread_calls`` does.
    """

    leaves: dict[int, tuple[Tensor, list[str]]] = field(default_factory=dict)  # by id
    away: bool = False  # whether modules were called on other threads
    sharded: ShardedModel | None = None  # what fully_shard has sharded of the model

    @classmethod
    def of(cls, names: Mapping[str, Tensor] | None) -> NameTable:
        """A table of named leaves and no module calls."""
        name_table = cls()
        if not isinstance(names, Mapping | None):
            raise UnknownName(
                "names takes tensors by name, {'x': x} or dict(model.named_parameters()), got "
                f"{type(names).__name__}"
            )
        for name, tensor in (names or {}).items():
            if not isinstance(name, str):
                raise UnknownName(f"names of leaves are strings, not {name!r}")
            if not isinstance(tensor, Tensor):
                raise UnknownName(f"names[{name!r}] is a {type(tensor).__name__}, not a tensor")
            frozen = isinstance(tensor, Parameter)  # as in dict(model.named_parameters())
            if not tensor.is_leaf or not (tensor.requires_grad or frozen):
                why = "is not a leaf" if tensor.requires_grad else "does not require grad"
                raise UnknownName(
                    f"names[{name!r}] {why}, so no gradient ends there; name parameters, or inputs "
                    "made with requires_grad_()"
                )
            name_table.name(tensor, name)
        return name_table

    def of_loss(self, loss: Tensor) -> NameTable:
        """The table with the calls from the loss's first operator on, as if earlier ones were not.

        Losses that are computed one after the other have the same places then, and the same plan.
        """
        found = self.since(first_number(loss))
        return replace(self, starts=found.starts, places=found.places)

    def name(self, tensor: Tensor, name: str) -> None:
        """Give a leaf one more name."""
        names = self.leaves.setdefault(id(tensor), (tensor, []))[1]
        if name not in names:
            names.append(name)

    def rename(
        self, leaves: Iterable[tuple[str, Tensor]], before: Mapping[int, tuple[str, ...]]
    ) -> dict[int, tuple[str, ...]]:
        """Give leaves the names of a model, in its order, in place of those that it gave them
        ``before``, by id; returns what it gives them now. Other leaves keep their names.
        """
        now: dict[int, tuple[str, ...]] = {}
        for name, leaf in leaves:
            now[id(leaf)] = (*now.get(id(leaf), ()), name)
            self.name(leaf, name)
        for key, given in now.items():
            names, old = self.leaves[key][1], set(before.get(key, ())).difference(given)
            names[:] = [name for name in names if name not in old]
        inputs = [key for key in self.leaves if key not in now and key not in before]
        self.leaves = {key: self.leaves[key] for key in (*inputs, *now, *self.leaves)}
        return now

    def names_of(self, leaf: Tensor) -> tuple[str, ...]:
        """All the names of a leaf (tied weights have several), or none."""
        found = self.leaves.get(id(leaf))
        return tuple(found[1]) if found else ()

    def spoken(self, leaf: Tensor) -> str:
        """What a leaf is called in messages: ``leaf encoder.weight``, or ``leaf of shape (3,)``."""
        return f"leaf {next(iter(self.names_of(leaf)), f'of shape {tuple(leaf.shape)}')}"

    def label(self, leaves: Iterable[Tensor]) -> dict[Tensor, str]:
        """One name for each leaf: named ones in the order of this table, then leaf0, leaf1, ... in
        the order given. Several tensors with the same name become w, w@1, ...
        """
        given = {id(leaf): leaf for leaf in leaves}
        found: dict[str, Tensor] = {}
        for key, (leaf, names) in self.leaves.items():
            if key in given:
                found[unused(names[0], found)] = leaf
        unnamed = [leaf for key, leaf in given.items() if key not in self.leaves]
        numbers = count()
        for leaf in unnamed:
            found[next(name for n in numbers if (name := f"leaf{n}") not in found)] = leaf
        return {leaf: name for name, leaf in found.items()}

    def place_of(self, node: Node) -> ModuleCall:
        """The innermost module call that made a node of the watch's thread."""
        number = sequence_of(node)
        return NO_MODULE if number is None else self.place_at(number)

    def where(self, node: Node, place: ModuleCall | None = None) -> str:
        """`` (in encoder.mix)``, or an empty string, for error messages.

        ``place`` is the module call, if the caller knows it.
        """
        module = (place or self.place_of(node)).module
        return f" (in {module})" if module else ""

    def place(
        self, error: Exception, node: Node, place: ModuleCall | None = None
    ) -> GradtraceError:
        """The error with the operator and the module where it occurred in its message; the cause,
        if it is a leaf below that is not what it was in the forward pass.
        """
        for below in pending(node)[0]:
            if type(below) is ACCUMULATE and replaced(below):
                return self.replaced_leaf(below)
        if not isinstance(error, GradtraceError):
            return explain(error, node, self.where(node, place))
        return placed(error, self.describe(node, place))

    def check_leaf(self, node: Node) -> None:
        """Raise if the leaf of a node is not what it was in the forward pass."""
        if replaced(node):
            raise self.replaced_leaf(node)

    def replaced_leaf(self, node: Node) -> GradtraceError:
        """The error for a leaf that is not what it was in the forward pass."""
        return GradtraceError(
            f"{self.spoken(node.variable)} {replaced(node)}: its .data was set to another "
            "tensor (as by model.double(), model.to(...)), from which operators that saved the "
            "leaf read now. Run the forward pass again, and trace its loss before that"
        )

    def check_once(self, leaves: Iterable[Tensor]) -> None:
        """Raise if a leaf has two nodes, of which each has a part of its gradient: converted
        between two uses, it got another.
        """
        met: set[int] = set()
        for leaf in leaves:
            if id(leaf) in met:
                raise GradtraceError(
                    f"{self.spoken(leaf)} was converted to another dtype or device and back "
                    "between two uses in the forward pass, so it is two leaves to autograd; "
                    "convert it before the forward pass, or use leaf.to(...) where it is used"
                )
            met.add(id(leaf))

    def describe(self, node: Node, place: ModuleCall | None = None) -> str:
        """``AddmmBackward0 (in encoder.mix)``."""
        return name_of(node) + self.where(node, place)


def unused(name: str, taken: Container[str]) -> str:
    """``w``, or ``w@1``, ``w@2``, ... where that is taken."""
    if name not in taken:
        return name
    return next(other for n in count(1) if (other := f"{name}@{n}") not in taken)


def enclosing(name: str) -> list[str]:
    """The names of the modules that contain something of this name, innermost first.

    >>> enclosing("a.b.weight")
    ['a.b', 'a', '']
    """
    found = []
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
    return found


def placed(error: GradtraceError, where: str) -> GradtraceError:
    """The same error, with where it occurred at the start of its message."""
    text = str(error)
    return error if where in text else type(error)(f"{where}: {text}")


@contextmanager
def placing(where: str) -> Iterator[None]:
    """Within, errors get ``where`` at the start of their message."""
    try:
        yield
    except GradtraceError as error:
        raise placed(error, where) from error


class Gradients(dict[str, Tensor]):
    """``{name: tensor}``, each leaf once, in the order of the model.

    A tied leaf is found by any of its names. The error for an unknown name suggests similar ones.
    ``notes`` say which operators' values are not exact, and why.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        aliases: Mapping[str, str] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(values)
        self.aliases = aliases or {}
        self.notes = notes

    def __missing__(self, name: str) -> Tensor:
        if self.aliases.get(name) in self:
            return self[self.aliases[name]]
        raise UnknownName(unknown("leaf", name, self))


class LazyGradients(Mapping[str, Tensor]):
    """``Gradients`` that are computed on first access and then cached."""

    def __init__(
        self, makers: Mapping[str, Callable[[], Tensor]], aliases: Mapping[str, str]
    ) -> None:
        self._makers = makers
        self._made: dict[str, Tensor] = {}
        self.aliases = aliases

    def __getitem__(self, name: str) -> Tensor:
        name = self.aliases.get(name, name)
        if name not in self._makers:
            raise UnknownName(unknown("leaf", name, self._makers))
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __repr__(self) -> str:
        return printable(f"gradients of {', '.join(self._makers)}")


def unknown(kind: str, name: object, known: Mapping[str, object]) -> str:
    """The error message for a name that is not among ``known``."""
    return f"no {kind} {name!r} takes part in this loss{did_you_mean(name, known)}"


# Calls on other threads ---------------------------------------------------------------------------


def first_number(loss: Any) -> int:
    """The sequence number of the loss's first operator."""
    numbers = map(sequence_of, pending(root_of(loss))[0])
    return min((number for number in numbers if number is not None), default=0)


def off_thread_calls(loss: Tensor, name_table: NameTable) -> dict[Node, ModuleCall]:
    """The module calls of those nodes of a loss for which ``NameTable.place_at`` would be wrong."""
    if not name_table.starts:
        return {}
    edges = pending(root_of(loss))[1]
    found_numbers = ((node, sequence_of(node)) for node in edges)
    numbers = {node: number for node, number in found_numbers if number is not None}
    found = _annotated(numbers, edges) if name_table.away else {}
    left = {node: number for node, number in numbers.items() if node not in found}
    found.update(dict.fromkeys(_foreign(left, edges, name_table), NO_MODULE))
    return found


def unit_around(node: Node, off_thread: Mapping[Node, ModuleCall], name_table: NameTable) -> str:
    """The name of the module that made a node of a sharded model; raises if that is not known."""
    place = off_thread.get(node) or name_table.place_of(node)
    if place is NO_MODULE and node in off_thread:
        raise Unsupported(
            f"{name_of(node)} was made on a thread that the watch knows nothing of, so it is not "
            "known which parameters of the sharded model it uses; call the model on the thread of "
            "the watch"
        )
    return place.module


def _annotated(numbers: dict[Node, int], edges: dict[Node, Edges]) -> dict[Node, ModuleCall]:
    """The nodes between the annotated inputs and outputs of calls on other threads."""
    found: dict[Node, ModuleCall] = {}
    given: dict[ThreadCall, set[Node]] = {}
    made: list[tuple[ThreadCall, Node]] = []
    for node in numbers:
        for call, kind in annotations_of(node):
            if isinstance(call, ThreadCall) and kind == GIVEN:
                given.setdefault(call, set()).add(node)
            elif isinstance(call, ThreadCall) and kind == MADE:
                made.append((call, node))
    taken: dict[tuple[ThreadCall, int], Node] = {}
    for call, node in made:
        outside, first, end = given.get(call, set()), call.starts[0], call.starts[-1]
        stack = [node]
        while stack:
            node = stack.pop()
            number = numbers[node]
            if node in found or node in outside or not first <= number < end:
                continue
            other = taken.setdefault((call, number), node)
            if other is not node:
                found[node] = found[other] = NO_MODULE  # one of them is an input without annotation
                continue
            found[node] = call.place_at(number)
            stack += [c for c, _ in edges[node] if c in numbers and numbers[c] < number]
    return found


def _foreign(
    numbers: dict[Node, int], edges: dict[Node, Edges], name_table: NameTable
) -> dict[Node, None]:
    """Nodes that clash with nodes of the watch's thread, so that they are from another thread.

    Of two nodes that clash, one with a parameter of the module that was running at its number is
    the watch's own; otherwise the one with fewer clashes. If these are equal, both are taken as
    foreign.
    """
    clashes = _clashes(numbers, edges)
    own = {
        node
        for node in clashes
        if _uses_parameter_of_running_module(numbers[node], edges[node], name_table)
    }
    foreign = {node: None for node in clashes if clashes[node] & own}
    while True:
        left = {n: others - foreign.keys() for n, others in clashes.items() if n not in foreign}
        worst = max(map(len, left.values()), default=0)
        if not worst:
            return foreign
        foreign.update({node: None for node, others in left.items() if len(others) == worst})


def _clashes(numbers: dict[Node, int], edges: dict[Node, Edges]) -> dict[Node, set[Node]]:
    """For each node, those that cannot be from the same thread."""
    found: dict[Node, set[Node]] = {}
    first: dict[int, Node] = {}
    for node, number in numbers.items():
        same = first.setdefault(number, node)
        clashing = [] if same is node else [same]
        clashing += [c for c, _ in edges[node] if c in numbers and numbers[c] >= number]
        for other in clashing:
            found.setdefault(node, set()).add(other)
            found.setdefault(other, set()).add(node)
    return found


def _uses_parameter_of_running_module(number: int, edges: Edges, name_table: NameTable) -> bool:
    """Whether a node takes a parameter of the module that was running at its number."""
    module = name_table.place_at(number).module
    for child, _ in edges:
        if child is not None and type(child).__name__ in VIEWS:
            child = edges_of(child)[0][0]
        if child is not None and type(child) is ACCUMULATE:
            names = name_table.names_of(child.variable)
            if any(name.rpartition(".")[0] == module for name in names):
                return True
    return False
