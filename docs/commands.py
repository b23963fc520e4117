"""The reference of the command line: what ``gradtrace COMMAND --help`` prints, without boxes."""

from __future__ import annotations

import os
import re
from typing import Any
from unittest import mock

import typer
from typer.testing import CliRunner

WIDTH = 92


def reference() -> str:
    """A section for the program and for each of its commands, as Markdown."""
    from gradtrace.cli import app

    group: Any = typer.main.get_command(app)  # a class that typer keeps to itself
    names = [name for name in group.list_commands(None) if not group.commands[name].hidden]
    return "\n\n".join([section(), *(section(name) for name in names)])


def section(*command: str) -> str:
    """The help of one command."""
    title = " ".join(["gradtrace", *command])
    return f"## {title}\n\n```text\n{shown(*command)}\n```"


def shown(*command: str) -> str:
    """What ``--help`` prints, on a terminal of 92 columns, without boxes and colours."""
    from gradtrace.cli import app

    width = {"COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, width), mock.patch("typer.rich_utils.MAX_WIDTH", WIDTH):
        done = CliRunner().invoke(app, [*command, "--help"], prog_name="gradtrace")
    if done.exit_code:
        raise RuntimeError(f"gradtrace {' '.join(command)} --help: {done.output}")
    return unboxed(done.output)


def unboxed(text: str) -> str:
    r"""Panels become headed paragraphs.

    >>> print(unboxed("╭─ Options ──╮\n│ --help  Say. │\n╰──────────╯\n"))
    Options
      --help  Say.
    """
    lines = []
    for line in text.split("\n"):
        if head := re.match(r"╭─ (.*?) ─+╮", line):
            line = head[1]
        elif line.startswith(("╭", "╰")):
            line = ""
        elif line.startswith("│"):
            line = " " + line.strip("│")
        lines.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
