"""Parameters that the gradient does not reach: where the graph is cut, by the forward record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from gradtrace.diagnosis.forward_record import EXITS, ForwardRecord, Operation, shown
from gradtrace.diagnosis.result import Reason, SilentParameter

ADVICE = {
    Reason.NEVER_CALLED: "call the module in forward, or remove it (requires_grad_(False) if it is "
    "meant to rest).",
    Reason.UNUSED: "use the parameter in forward, or remove it.",
    Reason.REPLACED: "forward assigns a new tensor to this name; the optimiser still holds the old "
    "one. Change values under torch.no_grad() with copy_(), or compute a new tensor of the "
    "parameter and keep that in a local variable.",
    Reason.NO_GRAD: "run this part with gradients on: take it out of torch.no_grad(), or call a "
    "function that leaves them on; if it is meant to be frozen, say so with requires_grad_(False).",
    Reason.INFERENCE: "run this part outside torch.inference_mode(); if it is meant to be frozen, "
    "say so with requires_grad_(False).",
    Reason.DETACHED: "replace the operation by one with a derivative: softmax or Gumbel-softmax "
    "for argmax, sigmoid for a comparison, a straight-through estimator for integers.",
    Reason.UNREACHED: "add what is computed from it to the loss, or remove it; check that forward "
    "returns the value that you mean.",
    Reason.CHECKPOINT: "pass use_reentrant=False to torch.utils.checkpoint.checkpoint.",
    Reason.FUNCTION: "return a gradient for this argument from the function's backward.",
    Reason.CUT: "look for nn.Parameter(x), detach(), no_grad and values that are not returned, "
    "between this module and the loss.",
}
"""What to do about each reason that no gradient arrives."""

_LEAVE_OUT = (
    "leave it out; if it is meant, let another term of the loss train the part, or freeze it with "
    "requires_grad_(False)."
)
SAMPLES = (
    "no gradient passes through a sample: use rsample() where the distribution has it, "
    "Gumbel-softmax, or log_prob() of the sample times the reward."
)
SAMPLERS = (
    "sample",
    "normal",
    "multinomial",
    "bernoulli",
    "binomial",
    "poisson",
    "_standard_gamma",
)
_IN_TORCH = "compute with tensors: the functions of torch that do the same have a derivative."
_KEEP = "keep the tensor, and compute with it; item() and float() are for printing and logging."
INSTEAD = {
    **dict.fromkeys(("detach", "detach_", ".data", "tensor", "new_tensor"), _LEAVE_OUT),
    **dict.fromkeys(SAMPLERS, SAMPLES),
    **dict.fromkeys(("item", "__float__"), _KEEP),
    **dict.fromkeys(("numpy", "__array__", "tolist"), _IN_TORCH),
}
"""What to do about operators that detach."""

ENTRIES = frozenset(("numpy", "__array__", "tolist", "__dlpack__"))
"""Exits whose numbers usually come back, changed, as another tensor."""


def advice_for(found: SilentParameter) -> str:
    """What to do about a parameter that the gradient does not reach."""
    advice = ADVICE[found.reason]
    if found.reason is Reason.DETACHED or found.operator in SAMPLERS:
        return INSTEAD.get(found.operator, advice)
    return advice


@dataclass(eq=False)
class CutFinder:
    """Finds why parameters and loss are not connected.

    ``roots`` are the values that the loss is (or may have been made of), ``graph`` the sequence
    numbers of the nodes behind it, ``called`` the modules that were called.
    """

    record: ForwardRecord
    roots: set[int]
    graph: set[int]
    called: set[str]

    @cached_property
    def _above(self) -> set[int]:
        return self.record.above(self.roots)

    def cause(self, name: str, parameter: Tensor, replaced: bool) -> SilentParameter | None:
        """Why a parameter gets no gradient; None if a reentrant checkpoint gives it one."""
        module = name.rpartition(".")[0]
        values = self.record.values(parameter)
        uses = [op for op in self.record.uses(values) if not set(op.outputs) <= set(values)]
        below = self.record.below(values)
        reaches = not self.roots.isdisjoint(below)
        if replaced and not uses:
            return SilentParameter(name, module, Reason.REPLACED)
        if module not in self.called and not reaches and not any(op.inside for op in uses):
            return SilentParameter(name, module, Reason.NEVER_CALLED)
        if not uses:
            return SilentParameter(name, module, Reason.UNUSED)
        if self._carried(values):
            return None
        if not reaches:
            return self._unreached(name, module, below)
        on_path = [
            operation
            for operation in self.record.uses(below & self._above)
            if not self._above.isdisjoint(operation.outputs)
        ]
        found = self._cut(values, on_path)
        if found is None:
            inner = next((each for each in on_path if each.off), None)
            if inner is not None:
                return _blamed(name, module, Reason.FUNCTION, inner)
            reason = Reason.REPLACED if replaced else Reason.CUT
            return self._past(name, module, on_path) or _blamed(
                name, module, reason, on_path[0] if on_path else None
            )
        return _blamed(name, module, _reason(found), found)

    def _past(self, name: str, module: str, on_path: list[Operation]) -> SilentParameter | None:
        """Where values are written past the graph: ``out.data.copy_(h)``."""
        for operation in on_path:
            makers = (self.record.maker(value) for value in operation.inputs)
            past = next(
                (each for each in makers if each and each.name in (".data", "detach")), None
            )
            if past is not None:
                evidence = f"{shown(operation)} writes to what {shown(past)} gives: the tensor "
                evidence += "that has the same memory knows of no gradient."
                found = _blamed(name, module, Reason.DETACHED, past)
                return replace(found, evidence=evidence, operator=past.name)
        return None

    def _cut(self, values: Iterable[int], on_path: list[Operation]) -> Operation | None:
        """The first operation that cuts the way: one that alone does, if there is any."""
        cuts = [each for each in on_path if each.cuts(self._above)]
        if len(cuts) < 2:
            return cuts[0] if cuts else None
        before = self.record.below(values, self._passes)
        alone = (
            each
            for each in cuts
            if not before.isdisjoint(each.inputs) and not self._open.isdisjoint(each.outputs)
        )
        return next(alone, cuts[0])

    def _passes(self, operation: Operation) -> bool:
        return not operation.cuts(self._above)

    @cached_property
    def _open(self) -> set[int]:
        """The values from which a gradient would reach the loss, if they had one."""
        return self.record.above(self.roots, self._passes)

    def _carried(self, values: Iterable[int]) -> bool:
        """Whether a reentrant checkpoint of the loss's graph uses one of the values."""
        inside = set(values)
        stack = list(inside)
        while stack:
            for operation in self.record.uses((stack.pop(),)):
                if operation.off == "checkpoint":
                    stack += [each for each in operation.outputs if each not in inside]
                    inside.update(operation.outputs)
        return any(self.record.wrapped.get(each) in self.graph for each in inside)

    def _unreached(self, name: str, module: str, below: Iterable[int]) -> SilentParameter:
        """The reason where not even detached values lead to the loss."""
        uses = self.record.uses(below)
        exits = [operation for operation in uses if operation.name in EXITS]
        ends = [each for each in uses if not self.record.uses(each.outputs)]
        read = [op for op in exits if op.name in ENTRIES or (op.inside and op in ends)]
        if not read and not self.graph and exits:  # the loss is a number that was read
            read = exits[-1:]
        if read:
            return _blamed(name, module, Reason.DETACHED, read[0])
        if any(each.batched for each in ends):  # what a transform returns is not recorded
            cut = next((each for each in uses if each.needs and not each.gives), None)
            if cut is not None:
                return _blamed(name, module, _reason(cut), cut)
        also = f"; its values are read by {shown(exits[0])}, {exits[0].line}" if exits else ""
        last = uses[-1]
        evidence = f"Nothing that is computed from it is part of the loss{also}; it is last used by"
        return SilentParameter(
            name,
            module,
            Reason.UNREACHED,
            str(last.line or ""),
            last.name,
            f"{evidence} {shown(last)}.",
        )


def _reason(operation: Operation) -> Reason:
    if operation.where.drawn and operation.off != "inference_mode":
        return Reason.DETACHED
    by_mode = {
        "no_grad": Reason.NO_GRAD,
        "inference_mode": Reason.INFERENCE,
        "checkpoint": Reason.CHECKPOINT,
        "function": Reason.FUNCTION,
    }
    return by_mode.get(operation.off, Reason.DETACHED)


def _blamed(name: str, module: str, reason: Reason, operation: Operation | None) -> SilentParameter:
    if operation is None:
        return SilentParameter(name, module, reason)
    drawn = operation.where.drawn
    if drawn is not None and reason is Reason.DETACHED:
        evidence = f"{drawn.name}.sample() draws without a derivative; "
        evidence += "its rsample() has one." if drawn.rsample else "it has no rsample()."
        line = str(operation.where.line or "")
        return SilentParameter(name, module, reason, line, "sample", evidence)
    same = str(operation.where.line) == str(operation.line)
    off = f"by {operation.off_by}()" if operation.off_by else "here"
    said = {
        Reason.NO_GRAD: f"Gradients were turned off {off}; the first operation without a graph is "
        f"{shown(operation)}{'' if same else f', {operation.where.line}'}.",
        Reason.INFERENCE: f"{shown(operation)} ran in inference mode"
        f"{'' if same else f', {operation.where.line}'}.",
        Reason.CHECKPOINT: f"{shown(operation)} ran inside a reentrant checkpoint, none of whose "
        f"inputs requires grad{'' if same else f', {operation.where.line}'}.",
        Reason.FUNCTION: f"{shown(operation)} ran inside a torch.autograd.Function, which handed "
        "back no gradient.",
        Reason.DETACHED: f"{shown(operation)} reads its numbers into Python, where no gradient "
        "follows them."
        if operation.name in EXITS
        else f"The input of {shown(operation)} requires grad, its output does not.",
    }
    said[Reason.CUT] = said[Reason.REPLACED] = (
        f"What {shown(operation)} makes of it goes on as a new leaf."
    )
    line = str(operation.line or "")
    return SilentParameter(name, module, reason, line, operation.name, said.get(reason, ""))
