"""Draws a graph as self-contained SVG text, in the style of the chapter's Figure 1.1."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from itertools import groupby, pairwise
from math import copysign
from operator import itemgetter
from typing import NamedTuple

from gradtrace.errors import listed, printable
from gradtrace.graphs.layout import Box, GraphLayout, Link, Point, layered, spaced
from gradtrace.graphs.operators import Edge, Operator
from gradtrace.graphs.tuning import (
    DRAWN_MAX_OPERATORS,
    LINK_MAX_RANKS,
    LISTED_MAX,
    MARGIN_PX,
    NAME_MAX_CHARS,
    TOOLTIP_MAX_ARGUMENTS,
    TOOLTIP_MAX_CHARS,
)

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


def draw(operators: Sequence[Operator], arguments: Mapping[int, Sequence[Edge]]) -> str:
    """A graph as SVG text: the root on top, each argument below the operators that use it.

    ``arguments`` are the edges by consumer. Of a large graph only the operators nearest the root
    are drawn, and a note says how many are missing.
    """
    plan = _Plan(operators, arguments)
    layout = layered([vertex.box for vertex in plan.vertices], plan.links)
    leaves = sum(operator.leaf is not None for operator in operators)
    title = (
        f"Computation graph: {len(operators) - leaves:,} operators and "
        f"{leaves:,} {'leaf' if leaves == 1 else 'leaves'}, the loss on top"
    )
    shown, missing = f"{len(plan.at):,}", len(operators) - len(plan.at)
    note = f"Shown: the {shown} vertices nearest the loss. Left out: {missing:,} more below them."
    return _frame(title, note if missing else "", layout, "\n".join(_body(plan, layout)))


# What is drawn ---------------------------------------------------------------------------------


class _Plan:
    """Vertices, and the label of each link between two of them."""

    def __init__(
        self, operators: Sequence[Operator], arguments: Mapping[int, Sequence[Edge]]
    ) -> None:
        self.operators, self.arguments = operators, arguments
        self.ranks = [0] * len(operators)  # the length of the longest path from the root
        for edge in (edge for index in range(len(operators)) for edge in arguments.get(index, ())):
            if edge.producer is not None:
                below = self.ranks[edge.consumer] + 1
                self.ranks[edge.producer] = max(self.ranks[edge.producer], below)
        kept = self._nearest()
        again = {operator.module for operator in operators if operator.call}
        self.vertices = [_vertex(operators[i], self.ranks[i], again) for i in kept]
        self.at = {index: n for n, index in enumerate(kept)}  # operator -> vertex
        self.links: dict[Link, TextLine] = {}
        for upper, index in enumerate(kept):
            ends = {lower: _positions(edges) for lower, edges in self._ends(index)}
            self.vertices[upper].ports = (len(ends) - 1) * _step(ends.values()) + 16
            self.links |= {(upper, lower): label for lower, label in ends.items()}

    def _nearest(self) -> list[int]:
        """The operators to draw, by rank; all users of a drawn operator are drawn."""
        kept: list[int] = []
        edges = 0
        for index in sorted(range(len(self.operators)), key=self.ranks.__getitem__):
            if len(kept) == DRAWN_MAX_OPERATORS or edges > 4 * DRAWN_MAX_OPERATORS:
                break
            kept.append(index)
            edges += len({edge.producer for edge in self.arguments.get(index, ())})
        return kept

    def _ends(self, index: int) -> Iterator[tuple[int, list[Edge]]]:
        """The lower vertices of an operator's links, each with the edges it represents.

        Arguments that need no gradient, are left out, or are too many ranks below get an aside
        vertex of their own, or one together if they are many.
        """
        groups: dict[tuple[str, int | None], list[Edge]] = {}
        for edge in self.arguments.get(index, ()):
            groups.setdefault(self._kind(edge), []).append(edge)
        kinds = Counter(kind for kind, _ in groups)
        merged: dict[tuple[str, int | None], list[Edge]] = {}
        for (kind, which), edges in groups.items():
            crowded = kind != "near" and kinds[kind] > LISTED_MAX
            merged.setdefault((kind, None if crowded else which), []).extend(edges)
        for (kind, which), edges in merged.items():
            if kind == "near" and which is not None:
                yield self.at[which], edges
            else:
                self.vertices.append(self._aside(kind, edges, self.ranks[index] + 1))
                yield len(self.vertices) - 1, edges

    def _kind(self, edge: Edge) -> tuple[str, int | None]:
        """How to draw an edge, and the key by which edges share a link."""
        if edge.producer is None:
            return "none", edge.position
        if edge.producer not in self.at:
            return "cut", None
        far = self.ranks[edge.producer] - self.ranks[edge.consumer] > LINK_MAX_RANKS
        return "far" if far else "near", edge.producer

    def _aside(self, kind: str, edges: list[Edge], rank: int) -> Vertex:
        """A vertex with text that stands for arguments."""
        below = list(dict.fromkeys(e.producer for e in edges if e.producer is not None))
        if kind == "none":
            text = "None" if len(edges) == 1 else f"{len(edges):,} None"
            tooltip = "needs no gradient"
        elif kind == "cut":
            text, tooltip = f"{len(below):,} left out", "not drawn: the graph is too large"
        else:
            names = [_called(self.operators[i]) for i in below[:TOOLTIP_MAX_ARGUMENTS]]
            text = f"↓ {names[0] if len(below) == 1 else f'{len(below):,} further down'}"
            tooltip = _brief(f"further down: {', '.join(names)}", TOOLTIP_MAX_CHARS)
        return Vertex("aside", rank, [TextLine("name", _brief(text, NAME_MAX_CHARS), 10)], tooltip)


def _vertex(operator: Operator, rank: int, again: set[str]) -> Vertex:
    """The vertex of an operator (with output shapes and module) or of a leaf (with its names); the
    tooltip has the full text of what is shortened, and the operator's index.
    """
    shapes = [str(shape) for shape in operator.shapes]
    if operator.leaf is None:
        name, kind = _short(operator.name), "root" if rank == 0 else "operator"
        what = f"operator {operator.index}"
    else:
        name, kind, what = " = ".join(operator.names or (operator.leaf,)), "leaf", "leaf"
    lines = [
        TextLine("name", _brief(name, NAME_MAX_CHARS), 13),
        TextLine("shape", listed(shapes, LISTED_MAX), 11),
    ]
    tooltip = [f"{name} ({what})", f"shape {', '.join(shapes)}"]
    if operator.module:
        call = f", call {operator.call + 1}" if operator.module in again else ""
        lines.append(TextLine("place", f"in {_brief(operator.module, NAME_MAX_CHARS)}{call}", 10))
        tooltip.append(f"in call {operator.call + 1} of {operator.module}")
    text = "\n".join(_brief(part, TOOLTIP_MAX_CHARS) for part in tooltip)
    return Vertex(kind, rank, lines, text, operator.index)


def _short(name: str) -> str:
    """``AddmmBackward0`` -> ``Addmm``: all of them are backward nodes."""
    return re.sub(r"Backward\d*$", "", name) or name


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


def _brief(text: str, limit: int) -> str:
    """At most ``limit`` printable characters, more of the end than of the start: names differ
    there. Also cut before escaping, for speed.
    """
    start = limit // 3
    for convert in (printable, str):
        short = text if len(text) <= limit else f"{text[:start]}…{text[start + 1 - limit :]}"
        text = convert(short)
    return text


def _breadth(char: str) -> float:
    """The width of a character in a sans serif, in ems."""
    if char in " .,:;|!'()[]ijlIft":
        return 0.4
    if unicodedata.east_asian_width(char) in "WF":
        return 1.05
    return 0.95 if char in "mwMW@%→↓…" else 0.75 if char.isupper() else 0.64


# The picture -----------------------------------------------------------------------------------


def _frame(title: str, note: str, layout: GraphLayout, body: str) -> str:
    """The SVG element; its id is a hash of its content, so drawings in a page do not collide."""
    above = MARGIN_PX + (30 if note else 0)
    width = round(max(layout.width, TextLine("note", note, 13).width) + 2 * MARGIN_PX)
    height = round(layout.height + above + MARGIN_PX)
    title = escape(f"{title}. {note}".strip())
    key = "gradtrace-" + sha256(f"{title}\n{body}".encode()).hexdigest()[:16]
    words = f'<text class="note" x="{MARGIN_PX:g}" y="{MARGIN_PX + 13:g}">{escape(note)}</text>\n'
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" class="gradtrace-graph" role="img" \
aria-labelledby="{key}" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title id="{key}">{title}</title>
<style>{STYLE}</style>
<rect class="page" width="{width}" height="{height}" rx="8"/>
{words if note else ""}<g transform="translate({(width - layout.width) / 2:g} {above:g})">
{body}
</g>
</svg>"""


def _body(plan: _Plan, layout: GraphLayout) -> Iterator[str]:
    """Links first, then vertices, then argument positions, so that no text is covered."""
    starts = _starts(plan, layout)
    for link, points in layout.points.items():
        yield _curve([starts[link], *points])
    for end in sorted({end for _, end in plan.links}):
        x, y = layout.tops[end]
        yield f'<path class="head" d="M{x:.1f} {y:.1f}l-3.5 -7h7z"/>'
    for vertex, top in zip(plan.vertices, layout.tops, strict=True):
        yield _vertex_svg(vertex, top)
    for link, label in plan.links.items():  # on the side that the link does not turn to
        (x, y), (goal, _) = starts[link], layout.points[link][0]
        side, anchor = (-4, "end") if goal > x + 1 else (4, "start")
        where = f'x="{x + side:.1f}" y="{y + 12:.1f}" text-anchor="{anchor}"'
        yield f'<text class="position" {where}>{label.text}</text>'


def _starts(plan: _Plan, layout: GraphLayout) -> dict[Link, Point]:
    """Where links leave the lower side of a vertex: above their next points, where possible, else
    towards the end of that side.
    """
    starts: dict[Link, Point] = {}
    for upper, leaving in groupby(plan.links, key=itemgetter(0)):
        (x, top), box = layout.tops[upper], plan.vertices[upper].box
        half = box.width / 2 - 8
        links = sorted(leaving, key=lambda link: layout.points[link][0][0])
        preferred = [
            (goal, 1e6) if abs(goal - x) <= half else (x + copysign(half, goal - x), 1.0)
            for goal in (layout.points[link][0][0] for link in links)
        ]
        step = _step(plan.links[link] for link in links)
        offsets = [step * i for i in range(len(links))]
        found = spaced(preferred, offsets, (x - half, x + half))
        starts |= {link: (at, top + box.height) for link, at in zip(links, found, strict=True)}
    return starts


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
    base = (height - sum(line.size + 4 for line in vertex.lines)) / 2
    texts = []
    for line in vertex.lines:
        base += line.size + 4
        texts.append(f'<text class="{line.style}" y="{base - 4:.1f}">{escape(line.text)}</text>')
    attribute = "" if vertex.operator is None else f' data-operator="{vertex.operator}"'
    return (
        f'<g class="{vertex.kind}"{attribute} transform="translate({top[0]:.1f} {top[1]:.1f})">'
        f"<title>{escape(vertex.tooltip)}</title>"
        f'<rect class="box" x="{-width / 2:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{radius:.1f}"/>{"".join(texts)}</g>'
    )
