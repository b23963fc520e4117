"""The results as Markdown."""

from __future__ import annotations

from typing import Any

from gradtrace.benchmarks.results import ResultColumn, text


def markdown(data: dict[str, Any], figures: str | None = None) -> str:
    """The page; ``figures`` is the folder of the pictures, as seen from the page."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `gradtrace bench` (`make bench`). Ways are timed in turns, in one process;",
        "ratios are those of the best of many rounds, or, where it says so, the median of the",
        "ratios of single rounds. A target is the most that is aimed at, or, where it says so, the",
        "least.",
        "",
        *_where(data),
    ]
    if data["quick"]:
        lines += ["", "A trial on small cases: these figures say nothing about speed."]
    for section in data["sections"].values():
        lines += ["", f"## {section['title']}", "", *_table(section)]
        for note in section["notes"]:
            lines += ["", note]
        if section.get("taken"):
            place = f" {section['where']}" if section.get("where") else ""
            lines += ["", f"Taken {section['taken']}, in {section['seconds']:.0f} s.{place}"]
        for figure in section["figures"] if figures is not None else ():
            lines += ["", f"![{figure['title']}]({figures}/{figure['name']}.svg)"]
    if data["left_out"]:
        lines += ["", "## Left out", "", *(f"- {line}" for line in data["left_out"])]
    return "\n".join(lines) + "\n"


def _where(data: dict[str, Any]) -> list[str]:
    place, load = data["machine"], data["load"]
    return [
        f"- {place['system']}, {place['processor']}, {place['cores']} cores, "
        f"{place['threads']} threads, load {load['start']:.2f} at the start and "
        f"{load['end']:.2f} at the end",
        "- " + ", ".join(f"{name} {number}" for name, number in data["versions"].items()),
        f"- {data['date']}, {data['seconds'] / 60:.1f} minutes",
    ]


def _table(section: dict[str, Any]) -> list[str]:
    columns = [ResultColumn(**column) for column in section["columns"]]
    rows = [
        [column.title for column in columns],
        ["---" if not column.form else "---:" for column in columns],
        *([_cell(row, columns, k) for k in range(len(columns))] for row in section["rows"]),
    ]
    return ["| " + " | ".join(x.replace("|", "\\|") for x in row) + " |" for row in rows]


def _cell(row: list[Any], columns: list[ResultColumn], k: int) -> str:
    """A cell; a target says whether it was met."""
    told = text(row[k], columns[k])
    if not columns[k].limits or row[k] is None:
        return told
    titles = [column.title for column in columns]
    measured = row[titles.index(columns[k].limits)]
    if measured is None:
        return told
    met = measured >= row[k] if columns[k].least else measured <= row[k]
    return f"{told} met" if met else f"{told} **missed**"
