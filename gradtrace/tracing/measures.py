"""Measures of a traced program, as methods of ``Trace``: each a few lines, the work elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradtrace.autodiff.loss_checks import isolated
from gradtrace.errors import GradtraceError
from gradtrace.tracing.choices import Choices
from gradtrace.tracing.choosing import choices
from gradtrace.tracing.leaf_selection import Leaves
from gradtrace.tracing.path_sums import PathSums


@dataclass
class Measures(PathSums):
    """A traced program with measures of it."""

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
        that takes each. Shares of a fork add up to 1; a chain of sums is one fork. ``every`` lists
        also the arithmetic within activations, norms and cells; ``of`` and ``sample`` are as for
        ``influence``.

        ``measures`` may add ``"gradient"`` (signed: ⟨g_b, g⟩, what the gradient through branch b
        adds to the gradient of these leaves, over the sum of that of all branches; see
        ``decompose``) and ``"mass"`` (Σ |weight| of all paths through b, likewise; see ``mass``).
        They cost up to a backward pass for each branch, and a few.

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
