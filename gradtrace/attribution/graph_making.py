"""Makes and prunes ``AttributionGraph``: from scores of edges to influence, and to what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import accumulate, product
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from gradtrace.attribution.graph import AttributionGraph
from gradtrace.attribution.graph_data import (
    GraphEdge,
    GraphNode,
    InputPositions,
    ModelShape,
    Sizes,
)
from gradtrace.attribution.graph_edges import OUTPUT, Cells, EdgeFinder, Edges
from gradtrace.attribution.graph_sites import Site, SiteFinder
from gradtrace.attribution.token_scores import Recording, TokenScore
from gradtrace.components.module_parts import ModuleParts
from gradtrace.errors import GradtraceError
from gradtrace.pytorch.wrapped_modules import named_modules
from gradtrace.traced import Trace
from gradtrace.types import Shape

T = TypeVar("T")

IN_SERIES = 1 - 1e-9
"""A node of this influence or more is passed by all paths."""


@dataclass(frozen=True)
class Attributed:
    """What a graph is made of: the fields of an ``Attribution``."""

    rows: Sequence[TokenScore]
    directions: Mapping[str, Tensor]
    value: float
    total: float
    rule: str
    points: int
    recordings: Callable[[], Iterator[Recording]]


def attribution_graph(
    found: Attributed, asked: Sizes, modules: Sequence[str] | None, positions: bool, qkv: bool
) -> AttributionGraph:
    """The graph of an attribution, pruned to these shares of the influence of nodes and edges."""
    for name, share in asked._asdict().items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise GradtraceError(f"{name} is the share of influence to keep, in (0, 1]: {share!r}")
    lead = _lead(found) if positions else ()
    scores: Edges = {}
    known: dict[str, GraphNode] = _input_nodes(found)
    for trace, weight in found.recordings():
        finder = _site_finder(trace)
        sites = finder.find(modules, qkv)
        each = _edges_of(trace, found, finder.parts, sites, lead)
        known |= _site_nodes(sites, lead)
        for ends, score in each.items():
            scores[ends] = scores.get(ends, 0.0) + weight * score
    known[OUTPUT] = GraphNode(OUTPUT, "output", OUTPUT, score=found.total)
    shape = _model_shape(finder, sites, scores, found)
    return replace(_pruned(found, known, scores, asked), inputs=_positions(found), model=shape)


def _site_finder(trace: Trace) -> SiteFinder:
    model = {} if trace.model is None else dict(named_modules(trace.model))
    aliases = {name: trace.aliases.get(name, ()) for name in trace.leaves}
    return SiteFinder(ModuleParts(trace.program, model, trace.names, aliases))


def _positions(found: Attributed) -> dict[str, InputPositions]:
    """The positions and tokens of each input."""
    shapes = {name: tuple(x.shape) for name, x in found.directions.items()}
    outer = {name: shape[:-1] if len(shape) > 1 else shape for name, shape in shapes.items()}
    words: dict[str, list[str]] = {name: [] for name in shapes}
    for row in found.rows:
        words[row.input].append(row.token)
    return {name: InputPositions(outer[name], tuple(words[name])) for name in shapes}


def _model_shape(
    finder: SiteFinder, sites: Sequence[Site], scores: Edges, found: Attributed
) -> ModelShape | None:
    """The shape of a model with one list of layers, each with the same number of heads."""
    mixing = [site for site in sites if site.kind == "head" and not site.letters]
    heads = {len(site.names) for site in mixing}
    layers = [site.layer for site in mixing]
    count = len(next(iter(finder.lists.values()), ()))
    if (
        len(finder.lists) != 1
        or len(heads) != 1
        or sorted(map(str, layers)) != sorted(map(str, range(count)))
    ):
        return None
    layer = {name: site.layer for site in sites for name in site.names}
    others = {name for site in sites if site.kind == "module" for name in site.names}
    own = {name for site in mixing for name in site.names}
    series = any(s in own and t in others and layer[s] == layer[t] for s, t in scores)
    width = next(iter(found.directions.values())).shape[-1]
    return ModelShape(count, heads.pop(), width, not series)


def _edges_of(
    trace: Trace, found: Attributed, parts: ModuleParts, sites: Sequence[Site], lead: Shape
) -> Edges:
    """The scores of edges between the sites of a recording."""
    along = {v: found.directions[name].to(trace.device) for v, name in trace.names.items()}
    inputs = {v: _input_cells(trace.names[v], tuple(x.shape), x.device) for v, x in along.items()}
    return EdgeFinder(parts, sites, inputs, along, lead).find()


# Nodes -------------------------------------------------------------------------------------------


def _input_cells(name: str, shape: Shape, device: torch.device) -> Cells:
    """A node for each position: for every element but those of the last of several dimensions."""
    outer = tuple(shape[:-1] if len(shape) > 1 else shape)
    names = [_input_id(name, place) for place in product(*map(range, outer))]
    at = torch.arange(prod(outer), device=device).reshape(outer + (1,) * (len(shape) - len(outer)))
    return Cells(names, at.expand(tuple(shape)))


def _input_id(name: str, position: Iterable[int]) -> str:
    return f"{name}[{','.join(map(str, position))}]"


def _input_nodes(found: Attributed) -> dict[str, GraphNode]:
    nodes = {}
    for row in found.rows:
        name = _input_id(row.input, row.position)
        more = {"input": row.input, "position": row.position, "score": row.score}
        nodes[name] = GraphNode(name, "input", row.token or name, **more)  # type: ignore[arg-type]
    return nodes


def _site_nodes(sites: Iterable[Site], lead: Shape) -> dict[str, GraphNode]:
    nodes = {}
    for site in sites:
        for name in site.names:
            nodes[name] = GraphNode(name, site.kind, name, site.module, layer=site.layer)
            for place in product(*map(range, lead)) if lead else ():
                here = f"{name} at {','.join(map(str, place))}"
                nodes[here] = nodes[name]._replace(id=here, label=here, position=place)
    return nodes


def _lead(found: Attributed) -> Shape:
    """The positions of the inputs, which must be the same for all."""
    shapes = {tuple(x.shape[:-1]) for x in found.directions.values()}
    if len(shapes) > 1 or not min(shapes):
        raise GradtraceError(
            "positions=True divides modules by the positions of inputs, (..., position, width), "
            f"which must be the same for all: {', '.join(map(str, sorted(shapes)))}"
        )
    return shapes.pop()


# Influence ---------------------------------------------------------------------------------------


def influences(edges: Mapping[tuple[str, str], float]) -> tuple[dict[str, float], Edges]:
    """The influence of nodes and edges: ``i(u → v) = i(v) |s(u → v)| / Σ_w |s(w → v)|``, and
    ``i(u) = Σ_v i(u → v)``, with 1 at the output.
    """
    into: dict[str, list[str]] = {}
    for source, target in edges:
        into.setdefault(target, []).append(source)
    nodes, shares = {OUTPUT: 1.0}, {}
    for target in reversed(_ordered(edges)):
        sources = into.get(target, ())
        size = sum(abs(edges[source, target]) for source in sources)
        for source in sources if size and target in nodes else ():
            share = nodes[target] * abs(edges[source, target]) / size
            shares[source, target] = share
            nodes[source] = nodes.get(source, 0.0) + share
    return nodes, shares


def _ordered(edges: Iterable[tuple[str, str]]) -> list[str]:
    """The nodes, each after those that have an edge to it."""
    before: dict[str, list[str]] = {OUTPUT: []}
    for source, target in edges:
        before.setdefault(target, []).append(source)
    return list(TopologicalSorter(before).static_order())


def _ranks(edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """The length of the longest way to each node."""
    before: dict[str, list[str]] = {}
    for source, target in edges:
        before.setdefault(target, []).append(source)
    found: dict[str, int] = {}
    for name in _ordered(edges):
        found[name] = max((found[x] + 1 for x in before.get(name, ())), default=0)
    return found


# Pruning -----------------------------------------------------------------------------------------


def _pruned(
    found: Attributed, known: Mapping[str, GraphNode], scores: Edges, asked: Sizes
) -> AttributionGraph:
    """The graph of the nodes and edges of most influence, without dead ends."""
    nodes, edges, kept = prune(scores, asked)
    through, _ = influences(scores)
    ranks, (inside, outside) = _ranks(scores), _sums(scores)
    chosen = [
        known[name]._replace(
            rank=ranks[name],
            influence=through.get(name, 0.0),
            score=found.total if name == OUTPUT else outside.get(name, 0.0),
        )
        for name in sorted((name for name in known if name in nodes), key=lambda name: ranks[name])
    ]
    order = sorted((ends for ends in scores if ends in edges), key=lambda ends: -edges[ends])
    return AttributionGraph(
        tuple(chosen),
        tuple(GraphEdge(*ends, scores[ends], edges[ends]) for ends in order),
        found.value,
        found.total,
        found.rule,
        found.points,
        _defect(found, known, scores, inside, outside),
        asked,
        kept,
        Sizes(len(ranks), len(scores)),
    )


def _sums(scores: Edges) -> tuple[dict[str, float], dict[str, float]]:
    """What enters, and what leaves, each node."""
    inside: dict[str, float] = {}
    outside: dict[str, float] = {}
    for (source, target), score in scores.items():
        inside[target] = inside.get(target, 0.0) + score
        outside[source] = outside.get(source, 0.0) + score
    return inside, outside


def _defect(
    found: Attributed,
    known: Mapping[str, GraphNode],
    scores: Edges,
    inside: Mapping[str, float],
    outside: Mapping[str, float],
) -> float:
    """The largest difference between what enters and leaves a node, as a part of the largest edge;
    the score of a position enters an input, and the sum of all leaves the output.
    """
    given = {name: node.score for name, node in known.items() if node.kind == "input"}
    enters, leaves = {**inside, **given}, {**outside, OUTPUT: found.total}
    differences = (abs(enters.get(x, 0.0) - leaves.get(x, 0.0)) for x in {*enters, *leaves})
    largest = max(map(abs, scores.values()), default=0.0)
    return max(differences, default=0.0) / largest if largest else 0.0


def prune(scores: Edges, asked: Sizes) -> tuple[set[str], Edges, Sizes]:
    """The nodes that hold a share of the influence of those which paths can avoid; of the edges
    between these, inputs, output and what all paths pass, the ones that hold a share of their
    influence; the shares that are kept. What lies on no way from an input to the output is left
    out.
    """
    through, _ = influences(scores)
    starts = {source for source, _ in scores} - {target for _, target in scores}
    inner = {name: x for name, x in through.items() if name not in starts and x < IN_SERIES}
    always = {name for name in through if name not in inner}
    nodes = {*_largest(inner, asked.nodes), *always}
    between = {ends: x for ends, x in scores.items() if nodes.issuperset(ends)}
    _, weights = influences(between)
    edges = set(_largest(weights, asked.edges))
    while dead := _dead_ends(edges, starts):
        edges -= dead
    nodes = {end for ends in edges for end in ends} | {OUTPUT}
    held = [sum(inner.get(name, 0.0) for name in nodes), sum(weights[e] for e in edges)]
    whole = [sum(inner.values()), sum(weights.values())]
    kept = Sizes(*(min(part / all_, 1.0) if all_ else 1.0 for part, all_ in zip(held, whole)))
    return nodes, {ends: weights[ends] for ends in edges}, kept


def _largest(influence: Mapping[T, float], share: float) -> list[T]:
    """The largest that together hold a share, and all as large as the smallest of these."""
    order = sorted(influence, key=lambda key: -influence[key])
    whole, sums = sum(influence.values()), accumulate(influence[key] for key in order)
    if share == 1 or not whole:
        return order
    last = next((n for n, held in enumerate(sums) if held >= share * whole), len(order) - 1)
    return [key for key in order if influence[key] >= influence[order[last]]]


def _dead_ends(edges: set[tuple[str, str]], starts: set[str]) -> set[tuple[str, str]]:
    """Edges from a node that no edge enters, or to one that no edge leaves."""
    entered, left = {target for _, target in edges} | starts, {source for source, _ in edges}
    return {
        (source, target)
        for source, target in edges
        if source not in entered or (target not in left and target != OUTPUT)
    }
