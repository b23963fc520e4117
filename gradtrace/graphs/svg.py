"""Draws a graph as self-contained SVG text, in the style of the chapter's Figure 1.1."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from itertools import pairwise
from typing import NamedTuple, Protocol

from gradtrace.graphs.layout import Box, GraphLayout, Link, Point, layered, spaced
from gradtrace.graphs.operators import Edge, Operator
from gradtrace.printable import printable

DRAWN_MAX_OPERATORS = 2_000
"""The most operators drawn; larger drawings are unreadable and slow to lay out."""

LINK_MAX_RANKS = 24
"""An argument more ranks below its user than this is named there, without a link to it."""

LISTED_MAX = 3
"""The most items listed one by one: named arguments with their own vertex (more share one),
shapes, and positions.
"""

NAME_MAX_CHARS, TOOLTIP_MAX_CHARS = 30, 400
"""The most characters of a name on a vertex, and in its tooltip."""

MARGIN = 24.0

STYLE = """
.gradtrace-graph{font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.gradtrace-graph text{fill:#1f2328}
.gradtrace-graph g g{text-anchor:middle}
.gradtrace-graph .page{fill:#fff}
.gradtrace-graph .link{fill:none;stroke:#a3abb5;stroke-width:1.25}
.gradtrace-graph .head{fill:#7d8590}
.gradtrace-graph .position{font-size:10px;fill:#59636e;stroke:#fff;\
stroke-width:3px;paint-order:stroke}
.gradtrace-graph .box{fill:#f6f8fa;stroke:#c4ccd4}
.gradtrace-graph .leaf .box{fill:#e3f3f0;stroke:#0f766e}
.gradtrace-graph .root .box{fill:#0f766e;stroke:#0f766e}
.gradtrace-graph .aside .box{fill:#fff;stroke:#c4ccd4;stroke-dasharray:3 2}
.gradtrace-graph .name{font-size:13px;font-weight:600}
.gradtrace-graph .shape{font-size:11px}
.gradtrace-graph .place{font-size:10px;fill:#59636e}
.gradtrace-graph .aside .name{font-size:10px;font-weight:400;fill:#59636e}
.gradtrace-graph .root text{fill:#fff}
.gradtrace-graph .note{font-size:13px}
@media (prefers-color-scheme:dark){
.gradtrace-graph text{fill:#e6edf3}
.gradtrace-graph .page{fill:#0d1117}
.gradtrace-graph .link{stroke:#545d68}
.gradtrace-graph .head{fill:#768390}
.gradtrace-graph .position{fill:#9aa4af;stroke:#0d1117}
.gradtrace-graph .box{fill:#1a2029;stroke:#3d444d}
.gradtrace-graph .leaf .box{fill:#0e2b2a;stroke:#2dd4bf}
.gradtrace-graph .root .box{fill:#2dd4bf;stroke:#2dd4bf}
.gradtrace-graph .aside .box{fill:#0d1117;stroke:#3d444d}
.gradtrace-graph .place,.gradtrace-graph .aside .name{fill:#9aa4af}
.gradtrace-graph .root text{fill:#0d1117}
}
"""
# All drawings share this style sheet under one class, so that several fit in one page and nothing
# else in the page changes. The page rectangle sets the background, so that text stays readable.


class DrawableGraph(Protocol):
    """The interface of ``gradtrace.graphs.graph.Graph`` that drawing needs."""

    @property
    def leaves(self) -> Mapping[str, Operator]:
        """The leaves by name."""

    def __iter__(self) -> Iterator[Operator]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, key: int) -> Operator: ...

    def arguments(self, operator: Operator) -> list[Edge]:
        """The edges to the operator's arguments, by position."""


def draw(graph: DrawableGraph) -> str:
    """The graph as SVG text: the root on top, each argument below the operators that use it.

    Of a large graph only the operators nearest the root are drawn, and a note says how many are
    missing.
    """
    sheet = _plan(graph)
    layout = layered([vertex.box for vertex in sheet.vertices], sheet.links)
    return _frame(sheet, layout, "\n".join(_body(sheet, layout)))


# What is drawn ---------------------------------------------------------------------------------


class TextLine(NamedTuple):
    """A line of text on a vertex: its style, the text, and the size of its type."""

    style: str
    text: str
    size: float

    @property
    def width(self) -> float:
        """The estimated width, rather too wide: there is no font to measure."""
        return self.size * sum(map(_breadth, self.text))


@dataclass
class Vertex:
    """A box with text. ``kind`` is root, operator, leaf, or aside (text for what is not drawn)."""

    kind: str
    rank: int
    lines: list[TextLine]
    tooltip: str
    operator: int | None = None
    ports: float = 0.0  # the width that the argument positions below it need

    @property
    def box(self) -> Box:
        """Its size and rank."""
        beside, around = (12.0, 4.0) if self.kind == "aside" else (26.0, 10.0)
        width = max(line.width for line in self.lines) + beside
        height = sum(line.size + 4 for line in self.lines) + around
        return Box(max(width, self.ports), height, self.rank)


@dataclass
class Sheet:
    """Vertices, and the label of each link between two of them."""

    title: str
    note: str
    vertices: list[Vertex] = field(default_factory=list)
    links: dict[Link, TextLine] = field(default_factory=dict)

    def add(self, vertex: Vertex) -> int:
        """Add a vertex; returns its index."""
        self.vertices.append(vertex)
        return len(self.vertices) - 1


def _plan(graph: DrawableGraph) -> Sheet:
    ranks = _ranks(graph)
    kept = _nearest(graph, ranks)
    sheet = Sheet(_title(graph), _note(len(kept), len(graph) - len(kept)))
    again = {operator.module for operator in graph if operator.call}
    at = {index: sheet.add(_vertex(graph[index], ranks[index], again)) for index in kept}
    for index in kept:
        links = {
            sheet.add(end) if isinstance(end, Vertex) else end: _positions(edges)
            for end, edges in _ends(graph, index, ranks, at)
        }
        sheet.vertices[at[index]].ports = (len(links) - 1) * _step(links.values()) + 16
        sheet.links |= {(at[index], end): label for end, label in links.items()}
    return sheet


def _title(graph: DrawableGraph) -> str:
    leaves = len(graph.leaves)
    return (
        f"Computation graph: {len(graph) - leaves:,} operators and "
        f"{leaves:,} {'leaf' if leaves == 1 else 'leaves'}, the loss on top"
    )


def _note(kept: int, missing: int) -> str:
    if not missing:
        return ""
    return f"Shown: the {kept:,} vertices nearest the loss. Left out: {missing:,} more below them."


def _ranks(graph: DrawableGraph) -> list[int]:
    """The length of the longest path from the root to each operator."""
    ranks = [0] * len(graph)
    for operator in graph:
        below = ranks[operator.index] + 1
        for edge in graph.arguments(operator):
            if edge.producer is not None and ranks[edge.producer] < below:
                ranks[edge.producer] = below
    return ranks


def _nearest(graph: DrawableGraph, ranks: list[int]) -> list[int]:
    """The operators to draw, by rank; all users of a drawn operator are drawn."""
    kept: list[int] = []
    edges = 0
    for index in sorted(range(len(graph)), key=ranks.__getitem__):
        if len(kept) == DRAWN_MAX_OPERATORS or edges > 4 * DRAWN_MAX_OPERATORS:
            break
        kept.append(index)
        edges += len({edge.producer for edge in graph.arguments(graph[index])})
    return kept


def _vertex(operator: Operator, rank: int, again: set[str]) -> Vertex:
    """The vertex of an operator (with output shapes and module) or of a leaf (with its names)."""
    shapes = ", ".join(map(str, operator.shapes[:LISTED_MAX]))
    more = len(operator.shapes) - LISTED_MAX
    if operator.leaf is None:
        name, kind = _short(operator.name), "root" if rank == 0 else "operator"
    else:
        name, kind = " = ".join(operator.names or (operator.leaf,)), "leaf"
    lines = [
        TextLine("name", _brief(name, NAME_MAX_CHARS), 13),
        TextLine("shape", f"{shapes} and {more} more" if more > 0 else shapes, 11),
    ]
    call = f", call {operator.call + 1}" if operator.module in again else ""
    if operator.module:
        lines.append(TextLine("place", f"in {_brief(operator.module, NAME_MAX_CHARS)}{call}", 10))
    return Vertex(kind, rank, lines, _tooltip(operator, name), operator.index)


def _tooltip(operator: Operator, name: str) -> str:
    """The tooltip: the full text of what is shortened on the vertex, and the operator's index."""
    what = f"operator {operator.index}" if operator.leaf is None else "leaf"
    parts = [f"{name} ({what})", f"shape {', '.join(map(str, operator.shapes))}"]
    if operator.module:
        parts.append(f"in call {operator.call + 1} of {operator.module}")
    return "\n".join(_brief(part, TOOLTIP_MAX_CHARS) for part in parts)


def _short(name: str) -> str:
    """``AddmmBackward0`` -> ``Addmm``: all of them are backward nodes."""
    return re.sub(r"Backward\d*$", "", name) or name


def _ends(
    graph: DrawableGraph, index: int, ranks: list[int], at: dict[int, int]
) -> Iterator[tuple[int | Vertex, list[Edge]]]:
    """The ends of an operator's links, each with the edges it represents.

    An end is a vertex of the sheet, or a new aside vertex: for arguments that need no gradient, are
    left out, or are too many ranks below.
    """
    groups: dict[tuple[str, int | None], list[Edge]] = {}
    for edge in graph.arguments(graph[index]):
        groups.setdefault(_link_kind(edge, ranks, at), []).append(edge)
    kinds = Counter(kind for kind, _ in groups)
    merged: dict[tuple[str, int | None], list[Edge]] = {}
    for (kind, which), edges in groups.items():
        crowded = kind != "near" and kinds[kind] > LISTED_MAX
        merged.setdefault((kind, None if crowded else which), []).extend(edges)
    for (kind, which), edges in merged.items():
        if kind == "near" and which is not None:
            yield at[which], edges
        else:
            yield _aside(kind, edges, graph, ranks[index] + 1), edges


def _link_kind(edge: Edge, ranks: list[int], at: dict[int, int]) -> tuple[str, int | None]:
    """How to draw an edge, and the key by which edges share a link."""
    if edge.producer is None:
        return "none", edge.position
    if edge.producer not in at:
        return "cut", None
    far = ranks[edge.producer] - ranks[edge.consumer] > LINK_MAX_RANKS
    return "far" if far else "near", edge.producer


def _aside(kind: str, edges: list[Edge], graph: DrawableGraph, rank: int) -> Vertex:
    """A vertex with text that stands for arguments."""
    producers = [graph[i] for i in dict.fromkeys(e.producer for e in edges) if i is not None]
    if kind == "none":
        text = "None" if len(edges) == 1 else f"{len(edges):,} None"
        tooltip = "needs no gradient"
    elif kind == "cut":
        text, tooltip = f"{len(producers):,} left out", "not drawn: the graph is too large"
    elif len(producers) == 1:
        text = f"↓ {_called(producers[0])}"
        tooltip = f"further down: {_brief(_called(producers[0]), TOOLTIP_MAX_CHARS)}"
    else:
        text = f"↓ {len(producers):,} further down"
        tooltip = _brief(
            "further down: " + ", ".join(map(_called, producers[:LINK_MAX_RANKS])),
            TOOLTIP_MAX_CHARS,
        )
    return Vertex("aside", rank, [TextLine("name", _brief(text, NAME_MAX_CHARS), 10)], tooltip)


def _called(operator: Operator) -> str:
    """The name of a leaf, or the short name and index of an operator."""
    return operator.leaf or f"{_short(operator.name)} (operator {operator.index})"


def _positions(edges: list[Edge]) -> TextLine:
    """``0``, or ``0, 1`` where one value is two arguments."""
    shown = ", ".join(str(edge.position) for edge in edges[:LISTED_MAX])
    last = f" … {edges[-1].position}" if len(edges) > LISTED_MAX else ""
    return TextLine("position", shown + last, 10)


def _step(labels: Iterable[TextLine]) -> float:
    """The distance between the starts of a vertex's links, such that labels do not touch."""
    return max((label.width for label in labels), default=0.0) * 2 + 14


# Text ------------------------------------------------------------------------------------------


def _brief(text: str, limit: int) -> str:
    """At most ``limit`` printable characters; cut before escaping as well, for speed."""
    return _cut(printable(_cut(text, limit)), limit)


def _cut(text: str, limit: int) -> str:
    """Shorten to ``limit``, keeping more of the end than of the start: names differ there."""
    start = limit // 3
    return text if len(text) <= limit else f"{text[:start]}…{text[start + 1 - limit :]}"


def _breadth(char: str) -> float:
    """The width of a character in a sans serif, in ems."""
    if char in " .,:;|!'()[]ijlIft":
        return 0.4
    if unicodedata.east_asian_width(char) in "WF":
        return 1.05
    return 0.95 if char in "mwMW@%→↓…" else 0.75 if char.isupper() else 0.64


# The picture -----------------------------------------------------------------------------------


def _frame(sheet: Sheet, layout: GraphLayout, body: str) -> str:
    """The SVG element; its id is a hash of its content, so drawings in a page do not collide."""
    note = TextLine("note", sheet.note, 13)
    above = MARGIN + (30 if sheet.note else 0)
    width = round(max(layout.width, note.width) + 2 * MARGIN)
    height = round(layout.height + above + MARGIN)
    title = escape(f"{sheet.title}. {sheet.note}".strip())
    key = "gradtrace-" + sha256(f"{title}\n{body}".encode()).hexdigest()[:16]
    words = f'<text class="note" x="{MARGIN:g}" y="{MARGIN + 13:g}">{escape(sheet.note)}</text>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="gradtrace-graph" role="img" '
            f'aria-labelledby="{key}" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}">',
            f'<title id="{key}">{title}</title>',
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
            *([words] if sheet.note else []),
            f'<g transform="translate({(width - layout.width) / 2:g} {above:g})">',
            body,
            "</g>",
            "</svg>",
        ]
    )


def _body(sheet: Sheet, layout: GraphLayout) -> Iterator[str]:
    """Links first, then vertices, then argument positions, so that no text is covered."""
    starts = _starts(sheet, layout)
    for link in sheet.links:
        yield _curve([starts[link], *layout.bends[link], layout.tops[link[1]]])
    for end in sorted({end for _, end in sheet.links}):
        x, y = layout.tops[end]
        yield f'<path class="head" d="M{x:.1f} {y:.1f}l-3.5 -7h7z"/>'
    for vertex, top in zip(sheet.vertices, layout.tops, strict=True):
        yield _vertex_svg(vertex, top)
    for link, label in sheet.links.items():
        yield _position(label.text, starts[link], _goal(link, layout))


def _position(text: str, start: Point, goal: float) -> str:
    """The label of a link, on the side the link does not turn to."""
    x, y = start
    side, anchor = (-4, "end") if goal > x + 1 else (4, "start")
    where = f'x="{x + side:.1f}" y="{y + 12:.1f}" text-anchor="{anchor}"'
    return f'<text class="position" {where}>{text}</text>'


def _starts(sheet: Sheet, layout: GraphLayout) -> dict[Link, Point]:
    """Where links leave the lower side of a vertex: above their targets, where possible."""
    leaving: dict[int, list[Link]] = {}
    for link in sheet.links:
        leaving.setdefault(link[0], []).append(link)
    starts = {}
    for upper, links in leaving.items():
        (x, top), box = layout.tops[upper], sheet.vertices[upper].box
        step = _step(sheet.links[link] for link in links)
        half = box.width / 2 - 8
        goals = {link: _goal(link, layout) for link in links}
        links.sort(key=goals.__getitem__)
        preferred = [_preferred(goals[link], x, half) for link in links]
        offsets = [step * i for i in range(len(links))]
        for link, start in zip(
            links, spaced(preferred, offsets, (x - half, x + half)), strict=True
        ):
            starts[link] = (start, top + box.height)
    return starts


def _goal(link: Link, layout: GraphLayout) -> float:
    """The x of the first point after the start of a link."""
    (x, _), *_ = [*layout.bends[link], layout.tops[link[1]]]
    return x


def _preferred(goal: float, x: float, half: float) -> Point:
    """The preferred start (x, weight) of a link: above a goal below the vertex, with a large
    weight; else at the end of that side, with a small one.
    """
    if abs(goal - x) <= half:
        return goal, 1e6
    return x + (half if goal > x else -half), 1.0


def _curve(points: list[Point]) -> str:
    """A path through the points, vertical at each of them."""
    (x, y), *_ = points
    parts = [f"M{x:.1f} {y:.1f}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        half = (y0 + y1) / 2
        bent = f"C{x0:.1f} {half:.1f} {x1:.1f} {half:.1f} {x1:.1f} {y1:.1f}"
        parts.append(f"V{y1:.1f}" if x0 == x1 else bent)
    return f'<path class="link" d="{"".join(parts)}"/>'


def _vertex_svg(vertex: Vertex, top: Point) -> str:
    """The box with its text; leaves have round ends, to be recognised without colour."""
    width, height, _ = vertex.box
    radius = 7 if vertex.kind in ("root", "operator") else height / 2
    x, y = top
    parts = [
        f"<title>{escape(vertex.tooltip)}</title>",
        f'<rect class="box" x="{-width / 2:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{radius:.1f}"/>',
    ]
    base = (height - sum(line.size + 4 for line in vertex.lines)) / 2
    for line in vertex.lines:
        base += line.size + 4
        parts.append(f'<text class="{line.style}" y="{base - 4:.1f}">{escape(line.text)}</text>')
    attribute = "" if vertex.operator is None else f' data-operator="{vertex.operator}"'
    where = f'transform="translate({x:.1f} {y:.1f})"'
    return f'<g class="{vertex.kind}"{attribute} {where}>{"".join(parts)}</g>'
