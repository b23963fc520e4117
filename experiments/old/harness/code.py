"""A digest of the code that measures a cell, so that rows of other code are not used.

Code is parsed, not run. The digest covers ``measure`` and everything that it refers to in its
module, in modules beside the file and in ``gradtrace.experiments`` with its harness, and the
versions of gradtrace and torch. Comments, docstrings and what only ``conclude`` or ``headline``
refer to do not count, also in a module that is imported whole, such as a part of an experiment: a
text or a figure can be changed without measuring again.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

import gradtrace
from gradtrace.errors import GradtraceError
from gradtrace.experiments.harness.loading import ExperimentSource, load

START = "measure"
TELLS = ("conclude", "headline", "FIGURE", "TABLE")
"""The names of a module that make its page out of rows."""

ALL = "*"
OURS = ("gradtrace.experiments", "gradtrace.experiments.harness")
PACKAGE = Path(gradtrace.__file__).parent.parent


class CodeLocation(NamedTuple):
    """A module: its file, and the folder and the dotted name by which others import it."""

    file: Path
    root: Path
    name: str


def code(source: ExperimentSource) -> str:
    """The digest of an experiment's code, as it is on disk now."""
    return _digest(_found(source))


def refresh(source: ExperimentSource) -> None:
    """Reload the code of a user's file if it was edited since it was loaded."""
    if not source.own:
        return
    found = _found(source)
    before = _loaded.setdefault(source, _digest(found))
    if before != _digest(found):
        _loaded[source] = _digest(found)
        load.cache_clear()
        for name, _ in found:
            module = sys.modules.get(name)
            if Path(getattr(module, "__file__", None) or "").parent == Path(source.place).parent:
                del sys.modules[name]


_loaded: dict[ExperimentSource, str] = {}


def _found(source: ExperimentSource) -> dict[tuple[str, str], str]:
    """The code of each name in each module that counts."""
    _parsed.cache_clear()
    found: dict[tuple[str, str], str] = {}
    _follow(_home(source), START, found)
    return found


def _digest(found: dict[tuple[str, str], str]) -> str:
    text = repr((sorted(found.items()), gradtrace.__version__, str(torch.__version__)))
    return sha256(text.encode()).hexdigest()[:16]


def _home(source: ExperimentSource) -> CodeLocation:
    if source.own:
        path = Path(source.place)
        return CodeLocation(path, path.parent, path.stem)
    spec = find_spec(source.place)
    if spec is None or spec.origin is None:
        raise GradtraceError(f"there is no module {source.place}")
    return CodeLocation(Path(spec.origin), PACKAGE, source.place)


def _follow(place: CodeLocation, name: str, found: dict[tuple[str, str], str]) -> None:
    """Add the definition of a name in a module, and everything that it refers to."""
    waiting = [(place, name)]
    while waiting:
        at, wanted = waiting.pop()
        if (at.name, wanted) in found:
            continue
        here = list(_wanted(_parsed(at.file), wanted))
        found[at.name, wanted] = " ".join(ast.dump(statement) for statement in here)
        for statement in here:
            if isinstance(statement, (ast.Import, ast.ImportFrom)) and wanted == ALL:
                waiting += _imported(statement, at, None)
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                waiting += _imported(statement, at, wanted)
            else:
                waiting += ((at, used) for used in _used(statement))
                waiting += _attributes(statement, at)
                for inner in ast.walk(statement):  # imports within functions
                    if isinstance(inner, (ast.Import, ast.ImportFrom)):
                        waiting += _imported(inner, at, None)


def _wanted(statements: list[ast.stmt], wanted: str) -> Iterator[ast.stmt]:
    """The statements that define a name, or all but those that only the page is made by; and those
    that are there for their side effects.
    """
    kept = {wanted}
    if wanted == ALL:
        names = {name for s in statements for name in _defined(s)}
        page = _reached(statements, names.intersection(TELLS))
        kept = _reached(statements, (names - page) | names.intersection({START, ALL}))
    for statement in statements:
        names = set(_defined(statement))
        if isinstance(statement, ast.ImportFrom) and ALL not in names and names & kept:
            used = [a for a in statement.names if (a.asname or a.name) in kept]
            yield ast.ImportFrom(statement.module, used, statement.level)
        elif not names or names & kept or ALL in names:
            yield statement


def _reached(statements: list[ast.stmt], names: set[str]) -> set[str]:
    """These names of a module and those of it that they refer to, directly or not."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += (used for s in statements if _defines(s, name) for used in _used(s))
    return found


@cache
def _parsed(file: Path) -> list[ast.stmt]:
    """The statements of a file without docstrings; none if it cannot be parsed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [s for s in node.body if not _is_text(s)] or [ast.Pass()]
    return tree.body


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a statement defines; none if it is there for its side effects."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
        case ast.Assign():
            return [n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _defines(statement: ast.stmt, name: str) -> bool:
    found = _defined(statement)
    return name in found or ALL in found


def _used(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            yield node.id


def _attributes(statement: ast.stmt, at: CodeLocation) -> Iterator[tuple[CodeLocation, str]]:
    """The names that a statement takes from modules that its module imports whole."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            for imported in _parsed(at.file):
                if isinstance(imported, (ast.Import, ast.ImportFrom)):
                    for there, name in _imported(imported, at, node.value.id):
                        if name == ALL:
                            yield there, node.attr


def _imported(
    statement: ast.Import | ast.ImportFrom, at: CodeLocation, wanted: str | None
) -> Iterator[tuple[CodeLocation, str]]:
    """The imports of a statement from modules that count: of one name, or all."""
    for alias in statement.names:
        called = alias.asname or alias.name.partition(".")[0]
        if wanted is not None and wanted != called and alias.name != ALL:
            continue
        if isinstance(statement, ast.Import):
            if there := _resolved(alias.name, at):
                yield there, ALL
            continue
        base = _base(statement, at)
        if inner := _resolved(f"{base}.{alias.name}".removeprefix("."), at):
            yield inner, ALL
        elif there := _resolved(base, at):
            yield there, alias.name


def _base(statement: ast.ImportFrom, at: CodeLocation) -> str:
    """The full name of the module that is imported from."""
    if not statement.level:
        return statement.module or ""
    parts = at.name.split(".") + ([""] if at.file.name == "__init__.py" else [])
    return ".".join([*parts[: -statement.level], *filter(None, [statement.module])])


def _resolved(name: str, at: CodeLocation) -> CodeLocation | None:
    """The location of a module that counts: beside the experiment, or in ``OURS``; else None."""
    if not name:
        return None
    ours = name.startswith(OURS)
    if name.partition(".")[0] == "gradtrace" and not ours:
        return None
    root = PACKAGE if ours else at.root
    if root == PACKAGE and not ours:
        return None
    path = root.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return CodeLocation(file, root, name)
    return None
