"""Losses that are given something else than they expect: probabilities in place of scores, shapes
that broadcast. Their gradient is there and finite, and teaches the wrong thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gradtrace.diagnosis.forward_record import ForwardRecord, Operation, plain
from gradtrace.diagnosis.result import Finding

PROBABILITIES = frozenset(("softmax", "sigmoid", "softmin", "gumbel_softmax"))
"""Functions whose values are probabilities."""

SAME_VALUES = frozenset(
    ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "t")
    + (".T", ".mT", "movedim", "contiguous", "clone", "__getitem__", "select", "narrow", "chunk")
    + ("split", "unbind", "expand", "float", "double", "half", "to", "type")
)
"""Functions that hand on the values of their argument, or some of them."""


class Expectation(NamedTuple):
    """What a loss takes: its words, and what to do where it gets probabilities."""

    takes: str
    severity: str
    so: str
    advice: str


EXPECTED = {
    "cross_entropy": Expectation(
        "scores (logits), of which it takes the softmax itself",
        "warning",
        "The softmax is taken twice: the gradient is small, and the loss cannot come near 0.",
        "leave the {maker} out, or use nll_loss of its log: log_softmax.",
    ),
    "binary_cross_entropy_with_logits": Expectation(
        "scores (logits), of which it takes the sigmoid itself",
        "warning",
        "The sigmoid is taken twice: the gradient is small, and the loss cannot come near 0.",
        "leave the {maker} out, or use binary_cross_entropy.",
    ),
    "nll_loss": Expectation(
        "log-probabilities",
        "error",
        "Without the logarithm it is not the likelihood, and negative.",
        "use log_softmax in place of the {maker}, or cross_entropy of the scores.",
    ),
    "kl_div": Expectation(
        "log-probabilities as its first argument",
        "error",
        "Without the logarithm it is not the divergence.",
        "use log_softmax in place of the {maker}.",
    ),
}

DIFFERENCES = frozenset(("sub", "__sub__", "__rsub__", "mse_loss", "l1_loss", "smooth_l1_loss"))


def loss_findings(record: ForwardRecord, roots: set[int]) -> Iterator[Finding]:
    """Losses among what ``roots`` are made of that get what they do not expect."""
    behind = record.above(roots)
    for operation in record.operations:
        if not behind.isdisjoint(operation.outputs) and operation.needs:
            if operation.name in EXPECTED:
                yield from _probabilities(record, operation)
            elif operation.name in DIFFERENCES:
                yield from _broadcast(record, operation)


def _probabilities(record: ForwardRecord, operation: Operation) -> Iterator[Finding]:
    maker = _maker(record, operation.inputs[0]) if operation.inputs else None
    if maker is None or maker.name not in PROBABILITIES:
        return
    expected = EXPECTED[operation.name]
    of = f"{maker.name} in '{maker.module}'" if maker.module else maker.name
    yield Finding(
        "loss",
        expected.severity,
        f"probabilities are given to {operation.name}",
        maker.module,
        line=str(operation.where.line or ""),
        evidence=f"It takes {expected.takes}, and gets what {of} gives. {expected.so}",
        advice=expected.advice.format(maker=maker.name),
    )


def _maker(record: ForwardRecord, value: int) -> Operation | None:
    """The operation that computed a value, before it was moved and reshaped."""
    while (number := record.makers.get(value)) is not None:
        operation = record.operations[number]
        if operation.name not in SAME_VALUES or not operation.inputs:
            return operation
        value = operation.inputs[0]
    return None


def _broadcast(record: ForwardRecord, operation: Operation) -> Iterator[Finding]:
    """Of an output (n, 1) and targets (n,), whose difference is (n, n): all pairs."""
    if len(operation.inputs) != 2:
        return
    extents = [record.extent(value) for value in operation.inputs]
    shapes = [extent.shape for extent in extents if extent is not None and extent.shape]
    given = [_requires_grad(record, value) for value in operation.inputs]
    if len(shapes) < 2 or all(given):
        return
    column, row = sorted(shapes, key=len, reverse=True)
    if not (len(row) == 1 and column == (row[0], 1) and row[0] > 1):
        return
    n = row[0]
    yield Finding(
        "loss",
        "warning",
        f"output and target have shapes ({n}, 1) and ({n},), which broadcast to ({n}, {n})",
        operation.module,
        line=str(operation.where.line or ""),
        evidence=f"{plain(operation.name)}() compares each of {n} outputs with the targets of "
        "all samples, so that the best that the model can learn is their mean.",
        advice="give both the same shape: output.squeeze(-1), or target.unsqueeze(-1).",
    )


def _requires_grad(record: ForwardRecord, value: int) -> bool:
    number = record.makers.get(value)
    return number is not None and value in record.operations[number].gives
