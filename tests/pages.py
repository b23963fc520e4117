"""Reads a report as the page does, by the words of ``web/src/types.ts`` alone."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct
from pathlib import Path
from typing import Any

KINDS = {"f4": ("f", 4), "f8": ("d", 8), "i4": ("i", 4), "u1": ("B", 1)}


def decoded(text: str) -> Any:
    """The data of a page, from its base64 on."""
    data = gzip.decompress(base64.b64decode(text, validate=True))
    size = int.from_bytes(data[:4], "little")
    start = (4 + size + 7) // 8 * 8

    def column(found: dict[str, Any]) -> Any:
        if "$" not in found:
            return found
        code, width = KINDS[found["$"]]
        at, count = start + found["o"], found["n"]
        assert found["o"] % 8 == 0 and at + count * width <= len(data)
        return list(struct.unpack(f"<{count}{code}", data[at : at + count * width]))

    return json.loads(data[4 : 4 + size], object_hook=column)


def read(path: Path) -> Any:
    """The data in a page; the only long run of letters in it that is a gzip file."""
    (text,) = re.findall(r"H4sIA[A-Za-z0-9+/]{100,}={0,2}", path.read_text("ascii", "replace"))
    return decoded(text)


def path_of(trace: Any, leaf: int, row: int) -> list[int]:
    """The vertices of the path of a listed element."""
    at, found = trace["leaves"][leaf]["start"][row], []
    while at >= 0:
        found.append(at)
        at = trace["forest"]["next"][at]
    return found
