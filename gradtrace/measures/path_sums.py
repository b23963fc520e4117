"""``PathSums``: the measures of a traced program that are sums over all paths."""

from __future__ import annotations

from dataclasses import dataclass

from gradtrace.autodiff.loss_checks import isolated
from gradtrace.components.components import Components
from gradtrace.measures.mass import Mass, cancellation_of, mass_of
from gradtrace.measures.spectrum import Spectrum, spectrum_of
from gradtrace.tracing.traced_program import TracedProgram


@dataclass
class PathSums(TracedProgram):
    """A traced program with its sums over all paths; they do not depend on a rule."""

    @isolated()
    def mass(self, components: Components = None, p: float = 1.0) -> Mass:
        """The share of the mass of all paths, ``Σ |weight|**p``, that passes each component.

        All paths count, each by its weight. See ``Mass`` for what is divided by what.

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
    def cancellation(self) -> float:
        """``Σ |weight| / Σ |gradient|``, at least 1: how many times the gradient all paths carry,
        the rest of which cancels. For several losses, of their sum. nan if the gradient is 0, NaN
        or infinite.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> gt.trace(3 * x - 2 * x, names={"x": x}).cancellation()
        5.0
        """
        self.check_unchanged()
        return cancellation_of(self)

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
