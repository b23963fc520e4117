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

from torch import Tensor

from gradtrace.errors import NotScalar
from gradtrace.flow.modules import Modules
from gradtrace.flow.operator_graph import OperatorGraph
from gradtrace.flow.result import Flow, Level, ModuleFlow
from gradtrace.flow.sizing import Size, begin, measure
from gradtrace.flow.words import FlowText
from gradtrace.ir.program import Program

__all__ = ["Flow", "Level", "ModuleFlow", "Size", "begin", "flow_of", "measure"]


def flow_of(
    program: Program,
    names: Mapping[int, str],
    classes: Mapping[str, str],
    seed: Tensor | None = None,
    size: Mapping[int, Size] | None = None,
) -> Flow:
    """The gradient flow of a program, in one pass that keeps no cotangent.

    ``names`` are the leaves' names by value, ``classes`` the classes of a model's modules by name.
    ``seed`` weights the elements of the loss instead of the program's own seed; ``size`` is the
    result of ``measure`` with that seed, if it is already known.

    >>> import torch, gradtrace
    >>> y = x = torch.ones(4, requires_grad=True)
    >>> for _ in range(30):
    ...     y = (0.5 * y).tanh()
    >>> program = gradtrace.program(y.sum())
    >>> names = {leaf.value: f"leaf{i}" for i, leaf in enumerate(program.leaves)}
    >>> flow = flow_of(program, names, {})
    >>> print(flow.verdict)
    Vanishing: the gradient falls from 2 at depth 1 (TanhBackward0) to 7.3e-09 at depth 57 ...
    >>> [round(level.norm, 3) for level in flow.profile[:4]]
    [1.0, 2.0, 2.0, 1.0]
    """
    seed = program.seed if seed is None else seed.to(program.seed)
    if seed.shape != program.seed.shape:
        raise NotScalar(
            f"the seed has shape {tuple(seed.shape)} and the loss {tuple(program.seed.shape)}; "
            "pass a weight for each element of the loss"
        )
    graph = OperatorGraph(program, measure(program, seed, norms=True) if size is None else size)
    modules = Modules(graph, names, classes)
    return Flow(graph.profile, modules.rows, tuple(FlowText(graph, modules).findings()))
