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
    + ("clamp", "clip", "clamp_min", "clamp_max")
)
"""Functions that hand on the values of their argument, some of them, or such in a range."""


ROUNDING = 0.01
"""How far above 0 a logarithm of a probability may be by the rounding of half precision."""


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

SCORES = {
    "nll_loss": "use cross_entropy, which takes scores, or log_softmax before this.",
    "kl_div": "take log_softmax of its first argument.",
}
"""What to do where a loss of log-probabilities gets numbers above 0, which are none."""

DIFFERENCES = frozenset(
    ("sub", "subtract", "rsub", "__sub__", "__rsub__", "sub_", "subtract_", "__isub__", "dist")
    + ("mse_loss", "l1_loss", "smooth_l1_loss", "pairwise_distance")
    + ("huber_loss", "poisson_nll_loss", "gaussian_nll_loss", "hinge_embedding_loss")
)
"""Functions of an output and a target that broadcast."""

PRODUCTS = frozenset(("mul", "multiply", "__mul__", "__rmul__"))
"""Functions that weigh an output by a target where a loss is written by hand; inside a module a
product of all pairs is likely meant.
"""


def loss_findings(record: ForwardRecord, roots: set[int]) -> Iterator[Finding]:
    """Losses among what ``roots`` are made of that get what they do not expect; each once."""
    yield from dict.fromkeys(_loss_findings(record, roots))


def _loss_findings(record: ForwardRecord, roots: set[int]) -> Iterator[Finding]:
    behind = record.above(roots)
    for operation in record.operations:
        if not behind.isdisjoint(operation.outputs) and operation.needs:
            if operation.name in EXPECTED:
                yield from _probabilities(record, operation) or _scores(record, operation)
            elif operation.name in DIFFERENCES or (
                operation.name in PRODUCTS and not operation.inside
            ):
                yield from _broadcast(record, operation)


def _probabilities(record: ForwardRecord, operation: Operation) -> list[Finding]:
    maker = value_maker(record, operation.inputs[0]) if operation.inputs else None
    if maker is None or maker.name not in PROBABILITIES:
        return []
    expected = EXPECTED[operation.name]
    of = f"{maker.name} in '{maker.module}'" if maker.module else maker.name
    found = Finding(
        "loss",
        expected.severity,
        f"probabilities are given to {operation.name}",
        maker.module,
        line=str(operation.where.line or ""),
        evidence=f"It takes {expected.takes}, and gets what {of} gives. {expected.so}",
        advice=expected.advice.format(maker=maker.name),
    )
    return [found]


def _scores(record: ForwardRecord, operation: Operation) -> list[Finding]:
    """Of a loss of log-probabilities that gets numbers above 0: the last layer's, as they are."""
    advice = SCORES.get(operation.name)
    extent = record.extent(operation.inputs[0]) if advice and operation.inputs else None
    if advice is None or extent is None or not extent.high > ROUNDING:
        return []
    found = Finding(
        "loss",
        "warning",
        f"{operation.name} is given numbers that are no log-probabilities",
        operation.module,
        line=str(operation.where.line or ""),
        evidence=f"It takes {EXPECTED[operation.name].takes}, which are at most 0, and gets "
        f"{extent}. It is not bounded below: scores that grow make it smaller for ever.",
        advice=advice,
    )
    return [found]


def value_maker(record: ForwardRecord, value: int) -> Operation | None:
    """The operation that computed a value, before it was moved and reshaped."""
    while (number := record.makers.get(value)) is not None:
        operation = record.operations[number]
        if operation.name not in SAME_VALUES or not operation.inputs:
            return operation
        value = operation.inputs[0]
    return None


def _broadcast(record: ForwardRecord, operation: Operation) -> Iterator[Finding]:
    """Of an output (n, 1) and targets (n,), whose difference is (n, n): all pairs; and of images
    (n, 1, h, w) and (n, h, w). Where a dimension was just put in, as ``x[:, None]`` does, all pairs
    are meant.
    """
    pair = operation.inputs[:2]
    shapes = {value: shape for value in pair if (shape := _shape(record, value))}
    given = [_requires_grad(record, value) for value in pair]
    if len(shapes) < 2 or sum(given) != 1:
        return
    longer, shorter = sorted(shapes, key=lambda value: len(shapes[value]), reverse=True)
    column, row = shapes[longer], shapes[shorter]
    if not _is_squeezed(row, column) or (len(row) > 1 and _is_widened(record, longer)):
        return
    around = operation.module + "."
    for later in record.uses(record.below(operation.outputs)):
        if later.module and not around.startswith(later.module + "."):
            return  # it goes on into another module: no loss yet
    n, whole = row[0], tuple(map(max, (1, *row), column))
    at = -1 if len(row) == 1 else column.index(1)
    yield Finding(
        "loss",
        "warning",
        f"output and target have shapes {column} and {row}, which broadcast to {whole}",
        operation.module,
        line=str(operation.where.line or ""),
        evidence=f"{plain(operation.name)}() pairs each of {n} outputs with the targets of "
        "all samples, so that the best that the model can learn is their mean.",
        advice=f"give both the same shape: output.squeeze({at}), or target.unsqueeze({at}).",
    )


def _is_squeezed(row: tuple[int, ...], column: tuple[int, ...]) -> bool:
    """Whether a shape is the other one without a dimension of size 1, and they broadcast to more
    than that.
    """
    places = range(len(column)) if len(column) == len(row) + 1 else ()
    same = any(column[k] == 1 and column[:k] + column[k + 1 :] == row for k in places)
    aligned = zip(reversed(row), reversed(column))
    fits = all(a == b or 1 in (a, b) for a, b in aligned)
    return same and fits and any(a > b for a, b in zip(reversed(row), reversed(column)))


def _is_widened(record: ForwardRecord, value: int) -> bool:
    maker = record.maker(value)
    return maker is not None and maker.name in ("unsqueeze", "__getitem__")


def _shape(record: ForwardRecord, value: int) -> tuple[int, ...]:
    """The shape of a value; of whole numbers, whose range is not measured, while they exist."""
    if extent := record.extent(value):
        return extent.shape
    tensor = record.given(value)
    return () if tensor is None else tuple(tensor.shape)


def _requires_grad(record: ForwardRecord, value: int) -> bool:
    number = record.makers.get(value)
    return number is not None and value in record.operations[number].gives
