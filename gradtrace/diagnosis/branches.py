"""Modules that get next to nothing, beside others that get a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradtrace.autodiff.nodes import ACCUMULATE, Node
from gradtrace.diagnosis.backward_sizes import BackwardSizes
from gradtrace.diagnosis.balance import is_in_a_branch
from gradtrace.diagnosis.forward_record import ForwardRecord
from gradtrace.diagnosis.result import Finding, common_module, listed
from gradtrace.diagnosis.zeros import kind_of
from gradtrace.flow import TOP
from gradtrace.flow.tuning import FAR_FACTOR, SCORES_FACTOR
from gradtrace.table import Row, Table

DAMPING_FACTOR = 30.0
"""A product by which a gradient falls by more than this has a small factor."""

VIEWS = frozenset(
    ["Expand", "View", "Unsqueeze", "Squeeze", "Reshape", "Select", "Slice", "ToCopy"]
)
"""What may lie between a parameter and a product with it."""

ADVICE = {
    "warning": "look at the factor before the branch, and at what it is added to.",
    "note": "usually none: the factor is trained, and grows if that lowers the loss.",
}


@dataclass(eq=False)
class Branches:
    """Looks at gradient norms by module, apart from the modules that were ``told`` of."""

    norms: Table
    told: set[str]
    sizes: BackwardSizes
    modules: Mapping[Node, str]
    record: ForwardRecord | None

    def findings(self) -> Iterator[Finding]:
        """Modules that get over 1,000 times less than those beside them: a note where that is the
        doing of a small factor which is itself trained (LayerScale).
        """
        vanishes = any(text.startswith("Vanishing") for text in self.norms.notes)
        if vanishes and not is_in_a_branch(self.norms):
            return
        rows = [row for row in self.norms if row.verdict == "vanishing"]
        rows = [row for row in rows if row.module != TOP and row.module not in self.told]
        scaled = [row for row in rows if self._is_scaled(row.module)]
        others = [row for row in rows if row not in scaled]
        for severity, some in (("warning", others), ("note", scaled)):
            if some:
                yield self._finding(severity, some)

    def _finding(self, severity: str, rows: Sequence[Row]) -> Finding:
        names = tuple(row.module for row in rows)
        most = max(self.norms.column("norm"))
        by = ", by a factor that is trained" if severity == "note" else ""
        return Finding(
            "branch",
            severity,
            f"a branch that carries next to nothing: {listed(names)}",
            common_module(list(names)),
            line=self._line(names[0]),
            evidence=f"A gradient of norm {rows[0].norm:.2g} reaches '{names[0]}'{by}, and up to "
            f"{most:.2g} other modules. The limit is a factor of {FAR_FACTOR:,.0f}, behind a "
            f"softmax {SCORES_FACTOR:,.0f}.",
            advice=ADVICE[severity],
        )

    def _line(self, module: str) -> str:
        """Where a module runs."""
        operations = () if self.record is None else self.record.operations
        return next((str(op.where.line or "") for op in operations if op.module == module), "")

    def _is_scaled(self, module: str) -> bool:
        """Whether all ways from the loss to a module lead by a small factor that is trained."""
        nodes = [n for n, at in self.modules.items() if f"{at}.".startswith(f"{module}.")]
        seen, stack = set(nodes), list(nodes)
        while stack:
            child = stack.pop()
            users = self.sizes.users.get(child, ())
            if not users:
                return False  # the loss
            for node in users:
                if node not in seen and not self._dampens(node, child):
                    seen.add(node)
                    stack.append(node)
        return bool(nodes)

    def _dampens(self, node: Node, child: Node) -> bool:
        """Whether a node is a product with a small parameter, which gets a gradient itself."""
        kind = kind_of(node)
        if kind != "Mul" and "Norm" not in kind:
            return False
        if self.sizes.largest(node) < DAMPING_FACTOR * self.sizes.largest(child):
            return False
        others = [each for each, _ in self.sizes.edges[node][:2] if each is not child]
        return any(self._is_trained(each) for each in others if each is not None)

    def _is_trained(self, node: Node) -> bool:
        while kind_of(node) in VIEWS and self.sizes.edges[node]:
            below = self.sizes.edges[node][0][0]
            if below is None:
                return False
            node = below
        return type(node) is ACCUMULATE and not self.sizes.is_zero(node)
