"""What can be known of classes and functions from their code: what they assign and change."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

CONSTRUCTORS = ("__init__", "__post_init__", "__new__", "__setstate__")
"""Methods that construct an object: attributes that other methods assign change during use."""

MUTATORS = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"}
    | {"popleft", "remove", "reverse", "setdefault", "sort", "subtract", "update", "write"}
)
"""Methods that change a container."""


def all_code(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of functions within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from all_code(each)


def operands(code: CodeType, *operations: str) -> set[Any]:
    """The operands of some operations of the bytecode: names, or None."""
    return {
        step.argval
        for each in all_code(code)
        for step in dis.get_instructions(each)
        if step.opname in operations
    }


def changes_containers(code: CodeType) -> bool:
    """Whether a function may change containers that it refers to."""
    stores = operands(code, "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
    return bool(stores or operands(code, "LOAD_ATTR", "LOAD_METHOD") & MUTATORS)


def _methods(kind: type) -> Iterator[tuple[bool, FunctionType]]:
    """The methods of a class that are the user's, and whether each is a constructor."""
    for base in kind.__mro__:
        for name, value in vars(base).items() if not installed(base) else ():
            function = getattr(value, "__func__", getattr(value, "fset", value))
            if isinstance(function, FunctionType):
                yield name in CONSTRUCTORS, function


def assigned(kind: type) -> set[str]:
    """Attributes that methods of a class other than its constructors assign."""
    found = set()
    for constructs, function in _methods(kind):
        if not constructs:
            found |= operands(function.__code__, "STORE_ATTR", "DELETE_ATTR")
    return found


def constructed(kind: type) -> set[str]:
    """Attributes that constructors of the user's assign."""
    found = (operands(f.__code__, "STORE_ATTR") for constructs, f in _methods(kind) if constructs)
    return set().union(*found)


def filled(kind: type) -> set[str]:
    """Attributes whose contents methods of a class other than its constructors may change."""
    found = (filled_by(function) for constructs, function in _methods(kind) if not constructs)
    return set().union(*found)


def filled_by(function: FunctionType) -> set[str]:
    """Names in the expressions that a function writes to, of attributes and, where a variable was
    assigned from some, of these: ``self.cache[n] = x``, ``self.kept.append(x)``, ``mean.add_(x)``.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source: any attribute that is mentioned
        code = function.__code__
        return operands(code, "LOAD_ATTR") if changes_containers(code) else set()
    found, variables = set[str](), dict[str, set[str]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    variables.setdefault(target.id, set()).update(_mentioned(node.value))
        for written in _written(node):
            found |= _mentioned(written)
    return found.union(*(variables[name] for name in found & variables.keys()))


def _written(node: ast.AST) -> list[ast.expr]:
    """The expressions whose contents a node of a syntax tree changes."""
    if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(
        node.ctx, ast.Store | ast.Del
    ):
        return [node.value]
    if not isinstance(node, ast.Call):
        return []
    found = [each.value for each in node.keywords if each.arg == "out"]
    if isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name in MUTATORS or (name.endswith("_") and not name.startswith("_")):
            found.append(node.func.value)
    return found


def _mentioned(expression: ast.expr) -> set[str]:
    """The names of variables and attributes in an expression."""
    return {
        each.attr if isinstance(each, ast.Attribute) else each.id
        for each in ast.walk(expression)
        if isinstance(each, (ast.Attribute, ast.Name))
    }


@functools.cache
def _roots() -> tuple[str, ...]:
    """Directories of installed code."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    ours = sys.modules["gradtrace"].__file__ or ""
    return (*(path for path in found if path), ours.removesuffix("__init__.py"))


def installed(definition: Any) -> bool:
    """Whether code belongs to an installed package, and not to the user's own program."""
    code = getattr(definition, "__code__", None)
    if isinstance(code, CodeType):
        file = code.co_filename
    else:
        name = definition.__name__ if isinstance(definition, ModuleType) else definition.__module__
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None) or ""
        if module is not None and not file:
            return name != "__main__"  # built in
    return "site-packages" in file or file.startswith(_roots())
