"""The first value that is NaN or infinite, in the order of the forward pass, and how it spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from gradtrace.autodiff.backward import BadGradient
from gradtrace.autodiff.nodes import name_of, saved_at, sequence_of
from gradtrace.diagnosis.forward_record import (
    Element,
    Extent,
    ForwardRecord,
    Operation,
    first_bad,
    plain,
)
from gradtrace.diagnosis.nonfinite_advice import BUFFER, HELD, advice_for
from gradtrace.diagnosis.result import Finding, NonFiniteValue, listed
from gradtrace.types import unravel

SHOWN_STEPS = 8
"""The most operations that the path of a bad value lists."""

BLAMELESS = ("add", "sub", "mul", "where", "masked_fill", "softmax", "log_softmax", "maximum")
"""Functions to which an infinite value may be given on purpose, as a mask."""


@dataclass(eq=False)
class Origins:
    """Looks for the origin of bad values in a record; ``names`` are those of leaves, by value, and
    ``buffers`` those of others that the model holds.
    """

    record: ForwardRecord
    names: dict[int, str]
    buffers: dict[int, str] = field(default_factory=dict)

    def _extent(self, value: int) -> Extent | None:
        return self.record.extent(value)

    def _is_bad(self, value: int) -> bool:
        extent = self._extent(value)
        return extent is not None and extent.bad

    def origin(self, roots: set[int], of: str) -> NonFiniteValue | None:
        """Where the bad values that these are made of began; None if all are finite."""
        bad = self._bad_above({value for value in roots if self._is_bad(value)})
        given = [v for v in bad if v not in self.record.makers and self._told(v)]
        if given:
            return self._given(min(given), bad, of)
        numbers = sorted({self.record.makers[v] for v in bad if v in self.record.makers})
        made = [self.record.operations[n] for n in numbers]
        began = [operation for operation in made if operation.element is not None]
        meant = [operation for operation in began if not operation.literal]
        held = sorted(v for v in bad if v not in self.record.makers)
        if not began:  # an infinite value that was given, and stayed infinite
            return self._given(held[0], bad, of) if held else None
        first = (meant or began)[0]
        infinite = [] if _may_mask(first) else self._given_above(first, bad)
        return self._given(min(infinite), bad, of) if infinite else self.value(first, bad, of)

    def _given_above(self, operation: Operation, bad: set[int]) -> list[int]:
        """The bad values that were given, of which an operation's bad inputs are made; not by
        operations to which a mask may be given.
        """
        inputs = [value for value in operation.inputs if value in bad]
        found = self.record.above(inputs, lambda each: not _may_mask(each))
        return [v for v in found if v in bad and v not in self.record.makers]

    def _told(self, value: int) -> bool:
        """Whether a value that was given is to blame: NaN, or a parameter that is infinite. Masks
        of infinities are meant.
        """
        extent = self._extent(value)
        return extent is not None and (extent.nan or value in self.names)

    def _bad_above(self, roots: set[int]) -> set[int]:
        found, stack = set(roots), list(roots)
        while stack:
            number = self.record.makers.get(stack.pop())
            inputs = () if number is None else self.record.operations[number].inputs
            fresh = [v for v in inputs if v not in found and self._is_bad(v)]
            found.update(fresh)
            stack += fresh
        return found

    def _given(self, value: int, bad: set[int], of: str) -> NonFiniteValue:
        extent, uses = self._extent(value), self.record.uses((value,))
        buffer = f"{BUFFER}{self.buffers[value]}" if value in self.buffers else "an input"
        what = self.names.get(value, buffer)
        line = str(uses[0].line or "") if uses else ""
        found = first_bad(tensor, []) if (tensor := self.record.given(value)) is not None else None
        at = found.index if found else ()
        number = found.value if found else extent.low if extent else float("nan")
        shape = extent.shape if extent else ()
        said = f"{what} {HELD} before the step{f', at element {list(at)}' if at else ''}: "
        module = uses[0].module if uses else ""
        return NonFiniteValue(
            of, what, module, line, number, at, (f"{said}shape {shape}",), self._path((value,), bad)
        )

    def value(self, operation: Operation, bad: set[int], of: str) -> NonFiniteValue:
        """An operation that made a bad value of good ones."""
        element = operation.element or Element((), float("nan"), 0, 0, ())
        return NonFiniteValue(
            of,
            plain(operation.name),
            operation.module,
            str(operation.where.line or ""),
            element.value,
            element.index,
            element.inputs,
            self._path(operation.outputs, bad),
        )

    def _path(self, values: tuple[int, ...], bad: set[int]) -> tuple[str, ...]:
        """The operations by which a bad value spread, from the first on."""
        steps: list[str] = []
        at = {value for value in values if value in bad}
        while at:
            uses = [op for op in self.record.uses(at) if not bad.isdisjoint(op.outputs)]
            if not uses:
                break
            name = plain(uses[0].name)
            step = f"{name} in '{uses[0].module}'" if uses[0].module else name
            if not steps or steps[-1] != step:
                steps.append(step)
            at = {value for value in uses[0].outputs if value in bad}
        if len(steps) > SHOWN_STEPS:
            steps[SHOWN_STEPS - 2 : -1] = ["..."]
        return tuple(steps)


def _may_mask(operation: Operation) -> bool:
    return plain(operation.name) in BLAMELESS or "attention" in operation.name


def of_gradient(
    found: BadGradient, module: str, origins: Origins | None, reached: Sequence[Extent]
) -> NonFiniteValue:
    """The value behind a gradient that is not finite, though the loss is; ``reached`` is what came
    to the operator that made it.
    """
    bad, record = found.gradient, origins.record if origins else None
    operation = record.of_node(sequence_of(found.node)) if record else None
    if operation is not None and origins is not None:
        hidden = origins.origin({*operation.inputs, *operation.outputs}, "gradient")
        if hidden is not None:
            return hidden
    flat = int((~bad.isfinite()).reshape(-1).nonzero()[0])
    index = unravel(flat, tuple(bad.shape))
    came = [f"a gradient of up to {x.largest:.4g} ({_dtype(x)})" for x in reached]
    return NonFiniteValue(
        "gradient",
        name_of(found.node),
        module,
        "" if operation is None else str(operation.where.line or ""),
        float(bad.reshape(-1)[flat]),
        index,
        tuple(saved_at(found.node, index, bad.shape) or came),
    )


def _dtype(extent: Extent) -> str:
    return str(extent.dtype).removeprefix("torch.")


INPUTS_MAX = 3
"""The most inputs of an operator that a sentence has, infinite ones first."""


def finding_of(value: NonFiniteValue, names: tuple[str, ...]) -> Finding:
    """A bad value as a finding; ``names`` are the parameters whose gradient is not finite."""
    number = f"{value.value:.4g}"
    what = f"the {value.of} is not finite"
    where = f" in '{value.module}'" if value.module else ""
    first = sorted(value.inputs, key=lambda text: "inf" not in text)[:INPUTS_MAX]
    more = f" and {len(value.inputs) - len(first)} more" if len(value.inputs) > len(first) else ""
    inputs = f" of {'; '.join(first)}{more}" if value.inputs else ""
    at = f" at element {list(value.element)}" if value.element else ""
    maker = f"{value.operator}{where} makes {number}{at}{inputs}."
    if not value.operator:
        maker = "Watch with gt.watch(model, diagnose=True), and operator and line are named."
    elif any(HELD in text for text in value.inputs):
        maker = f"{value.inputs[0]} ({number})."
    spread = f" It spreads by {' → '.join(value.path)}." if value.path else ""
    reached = f" Gradients that are not finite: {listed(names)}." if names else ""
    return Finding(
        "non-finite",
        "error",
        what,
        value.module,
        names,
        value.line,
        f"{maker}{spread}{reached}",
        advice_for(value) if value.operator else "",
    )


def is_bad(loss: Tensor | float) -> bool:
    """Whether a loss is NaN or infinite."""
    if isinstance(loss, Tensor):
        return not bool(torch.isfinite(loss.detach()).all())
    return not isfinite(loss)
