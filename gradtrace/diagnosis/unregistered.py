"""Parameters that get a gradient, and that the model does not list: no optimiser moves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn

from gradtrace.diagnosis.forward_record import ForwardRecord
from gradtrace.diagnosis.result import Finding, listed
from gradtrace.pytorch.wrapped_modules import join, named_modules, named_parameters

SO = "so that no optimiser moves {}, and no checkpoint has it."


def unregistered(
    roots: Mapping[str, nn.Module],
    leaves: Mapping[int, Tensor],
    record: ForwardRecord | None,
    moved: Set[int] = frozenset(),
) -> Iterator[Finding]:
    """One finding for each place; ``leaves`` are those that get a gradient, by their id, and
    ``moved`` those that an optimiser has.
    """
    left = dict(leaves)
    for prefix, root in roots.items():
        known = {id(parameter) for _, parameter in named_parameters(root)}
        lost: dict[str, tuple[list[str], object, str]] = {}  # by container
        for place, held, holder in _held(prefix, root):
            own = [("", held)] if isinstance(held, Tensor) else held.named_parameters()
            for key, parameter in own:
                if id(parameter) in leaves and id(parameter) not in known:
                    container = place.rpartition("[")[0] if holder else place
                    names = lost.setdefault(container, ([], held, holder))[0]
                    names.append(f"{place}.{key}" if key else place)
                    known.add(id(parameter))
        for container, (names, held, holder) in lost.items():
            yield _in_container(container, tuple(names), held, holder)
        for key in known:
            left.pop(key, None)
    if record is not None:
        yield from _made_anew(left.values(), record)
        others = [leaf for key, leaf in left.items() if key not in moved]
        yield from _elsewhere(others, record)


def _in_container(place: str, names: tuple[str, ...], held: object, holder: str) -> Finding:
    if holder:
        kind = "Parameter" if isinstance(held, Tensor) else "Module"
        why = f"'{place}' is a plain {holder}, {SO.format('what it holds')}"
        advice = f"use nn.{kind}List or nn.{kind}Dict."
    else:
        why = f"'{place}' is a plain tensor, {SO.format('it')}"
        advice = "make it a parameter: self.name = nn.Parameter(tensor)."
    return Finding(
        "unregistered",
        "error",
        f"not registered: {listed(names)}",
        place if holder else place.rpartition(".")[0],
        names,
        evidence=f"{'It gets' if len(names) == 1 else 'They get'} a gradient, but "
        f"model.parameters() does not list {'it' if len(names) == 1 else 'them'}: {why}",
        advice=advice,
    )


def _made_anew(leaves: Iterable[Tensor], record: ForwardRecord) -> Iterator[Finding]:
    """Parameters that were made during the forward pass."""
    lines: dict[str, list[Tensor]] = {}
    modules: dict[str, str] = {}
    for leaf in leaves:
        value = record.known(leaf) if isinstance(leaf, nn.Parameter) else None
        number = None if value is None else record.makers.get(value)
        if number is not None:
            operation = record.operations[number]
            line = str(operation.where.line or "")
            lines.setdefault(line, []).append(leaf)
            modules[line] = operation.module
    for line, made in lines.items():
        yield Finding(
            "unregistered",
            "error",
            "parameters are made anew in the forward pass",
            modules[line],
            line=line,
            evidence=f"{len(made)} of shape {_shapes(made)} get a gradient and are not the "
            "model's: every forward pass begins with new ones, and no optimiser moves them.",
            advice="make the module in __init__, and call it in forward.",
        )


def _shapes(some: Sequence[Tensor]) -> str:
    """The shapes of the first four."""
    return ", ".join("×".join(map(str, each.shape)) or "scalar" for each in some[:4])


def _elsewhere(leaves: Iterable[Tensor], record: ForwardRecord) -> Iterator[Finding]:
    """Parameters that a module of the model computes with, and that are kept outside of it: in a
    variable around its class, in an object that is no module.
    """
    users: dict[str, list[Tensor]] = {}
    lines: dict[str, str] = {}
    for leaf in leaves:
        values = record.values(leaf) if isinstance(leaf, nn.Parameter) else []
        uses = record.uses(values)
        if uses and uses[0].inside and record.makers.get(values[0]) is None:
            users.setdefault(uses[0].module, []).append(leaf)
            lines.setdefault(uses[0].module, str(uses[0].where.line or ""))
    for module, found in users.items():
        yield Finding(
            "unregistered",
            "warning",
            "parameters are used in the model that are not its own",
            module,
            line=lines[module],
            evidence=f"{len(found)} of shape {_shapes(found)} get a gradient, but "
            "model.parameters() does not list them: they are kept outside of the model, "
            f"{SO.format('them')}",
            advice="make what holds them an attribute of a module, in its __init__; if another "
            "model trains them, give its optimiser too: optimizer=.",
        )


def _held(prefix: str, root: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Modules and tensors in plain lists, tuples and dicts that are attributes of a model's
    modules, with the kind of container; and tensors that are attributes themselves, with none.
    """
    for name, module in named_modules(root):
        for key, value in vars(module).items():
            place = join(join(prefix, name), key)
            if key.startswith("_"):
                continue
            if isinstance(value, Tensor):
                yield place, value, ""
            if not isinstance(value, (list, tuple, dict)):
                continue
            for at, each in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(each, (nn.Module, nn.Parameter)):
                    yield f"{place}[{at!r}]", each, type(value).__name__
