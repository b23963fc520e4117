"""Gradient flow: gradient norms along a model's depth, and where they vanish, explode or die.

A backward pass multiplies long sequences of numbers: small ones make the gradient vanish, large
ones make it explode. One streaming pass measures every cotangent, ``‖g‖ = √Σ g[i]²``, and keeps
only the measurements. Terms:

- **Activation side**: the operators on the gradient's path through the activations. Not on it are
  operators that only rearrange leaves, each element once (the transpose of a weight, a slice of a
  fused one, a concatenation, a cast), hooks on leaves, and the operators of
  ``torch.nn.utils.parametrize``. If no input requires grad, it ends where the last parameter is
  used.
- **Depth** of an operator on the activation side: the length of the longest path from the loss,
  whose depth is 0.
- **Profile**: for each depth the operator with the largest norm. Its *top* is the median of the
  first three depths of the model's body (the operators after the loss function), its *end* the
  median of the last tenth, so that no single operator decides.
- **Uses** of a leaf at many depths, as in a recurrent net, are a separate sequence. The profile
  alone may hide that they vanish, since each step passes the gradient to its own input too.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradtrace.flow.norms import TOP, Modules
from gradtrace.flow.operator_graph import Level, OperatorGraph
from gradtrace.flow.sizing import Size, measure
from gradtrace.flow.words import NormWords
from gradtrace.ir.program import Program
from gradtrace.table import Column, Table

__all__ = ["TOP", "Level", "Size", "measure", "norms_of", "profile_of"]

COLUMNS = (
    Column("module"),
    Column("depth", "count"),
    Column("norm", "number"),
    Column("gain", "number"),
    Column("zeros", "share"),
    Column("own", "number"),
    Column("verdict"),
)


def norms_of(
    program: Program,
    names: Mapping[int, str],
    classes: Mapping[str, str],
    size: Mapping[int, Size] | None = None,
) -> Table:
    """The norms of a program's cotangents by module, nearest to the loss first.

    One pass keeps no cotangent. ``names`` are the leaves' names by value, ``classes`` the classes
    of a model's modules by name; ``size`` is what ``measure`` found, if it is known.

    >>> import torch, gradtrace
    >>> y = x = torch.ones(4, requires_grad=True)
    >>> for _ in range(30):
    ...     y = (0.5 * y).tanh()
    >>> table = gradtrace.trace(y.sum(), names={"x": x}).norms()
    >>> print(table.notes[0])
    Vanishing: the gradient falls from 2 at depth 1 (TanhBackward0) to 7.3e-09 at depth 57 ...
    """
    graph = OperatorGraph(program, measure(program) if size is None else size)
    modules = Modules(graph, names, classes)
    rows = tuple((row.name, *row[1:]) for row in modules.rows)
    deep, notes = len(graph.profile), tuple(NormWords(graph, modules).findings())
    title = f"Gradient norms by module ({deep:,} operators deep)"
    return Table(title, COLUMNS, rows, notes, {"depth": deep})  # type: ignore[arg-type]


def profile_of(program: Program, size: Mapping[int, Size] | None = None) -> tuple[Level, ...]:
    """For each depth, from the loss on, the operator with the largest norm."""
    return OperatorGraph(program, measure(program) if size is None else size).profile
