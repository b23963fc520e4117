"""``Trace``: paths, influence, flow and reports of one loss, or of a vector of losses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch

from gradtrace import report as reports
from gradtrace.autodiff.loss_checks import isolated
from gradtrace.components.components import Components, spelt
from gradtrace.errors import GradtraceError, TooLarge
from gradtrace.flow import norms_of
from gradtrace.ir import interpreter, memory
from gradtrace.measures.decompose import decomposed, possible
from gradtrace.measures.decomposition import Decomposition
from gradtrace.measures.measures import Measures, positive
from gradtrace.measures.table_source import TraceSource
from gradtrace.paths.paths import Builder, Path, Paths, sampled
from gradtrace.paths.tensor_paths import TensorPaths
from gradtrace.report import attribution as attributed
from gradtrace.report import saving
from gradtrace.report.trace_view import is_large, view_of
from gradtrace.semirings import Count
from gradtrace.table import Table
from gradtrace.tracing.counting import Leaves, chosen_components, component_finder, influence_of
from gradtrace.tracing.influence import Influence, checked_weight
from gradtrace.tracing.traced_program import indices


@dataclass
class Trace(Measures):
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
    # Results, which copies with another rule do not share:
    asked: dict[str, Influence] = field(default_factory=dict, init=False, repr=False)
    _views: dict[tuple[object, ...], reports.View] = field(
        default_factory=dict, init=False, repr=False
    )

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
        if self.granularity == "operator":
            return self._tensor_path(name, index, builder)
        value, element = self.element(name, index)
        start = {value: torch.tensor([element], device=self.device)}
        (path,) = builder.followed(start, self.rule)
        if path is None:
            raise GradtraceError(
                f"{name}{list(indices(index))} has no path: every contribution to its gradient is 0"
            )
        return path

    @overload
    def paths(
        self, name: str, index: int | Sequence[int] | None = None, *, k: int = 5, pair: int = 0
    ) -> Paths: ...
    @overload
    def paths(
        self, name: str | None = None, *, sample: int, seed: int = 0, pair: int = 0
    ) -> Paths: ...
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
        if self.granularity == "operator":
            raise GradtraceError(
                "at operator granularity a leaf has one path: trace.path(name); for the paths of "
                "elements trace with granularity='scalar'"
            )
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

    def _tensor_path(self, name: str, index: int | Sequence[int], builder: Builder) -> Path:
        value = self.leaf(name).value
        if indices(index):
            raise GradtraceError(
                f"at operator granularity {name} is followed as a whole: trace.path({name!r})"
            )
        chain = TensorPaths(self.program, self.rule, builder.follower.seed).chain(value)
        if not chain.links:
            raise GradtraceError(f"{name} has no path: its gradient is 0 everywhere")
        return builder.coarse(value, chain.links)

    @isolated()
    def enumerate(self, limit: int = 10_000, zeros: bool = False) -> Paths:
        """All paths from every leaf element to the loss; see ``gradtrace.enumerate_paths``.

        Args:
            limit: The most paths; more raise an error.
            zeros: Whether paths of weight 0 are listed, too.

        Returns:
            All paths.
        """
        builder = self.builder(0)
        too_many = TooLarge(
            f"there are more than {limit:,} paths; raise limit, or take a smaller graph. "
            "gradtrace.backward(loss, gradtrace.semirings.COUNT) tells how many there are"
        )
        counts = interpreter.run(self.program, Count(log=True)).values()  # before listing any
        if sum(2.0 ** min(float(n), 999.0) for c in counts for n in c.reshape(-1)) > limit:
            raise too_many
        found: list[Path] = []
        for leaf in self.leaves.values():
            for element in range(leaf.tensor.numel()):
                for edges in builder.follower.every(leaf.value, element, zeros):
                    if len(found) == limit:
                        raise too_many
                    found.append(builder.path(leaf.value, element, edges))
        return Paths(tuple(found), "All paths")

    # Influence and flow ---------------------------------------------------------------------------

    @isolated()
    def influence(
        self,
        components: Components = None,
        weight: str = "count",
        *,
        of: Leaves | None = None,
        index: int | Sequence[int] | None = None,
        sample: int | None = None,
        leaf_rows: float | None = None,
        seed: int = 0,
    ) -> Influence:
        """The share of parameter elements whose paths pass through each component, as a table.

        Args:
            components: None (every module, with its submodules), ``"classes"``, ``"operators"``,
                ``"labels"`` (``gradtrace.label``), ``"arguments"`` (which argument of a sum or a
                concatenation), ``"heads"``, ``"experts"``, ``"layers"`` or ``"steps"`` (parts of
                modules; see ``gradtrace.components.module_parts``), a list of module names or
                patterns, or ``{group: names}``. A name is a module's, or begins with ``class:``,
                ``operator:``, ``label:``, ``argument:``, ``head:``, ``expert:``, ``layer:`` or
                ``step:``.
            weight: ``"count"``: every element counts 1; ``"gradient"``: its |gradient|.
            of: Leaves to trace alone, by name, pattern or module: ``"embed.weight"``,
                ``"encoder.*"``, ``["embed", "out.bias"]``.
            index: Of one element of that leaf: for how many of the losses its path passes each
                component.
            sample: Follow the paths of that many random elements only; for large models that costs
                little more than recording did.
            leaf_rows: Compute all values, but count only some rows of large weights: a part of them
                (1/16), or so many.
            seed: Draws the same elements for the same number, on every device.

        Returns:
            The table; of a sample, with standard errors (``table.errors``).

        >>> import torch, gradtrace as gt
        >>> x, y = torch.tensor([3.0, 4.0], requires_grad=True), torch.ones(2, requires_grad=True)
        >>> trace = gt.trace(torch.stack([(x * y).sum(), x.exp().sum()]), names={"x": x, "y": y})
        >>> trace.influence("operators", of="x", index=1)["MulBackward0"]  # for 1 of 2 losses
        Row('MulBackward0', through=1, eligible=2, share=0.5, weighted=0.01799, unreached=0, own=0)
        """
        self.check_unchanged()
        by, components = checked_weight(weight), None if components is None else spelt(components)
        chosen = chosen_components(self, components)
        drawn = None if sample is None else (positive("sample", sample), seed)
        rows = None if leaf_rows is None else (leaf_rows, seed)
        table = influence_of(self, chosen, of, index, drawn, rows).by(by)
        kind = components if isinstance(components, str) else ""
        exact = table.measured is None
        table = replace(table, kind=kind, source=TraceSource(self, components, of, exact))
        if isinstance(components, str) and of is None and drawn is None and rows is None:
            self.asked[components] = table
        return table

    @isolated()
    def decompose(self, components: Components = None) -> Decomposition:
        """The gradient through each component, over all paths: ``g = g_through + g_around``.

        Exact and signed, whatever the trace's rule. A path that enters one many times passes it
        once. It costs at most a backward pass for each component. See ``Decomposition``.

        Args:
            components: Modules, groups or kinds of parts, as for ``Trace.influence``.

        Returns:
            The gradient by component, see ``Decomposition``.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> split = gt.trace((x.exp() + 3 * x).sum(), names={"x": x}).decompose("arguments")
        >>> split.gradient("add[1] from MulBackward0", "x")
        tensor([3., 3.])
        >>> round(sum(split.shares.values()), 6)
        1.0
        """
        self.check_unchanged()
        chosen = component_finder(self).choose(components)
        return possible(decomposed(self, chosen, components))

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
        """Write gradients, influence (of modules, and of the kinds requested so far), flow and the
        paths of a sample of elements to a ``.gradtrace`` file; read it with ``gradtrace.load``.

        Args:
            path: File to write.
            sample: How many elements' paths are saved.
            seed: Draws the same elements for the same number, on every device.
        """
        view = self._view(sample, seed)
        asked = {kind: each for kind, each in self.asked.items() if each.rule == self.rule}
        tables = {"": self.influence(), **asked}
        tables = {kind: replace(each, measured=each.coverage) for kind, each in tables.items()}
        coarse = self.granularity == "operator"
        paths = [] if coarse else list(self.paths(sample=sample, seed=seed))
        saving.save(path, self, view, tables, self.norms(), paths)

    @isolated()
    def report(
        self,
        path: str | os.PathLike[str],
        *,
        compare: Trace | saving.Saved | None = None,
        name: str | Sequence[str] | None = None,
        sample: int = 1000,
        seed: int = 0,
        training: str | os.PathLike[str] | None = None,
        attribution: attributed.Graph | None = None,
    ) -> None:
        """Write the trace as one self-contained HTML file; it needs no network and no other file.

        The report of a trace that was made under ``gt.watch(model, diagnose=True)`` leads with what
        ``watch.diagnose`` finds.

        Args:
            path: File to write.
            compare: Another trace to show beside this one.
            name: Title of this trace in the report, or one for each of the two.
            sample: How many random elements the top paths are taken from.
            seed: Draws the same elements for the same number, on every device.
            training: File of a ``gradtrace.Monitor``, whose run is then shown, too.
            attribution: Graph to show in a tab of its own: ``watch.attribute(...).graph()``.

        >>> import torch, gradtrace as gt
        >>> from tempfile import TemporaryDirectory
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> with TemporaryDirectory() as folder:
        ...     gt.trace((x * x).sum(), names={"x": x}).report(f"{folder}/x.html", name="squares")
        """
        drawn = (positive("sample", sample), seed)
        saving.write(path, [self, compare], name, training, *drawn, attribution)

    def _repr_html_(self) -> str:
        """The report in a frame, for notebooks; a smaller view for large models."""
        return reports.framed(lambda: self._view(small=is_large(self.program)), repr(self))

    def _view(self, sample: int = 1000, seed: int = 0, small: bool = False) -> reports.View:
        """The data of a report; cached, so it is available after an optimiser's step."""
        drawn = (positive("sample", sample), seed, small)
        key = (self.rule, self.granularity, *drawn)
        if key not in self._views:
            self._views[key] = view_of(self, *drawn, self._diagnosis)
        return self._views[key]
