"""Limits on what is read and written, and sizes of what is shown."""

TEXT_MAX_CHARS = 1_000_000
"""The most characters of a text in JSON."""

MAX_ITEMS = 10_000_000
"""The most items of a list or a mapping in JSON."""

MAX_DEPTH = 100
"""The most levels of lists and mappings in free JSON."""

MAX_DIGITS = 4000
"""The most digits of an integer in JSON. By default, Python refuses 4,300."""

JSON_MAX_BYTES = 400_000_000
"""The most bytes of memory that JSON may take when it is parsed."""

BYTES_AFTER = {"[": 90, "{": 260, ":": 110, ",": 60}
"""Bytes of memory that a JSON value takes, by the character before it (measured on 64-bit CPython
3.11: lists, dicts, keys with their slots, and small values)."""

LINE_MAX_BYTES = 100_000_000
"""The most bytes of a line that is read."""

HEADER_MAX_BYTES = 100_000_000
"""The most bytes of a container's header: the safetensors library refuses larger ones."""

CHUNK_BYTES = 1 << 24
"""Bytes of a file that are read or written, and added to a checksum, at a time."""

MAX_DIMENSIONS = 64
"""The most dimensions of a tensor; PyTorch supports no more."""

MAX_STEPS = 2**31 - 1
"""The most steps of a run: the report numbers them with 32 bits."""

SUM_MAX_BITS = 20_000
"""The most bits of a sum. Squares of floats have at most 4,300; sums of them have a few more."""

MAX_BATCHES = 10_000_000
"""The most batches of a data set."""

MAX_ROWS = 40
"""The most rows of a table that are shown."""

CELL_WIDTH = 60
"""The most terminal columns of a text in a cell."""

TOOLTIP_WIDTH = 400
"""The most terminal columns of a text in a tooltip."""

ROUND_COUNTS_FROM = 10**18
"""Counts from here on are shown rounded: numbers of paths can have very many digits."""

DECIMAL_MAX_BITS = 14_000
"""Integers of more bits (4,200 digits) are not written in decimal: Python refuses about 4,300."""
