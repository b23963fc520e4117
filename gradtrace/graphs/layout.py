"""Where the boxes of a layered drawing go: every link runs downwards, with few crossings.

The steps are those of Sugiyama, Tagawa and Toda (1981): ranks are given, long links bend at each
rank they pass, each rank is ordered by barycentres, and coordinates follow from the order. All of
it is iterative, and linear in the number of boxes and bends up to sorting.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from math import inf
from typing import NamedTuple, TypeAlias

Link: TypeAlias = tuple[int, int]  # (upper box, lower box)
Point: TypeAlias = tuple[float, float]

BEND_WIDTH = 12.0
SPACE = 22.0  # between boxes side by side
GAP = 36.0  # between ranks, at least
SWEEPS = 8
HOME = 0.02  # how much the middle attracts; a tie has 1


class Box(NamedTuple):
    """What is to be placed: its size and its rank, the root's being 0."""

    width: float
    height: float
    rank: int


class GraphLayout(NamedTuple):
    """The centre of each box's upper side, the points each link bends at, and the extent."""

    tops: list[Point]
    bends: dict[Link, list[Point]]  # in pairs: where the link enters a rank, and where it leaves
    width: float
    height: float


def layered(boxes: Sequence[Box], links: Iterable[Link]) -> GraphLayout:
    """Place boxes by rank; the links go from lower to higher ranks, each given once."""
    lattice = _Lattice(boxes)
    links = list(links)
    for upper, lower in links:
        lattice.link(upper, lower)
    ranks = _ordered(lattice)
    x = _abscissas(lattice, ranks)
    bands = _bands(lattice, ranks, x)
    bends = {link: _bends(lattice, link, x, bands) for link in links}
    tops = [(x[i], bands[box.rank][0]) for i, box in enumerate(boxes)]
    width = max(at + box.width / 2 for at, box in zip(x, lattice.boxes, strict=True))
    return GraphLayout(tops, bends, width, bands[-1][1])


class _Lattice:
    """Boxes and bends, each tied to its neighbours in the ranks just above and just below.

    All links to one box share one bend in each rank they pass, so they join into a single line: a
    weight used at fifty time steps costs one lane, not fifty.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = list(boxes)
        self.count = len(boxes)  # items from here on are bends
        self.above: list[list[int]] = [[] for _ in boxes]
        self.below: list[list[int]] = [[] for _ in boxes]
        self.lanes: dict[tuple[int, int], int] = {}  # (lower box, rank) -> bend

    def link(self, upper: int, lower: int) -> None:
        """Tie two boxes together through bends, joining a lane to the lower one if there is one."""
        at = upper
        for rank in range(self.boxes[upper].rank + 1, self.boxes[lower].rank):
            known = self.lanes.get((lower, rank))
            bend = self._bend(lower, rank) if known is None else known
            self._tie(at, bend)
            if known is not None:
                return
            at = bend
        self._tie(at, lower)

    def _bend(self, lower: int, rank: int) -> int:
        bend = self.lanes[lower, rank] = len(self.boxes)
        self.boxes.append(Box(BEND_WIDTH, 0, rank))
        self.above.append([])
        self.below.append([])
        return bend

    def _tie(self, upper: int, lower: int) -> None:
        self.below[upper].append(lower)
        self.above[lower].append(upper)


# Order within the ranks ------------------------------------------------------------------------


def _ordered(lattice: _Lattice) -> list[list[int]]:
    """The items of each rank from left to right, the best of a few sweeps down and up."""
    ranks = _preorder(lattice)
    best, fewest = [list(rank) for rank in ranks], _crossings(lattice, ranks)
    for sweep in range(SWEEPS):
        if not fewest:
            break
        down = sweep % 2 == 0
        near = lattice.above if down else lattice.below
        for fixed, free in _pairs(ranks, down):
            _sort_by_barycentre(free, fixed, near)
        crossings = _crossings(lattice, ranks)
        if crossings < fewest:
            best, fewest = [list(rank) for rank in ranks], crossings
    return best


def _preorder(lattice: _Lattice) -> list[list[int]]:
    """Depth first from the root, so that arguments start from left to right by position."""
    ranks: list[list[int]] = [[] for _ in range(1 + max(box.rank for box in lattice.boxes))]
    seen = [False] * len(lattice.boxes)
    stack = [i for i, above in enumerate(lattice.above) if not above][::-1]
    while stack:
        item = stack.pop()
        if seen[item]:
            continue
        seen[item] = True
        ranks[lattice.boxes[item].rank].append(item)
        stack += reversed(lattice.below[item])
    return ranks


def _pairs(ranks: list[list[int]], down: bool) -> Iterable[tuple[list[int], list[int]]]:
    """Each rank after its neighbour, from the top or from the bottom."""
    return pairwise(ranks) if down else pairwise(reversed(ranks))


def _sort_by_barycentre(free: list[int], fixed: list[int], near: list[list[int]]) -> None:
    place = {item: i for i, item in enumerate(fixed)}
    own = {item: i * len(fixed) / len(free) for i, item in enumerate(free)}
    keys = {i: _mean([place[j] for j in near[i]], own[i]) for i in free}
    free.sort(key=keys.__getitem__)


def _mean(values: list[int], default: float) -> float:
    return sum(values) / len(values) if values else default


def _crossings(lattice: _Lattice, ranks: list[list[int]]) -> int:
    """How many ties cross: the inversions between each rank and the next."""
    total = 0
    for upper, lower in pairwise(ranks):
        place = {item: i for i, item in enumerate(lower)}
        passed: list[int] = []
        for item in upper:
            ends = [place[other] for other in lattice.below[item]]
            total += sum(len(passed) - bisect_right(passed, end) for end in ends)
            for end in ends:
                insort(passed, end)
    return total


# Coordinates -----------------------------------------------------------------------------------


def _abscissas(lattice: _Lattice, ranks: list[list[int]]) -> list[float]:
    """The x of each item: near its neighbours, in the order given, and nothing overlapping."""
    places = _Places(lattice, ranks)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        if sweep < SWEEPS // 2:
            places.sweep(down, look=(down, not down))
        else:
            places.sweep(down, look=(True, True))
            places.straighten()
    left = min(x - box.width / 2 for x, box in zip(places.x, lattice.boxes, strict=True))
    return [x - left for x in places.x]


class _Places:
    """The x of each item while it is sought; at the start each rank is packed and centred."""

    def __init__(self, lattice: _Lattice, ranks: list[list[int]]) -> None:
        self.lattice = lattice
        self.ranks = ranks
        self.offsets = [_offsets(lattice, rank) for rank in ranks]
        self.x = [0.0] * len(lattice.boxes)
        self.left: dict[int, tuple[int, float]] = {}  # item -> (neighbour, distance to keep)
        self.right: dict[int, tuple[int, float]] = {}
        for rank, offsets in zip(ranks, self.offsets, strict=True):
            for item, offset in zip(rank, offsets, strict=True):
                self.x[item] = offset - offsets[-1] / 2
            for (a, b), (start, end) in zip(pairwise(rank), pairwise(offsets), strict=True):
                self.left[b], self.right[a] = (a, end - start), (b, end - start)
        self.home = list(self.x)
        self.lines = list(_lines(lattice, ranks))
        self.straight = {tie for line in self.lines for tie in pairwise(line)}

    def sweep(self, down: bool, look: tuple[bool, bool]) -> None:
        """Move each rank towards its neighbours above, below, or both (``look``)."""
        for r in range(len(self.ranks))[:: 1 if down else -1]:
            wishes = [self._wish(item, look) for item in self.ranks[r]]
            for item, x in zip(self.ranks[r], settle(wishes, self.offsets[r]), strict=True):
                self.x[item] = x

    def _wish(self, item: int, look: tuple[bool, bool]) -> Point:
        """Where an item would be best, and how much it matters: the mean of its neighbours.

        Home weighs in a little, or a long graph that leans a little would wander off sideways.
        """
        lattice, (up, down) = self.lattice, look
        ties = []
        if up:
            ties += [(self.x[i], self._weight(i, item)) for i in lattice.above[item]]
        if down:
            ties += [(self.x[i], self._weight(item, i)) for i in lattice.below[item]]
        weight = sum(w for _, w in ties) or 1e-3
        pull = sum(x * w for x, w in ties) + self.home[item] * weight * HOME
        return pull / (weight + weight * HOME), weight

    def _weight(self, upper: int, lower: int) -> float:
        """How much a tie wants to be vertical: along a line most, to boxes that end there least."""
        weight = 20.0 if (upper, lower) in self.straight else 1.0
        return weight if self.lattice.below[lower] else weight / 10

    def straighten(self) -> None:
        """Put the items of a line on one vertical, in as few pieces as their neighbours allow."""
        for line in self.lines:
            piece: list[int] = []
            low, high = -inf, inf
            for item in line:
                left, right = self._room(item)
                if piece and max(low, left) > min(high, right):
                    self._align(piece, low, high)
                    piece, low, high = [], -inf, inf
                piece.append(item)
                low, high = max(low, left), min(high, right)
            self._align(piece, low, high)

    def _room(self, item: int) -> Point:
        """The least and the greatest x that an item could have between those beside it."""
        left, right = self.left.get(item), self.right.get(item)
        return (
            -inf if left is None else self.x[left[0]] + left[1],
            inf if right is None else self.x[right[0]] - right[1],
        )

    def _align(self, piece: list[int], low: float, high: float) -> None:
        mean = sum(self.x[item] for item in piece) / len(piece)
        for item in piece:
            self.x[item] = min(max(mean, low), high)


def _offsets(lattice: _Lattice, rank: list[int]) -> list[float]:
    """How far right of the first item each must at least be."""
    offsets = [0.0]
    for left, right in pairwise(rank):
        bends = (left >= lattice.count) + (right >= lattice.count)
        apart = (lattice.boxes[left].width + lattice.boxes[right].width) / 2
        offsets.append(offsets[-1] + apart + SPACE * (1 - bends / 2))
    return offsets


def _lines(lattice: _Lattice, ranks: list[list[int]]) -> Iterator[list[int]]:
    """Items one below the other, from the top; each item is in one line."""
    taken: set[int] = set()
    for start in chain.from_iterable(ranks):
        line: list[int] = []
        item: int | None = start
        while item is not None and item not in taken:
            taken.add(item)
            line.append(item)
            item = _onward(lattice, item)
        if line:
            yield line


def _onward(lattice: _Lattice, item: int) -> int | None:
    """The item below that continues the line: the only one, or the first that goes on."""
    below = lattice.below[item]
    if len(below) == 1:
        return below[0]
    return next((i for i in below if i < lattice.count and lattice.below[i]), None)


def settle(
    wishes: Sequence[Point], offsets: Sequence[float], bounds: Point = (-inf, inf)
) -> list[float]:
    """The places nearest the wishes (value, weight) that lie at least the offsets apart.

    Less the offsets this is isotonic regression: pool neighbours that are out of order.
    """
    pools: list[tuple[float, float, int]] = []  # (mean, weight, how many items)
    for (wish, weight), offset in zip(wishes, offsets, strict=True):
        mean, count = wish - offset, 1
        while pools and pools[-1][0] > mean:
            other, heavy, more = pools.pop()
            mean = (mean * weight + other * heavy) / (weight + heavy)
            weight, count = weight + heavy, count + more
        pools.append((mean, weight, count))
    low, high = bounds[0], bounds[1] - offsets[-1]
    means = [min(max(mean, low), high) for mean, _, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _bands(lattice: _Lattice, ranks: list[list[int]], x: list[float]) -> list[Point]:
    """The top and bottom of each rank; ranks whose links run far sideways get more room between."""
    bands: list[Point] = []
    top = 0.0
    for rank in ranks:
        bottom = top + max(lattice.boxes[item].height for item in rank)
        bands.append((top, bottom))
        sideways = max((abs(x[i] - x[j]) for i in rank for j in lattice.below[i]), default=0.0)
        top = bottom + GAP + min(80.0, sideways / 16)
    return bands


def _bends(lattice: _Lattice, link: Link, x: list[float], bands: list[Point]) -> list[Point]:
    upper, lower = link
    points = []
    for rank in range(lattice.boxes[upper].rank + 1, lattice.boxes[lower].rank):
        at = x[lattice.lanes[lower, rank]]
        points += [(at, y) for y in bands[rank]]
    return points
