"""Layered graph layout: every link runs downwards, with few crossings.

The method of Sugiyama, Tagawa and Toda (1981): ranks are given, long links get a bend at each rank
they pass, each rank is ordered by barycentres, and coordinates follow from the order. All steps are
iterative, and linear in the number of boxes and bends up to sorting.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple, TypeAlias

from gradtrace.graphs.tuning import (
    BEND_WIDTH_PX,
    BOX_DISTANCE_PX,
    HOME_WEIGHT,
    LAYOUT_SWEEPS,
    RANK_MIN_DISTANCE_PX,
)

Link: TypeAlias = tuple[int, int]  # (upper box, lower box)
Point: TypeAlias = tuple[float, float]


class Box(NamedTuple):
    """A box to place: its size, and its rank (the root's is 0)."""

    width: float
    height: float
    rank: int


class GraphLayout(NamedTuple):
    """The centre of each box's upper side, the points of each link after its start, the extent.

    A link passes a rank in two points: where it enters, and where it leaves. Its last point is the
    top of its lower box.
    """

    tops: list[Point]
    points: dict[Link, list[Point]]
    width: float
    height: float


def layered(boxes: Sequence[Box], links: Iterable[Link]) -> GraphLayout:
    """Place boxes by rank; the links go from lower to higher ranks, each given once."""
    links = list(links)
    lattice = _Lattice(boxes, links)
    ranks = _ordered(lattice)
    x = _abscissas(lattice, ranks)
    bands = _bands(lattice, ranks, x)
    tops = [(x[i], bands[box.rank][0]) for i, box in enumerate(boxes)]
    points = {}
    for upper, lower in links:
        passed = range(boxes[upper].rank + 1, boxes[lower].rank)
        bends = [(x[lattice.lanes[lower, rank]], y) for rank in passed for y in bands[rank]]
        points[upper, lower] = [*bends, tops[lower]]
    width = max(at + box.width / 2 for at, box in zip(x, lattice.boxes, strict=True))
    return GraphLayout(tops, points, width, bands[-1][1])


class _Lattice:
    """Boxes and bends (items), each tied to its neighbours in the adjacent ranks.

    All links to one box share one bend in each rank they pass, so they join into one lane: a weight
    used at fifty time steps takes one lane, not fifty.
    """

    def __init__(self, boxes: Sequence[Box], links: Iterable[Link]) -> None:
        self.boxes = list(boxes)
        self.count = len(boxes)  # items from here on are bends
        self.above: list[list[int]] = [[] for _ in boxes]
        self.below: list[list[int]] = [[] for _ in boxes]
        self.lanes: dict[tuple[int, int], int] = {}  # (lower box, rank) -> bend
        for at, lower in links:
            for rank in range(boxes[at].rank + 1, boxes[lower].rank):
                new = len(self.boxes)
                bend = self.lanes.setdefault((lower, rank), new)
                if bend == new:
                    self.boxes.append(Box(BEND_WIDTH_PX, 0, rank))
                    self.above.append([])
                    self.below.append([])
                self._tie(at, bend)
                if bend != new:  # joins the lane of an earlier link
                    break
                at = bend
            else:
                self._tie(at, lower)

    def _tie(self, upper: int, lower: int) -> None:
        self.below[upper].append(lower)
        self.above[lower].append(upper)


# Order within the ranks ------------------------------------------------------------------------


def _ordered(lattice: _Lattice) -> list[list[int]]:
    """The items of each rank from left to right: the order with the fewest crossings of several
    sweeps, down and up, that sort each rank by the mean place of its neighbours in the one before.
    """
    ranks = _preorder(lattice)
    best, fewest = [list(rank) for rank in ranks], _crossings(lattice, ranks)
    for sweep in range(LAYOUT_SWEEPS):
        if not fewest:
            break
        down = sweep % 2 == 0
        near = lattice.above if down else lattice.below
        for fixed, free in pairwise(ranks if down else ranks[::-1]):
            place = {item: i for i, item in enumerate(fixed)}
            own = {item: i * len(fixed) / len(free) for i, item in enumerate(free)}
            means = {
                item: sum(place[other] for other in near[item]) / len(near[item])
                for item in free
                if near[item]
            }
            free.sort(key=(own | means).__getitem__)
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
        if not seen[item]:
            seen[item] = True
            ranks[lattice.boxes[item].rank].append(item)
            stack += reversed(lattice.below[item])
    return ranks


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
    for sweep in range(LAYOUT_SWEEPS):
        down = sweep % 2 == 0
        if sweep < LAYOUT_SWEEPS // 2:
            places.sweep(down, [lattice.above if down else lattice.below])
        else:
            places.sweep(down, [lattice.above, lattice.below])
            places.straighten()
    left = min(x - box.width / 2 for x, box in zip(places.x, lattice.boxes, strict=True))
    return [x - left for x in places.x]


class _Positions:
    """Optimises the x of each item; initially each rank is packed and centred."""

    def __init__(self, lattice: _Lattice, ranks: list[list[int]]) -> None:
        self.lattice, self.ranks = lattice, ranks
        self.offsets: list[list[float]] = []  # of each item from the first of its rank, at least
        self.left: dict[int, tuple[int, float]] = {}  # item -> (neighbour, distance to keep)
        self.right: dict[int, tuple[int, float]] = {}
        self.x = [0.0] * len(lattice.boxes)
        for rank in ranks:
            offsets = [0.0]
            for left, right in pairwise(rank):
                bends = (left >= lattice.count) + (right >= lattice.count)
                apart = (lattice.boxes[left].width + lattice.boxes[right].width) / 2
                offsets.append(offsets[-1] + apart + BOX_DISTANCE_PX * (1 - bends / 2))
            for item, offset in zip(rank, offsets, strict=True):
                self.x[item] = offset - offsets[-1] / 2
            for (a, b), (start, end) in zip(pairwise(rank), pairwise(offsets), strict=True):
                self.left[b], self.right[a] = (a, end - start), (b, end - start)
            self.offsets.append(offsets)
        self.home = list(self.x)
        self.chains = _chains(lattice, ranks)
        self.straight = {tie for line in self.chains for tie in pairwise(line)}

    def sweep(self, down: bool, sides: Sequence[list[list[int]]]) -> None:
        """Move each rank towards its neighbours on some ``sides`` (above, below)."""
        for r in range(len(self.ranks))[:: 1 if down else -1]:
            preferred = [self._preferred(item, sides) for item in self.ranks[r]]
            for item, x in zip(self.ranks[r], spaced(preferred, self.offsets[r]), strict=True):
                self.x[item] = x

    def _preferred(self, item: int, sides: Sequence[list[list[int]]]) -> Point:
        """The preferred x of an item, the weighted mean of its neighbours, and its weight."""
        ties = []
        for side in sides:
            for other in side[item]:
                tie = (other, item) if side is self.lattice.above else (item, other)
                ties.append((self.x[other], self._weight(*tie)))
        weight = sum(w for _, w in ties) or 1e-3
        pull = sum(x * w for x, w in ties) + self.home[item] * weight * HOME_WEIGHT
        return pull / (weight + weight * HOME_WEIGHT), weight

    def _weight(self, upper: int, lower: int) -> float:
        """The weight of a tie in keeping vertical: most along a chain, least to final boxes."""
        weight = 20.0 if (upper, lower) in self.straight else 1.0
        return weight if self.lattice.below[lower] else weight / 10

    def straighten(self) -> None:
        """Align the items of each chain vertically, in as few pieces as their neighbours allow."""
        for line in self.chains:
            pieces: list[tuple[list[int], float, float]] = []  # items, least x, greatest x
            for item in line:
                left, right = self.left.get(item), self.right.get(item)
                low = self.x[left[0]] + left[1] if left else -inf
                high = self.x[right[0]] - right[1] if right else inf
                piece, least, most = pieces[-1] if pieces else ([], inf, -inf)
                if max(low, least) <= min(high, most):
                    piece.append(item)
                    pieces[-1] = (piece, max(low, least), min(high, most))
                else:
                    pieces.append(([item], low, high))
            for piece, low, high in pieces:
                mean = sum(self.x[item] for item in piece) / len(piece)
                for item in piece:
                    self.x[item] = min(max(mean, low), high)


def _chains(lattice: _Lattice, ranks: list[list[int]]) -> list[list[int]]:
    """Chains of items one below the other, from the top; each item is in one chain.

    A chain goes on to the only item below, or to the first box with items below.
    """
    taken: set[int] = set()
    chains = []
    for rank in ranks:
        for item in rank:
            line: list[int] = []
            onward = [item]
            while onward and onward[0] not in taken:
                line.append(onward[0])
                taken.add(onward[0])
                below = lattice.below[onward[0]]
                boxes = [i for i in below if i < lattice.count and lattice.below[i]]
                onward = below if len(below) == 1 else boxes
            if line:
                chains.append(line)
    return chains


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
        top = bottom + RANK_MIN_DISTANCE_PX + min(80.0, sideways / 16)
    return bands
