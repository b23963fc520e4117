"""``Flow``: levels along depth, a row for each module, and findings in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any, NamedTuple

from gradtrace.errors import UnknownName, printable
from gradtrace.io import schemas
from gradtrace.io.strict_json import json_value
from gradtrace.io.table import RowSequence, Tabular, TextColumn, TextTable
from gradtrace.io.validation import check_read


class Level(NamedTuple):
    """The operator with the largest gradient norm at its output, at one depth.

    ``largest`` is ``max |g[i]|``, ``zeros`` the share of entries that are exactly 0.
    """

    depth: int
    norm: float
    operator: str
    module: str
    entries: int
    largest: float
    zeros: float

    @property
    def rms(self) -> float:
        """The root of the mean square: ``norm / √entries``."""
        return self.norm / sqrt(self.entries) if self.entries else 0.0

    @property
    def where(self) -> str:
        """The module's name in quotes; outside any module, the operator's name."""
        return f"'{self.module}'" if self.module else self.operator


@dataclass(frozen=True)
class ModuleFlow:
    """The gradient at one module, over its own operators, without those of its submodules.

    ``norm`` is the largest norm at its output: of the cotangents that reach its operators from
    outside the call. ``first`` and ``last`` are the same for its first and its last call alone.
    ``handed`` is the largest norm that its operators pass to other modules or calls, or to an input
    (None: there are none below). ``own`` is the norm of all its parameters' gradients (None: it has
    none). ``depth`` is the least depth of its operators, ``zeros`` the share of exact zeros at its
    output, ``verdict`` one of "", "dead", "mostly dead", "vanishing", "exploding", "not finite".
    """

    module: str
    kind: str
    calls: int
    depth: int
    norm: float
    first: float
    last: float
    handed: float | None
    zeros: float
    own: float | None
    verdict: str = ""

    @property
    def name(self) -> str:
        """The module's name; ``(top)`` outside any module."""
        return self.module or "(top)"

    @property
    def gain(self) -> float | None:
        """``handed / norm``; None if ``norm`` is 0 or ``handed`` is None."""
        return self.handed / self.norm if self.handed is not None and self.norm else None


COLUMNS = (
    (TextColumn("module"), "name"),
    (TextColumn("class"), "kind"),
    (TextColumn("calls", "count"), "calls"),
    (TextColumn("depth", "count"), "depth"),
    (TextColumn("norm", "number"), "norm"),
    (TextColumn("first call", "number"), "first"),
    (TextColumn("last call", "number"), "last"),
    (TextColumn("handed on", "number"), "handed"),
    (TextColumn("gain", "number"), "gain"),
    (TextColumn("zeros", "share"), "zeros"),
    (TextColumn("parameters", "number"), "own"),
    (TextColumn("verdict"), "verdict"),
)
"""The columns of a table, each with its field of ``ModuleFlow``."""

BY_CALL = ("calls", "first", "last")
"""Fields of which a table has columns only if a module was called several times."""


@dataclass(frozen=True, repr=False)
class Flow(RowSequence[ModuleFlow], Tabular):
    """The gradient along depth: ``profile`` has a level for each depth, from the loss on, ``rows``
    one row per module, nearest to the loss first, ``findings`` the diagnosis in sentences.
    """

    profile: tuple[Level, ...]
    rows: tuple[ModuleFlow, ...]
    findings: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """Whether the gradient vanishes, explodes or dies, where, and possible remedies."""
        return printable(" ".join(self.findings))

    def __getitem__(self, module: str) -> ModuleFlow:
        for row in self.rows:
            if row.module == module:
                return row
        known = ", ".join(repr(row.module) for row in self.rows[:8])
        raise UnknownName(f"no module {module!r} made operators of this loss; there are {known}")

    def table(self) -> TextTable:
        """One row per module, with the verdict below."""
        alone = all(row.calls <= 1 for row in self.rows)
        shown = [each for each in COLUMNS if not (alone and each[1] in BY_CALL)]
        return TextTable(
            f"Gradient flow ({len(self.profile):,} operators deep)",
            tuple(column for column, _ in shown),
            tuple(tuple(getattr(row, field) for _, field in shown) for row in self.rows),
            self.findings,
        )

    def __repr__(self) -> str:
        return f"Flow({len(self.rows)} modules, {len(self.profile):,} deep: {self.verdict})"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values; numbers that are not finite as strings."""
        return {
            "profile": [json_value(level._asdict()) for level in self.profile],
            "rows": [json_value(asdict(row)) for row in self.rows],
            "findings": list(self.findings),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Flow:
        """The inverse of ``to_dict``.

        Args:
            data: What ``to_dict`` returned.

        Returns:
            The flow.
        """
        check_read(schemas.FLOW, data, "flow")
        return cls(
            tuple(Level(**_parsed(level)) for level in data["profile"]),
            tuple(ModuleFlow(**_parsed(row)) for row in data["rows"]),
            tuple(map(str, data["findings"])),
        )


TYPES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("operator", "module", "kind", "verdict"), str),
    **dict.fromkeys(("depth", "entries", "calls"), int),
}
"""The types of fields that are not floats."""


def _parsed(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if v is None else TYPES.get(k, float)(v) for k, v in fields.items()}
