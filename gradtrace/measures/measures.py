"""Measures of a traced program, as methods of ``Trace``: each a few lines, the work elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradtrace.autodiff.loss_checks import isolated
from gradtrace.components.components import Components
from gradtrace.errors import GradtraceError
from gradtrace.measures.agreement import Agreement, agreement
from gradtrace.measures.choosing import choices
from gradtrace.measures.mass import mass_of
from gradtrace.measures.spectrum import Spectrum, spectrum_of
from gradtrace.table import Table
from gradtrace.tracing.choices import Choices
from gradtrace.tracing.counting import Leaves, component_finder, coverage_of
from gradtrace.tracing.coverage import Coverage
from gradtrace.tracing.traced_program import TracedProgram


@dataclass
class PathSums(TracedProgram):
    """A traced program with its sums over all paths; they do not depend on a rule."""

    @isolated()
    def mass(self, components: Components = None, p: float = 1.0) -> Table:
        """The share of the mass of all paths, ``Σ |weight|**p``, that passes each component.

        All paths count, each by its weight. ``about["cancellation"]`` says how many times the
        gradient they carry. See ``mass_of`` for what is divided by what.

        Args:
            components: Modules, groups or kinds of parts, as for ``Trace.influence``.
            p: Power of the weights; the larger, the more the heaviest paths count.

        Returns:
            The table of shares.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> loss = (3 * x).exp().log() + x.sin()
        >>> table = gt.trace(loss, names={"x": x}).mass("arguments")
        >>> {name: round(share, 4) for name, share in table.shares.items()}
        {'add[0] from LogBackward0': 0.8782, 'add[1] from SinBackward0': 0.1218}
        """
        self.check_unchanged()
        return mass_of(self, components, p)

    @isolated()
    def spectrum(self, by: str = "length", p: float = 1.0, *, of: str | None = None) -> Spectrum:
        """Mass ``Σ |weight|**p`` and gradient of all paths by ``"length"`` in operators, or by the
        number of residual ``"branches"`` that they take; of all leaves, or of one.

        It costs about two passes for each length that occurs. See ``Spectrum``.

        Args:
            by: ``"length"`` in operators, or ``"branches"``: residual branches taken.
            p: Power of the weights in the mass.
            of: Name of one leaf; all by default.

        Returns:
            A row for each length or number of branches.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> found = gt.trace(x + (3 * x).sin(), names={"x": x}).spectrum()
        >>> {length: round(share, 4) for length, share in found.shares.items()}
        {1: 0.2577, 3: 0.7423}
        """
        self.check_unchanged()
        return spectrum_of(self, by, p, of)


@dataclass
class Measures(PathSums):
    """A traced program with measures of it."""

    compared: Agreement | None = field(default=None, init=False, repr=False)  # the last one
    _coverages: dict[tuple[object, ...], Coverage] = field(
        default_factory=dict, init=False, repr=False
    )

    @isolated()
    def coverage(self, sample: int = 1000, seed: int = 0, *, of: Leaves | None = None) -> Coverage:
        """What part of its element's gradient a path carries, signed: ``weight / gradient`` of a
        random sample of elements (and of at most 8 losses).

        Args:
            sample: How many elements; all of them, if there are fewer.
            seed: Draws the same elements for the same number, on every device.
            of: Leaves to look at alone, by name, pattern or module, as for ``influence``.

        Returns:
            Median, quartiles, and how many paths have the opposite sign of their gradient.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> found = gt.trace((x * x + 2 * x).sum(), names={"x": x}).coverage()
        >>> found.parts, found.median  # 3 of 8, and 4 of 10
        ((0.375, 0.4), 0.3875)
        """
        return coverage_of(self, self._coverages, of, positive("sample", sample), seed)

    @isolated()
    def agreement(
        self, components: Components = None, *, sample: int = 1000, seed: int = 0
    ) -> Agreement:
        """Whether the rules agree: for the same random elements, how often they choose the same
        path and the same components, and the share of each component by every rule.

        Args:
            components: Modules, groups or kinds of parts, as for ``Trace.influence``.
            sample: How many elements.
            seed: Draws the same elements for the same number, on every device.

        Returns:
            The table of shares by rule; ``contradictions`` names the components they differ on.
        """
        self.check_unchanged()
        chosen = component_finder(self).choose(components)
        self.compared = agreement(self, chosen, positive("sample", sample), seed)
        return self.compared

    @isolated()
    def choices(
        self,
        measures: Sequence[str] = ("paths",),
        *,
        of: Leaves | None = None,
        every: bool = False,
        sample: int | None = None,
        seed: int = 0,
    ) -> Choices:
        """How paths divide at each fork: sums, concatenations, gates, labelled slices.

        Of the elements that could take at least two branches of a fork and come to it, the share
        that takes each. Shares of a fork add up to 1; a chain of sums is one fork.

        Args:
            measures: ``"paths"``; and ``"gradient"`` (signed: ⟨g_b, g⟩, what the gradient through
                branch b adds to the gradient of these leaves, over the sum of that of all branches;
                see ``decompose``) and ``"mass"`` (Σ |weight| of all paths through b, likewise; see
                ``mass``), which cost up to a backward pass for each branch, and a few.
            of: Leaves to look at alone, by name, pattern or module, as for ``influence``.
            every: Whether to list the arithmetic within activations, norms and cells, too.
            sample: Follow the paths of that many random elements only.
            seed: Draws the same elements for the same number, on every device.

        Returns:
            The forks, those between modules first, each with its branches.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> w = torch.tensor([0.5, 3.0], requires_grad=True)
        >>> trace = gt.trace((x + w * x).sum(), names={"x": x, "w": w})
        >>> trace.choices().shares
        {'add': {'skip': 0.5, 'mul of w': 0.5}}
        """
        self.check_unchanged()
        drawn = None if sample is None else (positive("sample", sample), seed)
        return choices(self, measures, of, every, drawn)


def positive(word: str, number: int) -> int:
    """The number, or an error if it is no number of paths."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise GradtraceError(f"{word} is a number of paths from 1 on, not {number!r}")
    return number
