"""Draws a small graph as self-contained SVG text: the loss on top, arguments below their users.

The layout of Sugiyama, Tagawa and Toda (1981): vertices stand in ranks, a long link bends at
each rank that it passes, each rank is ordered by the mean place of its neighbours, and then moved
towards them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from itertools import accumulate, pairwise
from statistics import fmean as mean

from gradtrace.autodiff.graph import Edge, Graph, Operator
from gradtrace.errors import listed, printable

MOST = 400
"""The most operators drawn; larger drawings cannot be read."""

SWEEPS = 8
"""Passes over the ranks that order them, and that place them."""

NAME_CHARS, TOOLTIP_CHARS = 30, 400
GAP, MARGIN = 22.0, 24.0
SIZES = {"name": 13, "shape": 11, "place": 10, "value": 11}

STYLE = """
.gradtrace-graph{--ink:#1f2328;--soft:#59636e;--page:#fff;--line:#a3abb5;--box:#f6f8fa;
--edge:#c4ccd4;--leaf:#e3f3f0;--mark:#0f766e;font-family:system-ui,"Segoe UI",Roboto,sans-serif}
@media (prefers-color-scheme:dark){
.gradtrace-graph{--ink:#e6edf3;--soft:#9aa4af;--page:#0d1117;--line:#545d68;--box:#1a2029;
--edge:#3d444d;--leaf:#0e2b2a;--mark:#2dd4bf}}
.gradtrace-graph text{fill:var(--ink);font-size:11px;text-anchor:middle}
.gradtrace-graph .page{fill:var(--page)}
.gradtrace-graph .link{fill:none;stroke:var(--line);stroke-width:1.25}
.gradtrace-graph .head{fill:var(--line)}
.gradtrace-graph .position{fill:var(--soft);font-size:10px;stroke:var(--page);stroke-width:3px;\
paint-order:stroke}
.gradtrace-graph .box{fill:var(--box);stroke:var(--edge)}
.gradtrace-graph .leaf .box{fill:var(--leaf);stroke:var(--mark)}
.gradtrace-graph .root .box{fill:var(--mark);stroke:var(--mark)}
.gradtrace-graph .aside .box{fill:var(--page);stroke-dasharray:3 2}
.gradtrace-graph .name{font-size:13px;font-weight:600}
.gradtrace-graph .place,.gradtrace-graph .aside .name{font-size:10px;font-weight:400;\
fill:var(--soft)}
.gradtrace-graph .root text{fill:var(--page)}
"""
"""One style sheet under one class: several drawings fit in one page, and style nothing else."""


@dataclass(eq=False)
class Vertex:
    """A box with lines of text (style, text); one without any is a bend of a long link."""

    rank: int
    kind: str = ""
    lines: Sequence[tuple[str, str]] = ()
    tooltip: str = ""
    operator: int | None = None
    above: list[Vertex] = field(default_factory=list)
    below: dict[Vertex, str] = field(default_factory=dict)  # with the positions of arguments
    lane: dict[int, Vertex] = field(default_factory=dict)  # the bends above it, by rank
    x: float = 0.0  # while the ranks are ordered: the place in its rank
    y: float = 0.0

    def __post_init__(self) -> None:
        sizes = [SIZES[style] for style, _ in self.lines]
        widths = (SIZES[style] * sum(map(_breadth, text)) for style, text in self.lines)
        self.width = max(widths) + 26 if sizes else 12.0  # rather too wide: no font to measure
        self.height = sum(sizes) + 4.0 * len(sizes) + 10 if sizes else 0.0

    def tie(self, lower: Vertex, text: str) -> None:
        """Lead to a vertex of the next rank."""
        self.below[lower] = text
        lower.above.append(self)


def draw(graph: Graph, values: Mapping[int | str, object]) -> str:
    """A graph as SVG text; of a large one only the operators nearest the loss, and it says so."""
    ranks = _planned(graph, values)
    _order(ranks)
    _place(ranks)
    leaves, missing = len(graph.leaves), len(graph) - MOST
    title = f"Computation graph: {len(graph) - leaves:,} operators, {leaves:,} leaves, loss on top"
    note = f"Left out: {missing:,} more below the {MOST:,} nearest the loss." if missing > 0 else ""
    return _framed(title, note, [vertex for rank in ranks for vertex in rank])


# What is drawn -----------------------------------------------------------------------------------


def _planned(graph: Graph, values: Mapping[int | str, object]) -> list[list[Vertex]]:
    """Vertices and bends by rank; arguments go from left to right by position."""
    ranks = [0] * len(graph)
    for edge in graph.edges:  # users come first
        if edge.producer is not None:
            ranks[edge.producer] = max(ranks[edge.producer], ranks[edge.consumer] + 1)
    kept = sorted(range(len(graph)), key=ranks.__getitem__)[:MOST]
    again = {operator.module for operator in graph if operator.call}
    shown = {index: _vertex(graph[index], ranks[index], again, values) for index in kept}
    found: list[list[Vertex]] = [[] for _ in range(ranks[kept[-1]] + 2)]
    found[0].append(shown[0])
    for index, upper in shown.items():
        groups: dict[Vertex | str, list[Edge]] = {}
        for edge in graph.arguments(graph[index]):
            drawn = "None" if edge.producer is None else shown.get(edge.producer, "left out")
            groups.setdefault(drawn, []).append(edge)
        for lower, edges in groups.items():
            if isinstance(lower, str):
                lower = _aside(upper.rank + 1, lower, len(edges))
            _link(found, upper, lower, listed((str(edge.position) for edge in edges), 4))
    return [rank for rank in found if rank]


def _link(found: list[list[Vertex]], upper: Vertex, lower: Vertex, text: str) -> None:
    """Tie two vertices, by a bend in each rank between; all links to one vertex share these."""
    if not lower.above and not lower.lane:
        found[lower.rank].append(lower)
    for rank in range(upper.rank + 1, lower.rank):
        known = rank in lower.lane
        bend = lower.lane.setdefault(rank, Vertex(rank))
        upper.tie(bend, text)
        if known:
            return
        found[rank].append(bend)
        upper, text = bend, ""
    upper.tie(lower, text)


def _aside(rank: int, word: str, many: int) -> Vertex:
    """What stands for arguments that are not drawn: without gradient, or too far down."""
    tooltip = "needs no gradient" if word == "None" else "not drawn: the graph is too large"
    text = word if word == "None" and many == 1 else f"{many:,} {word}"
    return Vertex(rank, "aside", [("name", text)], tooltip)


def _vertex(
    operator: Operator, rank: int, again: set[str], values: Mapping[int | str, object]
) -> Vertex:
    """An operator with its output shapes and module, or a leaf with its names."""
    kind, name = "operator", re.sub(r"Backward\d*$", "", operator.name) or operator.name
    if operator.leaf is not None:
        kind, name = "leaf", " = ".join(operator.names or (operator.leaf,))
    shapes = listed(map(str, operator.shapes))
    lines = [("name", _brief(name)), ("shape", shapes)]
    call = f", call {operator.call + 1}" if operator.module in again else ""
    if operator.module:
        lines.append(("place", f"in {_brief(operator.module, NAME_CHARS - 8)}{call}"))
    value = values.get(operator.index, values.get(operator.leaf or ""))
    if value is not None:
        lines.append(("value", _brief(f"{value:.4g}" if isinstance(value, float) else str(value))))
    place = f"in {operator.module or 'no module'}{call}"
    facts = (name, f"operator {operator.index}, shape {shapes}", place)
    tooltip = "\n".join(_brief(fact, TOOLTIP_CHARS) for fact in facts)
    return Vertex(rank, "root" if rank == 0 else kind, lines, tooltip, operator.index)


def _brief(text: str, limit: int = NAME_CHARS) -> str:
    """At most ``limit`` printable characters, more of the end than of the start."""
    start = limit // 3
    for convert in (printable, str):  # cut before escaping too, for speed
        short = text if len(text) <= limit else f"{text[:start]}…{text[start + 1 - limit :]}"
        text = convert(short)
    return text


def _breadth(char: str) -> float:
    """The width of a character in a sans serif, in ems."""
    if unicodedata.east_asian_width(char) in "WF":
        return 1.05
    return 0.4 if char in " .,:;|!'()[]ijlIft" else 0.95 if char in "mwMW@%…" else 0.66


# Where it is drawn -------------------------------------------------------------------------------


def _order(ranks: list[list[Vertex]]) -> None:
    """Sort each rank by the mean place of its neighbours in the rank before, down and up."""
    for sweep in range(SWEEPS + 1):
        down = sweep % 2 == 0
        for rank in ranks if down else ranks[::-1]:
            for vertex in rank:
                near = vertex.above if down else [*vertex.below]
                vertex.x = mean(other.x for other in near) if near else vertex.x
            rank.sort(key=lambda vertex: vertex.x)
            for place, vertex in enumerate(rank):
                vertex.x = float(place)


def _place(ranks: list[list[Vertex]]) -> None:
    """Move the vertices of each rank towards their neighbours, without overlaps."""
    offsets = []
    for rank in ranks:
        steps = ((a.width + b.width) / 2 + GAP for a, b in pairwise(rank))
        offsets.append([*accumulate(steps, initial=0.0)])
        for vertex, offset in zip(rank, offsets[-1]):
            vertex.x = offset - offsets[-1][-1] / 2
    for sweep in range(2 * SWEEPS):
        for r in range(len(ranks))[:: 1 if sweep % 2 == 0 else -1]:
            for vertex, x in zip(ranks[r], _spaced([*map(_goal, ranks[r])], offsets[r])):
                vertex.x = x
    left, y = min(vertex.x - vertex.width / 2 for rank in ranks for vertex in rank), 0.0
    for rank in ranks:
        height = max(vertex.height for vertex in rank)
        for vertex in rank:
            vertex.x, vertex.y = vertex.x - left, y
            vertex.height = vertex.height if vertex.lines else height  # it passes the whole rank
        y += height + 44


def _goal(vertex: Vertex) -> tuple[float, float]:
    """Where a vertex would like to stand, the mean of its neighbours, and its weight there.

    Bends pull bends most, so that long links are straight; what ends in a rank pulls least.
    """
    pulls = [(vertex.x, 0.1)]
    for other in (*vertex.above, *vertex.below):
        ends = not vertex.below or not other.below
        pulls.append((other.x, 0.1 if ends else 1.0 if vertex.lines or other.lines else 8.0))
    weight = sum(w for _, w in pulls)
    return sum(x * w for x, w in pulls) / weight, weight


def _spaced(goals: Sequence[tuple[float, float]], offsets: Sequence[float]) -> list[float]:
    """The positions closest to the goals (x, weight) that keep the distances of ``offsets``.

    With the offsets subtracted this is isotonic regression: pool adjacent violators.
    """
    pools: list[tuple[float, float, int]] = []  # (mean, weight, how many)
    for (goal, weight), offset in zip(goals, offsets):
        mean, many = goal - offset, 1
        while pools and pools[-1][0] > mean:
            other, heavy, more = pools.pop()
            mean = (mean * weight + other * heavy) / (weight + heavy)
            weight, many = weight + heavy, many + more
        pools.append((mean, weight, many))
    means = (mean for mean, _, many in pools for _ in range(many))
    return [mean + offset for mean, offset in zip(means, offsets)]


# The picture -------------------------------------------------------------------------------------


def _framed(title: str, note: str, vertices: Sequence[Vertex]) -> str:
    """The SVG element; its id is a hash of its content, so that drawings in a page differ."""
    boxes = [_box(vertex) for vertex in vertices if vertex.lines]
    body = "\n".join([*(part for vertex in vertices for part in _links(vertex)), *boxes])
    width = max(each.x + each.width / 2 for each in vertices) + 2 * MARGIN
    height = max(each.y + each.height for each in vertices) + 2 * MARGIN
    key = "gradtrace-" + sha256(f"{title}\n{body}".encode()).hexdigest()[:16]
    size = f'width="{round(width)}" height="{round(height)}"'
    words = f'<text style="text-anchor:start" x="{MARGIN:g}" y="16">{note}</text>\n' if note else ""
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" class="gradtrace-graph" role="img" \
aria-labelledby="{key}" viewBox="0 0 {round(width)} {round(height)}" {size}>
<title id="{key}">{title}</title>
<style>{STYLE}</style>
<rect class="page" {size} rx="8"/>
{words}<g transform="translate({MARGIN:g} {MARGIN:g})">
{body}
</g>
</svg>"""


def _links(vertex: Vertex) -> Iterator[str]:
    """Curves from the lower side of a vertex to the next ones, in the order of these."""
    links = sorted(vertex.below.items(), key=lambda link: link[0].x)
    step = min(28.0, (vertex.width - 12) / max(1, len(links)))
    y = vertex.y + vertex.height
    if not vertex.lines:
        yield f'<path class="link" d="M{vertex.x:.1f} {vertex.y:.1f}V{y:.1f}"/>'
    for n, (lower, text) in enumerate(links):
        x, end = vertex.x + step * (n - (len(links) - 1) / 2), lower.y - (6 if lower.lines else 0)
        half = (y + end) / 2
        curve = f"C{x:.1f} {half:.1f} {lower.x:.1f} {half:.1f} {lower.x:.1f} {end:.1f}"
        yield f'<path class="link" d="M{x:.1f} {y:.1f}{curve}"/>'
        if lower.lines:
            yield f'<path class="head" d="M{lower.x:.1f} {lower.y:.1f}l-3.5 -7h7z"/>'
        if text:
            yield f'<text class="position" x="{x:.1f}" y="{y + 12:.1f}">{text}</text>'


def _box(vertex: Vertex) -> str:
    """The box with its text; leaves have round ends, to be recognised without colour."""
    radius = vertex.height / 2 if vertex.kind in ("leaf", "aside") else 7
    texts, base = "", 3.0
    for style, text in vertex.lines:
        base += SIZES[style] + 4
        texts += f'<text class="{style}" y="{base - 2:.1f}">{escape(text)}</text>'
    attribute = "" if vertex.operator is None else f' data-operator="{vertex.operator}"'
    return (
        f'<g class="{vertex.kind}"{attribute} '
        f'transform="translate({vertex.x:.1f} {vertex.y:.1f})">'
        f"<title>{escape(vertex.tooltip)}</title>"
        f'<rect class="box" x="{-vertex.width / 2:.1f}" width="{vertex.width:.1f}" '
        f'height="{vertex.height:.1f}" rx="{radius:.1f}"/>{texts}</g>'
    )
