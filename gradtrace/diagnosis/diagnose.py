"""Puts a diagnosis together: from a loss, a model's names, and the record of its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtrace.autodiff.backward import first_bad_gradient, seed_of
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import NameTable
from gradtrace.autodiff.nodes import ACCUMULATE, Node, maker_of
from gradtrace.diagnosis import (
    balance,
    failures,
    losses,
    nonfinite,
    samples,
    silent,
    training_step,
    zeros,
)
from gradtrace.diagnosis.backward_sizes import BackwardSizes, backward_sizes
from gradtrace.diagnosis.branches import Branches
from gradtrace.diagnosis.forward_record import EXITS, ForwardRecord
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
from gradtrace.diagnosis.unregistered import unregistered
from gradtrace.errors import GradtraceError
from gradtrace.pytorch.wrapped_modules import join, named_modules, named_parameters
from gradtrace.traced import Trace

PLAIN = "Watch with gt.watch(model, diagnose=True), and the lines of your code are named."


@dataclass(eq=False)
class Subject:
    """What is diagnosed: a model (its outermost modules by name) and what a watch saw of it."""

    roots: Mapping[str, nn.Module]
    names: NameTable
    hooks: HookWatch
    called: set[str]  # modules
    record: ForwardRecord | None
    trace: Callable[[Tensor], Trace]
    optimizers: Sequence[Optimizer] = ()
    cut_short: bool = False  # there were more operations than were recorded


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
        found = [*self._failure(), *_grouped(missing, bad), *self._unregistered()]
        found += self._step({each.line for each in missing})
        if bad is None and isinstance(self.loss, Tensor) and self._sizes.leaves:
            found += self._unbalanced(self.loss, missing)
        if bad is not None:
            found.insert(0, nonfinite.finding_of(bad, self._bad_gradients))
        found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        rows = self._unused_rows()
        self._remark(healthy=all(finding.severity == "note" for finding in found))
        kept = [each for each in missing if each.severity != "note"]
        return Diagnosis(tuple(found), tuple(kept), bad, rows, tuple(self.remarks))

    def _remark(self, healthy: bool) -> None:
        """Say what else there is to know, and what was not looked at."""
        parameters, record = list(self._parameters()), self.subject.record
        if frozen := training_step.frozen_remark(parameters):
            self.remarks.append(frozen)
        if not healthy:
            self.remarks += [PLAIN] if record is None else []
            return
        left_out = []
        if self.subject.cut_short:
            left_out.append(
                "the forward pass, of over 5,000 operations (gt.watch(..., diagnose=True))"
            )
        elif record is None or record.unmeasured:
            left_out.append("the values of the forward pass (gt.watch(model, diagnose=True))")
        optimiser = bool(self.subject.optimizers)
        self.remarks.append(training_step.scope_remark(parameters, optimiser, left_out))

    def _step(self, told: set[str]) -> Iterator[Finding]:
        """What else keeps it from learning: the optimiser, what is left over, a wrong loss. Of
        samples at the lines that were ``told`` nothing is said.
        """
        subject, parameters = self.subject, list(self._parameters())
        yield from training_step.optimiser_findings(subject.optimizers, parameters)
        if subject.record is not None and isinstance(self.loss, Tensor):
            yield from losses.loss_findings(subject.record, self._roots)
            trained = {p for p, each in parameters if each.requires_grad}
            named = {v: name for v, name in self._value_names.items() if name in trained}
            yield from samples.sample_findings(subject.record, self._roots, named, told)
        gradients = {key: gradient for key, (_, gradient) in self._sizes.leaves.items()}
        yield from balance.symmetry_findings(parameters, gradients)
        yield from training_step.left_over(parameters, gradients)
        yield from training_step.not_training(subject.roots.values())

    # Values that are not finite ------------------------------------------------------------------

    @cached_property
    def _bad_gradients(self) -> tuple[str, ...]:
        reached, sizes = self._sizes.leaves, self._sizes.size
        return tuple(
            name
            for name, parameter in self._parameters()
            if id(parameter) in reached and any(e.bad for e in sizes[reached[id(parameter)][0]])
        )

    @cached_property
    def _value_names(self) -> dict[int, str]:
        """The names of recorded values that are parameters."""
        leaves, record = self.subject.names.leaves.values(), self.subject.record
        if record is None:
            return {}
        return {value: names[0] for leaf, names in leaves for value in record.values(leaf)}

    def _bad_value(self) -> NonFiniteValue | None:
        """The first value that is NaN or infinite, if the loss or a gradient is."""
        loss, record, origins = self.loss, self.subject.record, None
        if record is not None and not record.unmeasured:
            buffers = {
                value: join(prefix, name)
                for prefix, root in self.subject.roots.items()
                for name, buffer in root.named_buffers()
                for value in record.values(buffer)
            }
            origins = nonfinite.Origins(record, self._value_names, buffers)
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
        nil = self._zero_finder()
        beyond = {id(node.variable) for node in sizes.below(sizes.closed)}
        for name, parameter in self._parameters():
            if not parameter.requires_grad or id(parameter) in beyond:
                continue
            reached = sizes.leaves.get(id(parameter))
            if reached is not None and not parameter.numel():
                continue
            cause: SilentParameter | None = None
            if reached is None and not sizes.failure:
                cause = self._missing(name, parameter)
            elif reached is not None and sizes.is_zero(reached[0]):
                cause = nil.cause(name, reached[0])
            elif reached is not None and not bool(reached[1].any()):
                cause = zeros.stopped_by_hook(name, sizes.largest(reached[0]))
            if cause is not None:
                yield cause

    def _missing(self, name: str, parameter: Tensor) -> SilentParameter | None:
        if self._cuts is not None:
            cause = self._cuts.cause(name, parameter, name in self._replaced)
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

    @cached_property
    def _cuts(self) -> silent.CutFinder | None:
        record, loss = self.subject.record, self.loss
        if record is None:
            return None
        if isinstance(loss, Tensor) and record.known(loss) is None:
            self.remarks.append(OUTSIDE)
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
        # where it was not seen, not the parameters themselves
        return roots or record.alive() & record.makers.keys()

    @cached_property
    def _modules(self) -> dict[Node, str]:
        order, table = self._sizes.order, self.subject.names
        return {n: table.place_of(n).module for n in order if type(n) is not ACCUMULATE}

    def _zero_finder(self) -> zeros.ZeroFinder:
        return zeros.ZeroFinder(self._sizes, self.subject.record, self._modules, self._value_names)

    # Gradients that are too small or too large ---------------------------------------------------

    def _unbalanced(self, loss: Tensor, missing: Sequence[SilentParameter]) -> Iterator[Finding]:
        subject, sizes = self.subject, self._sizes
        told = {each.module for each in missing}
        lost = any(each.reason is Reason.UNDERFLOW for each in missing)
        named = {name: id(parameter) for name, parameter in self._parameters()}
        reached = {n: sizes.leaves[key][1] for n, key in named.items() if key in sizes.leaves}
        yield from balance.expert_findings(reached)
        if not lost:
            yield from balance.underflow_findings(sizes, self._modules, subject.record)
        if sizes.failure or sizes.closed:
            why = "the backward pass fails" if sizes.failure else REENTRANT
            self.remarks.append(f"Whether gradients vanish or explode was not measured: {why}.")
            return
        terms = balance.LossTerms(loss, sizes, subject.names, subject.hooks, subject.record)
        yield from terms.findings({each.line for each in missing if each.severity != "note"} - {""})
        try:
            norms = subject.trace(loss).norms()
        except GradtraceError as error:
            self.remarks.append(f"Whether gradients vanish or explode was not measured: {error}")
            return
        for found in balance.norm_findings(norms):
            if not (lost and found.kind in ("vanishing", "mostly dead")):  # by underflow
                yield found
        yield from Branches(norms, told, sizes, self._modules, subject.record).findings()

    # Others --------------------------------------------------------------------------------------

    def _failure(self) -> Iterator[Finding]:
        parameters = [parameter for _, parameter in self._parameters()]
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            advice = "call requires_grad_() on those that are to be trained."
            yield Finding("frozen", "error", "no parameter requires grad", advice=advice)
        if found := failures.failure_of(self._sizes, self.subject.record):
            yield found

    def _unregistered(self) -> Iterator[Finding]:
        leaves = {key: node.variable for key, (node, _) in self._sizes.leaves.items()}
        groups = [group for each in self.subject.optimizers for group in each.param_groups]
        moved = {id(parameter) for group in groups for parameter in group["params"]}
        return unregistered(self.subject.roots, leaves, self.subject.record, moved)

    def _used_rows(self, leaf: Node, count: int) -> tuple[Tensor, int]:
        """Which rows of an embedding occur, as its operators say; and how many are padding."""
        used, padding = torch.zeros(count, dtype=torch.bool, device="cpu"), set[int]()
        for node in self._sizes.users.get(leaf, ()):
            indices = getattr(node, "_saved_indices", None)
            if isinstance(indices, Tensor) and indices.layout is torch.strided:
                used[indices.detach().reshape(-1).cpu().long()] = True
            row = getattr(node, "_saved_padding_idx", -1)
            padding |= {row} if isinstance(row, int) and 0 <= row < count else set()
        return used, sum(bool(used[row]) for row in padding)

    def _unused_rows(self) -> dict[str, tuple[int, int]]:
        """Rows of embeddings that do not occur, and have gradient 0."""
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
                empty = (reached[1].reshape(len(parameter), -1) == 0).all(1)
                used, padding = self._used_rows(reached[0], len(parameter))
                rows = int((empty & ~used.to(empty.device)).sum())
                without = int((empty & used.to(empty.device)).sum()) - padding
                if 2 * without > int(used.sum()) and not nonfinite.is_bad(self.loss):
                    self.remarks.append(
                        f"Rows that occur in this batch and get no gradient: {name} {without:,} of "
                        f"{int(used.sum()):,} (masked, or not used further?)."
                    )
                if 0 < rows < len(parameter):
                    found[name] = rows, len(parameter)
        return found


def _grouped(missing: Iterable[SilentParameter], bad: NonFiniteValue | None) -> Iterator[Finding]:
    """One finding for all parameters that are silent for the same reason at the same line; none
    for zeros that are made where NaN is, which follow from it.
    """
    groups: dict[tuple[str, ...], list[SilentParameter]] = {}
    for each in missing:
        if bad is not None and bad.line == each.line and each.reason in zeros.ADVICE:
            continue
        apart = each.module if each.reason in (Reason.NEVER_CALLED, Reason.UNUSED) else ""
        key = (each.reason, each.line or each.operator, each.severity, apart.partition(".")[0])
        groups.setdefault(key, []).append(each)
    for group in groups.values():
        first, names = group[0], tuple(each.parameter for each in group)
        zero = first.reason in zeros.ADVICE
        advice = (zeros if zero else silent).advice_for(first)
        what = "gradient is exactly 0" if zero else "no gradient"
        kind = "underflow" if first.reason is Reason.UNDERFLOW else "zero gradient"
        yield Finding(
            kind if zero else "silent",
            first.severity,
            f"{what}: {listed(names)} ({first.reason})",
            common_module([each.module for each in group]),
            names,
            first.line,
            first.evidence,
            advice,
        )


OUTSIDE = (
    "The loss was computed outside of the watch, so what lies between it and the model's output "
    "was not seen; compute it inside, or call monitor.begin() where a step begins."
)
REENTRANT = "a reentrant checkpoint hides a part of the model (use_reentrant=False shows it)"


def diagnosed(subject: Subject, loss: Tensor | float) -> Diagnosis:
    """The diagnosis of a loss; see ``gradtrace.watch.diagnose``."""
    if not isinstance(loss, (Tensor, float, int)):
        raise GradtraceError(
            f"expected the loss tensor, got {type(loss).__name__}; pass the tensor that you would "
            "call .backward() on (for a model output object, its .loss)"
        )
    return Diagnoser(subject, loss).diagnosis()
