"""JSON without NaN, duplicate keys or overlong integers, parsed within a memory limit.

>>> parse(json.dumps(json_value({"loss": float("nan"), "sizes": (1, 2)})))
{'loss': 'nan', 'sizes': [1, 2]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NoReturn

from gradtrace.io import tuning
from gradtrace.io.validation import SchemaMismatch, unfit


def json_value(value: Any, missing: bool = False) -> Any:
    """A value for strict JSON: keys become text, tuples lists, and NaN and infinities the texts
    "nan", "inf" and "-inf", or None if ``missing``. Other objects stay.
    """
    if isinstance(value, float):
        return value if isfinite(value) else None if missing else str(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(each, missing) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(each, missing) for each in value]
    return value


def weight(text: str) -> int:
    """An upper estimate of the bytes that parsed JSON takes, from counts of its characters."""
    wide = 4 if "\\u" in text or not text.isascii() else 1
    return wide * len(text) + sum(
        text.count(character) * size for character, size in tuning.BYTES_AFTER.items()
    )


def parse(
    text: str | bytes,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    nan: bool = False,
) -> Any:
    """Parse JSON of at most ``JSON_MAX_BYTES``, without duplicate keys or overlong integers.

    NaN and infinities are refused unless ``nan``. ``pairs`` makes a value of the items of an
    object, instead of a dict. Any error in the text raises ``SchemaMismatch``.
    """
    most = tuning.JSON_MAX_BYTES
    try:
        text = text.decode() if isinstance(text, bytes) else text
        if len(text) > most // 400 and weight(text) > most:
            unfit(f"JSON would take more than {most:,} bytes of memory")
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
    half = tuning.MAX_DIGITS // 2
    return len(text) > tuning.MAX_DIGITS and any(
        text[at : at + half].isdigit() for at in range(0, len(text), half)
    )


def _integer(digits: str) -> int:
    if len(digits) > tuning.MAX_DIGITS:
        unfit(f"an integer has {len(digits):,} digits")
    return int(digits)
