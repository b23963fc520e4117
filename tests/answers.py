"""What the library answers about a network, as plain numbers: ``{name: {column: number}}``.

The golden files and what compares them know the library through these functions only; where its
calls change, they change, and the files stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from math import nan
from typing import Any

import nets
import numpy as np
import torch
from torch import Tensor

import gradtrace as gt
from gradtrace import semirings

Answer = dict[str, dict[str, Any]]

RULES = ("greedy", "edge", "viterbi")
SEMIRINGS = {
    "sum": semirings.SUM,
    "abs": semirings.ABS,
    "max": semirings.MAX,
    "extremes": semirings.EXTREMES,
    "count": semirings.COUNT,
    "entropy": semirings.ENTROPY,
    "top 3": semirings.TopK(3),
}
EXACT = 2.0**53
"""Up to here a float holds every integer."""

ALL = 10**9
"""More elements than a network has: none is drawn."""


class Net:
    """A network whose forward pass was watched, and the traces of its loss."""

    def __init__(self, made: nets.Made) -> None:
        self.model, self.loss_fn, self.batch = made
        self._traces: dict[str, Any] = {}

    @cached_property
    def watched(self) -> tuple[Any, Tensor]:
        with gt.watch(self.model) as watch:
            loss = self.loss_fn(self.model, self.batch)
        return watch, loss

    def trace(self, rule: str) -> Any:
        if rule not in self._traces:
            watch, loss = self.watched
            self._traces[rule] = watch.trace(loss, rule=rule)
        return self._traces[rule]

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        watch, loss = self.watched
        return {name: grad.detach() for name, grad in watch.backward(loss).items()}


# Gradients ---------------------------------------------------------------------------------------


def backward_in(net: Net, semiring: str) -> Answer:
    """For each parameter a digest of its values; counts in full, as far as floats hold them."""
    watch, loss = net.watched
    found = watch.backward(loss, SEMIRINGS[semiring])
    return {name: _digests(value, semiring == "count") for name, value in found.items()}


def cancelled(net: Net) -> dict[str, int]:
    """How many elements have a path, and a gradient of exactly 0."""
    watch, loss = net.watched
    heaviest = watch.backward(loss, semirings.MAX)
    found = {
        name: int(((g == 0) & (heaviest[name] > 0)).sum()) for name, g in net.gradients.items()
    }
    return {name: many for name, many in found.items() if many}


def _digests(value: Any, count: bool = False) -> dict[str, Any]:
    parts = (value,) if isinstance(value, Tensor) else tuple(value)
    each = [_digest(part, count) for part in parts]
    if len(each) == 1:
        return each[0]
    return {f"{key} {n}": x for n, part in enumerate(each) for key, x in part.items()}


def _digest(x: Tensor, count: bool = False) -> dict[str, Any]:
    """Σ |x| and Σ x·w; w tells elements apart."""
    flat = x.detach().double().flatten()
    place = torch.arange(flat.numel(), dtype=torch.float64)
    weights = (place * 37 % 101 + 1) / 128
    size, along = float(flat.abs().sum()), float((flat * weights).sum())
    if count and size < EXACT:
        return {"sum": int(size), "not 0": int((flat != 0).sum()), "along": along}
    return {"size": size, "along": along}


# Influence ---------------------------------------------------------------------------------------

COUNTS = ("through", "eligible", "unreached")


def influence(net: Net, rule: str, parameter: str, by: Any = "modules") -> Answer:
    """The counts of one parameter's elements, by component; of components that they can reach."""
    table = net.trace(rule).influence(by, of=parameter)
    found = {row.name: {column: int(getattr(row, column)) for column in COUNTS} for row in table}
    return {name: row for name, row in found.items() if any(row.values())}


def influence_of_all(net: Net, rule: str, by: Any = "modules") -> Answer:
    """The counts of all parameters, and the shares by |gradient|."""
    table = net.trace(rule).influence(by)
    columns = (*COUNTS, "own")
    return {
        row.name: {column: int(getattr(row, column)) for column in columns}
        | {"weighted": float(row.weighted)}
        for row in table
    }


# Paths -------------------------------------------------------------------------------------------


def path(net: Net, rule: str, parameter: str, element: int) -> Answer:
    """A path step by step, without the names of operators."""
    found = net.trace(rule).path(parameter, _index(net, parameter, element))
    return {
        str(n): {
            "module": f"{step.module} (call {step.call})" if step.call else step.module,
            "element": list(step.index),
            "derivative": step.derivative,
            "gradient": step.gradient,
            "share": step.share,
        }
        for n, step in enumerate(found.steps)
    }


def paths(net: Net, rule: str, parameter: str, elements: Sequence[int]) -> dict[str, Any]:
    """A digest of the ways of several elements, and their weights."""
    trace = net.trace(rule)
    found = [trace.path(parameter, _index(net, parameter, each)) for each in elements]
    ways = [[(s.module, s.call, tuple(s.index)) for s in each.steps[1:]] for each in found]
    text = sha256(repr(ways).encode()).hexdigest()[:12]
    return {"elements": list(elements), "ways": text, "weights": [each.weight for each in found]}


def heaviest(net: Net, parameter: str, k: int) -> list[float]:
    """The |weights| of the heaviest paths of a parameter."""
    found = net.trace("greedy").paths(parameter, k=k)
    return sorted((abs(each.weight) for each in found), reverse=True)


def _index(net: Net, parameter: str, element: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(element, net.gradients[parameter].shape))


# Measures ----------------------------------------------------------------------------------------


def decompose(net: Net, by: Any = "modules") -> Answer:
    columns = ("share", "contested", "cosine", "norm", "whole norm", "leaves", "own")
    table = net.trace("greedy").decompose(by)
    return {row.name: {column: row[column] for column in columns} for row in table}


def gradients_through(net: Net, components: Sequence[str], by: Any = "modules") -> Answer:
    """A digest of the gradient through each component, over all leaves."""
    table = net.trace("greedy").decompose(by)
    found = {name: table.gradients(name) for name in components}
    return {
        name: _digest(torch.cat([grads[leaf].flatten() for leaf in net.gradients if leaf in grads]))
        for name, grads in found.items()
    }


def cosines(net: Net, components: Sequence[str], by: Any = "modules") -> Answer:
    """The cosine of the gradients through each two components."""
    table = net.trace("greedy").decompose(by)
    pairs = [(a, b) for n, a in enumerate(components) for b in components[n + 1 :]]
    return {f"{a}, {b}": {"cosine": float(table.cosine(a, b))} for a, b in pairs}


def mass(net: Net, p: float, by: Any = "modules") -> Answer:
    table = net.trace("greedy").mass(by, p)
    found = {row.name: {"share": row.share} for row in table}
    return found | ({"(all)": {"cancellation": table.about["cancellation"]}} if p == 1 else {})


def coverage(net: Net, rule: str, parameters: Mapping[str, Sequence[str]]) -> Answer:
    """Of all elements of these parameters, together, by the names they are given."""
    every = [name for names in parameters.values() for name in names]
    table = net.trace(rule).coverage(sample=ALL, of=every)
    found = {}
    for name, names in parameters.items():
        row = "all" if len(parameters) == 1 else names[0]
        found[name] = _covered(table[row]) if row in table else dict(NONE)
    return found


NONE = {"elements": 0, "median": nan, "lower": nan, "upper": nan, "opposite": 0, "cancelled": 0}


def _covered(row: Any) -> dict[str, Any]:
    found = {column: row[column] for column in ("elements", "median", "lower", "upper")}
    shares = {column: row[column] for column in ("opposite", "cancelled")}
    many = row.elements
    return found | {name: round(share * many) if many else 0 for name, share in shares.items()}


def norms(net: Net) -> Answer:
    columns = ("depth", "norm", "gain", "zeros", "own", "verdict")
    return {row.name: {c: row[c] for c in columns} for row in net.trace("greedy").norms()}


def conflicts(net: Net) -> Answer:
    """Of the first sample's loss and that of the others, by module."""
    with gt.watch(net.model) as watch:
        first = net.loss_fn(net.model, tuple(x[:1] for x in net.batch))
        others = net.loss_fn(net.model, tuple(x[1:] for x in net.batch))
    table = watch.conflicts({"first": first, "others": others})
    found = {}
    for name in table.names:
        module = None if name == "(all)" else name
        found[name] = {
            "norm of first": table.norm("first", module),
            "norm of others": table.norm("others", module),
            "cosine": table.cosine("first", "others", module),
            "share of first": table.share("first", module),
            "winner": table.winner(module),
        }
    return found


def attribution(net: Net, rule: str, module: str, by: Any = "modules") -> Answer:
    """The scores of the positions of a module's output, or of the batch's first tensor, for the
    loss; by the rule "gradient" those through each component, too.
    """
    with gt.watch(net.model) as watch:
        loss, inputs = _loss_of_inputs(net, module)
    found = watch.attribute(loss, {"x": inputs}, rule=rule)
    scores = {f"x[{row.position}]": {"score": row.score} for row in found.rows}
    if rule != "gradient":
        return scores
    through = {row.name: {"score": row.score} for row in found.by(by)}
    return scores | through


def _loss_of_inputs(net: Net, module: str) -> tuple[Tensor, Tensor]:
    if not module:
        inputs = net.batch[0].clone().requires_grad_()
        return net.loss_fn(net.model, (inputs, *net.batch[1:])), inputs
    seen: list[Tensor] = []
    hook = net.model.get_submodule(module).register_forward_hook(
        lambda _, args, out: seen.append(out)
    )
    try:
        return net.loss_fn(net.model, net.batch), seen[0]
    finally:
        hook.remove()


# Diagnosis ---------------------------------------------------------------------------------------


def diagnosis(made: nets.Made) -> Answer:
    """Which parameters get no gradient, why, and by which line; where the first value is that is
    not finite.
    """
    model, loss_fn, batch = made
    with gt.watch(model, diagnose=True) as watch:
        loss = loss_fn(model, batch)
    found = watch.diagnose(loss)
    answer = {
        each.parameter: {"kind": each.reason.name.lower(), "line": _text(each.line)}
        for each in found.silent
    }
    if found.nonfinite is not None:
        answer["(not finite)"] = {"kind": found.nonfinite.of, "line": _text(found.nonfinite.line)}
    return answer


def _text(line: str) -> str:
    """The source of a line without its file and number."""
    return re.sub(r"^.*?:\d+: ", "", line)
