"""Layered graph layout: every link runs downwards, with few crossings.

The method of Sugiyama, Tagawa and Toda (1981): ranks are given, long links get a bend at each rank
they pass, each rank is ordered by barycentres, and coordinates follow from the order. All steps are
iterative, and linear in the number of boxes and bends up to sorting.
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
SPACE = 22.0  # horizontal distance between boxes of a rank
GAP = 36.0  # least vertical distance between ranks
SWEEPS = 8
HOME = 0.02  # weight of an item's initial position, relative to its ties


class Box(NamedTuple):
    """A box to place: its size, and its rank (the root's is 0)."""

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
    """Boxes and bends (items), each tied to its neighbours in the adjacent ranks.

    All links to one box share one bend in each rank they pass, so they join into one lane: a weight
    used at fifty time steps takes one lane, not fifty.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = list(boxes)
        self.count = len(boxes)  # items from here on are bends
        self.above: list[list[int]] = [[] for _ in boxes]
        self.below: list[list[int]] = [[] for _ in boxes]
        self.lanes: dict[tuple[int, int], int] = {}  # (lower box, rank) -> bend

    def link(self, upper: int, lower: int) -> None:
        """Connect two boxes through bends, joining an existing lane to the lower one."""
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
    """The items of each rank from left to right: the best order of ``SWEEPS`` sweeps."""
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
    """The initial order: depth first from the root, so arguments go left to right by position."""
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
    """The number of crossing ties: the inversions of each pair of adjacent ranks."""
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
    """The x of each item: near its neighbours, in the given order, without overlaps."""
    places = _Positions(lattice, ranks)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        if sweep < SWEEPS // 2:
            places.sweep(down, sides=(down, not down))
        else:
            places.sweep(down, sides=(True, True))
            places.straighten()
    left = min(x - box.width / 2 for x, box in zip(places.x, lattice.boxes, strict=True))
    return [x - left for x in places.x]


class _Positions:
    """Optimises the x of each item; initially each rank is packed and centred."""

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
        self.chains = list(_chains(lattice, ranks))
        self.straight = {tie for line in self.chains for tie in pairwise(line)}

    def sweep(self, down: bool, sides: tuple[bool, bool]) -> None:
        """Move each rank towards its neighbours; ``sides`` says whether (above, below) count."""
        for r in range(len(self.ranks))[:: 1 if down else -1]:
            preferred = [self._preferred(item, sides) for item in self.ranks[r]]
            for item, x in zip(self.ranks[r], spaced(preferred, self.offsets[r]), strict=True):
                self.x[item] = x

    def _preferred(self, item: int, sides: tuple[bool, bool]) -> Point:
        """The preferred x of an item, the weighted mean of its neighbours, and its weight.

        The initial position has a small weight, so that long graphs do not drift sideways.
        """
        lattice, (up, down) = self.lattice, sides
        ties = []
        if up:
            ties += [(self.x[i], self._weight(i, item)) for i in lattice.above[item]]
        if down:
            ties += [(self.x[i], self._weight(item, i)) for i in lattice.below[item]]
        weight = sum(w for _, w in ties) or 1e-3
        pull = sum(x * w for x, w in ties) + self.home[item] * weight * HOME
        return pull / (weight + weight * HOME), weight

    def _weight(self, upper: int, lower: int) -> float:
        """The weight of a tie in keeping vertical: most along a chain, least to final boxes."""
        weight = 20.0 if (upper, lower) in self.straight else 1.0
        return weight if self.lattice.below[lower] else weight / 10

    def straighten(self) -> None:
        """Align the items of each chain vertically, in as few pieces as their neighbours allow."""
        for line in self.chains:
            piece: list[int] = []
            low, high = -inf, inf
            for item in line:
                left, right = self._limits(item)
                if piece and max(low, left) > min(high, right):
                    self._align(piece, low, high)
                    piece, low, high = [], -inf, inf
                piece.append(item)
                low, high = max(low, left), min(high, right)
            self._align(piece, low, high)

    def _limits(self, item: int) -> Point:
        """The least and the greatest x of an item, given its neighbours in the rank."""
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
    """The least distance of each item from the first of its rank."""
    offsets = [0.0]
    for left, right in pairwise(rank):
        bends = (left >= lattice.count) + (right >= lattice.count)
        apart = (lattice.boxes[left].width + lattice.boxes[right].width) / 2
        offsets.append(offsets[-1] + apart + SPACE * (1 - bends / 2))
    return offsets


def _chains(lattice: _Lattice, ranks: list[list[int]]) -> Iterator[list[int]]:
    """Chains of items one below the other, from the top; each item is in one chain."""
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
    """The item below that continues the chain: the only one, or the first with items below."""
    below = lattice.below[item]
    if len(below) == 1:
        return below[0]
    return next((i for i in below if i < lattice.count and lattice.below[i]), None)


def spaced(
    preferred: Sequence[Point], offsets: Sequence[float], bounds: Point = (-inf, inf)
) -> list[float]:
    """The positions closest to ``preferred`` (x, weight) that keep the distances of ``offsets``.

    With the offsets subtracted this is isotonic regression: pool adjacent violators.
    """
    pools: list[tuple[float, float, int]] = []  # (mean, weight, how many items)
    for (goal, weight), offset in zip(preferred, offsets, strict=True):
        mean, count = goal - offset, 1
        while pools and pools[-1][0] > mean:
            other, heavy, more = pools.pop()
            mean = (mean * weight + other * heavy) / (weight + heavy)
            weight, count = weight + heavy, count + more
        pools.append((mean, weight, count))
    low, high = bounds[0], bounds[1] - offsets[-1]
    means = [min(max(mean, low), high) for mean, _, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _bands(lattice: _Lattice, ranks: list[list[int]], x: list[float]) -> list[Point]:
    """The top and bottom of each rank; the gap grows where links run far sideways."""
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
