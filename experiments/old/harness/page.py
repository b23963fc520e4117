"""The pages of an experiment: self-contained HTML, and Markdown for the docs."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from gradtrace.experiments.harness.published_rows import FILE as ROWS
from gradtrace.experiments.harness.results import (
    facts,
    lead,
    name,
    numeric,
    sentences,
    told,
)
from gradtrace.experiments.harness.table import EXPERIMENTS

Data = Mapping[str, Any]
"""Content of a ``results.json``."""

PARTS = ("question", "expectation", "method", "seeds")
"""What a page says of how an experiment was made, as its docstring does."""

LIMITS = "limits"
MORE = "more.md"
"""Stands for the page with the figures and tables that are not on the first."""

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --text: #1f2328; --page: #fff; --line: #d0d7de; --soft: #59636e;
  --card: #f6f8fa; --link: #1f5a8c; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --page: #0d1117; --line: #30363d; --soft: #9198a1; --card: #161b22;
    --link: #79b8ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 56rem; padding: 1rem; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; } * + h1 { margin-top: 3rem; }
h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
a { color: var(--link); }
.found { background: var(--card); border-left: 4px solid var(--link); padding: .75rem 1rem;
  border-radius: 6px; font-size: 1.1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; }
dt, figcaption, .note { color: var(--soft); } dd { margin: 0; min-width: 0; }
@media (max-width: 36rem) { dl { display: block; } dd { margin-bottom: .5rem; } }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .35rem .75rem; color: var(--soft); }
th, td { padding: .35rem .75rem; text-align: left; vertical-align: top; }
.number { text-align: right; white-space: nowrap; }
tr + tr > *, thead + tbody > tr > * { border-top: 1px solid var(--line); }
pre { margin: 0; padding: .75rem 1rem; font-size: .8125rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--link); padding: .5rem 0; }
.answers td:first-child { min-width: 14rem; }
@media (max-width: 36rem) {
  .answers tr:first-child { display: none; } .answers td { display: block; }
  .answers td + td { border-top: 0; } .answers td:first-child { font-weight: 600; }
  .answers td + td::before { content: attr(data-of) ": "; color: var(--soft); }
}
figure { margin: 1.5rem 0; }
figure img { display: block; width: 100%; max-width: 48rem; height: auto; background: #fff;
  border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
@media (prefers-color-scheme: dark) { figure img { filter: invert(.93) hue-rotate(180deg); } }
</style>
</head>
<body>
$body
</body>
</html>
""")


def html(sections: Sequence[str], title: str) -> str:
    """A whole page."""
    return PAGE.substitute(title=escape(title), body="\n".join(sections))


def alone(data: Data, pictures: Mapping[str, bytes]) -> str:
    """The page of one experiment."""
    heading = f"<h1>{escape(name(data))}</h1>"
    return html([heading, section(data, pictures)], f"{name(data)}: gradtrace experiment")


def several(found: Iterable[tuple[Data, Mapping[str, bytes]]]) -> str:
    """One page for several experiments: the sentence of each, then each in full."""
    listed = list(found)
    items = [
        f'<dt><a href="#{escape(anchor(data))}">{escape(name(data))}</a> '
        f"({escape(data['form'])})</dt><dd>{_inline(_lead(data)['headline'])}</dd>"
        for data, _ in listed
    ]
    parts = ["<h1>Experiments</h1>", f"<dl>{''.join(items)}</dl>"]
    for data, pictures in listed:
        parts.append(f'<h1 id="{escape(anchor(data))}">{escape(name(data))}</h1>')
        parts.append(section(data, pictures))
    return html(parts, "gradtrace experiments")


def anchor(data: Data) -> str:
    """The HTML id of an experiment on a page."""
    return re.sub(r"[^\w-]", "-", name(data))


def section(data: Data, pictures: Mapping[str, bytes], *, folded: bool = False) -> str:
    """The results of one experiment: answer, figure and table, then its findings one by one, method
    and limits, ``folded`` until somebody asks for them.
    """
    about, first = data["about"], _lead(data)
    figures = {plot["name"]: _figure(plot, pictures) for plot in data["plots"]}
    figures |= {title: _drawing(title, svg) for title, svg in data["drawings"].items()}
    top = figures.pop(first["figure"], "")
    tables = {table["title"]: _table(table) for table in data["tables"]}
    found = "".join(f"<li>{_inline(one)}</li>" for one in sentences(data["sentence"]))
    rest = [
        tables.pop(first["table"], ""),
        f"<h2>In full</h2><ul>{found}</ul>",
        "<h2>Method</h2><dl>",
        *(f"<dt>{part.capitalize()}</dt><dd>{_inline(about[part])}</dd>" for part in PARTS),
        "</dl>",
        f"<h2>Limits</h2><p>{_inline(about[LIMITS])}</p>" if LIMITS in about else "",
        *figures.values(),
        *tables.values(),
        "<h2>How it was run</h2><dl>",
        *(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts(data)),
        "</dl>",
    ]
    if folded:
        rest = ["<details><summary>All of its results, and how it was run</summary>", *rest]
        rest.append("</details>")
    return "\n".join([f'<p class="found">{_inline(first["headline"])}</p>', top, *rest])


def _lead(data: Data) -> dict[str, str]:
    """What the page leads with; results of older versions have no headline."""
    own = {part: data[part] for part in ("headline", "figure", "table") if part in data}
    return lead(None, data) | own


def _inline(text: str) -> str:
    """Text as HTML, with ``code`` in double backticks."""
    return re.sub(r"``(.+?)``", r"<code>\1</code>", escape(text))


def _figure(plot: Data, pictures: Mapping[str, bytes]) -> str:
    title = escape(plot["title"])
    if plot["name"] not in pictures:
        return f'<p class="note">{title}: not drawn, as matplotlib is not installed.</p>'
    return _image(title, "png", pictures[plot["name"]])


def _drawing(title: str, svg: str) -> str:
    """An SVG as an image, in which no script can run."""
    return _image(escape(title), "svg+xml", svg.encode())


def _image(title: str, kind: str, content: bytes) -> str:
    source = f"data:image/{kind};base64,{b64encode(content).decode()}"
    return f'<figure><img alt="{title}" src="{source}"><figcaption>{title}</figcaption></figure>'


def _table(table: Data) -> str:
    right = [numeric(table, k) for k in range(len(table["columns"]))]
    head = _row("th", table["columns"], right)
    body = "".join(_row("td", [told(cell) for cell in row], right) for row in table["rows"])
    note = f'<p class="note">{_inline(table["note"])}</p>' if table["note"] else ""
    return (
        f'<h3>{_inline(table["title"])}</h3><div class="wide" tabindex="0"><table>'
        f"<thead>{head}</thead><tbody>{body}</tbody></table></div>{note}"
    )


def _row(tag: str, cells: Iterable[str], right: Sequence[bool]) -> str:
    made = (
        f'<{tag} class="number">{_inline(cell)}</{tag}>'
        if number
        else f"<{tag}>{_inline(cell)}</{tag}>"
        for cell, number in zip(cells, right)
    )
    return f"<tr>{''.join(made)}</tr>"


# Markdown -----------------------------------------------------------------------------------------


def markdown(data: Data, files: Mapping[str, str]) -> str:
    """The page of one experiment for the docs: answer, figure, table, findings, method and limits;
    ``files`` are its pictures by plot or drawing, that of its rows, and that of its other tables.
    """
    about, first = data["about"], _lead(data)
    shown, tables = _shown(data, files), _tables(data)
    lines = [f"# {_quiet(name(data))}", "", f"> {_quiet(first['headline'])}"]
    if first["figure"] in shown:
        lines += ["", shown[first["figure"]]]
    if first["table"] in tables:
        lines += _titled(tables[first["table"]])
    lines += ["", "## In full", ""]
    lines += [f"- {_quiet(one)}" for one in sentences(data["sentence"])]
    lines += ["", "## Method"]
    for part in PARTS:
        lines += ["", f"*{part.capitalize()}.* {_quiet(about[part])}"]
    lines += ["", f"Written by `{command(data)}`."]
    lines += ["", "## Limits", "", _quiet(about[LIMITS])] if LIMITS in about else []
    lines += ["", "## How it was run", ""]
    lines += [f"- {fact}: {_quiet(value)}" for fact, value in facts(data)]
    if MORE in files:
        lines += [f"- More: [its other figures and tables]({files[MORE]})"]
    if ROWS in files:
        again = f"gradtrace experiment {data['experiment']} --rows {files[ROWS]}"
        lines += [f"- Rows: [{files[ROWS]}]({files[ROWS]}); `{again}` makes every table of them"]
    return "\n".join(lines) + "\n"


def more(data: Data, files: Mapping[str, str]) -> str:
    """A page in a folder beside the first, with the other figures and tables; "" without any."""
    first, title = _lead(data), _quiet(name(data))
    figures = [line for key, line in _shown(data, files).items() if key != first["figure"]]
    tables = [table for key, table in _tables(data).items() if key != first["table"]]
    if not figures and not tables:
        return ""
    lines = [f"# {title}: more", "", f"What [{title}]({name(data)}.md) has no room for."]
    lines += ["", "## Figures"] if figures else []
    for figure in figures:
        lines += ["", figure]
    for table in tables:
        lines += _titled(table)
    return re.sub(r"(?<!\\)\]\(", "](../", "\n".join(lines)) + "\n"


def _shown(data: Data, files: Mapping[str, str]) -> dict[str, str]:
    """The pictures that there are, by plot or drawing."""
    titles = {plot["name"]: plot["title"] for plot in data["plots"]}
    titles |= {title: title for title in data["drawings"]}
    return {key: f"![{_quiet(titles[key])}]({files[key]})" for key in titles if key in files}


def _tables(data: Data) -> dict[str, Data]:
    return {table["title"]: table for table in data["tables"]}


def _titled(table: Data) -> list[str]:
    """A table with its title and note."""
    note = ["", _quiet(table["note"])] if table["note"] else []
    return ["", f"## {_quiet(table['title'])}", "", *_grid(table), *note]


def command(data: Data) -> str:
    """The command that reproduces a run; for an older run, only with its form."""
    form = " --quick" if data["form"] == "quick" else ""
    return str(data.get("command") or f"gradtrace experiment {data['experiment']}{form}")


def index(found: Iterable[Data]) -> str:
    """The list of all experiments for the docs."""
    lines = [
        "# Experiments",
        "",
        "What each found. `gradtrace experiment NAME` runs one again, and `--list` says what there",
        "is. Every page says how its numbers were made; `--rows` makes tables again of its rows.",
        "",
    ]
    for data in found:
        title = name(data)
        lines += [f"- [{_quiet(title)}]({title}.md): {_quiet(_lead(data)['headline'])}"]
    return "\n".join(lines) + "\n"


def _grid(table: Data) -> list[str]:
    right = [numeric(table, k) for k in range(len(table["columns"]))]
    rows = [
        table["columns"],
        *([told(cell) for cell in row] for row in table["rows"]),
    ]
    written = ["| " + " | ".join(_quiet(cell) for cell in row) + " |" for row in rows]
    rule = "| " + " | ".join("---:" if number else "---" for number in right) + " |"
    return [written[0], rule, *written[1:]]


def _quiet(text: str) -> str:
    """Escape Markdown in a text; ``code`` stays code, and an experiment's name is a link."""
    parts = re.split(r"``(.+?)``", " ".join(text.split()))
    for k in range(0, len(parts), 2):
        parts[k] = re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", parts[k])
    parts[1::2] = [
        f"[{code}]({code}.md)" if code in EXPERIMENTS else f"`{code}`".replace("|", r"\|")
        for code in parts[1::2]
    ]
    return "".join(parts)
