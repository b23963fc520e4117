"""Validation of values read from files, by schemas (those of each file are in ``schemas``).

``parse`` reads JSON within a memory limit, estimated beforehand. A schema, built from the functions
below, describes which values are allowed. It is called with a value and raises ``SchemaMismatch``,
which names the place.

>>> schema = record(name=text(), sizes=array(integer(0, 10), most=2))
>>> schema(parse('{"name": "a", "sizes": [1, 2]}'))
>>> schema({"name": "a", "sizes": [1, 11]})
Traceback (most recent call last):
gradtrace.io.validation.SchemaMismatch: sizes[1] is 11, not within 0 and 10
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import inf, isfinite, isnan
from typing import Any, NoReturn, TypeAlias

Schema: TypeAlias = Callable[[Any], None]

TEXT_MAX_CHARS = 1_000_000
"""The most characters of a text."""

MAX_ITEMS = 10_000_000
"""The most items of a list or a mapping."""

MAX_DEPTH = 100
"""The most levels of lists and mappings in free JSON."""

MAX_DIGITS = 4000
"""The most digits of an integer. By default, Python refuses 4,300."""

MEMORY_MAX_BYTES = 400_000_000
"""The most bytes that JSON may take when it is parsed."""

BYTES_AFTER = {"[": 90, "{": 260, ":": 110, ",": 60}
"""Bytes of memory that a JSON value takes, by the character before it (measured on 64-bit CPython
3.11: lists, dicts, keys with their slots, and small values)."""

FLOATS = {"nan", "inf", "-inf"}


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


# JSON --------------------------------------------------------------------------------------------


def weight(text: str) -> int:
    """An upper estimate of the bytes that parsed JSON takes, from counts of its characters."""
    wide = 4 if "\\u" in text or not text.isascii() else 1
    return wide * len(text) + sum(
        text.count(character) * size for character, size in BYTES_AFTER.items()
    )


def parse(
    text: str | bytes,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    nan: bool = False,
) -> Any:
    """Parse JSON of at most ``MEMORY_MAX_BYTES``, without duplicate keys or overlong integers.

    NaN and infinities are refused unless ``nan``. ``pairs`` makes a value of the items of an
    object, instead of a dict. Any error in the text raises ``SchemaMismatch``.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        if len(text) > MEMORY_MAX_BYTES // 400 and weight(text) > MEMORY_MAX_BYTES:
            unfit(f"JSON would take more than {MEMORY_MAX_BYTES:,} bytes of memory")
        options: dict[str, Any] = {"parse_int": _integer} if _has_long_integer(text) else {}
        options |= {} if nan else {"parse_constant": _constant}
        return json.loads(text, object_pairs_hook=pairs or distinct, **options)
    except RecursionError:
        raise SchemaMismatch("JSON is nested too deep to be read") from None
    except UnicodeDecodeError:
        raise SchemaMismatch("text is not UTF-8") from None
    except SchemaMismatch:
        raise
    except ValueError as error:
        raise SchemaMismatch(f"is not JSON ({str(error)[:80]})") from None


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of items; raises if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        unfit("a key is there twice")
    return found


def _constant(name: str) -> NoReturn:
    unfit(f"{name} is not JSON")


def _has_long_integer(text: str) -> bool:
    """Whether an integer may have more than ``MAX_DIGITS`` digits: then it fills an aligned block
    of half as many characters.

    Each character is visited once; a regular expression could restart at each of them.
    """
    half = MAX_DIGITS // 2
    return len(text) > MAX_DIGITS and any(
        text[at : at + half].isdigit() for at in range(0, len(text), half)
    )


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        unfit(f"an integer has {len(digits):,} digits")
    return int(digits)


# Schemas -----------------------------------------------------------------------------------------


def _found(value: object) -> str:
    """A short description of a wrong value, for an error."""
    shown = repr(value) if isinstance(value, (str, float, bool)) or value is None else ""
    if type(value) is int and value.bit_length() < 64:
        shown = str(value)
    return shown if shown and len(shown) <= 40 else f"a {type(value).__name__}"


def text(most: int = TEXT_MAX_CHARS) -> Schema:
    """A text of at most ``most`` characters."""

    def check(value: Any) -> None:
        if type(value) is not str:
            unfit(f"is {_found(value)}, not a text")
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

    def check(value: Any) -> None:
        if type(value) is not bool:
            unfit(f"is {_found(value)}, not true or false")

    return check


def integer(low: int = 0, high: int = 2**63 - 1) -> Schema:
    """An integer from ``low`` to ``high``."""

    def check(value: Any) -> None:
        if type(value) is not int:
            unfit(f"is {_found(value)}, not a whole number")
        if not low <= value <= high:
            bound = f"{low:,} and {high:,}" if max(abs(low), abs(high)) < 10**6 else "its bounds"
            unfit(f"is {_found(value)}, not within {bound}")

    return check


def number(low: float = -inf, high: float = inf, nan: bool = True) -> Schema:
    """A number, or one of "nan", "inf", "-inf", within bounds."""

    def check(value: Any) -> None:
        if type(value) is str and value in FLOATS:
            value = float(value)
        if type(value) is int:
            if abs(value) >= 2**1023:
                unfit("is too large a number")
        elif type(value) is not float:
            unfit(f"is {_found(value)}, not a number")
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


def array(item: Schema, most: int = MAX_ITEMS, least: int = 0) -> Schema:
    """A list of items of one kind."""

    def check(value: Any) -> None:
        if type(value) is not list:
            unfit(f"is {_found(value)}, not a list")
        if not least <= len(value) <= most:
            unfit(f"has {len(value):,} items, not {least:,} to {most:,}")
        at = 0
        try:
            for at, each in enumerate(value):  # noqa: B007
                item(each)
        except SchemaMismatch as error:
            raise error.within(at) from None

    return check


def sequence(*items: Schema) -> Schema:
    """A list with one item for each schema."""

    def check(value: Any) -> None:
        if type(value) is not list:
            unfit(f"is {_found(value)}, not a list")
        if len(value) != len(items):
            unfit(f"has {len(value):,} items, not {len(items)}")
        for at, (schema, each) in enumerate(zip(items, value)):
            try:
                schema(each)
            except SchemaMismatch as error:
                raise error.within(at) from None

    return check


def mapping(item: Schema, most: int = MAX_ITEMS, key: Schema | None = None) -> Schema:
    """A dict with any keys, and values of one kind."""
    keys = key or text()

    def check(value: Any) -> None:
        if type(value) is not dict:
            unfit(f"is {_found(value)}, not a mapping")
        if len(value) > most:
            unfit(f"has {len(value):,} items, over {most:,}")
        name = ""
        try:
            for name, each in value.items():
                keys(name)
                item(each)
        except SchemaMismatch as error:
            raise error.within(name) from None

    return check


def record(optional: Mapping[str, Schema] | None = None, /, **fields: Schema) -> Schema:
    """A dict with these fields, optionally those of ``optional``, and no others."""
    known = {**fields, **(optional or {})}

    def check(value: Any) -> None:
        if type(value) is not dict:
            unfit(f"is {_found(value)}, not a mapping")
        if missing := fields.keys() - value.keys():
            unfit(f"has no {min(missing)!r}")
        name = ""
        try:
            for name, each in value.items():
                if name not in known:
                    unfit("is no known field")
                known[name](each)
        except SchemaMismatch as error:
            raise error.within(name) from None

    return check


def including(optional: Mapping[str, Schema] | None = None, /, **fields: Schema) -> Schema:
    """A dict with these fields, optionally those of ``optional``, and others, not checked."""
    known = record(optional, **fields)
    names = {*fields, *(optional or {})}

    def check(value: Any) -> None:
        known({n: x for n, x in value.items() if n in names} if type(value) is dict else value)

    return check


def maybe(item: Schema) -> Schema:
    """Null, or a value of this kind."""

    def check(value: Any) -> None:
        if value is not None:
            item(value)

    return check


def anything(depth: int = MAX_DEPTH) -> Schema:
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


def each_of(*schemas: Schema) -> Schema:
    """A value that matches all schemas, checked in order: the form first, then its consistency."""

    def check(value: Any) -> None:
        for schema in schemas:
            schema(value)

    return check
