"""Gradients that arrive, and are too small, too large or too one-sided to train with.

Vanishing and exploding gradients are those of ``Trace.norms``. Loss terms are compared by the norms
of their gradients, each found by a backward pass from its own place in the sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from gradtrace.autodiff.backward import DenseWalk
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import NameTable
from gradtrace.autodiff.nodes import ACCUMULATE, Edges, Node, name_of, sequence_of, wanted
from gradtrace.autodiff.pass_scope import one_pass
from gradtrace.autodiff.traversal import walk
from gradtrace.diagnosis.backward_sizes import BackwardSizes
from gradtrace.diagnosis.forward_record import ForwardRecord, shown
from gradtrace.diagnosis.result import Finding, Reason
from gradtrace.diagnosis.zeros import is_placeholder, kind_of, reason_of
from gradtrace.flow import TOP
from gradtrace.flow.tuning import FAR_FACTOR
from gradtrace.table import Table

DROWNED_FACTOR = 1e4
"""A term of the loss is drowned if another one's gradient is larger by this factor."""

MAX_TERMS = 8
"""The most terms of a loss that are compared; each costs a backward pass."""

SUMS = ("Add", "Sub")
STACKS = ("Stack", "Cat")
SCALINGS = ("Mul", "Div", "Neg", "View", "Squeeze", "Unsqueeze", "ToCopy", "Reshape")
TOTALS = ("Sum", "Mean", "Dot")
"""Operators between a loss and its terms: sums, scalars side by side, those that leave a term one
term, and those that add up what is side by side.
"""

VERDICTS = {
    "Vanishing": "skip connections, normalisation, gated cells or another initialisation keep it "
    "up.",
    "Exploding": "clip the gradient, take smaller steps, normalise, or initialise smaller.",
    "Mostly dead": "a smaller learning rate, another initialisation or a leaky slope help.",
}
REPEATED = "through "
"""How the sentence begins that is about many uses of the same weights."""

FORGETS = (
    "gated cells (LSTM, GRU), an orthogonal initialisation, attention or shorter sequences help: "
    "what happened many steps before teaches nothing now."
)
SATURATED = "normalise what goes in, or begin with smaller weights."
WEIGH = (
    "weigh the terms so that their gradients are of one size: watch.conflicts({...}) compares them "
    "by module."
)
WEIGHTLESS = "none, if it is off for now, as where a schedule begins at 0; else change its weight."
RESTS = "usually none: it grows as soon as what it compares begins to differ."
SHOWN_CODE = 60
"""The most characters of an expression that names a term."""


def is_in_a_branch(norms: Table) -> bool:
    """Whether a gradient that vanishes does so in a branch: another module that the model begins
    with, which hands it to no other, gets one of usual size.
    """
    rows = [row for row in norms if row.module != TOP]
    begins = [row for row in rows if row.own is not None and row.gain is None]
    most = max(norms.column("norm"), default=0.0)
    return any(row.norm > most / FAR_FACTOR and not row.verdict for row in begins)


def norm_findings(norms: Table) -> Iterator[Finding]:
    """What ``Trace.norms`` says of gradients that vanish, explode, or are mostly 0."""
    for text in norms.notes:
        word, _, sentence = text.partition(": ")
        if word not in VERDICTS:
            continue
        if word == "Vanishing" and not sentence.startswith(REPEATED) and is_in_a_branch(norms):
            continue
        ends = dict.fromkeys(re.findall(r"'([^']*)'", sentence.partition("; ")[0]))
        evidence, advice = sentence.partition(". ")[0], VERDICTS[word]
        if word == "Mostly dead":
            title, limit, module = "most of the gradient is 0", "", next(iter(ends), "")
            advice = SATURATED if "saturated" in sentence else advice
        else:
            title, module = f"{word.lower()} gradient", next(reversed(ends), "")
            limit = f" The limit is a factor of {FAR_FACTOR:,.0f}."
        if word == "Vanishing" and sentence.startswith(REPEATED):
            advice = FORGETS
        at = " to ".join(map(repr, ends)) if word != "Mostly dead" else repr(module)
        yield Finding(
            word.lower(),
            "warning",
            f"{title}, {'from' if ' to ' in at else 'at'} {at}" if module else title,
            module,
            evidence=f"{evidence[:1].upper()}{evidence[1:]}.{limit}",
            advice=advice,
        )


def symmetry_findings(
    parameters: Iterable[tuple[str, Tensor]], gradients: Mapping[int, Tensor]
) -> Iterator[Finding]:
    """Weights whose rows are all equal, and stay so, as those of their gradients are."""
    for name, tensor in parameters:
        gradient = gradients.get(id(tensor))
        if gradient is None or tensor.dim() < 2 or len(tensor) < 2 or type(gradient) is not Tensor:
            continue
        if not _rows_equal(tensor.detach()) or not _rows_equal(gradient):
            continue
        yield Finding(
            "symmetry",
            "warning",
            f"all units are alike: {name}",
            name.rpartition(".")[0],
            (name,),
            evidence=f"All {len(tensor):,} rows of {name} are equal, and so are those of its "
            "gradient: they stay equal, and do the work of one.",
            advice="initialise it at random: nn.init.kaiming_uniform_(weight).",
        )


def _rows_equal(x: Tensor) -> bool:
    """Whether all rows are equal up to rounding, and not 0."""
    if x.layout is not torch.strided or not x.is_floating_point():
        return False
    largest = float(x.abs().max()) if x.numel() else 0.0
    apart = float((x - x[:1]).abs().max()) if largest else 0.0
    return largest > 0 and apart <= 1e-6 * largest


# Terms of a loss ---------------------------------------------------------------------------------


@dataclass(eq=False)
class LossTerms:
    """The terms that a loss is a sum of, with the norms of their gradients."""

    loss: Tensor
    sizes: BackwardSizes
    names: NameTable
    hooks: HookWatch
    record: ForwardRecord | None

    def findings(self, told: Collection[str]) -> Iterator[Finding]:
        """Terms whose gradient is 0, or lost beside that of another; not those that are multiplied
        by 0 on lines that were ``told`` of.
        """
        terms = list(self._terms())
        if not 2 <= len(terms) <= MAX_TERMS:
            return
        norms = [self._norm(*term) for term in terms]
        most = max(norms)
        largest = terms[norms.index(most)][0]
        heard = {self._call(term[0]) for term, norm in zip(terms, norms) if norm}
        for term, norm in zip(terms, norms):
            if not norm and self._is_one_of(heard, term[0]):
                continue
            if norm * DROWNED_FACTOR < most and not self._known(term[0], told):
                yield self._finding(term, norm, largest, most)

    def _is_one_of(self, heard: Collection[object], node: Node) -> bool:
        """Whether a call that makes several terms, as of the samples of a batch, gave this one,
        and others of it are ``heard``: a margin is met here, and not there.
        """
        return self._call(node) in heard and not self.sizes.is_zero(self._body(node))

    def _call(self, node: Node) -> object:
        """What tells the call that made a term from others: its place in the code, if known."""
        operation = None if self.record is None else self.record.of_node(sequence_of(node))
        return self._described(node) if operation is None else operation.where.line or node

    def _finding(self, term: tuple[Node, int], norm: float, largest: Node, most: float) -> Finding:
        what = "carries no gradient" if not norm else "is drowned"
        body = self._body(term[0])
        resting, weightless = self._rests(body, *term), self.sizes.is_zero(body)
        rest = " Its value is 0, which is its minimum." if resting else ""
        rest = " It is multiplied by 0." if weightless else rest
        return Finding(
            "loss term",
            "note" if resting else "warning",
            f"a term of the loss {what}: {self._described(term[0])}",
            line=self._line(term[0]),
            evidence=f"The norm of its gradient is {norm:.2g}, that of {self._described(largest)} "
            f"is {most:.2g} ({self._line(largest) or 'no line'}).{rest} The limit is a factor of "
            f"{DROWNED_FACTOR:,.0f}.",
            advice=RESTS if resting else WEIGHTLESS if weightless else WEIGH,
        )

    def _known(self, node: Node, told: Collection[str]) -> bool:
        """Whether a term is multiplied by 0 on purpose, or on a line that was told of."""
        if not self.sizes.is_zero(self._body(node)):
            return False
        above = node
        while kind_of(above) != "Mul" and len(users := self.sizes.users.get(above, [])) == 1:
            above = users[0]
        if self.record is None:
            return False
        operation = self.record.of_node(sequence_of(above))
        return self._line(above) in told or is_placeholder(self.record, operation)

    def _body(self, node: Node) -> Node:
        """What a term is a multiple of."""
        below = self._below(node)
        while kind_of(node) in SCALINGS and len(below) == 1:
            node, below = below[0], self._below(below[0])
        return node

    def _rests(self, body: Node, node: Node, slot: int) -> bool:
        """Whether a term is at its minimum: 0, as of two networks that begin alike, and not
        because something is multiplied by 0, cut off by a ReLU or not selected.
        """
        if self.record is None or self.sizes.is_zero(body):
            return False
        operation = self.record.of_node(sequence_of(body))
        extents = self.record.extents
        values = [extents[v] for v in operation.outputs if v in extents] if operation else []
        if not values or not all(each.zero for each in values):
            return False
        return all(reason_of(kind_of(each)) is Reason.FLAT for each in self._stops(node, slot))

    def _stops(self, node: Node, slot: int) -> list[Node]:
        """The nodes that the gradient of a term reaches, and that hand on nothing but zeros."""
        reached: dict[Node, bool] = {}

        def visit(each: Node, state: DenseWalk) -> None:
            if (grads := state.adjoints.get(each)) is not None:
                reached[each] = any(grad is not None and bool(grad.any()) for grad in grads)

        self._walk(node, slot, visit)
        edges = self.sizes.edges
        ends = [n for n, alive in reached.items() if alive and type(n) is not ACCUMULATE]
        children = {n: {c for c, _ in edges[n] if c in reached} for n in ends}
        squares = {n for n in ends if kind_of(n) == "Mul" and len({c for c, _ in edges[n]}) == 1}
        return [
            n
            for n, below in children.items()
            if below and n not in squares and not any(reached[c] for c in below)
        ]

    def _terms(self) -> Iterator[tuple[Node, int]]:
        """The outermost summands of the loss: nodes, each with its output."""
        found, edges = self.sizes.size, self.sizes.edges
        stack = [(self.sizes.order[0], 0, 0)] if self.sizes.order else []
        while stack:
            node, slot, sums = stack.pop()
            below = [(c, s) for c, s in edges[node] if c is not None and c in found]
            if self._is_sum(node):
                stack += [(child, at, sums + 1) for child, at in reversed(below)]
            elif len(below) == 1 and (
                kind_of(node) in SUMS or self._leads_to_sum(node, below[0][0])
            ):
                stack.append((*below[0], sums))
            elif sums and type(node) is not ACCUMULATE:
                yield node, slot

    def _is_sum(self, node: Node) -> bool:
        """Whether a node adds scalars, or puts some side by side."""
        kind, below, size = kind_of(node), self._below(node), self.sizes.size
        if kind in STACKS:
            shapes = [each.shape for child in below for each in size[child]]
            return len(below) > 1 and all(prod(shape) == 1 for shape in shapes)
        return kind in SUMS and len(below) > 1 and all(x.shape == () for x in size[node])

    def _below(self, node: Node) -> list[Node]:
        return [c for c, _ in self.sizes.edges[node] if c is not None and c in self.sizes.size]

    def _leads_to_sum(self, node: Node, child: Node) -> bool:
        """Whether only scalings lie between a node and a sum of scalars."""
        while kind_of(node) in SCALINGS + TOTALS and not self._is_sum(child):
            below = self._below(child)
            if len(below) != 1:
                return False
            node, child = child, below[0]
        return kind_of(node) in SCALINGS + TOTALS

    def _norm(self, node: Node, slot: int) -> float:
        """The norm of the gradient that comes through a node: of a pass that begins there."""
        leaves = self._walk(node, slot, lambda each, state: None).leaves
        return sqrt(sum(float(grad.double().square().sum()) for _, grad in leaves))

    def _walk(self, node: Node, slot: int, visit: Callable[[Node, DenseWalk], None]) -> DenseWalk:
        """A backward pass from a term on; ``visit`` is called before each node is."""
        extent, meta = self.sizes.size[node][0], wanted(node, slot)
        seed = torch.full(tuple(meta.shape), extent.low, dtype=meta.dtype, device=meta.device)
        state = DenseWalk(self.loss, seed, self.names, self.hooks)
        state.adjoints = {node: [None] * slot + [seed]}

        def both(each: Node, edges: Edges) -> None:
            visit(each, state)
            state.visit(each, edges)

        with one_pass():
            walk(self.loss, both)
        return state

    def _described(self, node: Node) -> str:
        operation = None if self.record is None else self.record.of_node(sequence_of(node))
        if operation is not None:
            code = operation.where.line.expression if operation.where.line else ""
            return code if 0 < len(code) <= SHOWN_CODE else shown(operation)
        place = self.names.place_of(node).module
        return f"{name_of(node)}{f' in {place!r}' if place else ''}"

    def _line(self, node: Node) -> str:
        operation = None if self.record is None else self.record.of_node(sequence_of(node))
        return "" if operation is None else str(operation.where.line or "")


# Experts and half precision ----------------------------------------------------------------------


def expert_findings(gradients: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Experts in one weight, the first dimension of which some get no gradient."""
    for name, grad in gradients.items():
        if "expert" not in name or grad.dim() < 3 or not bool(grad.any()):
            continue
        idle = [int(n) for n in (grad.reshape(len(grad), -1) == 0).all(1).nonzero().reshape(-1)]
        if idle:
            numbers = ", ".join(map(str, idle[:8])) + (", ..." if len(idle) > 8 else "")
            yield Finding(
                "expert",
                "warning",
                f"experts without gradient: {numbers} of {len(grad)} in {name}",
                name.rpartition(".")[0],
                (name,),
                evidence="Their rows of the gradient are exactly 0: no sample of this batch was "
                "sent to them.",
                advice="look at the router: a balancing loss, noise, or a larger batch.",
            )


def underflow_findings(
    sizes: BackwardSizes, modules: Mapping[Node, str], record: ForwardRecord | None
) -> Iterator[Finding]:
    """The first float16 gradient that lies wholly below the smallest normal number."""
    normal = torch.finfo(torch.float16).smallest_normal
    for node in sizes.order:
        half = [x for x in sizes.size[node] if x.dtype is torch.float16]
        largest = max((x.largest for x in half), default=0.0)
        if 0 < largest < normal:
            operation = None if record is None else record.of_node(sequence_of(node))
            module = modules.get(node, "")
            yield Finding(
                "underflow",
                "warning",
                f"float16 gradients underflow{f' at {module!r}' if module else ''}",
                module,
                line="" if operation is None else str(operation.where.line or ""),
                evidence=f"At the output of {name_of(node)} no element of the gradient is above "
                f"{largest:.2g}, and the smallest normal float16 is {normal:.2g}: smaller numbers "
                "lose their digits, and become 0.",
                advice="scale the loss (torch.amp.GradScaler), or use bfloat16.",
            )
            return
