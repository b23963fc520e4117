"""The public face, and which module may import which."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
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
        "enumerate_paths",
        "errors",
        "graph",
        "influence",
    ),
    *("label", "load", "program", "semirings", "testing", "timing", "trace", "watch"),
}

LAYERS: tuple[set[str], ...] = (
    {"printable", "validate", "prints"},
    {"shapes", "errors", "layout", "trends", "budget", "shards", "waiting"}
    | {"calls", "digests", "nests", "recurrent", "switches"},
    {"plain", "limits", "internals"},
    {"undo"},
    {"scripts", "einsum", "kernels", "autograd", "tables", "disk", "standins", "gauges"},
    {"semirings", "labels", "loggers", "marks", "files", "formats"},
    {"maps", "atlas", "hooks", "passes", "testing", "groups"},
    {"linear", "deferred", "schedules", "states", "border", "threads"},
    {"program", "nodes"},
    {"values", "engine", "store", "choices"},
    {"folding", "parked", "recorder", "reconverge", "rules", "sizes"}
    | {"gradient", "memory", "pairs", "sampling"},
    {"matrices"},
    {"formulas"},
    {"capture", "catalogue", "graph", "tracing", "following", "coarse", "flow", "pace"},
    {"components", "paths", "timing"},
    {"influence"},
    {"history", "tally"},
    {"looks"},
    {"gathering", "report"},
    {"saving", "group"},
    {"trace"},
    {"api", "draw"},
    {"watching"},
    {"batches", "identity"},
    {"counted"},
    {"wrapped"},
    {"check", "ablation", "dataset", "discovery", "doctor", "lookout", "runs"},
    {"monitor"},
    {"gradtrace"},
    {"integrations", "laboratory"},
    {"demo", "experiments"},
    {"bench"},
    {"cli"},
    {"__main__"},
)
"""Lowest first; ``gradtrace`` is the package's own ``__init__``. A module imports from below it."""

OPTIONAL = {"gradtrace.kernels.tiles": "triton"}
"""Modules that import a package which not everybody has, imported themselves when needed."""

LAZY = {("graph", "capture"), ("graph", "draw"), ("saving", "trace")}
"""Imports upwards, inside functions or for types alone: a graph is counted and drawn on demand."""

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
"""Attributes of autograd that ``gradtrace.autograd`` is there to read."""

TOLERATED = {
    "calls": {"_backward_hooks"},
    "capture": {"_backward_hooks", "_sequence_nr"},
    "doctor": {"grad_fn", "register_prehook"},  # tried there
    "formulas": {"_sequence_nr"},
    "gradient": {"_backward_hooks", "_input_metadata", "_sequence_nr"},
    "internals": INTERNALS,  # checked there
    "hooks": {"_backward_hooks", "_get_sequence_nr", "hooks_dict_ref", "register_prehook"},
    "watching": {"_get_sequence_nr"},
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
    assert set(dir(gradtrace)) >= PUBLIC
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gradtrace.nothing  # noqa: B018


def test_a_function_stands_before_the_module_of_its_name() -> None:
    """Whichever is loaded first; and nobody in the package may take one for the other."""
    code = "import gradtrace.trace, gradtrace.check, gradtrace as gt; assert callable(gt.trace)"
    assert "torch" in modules_after(f"{code}; assert callable(gt.check)")
    for path, _ in sources():
        for node in ast.walk(ast.parse(path.read_text())):
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


def outermost(path: Path) -> ast.Module:
    """The part of a file that runs when it is imported."""
    tree = ast.parse(path.read_text())
    body = [n for n in tree.body if not isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    typing = [n for n in body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    return ast.Module([n for n in body if n not in typing], [])


def layer(unit: str) -> int:
    return next(n for n, units in enumerate(LAYERS) if unit in units)


def test_every_module_has_its_layer() -> None:
    listed = [unit for units in LAYERS for unit in units]
    assert len(listed) == len(set(listed))
    assert set(listed) == UNITS, "put new modules where they belong in LAYERS"


def upward(path: Path, unit: str, tree: ast.AST) -> set[tuple[str, str]]:
    return {(unit, to) for to in imported(tree) if to != unit and layer(to) >= layer(unit)}


@pytest.mark.parametrize(("path", "unit"), sources(), ids=label)
def test_imports_point_down(path: Path, unit: str) -> None:
    assert upward(path, unit, outermost(path)) == set()
    assert upward(path, unit, ast.parse(path.read_text())) <= LAZY


@pytest.mark.parametrize(
    "package",
    ["maps", "linear", "semirings", "kernels", "flow", "report", "bench"]
    + ["laboratory", "experiments", "cli", "integrations"],
)
def test_files_of_a_subpackage_import_each_other_one_way(package: str) -> None:
    """No circle, and nobody imports the package it is in."""
    needs: dict[str, set[str]] = {}
    for path in (ROOT / package).glob("*.py"):
        tree, prefix = ast.parse(path.read_text()), f"gradtrace.{package}"
        needs[path.stem] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
                rest = (node.module or "").removeprefix(prefix).lstrip(".")
                needs[path.stem] |= {rest} if rest else {alias.name for alias in node.names}
    needs.pop("__init__")
    while needs:
        free = {name for name, others in needs.items() if not others & needs.keys()}
        assert free, f"a circle among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


@pytest.mark.parametrize(
    ("path", "unit"),
    [(p, u) for p, u in sources() if u != "autograd"],
    ids=label,
)
def test_autograd_is_read_in_one_place(path: Path, unit: str) -> None:
    tree = ast.parse(path.read_text())
    found = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} & INTERNALS
    assert found <= TOLERATED.get(unit, set())


@pytest.mark.parametrize("path", [p for p, u in sources() if u == "linear"], ids=label)
def test_rules_know_no_semiring(path: Path) -> None:
    assert "semirings" not in set(imported(ast.parse(path.read_text())))


@pytest.mark.parametrize("path", [p for p, u in sources() if u == "experiments"], ids=label)
def test_experiments_use_public_names(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert set(imported(tree)) <= {"gradtrace", "semirings", "errors", "laboratory", "experiments"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "gt"
    }
    assert used <= PUBLIC


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sorted(m.split('.')[0] for m in sys.modules))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_gradtrace_imports_nothing_heavy() -> None:
    new = modules_after("import gradtrace") - modules_after("import torch")
    assert new & HEAVY == set()


def test_every_module_can_be_imported_by_itself() -> None:
    names = [m.name for m in pkgutil.walk_packages([str(ROOT)], "gradtrace.")]
    assert {"gradtrace.maps.base", "gradtrace.linear.table", "gradtrace.capture"} <= set(names)
    absent = {name for name, needs in OPTIONAL.items() if find_spec(needs) is None}
    there = [n for n in names if n not in absent and not n.endswith("__main__")]
    code = "\n".join(f"import {name}" for name in there)
    fresh.python("-c", code, check=True)
