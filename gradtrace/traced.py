"""``Trace``: paths, influence, flow and reports of one loss, or of a vector of losses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from math import nan
from typing import Any

import torch

from gradtrace.autodiff.loss_checks import isolated
from gradtrace.components.components import Components
from gradtrace.errors import GradtraceError, listed, printable
from gradtrace.flow import norms_of
from gradtrace.ir import memory
from gradtrace.measures.decompose import decomposed, possible
from gradtrace.measures.decomposition import Decomposition
from gradtrace.measures.mass import mass_of
from gradtrace.paths.paths import Path, Paths, sampled
from gradtrace.table import Table
from gradtrace.tracing.counting import (
    Leaves,
    Sample,
    component_finder,
    influence_of,
    positive,
    selected,
)
from gradtrace.tracing.coverage import coverage_of
from gradtrace.tracing.traced_program import TracedProgram, indices


@dataclass
class Trace(TracedProgram):
    """The paths behind a loss.

    ``gradients`` are those of autograd, by name; ``rule`` is ``"greedy"``, ``"edge"`` or
    ``"viterbi"`` (see ``gradtrace.trace``); ``pairs`` is the number of losses. ``budget`` limits
    the bytes of the values that are kept to follow paths; values that do not fit are recomputed
    (None: the limit is the free memory). If influence needs more than half of the budget,
    provenance ids are stored in one or two bytes instead of four. Paths and influence are computed
    on request, from the weights and activations of the forward pass: request them before these are
    changed in place, as an optimiser does.
    """

    _diagnosis: Mapping[str, Any] | None = field(default=None, repr=False)  # leads the report
    _value: torch.Tensor | None = field(default=None, repr=False)
    # Results, which copies with another rule do not share:
    _views: dict[tuple[object, ...], Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def loss(self) -> float:
        """The loss that was traced; of several, their mean."""
        return nan if self._value is None else float(self._value.double().mean())

    def __str__(self) -> str:
        leaves = self.program.leaves
        elements = sum(leaf.tensor.numel() for leaf in leaves)
        sizes = f"{len(self.program.blocks):,} operators, {len(leaves):,} leaves of {elements:,}"
        silent = f"No gradient: {listed(self.silent)}; watch.diagnose(loss) says why"
        lines = (
            f"Trace of a loss of {self.loss:.4g} by the rule {self.rule}: {sizes} elements",
            *([silent] if self.silent else []),
            *map(printable, self.notes),
            str(self.norms().top(8)),
            "Ask on: trace.decompose(), trace.influence(by='forks'), trace.path(name, index), "
            "trace.report('trace.html')",
        )
        return "\n".join(lines)

    # Paths ----------------------------------------------------------------------------------------

    @isolated()
    def path(self, name: str, index: int | Sequence[int] = (), *, pair: int = 0) -> Path:
        """The path of one element of a leaf, as the trace's rule chooses it.

        Only ``rule="viterbi"`` finds the heaviest path. ``path.share`` is the part of the element's
        gradient that the path carries: ``path.weight / path.gradient``.

        Args:
            name: Name of the leaf.
            index: Of the element; () if the leaf has no dimensions.
            pair: Which loss of a vector.

        Returns:
            The path, step by step from the leaf to the loss.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> path = gt.trace((x * x).sum(), names={"x": x}).path("x", 1)
        >>> path.weight, path.gradient, path.operators
        (4.0, 8.0, ['MulBackward0', 'SumBackward0'])
        """
        builder = self.builder(pair)
        value, element = self.element(name, index)
        start = {value: torch.tensor([element], device=self.device)}
        (path,) = builder.followed(start, self.rule)
        if path is None:
            raise GradtraceError(
                f"{name}{list(indices(index))} has no path: every contribution to its gradient is 0"
            )
        return path

    @isolated()
    def paths(
        self,
        name: str | None = None,
        index: int | Sequence[int] | None = None,
        *,
        k: int = 5,
        sample: int | None = None,
        seed: int = 0,
        pair: int = 0,
    ) -> Paths:
        """The ``k`` paths of greatest |weight| from one element, or from any element of a leaf.

        Args:
            name: Name of a leaf; with ``sample``, None is all leaves.
            index: Of one element; None is any of the leaf.
            k: Number of heaviest paths.
            sample: Instead of the ``k`` heaviest, the paths by the trace's rule of that many random
                elements; those without a path are left out.
            seed: Draws the same elements for the same number, on every device.
            pair: Which loss of a vector.

        Returns:
            The paths, heaviest first, or the sampled ones.
        """
        builder = self.builder(pair)
        if sample is not None:
            leaves = self.leaves.values() if name is None else [self.leaf(name)]
            sizes = {leaf.value: leaf.tensor.numel() for leaf in leaves}
            drawn = sampled(sizes, positive("sample", sample), seed)
            starts = {value: e.to(self.device) for value, e in drawn.items() if len(e)}
            return Paths(builder.lazy_paths(starts, self.rule), f"Paths ({self.rule})")
        if name is None:
            raise GradtraceError(
                "say which paths: paths(name), paths(name, index), paths(sample=n)"
            )
        if index is None:
            value, size = self.leaf(name).value, self.leaf(name).tensor.numel()
            elements = torch.arange(size, device=self.device)
        else:
            value, element = self.element(name, index)
            elements = torch.tensor([element], device=self.device)
        best = builder.follower.best(value, elements, positive("k", k))
        return Paths(
            tuple(builder.path(value, int(elements[place]), edges) for place, edges in best),
            f"Largest paths of {name}",
        )

    # Influence and flow ---------------------------------------------------------------------------

    @isolated()
    def influence(
        self,
        by: Components = "modules",
        *,
        of: Leaves | None = None,
        index: int | Sequence[int] | None = None,
        sample: Sample = "auto",
        seed: int = 0,
    ) -> Table:
        """The share of parameter elements whose paths pass through each component, as a table.

        ``share`` is ``through / eligible``: eligible are the elements outside a component that have
        a path and could pass through it, through those whose paths do; ``weighted`` weighs every
        element by its |gradient|. ``unreached`` could pass, but have no path, as all their
        contributions are 0; ``own`` is the number of the component's own elements, which are left
        out. What every path passes that could is in series: its share is 1 by definition. The table
        is ordered by information, ``eligible × entropy of the share``; those in series are last.

        Args:
            by: ``"modules"`` (each with its submodules), ``"layers"``, ``"heads"``, ``"experts"``,
                ``"steps"`` (see ``gradtrace.components.module_parts``), ``"forks"`` (the branches
                of sums, products and concatenations: of the elements that could take at least two
                and come there, the share that takes each), ``"labels"`` (``gradtrace.label``),
                ``"operators"``; a name or pattern (``"encoder.*"``), a class (``nn.Linear``), a
                list of these, or ``{group: names}``. Every name that a table prints is one.
            of: Leaves to trace alone, by name, pattern or module: ``"embed.weight"``,
                ``"encoder.*"``, ``["embed", "out.bias"]``.
            index: Of one element of that leaf: for how many of the losses its path passes each
                component.
            sample: Follow the paths of that many random elements only; for large models that costs
                little more than recording did. None: count all. ``"auto"``: 10,000 of more than 20
                million; the table says so.
            seed: Draws the same elements for the same number, on every device.

        Returns:
            The table; of a sample, or of several losses, with standard errors.

        >>> import torch, gradtrace as gt
        >>> x, y = torch.tensor([3.0, 4.0], requires_grad=True), torch.ones(2, requires_grad=True)
        >>> table = gt.trace((x * y).sum() + x.exp().sum(), names={"x": x, "y": y}).influence()
        >>> row = table["ExpBackward0"]
        >>> row.through, row.eligible, row.share
        (2, 2, 1.0)
        """
        self.check_unchanged()
        return influence_of(self, by, of, index, sample, seed)

    @isolated()
    def decompose(self, by: Components = "modules") -> Decomposition:
        """The gradient through each component, over all paths: ``g = g_through + g_around``.

        Exact and signed, whatever the trace's rule. A path that enters one many times passes it
        once. It costs at most a backward pass for each component. See ``Decomposition``.

        Args:
            by: Components, as for ``Trace.influence``.

        Returns:
            The gradient by component, see ``Decomposition``.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> split = gt.trace((x.exp() + 3 * x).sum(), names={"x": x}).decompose("forks")
        >>> split.gradient("add/mul of x", "x")
        tensor([3., 3.])
        >>> round(sum(split.shares.values()), 6)
        1.0
        """
        self.check_unchanged()
        chosen = component_finder(self).choose(by)
        return possible(decomposed(self, chosen, by))

    @isolated()
    def mass(self, by: Components = "modules", p: float = 1.0) -> Table:
        """The share of the mass of all paths, ``Σ |weight|**p``, that passes each component.

        All paths count, each by its weight. ``about["cancellation"]`` says how many times the
        gradient they carry. See ``mass_of`` for what is divided by what.

        Args:
            by: Components, as for ``Trace.influence``.
            p: Power of the weights; the larger, the more the heaviest paths count.

        Returns:
            The table of shares.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> loss = (3 * x).exp().log() + x.sin()
        >>> table = gt.trace(loss, names={"x": x}).mass("forks")
        >>> {name: round(share, 4) for name, share in table.shares.items()}
        {'add/log of x': 0.8782, 'add/sin of x': 0.1218}
        """
        self.check_unchanged()
        return mass_of(self, by, p)

    @isolated()
    def coverage(self, sample: int = 1000, seed: int = 0, *, of: Leaves | None = None) -> Table:
        """What part of its element's gradient a path carries, signed: ``weight / gradient`` of a
        random sample of elements (and of at most 8 losses).

        It is 1 for an element with a single path; negative if the path has the opposite sign, and
        above 1 if other paths cancel some of it. A note says for which share of the elements the
        three rules choose the same path.

        Args:
            sample: How many elements; all of them, if there are fewer.
            seed: Draws the same elements for the same number, on every device.
            of: Leaves to look at alone, by name, pattern or module, as for ``influence``.

        Returns:
            A row for all elements and one for each leaf: the median, the quartiles, and the shares
            of paths of the opposite sign and of elements whose gradient cancels to 0.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> found = gt.trace((x * x + 2 * x).sum(), names={"x": x}).coverage()
        >>> found["all"].lower, found["all"].median  # 3 of 8, and 4 of 10
        (0.38125, 0.3875)
        """
        self.check_unchanged()
        part = self if of is None else selected(self, of)
        return coverage_of(part, positive("sample", sample), seed)

    @isolated()
    def norms(self) -> Table:
        """Gradient norms by module, nearest to the loss first, and a diagnosis in names: whether
        the gradient vanishes, explodes or dies.

        Returns:
            A row for each module. ``norm`` is the largest at its output, ``gain`` what it hands on
            over that, ``zeros`` the share of zeros, ``own`` the norm of its parameters' gradients.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> gt.trace(x.square().sum(), names={"x": x}).norms()["(top)"].own
        10.0
        """
        self.check_unchanged()
        memory.see(
            memory.streaming(self.program),
            self.backend,
            "measuring norms",
            "trace fewer samples at a time",
        )
        found = norms_of(self.program, self.names, self.modules)
        return replace(found, about={**found.about, "losses": self.pairs})

    # Output ------------------------------------------------------------------------------------

    @isolated()
    def save(self, path: str | os.PathLike[str], *, sample: int = 1000, seed: int = 0) -> None:
        """Write gradients, influence, norms, coverage and the paths of a sample of elements to a
        ``.gradtrace`` file, which ``gradtrace.load`` reads without the model.

        Args:
            path: File to write.
            sample: How many elements' paths are saved.
            seed: Draws the same elements for the same number, on every device.
        """
        view = self._view(sample, seed)
        _report("saving").save(path, self, view, sample, seed)

    @isolated()
    def report(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        sample: int = 1000,
        seed: int = 0,
        training: Table | tuple[Table, Table] | None = None,
        attribution: object = None,
    ) -> None:
        """Write the trace as one self-contained HTML file; it needs no network and no other file.

        The report of a trace that was made under ``gt.watch(model, diagnose=True)`` leads with what
        ``watch.diagnose`` finds.

        Args:
            path: File to write.
            name: Title of the page.
            sample: How many random elements the top paths are taken from.
            seed: Draws the same elements for the same number, on every device.
            training: A run to show, too: ``gradtrace.load("run.jsonl")``, or both its tables,
                ``(monitor.history, monitor.times)``.
            attribution: Graph to show in a tab of its own: ``watch.attribute(...).graph()``.

        >>> import torch, gradtrace as gt
        >>> from tempfile import TemporaryDirectory
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> with TemporaryDirectory() as folder:
        ...     gt.trace((x * x).sum(), names={"x": x}).report(f"{folder}/x.html", name="squares")
        """
        view = self._view(sample, seed)
        _report("saving").write_page(path, view, name, training, attribution)

    def _repr_html_(self) -> str:
        """The report in a frame, for notebooks; a smaller view for large models."""
        building = _report("building")
        small = building.is_large(self.program)
        given = (lambda: self._view(small=small)), building.without_paths, repr(self)
        return str(_report("page").framed(*given))

    def _view(self, sample: int = 1000, seed: int = 0, small: bool = False) -> dict[str, Any]:
        """The data of a report; cached, so it is available after an optimiser's step."""
        drawn = (positive("sample", sample), seed, small)
        key = (self.rule, *drawn)
        if key not in self._views:
            self._views[key] = _report("building").view_of(self, *drawn, self._diagnosis)
        found: dict[str, Any] = self._views[key]
        return found


def _report(name: str) -> Any:
    """A module of the report's room, which lies above this one."""
    return import_module(f"gradtrace.report.{name}")
