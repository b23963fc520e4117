"""``Trace``: paths, influence, flow and reports of one loss, or of a vector of losses."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import overload

import torch
from torch import Tensor

from gradtrace import report as reports
from gradtrace.autodiff.fingerprints import WeightFingerprints
from gradtrace.autodiff.loss_checks import isolated
from gradtrace.autodiff.names import LazyGradients, unknown
from gradtrace.errors import GradtraceError, TooLarge, UnknownName
from gradtrace.flow import Flow, flow_of, measure
from gradtrace.ir import interpreter, memory
from gradtrace.ir.program import Program
from gradtrace.report import saving
from gradtrace.semirings import Count
from gradtrace.tracing.components import Component, ComponentFinder, Components, ComponentSelection
from gradtrace.tracing.influence import Influence, checked_weight
from gradtrace.tracing.path_search import PathFollower
from gradtrace.tracing.paths import Builder, LazyPaths, Path, Paths, path_provenance, ravel, sampled
from gradtrace.tracing.per_sample import Pairs
from gradtrace.tracing.provenance import ComponentBits, ProvenanceTable
from gradtrace.tracing.tally import Tally
from gradtrace.tracing.tensor_paths import TensorPaths
from gradtrace.tracing.traced_value import TracedValue
from gradtrace.tracing.tracer import TracedLeaf, Tracer

SAMPLED_ELEMENTS = 10_000
"""The number of elements a report samples for influence if memory is short for all."""

SMALL_VIEW_NOTE = (
    f"this is a smaller view, for a notebook: influence of {SAMPLED_ELEMENTS:,} sampled elements, "
    "and fewer cells and paths; trace.report('report.html') writes all"
)

FULL_VIEW_MAX_OPERATORS, FULL_VIEW_MAX_ELEMENTS = 2_000, 5_000_000
"""Above this many operators, or parameter elements, a notebook shows a smaller view."""

ARGUMENTS_MAX_OPERATORS = 4_000
"""Above this many operators a report does not list the arguments of sums."""


@dataclass
class Trace:
    """The paths behind a loss.

    ``gradients`` are those of autograd, by name; ``rule`` is ``"greedy"`` or ``"viterbi"``;
    ``pairs`` is the number of losses. ``budget`` limits the bytes of the values that are kept to
    follow paths; values that do not fit are recomputed (None: the limit is the free memory). If
    influence needs more than half of the budget, provenance ids are stored in one or two bytes
    instead of four. Paths and influence are computed on request, from the weights and activations
    of the forward pass: request them before these are changed in place, as an optimiser does.
    """

    program: Program = field(repr=False)
    gradients: LazyGradients = field(repr=False)
    rule: str
    granularity: str
    pairs: int
    modules: Mapping[str, str] = field(repr=False)
    names: dict[int, str] = field(repr=False)  # by leaf value
    aliases: dict[str, tuple[str, ...]] = field(repr=False)
    _versions: list[tuple[Tensor, int]] = field(init=False, repr=False)
    _prints: WeightFingerprints = field(init=False, repr=False)
    budget: int | None = None
    asked: dict[str, Influence] = field(default_factory=dict, repr=False)
    _followers: dict[int, PathFollower] = field(default_factory=dict, repr=False)
    _views: dict[tuple[int, int, bool], reports.View] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._versions = [(t, t._version) for t in weights_of(self.program)]
        self._prints = WeightFingerprints(leaf.tensor for leaf in self.program.leaves)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not exact, one line per operator."""
        return tuple(dict.fromkeys(self.program.notes()))

    def _unchanged(self) -> None:
        changed = any(tensor._version != version for tensor, version in self._versions)
        if changed or not self._prints.hold():
            raise GradtraceError(
                "weights or activations were changed in place since the trace was made (by an "
                "optimiser step?), so its paths can no longer be followed; ask for paths and "
                "influence before the step"
            )

    # Paths ----------------------------------------------------------------------------------------

    @isolated()
    def path(self, name: str, index: int | Sequence[int] = (), *, pair: int = 0) -> Path:
        """The path that carried the most gradient to one element of a leaf.

        >>> import torch, gradtrace as gt
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> path = gt.trace((x * x).sum(), names={"x": x}).path("x", 1)
        >>> path.weight, path.gradient, path.operators
        (4.0, 8.0, ['MulBackward0', 'SumBackward0'])
        """
        builder = self._builder(pair)
        if self.granularity == "operator":
            return self._tensor_path(name, index, builder)
        value, element = self._element(name, index)
        start = {value: torch.tensor([element], device=self._device)}
        (path,) = builder.followed(start, self.rule)
        if path is None:
            raise GradtraceError(
                f"{name}{list(_indices(index))} has no path: every contribution to its gradient "
                "is 0"
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

        With ``sample``: the paths, by the trace's rule, of that many random elements of one leaf or
        of all leaves. Elements without a path are left out.
        """
        builder = self._builder(pair)
        if self.granularity == "operator":
            raise GradtraceError(
                "at operator granularity a leaf has one path: trace.path(name); for the paths of "
                "elements trace with granularity='scalar'"
            )
        if sample is not None:
            names = list(self.gradients) if name is None else [self._known(name)]
            found = self._sampled(builder, names, _positive("sample", sample), seed)
            return Paths(found, f"Paths ({self.rule})")
        if name is None:
            raise GradtraceError(
                "say which paths: paths(name), paths(name, index), paths(sample=n)"
            )
        if index is None:
            value = self._leaf(name)
            elements = torch.arange(self._shape(name).numel(), device=self._device)
        else:
            value, element = self._element(name, index)
            elements = torch.tensor([element], device=self._device)
        best = builder.follower.best(value, elements, _positive("k", k))
        return Paths(
            tuple(builder.path(value, int(elements[place]), edges) for place, edges in best),
            f"Largest paths of {name}",
        )

    def _tensor_path(self, name: str, index: int | Sequence[int], builder: Builder) -> Path:
        value = self._leaf(name)
        if _indices(index):
            raise GradtraceError(
                f"at operator granularity {name} is followed as a whole: trace.path({name!r})"
            )
        chain = TensorPaths(self.program, self.rule, builder.follower.seed).chain(value)
        if not chain.links:
            raise GradtraceError(f"{name} has no path: its gradient is 0 everywhere")
        return builder.coarse(value, chain.links)

    @isolated()
    def enumerate(self, limit: int = 10_000, zeros: bool = False) -> Paths:
        """All paths from every leaf element to the loss; see ``gradtrace.enumerate_paths``."""
        builder = self._builder(0)
        too_many = TooLarge(
            f"there are more than {limit:,} paths; raise limit, or take a smaller graph. "
            "gradtrace.backward(loss, gradtrace.semirings.COUNT) tells how many there are"
        )
        counts = interpreter.run(self.program, Count(log=True)).values()  # before listing any
        if sum(2.0 ** min(float(n), 999.0) for c in counts for n in c.reshape(-1)) > limit:
            raise too_many
        found: list[Path] = []
        for name, value in self._values.items():
            for element in range(self._shape(name).numel()):
                for edges in builder.follower.every(value, element, zeros):
                    if len(found) == limit:
                        raise too_many
                    found.append(builder.path(value, element, edges))
        return Paths(tuple(found), "All paths")

    def _sampled(self, builder: Builder, names: list[str], sample: int, seed: int) -> LazyPaths:
        sizes = {name: self._shape(name).numel() for name in names}
        drawn = sampled(sizes, sample, seed)
        starts = {self._leaf(name): e.to(self._device) for name, e in drawn.items() if len(e)}
        return builder.lazy_paths(starts, self.rule)

    def _builder(self, pair: int) -> Builder:
        self._unchanged()
        if not 0 <= pair < self.pairs:
            raise UnknownName(f"pair {pair} is none of the {self.pairs} losses of this trace")
        if pair not in self._followers:
            seed = self.program.seed
            if self.pairs > 1:
                seed = torch.zeros_like(seed).index_fill(
                    0, torch.tensor(pair, device=seed.device), 1
                )
            # one pair at a time, to save memory
            self._followers = {pair: PathFollower(self.program, seed, self._path_budget())}
        return Builder.of(self._followers[pair], self.names, pair)

    def _path_budget(self) -> int | None:
        """The budget in bytes for values while paths are followed; None: all fit."""
        free = memory.available(self._device)
        memory.see(
            memory.streaming(self.program, self._uses_kept),
            self._device,
            "following paths",
            "trace fewer samples at a time",
            free,
        )
        free = free if self.budget is None else self.budget
        needed = memory.whole(self.program, self._uses_kept)
        return None if free is None or needed <= free else free // 2

    @property
    def _uses_kept(self) -> bool:
        """Whether the gradients that recording kept are the values that are followed."""
        return self.rule == "greedy" and self.pairs == 1

    @property
    def _device(self) -> torch.device:
        return self.program.seed.device

    @cached_property
    def _values(self) -> dict[str, int]:
        return {name: value for value, name in self.names.items()}

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return {self.names[leaf.value]: leaf.tensor for leaf in self.program.leaves}

    def _known(self, name: str) -> str:
        """The first of a leaf's names."""
        first = self.gradients.aliases.get(name, name)
        if first not in self._values:
            raise UnknownName(unknown("leaf", name, self._values))
        return first

    def _leaf(self, name: str) -> int:
        return self._values[self._known(name)]

    def _shape(self, name: str) -> torch.Size:
        return self._tensors[self._known(name)].shape

    def _element(self, name: str, index: int | Sequence[int]) -> tuple[int, int]:
        value, shape = self._leaf(name), tuple(self._shape(name))
        numbers = _indices(index)
        if len(numbers) != len(shape):
            raise UnknownName(
                f"{name} has {len(shape)} dimensions ({list(shape)}), so an element of it has "
                f"{len(shape)} numbers, not {list(numbers)}"
            )
        if not all(-size <= i < size for i, size in zip(numbers, shape)):
            raise UnknownName(f"{name}{list(numbers)} is outside its shape {list(shape)}")
        return value, ravel([i % size for i, size in zip(numbers, shape)], shape)

    # Influence ------------------------------------------------------------------------------------

    @isolated()
    def influence(
        self,
        components: Components = None,
        weight: str = "count",
        *,
        sample: int | None = None,
        seed: int = 0,
    ) -> Influence:
        """The share of parameter elements whose paths pass through each component, as a table.

        ``components`` is None (every module, with its submodules), ``"classes"``, ``"operators"``,
        ``"labels"`` (``gradtrace.label``), ``"arguments"`` (which argument of a sum or a
        concatenation), a list of module names or patterns, or ``{group: names}``. A name is a
        module's, or begins with ``class:``, ``operator:``, ``label:`` or ``argument:``.

        With ``sample`` only the paths of that many random elements of all leaves are followed and
        counted. That costs little more than recording did.
        """
        self._unchanged()
        by = checked_weight(weight)
        chosen = self._components().choose(components)
        if sample is not None:
            return self._counted(chosen, _positive("sample", sample), seed).by(by)
        table = self._counted(chosen).by(by)
        if isinstance(components, str):
            self.asked[components] = table
        return table

    def _components(self) -> ComponentFinder:
        others = {name: self.aliases.get(name, ()) for name in self._values}
        return ComponentFinder(self.program, self.modules, others)

    def _counted(
        self, chosen: ComponentSelection, sample: int | None = None, seed: int = 0
    ) -> Influence:
        """The table of the chosen components, over the paths of all elements or of a sample."""
        tally = Tally(chosen.components, self.program, chosen.marks, self.names, self.pairs)
        if sample is not None:
            self._count_sample(tally, chosen.marks, sample, seed)
            drawn = sum(leaf.total for leaf in tally.leaves) // self.pairs
            return tally.result(self.rule, "count", (f"paths of {drawn:,} elements", *self.notes))
        what = "measuring influence"
        remedy = (
            "trace fewer samples at a time, sampled elements: influence(sample=10_000), or whole "
            "tensors: granularity='operator'"
        )
        narrow = False
        if self.granularity == "scalar":
            narrow, tally.room = self._memory_plan(what, remedy)
        with torch.no_grad(), memory.within(self._device, what, remedy):
            for found, gradient in self._traced_leaves(chosen.marks, narrow):
                tally.add(found, gradient)
            return tally.result(self.rule, "count", self.notes)

    def _memory_plan(self, what: str, remedy: str) -> tuple[bool, int]:
        """Whether to store provenance ids compactly, and the bytes that pending leaves may hold.
        Raises if the pass does not fit into memory.
        """
        free = memory.available(self._device)
        room = free if self.budget is None else self.budget
        if self.budget is None and memory.ample(self.program, self._device, room):
            return False, memory.LEAF_BATCH_MAX_BYTES
        needed = memory.streaming(self.program, self._uses_kept)
        narrow = memory.short(needed, self._device, room)
        if narrow:
            needed = memory.streaming(self.program, self._uses_kept, narrow)
        if narrow or self.budget is not None:  # else memory is ample
            memory.see(needed, self._device, what, remedy, free)
        # if memory is not short, at least ``needed`` bytes are left for pending leaves
        return narrow, 0 if narrow else min(memory.LEAF_BATCH_MAX_BYTES, needed)

    def _count_sample(self, tally: Tally, marks: ComponentBits, sample: int, seed: int) -> None:
        """Follow and count the paths of sampled elements, for each pair."""
        if self.granularity == "operator":
            raise GradtraceError(
                "at operator granularity a leaf has one path, and there is nothing to sample; "
                "trace with granularity='scalar', or leave sample out"
            )
        sizes = {name: self._shape(name).numel() for name in self.gradients}
        drawn = {self._leaf(name): e for name, e in sampled(sizes, sample, seed).items()}
        starts = {value: e.to(self._device) for value, e in drawn.items()}
        for pair in range(self.pairs):
            forest = self._builder(pair).follower.follow(starts, self.rule)
            found, first = path_provenance(forest, self.program, marks), 0
            gradient = forest.gradient[forest.starts]
            for value, elements in drawn.items():
                mine = slice(first, first + len(elements))
                first = mine.stop
                size = sizes[self.names[value]]
                tally.add_some(value, pair, found.marks, found.number[mine], gradient[mine], size)

    @isolated()
    def flow(self) -> Flow:
        """Gradient magnitude along depth, per module, and a diagnosis in names: whether it
        vanishes, explodes or dies.
        """
        self._unchanged()
        what, remedy = "measuring flow", "trace fewer samples at a time"
        memory.see(memory.streaming(self.program), self._device, what, remedy)
        return flow_of(self.program, self.names, self.modules)

    # Output ------------------------------------------------------------------------------------

    @isolated()
    def save(self, path: str | os.PathLike[str], *, sample: int = 1000, seed: int = 0) -> None:
        """Write gradients, influence (of modules, and of the kinds requested so far), flow and the
        paths of a sample of elements to a ``.gradtrace`` file; read it with ``gradtrace.load``.
        """
        saving.save(self, path, sample, seed)

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
    ) -> None:
        """Write the trace as one self-contained HTML file; it needs no network and no other file.

        ``compare`` shows another trace beside this one. ``name`` is the title of this trace in the
        report (or one title for each of the two). The top paths are those of a uniform ``sample``
        of all elements. ``training`` is the file of a ``gradtrace.Monitor``, whose run is then
        shown too.

        >>> import torch, gradtrace as gt
        >>> from tempfile import TemporaryDirectory
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> with TemporaryDirectory() as folder:
        ...     gt.trace((x * x).sum(), names={"x": x}).report(f"{folder}/x.html", name="squares")
        """
        drawn = (_positive("sample", sample), seed)
        saving.write(path, [self, compare], name, training, *drawn)

    def _repr_html_(self) -> str:
        """The report in a frame, for notebooks; a smaller view for large models."""
        many = sum(leaf.tensor.numel() for leaf in self.program.leaves)
        large = many > FULL_VIEW_MAX_ELEMENTS or len(self.program.blocks) > FULL_VIEW_MAX_OPERATORS
        return reports.framed(lambda: self._view(small=large), repr(self))

    def _view(self, sample: int = 1000, seed: int = 0, small: bool = False) -> reports.View:
        """The data of a report; cached, so it is available after an optimiser's step."""
        key = (_positive("sample", sample), seed, small)
        if key not in self._views:
            self._views[key] = self._make_view(sample, seed, small)
        return self._views[key]

    def _make_view(self, sample: int, seed: int, small: bool) -> reports.View:
        self._unchanged()
        tables, notes = self._tables(small)
        builder = self._builder(0)
        gradients: Mapping[str, Tensor] = self.gradients
        if self.pairs > 1:
            gradients = {n: builder.follower.gradients[v] for n, v in self._values.items()}
            notes += (
                f"paths and heat maps are those of the first of {self.pairs:,} losses; masses and "
                "flow are of their sum",
            )
        size = measure(self.program, self.program.seed)
        source = reports.Source(
            self.program,
            builder,
            gradients,
            size,
            self.names,
            self.aliases,
            self.modules,
            self.rule,
            self.granularity,
            self.pairs,
            (*self.notes, *notes),
            tables,
        )
        flow = flow_of(self.program, self.names, self.modules, size=size)
        limits = reports.SMALL if small else reports.FULL
        return reports.view(source, flow, sample, seed, limits)

    def _tables(self, small: bool = False) -> tuple[dict[str, Influence], tuple[str, ...]]:
        """Influence for every kind of component in the program, counted in one pass, and notes on
        it. ``small``: over a sample of elements.
        """
        finder, parts = self._components(), dict[str, list[Component]]()
        for key, kind in self._kinds().items():
            with contextlib.suppress(UnknownName):  # the program has none of this kind
                parts[key] = finder.choose(kind).components
        chosen = ComponentSelection([c for some in parts.values() for c in some], finder.marks)
        notes: tuple[str, ...]
        if small and self.granularity == "scalar":
            table, notes = self._counted(chosen, SAMPLED_ELEMENTS), (SMALL_VIEW_NOTE,)
        else:
            table, notes = self._all_or_sample(chosen)
        rows = iter(table.rows)
        cut = {kind: tuple(islice(rows, len(some))) for kind, some in parts.items()}
        return {kind: replace(table, rows=some) for kind, some in cut.items()}, notes

    def _all_or_sample(self, chosen: ComponentSelection) -> tuple[Influence, tuple[str, ...]]:
        try:
            return self._counted(chosen), ()
        except TooLarge as error:
            note = f"influence is that of {SAMPLED_ELEMENTS:,} sampled elements: {error}"
            return self._counted(chosen, SAMPLED_ELEMENTS), (note,)

    def _kinds(self) -> dict[str, str | None]:
        """The kinds of components in a report, by their key there. The first is the default of
        ``influence()``, except that whole tensors have no labelled slices.
        """
        blocks, whole = self.program.blocks, self.granularity == "operator"
        inside = any(block.place.module for block in blocks)
        kinds: dict[str, str | None] = {"": "operators" if whole and not inside else None}
        names = ["classes", "operators", *([] if whole else ["labels"])]
        names += [] if len(blocks) > ARGUMENTS_MAX_OPERATORS else ["arguments"]
        return kinds | {name: name for name in names}

    def _traced_leaves(
        self, marks: ComponentBits, narrow: bool = False
    ) -> Iterator[tuple[TracedLeaf, Tensor]]:
        """Trace the program: its leaves, each with its gradient."""
        seed = self.program.seed
        if self.granularity == "operator":
            yield from self._traced_tensors(marks)
            return
        tracer = Tracer(self.program, self.rule, marks, narrow)
        if self.pairs == 1:
            for found in tracer.run(seed):
                if self.rule == "viterbi" or found.state.value is None:
                    yield _with(found, found.leaf.compute(), self.rule)
                else:
                    yield found, found.state.value
            return
        pairs = Pairs.follow(self.program, self.pairs)
        if self.rule == "greedy":
            for found in tracer.run_pairs(seed, pairs):
                yield found, found.gradient
            return
        gradients = Tracer(self.program, "gradient", narrow=narrow).run_pairs(seed, pairs)
        for found, other in zip(tracer.run_pairs(seed, pairs), gradients):
            yield found, other.gradient

    def _traced_tensors(self, marks: ComponentBits) -> Iterator[tuple[TracedLeaf, Tensor]]:
        """``_traced_leaves`` at operator granularity: a leaf's elements all have its path."""
        if marks.slices:
            raise GradtraceError(
                "a path of whole tensors runs through all slices of a labelled one; measure labels "
                "with granularity='scalar'"
            )
        for pair in range(self.pairs):
            follower = self._builder(pair).follower
            coarse = TensorPaths(self.program, self.rule, follower.seed)
            for leaf in self.program.leaves:
                chain = coarse.chain(leaf.value)
                bits = 1 if chain.links else 0
                for link in chain.links:
                    bits |= marks.block.get(link.block, 0)
                    bits |= marks.position.get((link.block, link.position), 0)
                gradient = follower.gradients[leaf.value]
                state = TracedValue(gradient, 0, chain.reached.int(), ProvenanceTable((bits,)))
                yield TracedLeaf(leaf, state, pair), gradient


def _with(found: TracedLeaf, gradient: Tensor, rule: str) -> tuple[TracedLeaf, Tensor]:
    """A leaf whose gradient was deferred, and the gradient."""
    if rule == "greedy":
        found = found._replace(state=found.state._replace(value=gradient))
    return found, gradient


def _positive(word: str, number: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise GradtraceError(f"{word} is a number of paths from 1 on, not {number!r}")
    return number


def _indices(index: int | Sequence[int]) -> tuple[int, ...]:
    """An index as a tuple of ints; NumPy integers and one-element tensors are accepted."""
    try:
        return (operator.index(index),)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        pass
    try:
        return tuple(operator.index(i) for i in index)  # type: ignore[union-attr]
    except TypeError:
        raise UnknownName(f"an element is named by whole numbers, not by {index!r}") from None


def weights_of(program: Program) -> Iterator[Tensor]:
    """The tensors that the program's maps refer to, each once."""
    seen: set[int] = set()
    for map_ in program.maps:
        for name in map_.tensors():
            tensor = getattr(map_, name)
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor
