"""Limits and measures of drawings."""

DRAWN_MAX_OPERATORS = 2_000
"""The most operators drawn; larger drawings are unreadable and slow to lay out."""

LINK_MAX_RANKS = 24
"""An argument more ranks below its user than this is named there, without a link to it."""

TOOLTIP_MAX_ARGUMENTS = 24
"""The most arguments named in one tooltip."""

LISTED_MAX = 3
"""The most items listed one by one: named arguments with their own vertex (more share one),
shapes, and positions.
"""

NAME_MAX_CHARS, TOOLTIP_MAX_CHARS = 30, 400
"""The most characters of a name on a vertex, and in its tooltip."""

MARGIN_PX = 24.0
"""The space around a drawing."""

BEND_WIDTH_PX, BOX_DISTANCE_PX, RANK_MIN_DISTANCE_PX = 12.0, 22.0, 36.0
"""The width of a lane of links, and the distances of boxes in a rank and of ranks."""

LAYOUT_SWEEPS = 8
"""Passes over the ranks that order them, and that place them."""

HOME_WEIGHT = 0.02
"""The weight of an item's initial position, relative to its ties: long graphs do not drift."""
