"""The public face, and which module may import which."""

from __future__ import annotations

import ast
import importlib
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

ROOT = Path(gradtrace.__file__).parent
PUBLIC = {
    *(
        "Monitor",
        "SUM",
        "ablate",
        "backward",
        "check",
        "decompose",
        "enumerate_paths",
        "errors",
        "graph",
        "influence",
    ),
    *(
        "label",
        "load",
        "load_incident",
        "program",
        "semirings",
        "testing",
        "trace",
        "watch",
    ),
}

LAYERS: tuple[set[str], ...] = (
    {"types", "errors"},
    {"files"},
    {"table"},
    {"io", "pytorch"},
    {"kernels", "autodiff"},
    {"semirings"},
    {"linops", "testing"},
    {"ir"},
    {"recording", "paths", "components", "flow"},
    {"tracing"},
    {"measures"},
    {"runs"},
    {"report"},
    {"traced"},
    {"attribution"},
    {"session"},
    {"diagnosis"},
    {"api", "watch"},
    {"distributed", "tools"},
    {"training"},
    {"gradtrace"},
    {"integrations"},
    {"cli"},
    {"__main__"},
)
"""The rooms, lowest first; ``gradtrace`` is the package's own ``__init__``. A room imports from
those below it, also inside functions.
"""

OPTIONAL = {"gradtrace.kernels.triton_contraction": "triton"}
"""Modules that import a package which not everybody has, imported themselves when needed."""

INTERNALS = {
    "_backward_hooks",
    "_get_sequence_nr",
    "_input_metadata",
    "_sequence_nr",
    "_set_sequence_nr",
    "grad_fn",
    "hooks_dict_ref",
    "next_functions",
    "output_nr",
    "register_prehook",
}
"""Attributes of autograd that ``autodiff.nodes`` is there to read."""

TOLERATED = {
    "pytorch/call_patches": {"_backward_hooks"},
    "recording/gradients": {"_backward_hooks", "_sequence_nr"},
    "recording/record": {"_backward_hooks", "_sequence_nr"},
    "recording/replay": {"_backward_hooks"},
    "autodiff/graph_shape": {"_sequence_nr", "next_functions"},
    "recording/formula": {"_sequence_nr"},
    "autodiff/backward": {"_backward_hooks", "_input_metadata", "_sequence_nr"},
    "pytorch/internals": INTERNALS,  # checked there
    "autodiff/hooks": {"_backward_hooks", "_get_sequence_nr", "hooks_dict_ref", "register_prehook"},
}
"""Read elsewhere too, for speed: a call for each node costs as much as a small formula."""

HEAVY = {"networkx", "pandas", "matplotlib", "plotly", "rich", "transformers", "typer"}


# Names -------------------------------------------------------------------------------------------


def test_public_names_are_frozen() -> None:
    assert set(gradtrace.__all__) == PUBLIC
    assert list(gradtrace.__all__) == sorted(gradtrace.__all__)


def test_there_is_a_version() -> None:
    assert gradtrace.__version__.count(".") == 2


def test_every_public_name_has_a_home() -> None:
    """Names are found when asked for; those that are no modules say where they are made."""
    modules = {name for name in PUBLIC if inspect.ismodule(getattr(gradtrace, name))}
    assert set(gradtrace._HOMES) == PUBLIC - modules
    importlib.import_module("gradtrace.measures.conflicts")  # loaded submodules are not listed
    assert {name for name in dir(gradtrace) if not name.startswith("__")} == PUBLIC
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gradtrace.nothing  # noqa: B018


def test_a_function_stands_before_the_module_of_its_name(trees: dict[Path, ast.Module]) -> None:
    """Whichever is loaded first; and nobody in the package may take one for the other."""
    code = "import gradtrace.watch, gradtrace as gt; assert callable(gt.watch)"
    fresh.python("-c", f"{code}; assert callable(gt.check)", check=True)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "gradtrace":
                assert not {alias.name for alias in node.names} & UNITS & set(gradtrace._HOMES)


def test_importing_gradtrace_alone_does_not_import_pytorch() -> None:
    assert "torch" not in modules_after("import gradtrace, gradtrace.cli")


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_have_docstrings(name: str) -> None:
    assert (inspect.getdoc(getattr(gradtrace, name)) or "").strip()


@pytest.mark.parametrize("name", ["graph", "backward", "program", "trace"])
def test_watch_has_the_functions_as_methods(name: str) -> None:
    assert inspect.getdoc(getattr(gradtrace.watch, name))


@pytest.mark.parametrize("name", ["backward", "program", "graph"])
def test_functions_take_few_arguments_by_position(name: str) -> None:
    parameters = inspect.signature(getattr(gradtrace, name)).parameters.values()
    by_position = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(by_position) <= 2


def error_classes() -> list[type[Exception]]:
    found = [c for c in vars(errors).values() if inspect.isclass(c)]
    return [c for c in found if issubclass(c, Exception)]


@pytest.mark.parametrize("kind", error_classes(), ids=lambda c: c.__name__)
def test_errors_are_of_one_family_and_explained(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.GradtraceError)
    assert kind.__doc__
    assert str(kind("what happened")) == "what happened"


# Imports -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """Every source file, read once."""
    return {path: ast.parse(path.read_text()) for path, _ in sources()}


@cache
def sources() -> list[tuple[Path, str]]:
    """Every source file with the unit it belongs to: a module, or a whole subpackage."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        first = path.relative_to(ROOT).parts[0].removesuffix(".py")
        found.append((path, "gradtrace" if first == "__init__" else first))
    return found


def label(value: object) -> str:
    return value.stem if isinstance(value, Path) else str(value)


UNITS = {unit for _, unit in sources()}


def imported(tree: ast.AST) -> Iterator[str]:
    """The units that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _unit(alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            if module == "gradtrace":
                for alias in node.names:
                    yield alias.name if alias.name in UNITS else "gradtrace"
            else:
                yield from _unit(module)


def _unit(module: str) -> Iterator[str]:
    parts = module.split(".")
    if parts[0] == "gradtrace":
        yield parts[1] if len(parts) > 1 else "gradtrace"


def outermost(tree: ast.Module) -> ast.Module:
    """The part of a file that runs when it is imported."""
    body = [n for n in tree.body if not isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    typing = [n for n in body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    return ast.Module([n for n in body if n not in typing], [])


def layer(unit: str) -> int:
    return next(n for n, units in enumerate(LAYERS) if unit in units)


def test_every_room_has_its_layer() -> None:
    listed = [unit for units in LAYERS for unit in units]
    assert len(listed) == len(set(listed))
    assert set(listed) == UNITS, "put new rooms where they belong in LAYERS"


def test_the_top_floor_is_small() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 11


def upward(unit: str, tree: ast.AST) -> set[tuple[str, str]]:
    return {(unit, to) for to in imported(tree) if to != unit and layer(to) >= layer(unit)}


def test_imports_point_down(trees: dict[Path, ast.Module]) -> None:
    """Also those inside functions; those of ``__init__`` are for types alone."""
    for path, unit in sources():
        tree = outermost(trees[path]) if unit == "gradtrace" else trees[path]
        assert upward(unit, tree) == set(), path


def named(path: Path) -> str:
    """A module as it is imported."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_there_is_no_circle_of_modules(trees: dict[Path, ast.Module]) -> None:
    """Of all imports, wherever they stand. A package imports its modules, and they not it."""
    every = {named(path): path for path, _ in sources()}
    needs: dict[str, set[str]] = {}
    for name, path in every.items():
        needs[name] = set()
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.Import):
                needs[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                whole = {f"{module}.{alias.name}" for alias in node.names}
                needs[name] |= {each if each in every else module for each in whole}
        needs[name] -= {name}
    needs["gradtrace"] = set()  # its names are found when asked for
    while needs:
        free = {name for name, others in needs.items() if not others & needs.keys()}
        assert free, f"a circle among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


def test_autograd_is_read_in_one_place(trees: dict[Path, ast.Module]) -> None:
    for path, tree in trees.items():
        where = path.relative_to(ROOT).with_suffix("").as_posix()
        found = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} & INTERNALS
        assert where == "autodiff/nodes" or found <= TOLERATED.get(where, set()), where


CHOOSING = {
    "tracing/traced_program",  # for all that is executed of a program
    "tracing/counting",  # of paths that have been followed, whose numbers are on the CPU
    "paths/path_search",  # for one follower
}
"""Where the rooms that execute a request ask for a backend; others there are given it."""


@pytest.mark.parametrize("room", ["tracing", "paths"])
def test_the_backend_of_a_request_is_chosen_once(room: str, trees: dict[Path, ast.Module]) -> None:
    for path, tree in trees.items():
        where = path.relative_to(ROOT).with_suffix("").as_posix()
        asked = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "backend_of"]
        if where.startswith(f"{room}/"):
            assert len(asked) == (where in CHOOSING), where


RULES = sorted((ROOT / "recording" / "aten_rules").glob("*.py"))


@pytest.mark.parametrize("path", RULES, ids=label)
def test_rules_know_no_semiring(path: Path) -> None:
    assert "semirings" not in set(imported(ast.parse(path.read_text())))


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sorted(m.split('.')[0] for m in sys.modules))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_gradtrace_imports_nothing_heavy() -> None:
    assert modules_after("import gradtrace") & HEAVY == set()
    watching = modules_after("import gradtrace\ngradtrace.watch, gradtrace.Monitor")
    assert "torch" in watching and "networkx" not in watching  # needed by attribution graphs alone


def test_every_module_can_be_imported_by_itself() -> None:
    names = [m.name for m in pkgutil.walk_packages([str(ROOT)], "gradtrace.")]
    assert {
        "gradtrace.linops.base",
        "gradtrace.recording.aten_rules.table",
        "gradtrace.recording.record",
    } <= set(names)
    absent = {name for name, needs in OPTIONAL.items() if find_spec(needs) is None}
    there = [n for n in names if n not in absent and not n.endswith("__main__")]
    code = "\n".join(f"import {name}" for name in there)
    fresh.python("-c", code, check=True)


def _lines_of_code(source: list[str], node: ast.AST, texts: set[int]) -> int:
    lines = range(node.lineno, (node.end_lineno or 0) + 1)  # type: ignore[attr-defined]
    code = (source[n - 1].strip() for n in lines if n not in texts)
    return sum(bool(line) and not line.startswith("#") for line in code)


LONGER = {"gradtrace/kernels/triton_contraction.py"}  # one kernel, which Triton compiles as a whole


def test_functions_and_classes_are_short(trees: dict[Path, ast.Module]) -> None:
    """Without docstrings, functions have at most 45 lines of code and classes 270 lines."""
    found = []
    for path, tree in trees.items():
        name, lines = str(path.relative_to(ROOT.parent)), path.read_text().split("\n")
        if name in LONGER:
            continue
        texts: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                texts.update(range(node.lineno, (node.end_lineno or 0) + 1))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _lines_of_code(lines, node, texts) > 45:
                found.append(f"{name}: {node.name}")
            if isinstance(node, ast.ClassDef):
                inside = set(range(node.lineno, (node.end_lineno or 0) + 1))
                if len(inside - texts) > 270:
                    found.append(f"{name}: {node.name}")
    assert found == []


@pytest.mark.parametrize("name", ["diagnose", "conflicts", "attribute"])
def test_methods_of_a_watch_are_found_by_who_looks_for_a_function(name: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"{name}'; it is a method of a watch: with .*watch\.{name}\("
    ):
        getattr(gradtrace, name)
    assert not hasattr(gradtrace, "nonsense")
