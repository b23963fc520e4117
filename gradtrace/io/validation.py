"""Validation of values read from files, by schemas (those of each file are in ``schemas``).

A schema, built from the functions below, describes which values are allowed. It is called with a
value and raises ``SchemaMismatch``, which names the place.

>>> schema = record(name=text(), sizes=array(integer(0, 10), most=2))
>>> schema({"name": "a", "sizes": [1, 2]})
>>> schema({"name": "a", "sizes": [1, 11]})
Traceback (most recent call last):
gradtrace.io.validation.SchemaMismatch: sizes[1] is 11, not within 0 and 10
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count, repeat
from math import inf, isfinite, isnan
from typing import Any, NoReturn, TypeAlias

from gradtrace.errors import GradtraceError
from gradtrace.io import tuning

Schema: TypeAlias = Callable[[Any], None]

NONFINITE = {"nan", "inf", "-inf"}


class SchemaMismatch(ValueError):
    """A value that the schema of its file does not allow."""

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(f"{place} {problem}".strip())
        self.problem, self.place = problem, place

    def within(self, key: object) -> SchemaMismatch:
        """The same error with its place prefixed by ``key``, that of the enclosing container."""
        step = f"[{key}]" if isinstance(key, int) else str(key)[:80]
        dot = "." if self.place and not self.place.startswith("[") else ""
        return SchemaMismatch(self.problem, f"{step}{dot}{self.place}")


def unfit(problem: str) -> NoReturn:
    """Raise SchemaMismatch."""
    raise SchemaMismatch(problem)


def check_read(schema: Schema, data: object, what: str) -> None:
    """Check what a user has read, or made, and hands to ``from_dict``."""
    try:
        schema(data)
    except SchemaMismatch as error:
        raise GradtraceError(f"this is no {what}: {error}") from None


def _found(value: object) -> str:
    """A short description of a wrong value, for an error."""
    shown = repr(value) if isinstance(value, (str, float, bool)) or value is None else ""
    if type(value) is int and value.bit_length() < 64:
        shown = str(value)
    return shown if shown and len(shown) <= 40 else f"a {type(value).__name__}"


def _expect(kind: type, called: str, value: object) -> None:
    if type(value) is not kind:
        unfit(f"is {_found(value)}, not {called}")


def check_each(checks: Iterable[tuple[object, Schema, Any]]) -> None:
    """Check the values in a container, given as (key, schema, value); errors name the key."""
    key: object = ""
    try:
        for key, schema, value in checks:  # noqa: B007
            schema(value)
    except SchemaMismatch as error:
        raise error.within(key) from None


# Single values -----------------------------------------------------------------------------------


def text(most: int = tuning.TEXT_MAX_CHARS) -> Schema:
    """A text of at most ``most`` characters."""

    def check(value: Any) -> None:
        _expect(str, "a text", value)
        if len(value) > most:
            unfit(f"is a text of {len(value):,} characters, over {most:,}")

    return check


def one_of(*allowed: Any) -> Schema:
    """One of these texts."""

    def check(value: Any) -> None:
        if type(value) is not str or value not in allowed:
            unfit(f"is {_found(value)}, not one of {', '.join(map(repr, allowed))}")

    return check


def boolean() -> Schema:
    """True or false."""
    return partial(_expect, bool, "true or false")


def integer(low: int = 0, high: int = 2**63 - 1) -> Schema:
    """An integer from ``low`` to ``high``."""

    def check(value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            _expect(int, "a whole number", value)
            bound = f"{low:,} and {high:,}" if max(abs(low), abs(high)) < 10**6 else "its bounds"
            unfit(f"is {_found(value)}, not within {bound}")

    return check


def number(low: float = -inf, high: float = inf, nan: bool = True) -> Schema:
    """A number, or one of "nan", "inf", "-inf", within bounds."""

    def check(value: Any) -> None:
        if type(value) is float and low <= value <= high:
            return
        if type(value) is str and value in NONFINITE:
            value = float(value)
        if type(value) is int:
            if abs(value) >= 2**1023:
                unfit("is too large a number")
        else:
            _expect(float, "a number", value)
        if isnan(value):
            if not nan:
                unfit("is not a number")
        elif not low <= value <= high:
            unfit(f"is {_found(value)}, not within {low:g} and {high:g}")

    return check


def finite(low: float = -inf, high: float = inf) -> Schema:
    """A number that is neither NaN nor infinite."""
    within = number(low, high, nan=False)

    def check(value: Any) -> None:
        within(value)
        if type(value) is str or not isfinite(value):
            unfit(f"is {_found(value)}, not finite")

    return check


def maybe(item: Schema) -> Schema:
    """Null, or a value of this kind."""

    def check(value: Any) -> None:
        if value is not None:
            item(value)

    return check


def each_of(*schemas: Schema) -> Schema:
    """A value that matches all schemas, checked in order: the form first, then its consistency."""

    def check(value: Any) -> None:
        for schema in schemas:
            schema(value)

    return check


# Containers --------------------------------------------------------------------------------------


def array(item: Schema, most: int = tuning.MAX_ITEMS, least: int = 0) -> Schema:
    """A list of items of one kind."""

    def check(value: Any) -> None:
        _expect(list, "a list", value)
        if not least <= len(value) <= most:
            unfit(f"has {len(value):,} items, not {least:,} to {most:,}")
        check_each(zip(count(), repeat(item), value))

    return check


def sequence(*items: Schema) -> Schema:
    """A list with one item for each schema."""

    def check(value: Any) -> None:
        _expect(list, "a list", value)
        if len(value) != len(items):
            unfit(f"has {len(value):,} items, not {len(items)}")
        check_each(zip(count(), items, value))

    return check


def mapping(item: Schema, most: int = tuning.MAX_ITEMS, key: Schema | None = None) -> Schema:
    """A dict with any keys, and values of one kind."""
    keys = key or text()

    def check(value: Any) -> None:
        _expect(dict, "a mapping", value)
        if len(value) > most:
            unfit(f"has {len(value):,} items, over {most:,}")
        check_each(zip(value, repeat(keys), value))
        check_each(zip(value, repeat(item), value.values()))

    return check


def record(optional: Mapping[str, Schema] | None = None, /, **fields: Schema) -> Schema:
    """A dict with these fields, optionally those of ``optional``, and no others."""
    return _fields(fields, optional or {}, lambda value: unfit("is no known field"))


def including(optional: Mapping[str, Schema] | None = None, /, **fields: Schema) -> Schema:
    """A dict with these fields, optionally those of ``optional``, and others, not checked."""
    return _fields(fields, optional or {}, lambda value: None)


def _fields(fields: Mapping[str, Schema], optional: Mapping[str, Schema], other: Schema) -> Schema:
    known = {**fields, **optional}

    def check(value: Any) -> None:
        _expect(dict, "a mapping", value)
        if missing := fields.keys() - value.keys():
            unfit(f"has no {min(missing)!r}")
        check_each((name, known.get(name, other), each) for name, each in value.items())

    return check


def usually(kind: type, is_usual: Callable[[Any], bool], schema: Schema) -> Schema:
    """A list or dict (``kind``) of values that are nearly always as a fast test says: there may be
    millions. Only others are checked by the ``schema``.
    """

    def check(value: Any) -> None:
        values = value.values() if type(value) is dict else value
        if type(value) is not kind or not all(map(is_usual, values)):
            schema(value)

    return check


def anything(depth: int = tuning.MAX_DEPTH) -> Schema:
    """Any JSON of at most ``depth`` levels, with texts and numbers of limited size."""
    texts, numbers = text(), number()

    def check(value: Any, level: int = 0) -> None:
        if level > depth:
            unfit(f"has more than {depth} levels")
        if type(value) is list:
            for each in value:
                check(each, level + 1)
        elif type(value) is dict:
            for name, each in value.items():
                texts(name)
                check(each, level + 1)
        elif type(value) is str:
            texts(value)
        elif value is not None and type(value) is not bool:
            numbers(value)

    return check
