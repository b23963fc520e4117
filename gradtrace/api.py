"""The public functions that take a loss; each is one question to a ``Session`` without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from gradtrace.autodiff.graph import Graph
from gradtrace.autodiff.names import Gradients
from gradtrace.ir.program import Program
from gradtrace.recording.record import DENSE_MAX_ENTRIES
from gradtrace.semirings import SUM, Semiring
from gradtrace.session import Session
from gradtrace.traced import Trace


def graph(loss: Tensor, *, names: Mapping[str, Tensor] | None = None) -> Graph:
    """The computation graph behind a loss: operators, edges, leaves, sizes.

    Args:
        loss: Loss whose graph is still there: before ``loss.backward()``, or after it with
            ``retain_graph=True``.
        names: ``{name: tensor}`` for leaves; others are called leaf0, leaf1, ...

    Returns:
        The graph, with operators, edges and leaves; ``draw()`` makes a picture of it.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> gradtrace.graph(x * x, names={"x": x})
    Graph(2 operators, 2 edges, 1 leaves)
    """
    return Session(names).graph(loss)


def backward(
    loss: Tensor,
    semiring: Semiring = SUM,
    *,
    names: Mapping[str, Tensor] | None = None,
    leaves: Iterable[str] | None = None,
    cotangent: Tensor | None = None,
    schedule: str = "kahn",
    nonfinite: str = "raise",
) -> Gradients:
    """Back-propagate in a semiring: ``{name: value}`` for every leaf of the loss.

    ``value[i] = ⊕ over paths from i to the loss of ⊗ of lift(local derivatives)``; in ``SUM``, the
    default, that is the gradient as ``torch.autograd.grad`` gives it. Nothing is written on
    ``.grad`` and the graph can be used again.

    In a semiring other than ``SUM``, an operator that connects two elements by several routes and
    is too large to merge them makes values inexact; then a warning is issued, and ``notes`` of the
    result say so.

    Args:
        loss: Loss whose graph is still there: before ``loss.backward()``, or after it with
            ``retain_graph=True``.
        semiring: Replaces (+, ×); see ``gradtrace.semirings``.
        names: ``{name: tensor}`` for leaves; others are called leaf0, leaf1, ...
        leaves: Names of the leaves to return; all by default.
        cotangent: Weights of the elements of a loss that has several, of its shape.
        schedule: Order in which operators are visited: ``"kahn"``, ``"creation"`` or
            ``"recursive"``.
        nonfinite: ``"allow"`` continues where a loss or gradient is NaN or infinite; ``"raise"``
            does not.

    Returns:
        ``{name: value}``, a dictionary with ``notes`` on what is inexact. A value is a tensor, or a
        tuple of them where the semiring's values have several parts.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> gradtrace.backward(x * x, names={"x": x})
    {'x': tensor(6.)}
    """
    return Session(names).backward(
        loss,
        semiring,
        leaves=leaves,
        cotangent=cotangent,
        schedule=schedule,
        nonfinite=nonfinite,
    )


def program(
    loss: Tensor,
    *,
    names: Mapping[str, Tensor] | None = None,
    cotangent: Tensor | None = None,
    schedule: str = "kahn",
    dense_limit: int = DENSE_MAX_ENTRIES,
) -> Program:
    """The backward pass of a loss as data: steps of structured linear maps.

    Args:
        loss: Loss whose graph is still there: before ``loss.backward()``, or after it with
            ``retain_graph=True``.
        names: ``{name: tensor}`` for leaves; others are called leaf0, leaf1, ...
        cotangent: Weights of the elements of a loss that has several, of its shape.
        schedule: Order in which operators are visited: ``"kahn"``, ``"creation"`` or
            ``"recursive"``.
        dense_limit: The most entries of a matrix that an operator without a rule may be written out
            as.

    Returns:
        The recorded program: operators, each with its steps, and the leaves.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> gradtrace.program(x.tanh())
    Program(1 operators, 1 steps, 1 leaves)
    """
    return Session(names).program(
        loss, cotangent=cotangent, schedule=schedule, dense_limit=dense_limit
    )


def trace(
    loss: Tensor,
    *,
    rule: str = "greedy",
    names: Mapping[str, Tensor] | None = None,
    nonfinite: str = "raise",
    dense_limit: int = DENSE_MAX_ENTRIES,
) -> Trace:
    """Trace the gradient of a loss back to its parameters: along which paths did it come?

    Every element of a parameter gets one path to the loss, by a ``rule``:

    - ``"greedy"`` (Algorithm 1 of DuSell): from a value to the operator that handed back the
      largest ``|Σ w·g|`` of all its users; inside it, to the element of the largest ``|w·g|``.
    - ``"edge"`` (Equation 1.7): to the element of the largest ``|w·g|`` of all users at once.
    - ``"viterbi"``: the path of the greatest ``|product|`` of all.

    Here ``w`` is the derivative of an operator's output element by its input element and ``g`` the
    gradient of that output element. Only ``"viterbi"`` finds the heaviest path; the others follow
    gradients, in which paths cancel. All three may differ:

    >>> import torch, gradtrace
    >>> x = torch.tensor(1.0, requires_grad=True)
    >>> y = -x
    >>> loss = x.expand(3).sum() + 2 * x + (5 * y - 4 * y)
    >>> for rule in ("greedy", "edge", "viterbi"):  # expand: 1 + 1 + 1; mul: 2; neg: -5 + 4
    ...     path = gradtrace.trace(loss, rule=rule, names={"x": x}).path("x")
    ...     print(rule, path.operators[0], path.weight)
    greedy ExpandBackward0 1.0
    edge MulBackward0 2.0
    viterbi NegBackward0 -5.0

    A vector of losses is traced as separate pairs of input and target, one for each loss.

    Args:
        loss: Loss whose graph is still there: before ``loss.backward()``, or after it with
            ``retain_graph=True``.
        rule: Which path an element gets, as above.
        names: ``{name: tensor}`` for leaves; others are called leaf0, leaf1, ...
        nonfinite: ``"allow"`` continues where a loss or gradient is NaN or infinite; ``"raise"``
            does not.
        dense_limit: The most entries of a matrix that an operator without a rule may be written out
            as.

    Returns:
        The trace, which answers ``path``, ``influence``, ``decompose`` and the rest.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> found = gradtrace.trace(x.tanh() + x * 0.5, names={"x": x})
    >>> found.path("x").operators
    ['MulBackward0', 'AddBackward0']
    """
    return Session(names).trace(
        loss,
        rule=rule,
        nonfinite=nonfinite,
        dense_limit=dense_limit,
    )
