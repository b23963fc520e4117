"""How large the gradient is along the depth of a model, and where it vanishes, explodes or dies.

A backward pass multiplies long sequences of numbers: small ones make the gradient vanish, large
ones make it explode. One streaming pass measures every cotangent, ``‖g‖ = √Σ g[i]²``, and keeps
that alone. What one reads off it:

- **Activation side.** An operator above leaves that only moves their elements, each once (the
  transpose of a weight, a slice of a fused one, a concatenation, a cast), lies beside the way that
  gradient takes through the activations; so do a hook on a leaf and what
  ``torch.nn.utils.parametrize`` makes of leaves. Every other operator lies on it. Without an input
  that requires grad, it ends where the last parameter is used.
- **Depth** of an operator on the activation side: the most operators between it and the loss, whose
  own is 0.
- **Profile**: for each depth the operator with the largest norm. Its *top* is the median of the
  first three depths of the model's body (what follows the loss function), its *end* the median of
  the last tenth, so that no odd operator decides.
- **Uses** of a leaf at many depths, as in a recurrent net, are a sequence of their own: below it
  the profile may be as large as ever, since each step hands to its input what it gets.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gradtrace.errors import NotScalar
from gradtrace.flow.depth import Measured, Modules
from gradtrace.flow.result import Flow, Level, ModuleFlow
from gradtrace.flow.sizing import OperatorGraph, Size, losses_of, measure
from gradtrace.flow.words import FlowText
from gradtrace.ir.program import Program

__all__ = ["Flow", "Level", "ModuleFlow", "Size", "flow_of", "measure"]


def flow_of(
    program: Program,
    names: Mapping[int, str],
    classes: Mapping[str, str],
    seed: Tensor | None = None,
    size: Mapping[int, Size] | None = None,
) -> Flow:
    """The gradient along the depth of a program, in one pass that keeps no cotangent.

    ``names`` are those of the leaves by value, ``classes`` those of a model's modules by name, and
    ``seed`` weighs the elements of the loss in place of the program's own; ``size`` is what
    ``measure`` found with it, if somebody has measured already.

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
    size = measure(program, seed) if size is None else size
    wiring = OperatorGraph(program, size)
    flow = Measured(wiring, size, losses_of(wiring, size))
    modules = Modules(flow, names, classes)
    return Flow(flow.profile, modules.rows, tuple(FlowText(flow, modules).findings()))
