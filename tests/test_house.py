"""The house: how large each part may be, who may import whom, and the public names, as data.

A commit that makes a part smaller lowers its line here. A part may grow again, but not above what
it may have at most.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import fresh
import pytest

import gradtrace
from gradtrace import errors

PACKAGE = Path(gradtrace.__file__).parent
TOP = PACKAGE.parent
pytestmark = pytest.mark.skipif(
    not (TOP / "tests").is_dir(), reason="the package is installed without its tests beside it"
)

# Lines -------------------------------------------------------------------------------------------

OLD_ENGINE = (
    *("autodiff", "ir", "kernels", "linops", "measures", "paths", "pytorch", "recording"),
    *("semirings", "tracing", "components", "flow", "diagnosis", "attribution"),
)
"""Rooms that are rewritten later; until then they are held as one, so that nothing hides there."""

PARTS: dict[str, tuple[tuple[str, ...], int, int]] = {
    # part: folders or files, lines now, lines at most
    "package, Python": (("gradtrace/**/*.py",), 55_017, 28_000),
    "engine": (tuple(f"gradtrace/{room}/**/*.py" for room in OLD_ENGINE), 47_094, 51_300),
    "top floor": (("gradtrace/*.py",), 2_675, 1_600),
    "training": (("gradtrace/training/**/*.py",), 2_589, 2_000),
    "report": (("gradtrace/report/**/*.py",), 1_660, 1_700),
    "cli": (("gradtrace/cli/**/*.py",), 999, 600),
    "C++ and CUDA": (
        tuple(f"gradtrace/**/*{end}" for end in (".cpp", ".h", ".cu", ".cuh", ".inc")),
        7_572,
        6_000,
    ),
    "page": (("web/src/**/*.ts", "web/src/**/*.tsx"), 6_618, 5_200),
    "tests": (("tests/**/*.py",), 54_896, 36_000),
    "experiments": (("experiments/**/*.py",), 4_867, 5_000),
    "benchmarks": (("benchmarks/**/*.py",), 366, 800),
}

DOCS_KB = 258
"""Thousands of bytes that the pages of docs/ may have; 240 in the end."""

SLACK = 150
"""So many lines a part may be below what stands above before the number is to be lowered."""


def lines(patterns: tuple[str, ...]) -> int:
    files = {path for pattern in patterns for path in TOP.glob(pattern)}
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


@pytest.mark.parametrize("part", PARTS)
def test_no_part_grows(part: str) -> None:
    patterns, now, most = PARTS[part]
    found = lines(patterns)
    text = f"{part} has {found:,} lines, may have {now:,} now and {most:,} in the end"
    assert found <= now, f"{text}: delete something"
    assert now - found <= max(SLACK, now // 50), f"{part}: lower its number to {found:,}"


def test_the_pages_do_not_grow() -> None:
    assert sum(path.stat().st_size for path in TOP.glob("docs/**/*.md")) <= DOCS_KB * 1000


# Imports -----------------------------------------------------------------------------------------

FLOORS: tuple[tuple[str, ...], ...] = (
    ("types", "errors"),
    ("files",),
    ("table",),
    ("pytorch",),
    ("kernels", "autodiff"),
    ("semirings",),
    ("linops",),
    ("ir",),
    ("recording", "paths", "components", "flow"),
    ("tracing",),
    ("measures",),
    ("traced",),
    ("attribution",),
    ("session",),
    ("diagnosis",),
    ("watching",),
    ("testing",),
    ("report",),
    ("training",),
    ("gradtrace",),
    ("cli",),
    ("__main__",),
)
"""The rooms, lowest first; ``gradtrace`` is the package's own ``__init__``. A room imports from
those on floors below it, also inside functions.
"""

DOORS: dict[str, set[str]] = {
    "report": {
        *("autodiff.graph", "autodiff.names", "flow", "ir.program", "paths.paths"),
        "pytorch.wrapped_modules",
    },
    "training": {
        *("autodiff", "autodiff.hooks", "autodiff.nodes", "autodiff.pass_scope"),
        *("autodiff.saved_hooks", "pytorch.function_modes", "pytorch.module_calls"),
        *("components.components", "components.module_parts", "diagnosis.result", "kernels.sync"),
        *("pytorch.global_switches", "pytorch.wrapped_modules", "tracing.counting"),
        "tracing.influence",
    },
    "cli": {
        *("autodiff", "autodiff.names", "diagnosis", "kernels", "pytorch.global_switches"),
        *("pytorch.module_calls", "pytorch.wrapped_modules"),
    },
}
"""The modules of the engine that the product's rooms import: what the new engine will offer."""


@cache
def trees() -> dict[Path, ast.Module]:
    """Every source file, read once."""
    return {path: _run(ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))}


def _run(tree: ast.Module) -> ast.Module:
    """Without imports for types, which are not run."""
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return tree


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "gradtrace" if first == "__init__" else first


ROOMS = {room(path) for path in trees()}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports, anywhere in it, by their full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module or ""


def needed(tree: ast.AST) -> set[str]:
    """The modules that a file imports from, by their full names."""
    froms = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom))
    return {node.module or "" for node in froms}


def named(path: Path) -> str:
    """A module as it is imported."""
    parts = path.relative_to(TOP).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {named(path): path for path in trees()}


def rooms_of(tree: ast.AST) -> set[str]:
    """The rooms that a file imports from."""
    found = (name.split(".") for name in imported(tree) if name.split(".")[0] == "gradtrace")
    return {parts[1] if len(parts) > 1 and parts[1] in ROOMS else "gradtrace" for parts in found}


def floor(of: str) -> int:
    return next(n for n, some in enumerate(FLOORS) if of in some)


def test_every_room_has_its_floor() -> None:
    listed = [each for some in FLOORS for each in some]
    assert sorted(listed) == sorted(ROOMS)


def test_imports_point_down() -> None:
    """Those for types do not count."""
    for path, tree in trees().items():
        here = room(path)
        if here != "gradtrace":
            up = {to for to in rooms_of(tree) if to != here and floor(to) >= floor(here)}
            assert not up, f"{path.relative_to(TOP)} imports from {up}"


@pytest.mark.parametrize("here", DOORS)
def test_the_product_enters_the_engine_by_few_doors(here: str) -> None:
    found = {name for path, tree in trees().items() if room(path) == here for name in needed(tree)}
    inside = {name.removeprefix("gradtrace.") for name in found if name.startswith("gradtrace.")}
    assert {name for name in inside if name.split(".")[0] in OLD_ENGINE} == DOORS[here]


def test_there_is_no_circle_of_files() -> None:
    """Of all imports, wherever they stand. A package imports its modules, and they not it."""
    needs = {name: {*imported(trees()[path])} - {name} for name, path in MODULES.items()}
    needs["gradtrace"] = set()
    while needs:
        free = {name for name, others in needs.items() if not others & needs.keys()}
        assert free, f"a circle among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


def test_no_module_has_the_name_of_a_public_function() -> None:
    modules = {name for name in PUBLIC if inspect.ismodule(getattr(gradtrace, name))}
    assert not (ROOMS & PUBLIC) - modules


def test_every_module_can_be_imported_by_itself() -> None:
    optional = {"gradtrace.kernels.triton_contraction": "triton"}
    absent = {name for name, needs in optional.items() if find_spec(needs) is None}
    names = [m.name for m in pkgutil.walk_packages([str(PACKAGE)], "gradtrace.")]
    there = [n for n in names if n not in absent and not n.endswith("__main__")]
    assert len(there) > 100
    fresh.python("-c", "\n".join(f"import {name}" for name in there), check=True)


# Public names ------------------------------------------------------------------------------------

PUBLIC = {
    *("Monitor", "ablate", "backward", "check", "decompose", "diagnose", "errors", "graph"),
    *("influence", "label", "load", "semirings", "testing", "trace", "watch"),
}
METHODS = {
    "watch": {"attribute", "backward", "conflicts", "diagnose", "graph", "trace"},
    "Trace": {
        *("coverage", "decompose", "gradients", "influence", "loss", "mass", "norms", "path"),
        *("paths", "report", "rule", "save"),
    },
}
HEAVY = {
    *("matplotlib", "networkx", "pandas", "rich", "safetensors", "torch", "transformers", "typer"),
}


def public(of: type) -> set[str]:
    """The names of a class that do not begin with an underscore, and of its fields."""
    fields = getattr(of, "__dataclass_fields__", {})
    return {name for name in {*dir(of), *fields} if not name.startswith("_")}


def test_public_names() -> None:
    assert set(gradtrace.__all__) == PUBLIC == {n for n in dir(gradtrace) if n[0] != "_"}
    assert list(gradtrace.__all__) == sorted(gradtrace.__all__)
    assert gradtrace.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gradtrace.nothing  # noqa: B018


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_have_docstrings(name: str) -> None:
    assert (inspect.getdoc(getattr(gradtrace, name)) or "").strip()


def test_methods_of_a_watch_and_a_trace() -> None:
    from gradtrace.traced import Trace

    assert public(gradtrace.watch) >= METHODS["watch"]
    assert public(Trace) >= METHODS["Trace"]


@pytest.mark.parametrize("name", ["conflicts", "attribute"])
def test_methods_of_a_watch_are_found_by_who_looks_for_a_function(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"{name}'; it is a method of a watch: with "):
        getattr(gradtrace, name)


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sorted(m.split('.')[0] for m in sys.modules))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_what_is_heavy_is_imported_when_it_is_needed() -> None:
    assert modules_after("import gradtrace") & HEAVY == set()
    assert "torch" not in modules_after("import gradtrace.cli")
    watching = modules_after("import gradtrace\ngradtrace.watch, gradtrace.Monitor")
    assert watching & HEAVY <= {"torch"} | modules_after("import torch")


@pytest.mark.parametrize(
    "kind",
    [c for c in vars(errors).values() if inspect.isclass(c) and c.__module__ == errors.__name__],
)
def test_errors_are_of_one_family_and_explained(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.GradtraceError) and kind.__doc__
    assert str(kind("what happened")) == "what happened"


# Autograd ----------------------------------------------------------------------------------------


def test_rules_know_no_semiring() -> None:
    for name, path in MODULES.items():
        if ".aten_rules" in name:
            assert "semirings" not in rooms_of(trees()[path])


def code_lines(function: ast.FunctionDef, source: list[str]) -> int:
    """Lines of its body without docstring, comments and blank lines."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    lines = source[body[0].lineno - 1 : function.end_lineno] if body else []
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def test_functions_are_short() -> None:
    """At most 45 lines of code; new ones stay far below."""
    longer = {"gradtrace.kernels.triton_contraction"}  # one kernel, which Triton compiles whole
    found = []
    for name, path in MODULES.items():
        source = path.read_text().split("\n")
        functions = [n for n in ast.walk(trees()[path]) if isinstance(n, ast.FunctionDef)]
        found += [f"{name}.{f.name}" for f in functions if code_lines(f, source) > 45]
    assert {each for each in found if each.rpartition(".")[0] not in longer} == set()
