"""``Attribution``: gradient × input of a scalar, by token, component, neuron and path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from gradtrace.attribution.graph import AttributionGraph
from gradtrace.attribution.graph_data import Sizes
from gradtrace.attribution.graph_making import Attributed, attribution_graph
from gradtrace.attribution.token_scores import Recording, TokenScore
from gradtrace.autodiff.loss_checks import isolated
from gradtrace.components.components import Components
from gradtrace.components.module_parts import ProgramPlaces
from gradtrace.errors import GradtraceError, UnknownName, did_you_mean
from gradtrace.ir import interpreter
from gradtrace.ir.program import Program
from gradtrace.linops import transposed
from gradtrace.paths.paths import Paths
from gradtrace.table import Column, Table
from gradtrace.traced import Trace

MEANINGS = {
    "gradient": "gradient × input",
    "frozen": "gradient × input, attention patterns and denominators of norms constant",
    "attnlrp": "relevance by the rules of AttnLRP",
}


COMPONENTS = Column("component"), Column("score", "number"), Column("of the sum", "share")
NEURONS = Column("neuron", "count"), Column("score", "number"), Column("of all sizes", "share")


@dataclass(frozen=True, repr=False)
class Attribution(Table):
    """How much each element of the inputs moves a scalar f: ``score = ∂f/∂x · (x - baseline)``.

    ``scores`` has them by input, in float64, with the input's shape; the rows are summed over the
    last dimension of inputs that have several: the score of each token. With ``integrated=m`` the
    derivative is its mean over m points on the straight line from the baseline to the input, and
    scores add up to ``f(x) - f(baseline)`` up to an error that ``defect`` says. By
    ``rule="frozen"`` no gradient goes through attention patterns and denominators of norms; by
    ``rule="attnlrp"`` scores are relevance, which the rules of AttnLRP hand on from layer to layer.

    The same is divided by what paths pass: ``by("heads")``, ``by("layers")``, ``at(module)``.
    """

    tokens: tuple[TokenScore, ...] = ()
    scores: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    directions: Mapping[str, Tensor] = field(default_factory=dict, compare=False)  # x - baseline
    value: float = 0.0  # of the scalar; with ``points`` its difference from that at the baseline
    rule: str = "gradient"
    points: int = 0
    unreached: tuple[str, ...] = ()
    recordings: Callable[[], Iterator[Recording]] | None = field(default=None, compare=False)

    @property
    def sum(self) -> float:
        """The sum of all scores."""
        return sum(float(each.sum()) for each in self.scores.values())

    @property
    def defect(self) -> float:
        """``(Σ scores - value) / |value|``: how far scores are from adding up to the scalar, or to
        its difference from that at the baseline.
        """
        return (self.sum - self.value) / abs(self.value) if self.value else float("nan")

    @property
    def trace(self) -> Trace:
        """The trace whose leaves are the inputs: for paths, influence, mass and reports. Of an
        integrated attribution it is that at the first point.
        """
        return next(self._recordings()).trace

    def _recordings(self) -> Iterator[Recording]:
        if self.recordings is None:
            raise GradtraceError("this attribution has scores only; attribute the scalar again")
        return self.recordings()

    # Divisions ------------------------------------------------------------------------------------

    def by(self, components: Components = None) -> Table:
        """The scores by what paths pass: ``Σ (x - baseline) · g_C``, with g_C the gradient through
        a component C. Parts side by side add up; parts in series each have it all.

        Args:
            components: As for ``trace.decompose``: None (modules), ``"layers"``, ``"heads"``,
                names, groups.

        Returns:
            A row for each component.
        """
        found: dict[str, float] = {}
        for trace, weight in self._recordings():
            split = trace.decompose(components)
            for component in split.names:
                grads = split.gradients(component)
                score = sum(
                    float((grad.double() * self.directions[name].double()).sum())
                    for name, grad in grads.items()
                )
                found[component] = found.get(component, 0.0) + weight * score
        rows = tuple((name, score, _share(score, self.sum)) for name, score in found.items())
        return Table("Attribution by component", COMPONENTS, rows, self.notes)  # type: ignore[arg-type]

    def at(self, module: str) -> Tensor:
        """The scores of the elements of a module's output: over all paths through each. They are of
        its last operator; they add up to ``total`` if every path passes the module once.

        Args:
            module: Name of a module.

        Returns:
            A tensor of the shape of its output.
        """
        found = None
        for trace, weight in self._recordings():
            value = _output(trace, module)
            along = {v: self.directions[name].to(trace.device) for v, name in trace.names.items()}
            scores = weight * through_value(trace.program, value, along).double()
            found = scores if found is None else found + scores
        assert found is not None
        return found

    def neurons(self, module: str) -> Table:
        """``at(module)`` summed over all dimensions but the last, the largest first.

        Args:
            module: Name of a module.

        Returns:
            A row for each entry of the last dimension.
        """
        scores = self.at(module)
        each = scores.reshape(-1, scores.shape[-1]).sum(0) if scores.dim() else scores.reshape(1)
        size = float(each.abs().sum())
        rows = tuple((n, x, _share(abs(x), size)) for n, x in enumerate(each.tolist()))
        table = Table(f"Attribution by neuron of {module}", NEURONS, rows)  # type: ignore[arg-type]
        return table.top(max(len(rows), 1), "score")

    def paths(self, name: str | None = None, *, k: int = 5) -> Paths:
        """The ``k`` routes of greatest |weight| from an input; see ``Trace.paths``.

        Args:
            name: Name of an input; needed if there are several.
            k: How many.

        Returns:
            The routes, heaviest first.
        """
        if name is None and len(self.scores) == 1:
            (name,) = self.scores
        if name is None:
            raise GradtraceError(f"say from which input: paths({next(iter(self.scores))!r})")
        if name not in self.scores:
            raise UnknownName(f"no input {name!r}{did_you_mean(name, self.scores)}")
        return self.trace.paths(name, k=k)

    def graph(
        self,
        *,
        nodes: float = 0.8,
        edges: float = 0.98,
        modules: Sequence[str] | None = None,
        positions: bool = False,
        qkv: bool = False,
    ) -> AttributionGraph:
        """The graph by which the inputs move the scalar: positions of inputs, heads and modules,
        the output; an edge has the sum over all paths from one node to the next.

        Norms, residual sums and output projections of attention are no nodes: edges pass through
        them.

        Args:
            nodes: The share of influence that the nodes to keep hold; 1 keeps all.
            edges: The share that the edges to keep hold, of those between these nodes.
            modules: Names or patterns of the modules that are nodes; by default the largest that
                have no residual sum inside, attention divided into heads where these are known.
            positions: Divide nodes by the positions of the inputs, too.
            qkv: What makes the queries, keys and values of a head are nodes before it.

        Returns:
            Nodes and edges with their scores, and how well they are conserved.

        >>> import torch, gradtrace as gt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.ReLU())
        >>> _ = model[0].weight.data.copy_(torch.tensor([[1.0, 2.0], [-1.0, 0.0]]))
        >>> x = torch.tensor([3.0, 4.0])
        >>> graph = gt.watch(model).attribute(lambda x: model(x).sum(), {"x": x}).graph()
        >>> [(edge.source, edge.target, edge.score) for edge in graph.edges]
        [('1', 'output', 11.0), ('0', '1', 11.0), ('x[1]', '0', 8.0), ('x[0]', '0', 3.0)]
        """
        fields = (self.tokens, self.directions, self.value, self.sum, self.rule, self.points)
        found = Attributed(*fields, self._recordings)
        return attribution_graph(found, Sizes(nodes, edges), modules, positions, qkv)


def table_of(found: Attribution) -> Attribution:
    """The attribution with its table: a row for each token, with its score and what part of all
    |scores| it is.
    """
    named = any(row.token for row in found.tokens)
    size = sum(abs(row.score) for row in found.tokens)
    names = Column("input"), Column("position"), *([Column("token")] if named else [])
    rows = tuple(
        (
            row.input,
            ", ".join(map(str, row.position)),
            *([row.token] if named else []),
            row.score,
            _share(abs(row.score), size),
        )
        for row in found.tokens
    )
    title = f"Attribution: {'integrated ' * bool(found.points)}{MEANINGS[found.rule]}"
    about = {"rule": found.rule, "value": found.value}
    shown = replace(found, title=title, columns=(*names, *NEURONS[1:]), about=about)
    return replace(shown, rows=rows, notes=tuple(_notes(found)))  # type: ignore[arg-type]


def _notes(found: Attribution) -> Iterator[str]:
    whole, value = f"{found.sum:.4g}", f"{found.value:.4g}"
    off = f": {'incomplete' if found.points else 'off'} by {found.defect:.2%}" * bool(found.value)
    if found.points:
        many = f"{found.points:,} points"
        yield f"Scores add up to {whole}, and f(input) - f(baseline) is {value}{off} ({many})"
    elif found.rule == "attnlrp":
        yield f"Relevance adds up to {whole}, and the scalar is {value}{off}"
    else:
        yield f"Scores add up to {whole}; the scalar is {value}"
    if found.unreached:
        yield f"the scalar does not depend on {', '.join(found.unreached)}"


def _share(score: float, total: float) -> float | None:
    return score / total if total else None


def _output(trace: Trace, module: str) -> int:
    """The value that is the gradient of a module's output."""
    blocks = trace.program.blocks
    places = ProgramPlaces(trace.program, {}, {}, {})
    alive = [n for n in places.inside.get(module, ()) if blocks[n].takes]
    if not alive:
        known = dict.fromkeys(name for name in places.inside if name)
        raise UnknownName(
            f"no path from an input passes a module {module!r}{did_you_mean(module, known)}"
        )
    calls = {blocks[n].place.call for n in alive if blocks[n].place == blocks[alive[0]].place}
    again = {blocks[n].place.call for n in places.own_blocks(blocks[alive[0]].place.module)}
    if len(calls | again) > 1:
        raise GradtraceError(
            f"{module} was called {len(again)} times, so it has no single output; graph() has a "
            "node for each call, and by('steps') a row for each call of a cell"
        )
    return max(blocks[alive[0]].takes.values(), key=lambda v: prod(places.shapes[v]))


@isolated()
def through_value(program: Program, wanted: int, directions: Mapping[int, Tensor]) -> Tensor:
    """``g ⊙ t`` of the value ``wanted``; ``directions`` are d, by the values of leaves."""
    gradient = _gradient(program, wanted)
    derivative = _derivative(program, wanted, directions)
    return torch.zeros_like(gradient) if derivative is None else gradient * derivative


def _gradient(program: Program, wanted: int) -> Tensor:
    """The gradient of a value."""
    values = {program.root: program.seed}
    last = program.last_uses
    for n, step in enumerate(program.steps()):
        if wanted in values:
            break
        values[step.out] = interpreter.gradient_of(step, program.maps, values)
        for term in step.terms:
            if last[term.value] == n and term.value != wanted:
                values.pop(term.value, None)
    return values[wanted]


def _derivative(program: Program, wanted: int, directions: Mapping[int, Tensor]) -> Tensor | None:
    """The derivative of the tensor whose gradient the value is, along the directions of leaves;
    None if it does not depend on them.
    """
    along = dict(directions)
    for step in reversed(program.steps()):
        here = along.get(step.out) if step.out == wanted else along.pop(step.out, None)
        if step.out == wanted or here is None:
            continue
        for term in step.terms:
            back = transposed(program.maps[term.map]).apply(here)
            there = along.get(term.value)
            along[term.value] = back if there is None else there + back
    return along.get(wanted)
