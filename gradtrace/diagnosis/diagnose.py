"""Puts a diagnosis together: from a loss, a model's names, and the record of its forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from gradtrace.autodiff.backward import first_bad_gradient, seed_of
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import NameTable
from gradtrace.autodiff.nodes import ACCUMULATE, Node, maker_of, sequence_of
from gradtrace.diagnosis import balance, nonfinite, silent, zeros
from gradtrace.diagnosis.backward_sizes import BackwardSizes, backward_sizes
from gradtrace.diagnosis.forward_record import EXITS, ForwardRecord, Operation
from gradtrace.diagnosis.result import (
    SEVERITIES,
    Diagnosis,
    Finding,
    NonFiniteValue,
    Reason,
    SilentParameter,
    common_module,
    listed,
)
from gradtrace.errors import GradtraceError
from gradtrace.pytorch.wrapped_modules import join, named_modules, named_parameters
from gradtrace.trace import Trace

PLAIN = "Watch with gt.watch(model, diagnose=True), and the lines of your code are named."


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


@dataclass(eq=False)
class Subject:
    """What is diagnosed: a model (its outermost modules by name) and what a watch saw of it."""

    roots: Mapping[str, nn.Module]
    names: NameTable
    hooks: HookWatch
    called: set[str]  # modules
    record: ForwardRecord | None
    trace: Callable[[Tensor], Trace]


@dataclass(eq=False)
class Diagnoser:
    """One diagnosis."""

    subject: Subject
    loss: Tensor | float
    remarks: list[str] = field(default_factory=list)

    @cached_property
    def _sizes(self) -> BackwardSizes:
        loss = self.loss
        if not isinstance(loss, Tensor) or maker_of(loss) is None:
            return BackwardSizes()
        return backward_sizes(loss, self.subject.names, self.subject.hooks)

    def diagnosis(self) -> Diagnosis:
        """All findings, worst first."""
        bad = self._bad_value()
        missing = list(self._silent())
        found = [*self._failure(), *_grouped(missing), *self._unregistered()]
        if bad is None and isinstance(self.loss, Tensor) and self._sizes.leaves:
            silent_modules = {each.module for each in missing}
            found += self._unbalanced(self.loss, silent_modules)
        if bad is not None:
            found.insert(0, nonfinite.finding_of(bad, self._bad_gradients))
        found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        if self.subject.record is None and any(f.severity != "note" for f in found):
            self.remarks.append(PLAIN)
        kept = [each for each in missing if each.severity != "note"]
        return Diagnosis(tuple(found), tuple(kept), bad, self._unused_rows(), tuple(self.remarks))

    # Values that are not finite ------------------------------------------------------------------

    @cached_property
    def _bad_gradients(self) -> tuple[str, ...]:
        reached, sizes = self._sizes.leaves, self._sizes.size
        return tuple(
            name
            for name, parameter in self._parameters()
            if id(parameter) in reached and any(e.bad for e in sizes[reached[id(parameter)][0]])
        )

    def _bad_value(self) -> NonFiniteValue | None:
        """The first value that is NaN or infinite, if the loss or a gradient is."""
        loss, record, origins = self.loss, self.subject.record, None
        if record is not None and not record.unmeasured:
            leaves = self.subject.names.leaves.values()
            names = {v: names[0] for leaf, names in leaves for v in record.values(leaf)}
            origins = nonfinite.Origins(record, names)
        if nonfinite.is_bad(loss):
            found = None if origins is None else origins.origin(self._roots, "loss")
            return found or NonFiniteValue("loss", "", "", "", float(torch.as_tensor(loss).sum()))
        if not self._bad_gradients or not isinstance(loss, Tensor):
            return None
        subject = self.subject
        seed = seed_of(loss, None if loss.numel() == 1 else torch.ones_like(loss))
        began = first_bad_gradient(loss, seed, subject.names, subject.hooks)
        if began is None:
            return NonFiniteValue("gradient", "", "", "", float("nan"))
        reached = self._sizes.size.get(began[0].node, ())
        return nonfinite.of_gradient(began[0], began[1].module, origins, reached)

    # Silent parameters ---------------------------------------------------------------------------

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for tensor, names in self.subject.names.leaves.values():
            if isinstance(tensor, nn.Parameter):
                yield names[0], tensor

    def _silent(self) -> Iterator[SilentParameter]:
        sizes = self._sizes
        cuts, nil = self._cut_finder(), self._zero_finder()
        beyond = {id(node.variable) for node in sizes.below(sizes.closed)}
        for name, parameter in self._parameters():
            if not parameter.requires_grad or id(parameter) in beyond:
                continue
            reached = sizes.leaves.get(id(parameter))
            cause: SilentParameter | None = None
            if reached is None and not sizes.failure:
                cause = self._missing(cuts, name, parameter)
            elif reached is not None and sizes.is_zero(reached[0]):
                cause = nil.cause(name, reached[0])
            if cause is not None:
                yield cause

    def _missing(
        self, cuts: silent.CutFinder | None, name: str, parameter: Tensor
    ) -> SilentParameter | None:
        if cuts is not None:
            cause = cuts.cause(name, parameter, name in self._replaced)
            unseen = self._unseen(name) if cause and cause.reason is Reason.UNUSED else ""
            return replace(cause, reason=Reason.CUT, evidence=unseen) if cause and unseen else cause
        module = name.rpartition(".")[0]
        if module not in self.subject.called:
            return SilentParameter(name, module, Reason.NEVER_CALLED)
        if self._sizes.closed:  # a reentrant checkpoint may give it a gradient
            return None
        return SilentParameter(name, module, Reason.CUT)

    def _unseen(self, name: str) -> str:
        """Why the operations of a parameter's module were not recorded; empty if they were."""
        for prefix, root in self.subject.roots.items():
            owners = {join(prefix, key): module for key, module in named_modules(root)}
            if isinstance(owners.get(name.rpartition(".")[0]), torch.jit.ScriptModule):
                return "Its module is compiled by TorchScript, whose operations are not recorded."
        away = "Modules ran on another thread, where operations are not recorded."
        return away if self.subject.names.away else ""

    @cached_property
    def _replaced(self) -> set[str]:
        """The names under which the model now has another parameter than when it was watched."""
        now = {
            join(prefix, name): parameter
            for prefix, root in self.subject.roots.items()
            for name, parameter in named_parameters(root)
        }
        known = self.subject.names.leaves.values()
        return {
            name for tensor, names in known for name in names if now.get(name, tensor) is not tensor
        }

    def _cut_finder(self) -> silent.CutFinder | None:
        record = self.subject.record
        if record is None:
            return None
        return silent.CutFinder(record, self._roots, self._sizes.numbers, self.subject.called)

    @cached_property
    def _roots(self) -> set[int]:
        """The values that the loss is; where it was not seen, all that it may be made of."""
        record = self.subject.record
        roots = set[int]()
        if record is None:
            return roots
        if isinstance(self.loss, Tensor) and (value := record.known(self.loss)) is not None:
            roots = {value}
        elif not isinstance(self.loss, Tensor):
            exits = [each for each in record.operations if each.name in EXITS]
            roots = set(exits[-1].outputs) if exits else set()
        if not roots:
            self.remarks.append(
                "The loss was computed outside of the watch; compute it inside to have all seen."
            )
            roots = record.alive() & record.makers.keys()  # not the parameters themselves
        return roots

    @cached_property
    def _modules(self) -> dict[Node, str]:
        order, table = self._sizes.order, self.subject.names
        return {n: table.place_of(n).module for n in order if type(n) is not ACCUMULATE}

    def _zero_finder(self) -> zeros.ZeroFinder:
        return zeros.ZeroFinder(self._sizes, self.subject.record, self._modules)

    # Gradients that are too small or too large ---------------------------------------------------

    def _unbalanced(self, loss: Tensor, told: set[str]) -> Iterator[Finding]:
        subject, sizes = self.subject, self._sizes
        named = {name: id(parameter) for name, parameter in self._parameters()}
        reached = {n: sizes.leaves[key][1] for n, key in named.items() if key in sizes.leaves}
        yield from balance.expert_findings(reached)
        yield from balance.underflow_findings(sizes, self._modules, subject.record)
        if sizes.failure or sizes.closed:
            return
        terms = balance.LossTerms(loss, sizes, subject.names, subject.hooks, subject.record)
        yield from terms.findings()
        try:
            flow = subject.trace(loss).flow()
        except GradtraceError as error:
            self.remarks.append(f"Whether gradients vanish or explode was not measured: {error}")
            return
        yield from balance.flow_findings(flow)
        yield from balance.branch_findings(flow, told)

    # Others --------------------------------------------------------------------------------------

    def _failure(self) -> Iterator[Finding]:
        parameters = [parameter for _, parameter in self._parameters()]
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            advice = "call requires_grad_() on those that are to be trained."
            yield Finding("frozen", "error", "no parameter requires grad", advice=advice)
        if self._sizes.failure:
            record, node = self.subject.record, self._sizes.failed
            operation = None if record is None else record.of_node(sequence_of(node))
            line = "" if operation is None else str(operation.where.line or "")
            if found := UNDERIVED.search(self._sizes.failure):
                name, _, argument = found[1].partition(": ")
                yield self._underived(name, argument, operation)
                return
            yield Finding(
                "backward",
                "error",
                "the backward pass fails",
                line=line,
                evidence=self._sizes.failure,
                advice="mend this first; gradients behind it are unknown.",
            )

    def _underived(self, name: str, argument: str, operation: Operation | None) -> Finding:
        """The finding of an operator without a derivative. The node of some has no number, so that
        ``operation`` is another; then it is the last of that name.
        """
        names = {name, f"{name}_", f"special_{name}", *ALIASES.get(name, ())}
        record = self.subject.record
        if operation is None or operation.name not in names:
            all_of_them = [] if record is None else record.operations
            operation = next((each for each in reversed(all_of_them) if each.name in names), None)
        if operation is None:
            return no_derivative(name, argument, "", "")
        return no_derivative(name, argument, operation.module, str(operation.where.line or ""))

    def _unregistered(self) -> Iterator[Finding]:
        """Parameters that get a gradient, and that the model does not list."""
        for prefix, root in self.subject.roots.items():
            listed_ids = {id(parameter) for _, parameter in named_parameters(root)}
            reached = self._sizes.leaves.keys() - listed_ids
            for name, module, holder in _held(prefix, root):
                own = module.named_parameters()
                lost = tuple(f"{name}.{key}" for key, p in own if id(p) in reached)
                if lost:
                    yield Finding(
                        "unregistered",
                        "error",
                        f"not registered: {listed(lost)}",
                        name.rpartition("[")[0],
                        lost,
                        evidence="They get a gradient, but model.parameters() does not list them: "
                        f"'{name}' lies in a plain {holder}, so that no optimiser moves it, and no "
                        "checkpoint has it.",
                        advice="use nn.ModuleList or nn.ModuleDict.",
                    )

    def _unused_rows(self) -> dict[str, tuple[int, int]]:
        """Rows of embeddings with gradient 0: words that do not occur."""
        tables = {
            id(module.weight)
            for root in self.subject.roots.values()
            for _, module in named_modules(root)
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        }
        found = {}
        for name, parameter in self._parameters():
            reached = self._sizes.leaves.get(id(parameter))
            if id(parameter) in tables and reached is not None:
                rows = int((reached[1].reshape(len(parameter), -1) == 0).all(1).sum())
                if 0 < rows < len(parameter):
                    found[name] = rows, len(parameter)
        return found


def _held(prefix: str, root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules in plain lists, tuples and dicts that are attributes of a model's modules."""
    for name, module in named_modules(root):
        for key, value in vars(module).items():
            if key.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for at, each in pairs:
                if isinstance(each, nn.Module):
                    place = join(join(prefix, name), f"{key}[{at!r}]")
                    yield place, each, type(value).__name__


def _grouped(missing: Iterable[SilentParameter]) -> Iterator[Finding]:
    """One finding for all parameters that are silent for the same reason at the same line."""
    groups: dict[tuple[str, ...], list[SilentParameter]] = {}
    for each in missing:
        apart = each.module if each.reason in (Reason.NEVER_CALLED, Reason.UNUSED) else ""
        key = (each.reason, each.line or each.operator, each.severity, apart.partition(".")[0])
        groups.setdefault(key, []).append(each)
    for group in groups.values():
        first, names = group[0], tuple(each.parameter for each in group)
        advice = {**silent.ADVICE, **zeros.ADVICE}[first.reason]
        if first.reason is Reason.DETACHED:
            advice = silent.INSTEAD.get(first.operator, advice)
        zero = first.reason in zeros.ADVICE
        what = "gradient is exactly 0" if zero else "no gradient"
        if zero and first.severity == "note" and first.reason is Reason.ZERO_FACTOR:
            advice = "usually none: the factor is trained, and leaves 0 with the first step."
        yield Finding(
            "zero gradient" if zero else "silent",
            first.severity,
            f"{what}: {listed(names)} ({first.reason})",
            common_module([each.module for each in group]),
            names,
            first.line,
            first.evidence,
            advice,
        )


def diagnosed(subject: Subject, loss: Tensor | float) -> Diagnosis:
    """The diagnosis of a loss; see ``gradtrace.watch.diagnose``."""
    if not isinstance(loss, (Tensor, float, int)):
        raise GradtraceError(
            f"expected the loss tensor, got {type(loss).__name__}; pass the tensor that you would "
            "call .backward() on (for a model output object, its .loss)"
        )
    return Diagnoser(subject, loss).diagnosis()
