"""Tables of batches, kept until all are there to be added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gradtrace.table import Table


@dataclass(frozen=True)
class SummedTables:
    """The tables of some batches; ``total`` is their sum."""

    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def pairs(self) -> int:
        """How many losses they are of."""
        return sum(table.about["losses"] for table in self.tables)

    def total(self) -> Table:
        """The table over all losses."""
        found = Table.total(self.tables)
        about = {**found.about, "interrupted": self.interrupted}
        return replace(found, notes=(*found.notes, *self.notes), about=about)

    def merge(self, *others: SummedTables) -> SummedTables:
        """The tables of all."""
        found = self
        for other in others:
            tables, notes = (*found.tables, *other.tables), (*found.notes, *other.notes)
            found = SummedTables(tables, notes, found.interrupted or other.interrupted)
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        tables = [table.to_dict() for table in self.tables]
        return {"tables": tables, "notes": list(self.notes), "interrupted": self.interrupted}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SummedTables:
        """The inverse of ``to_dict``."""
        tables = tuple(map(Table.from_dict, data["tables"]))
        return cls(tables, tuple(data["notes"]), data["interrupted"])
