"""Limits on the size of pages and of the views in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits on the size of a view: cells of heat maps, and points of paths (``stops``).

    To estimate how many paths fit, those of ``tried`` cells are followed first; fewer in deep
    graphs, where they would visit more than ``steps`` operators if none of them joined.
    """

    cells: int = 40_000
    stops: int = 60_000
    tried: int = 8_000
    steps: int = 10_000_000


FULL = Limits()
SMALL = Limits(cells=4_000, stops=6_000, tried=2_000)
"""For notebooks, and for models so large that a full view would take long."""

FULL_VIEW_MAX_OPERATORS, FULL_VIEW_MAX_ELEMENTS = 2_000, 5_000_000
"""Above this many operators, or parameter elements, a notebook shows a smaller view."""

ARGUMENTS_MAX_OPERATORS = 4_000
"""Above this many operators a report does not list the arguments of sums."""

SAMPLED_ELEMENTS = 10_000
"""The number of elements a report samples for influence if memory is short for all."""

COVERED_ELEMENTS = 1_000
"""The most elements whose paths a report measures the coverage of."""

MAX_FORKS, FORK_MAX_BRANCHES = 200, 64
"""The most forks in a view, those of most information, and the most branches of each."""

LEAF_MAX_CELLS = 48 * 48
"""The most cells of a leaf."""

MAX_ROUTES, ROUTE_MAX_STARTS = 50, 5
"""The most routes in a view, and the most paths of a route whose starts are in it."""

ATTRIBUTION_MAX_EDGES = 5_000
"""The most edges of an attribution graph in a page."""

MAX_SHARES = 100_000
"""The most shares of a run in a page; of longer runs it has only some of the steps."""

MAX_TIMES = 5_000
"""The most step times in a page; of more it has block medians."""

TITLE_MAX_CHARS = 200
"""The most characters of a title."""

COMPRESSION_LEVEL = 6
"""Compression level of pages; 9 takes six times as long and saves a hundredth."""

FRAME_HEIGHT_PX = 640
"""The height of a page in a notebook."""

NOTEBOOK_MAX_CHARS = 2_000_000
"""The most characters that a page in a notebook may have: it is saved with every output."""
