"""The pictures of "How it works". Every number in them is asked of gradtrace when they are drawn.

``python docs/pictures/draw.py`` writes them; a test draws them again and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.paths.paths import Path as Traced
from gradtrace.semirings import ABS, MAX, SUM
from gradtrace.table import Table

LIGHT = "--ink:#1f2328;--soft:#636c76;--line:#b9c0c8;--accent:#2b59c3;--panel:#f5f6f8"
DARK = "--ink:#e6e8ea;--soft:#a3acb6;--line:#59636e;--accent:#8fb0ff;--panel:#23282e"
STYLE = (
    f".gtp{{{LIGHT}}}"
    f"@media(prefers-color-scheme:dark){{.gtp{{{DARK}}}}}"
    f'body[data-theme="light"] .gtp{{{LIGHT}}}body[data-theme="dark"] .gtp{{{DARK}}}'
    ".gtp text{font:15px var(--font-stack,system-ui,sans-serif);fill:var(--ink)}"
    ".gtp .small{font-size:13px;fill:var(--soft)}.gtp .middle{text-anchor:middle}"
    ".gtp .end{text-anchor:end}.gtp .bold{font-weight:600}"
    ".gtp .strong{fill:var(--accent);font-weight:600}"
    ".gtp .node{fill:var(--panel);stroke:var(--line);stroke-width:1.5}"
    ".gtp .on{stroke:var(--accent);stroke-width:2.5}"
    ".gtp .edge{fill:none;stroke:var(--line);stroke-width:1.5}"
    ".gtp .way{fill:none;stroke:var(--accent);stroke-width:3.5}"
    ".gtp .bar{fill:var(--accent)}.gtp .rest{fill:var(--line)}"
    ".gtp .paper{fill:var(--panel)}"
)

Point = tuple[float, float]


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A picture that reads on light and dark paper, alone or inside a page."""
    return "\n".join(
        [
            f'<svg class="gtp" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" role="img" aria-label="{escape(title)}">',
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def text(at: Point, words: str, kind: str = "") -> str:
    """Words, their baseline at a point."""
    return f'<text x="{at[0]:g}" y="{at[1]:g}" class="{kind}">{escape(words)}</text>'


def node(at: Point, name: str, below: str = "", on: bool = False) -> str:
    """A vertex with a name."""
    x, y = at
    ring = f'<circle cx="{x:g}" cy="{y:g}" r="22" class="node{" on" if on else ""}"/>'
    label = text((x, y + 5), name, "middle bold")
    return ring + label + (text((x, y + 42), below, "small middle") if below else "")


def edge(a: Point, b: Point, words: str = "", way: bool = False, up: float = 10) -> str:
    """A line between two vertices, and what is written beside it."""
    (x, y), (u, v) = a, b
    far = ((u - x) ** 2 + (v - y) ** 2) ** 0.5
    dx, dy = 23 * (u - x) / far, 23 * (v - y) / far
    kind = "way" if way else "edge"
    line = f'<path d="M{x + dx:.1f} {y + dy:.1f}L{u - dx:.1f} {v - dy:.1f}" class="{kind}"/>'
    middle = ((x + u) / 2, (y + v) / 2 - up)
    return line + (text(middle, words, "middle strong" if way else "middle") if words else "")


def number(value: float) -> str:
    """A number in the typography of a page."""
    return f"{value:.4g}".replace("-", "−")


# 1. Backward is a sum over paths -----------------------------------------------------------------


def three_ways() -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that an input reaches in three ways."""
    x = torch.tensor(1.0, requires_grad=True)
    a, b = 2 * x, -1 * x
    return 3 * a + 2 * b + 0.5 * x, {"x": x}


def legs(path: Traced, first: int = 1) -> tuple[float, float]:
    """The derivative of a path's first steps, and that of all the others."""
    derivatives = [float(step.derivative) for step in path.steps]
    return prod(derivatives[:first]), prod(derivatives[first:])


def paths() -> str:
    """The graph, its three paths, and that their weights add up to the gradient."""
    loss, names = three_ways()
    over, under, direct = sorted(
        gt.testing.enumerate_paths(loss, names=names), key=lambda path: -abs(path.weight)
    )
    gradient = float(gt.backward(loss, names=names)["x"])
    x, a, b, top = (50.0, 130.0), (190.0, 50.0), (190.0, 210.0), (330.0, 130.0)
    parts = [
        edge(x, a, number(legs(over)[0]), up=12),
        edge(a, top, number(legs(over)[1]), up=12),
        edge(x, b, number(legs(under)[0]), up=-24),
        edge(b, top, number(legs(under)[1]), up=-24),
        edge(x, top, number(prod(legs(direct)))),
        *(node(at, name) for at, name in ((x, "x"), (a, "a"), (b, "b"), (top, "loss"))),
        text((410, 62), "a path's weight: the product of its derivatives", "small"),
    ]
    rows = (("x → a → loss", over), ("x → b → loss", under), ("x → loss", direct))
    for n, (name, path) in enumerate(rows):
        y = 94 + 28 * n
        factors = " · ".join(map(number, legs(path))) if path is not direct else ""
        parts += [text((410, y), name), text((600, y), factors, "end")]
        parts += [text((690, y), number(path.weight), "end bold")]
    parts += [
        '<path d="M410 164H690" class="edge"/>',
        text((410, 188), "the gradient: the sum over all paths", "small"),
        text((690, 188), number(gradient), "end strong"),
    ]
    return svg(720, 256, "A graph with three paths, whose weights add up to the gradient", parts)


# 2. A map ----------------------------------------------------------------------------------------

MATRIX = ((1.0, -1.0), (2.0, 1.0), (1.0, 3.0))
INCOMING = (1.0, -2.0, 0.5)


def a_map() -> str:
    """One operator, y = W x, as it hands gradient back: in (+, ×), and in (max, ×)."""
    x = torch.zeros(2, requires_grad=True)
    loss = torch.tensor(INCOMING) @ (torch.tensor(MATRIX) @ x)
    names = {"x": x}
    values = {kind: gt.backward(loss, kind, names=names)["x"] for kind in (SUM, ABS, MAX)}
    trace = gt.trace(loss, names=names)
    best = [trace.path("x", n).steps[1].index[0] for n in range(2)]
    tops = [(330.0, 58.0), (330.0, 144.0), (330.0, 230.0)]
    ends = [(60.0, 84.0), (60.0, 204.0)]
    parts = [
        text((60, 26), "x receives", "small middle"),
        text((330, 26), "y was given", "small middle"),
    ]
    for i, end in enumerate(ends):
        for j, top in enumerate(tops):
            chosen = best[i] == j
            parts.append(edge(end, top, way=chosen))
            near = (top[0] - 80, top[1] + (end[1] - top[1]) * 80 / 270 - 5)
            weight = number(MATRIX[j][i])
            parts.append(text(near, weight, "middle strong" if chosen else "middle small"))
    parts += [node(at, number(INCOMING[j])) for j, at in enumerate(tops)]
    parts += [node(at, f"x{'₀₁'[i]}") for i, at in enumerate(ends)]
    lines = (
        ("SUM: add the products up, the gradient", SUM),
        ("ABS: add their sizes up", ABS),
        ("MAX: keep the largest, and where it came from", MAX),
    )
    parts += [text((620, 52), "x₀", "end bold"), text((690, 52), "x₁", "end bold")]
    for n, (words, kind) in enumerate(lines):
        y = 84 + 52 * n
        parts += [text((400, y), words, "small")]
        parts += [
            text(
                (620 + 70 * i, y + 22),
                number(float(values[kind][i])),
                "end strong" if kind is MAX else "end",
            )
            for i in range(2)
        ]
    return svg(720, 256, "A linear operator hands gradient back, by sum and by largest", parts)


# 3. Greedy and viterbi ---------------------------------------------------------------------------


def fork() -> tuple[Tensor, dict[str, Tensor]]:
    """Two middling paths through a, which together weigh more than the one through b."""
    x = torch.tensor(1.0, requires_grad=True)
    a = 1 * x
    return 2 * a + 1.5 * a + 3 * x, {"x": x}


def rules() -> str:
    """The same graph twice, with the path that each rule follows."""
    loss, names = fork()
    best, upper, lower = sorted(
        gt.testing.enumerate_paths(loss, names=names), key=lambda path: -abs(path.weight)
    )
    parts = []
    for n, rule in enumerate(("greedy", "viterbi")):
        chosen = gt.trace(loss, names=names, rule=rule).path("x")
        left = 370.0 * n
        x, a, b = (left + 40, 150.0), (left + 130, 90.0), (left + 180, 230.0)
        c, d, top = (left + 220, 50.0), (left + 220, 130.0), (left + 310, 150.0)
        above, below = chosen.weight == upper.weight, chosen.weight == best.weight
        parts += [
            text((left + 18, 26), rule, "bold"),
            edge(x, a, number(legs(upper)[0]), way=above, up=14),
            edge(a, c, number(legs(upper)[1]), way=above, up=14),
            edge(a, d, number(legs(lower)[1]), up=-24),
            edge(c, top, way=above),
            edge(d, top),
            edge(x, b, number(legs(best)[0]), way=below, up=-22),
            edge(b, top, way=below),
            *(
                node(at, name)
                for at, name in ((x, "x"), (c, "c"), (d, "d"), (b, "b"), (top, "loss"))
            ),
            node(a, "a", on=above),
            text((left + 18, 288), SAYS[rule].format(**facts(chosen, upper, best)), "small"),
            text((left + 18, 310), f"weight of the path: {number(chosen.weight)}", "strong"),
        ]
    return svg(720, 326, "Greedy follows the larger sum, viterbi the heaviest single path", parts)


SAYS = {
    "greedy": "a hands back {a}, b hands back {b}: follow a",
    "viterbi": "the heaviest path of all",
}


def facts(chosen: Traced, upper: Traced, best: Traced) -> dict[str, str]:
    """What arrives at x from a and from b."""
    through = float(upper.steps[0].derivative) * float(upper.steps[1].gradient)
    return {"a": number(through), "b": number(best.weight)}


# 4. Influence ------------------------------------------------------------------------------------


class Net(nn.Module):
    """The README's: an LSTM and a GRU read the same words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.lstm, self.gru = nn.LSTM(8, 8), nn.GRU(8, 8)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the next word."""
        x = self.embed(words)
        scores: Tensor = self.out(self.lstm(x)[0] + self.gru(x)[0])
        return scores


def measured() -> Table:
    """Influence in the README's example."""
    torch.manual_seed(3)
    model, words = Net().double(), torch.randint(50, (9,))
    with gt.watch(model) as watch:
        loss = nn.functional.cross_entropy(model(words[:-1]), words[1:])
    return watch.trace(loss).influence()


def counting() -> str:
    """The paths of the embedding's elements, and the branch that each takes."""
    table = measured()
    rows = {name: table[name] for name in ("gru", "lstm")}
    paths, unreached = rows["gru"].eligible, rows["gru"].unreached
    parts = [
        text((20, 40), f"{paths + unreached} elements of embed.weight", "bold"),
        text((20, 64), f"{unreached} belong to words that do not occur: no path", "small"),
        text((20, 86), f"{paths} have a path, and it takes one branch", "small"),
    ]
    top, scale = 30.0, 150 / paths
    for name, row in rows.items():
        through = row.through
        thick = through * scale
        middle = top + thick / 2
        mine = 46.0 + (0 if name == "gru" else rows["gru"].through * scale) + thick / 2
        kind = "accent" if name == "gru" else "line"
        parts += [
            f'<path d="M340 {mine:.1f}C390 {mine:.1f} 390 {middle:.1f} 440 {middle:.1f}" '
            f'fill="none" style="stroke:var(--{kind})" stroke-width="{thick:.1f}"/>',
            text((456, middle - 2), name, "bold"),
            text((456, middle + 18), f"{through} of {paths}: {row.share:.1%}", "small"),
        ]
        top += thick + 32
    parts.append(text((20, 150), "influence: the share of the paths", "small"))
    parts.append(text((20, 170), "that could take a branch and do", "small"))
    return svg(640, 232, "Most paths of the embedding run through the GRU", parts)


PICTURES = {"paths": paths, "map": a_map, "rules": rules, "influence": counting}


def main() -> None:
    """Write all pictures beside this file."""
    for name, draw in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
