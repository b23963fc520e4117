"""Every parameter of what the site describes is in an ``Args`` section, and every result told."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gradtrace

DOCS = Path(gradtrace.__file__).parent.parent / "docs"
DIRECTIVE = re.compile(r"\.\. auto(function|class):: ([\w.]+)(\(\))?((?:\n   :.*)*)")
SECTION = re.compile(r"^(Args|Returns|Yields):\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
REFERENCE = re.compile(r"Arguments are\s+those of\s+``([\w.]+)``")
ENTRY = re.compile(r"^ {4}(\w+): \S", re.MULTILINE)


def resolved(name: str) -> Any:
    """What a dotted name means: names of the package first, then those of its modules."""
    parts = name.split(".")
    return getattr(gradtrace, parts[1]) if len(parts) == 2 else pydoc.locate(name)


def members(kind: type, options: str) -> list[str]:
    """The methods of a class that a page shows: those it lists, or the class's own."""
    found = re.search(r":members:(.*)", options)
    if not found:
        return []
    listed = [name.strip() for name in found[1].split(",") if name.strip()]
    return listed or [name for name in vars(kind) if not name.startswith("_")]


PAGES = sorted((DOCS / "api").glob("*.md"))


def described(page: Path) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions, classes that users call themselves, and methods, by name.

    Not while tests are collected: integrations import what they integrate.
    """
    for what, name, result, options in DIRECTIVE.findall(page.read_text()):
        it = resolved(name)
        if what == "function" or not result:  # ``Class()`` on a page: a result, not to be made
            yield name, it
        for member in members(it, options) if what == "class" else ():
            if callable(getattr(it, member)):
                yield f"{name}.{member}", getattr(it, member)


def parameters(it: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(it).parameters if name not in ("self", "cls")]


def sections(it: Callable[..., Any]) -> dict[str, str]:
    """The sections of a docstring; for a class, those of its bases, too."""
    found: dict[str, str] = {}
    for owner in reversed(it.__mro__) if inspect.isclass(it) else (it,):
        for title, text in SECTION.findall(inspect.cleandoc(owner.__doc__ or "") + "\n"):
            found[title] = found.get(title, "") + text
    return found


def missing(it: Callable[..., Any]) -> list[str]:
    """Parameters that are not described, those described that are none, and the result; a method
    may refer to a function that has its parameters, and more.
    """
    told, taken = sections(it), parameters(it)
    if other := REFERENCE.search(it.__doc__ or ""):
        return [name for name in taken if name not in parameters(resolved(other[1]))]
    entries = ENTRY.findall(told.get("Args", ""))
    found = [name for name in taken if name not in entries]
    if not inspect.isclass(it):
        found += [f"no parameter {name}" for name in entries if name not in taken]
        result = inspect.signature(it).return_annotation
        if taken and result not in (None, "None") and not told.keys() & {"Returns", "Yields"}:
            found.append("Returns")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_parameters_and_results_are_described(page: Path) -> None:
    found = {name: missing(it) for name, it in described(page)}
    assert {name: lacks for name, lacks in found.items() if lacks} == {}


def test_what_users_call_is_among_them() -> None:
    """The names of the package, and the methods of a watch and a trace that guides speak of."""
    made = {name for name in gradtrace.__all__ if callable(getattr(gradtrace, name))}
    methods = {
        f"gradtrace.watch.{name}" for name in ("trace", "diagnose", "conflicts", "attribute")
    }
    measures = ("path", "paths", "influence", "decompose", "mass", "coverage", "norms", "report")
    methods |= {f"gradtrace.traced.Trace.{name}" for name in measures}
    listed = {name for page in PAGES for name, _ in described(page)}
    assert {f"gradtrace.{name}" for name in made} | methods <= listed


def bad(first: int, second: int = 0) -> int:  # noqa: D417
    """Adds.

    Args:
        first: A number.
        third: Another.
    """
    return first + second


def good(first: int, *more: int) -> int:
    """Adds.

    Args:
        first: A number.
        more: Others, as many as
            there are.

    Returns:
        The sum.

    >>> good(1, 2)
    3
    """
    return first + sum(more)


def test_what_is_missing_is_found() -> None:
    assert missing(bad) == ["second", "no parameter third", "Returns"]
    assert missing(good) == []


def test_sections_stand_alone() -> None:
    """A section begins after an empty line, or a page would show it as part of a paragraph."""
    for path in sorted(Path(gradtrace.__file__).parent.rglob("*.py")):
        text = path.read_text()
        if not re.search(r"^ *(Args|Returns|Yields):\n", text, re.MULTILINE):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_docstring(node) or ""
                wrong = re.search(r"[^\n]\n(Args|Returns|Yields):\n", text)
                assert not wrong, f"{path}: {node.name}"
