"""What can be known of classes and functions from their code: what they assign and change."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from gradtrace.errors import GradtraceError
from gradtrace.io.atomic_files import content
from gradtrace.pytorch.call_patches import unpatched

CONSTRUCTORS = ("__init__", "__post_init__", "__new__", "__setstate__")
"""Methods that construct an object."""

MUTATORS = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"}
    | {"popleft", "remove", "reverse", "setdefault", "sort", "subtract", "update", "write"}
)
"""Methods that change a container."""


LOADS = (
    *("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"),
    *("LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF", "LOAD_SUPER_ATTR", "IMPORT_FROM"),
)
"""Operations that load a name which may be that of a function."""


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


def loaded(code: CodeType) -> set[str]:
    """Names of variables and attributes that a function loads, ``getattr(self, "name")`` too."""
    found = operands(code, *LOADS)
    if "getattr" in found:
        found |= {text for each in all_code(code) for text in each.co_consts if type(text) is str}
    return found


class Written(NamedTuple):
    """What a function may change the contents of."""

    names: set[str]
    attributes: set[str]

    def join(self, *others: Written) -> Written:
        """What any of some functions may change."""
        return Written(
            self.names.union(*(each.names for each in others)),
            self.attributes.union(*(each.attributes for each in others)),
        )


NOTHING = Written(set(), set())


def definition(value: Any) -> Any:
    """The function behind a static method, a class method or a property. Nothing else is asked for
    an attribute: that may warn, as it does of what is deprecated.
    """
    kind = type(value)
    if issubclass(kind, functools.cached_property):
        return value.func
    if issubclass(kind, (staticmethod, classmethod, MethodType)):
        return value.__func__
    return value.fget if issubclass(kind, property) else value


def methods(kind: type) -> Iterator[tuple[str, str, FunctionType]]:
    """The user's methods of a class: how each is used (read, or assigned to), its name, and it."""
    for base in kind.__mro__:
        for name, value in unpatched(base).items() if not installed(base) else ():
            setter = getattr(value, "fset", None)
            for use, function in (("read", definition(value)), ("assigned", setter)):
                if isinstance(function, FunctionType):
                    yield use, name, function


class UsedNames(NamedTuple):
    """Names that code which runs in a measurement loads, and attributes that it assigns.

    A method that is not among them (``set_temperature``) is not called, so that what it assigns is
    a setting.
    """

    loaded: set[str]
    assigned: set[str]
    everything: bool = False

    def runs(self, use: str, name: str) -> bool:
        """Whether a method of this name may be called."""
        if name in CONSTRUCTORS:
            return False
        if self.everything:
            return True
        if use == "assigned":
            return name in self.assigned
        return name in self.loaded or name == "forward" or name.startswith("__")


def used_names(functions: Iterable[tuple[str, CodeType]], entries: Iterable[CodeType]) -> UsedNames:
    """The names that ``entries`` load, and that functions of these names load in turn."""
    by_name: dict[str, list[CodeType]] = {}
    for name, code in functions:
        by_name.setdefault(name, []).append(code)
    found = UsedNames(set(), set())
    waiting = list(entries)
    for name, some in by_name.items():
        if name == "<lambda>" or found.runs("read", name):
            waiting += some
    done = set[int]()
    while waiting:
        code = waiting.pop()
        if id(code) in done:
            continue
        done.add(id(code))
        found.assigned.update(operands(code, "STORE_ATTR", "DELETE_ATTR"))
        for name in loaded(code) - found.loaded:
            found.loaded.add(name)
            waiting += by_name.get(name, ())
    return found


NO_NAMES, ALL_NAMES = UsedNames(set(), set()), UsedNames(set(), set(), everything=True)


def assigned(kind: type, used: UsedNames) -> set[str]:
    """Attributes that methods of a class assign when it is used."""
    some = (operands(f.__code__, "STORE_ATTR", "DELETE_ATTR") for f in _running(kind, used))
    return set().union(*some)


def constructed(kind: type) -> set[str]:
    """Attributes that methods of the user's assign."""
    return set().union(*(operands(f.__code__, "STORE_ATTR") for _, _, f in methods(kind)))


def filled(kind: type, used: UsedNames) -> Written:
    """What methods of a class may change the contents of when it is used."""
    return NOTHING.join(*(filled_by(function) for function in _running(kind, used)))


def _running(kind: type, used: UsedNames) -> Iterator[FunctionType]:
    return (function for use, name, function in methods(kind) if used.runs(use, name))


class Assignment(NamedTuple):
    """An assignment to an attribute, as in ``settings.Loss.calls += 1``."""

    owner: tuple[str, ...]  # names of what has the attribute; none where it is no variable
    attribute: str


def assignments(function: FunctionType) -> set[Assignment]:
    """What a function assigns to attributes of anything but, if it is a method, its own object."""
    own = _own_object(function)
    tree = _syntax(function)
    if tree is None:  # no source
        stores = operands(function.__code__, "STORE_ATTR", "DELETE_ATTR")
        return set() if own else {Assignment((), name) for name in stores}
    found = set[Assignment]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found.add(Assignment(_dotted(node.value), node.attr))
        elif isinstance(node, ast.Call) and _dotted(node.func) in (("setattr",), ("delattr",)):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant):
                found.add(Assignment(_dotted(node.args[0]), str(name.value)))
    return {each for each in found if each.owner != (own,)}


def _own_object(function: FunctionType) -> str:
    """The name of a method's first argument; empty for other functions."""
    code, around = function.__code__, function.__qualname__.rpartition(".")[0]
    method = around and not around.endswith("<locals>") and code.co_argcount
    return code.co_varnames[0] if method else ""


def _dotted(expression: ast.expr) -> tuple[str, ...]:
    """``("a", "b")`` of the expression ``a.b``; none of an expression of another form."""
    if isinstance(expression, ast.Name):
        return (expression.id,)
    if isinstance(expression, ast.Attribute):
        before = _dotted(expression.value)
        return (*before, expression.attr) if before else ()
    return ()


def owner_of(function: FunctionType, path: tuple[str, ...]) -> Any:
    """What these names in a function are: a variable around it, or something in classes and modules
    there. None where that is not known before it runs.
    """
    if not path or path[0] in function.__code__.co_varnames:
        return None
    value = {**function.__globals__, **closure(function)}.get(path[0])
    for name in path[1:]:
        value = vars(value).get(name) if isinstance(value, (type, ModuleType)) else None
    return value


def _syntax(function: FunctionType) -> ast.Module | None:
    """The syntax tree of a function; None without its source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def filled_by(function: FunctionType) -> Written:
    """Names in the expressions that a function writes to, of attributes and, where a variable was
    assigned from some, of these: ``self.cache[n] = x``, ``self.kept.append(x)``, ``mean.add_(x)``.
    """
    tree = _syntax(function)
    if tree is None:  # no source: anything that is mentioned
        code = function.__code__
        stores = operands(code, "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
        if not stores and not operands(code, "LOAD_ATTR", "LOAD_METHOD") & MUTATORS:
            return NOTHING
        return Written(operands(code, *LOADS), operands(code, "LOAD_ATTR"))
    found, variables = NOTHING, dict[str, Written]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    some = variables.get(target.id, NOTHING)
                    variables[target.id] = some.join(_mentioned(node.value))
        found = found.join(*map(_mentioned, _written(node)))
    return found.join(*(variables[name] for name in found.names & variables.keys()))


def _written(node: ast.AST) -> list[ast.expr]:
    """The expressions whose contents a node of a syntax tree changes."""
    if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(
        node.ctx, ast.Store | ast.Del
    ):
        inside = isinstance(node, ast.Subscript) or node.attr == "data"  # else see assignments
        return [node.value] if inside else []
    if not isinstance(node, ast.Call):
        return []
    found = [each.value for each in node.keywords if each.arg == "out"]
    if isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name in MUTATORS or (name.endswith("_") and not name.startswith("_")):
            found.append(node.func.value)
    return found


def _mentioned(expression: ast.expr) -> Written:
    """The names of variables and attributes in an expression."""
    nodes = list(ast.walk(expression))
    return Written(
        {each.id for each in nodes if isinstance(each, ast.Name)},
        {each.attr for each in nodes if isinstance(each, ast.Attribute)},
    )


def called_code(value: Any) -> list[CodeType]:
    """The code that runs when a value is called."""
    if isinstance(value, functools.partial):
        return called_code(value.func)
    function = getattr(value, "__func__", value)
    if not isinstance(function, FunctionType):
        return []
    inside = closure(function).values() if installed(function) else ()  # of decorators
    return [function.__code__, *(code for each in inside for code in called_code(each))]


def closure(function: FunctionType) -> dict[str, Any]:
    """The variables around a function."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found


def imported(function: FunctionType) -> dict[str, CodeType]:
    """The user's modules that a function imports when it runs, and those that they import: compiled
    anew, as they may not be loaded yet.
    """
    package = str(function.__globals__.get("__package__") or "")
    found: dict[str, CodeType] = {}
    waiting = [(function.__code__, package)]
    while waiting:
        code, package = waiting.pop()
        tails = ["", *sorted(f".{name}" for name in operands(code, "IMPORT_FROM"))]
        for name in sorted(operands(code, "IMPORT_NAME")):
            for full in (f"{root}{name}{tail}" for root in ("", f"{package}.") for tail in tails):
                compiled = None if full in found else _compiled(full)
                if compiled is not None:
                    found[full] = compiled
                    waiting.append((compiled, full.rpartition(".")[0]))
    return dict(sorted(found.items()))


def reassigned(module: ModuleType | None, code: CodeType) -> dict[str, Any]:
    """What a loaded module holds in place of the constants and functions that its code assigns, and
    what was put there besides: nothing if others left it alone, or it was not loaded yet.
    """
    if module is None:
        return {}
    written = {str(name) for name in operands(code, "STORE_GLOBAL", "DELETE_GLOBAL")}
    once, several = _assigned_once(code)
    found: dict[str, Any] = {}
    for name, value in sorted(vars(module).items()):
        if name.startswith("__") or name in written or name in several:
            continue
        if name in once:
            before = once[name]
            now = value.__code__ if isinstance(value, FunctionType) else value
            if type(now) is not type(before) or (now != before and repr(now) != repr(before)):
                found[name] = value
        elif type(value) in (bool, int, float, complex, str, bytes, tuple, FunctionType):
            found[name] = value
    return found


def _assigned_once(code: CodeType) -> tuple[dict[str, Any], set[str]]:
    """The constants, and the code of functions, that a module assigns to a name once and as they
    are; and the names of all else that it assigns.
    """
    once, others = dict[str, Any](), set[str]()
    constant: list[Any] = []
    for step in dis.get_instructions(code):
        if step.opname == "STORE_NAME":
            name = str(step.argval)
            if name in once or name in others or not constant:
                once.pop(name, None)
                others.add(name)
            else:
                once[name] = constant[0]
        if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            if not (constant and isinstance(constant[0], CodeType)):  # a function's name follows
                constant = [step.argval]
        elif step.opname not in ("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE", "NOP", "EXTENDED_ARG"):
            constant = []
    others |= {str(name) for name in operands(code, "DELETE_NAME")}
    return {name: value for name, value in once.items() if name not in others}, others


def exchanged(owner: Any) -> dict[str, FunctionType]:
    """The user's functions that took the place of those of an installed module or class."""
    held = unpatched(owner) if isinstance(owner, type) else vars(owner)
    functions = ((name, definition(value)) for name, value in sorted(held.items()))
    return {n: f for n, f in functions if type(f) is FunctionType and _is_users(f)}


def _is_users(function: FunctionType) -> bool:
    """Whether a function is not an installed package's, nor made by one, as by ``dataclass``."""
    module = sys.modules.get(function.__module__ or "")
    made = function.__code__.co_filename.startswith("<") and module is not None
    return not installed(module if made else function)


def _compiled(name: str) -> CodeType | None:
    """The code of one of the user's modules, from its file; None if there is no such module."""
    folders: Any = None
    spec = None
    try:
        for count in range(name.count(".") + 1):
            part = ".".join(name.split(".")[: count + 1])
            spec = PathFinder.find_spec(part, folders)
            folders = [] if spec is None else spec.submodule_search_locations or []
        file = "" if spec is None else spec.origin or ""
        if not file.endswith(".py") or _in_packages(file):
            return None
        return compile(content(file), file, "exec", dont_inherit=True)
    except (GradtraceError, ImportError, SyntaxError, ValueError):  # it may never be imported
        return None


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
    return _in_packages(file)


def _in_packages(file: str) -> bool:
    return "site-packages" in file or file.startswith(_roots())
