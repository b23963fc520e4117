"""The first value that is NaN or infinite, in the order of the forward pass, and how it spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isinf

import torch
from torch import Tensor

from gradtrace.autodiff.backward import BadGradient
from gradtrace.autodiff.nodes import name_of, saved_at, sequence_of
from gradtrace.diagnosis.forward_record import Element, Extent, ForwardRecord, Operation
from gradtrace.diagnosis.result import Finding, NonFiniteValue, listed

SHOWN_STEPS = 8
"""The most operations that the path of a bad value lists."""

ADVICE = {
    "log log2 log10 log1p logit xlogy": "keep the argument above 0: x.clamp_min(1e-8).log(), or "
    "log_softmax, logsigmoid and losses that take logits.",
    "sqrt rsqrt pow norm std var cdist linalg_norm linalg_vector_norm normalize hypot": "its "
    "derivative at 0 is infinite: add a small number inside, (x + 1e-12).sqrt().",
    "div true_divide truediv rdiv rtruediv reciprocal fmod remainder": "keep the divisor away from "
    "0: x / (y + 1e-8), or y.clamp_min(1e-8).",
    "softmax log_softmax scaled_dot_product_attention multi_head_attention_forward": "a row in "
    "which everything is masked (-inf) has no softmax; leave one position open, or mask with a "
    "large finite number.",
    "exp expm1 exp2 sinh cosh logsumexp": "keep the argument small (below 88 in float32, 11 in "
    "float16), or compute in logarithms: logsumexp, log_softmax, softplus.",
    "cross_entropy nll_loss mean": "a mean over nothing is NaN: are all targets ignore_index, "
    "all weights 0, or the batch empty?",
    "acos asin atanh acosh": "keep the argument inside of its range: x.clamp(-1 + 1e-6, 1 - 1e-6).",
}
"""What to do, by the names of operators."""

BY_NAME = {name: advice for names, advice in ADVICE.items() for name in names.split()}
HALF = "the range of float16 ends at 65,504: compute this in float32 or bfloat16, or scale it down."
HIDDEN = (
    "its derivative is infinite where a condition or mask hides the value, and 0 · ∞ is NaN: make "
    "the argument safe before the operation, torch.where(ok, x, 1.0).log(), not only after it."
)


@dataclass(eq=False)
class Origins:
    """Looks for the origin of bad values in a record; ``names`` are those of leaves, by value."""

    record: ForwardRecord
    names: dict[int, str]

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
        if not began:
            return None
        return self.value((meant or began)[0], bad, of)

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
        what = self.names.get(value, "an input")
        line = str(uses[0].line or "") if uses else ""
        said = f"{what} already holds it before the step: shape {extent.shape if extent else ()}"
        number = extent.low if extent else float("nan")
        module = uses[0].module if uses else ""
        return NonFiniteValue(
            of, what, module, line, number, (), (said,), self._path((value,), bad)
        )

    def value(self, operation: Operation, bad: set[int], of: str) -> NonFiniteValue:
        """An operation that made a bad value of good ones."""
        element = operation.element or Element((), float("nan"), 0, 0, ())
        return NonFiniteValue(
            of,
            operation.name.strip("_"),
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
            name = uses[0].name.strip("_")
            step = f"{name} in '{uses[0].module}'" if uses[0].module else name
            if not steps or steps[-1] != step:
                steps.append(step)
            at = {value for value in uses[0].outputs if value in bad}
        if len(steps) > SHOWN_STEPS:
            steps[SHOWN_STEPS - 2 : -1] = ["..."]
        return tuple(steps)


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
    at = torch.tensor(flat, device="cpu")
    index = tuple(int(i) for i in torch.unravel_index(at, bad.shape))
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


def advice_for(value: NonFiniteValue) -> str:
    """What to do about a bad value."""
    name = value.operator.lower().partition("backward")[0].rstrip("_0123456789")
    name = "norm" if name == "linalgvectornorm" else name
    half = any("float16" in text and "bfloat16" not in text for text in value.inputs)
    if half and (name not in BY_NAME or isinf(value.value)):
        return HALF
    if value.of == "gradient" and not value.operator.endswith(tuple("0123456789")):
        return HIDDEN
    if any("already holds" in text for text in value.inputs):
        return "look at the data, or at the step before: too large a learning rate, no clipping?"
    return BY_NAME.get(name, "look at the values that go into it.")


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
    elif any("already holds" in text for text in value.inputs):
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
