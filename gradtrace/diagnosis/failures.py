"""Backward passes that fail: operators without a derivative, values that were overwritten."""

from __future__ import annotations

import re

from torch import nn

from gradtrace.autodiff.nodes import sequence_of
from gradtrace.diagnosis.backward_sizes import BackwardSizes
from gradtrace.diagnosis.forward_record import NAMES, ForwardRecord, Operation
from gradtrace.diagnosis.losses import SAME_VALUES
from gradtrace.diagnosis.result import Finding
from gradtrace.errors import FreedGraph

UNDERIVED = re.compile(r"derivative for (?:aten::|')([\w: ]+?)'? is not implemented")
"""What PyTorch says of an operator without a derivative."""

ALIASES = {"floor_divide": ("__floordiv__", "__rfloordiv__", "__ifloordiv__")}
"""By which other names operators are called."""

INSTEAD = {
    "heaviside": "use a smooth step, torch.sigmoid(x / width), or pass the gradient straight "
    "through: soft + (torch.heaviside(x, v) - soft).detach()",
    "floor_divide": "the derivative is 0 nearly everywhere: use x / y, or (x // y).detach() if no "
    "gradient is meant",
    "histogram": "counts have no derivative: use a soft histogram, a sum of kernels around the "
    "centres of the bins",
}


OUT_OF_PLACE = (
    "write it out of place: x = x + y for x += y, relu(x) for relu_(x), or change a clone()."
)
STEP = (
    "call optimizer.step() after the backward passes of all losses that were computed with these "
    "weights, or compute the loss again after the step."
)


def failure_of(sizes: BackwardSizes, record: ForwardRecord | None) -> Finding | None:
    """The finding of a backward pass that failed; None if it did not.

    Raises:
        FreedGraph: If the loss was fine, and what it needs is gone since.
    """
    if not sizes.failure:
        return None
    operation = None if record is None else record.of_node(sequence_of(sizes.failed))
    if found := UNDERIVED.search(sizes.failure):
        name, _, argument = found[1].partition(": ")
        return _underived(name, argument, operation, record)
    if sizes.freed:
        writer = None if record is None or operation is None else _writer(record, operation)
        if operation is None or writer is None:
            raise FreedGraph(sizes.freed)
        return _overwritten(operation, *writer)
    return Finding(
        "backward",
        "error",
        "the backward pass fails",
        line=_line(operation),
        evidence=sizes.failure,
        advice="mend this first; gradients behind it are unknown.",
    )


def _line(operation: Operation | None) -> str:
    return "" if operation is None else str(operation.where.line or "")


def _writer(record: ForwardRecord, operation: Operation) -> tuple[Operation, bool] | None:
    """The operation that first changed, in place, what another one before it took or gave; and
    whether that is a parameter.
    """
    views = record.above((*operation.inputs, *operation.outputs), _is_view)
    own = record.below(views, _is_view)
    since = max((record.makers.get(value, -1) for value in operation.outputs), default=-1)
    for later in record.operations[since + 1 :]:
        if changed := own.intersection(later.changed):
            held = (values for ref, values in record.tensors.values() if _is_parameter(ref()))
            return later, any(not changed.isdisjoint(values) for values in held)
    return None


def _is_parameter(tensor: object) -> bool:
    return isinstance(tensor, nn.Parameter)


def _is_view(operation: Operation) -> bool:
    """Whether what an operation gives may be its argument's memory."""
    return operation.name in SAME_VALUES


def _overwritten(operation: Operation, writer: Operation, weight: bool) -> Finding:
    name = NAMES.get(writer.name, f"{writer.name}()")
    return Finding(
        "backward",
        "error",
        "the backward pass fails: a value that it needs was overwritten",
        writer.module,
        line=_line(writer),
        evidence=f"{name} changes in place {'weights' if weight else 'what'} the gradient of "
        f"{operation.name}() is computed from ({_line(operation)}), so loss.backward() raises an "
        "error.",
        advice=STEP if weight else OUT_OF_PLACE,
    )


def _underived(
    name: str, argument: str, operation: Operation | None, record: ForwardRecord | None
) -> Finding:
    """The finding of an operator without a derivative. The node of some has no number, so that
    ``operation`` is another; then it is the last of that name.
    """
    names = {name, f"{name}_", f"special_{name}", *ALIASES.get(name, ())}
    if operation is None or operation.name not in names:
        all_of_them = [] if record is None else record.operations
        operation = next((each for each in reversed(all_of_them) if each.name in names), None)
    module = "" if operation is None else operation.module
    return no_derivative(name, argument, module, _line(operation))


def no_derivative(name: str, argument: str, module: str, line: str) -> Finding:
    """The finding of an operator that PyTorch cannot differentiate (``argument``: by this one)."""
    other = "use an operator that has one, write it as a torch.autograd.Function with a backward of"
    usual = f"{other} its own, or detach() its input if no gradient is meant"
    by = f" by its argument '{argument}'" if argument else ""
    return Finding(
        "derivative",
        "error",
        f"{name} has no derivative{by}",
        module,
        line=line,
        evidence=f"PyTorch implements {name}() without its derivative{by}, so loss.backward() "
        "raises an error there, and gradients behind it are unknown.",
        advice=f"{INSTEAD.get(name, usual)}.",
    )
