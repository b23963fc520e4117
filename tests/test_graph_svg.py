"""The picture of a graph: what it shows, that it is safe to embed, and that it stays small."""

import re
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from gradtrace.autodiff.graph import Edge, Graph, Operator, build
from gradtrace.autodiff.names import NameTable
from gradtrace.report.drawing import MOST

SVG = "{http://www.w3.org/2000/svg}"


def by_hand(operators: Sequence[Operator], edges: Sequence[Edge]) -> Graph:
    """A graph that torch never saw."""
    leaves = {o.leaf: o for o in operators if o.leaf is not None}
    return Graph(list(operators), list(edges), leaves)


def chain(length: int) -> Graph:
    """Operators one below the other."""
    operators = [Operator(i, "SinBackward0", ((3,),)) for i in range(length)]
    return by_hand(operators, [Edge(i, i + 1, 0) for i in range(length - 1)])


def two_layers() -> Graph:
    """Figure 1.1: a two-layer network whose input and target need no gradient."""
    w1, w2 = torch.ones(10, 20, requires_grad=True), torch.ones(20, 15, requires_grad=True)
    b1, b2 = torch.ones(20, requires_grad=True), torch.ones(15, requires_grad=True)
    hidden = torch.addmm(b1, torch.ones(4, 10), w1).tanh()
    loss = torch.nn.functional.mse_loss(torch.addmm(b2, hidden, w2), torch.ones(4, 15))
    return build(loss, NameTable.of({"w1": w1, "w2": w2, "b1": b1, "b2": b2}))


def texts(element: ElementTree.Element) -> list[str]:
    """The text one sees, titles aside."""
    return [text.text or "" for text in element.iter(f"{SVG}text")]


def vertices(svg: str) -> dict[int, ElementTree.Element]:
    """The groups that show operators, by index."""
    found = ElementTree.fromstring(svg).iter(f"{SVG}g")
    return {int(g.attrib["data-operator"]): g for g in found if "data-operator" in g.attrib}


def top(vertex: ElementTree.Element) -> tuple[float, float]:
    """The middle of a vertex's upper side."""
    x, y = re.findall(r"-?[\d.]+", vertex.attrib["transform"])
    return float(x), float(y)


def extent(vertex: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right, bottom."""
    (x, y), box = top(vertex), vertex.find(f"{SVG}rect")
    assert box is not None
    width, height = float(box.attrib["width"]), float(box.attrib["height"])
    return x - width / 2, y, x + width / 2, y + height


def aside(svg: str) -> list[str]:
    """The words that stand for arguments not drawn."""
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    return [texts(g)[0] for g in groups if g.attrib.get("class") == "aside"]


def braid(kind: str) -> Graph:
    """Graphs with long links, shared leaves and values used twice."""
    w = torch.ones(3, requires_grad=True)
    h: Tensor = w
    for _ in range(6):
        h = (h * w).sin() + h if kind == "residual" else torch.stack([h, w]).sum(0) * h
    return build(h.sum(), NameTable.of({"w": w}))


GRAPHS: dict[str, Callable[[], Graph]] = {
    "two layers": two_layers,
    "residual": lambda: braid("residual"),
    "stacked": lambda: braid("stacked"),
    "chain": lambda: chain(60),
}


@pytest.fixture(params=GRAPHS)
def graph(request: pytest.FixtureRequest) -> Graph:
    return GRAPHS[request.param]()


def test_every_argument_is_below_its_user(graph: Graph) -> None:
    drawn = vertices(graph.draw())
    assert drawn.keys() == {operator.index for operator in graph}
    others = [top(vertex)[1] for index, vertex in drawn.items() if index]
    assert top(drawn[0])[1] < min(others)
    for edge in graph.edges:
        if edge.producer is not None:
            assert extent(drawn[edge.producer])[1] > extent(drawn[edge.consumer])[3]


def test_no_two_vertices_overlap(graph: Graph) -> None:
    boxes = sorted(map(extent, vertices(graph.draw()).values()), key=lambda box: (box[1], box[0]))
    for (_, above, right, _), (left, below, _, _) in pairwise(boxes):
        assert above != below or right < left


def test_everything_lies_on_the_page(graph: Graph) -> None:
    svg = graph.draw()
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert (root.attrib["width"], root.attrib["height"]) == (f"{width:g}", f"{height:g}")
    for left, _, right, bottom in map(extent, vertices(svg).values()):
        assert -0.1 <= left < right <= width and bottom <= height  # the margins come on top


def test_each_link_starts_at_a_user_and_ends_at_an_argument() -> None:
    graph = two_layers()
    svg = graph.draw()
    ends = set()
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        if path.attrib["class"] == "link":
            numbers = [float(n) for n in re.findall(r"-?[\d.]+", path.attrib["d"])]
            ends.add((numbers[1], numbers[-1]))
    boxes = {index: extent(vertex) for index, vertex in vertices(svg).items()}
    for edge in graph.edges:
        if edge.producer is not None:
            bottom, above = boxes[edge.consumer][3], boxes[edge.producer][1]
            assert any(abs(a - bottom) < 0.2 and 0 <= above - b < 8 for a, b in ends)


def test_a_vertex_shows_operator_and_shape_and_a_leaf_its_name() -> None:
    graph = two_layers()
    drawn = vertices(graph.draw())
    assert texts(drawn[0]) == ["MseLoss", "()"]
    assert drawn[0].attrib["class"] == "root"
    shown = sorted(tuple(texts(vertex)) for vertex in drawn.values())
    assert ("Addmm", "(4, 15)") in shown and ("Tanh", "(4, 20)") in shown
    for name, leaf in graph.leaves.items():
        assert texts(drawn[leaf.index]) == [name, str(leaf.shape)]
        assert drawn[leaf.index].attrib["class"] == "leaf"


def test_arguments_have_positions_and_those_without_gradient_say_none() -> None:
    svg = two_layers().draw()
    positions = re.findall(r'class="position"[^>]*>([^<]*)<', svg)
    assert sorted(positions) == sorted("01" + "012" + "0" + "012")
    assert aside(svg) == ["None", "None"]


def test_values_are_shown_where_they_are_given() -> None:
    drawn = two_layers().draw(values={0: 0.123456, "w1": "frozen"})
    shown = [texts(vertex) for vertex in vertices(drawn).values()]
    assert ["MseLoss", "()", "0.1235"] in shown and ["w1", "(10, 20)", "frozen"] in shown


def test_tied_names_and_module_calls_are_told() -> None:
    operators = [
        Operator(0, "SumBackward0", ((),)),
        Operator(1, "MulBackward0", ((2,),), "cell", 1),
        Operator(2, "MulBackward0", ((2,),), "cell", 0),
        Operator(3, "AccumulateGrad", ((2,),), leaf="embed", names=("embed", "head")),
    ]
    drawn = vertices(by_hand(operators, [Edge(0, 1, 0), Edge(1, 2, 0), Edge(2, 3, 0)]).draw())
    assert [texts(drawn[i])[-1] for i in (1, 2)] == ["in cell, call 2", "in cell, call 1"]
    assert texts(drawn[3])[0] == "embed = head"


HOSTILE = [
    "</script><script>alert(1)</script>",
    "]]></title><img src=x onerror=alert(1)>",
    "\"' onload='alert(1)",
    "safe\u202egnp.exe",
    "nul\x00 bell\x07 half\ud800 non\ufffe",
    "&amp;&lt;",
    "\n\t",
    "\u202e" * 30,
    "w" * 10_000,
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_text(name: str) -> None:
    operators = [
        Operator(0, name, ((),), module=name),
        Operator(1, "AccumulateGrad", ((2,),), leaf=name, names=(name, name)),
    ]
    svg = by_hand(operators, [Edge(0, 1, 0)]).draw()
    svg.encode()
    tags = {element.tag.removeprefix(SVG) for element in ElementTree.fromstring(svg).iter()}
    assert tags == {"svg", "title", "style", "rect", "g", "path", "text"}
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x09\x0b-\x1f]", svg)
    assert not re.search(r"<[^>]* on\w+=", svg)
    assert len(svg) < 12_000
    assert all(len(text) <= 33 for vertex in vertices(svg).values() for text in texts(vertex))


def test_a_long_name_is_shortened_on_the_vertex_and_told_in_its_title() -> None:
    name = ".".join(f"layer{i}" for i in range(12)) + ".weight"
    leaf = Operator(0, "AccumulateGrad", ((2,),), leaf=name, names=(name,))
    vertex = vertices(by_hand([leaf], []).draw())[0]
    shown = texts(vertex)[0]
    assert "…" in shown and len(shown) <= 30 and shown.endswith("layer11.weight")
    assert name in (vertex.findtext(f"{SVG}title") or "")


def test_a_long_chain_is_cut_soon_and_says_so() -> None:
    graph = chain(100_000)
    start = time.process_time()  # of this process: another's load does not count
    svg = graph.draw()
    assert time.process_time() - start < 10
    assert vertices(svg).keys() == set(range(MOST))
    assert f"{100_000 - MOST:,} more" in svg
    assert aside(svg) == ["1 left out"]


def test_many_edges_between_few_operators_stay_few_lines() -> None:
    operators = [Operator(i, "StackBackward0", ((1,),)) for i in range(2)]
    edges = [Edge(0, 1 if i % 2 else None, i) for i in range(20_000)]
    svg = by_hand(operators, edges).draw()
    assert svg.count('class="link"') == 2
    assert aside(svg) == ["10,000 None"]


def test_drawings_in_one_page_share_no_id_and_style_nothing_else() -> None:
    one, two = two_layers().draw(), chain(3).draw()
    ids = [set(re.findall(r'\bid="([^"]*)"', svg)) for svg in (one, two)]
    assert ids[0] and ids[1] and ids[0].isdisjoint(ids[1])
    rules = re.findall(r"^(\.[^{}@\n]*)\{", one, flags=re.MULTILINE)
    assert rules
    for selector in ",".join(rules).split(","):
        assert selector.startswith(".gradtrace-graph")
