"""``TraceSource``: what a table of influence asks of the trace that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from weakref import ref

from gradtrace.autodiff.loss_checks import isolated
from gradtrace.components.components import Components
from gradtrace.errors import GradtraceError, listed
from gradtrace.measures.agreement import PATH_RULES, warning_of
from gradtrace.measures.measures import Measures
from gradtrace.tracing.choices import Choices
from gradtrace.tracing.counting import Leaves, chosen_components, counted, selected
from gradtrace.tracing.coverage import Coverage
from gradtrace.tracing.influence import Influence, Weight
from gradtrace.tracing.traced_program import TracedProgram

KEPT_MAX_BYTES = 1 << 24
"""The most bytes of weights and activations that a table keeps when its trace is gone."""

KEPT_MAX_TENSORS = 512
"""Of more weights and activations the bytes are not added up: nothing is kept."""

COMPARED_MAX_ELEMENTS = 1 << 22
"""Up to this many elements, of all values, a table is compared with those of the other rules."""

NAMED = 4
"""How many parameters without a gradient are named."""

OPERATOR_ELEMENTS = 1 << 10
"""A step takes as long as this many elements."""


class TraceSource:
    """Coverage, choices and contradictions behind a table, each found when it is asked for.

    A table does not keep its trace alive, which holds the activations of a forward pass. But the
    trace of ``print(gt.trace(loss).influence())`` is gone before the table is printed. So the
    table of the last trace keeps its program if that is small: at most ``KEPT_MAX_BYTES`` are held,
    until the next trace makes a table, or the table is gone. Of a sharded model nothing is measured
    when a table is printed: one rank may print it, and weights are gathered by all.
    """

    def __init__(
        self, trace: Measures, components: Components, of: Leaves | None, exact: bool
    ) -> None:
        self._trace, self._kept = ref(trace), _keep(trace)
        self._components, self._of, self._rule, self._exact = components, of, trace.rule, exact
        self._others: list[Influence] | None = None

    def _measures(self) -> Measures | None:
        return self._trace() or self._kept.trace

    def measure(self) -> Coverage | None:
        """The coverage; None if the trace is gone, or can no longer be followed."""
        trace = self._measures()
        if trace is not None and trace.granularity == "scalar" and not trace.sharded:
            with suppress(GradtraceError):
                return trace.coverage(of=self._of)
        return None

    def choices(self) -> Choices | None:
        """The choices; None if the trace is gone."""
        trace = self._measures()
        return None if trace is None else trace.choices(of=self._of)

    def contradictions(self, shares: Mapping[str, float], weight: Weight) -> str:
        """Where the rules contradict each other, in words: by the last ``trace.agreement()``, else
        by the tables of the other rules, if the program is small.
        """
        trace = self._measures()
        if trace is not None and trace.compared is not None:
            return trace.compared.warning()
        if self._others is None:
            known = trace if self._exact else None
            self._others = by_other_rules(known, self._components, self._of) if known else []
        others = {table.rule: table.by(weight).shares for table in self._others}
        return warning_of({self._rule: shares, **others})

    def silent(self) -> str:
        """The parameters that the loss does not depend on, in words; those of all leaves."""
        trace = self._measures()
        names = () if trace is None or self._of is not None else trace.silent
        some = f"No gradient: {listed(names, NAMED)}; watch.diagnose(loss) says why"
        return some if names else ""


@isolated()
def by_other_rules(
    trace: TracedProgram, components: Components, of: Leaves | None = None
) -> list[Influence]:
    """The tables by the other rules; none if the program is large, or has been changed."""
    steps = trace.program.steps()
    elements = sum(prod(step.shape) + OPERATOR_ELEMENTS for step in steps) * trace.pairs
    if trace.granularity == "operator" or elements > COMPARED_MAX_ELEMENTS or trace.sharded:
        return []
    with suppress(GradtraceError):
        trace.check_unchanged()
        chosen = chosen_components(trace, components)
        part = trace if of is None else selected(trace, of)
        others = (rule for rule in PATH_RULES if rule != trace.rule)
        return [counted(replace(part, rule=rule), chosen) for rule in others]
    return []


# The program that outlives its trace --------------------------------------------------------------


class _Kept:
    """A copy of the last trace, unless it is large; None once another one has taken its place."""

    def __init__(self, trace: Measures | None) -> None:
        self.trace = trace


_last: ref[_Kept] | None = None


def _keep(trace: Measures) -> _Kept:
    global _last
    before = None if _last is None else _last()
    if before is not None:
        kept = before.trace
        if kept is not None and kept.program is trace.program and kept.rule == trace.rule:
            return before
        before.trace = None
    found = _Kept(replace(trace) if trace.held_bytes(KEPT_MAX_TENSORS) <= KEPT_MAX_BYTES else None)
    _last = ref(found)
    return found
