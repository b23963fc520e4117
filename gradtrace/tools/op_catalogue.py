"""A catalogue of ATen operations: how each is handled in backward formulas."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from gradtrace.errors import GradtraceError, did_you_mean
from gradtrace.recording.aten_rules import OPENED, RULES
from gradtrace.recording.dispatch import lowering_of


class Op(NamedTuple):
    """How one ATen operation is handled."""

    name: str
    kind: str
    how: str


HOW = {
    "view": "moves elements; run on element numbers to see where each comes from",
    "probed": "elementwise; run on ones to see its derivative",
    "opened": "opened into smaller operations by PyTorch's decomposition",
    "dense": "no structure known: written out as a matrix, up to a size limit",
}


def kinds() -> Counter[str]:
    """The number of functional operations by the way they are handled."""
    return Counter(
        lowering_of(func).kind for _, func in _overloads() if not func._schema.is_mutable
    )


def listed() -> list[Op]:
    """The operations in gradtrace's own rule tables."""
    exact = [Op(name, "exact", _summary(rule)) for name, rule in RULES.items()]
    return exact + [Op(name, "opened", _summary(rule)) for name, rule in OPENED.items()]


def named(name: str) -> list[Op]:
    """All overloads of an operation, or the one overload named."""
    wanted = name.removeprefix("aten::").removeprefix("aten.").removesuffix(".default")
    every = dict(_overloads())
    found = [key for key in every if wanted in (key, key.partition(".")[0])]
    if not found:
        known = {*every, *(key.partition(".")[0] for key in every)}
        hint = did_you_mean(wanted, sorted(known), most=0)
        raise GradtraceError(f"there is no ATen operation {name!r}{hint}")
    functional = [key for key in found if not every[key]._schema.is_mutable]
    return [_op(key, every[key]) for key in sorted(functional or found)]


def _op(name: str, func: Any) -> Op:
    found = lowering_of(func)
    ours = found.kind == "exact" or name.partition(".")[0] in OPENED
    how = _summary(found.rule) if ours else HOW.get(found.kind, "")
    return Op(name, found.kind, f"in place: {how}" if found.mutates else how)


def _overloads() -> Iterator[tuple[str, Any]]:
    """Every ATen operation as ``mul.Tensor``, with the function."""
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None) if namespace == "aten" else None
        func = getattr(packet, overload or "default", None)
        if func is not None:
            yield name, func


def _summary(rule: Callable[..., Any]) -> str:
    """The first line of a rule's docstring, or of the function that made the rule."""
    maker = rule.__qualname__.partition(".")[0]
    text = inspect.getdoc(rule) or inspect.getdoc(getattr(inspect.getmodule(rule), maker, None))
    return (text or "").partition("\n")[0]
