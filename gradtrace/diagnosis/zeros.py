"""Parameters whose gradient is 0 everywhere: which operator made it so, and why."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.autodiff.nodes import Node, name_of, sequence_of
from gradtrace.diagnosis.backward_sizes import BackwardSizes
from gradtrace.diagnosis.forward_record import ForwardRecord, Operation, plain, shown
from gradtrace.diagnosis.losses import value_maker
from gradtrace.diagnosis.result import Reason, SilentParameter
from gradtrace.diagnosis.silent import SAMPLES
from gradtrace.flow.tuning import UNDERFLOW_FACTOR

FACTORS = {
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addr", "addcmul", "addcdiv"), (1, 2)),
    "lerp": (2,),
    "trilinear": (0, 1, 2),
}
"""Which arguments are factors, of operators that add another or have more; of others the first
two. Of ``lerp(a, b, weight)`` it is the weight: what it leaves of a and b does not depend on them.
"""

KINDS = {
    Reason.ZERO_FACTOR: "Mul Div Mm Bmm Mv Dot Addmm Baddbmm Addbmm Addmv Addr Addcmul Addcdiv "
    "Lerp Trilinear Convolution Linear Mkldnn NativeDropout Prod",
    Reason.DEAD_RELU: "Relu Threshold ClampMin LeakyRelu",
    Reason.SATURATED: "Sigmoid Tanh Softmax LogSoftmax SafeSoftmax Gelu Silu Mish Elu Softplus Erf "
    "Hardtanh Hardsigmoid Hardswish Clamp ClampMax LogSigmoid LogSigmoidForward Exp Softsign "
    "BinaryCrossEntropy BinaryCrossEntropyWithLogits NativeLayerNorm NativeBatchNorm",
    Reason.NOT_SELECTED: "Where MaskedFill MaskedSelect MaskedScatter Index IndexSelect Gather "
    "Select Slice Narrow Split Unbind Maximum Minimum Max Min MaxPool Topk Sort Embedding NllLoss "
    "AsStrided CopySlices IndexPut Diagonal Stack Cat",
}
"""Operators by what it means that they make a gradient 0; of all others the derivative is 0."""

AVERAGES = frozenset(("Sum", "Mean", "Div", "Mul", "Neg", "View", "Squeeze", "Unsqueeze", "Alias"))
"""Operators by which a loss is the sum or the mean of one value."""

BY_NAME = {name: reason for reason, names in KINDS.items() for name in names.split()}

ADVICE = {
    Reason.ZERO_FACTOR: "find the factor that is 0 (a mask, a coefficient, weights that begin at 0 "
    "and are not trained) and change it.",
    Reason.PLACEHOLDER: "none, if it is there so that each parameter has a gradient, as "
    "DistributedDataParallel wants it; the parameters learn nothing by it.",
    Reason.DEAD_RELU: "a smaller learning rate, another initialisation (He), inputs that are "
    "normalised, or a leaky slope bring it back.",
    Reason.CONSTANT: "none if every margin is met: there is nothing to learn from this batch. Else "
    "check the sign of what goes in, and the margin.",
    Reason.SATURATED: "keep the inputs small: normalise them, scale the weights down, or use a "
    "loss that takes logits.",
    Reason.ONE_CLASS: "the softmax of a single score is 1, whatever the score: give the model an "
    "output for each class, or use binary_cross_entropy_with_logits.",
    Reason.FLAT: "its derivative is 0 at what goes in: look whether that is 0, or equal to what it "
    "is compared with.",
    Reason.NOT_SELECTED: "check the mask, index or condition: it leaves out all that this part "
    "computes.",
    Reason.NO_SAMPLES: "in one batch this may be chance; if it goes on, look at what hands out the "
    "samples: a router's bias, a mask, a condition.",
    Reason.UNDERFLOW: "scale the loss (torch.amp.GradScaler), or use bfloat16, whose range is that "
    "of float32.",
    Reason.HOOK: "look at what register_hook or register_full_backward_hook was called with there; "
    "a hook that returns None leaves the gradient as it is.",
    Reason.CANCELLED: "usually none: what reaches it adds up to 0.",
}
"""What to do about each reason that the gradient is 0."""


STEPS = (
    "the operator's derivative is 0 everywhere; use a smooth one, or a straight-through estimator: "
    "x + (x.round() - x).detach()."
)
BOUNDS = (
    "all of it lies outside of the bounds, where the derivative is 0: widen them, lower what goes "
    "in, or bound it by a tanh."
)
BY_KIND = {
    **dict.fromkeys(("Round", "Floor", "Ceil", "Trunc", "Sign", "Sgn", "Fix", "Div"), STEPS),
    **dict.fromkeys(("Normal", "Bernoulli", "Poisson", "Binomial", "StandardGamma"), SAMPLES),
    **dict.fromkeys(("Clamp", "ClampMax", "ClampMin", "Hardtanh", "Hardsigmoid"), BOUNDS),
}
"""What to do about zeros of these operators, where it is more than the reason tells."""

FACTOR_ADVICE = {
    "warning": "mend what makes it 0, and gets no gradient itself.",
    "note": "usually none: the factor is trained, and leaves 0 with the first step.",
}
"""What to do about a factor that is 0 because of something else, or for the first step only."""


def kind_of(node: Node) -> str:
    """``Addmm`` for ``AddmmBackward0``."""
    return _kind(name_of(node))


def _kind(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)


def advice_for(found: SilentParameter) -> str:
    """What to do about a gradient that is 0."""
    advice = ADVICE[found.reason]
    if found.reason is Reason.ZERO_FACTOR:
        return FACTOR_ADVICE.get(found.severity, advice)
    if found.reason in (Reason.FLAT, Reason.SATURATED):
        return BY_KIND.get(_kind(found.operator), advice)
    return advice


def _factors_of(name: str) -> tuple[int, ...]:
    """Which arguments of an operator or function are multiplied."""
    return FACTORS.get(name.lower(), (0, 1))


def _rounds(node: Node) -> bool:
    """Whether this is a division with ``rounding_mode``, whose derivative is 0 everywhere."""
    return kind_of(node) == "Div" and bool(getattr(node, "_saved_rounding_mode", None))


def reason_of(kind: str) -> Reason:
    """What it means that an operator of this kind makes a gradient 0."""
    reason = next((r for n, r in BY_NAME.items() if re.fullmatch(rf"{n}\d*[dD]?", kind)), None)
    return reason or (Reason.ZERO_FACTOR if kind.startswith("Mkldnn") else Reason.FLAT)


@dataclass(eq=False)
class ZeroFinder:
    """Finds the operators that a gradient reaches and does not leave."""

    sizes: BackwardSizes
    record: ForwardRecord | None
    modules: dict[Node, str]
    named: Mapping[int, str]  # values of parameters

    def cause(self, name: str, leaf: Node) -> SilentParameter:
        """Why the gradient of a leaf is 0 everywhere."""
        found = self._killers(leaf)
        module = name.rpartition(".")[0]
        if not found:
            return SilentParameter(name, module, Reason.CANCELLED, severity="note")
        node, child = found[0]
        operation = None if self.record is None else self.record.of_node(sequence_of(node))
        reason = self._reason(node, child)
        if operation is not None and reason in (Reason.SATURATED, Reason.NOT_SELECTED):
            reason = self._bounded(node, operation, reason)
        if reason is Reason.DEAD_RELU and operation is not None and not operation.inside:
            reason = Reason.CONSTANT if self._is_loss(node) else reason
        if reason is Reason.ZERO_FACTOR and is_placeholder(self.record, operation):
            reason = Reason.PLACEHOLDER
        line = "" if operation is None or operation.where.line is None else operation.where.line
        return SilentParameter(
            name,
            module,
            reason,
            str(line),
            name_of(node),
            self._evidence(node, child, reason, operation),
            self._severity(node, child, reason),
        )

    def _bounded(self, node: Node, operation: Operation, reason: Reason) -> Reason:
        """What it means that a function with bounds makes zeros: a clamp at 0 is a ReLU; that of a
        softmax over one class, which is 1 always, tells of that.
        """
        bounds = kind_of(node).startswith(("Clamp", "Hardtanh", "Hardswish", "Maximum"))
        if bounds and self._is_nothing(operation):
            return Reason.DEAD_RELU
        if not bounds or self.record is None or not operation.inputs:
            return reason
        maker = value_maker(self.record, operation.inputs[0])
        made = () if maker is None or "softmax" not in maker.name else maker.outputs
        extents = [self.record.extent(value) for value in made]
        one = any(each is not None and each.shape[-1:] == (1,) for each in extents)
        return Reason.ONE_CLASS if one else reason

    def _is_loss(self, node: Node) -> bool:
        """Whether the loss is a sum or a mean of what an operator gives, and of nothing else."""
        while users := self.sizes.users.get(node):
            node = users[0]
            if len(users) > 1 or kind_of(node) not in AVERAGES:
                return False
        return True

    def _is_nothing(self, operation: Operation) -> bool:
        """Whether an operation gave nothing but zeros."""
        extents = self.record.extents if self.record is not None else {}
        return any(extents[value].zero for value in operation.outputs if value in extents)

    def _severity(self, node: Node, child: Node, reason: Reason) -> str:
        """An error, unless the other factor of a product is the cause: a note if that is trained,
        and so leaves 0 at the first step, a warning if it gets no gradient either.
        """
        if reason in (Reason.CANCELLED, Reason.PLACEHOLDER):
            return "note"
        if reason is Reason.NO_SAMPLES:
            return "warning"
        if self._zero_coefficient(node, child):
            return "error"
        others = [each for each in self._factors(node) if each is not None and each is not child]
        moving = [each for each in others if not self.sizes.is_zero(each)]
        if reason is not Reason.ZERO_FACTOR or not moving:
            return "error"
        leaves = self.sizes.below(moving)
        return "note" if any(not self.sizes.is_zero(leaf) for leaf in leaves) else "warning"

    def _killers(self, leaf: Node) -> list[tuple[Node, Node]]:
        """Pairs (node, argument): more than zeros reached the node, and nothing the argument."""
        found: list[tuple[Node, Node]] = []
        seen, stack = {leaf}, [leaf]
        while stack:
            child = stack.pop()
            for node in self.sizes.users.get(child, ()):
                if node not in self.sizes.size:
                    continue
                if not self.sizes.is_zero(node):
                    found.append((node, child))
                elif node not in seen:
                    seen.add(node)
                    stack.append(node)
        return sorted(found, key=lambda pair: sequence_of(pair[0]) or 0)

    def _reason(self, node: Node, child: Node) -> Reason:
        kind = kind_of(node)
        if node in self.sizes.empty:
            return Reason.NO_SAMPLES
        if node in self.sizes.stopped:
            return Reason.HOOK
        if self._faint(node, child):
            return Reason.UNDERFLOW
        if "Softmax" in kind and all(x.shape[-1:] == (1,) for x in self.sizes.size[node]):
            return Reason.ONE_CLASS
        if self._zero_scale(node) is not None or self._zero_coefficient(node, child):
            return Reason.ZERO_FACTOR
        reason = Reason.FLAT if _rounds(node) else reason_of(kind)
        if reason is Reason.ZERO_FACTOR and not self._is_factor(node, child):
            return Reason.CANCELLED  # the summand of a product with a bias
        return Reason.CANCELLED if kind in ("Sum", "Expand", "Add", "Sub", "View") else reason

    def _zero_scale(self, node: Node) -> Tensor | None:
        """The weight of a normalisation, if it is 0 everywhere; those of a loss's classes, if they
        are 0 for all that occur.
        """
        kind = kind_of(node)
        is_loss = kind.startswith("NllLoss")
        weight = getattr(node, "_saved_weight", None) if is_loss or "Norm" in kind else None
        if not isinstance(weight, Tensor):
            return None
        target = getattr(node, "_saved_target", None) if is_loss else None
        used = weight if target is None else weight[target[target != node._saved_ignore_index]]
        return weight if used.numel() and not bool(used.any()) else None

    def _zero_coefficient(self, node: Node, child: Node) -> str:
        """The coefficient of an argument, if that is the number 0: ``alpha`` of torch.add(x, y,
        alpha=0) for y, ``beta`` of addmm for the summand, ``value`` of addcmul for the factors.
        """
        edges = self.sizes.edges[node]
        summand = kind_of(node) != "Rsub" and bool(edges) and edges[0][0] is child
        names = ("beta",) if summand else ("alpha", "value")
        if summand and any(each is child for each, _ in edges[1:]):
            return ""
        zero = (name for name in names if _is_number_zero(getattr(node, f"_saved_{name}", None)))
        return next(zero, "")

    def _factors(self, node: Node) -> tuple[Node | None, ...]:
        edges = [child for child, _ in self.sizes.edges[node]]
        return tuple(edges[k] for k in _factors_of(kind_of(node)) if k < len(edges))

    def _is_factor(self, node: Node, child: Node) -> bool:
        return kind_of(node) == "Lerp" or any(each is child for each in self._factors(node))

    def _faint(self, node: Node, child: Node) -> bool:
        """Whether what reached the node was near the smallest float of the argument's dtype."""
        reached = [*self.sizes.size.get(child, ()), *self.sizes.size[node]]
        least = max((_smallest(each.dtype) for each in reached), default=0.0)
        return self.sizes.largest(node) < least * UNDERFLOW_FACTOR

    def _zeros_among(self, node: Node, operation: Operation) -> str:
        """Which factors of an operation are 0 everywhere, by their name or by what made them."""
        record = self.record
        places = _factors_of(plain(operation.name))
        factors = [operation.inputs[k] for k in places if k < len(operation.inputs)]
        if record is not None and (scale := self._zero_scale(node)) is not None:
            if kind_of(node).startswith("NllLoss"):
                return ": the weight= of all classes that occur is 0"
            weight = self.named.get(record.known(scale) or 0, "its weight")
            return f": {weight} is 0"
        if record is None or len(operation.inputs) > 3:  # one that does more than multiply
            return ""
        if "dropout" in operation.name:
            return ": all of it is dropped"
        if kind_of(node) == "Mul" and len(operation.inputs) == 1:
            return ": the other factor is the number 0"
        said = []
        for value in factors:
            extent = record.extent(value)
            if extent is None or not extent.zero:
                continue
            number = record.makers.get(value)
            made = "" if number is None else f"what {shown(record.operations[number])} gives"
            shape = "×".join(map(str, extent.shape)) or "scalar"
            said.append(self.named.get(value) or made or f"an input of shape {shape}")
        return f": {' and '.join(said)} {'is' if len(said) == 1 else 'are'} 0" if said else ""

    def _evidence(
        self, node: Node, child: Node, reason: Reason, operation: Operation | None
    ) -> str:
        module = self.modules.get(node, "")
        where = f"{name_of(node)}{f' (in {module!r})' if module else ''}"
        if reason is Reason.NO_SAMPLES:
            return f"{where} was run on an empty tensor: nothing was handed to this part."
        reached = f"A gradient of up to {self.sizes.largest(node):.2g} reaches {where}"
        if reason is Reason.HOOK:
            return f"{reached}, where a hook makes nothing but zeros of it."
        if operation is None or self.record is None:
            return f"{reached}, and it hands on exactly 0."
        if reason in (Reason.ZERO_FACTOR, Reason.PLACEHOLDER):
            coefficient = self._zero_coefficient(node, child)
            of = f": {coefficient}= is 0" if coefficient else self._zeros_among(node, operation)
            return f"{reached}, and it hands on exactly 0{of}."
        if kind_of(node) == "Embedding":
            return f"{reached}, and it hands on exactly 0{_padded(node)}."
        extents = [self.record.extent(value) for value in operation.inputs]
        known = [each for each in extents if each is not None]
        at = "is" if known and known[0].low == known[0].high else "lies in"
        ranges = f", whose input {at} {known[0]}" if known else ""
        return f"{reached}{ranges}, and it hands on exactly 0."


def is_placeholder(record: ForwardRecord | None, operation: Operation | None) -> bool:
    """Whether an operation is the sum of parameters times a 0 that is written there:
    ``loss + 0 * sum(p.sum() for p in unused.parameters())``, by which those that take no part get a
    gradient. A module that is run and then multiplied by 0 may be meant so too, or be a mistake.
    """
    if record is None or operation is None or plain(operation.name) != "mul":
        return False
    code = operation.where.line.expression if operation.where.line else ""
    if len(operation.inputs) != 1 or not (code == "" or _has_zero(code)):
        return False
    stack = list(operation.inputs)
    while stack:
        maker = record.maker(stack.pop())
        name = "" if maker is None else plain(maker.name)
        if maker is None or name not in ("add", "sum"):
            return False
        if name == "add":
            stack += maker.inputs
            continue
        if any(record.maker(value) is not None for value in maker.inputs):
            return False
    return True


def _has_zero(code: str) -> bool:
    """Whether an expression is a product one factor of which is the number 0."""
    try:
        tree = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    factors = (tree.left, tree.right) if isinstance(tree, ast.BinOp) else ()
    return any(isinstance(each, ast.Constant) and each.value == 0 for each in factors)


def stopped_by_hook(name: str, largest: float) -> SilentParameter:
    """A parameter with a hook of its own that makes zeros of its gradient."""
    evidence = f"A hook on the parameter makes zeros of its gradient, of up to {largest:.2g}."
    module = name.rpartition(".")[0]
    return SilentParameter(name, module, Reason.HOOK, operator="hook", evidence=evidence)


def _is_number_zero(number: object) -> bool:
    return isinstance(number, (int, float)) and number == 0


def _padded(node: Node) -> str:
    """That an embedding is asked for its padding alone, if it has one."""
    row = getattr(node, "_saved_padding_idx", -1)
    known = isinstance(row, int) and 0 <= row < 1 << 62  # -1, as an unsigned number: none
    return f": all of it is for row {row}, the padding_idx" if known else ""


def _smallest(dtype: torch.dtype) -> float:
    """The smallest positive float of a dtype."""
    info = torch.finfo(dtype)
    return float(info.smallest_normal * info.eps)
