"""Where the boxes of a layered drawing go: every link runs downwards, with few crossings.

The steps are those of Sugiyama, Tagawa and Toda (1981): ranks are given, long links bend at each
rank they pass, each rank is ordered by barycentres, and coordinates follow from the order. All of
it is iterative, and linear in the number of boxes and bends up to sorting.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

Link: TypeAlias = tuple[int, int]  # (upper box, lower box)
Point: TypeAlias = tuple[float, float]

BEND_WIDTH = 12.0
SPACE = 22.0  # between boxes side by side
GAP = 42.0  # between ranks, at least
SWEEPS = 8


class Box(NamedTuple):
    """What is to be placed: its size and its rank, the root's being 0."""

    width: float
    height: float
    rank: int


class Layout(NamedTuple):
    """The centre of each box's upper side, the points each link bends at, and the extent."""

    tops: list[Point]
    bends: dict[Link, list[Point]]  # in pairs: where the link enters a rank, and where it leaves
    width: float
    height: float


def layered(boxes: Sequence[Box], links: Iterable[Link]) -> Layout:
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
    right = max(x[i] + box.width / 2 for i, box in enumerate(boxes))
    right = max([right, *(x for bend in bends.values() for x, _ in bend)])
    return Layout(tops, bends, right, bands[-1][1])


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

    def weight(self, upper: int, lower: int) -> float:
        """How much a tie wants to be vertical: lanes most, ties to boxes that end there least."""
        if upper >= self.count and lower >= self.count:
            return 8.0
        return 1.0 if self.below[lower] else 0.1


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
    x = [0.0] * len(lattice.boxes)
    offsets = [_offsets(lattice, rank) for rank in ranks]
    for rank, offset in zip(ranks, offsets):
        for item, value in zip(rank, offset):
            x[item] = value - offset[-1] / 2
    for sweep in range(SWEEPS):
        down, both = sweep % 2 == 0, sweep >= SWEEPS // 2
        for r in range(len(ranks))[:: 1 if down else -1]:
            wishes = [_wish(lattice, item, x, (down or both, both or not down)) for item in ranks[r]]
            for item, value in zip(ranks[r], _settled(wishes, offsets[r])):
                x[item] = value
    left = min(x[i] - box.width / 2 for i, box in enumerate(lattice.boxes))
    return [value - left for value in x]


def _offsets(lattice: _Lattice, rank: list[int]) -> list[float]:
    """How far right of the first item each must at least be."""
    offsets = [0.0]
    for left, right in pairwise(rank):
        bends = (left >= lattice.count) + (right >= lattice.count)
        apart = (lattice.boxes[left].width + lattice.boxes[right].width) / 2
        offsets.append(offsets[-1] + apart + SPACE * (1 - bends / 2))
    return offsets


def _wish(lattice: _Lattice, item: int, x: list[float], look: tuple[bool, bool]) -> Point:
    """Where an item would be best, and how much it matters: the mean of its neighbours."""
    up, down = look
    ties = [(x[i], lattice.weight(i, item)) for i in lattice.above[item]] if up else []
    if down:
        ties += [(x[i], lattice.weight(item, i)) for i in lattice.below[item]]
    weight = sum(w for _, w in ties)
    if not weight:
        return x[item], 1e-3
    return sum(value * w for value, w in ties) / weight, weight


def _settled(wishes: list[Point], offsets: list[float]) -> list[float]:
    """The places nearest the wishes (weighted least squares) that keep the distances.

    Less the offsets this is isotonic regression: pool neighbours that are out of order.
    """
    pools: list[tuple[float, float, int]] = []  # (mean, weight, how many items)
    for (wish, weight), offset in zip(wishes, offsets):
        mean, count = wish - offset, 1
        while pools and pools[-1][0] > mean:
            other, heavy, more = pools.pop()
            mean = (mean * weight + other * heavy) / (weight + heavy)
            weight, count = weight + heavy, count + more
        pools.append((mean, weight, count))
    means = [mean for mean, _, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets)]


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


def _bends(
    lattice: _Lattice, link: Link, x: list[float], bands: list[Point]
) -> list[Point]:
    upper, lower = link
    points = []
    for rank in range(lattice.boxes[upper].rank + 1, lattice.boxes[lower].rank):
        at = x[lattice.lanes[lower, rank]]
        points += [(at, y) for y in bands[rank]]
    return points
