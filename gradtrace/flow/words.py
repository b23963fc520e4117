"""What is found about gradient norms, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, isnan

from gradtrace.flow.norms import ModuleNorms, Modules
from gradtrace.flow.operator_graph import Change, OperatorGraph
from gradtrace.flow.tuning import FAR_FACTOR, NAMED_MAX_MODULES, STEADY_FACTOR

KEEP = (
    "Skip connections, normalisation, gated cells or another initialisation (He for ReLU, Xavier "
    "for tanh) keep it up."
)
TAME = (
    "Clip it (torch.nn.utils.clip_grad_norm_), take smaller steps, or remove the cause: "
    "normalisation or a smaller initialisation (He for ReLU, Xavier for tanh)."
)
REVIVE = "A smaller learning rate, another initialisation or a leaky slope bring it back."
CALM = "Normalise what goes in, or begin with smaller weights."
RELUS = ("Relu", "Threshold", "ClampMin", "LeakyRelu", "Hardswish")


@dataclass
class NormWords:
    """The findings of a measured program, in sentences."""

    graph: OperatorGraph
    modules: Modules

    def findings(self) -> Iterator[str]:
        """One or more findings, dead parts first."""
        alone = self._nonfinite() or self._nothing()
        if alone:
            yield alone
            return
        dead = [text for text in (self._dead(), self._mostly()) if text]
        yield from dead
        changes = [change for change in (self.graph.along, *self.graph.repeated) if change]
        fall = next((change for change in changes if change.ratio < 1 / FAR_FACTOR), None)
        rise = next((change for change in changes if change.ratio > FAR_FACTOR), None)
        if fall:
            yield f"Vanishing: {self._describe(fall)}{self._rest(fall)}. {KEEP}"
        if rise:
            yield f"Exploding: {self._describe(rise)}. {TAME}"
        if not (fall or rise):
            yield from self._healthy(bool(dead))

    # Numbers -------------------------------------------------------------------------------------

    def _describe(self, change: Change, subject: str = "the gradient") -> str:
        """A change in words: from where to where, and its factor per operator."""
        first, last, ratio = change.first, change.last, change.ratio
        if not last.norm:
            nothing = [level for level in self.graph.body if not level.norm]
            last = next((each for each in nothing if each.module == last.module), last)
        steady = 1 / STEADY_FACTOR < ratio < STEADY_FACTOR
        verb = "goes" if steady else "rises" if ratio > 1 else "falls"
        uses = f"through {change.uses:,} uses of the same weights " if change.uses else ""
        start = f"{uses}{subject} {verb} from {first.norm:.2g} at"
        if not last.norm:
            return f"{start} {first.where} to exactly 0 at depth {last.depth:,} ({last.where})"
        here, there = first.where, last.where
        if here == there:
            here, there = (f"depth {at.depth:,} ({at.where})" for at in (first, last))
        factor, over = max(ratio, 1 / ratio), last.depth - first.depth
        return (
            f"{start} {here} to {last.norm:.2g} at {there} (a factor of {factor:.2g} over {over:,} "
            f"operators, about {factor ** (1 / over):.3g} an operator)"
        )

    def _rest(self, fall: Change) -> str:
        """A note if the gradient at the deepest level, below a fall, is large all the same."""
        deepest = self.graph.profile[-1]
        if deepest.norm < fall.first.norm / FAR_FACTOR:
            return ""
        return f"; deeper down, {deepest.where} gets {deepest.norm:.2g} by other ways"

    def _healthy(self, dead: bool) -> Iterator[str]:
        change, deep = self.graph.along, len(self.graph.profile)
        if change:
            start = "Elsewhere the" if dead else "The"
            yield f"{start} gradient neither vanishes nor explodes: {self._describe(change, 'it')}."
        elif not dead:
            yield f"The graph is {_count(deep, 'operator')} deep, too few to vanish or explode."

    # Zeros, NaN and infinity ---------------------------------------------------------------------

    def _nonfinite(self) -> str:
        """Where NaN or infinity first appears; empty if all is finite."""
        size = self.graph.size
        bad = {value for value, found in size.items() if not isfinite(found.norm)}
        if not bad:
            return ""
        makers = (
            (f"what {self._operator(number)} hands on", value)
            for number, block in enumerate(self.graph.blocks)
            if bad.isdisjoint(block.takes.values())
            for value in block.gives.values()
            if value in bad
        )
        where, value = next(makers, ("a sum of gradients", min(bad)))
        kind = "NaN" if isnan(size[value].norm) else "infinity"
        if self.graph.program.root in bad:
            return f"The gradient is not finite: the loss itself is weighed with {kind}."
        return (
            f"The gradient is not finite: {kind} first appears in {where}. Look at the values that "
            "go into it (a division by 0, a logarithm or root of 0, an overflow?)."
        )

    def _nothing(self) -> str:
        """Why no leaf gets any gradient; empty if some leaf does."""
        size, program = self.graph.size, self.graph.program
        if any(size[leaf.value].nonzero for leaf in program.leaves):
            return ""
        if not size[program.root].nonzero:
            return "No gradient flows: the loss itself is weighed with 0."
        why = self._why([v.value for v in program.leaves], "Nothing but zeros reaches them.")
        return f"No gradient flows: that of every leaf is exactly 0. {why}"

    def _rows(self, verdict: str) -> list[ModuleNorms]:
        return [row for row in self.modules.rows if row.verdict == verdict]

    def _dead(self) -> str:
        rows, gathered = self._rows("dead"), self.modules.gathered
        if not rows:
            return ""
        parts = [(row, gathered[row.module]) for row in rows]
        values = [v for row, part in parts for v in (part.out if row.norm else part.reached)]
        why = self._why(values, "What reaches them adds up to 0.")
        if silent := [row for row in rows if not row.norm]:
            return f"Dead: {_get(silent)} no gradient at all. {why}"
        return f"Dead: {_listed(rows)} hands no gradient on. {why}"

    def _why(self, values: Iterable[int], unknown: str) -> str:
        """Why some values are 0: what the operator does that made the first of them so."""
        lost = [self.graph.lost[value] for value in values if value in self.graph.lost]
        if not lost:
            return unknown
        number, faint = min(lost)
        block, where = self.graph.blocks[number], self._operator(number)
        reached = sum(self.graph.size[value].nonzero for value in block.takes.values())
        if faint:
            return f"It falls below the smallest float at {where}. {KEEP}"
        if self.graph.elementwise(number) and not block.operator.startswith(("Mul", "Div")):
            return (
                f"{where} has slope 0 at all {_count(reached, 'entry')} that the gradient comes to "
                f"(a dead ReLU, a saturated unit, a closed gate?). {REVIVE}"
            )
        if self.graph.gathers(number):
            return f"{where} cuts it off: the loss does not use that part."
        return f"{where} multiplies it with zeros (weights or factors that start at 0?)."

    def _mostly(self) -> str:
        rows = self._rows("mostly dead")
        if not rows:
            return ""
        makers = {self.modules.gathered[row.module].dropper for row in rows}
        shut = all(name.startswith(RELUS) for name in makers)
        why = "ReLUs that seldom open?" if shut else f"saturated: {', '.join(sorted(makers))}?"
        return (
            f"Mostly dead: at the output of {_listed(rows)} up to {max(r.zeros for r in rows):.1%} "
            f"of the gradient is exactly 0 ({why}). {REVIVE if shut else CALM}"
        )

    def _operator(self, number: int) -> str:
        block = self.graph.blocks[number]
        module = block.place.module
        return f"{block.operator} (in '{module}')" if module else block.operator


def _count(n: int, word: str) -> str:
    """``1 operator``, ``2 operators``, ``3 entries``."""
    many = f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    return f"{n:,} {word if n == 1 else many}"


def _listed(rows: Sequence[ModuleNorms]) -> str:
    """``'a', 'b' and 2 more``."""
    shown = [f"'{row.name}'" for row in rows[:NAMED_MAX_MODULES]]
    more = len(rows) - len(shown)
    *first, last = [", ".join(shown), f"{more:,} more"] if more else shown
    return f"{', '.join(first)} and {last}" if first else last


def _get(rows: Sequence[ModuleNorms]) -> str:
    """``'a' gets``, ``'a' and 'b' get``."""
    return f"{_listed(rows)} {'gets' if len(rows) == 1 else 'get'}"
