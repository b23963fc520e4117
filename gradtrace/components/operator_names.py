"""Names of operators as a user reads them."""

from __future__ import annotations

MOVES = {
    *("alias", "as_strided", "clone", "copy", "expand", "native_dropout", "permute", "reshape"),
    *("reshape_alias", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "to_copy"),
    *("transpose", "unbind", "unsafe_split", "unsafe_view", "unsqueeze", "view"),
    *("view_as_complex", "view_as_real"),
}
"""Operators that tell nothing of where a value comes from."""

SCALES = {"mul", "div", "neg", "masked_fill", "where", "dropout"}
"""Operators that, of one argument, tell little: a scale, a mask, dropout."""


def spoken(operator: str) -> str:
    """An operator as in the forward pass.

    >>> spoken("AddBackward0"), spoken("UnsafeViewBackward0")
    ('add', 'unsafe_view')
    """
    stem = operator.rstrip("0123456789").removesuffix("Backward")
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in stem).removeprefix("_")
    return snake or operator
