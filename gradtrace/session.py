"""``Session``: what can be asked of a loss, by the names of leaves and modules that are known."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isfinite
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from gradtrace.attribution.attributing import checked, of_function, of_scalar
from gradtrace.attribution.input_recorder import InputTracer
from gradtrace.attribution.result import Attribution
from gradtrace.autodiff import nodes
from gradtrace.autodiff.backward import RECENT, gradient, seed_of
from gradtrace.autodiff.graph import Graph, build
from gradtrace.autodiff.loss_checks import admit, isolated
from gradtrace.autodiff.moved_modules import Names
from gradtrace.autodiff.names import Gradients, LazyGradients, NameTable, placing
from gradtrace.autodiff.traversal import walk
from gradtrace.errors import (
    GradtraceError,
    NonFinite,
    NotScalar,
    UnknownName,
    Unsupported,
    not_one_of,
)
from gradtrace.ir import interpreter, memory
from gradtrace.ir.nonfinite import maybe_nonfinite, refuse_nonfinite, surely_finite
from gradtrace.ir.program import Program
from gradtrace.kernels import backend_of
from gradtrace.measures.conflicts import Conflicts, checked_terms, compared
from gradtrace.pytorch.fsdp import ShardedModel
from gradtrace.recording.replay import recorded
from gradtrace.semirings import SUM, Semiring
from gradtrace.traced import Trace
from gradtrace.types import RULES

T = TypeVar("T")

KEPT_MIN_BYTES = 1 << 24
"""The least number of bytes of gradients that a trace may keep."""


class Session:
    """Answers questions about losses, by the names of leaves and modules that it knows.

    Without a model these are the ``names`` of leaves; the functions below are such
    sessions of one question.
    """

    model: nn.Module | None = None
    _frames = 4  # from a warning to the user: this method, ``isolated``, the function, its caller

    def __init__(self, names: Mapping[str, Tensor] | None = None) -> None:
        self.name_table = NameTable.of(names)
        self._hooks = RECENT

    def _classes(self) -> Mapping[str, str]:
        """The class of each module, by name."""
        return {}

    def _names_for(self, loss: Tensor) -> NameTable:
        """The names, with the module calls that may be the loss's."""
        return self.name_table

    def graph(self, loss: Tensor) -> Graph:
        """The computation graph behind the loss, with the module of each operator. Arguments are
        those of ``gradtrace.graph``.
        """
        return build(loss, self.name_table)

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
        """``{name: value}``, by the names of the model's parameters. Arguments are those of
        ``gradtrace.backward``.
        """
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
        program = None
        if semiring is SUM:
            found = gradient(loss, seed, table, hooks, schedule)
            RECENT.refresh()
        else:
            program = self._recorded(loss, seed, schedule, bare=True)
            found = list(interpreter.run(program, semiring).items())
            notes = tuple(dict.fromkeys(program.notes()))
        named = Gradients(*_named(found, table, loss), notes)
        if leaves is not None:
            named = Gradients({name: named[name] for name in leaves}, notes=notes)
        if notes:
            text = f"values of {semiring.name} are not exact. {'; '.join(notes)}"
            warnings.warn(text, stacklevel=self._frames)
        if nonfinite == "raise":
            with same_on_all_ranks(table.sharded):
                doubtful = named if program is None else self._doubtful(loss, program, named)
                refuse_nonfinite(doubtful, loss, seed, table, hooks)
        return named

    def _doubtful(self, loss: Tensor, program: Program, names: Container[str]) -> dict[str, Tensor]:
        """The gradients of a program that was run in another semiring, whose values may not tell of
        NaN; none where nothing is that they could be NaN of.
        """
        if self.name_table.sharded is None and surely_finite(program):
            return {}
        gradients, _ = _named([*interpreter.run(program, SUM).items()], self.name_table, loss)
        return {name: each for name, each in gradients.items() if name in names}

    @isolated()
    def trace(self, loss: Tensor, *, rule: str = "greedy", nonfinite: str = "raise") -> Trace:
        """The paths of the loss's gradient. Arguments are those of ``gradtrace.trace``."""
        _one_of("nonfinite", nonfinite, "raise", "allow")
        _one_of("rule", rule, *RULES)
        found = self._traced(loss, rule, nonfinite)
        self._warn_of_unwatched(loss)
        found._diagnosis = self._diagnosis_of(loss, found)
        return found

    def _warn_of_unwatched(self, loss: Tensor, frames: int = 0) -> None:
        """Warn if the modules of the loss's operators are not known, as no watch was open."""
        if text := self._unwatched(loss):
            warnings.warn(text, stacklevel=(frames or self._frames) + 1)

    def _unwatched(self, loss: Tensor) -> str:
        """What a warning says; a session without a model has nothing to say."""
        return ""

    def _origin_of(self, loss: Tensor) -> str:
        """Where in the forward pass a loss or a gradient that is not finite began, if known."""
        return ""

    def _diagnosis_of(self, loss: Tensor, trace: Trace) -> Mapping[str, Any] | None:
        """The dict of a ``Diagnosis`` of the loss; a session without a forward record has none."""
        return None

    def _traced(self, loss: Tensor, rule: str = "greedy", nonfinite: str = "raise") -> Trace:
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
        keep = kept_gradient_bytes(table, loss.device)
        program = self._recorded(loss, seed, "kahn", keep=keep)
        named, aliases = _named([(leaf.tensor, leaf) for leaf in program.leaves], table, loss)
        gradients = LazyGradients({name: leaf.compute for name, leaf in named.items()}, aliases)
        if nonfinite == "raise":
            doubtful = {name: gradients[name] for name in maybe_nonfinite(named)}
            try:
                with same_on_all_ranks(table.sharded):
                    refuse_nonfinite(doubtful, loss, seed, table, hooks, loss_too=True)
            except NonFinite as error:
                raise NonFinite(f"{error}{self._origin_of(loss)}") from None
        names = {leaf.value: name for name, leaf in named.items()}
        found = (program, gradients, rule, loss.numel(), self._classes(), names)
        unseen = self._unseen(loss, names.values(), aliases)
        return Trace(*found, model=self.model, unseen=unseen, _value=loss.detach())

    def _unseen(self, loss: Tensor, leaves: Names, aliases: Mapping[str, str]) -> tuple[str, ...]:
        """Notes on modules whose parameters were used by calls that could not be seen, or that were
        called by other names than they have now.
        """
        return ()

    @isolated()
    def conflicts(
        self, terms: Mapping[str, Tensor] | Tensor, *, nonfinite: str = "raise"
    ) -> Conflicts:
        """Compare the gradients of loss terms, tasks or samples: do they pull the same way?

        For each
        module and parameter the table has the norm of each term's gradient, the cosine of each
        pair, and who wins: the term that gives the largest part of the sum. It costs a backward
        pass for each term, whose gradients are held together; nothing is written on ``.grad``.

        Args:
            terms: Scalars by name, with their weights, ``{"ce": ce, "kl": 0.1 * kl}``; or a vector
                with a loss for each sample, whose terms are called ``"0"``, ``"1"``, ...
            nonfinite: ``"allow"`` continues where a loss or gradient is NaN or infinite;
                ``"raise"`` does not.

        Returns:
            The table, see ``Conflicts``.

        >>> import torch, gradtrace as gt
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> with gt.watch(model) as watch:
        ...     up, down = model(torch.tensor([3.0, 4.0])), model(torch.tensor([-1.0, 0.0]))
        >>> table = watch.conflicts({"up": up, "down": down})
        >>> table.norm("up"), table.cosine("up", "down", module="weight"), table.winner()
        (5.0, -0.6, 'up')
        """
        _one_of("nonfinite", nonfinite, "raise", "allow")
        table, known = self.name_table, checked_terms(terms)
        backend = backend_of(next(iter(known.values()))[0])
        held = sum(x.numel() * x.itemsize for x, _ in table.leaves.values() if x.requires_grad)
        what = f"to hold the gradients of {len(known):,} terms"
        memory.see(held * len(known), backend, what, "compare fewer at a time")
        gradients = {name: self._term_gradient(name, *each) for name, each in known.items()}
        RECENT.refresh()
        leaves = {id(x): x for x, _ in table.leaves.values() if x.requires_grad}
        leaves |= {id(leaf): leaf for found in gradients.values() for leaf, _ in found}
        first = table.label(leaves.values())
        names = {leaf: (name, *table.names_of(leaf)[1:]) for leaf, name in first.items()}
        result = compared(gradients, names)
        for name, (term, cotangent) in known.items() if nonfinite == "raise" else ():
            if isfinite(result.norm(name)):
                continue
            mine = {first[leaf]: grad for leaf, grad in gradients[name]}
            with placing(f"term {name!r}"):
                refuse_nonfinite(mine, term, seed_of(term, cotangent), table, self._hooks)
        return result

    def _term_gradient(
        self, name: str, term: Tensor, cotangent: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """The leaves of a term with their gradients; errors name the term."""
        table = self.name_table
        with placing(f"term {name!r}"):
            admit(term, table)
            found = gradient(term, seed_of(term, cotangent), table, self._hooks)
        if table.leaves and not any(id(leaf) in table.leaves for leaf, _ in found):
            raise GradtraceError(
                f"term {name!r} reaches no parameter of the watched model; compute it from what "
                "this model has returned inside gradtrace.watch, and leave out terms that have no "
                "gradient here"
            )
        return found

    def attribute(
        self,
        scalar: Tensor | Callable[..., Tensor],
        inputs: Mapping[str, Tensor],
        *,
        rule: str = "gradient",
        integrated: int | None = None,
        baseline: Mapping[str, Tensor] | None = None,
        tokens: Mapping[str, Sequence[str]] | None = None,
    ) -> Attribution:
        """Which parts of the inputs move a scalar: a logit, a difference of logits, a loss.

        See ``Attribution``.

        Args:
            scalar: One number computed from the inputs; or a function of the inputs, in their
                order, that returns it (needed for ``integrated``).
            inputs: Tensors by name, leaves or not (the output of an embedding), from which the
                scalar was computed.
            rule: ``"gradient"``; ``"frozen"``, which takes attention patterns and denominators of
                norms as constants; or ``"attnlrp"``, relevance by the rules of AttnLRP.
            integrated: Number of points between baseline and inputs at which gradients are
                averaged; None is the gradient at the inputs alone.
            baseline: Where integration starts, by name; 0 by default.
            tokens: Words for the positions of an input, by name.

        Returns:
            Scores of every input element, with tables by token, component and neuron.

        >>> import torch, gradtrace as gt
        >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, -2.0]]))
        >>> found = gt.watch(model).attribute(lambda x: model(x).sum() ** 2, {"x": x}, integrated=4)
        >>> found.scores["x"], found.defect  # they add up to 25
        (tensor([[-15.,  40.]], dtype=torch.float64), 0.0)
        """
        function = not isinstance(scalar, Tensor) and callable(scalar)
        checked(inputs, rule, integrated, function, baseline, tokens)
        if not function:
            number = cast("Tensor", scalar)  # anything else is refused by ``trace``
            trace = self._input_tracer(number).trace(number, inputs, rule)
            self._warn_of_unwatched(number, 2)
            return of_scalar(number, inputs, trace, rule, tokens or {})
        run = cast("Callable[..., Tensor]", scalar)
        if integrated is not None:
            at = lambda inputs: self._traced_at(run, inputs, rule)[0]  # noqa: E731
            return of_function(run, inputs, at, rule, integrated, baseline, tokens or {})
        trace, value = self._traced_at(run, inputs, rule)
        return of_scalar(value, inputs, trace, rule, tokens or {})

    def _again(self) -> AbstractContextManager[Session]:
        """A session of the same names, for another forward pass."""
        return nullcontext(Session())

    def _input_tracer(self, scalar: Tensor) -> InputTracer:
        return InputTracer(self._names_for(scalar), self._hooks, self._classes(), self.model)

    def _traced_at(
        self, function: Callable[..., Tensor], inputs: Mapping[str, Tensor], rule: str
    ) -> tuple[Trace, Tensor]:
        """The trace of a function at these inputs, and its value."""
        at = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
        with torch.enable_grad(), self._again() as session:
            value = function(*at.values())
        return session._input_tracer(value).trace(value, at, rule), value

    def _recorded(self, loss: Tensor, seed: Tensor, *options: Any, **more: Any) -> Program:
        """The program of a loss; the options are those of ``record``."""
        found = recorded(loss, seed, self._names_for(loss), self._hooks, *options, **more)
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
        try:
            raise found
        finally:
            del found  # whose traceback refers to this frame


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
    taken = set(labels.values())  # by others, where a tied module was replaced
    aliases = {
        other: labels[key]
        for key, names in known.items()
        for other in names[1:]
        if other not in taken
    }
    return {name: results[key] for key, name in labels.items() if key in results}, aliases


def _leaves(loss: Tensor) -> list[Tensor]:
    """The leaves of a loss in the order of its graph."""
    found: list[Tensor] = []

    def visit(node: nodes.Node, _: nodes.Edges) -> None:
        if type(node) is nodes.ACCUMULATE:
            found.append(node.variable)

    walk(loss, visit)
    return found


# Questions without a model ---------------------------------------------------------------------


def graph(loss: Tensor, *, names: Mapping[str, Tensor] | None = None) -> Graph:
    """The computation graph behind a loss: operators, edges, leaves, sizes.

    Args:
        loss: Loss whose graph is still there: before ``loss.backward()``, or after it with
            ``retain_graph=True``.
        names: ``{name: tensor}`` for leaves; others are called leaf0, leaf1, ...

    Returns:
        The graph, with operators, edges and leaves; ``draw()`` makes a picture of it.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> gradtrace.graph(x * x, names={"x": x})
    Graph(2 operators, 2 edges, 1 leaves)
    """
    return Session(names).graph(loss)


def backward(
    loss: Tensor,
    semiring: Semiring = SUM,
    *,
    names: Mapping[str, Tensor] | None = None,
    leaves: Iterable[str] | None = None,
    cotangent: Tensor | None = None,
    schedule: str = "kahn",
    nonfinite: str = "raise",
) -> Gradients:
    """Back-propagate in a semiring: ``{name: value}`` for every leaf of the loss.

    ``value[i] = ⊕ over paths from i to the loss of ⊗ of lift(local derivatives)``; in ``SUM``, the
    default, that is the gradient as ``torch.autograd.grad`` gives it. Nothing is written on
    ``.grad`` and the graph can be used again.

    In a semiring other than ``SUM``, an operator that connects two elements by several routes and
    is too large to merge them makes values inexact; then a warning is issued, and ``notes`` of the
    result say so.

    Args:
        loss: Loss whose graph is still there: before ``loss.backward()``, or after it with
            ``retain_graph=True``.
        semiring: Replaces (+, ×); see ``gradtrace.semirings``.
        names: ``{name: tensor}`` for leaves; others are called leaf0, leaf1, ...
        leaves: Names of the leaves to return; all by default.
        cotangent: Weights of the elements of a loss that has several, of its shape.
        schedule: Order in which operators are visited: ``"kahn"``, ``"creation"`` or
            ``"recursive"``.
        nonfinite: ``"allow"`` continues where a loss or gradient is NaN or infinite; ``"raise"``
            does not.

    Returns:
        ``{name: value}``, a dictionary with ``notes`` on what is inexact. A value is a tensor, or a
        tuple of them where the semiring's values have several parts.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> gradtrace.backward(x * x, names={"x": x})
    {'x': tensor(6.)}
    """
    how: Any = {"leaves": leaves, "cotangent": cotangent}
    return Session(names).backward(loss, semiring, **how, schedule=schedule, nonfinite=nonfinite)


def trace(
    loss: Tensor,
    *,
    rule: str = "greedy",
    names: Mapping[str, Tensor] | None = None,
    nonfinite: str = "raise",
) -> Trace:
    """Trace the gradient of a loss back to its parameters: along which paths did it come?

    Every element of a parameter gets one path to the loss, by a ``rule``:

    - ``"greedy"`` (Algorithm 1 of DuSell): from a value to the operator that handed back the
      largest ``|Σ w·g|`` of all its users; inside it, to the element of the largest ``|w·g|``.
    - ``"edge"`` (Equation 1.7): to the element of the largest ``|w·g|`` of all users at once.
    - ``"viterbi"``: the path of the greatest ``|product|`` of all.

    Here ``w`` is the derivative of an operator's output element by its input element and ``g`` the
    gradient of that output element. Only ``"viterbi"`` finds the heaviest path; the others follow
    gradients, in which paths cancel. All three may differ:

    >>> import torch, gradtrace
    >>> x = torch.tensor(1.0, requires_grad=True)
    >>> y = -x
    >>> loss = x.expand(3).sum() + 2 * x + (5 * y - 4 * y)
    >>> for rule in ("greedy", "edge", "viterbi"):  # expand: 1 + 1 + 1; mul: 2; neg: -5 + 4
    ...     path = gradtrace.trace(loss, rule=rule, names={"x": x}).path("x")
    ...     print(rule, path.operators[0], path.weight)
    greedy ExpandBackward0 1.0
    edge MulBackward0 2.0
    viterbi NegBackward0 -5.0

    A vector of losses is traced as separate pairs of input and target, one for each loss.

    Args:
        loss: Loss whose graph is still there: before ``loss.backward()``, or after it with
            ``retain_graph=True``.
        rule: Which path an element gets, as above.
        names: ``{name: tensor}`` for leaves; others are called leaf0, leaf1, ...
        nonfinite: ``"allow"`` continues where a loss or gradient is NaN or infinite; ``"raise"``
            does not.

    Returns:
        The trace, which answers ``path``, ``influence``, ``decompose`` and the rest.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> found = gradtrace.trace(x.tanh() + x * 0.5, names={"x": x})
    >>> found.path("x").operators
    ['MulBackward0', 'AddBackward0']
    """
    return Session(names).trace(loss, rule=rule, nonfinite=nonfinite)
