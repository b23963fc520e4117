"""A trace: what gradient tracing found of one loss, or of a vector of losses."""

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
from gradtrace.tracing.paths import Builder, LazyPaths, Path, Paths, marked, ravel, sampled
from gradtrace.tracing.per_sample import Pairs
from gradtrace.tracing.provenance import ComponentBits, ProvenanceTable
from gradtrace.tracing.tally import Tally
from gradtrace.tracing.tensor_paths import TensorPaths
from gradtrace.tracing.traced_value import TracedValue
from gradtrace.tracing.tracer import TracedLeaf, Tracer

SAMPLED = 10_000
"""The elements whose paths tell influence in a report where there is no memory for all."""

SMALLER = (
    f"this is a smaller view, for a notebook: influence of {SAMPLED:,} sampled elements, and fewer "
    "cells and paths; trace.report('report.html') writes all"
)

OPERATORS, ELEMENTS = 2_000, 5_000_000
"""From so many on, of operators or of parameters, a notebook is shown a smaller view."""

MANY = 4_000
"""Operators from which on a report does not tell each argument of each sum apart."""


@dataclass
class Trace:
    """The paths behind a loss.

    ``gradients`` are those of autograd, by name; ``rule`` is ``"greedy"`` or ``"viterbi"``;
    ``pairs`` is the number of losses. ``budget`` can be set to the bytes that the values behind
    paths may take; those that do not fit (None: in what is free) are computed again. Where
    influence takes more than half as many, marks wait for their use in one or two bytes, not in
    four. Paths and influence are found when asked for, from the weights and activations of the
    forward pass: ask before these are changed in place, as an optimiser does.
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
    _kept: dict[int, PathFollower] = field(default_factory=dict, repr=False)
    _views: dict[tuple[int, int, bool], reports.View] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._versions = [(t, t._version) for t in weights_of(self.program)]
        self._prints = WeightFingerprints(leaf.tensor for leaf in self.program.leaves)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not exact, one line an operator."""
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
            return self._coarse(name, index, builder)
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
        """The k paths of greatest |weight| from an element, or from any of a leaf; or, with
        ``sample``, the paths by the trace's rule of that many elements drawn at random, of a leaf
        or of all (of those drawn, the ones that have a path).
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
        best = builder.kept.best(value, elements, _positive("k", k))
        return Paths(
            tuple(builder.path(value, int(elements[place]), hops) for place, hops in best),
            f"Largest paths of {name}",
        )

    def _coarse(self, name: str, index: int | Sequence[int], builder: Builder) -> Path:
        value = self._leaf(name)
        if _indices(index):
            raise GradtraceError(
                f"at operator granularity {name} is followed as a whole: trace.path({name!r})"
            )
        chain = TensorPaths(self.program, self.rule, builder.kept.seed).chain(value)
        if not chain.links:
            raise GradtraceError(f"{name} has no path: its gradient is 0 everywhere")
        return builder.coarse(value, chain.links)

    @isolated()
    def enumerate(self, limit: int = 10_000, zeros: bool = False) -> Paths:
        """All paths from every leaf element to the loss; see ``gradtrace.enumerate_paths``."""
        builder = self._builder(0)
        few = TooLarge(
            f"there are more than {limit:,} paths; raise limit, or take a smaller graph. "
            "gradtrace.backward(loss, gradtrace.semirings.COUNT) tells how many there are"
        )
        counts = interpreter.run(self.program, Count(log=True)).values()  # before any is listed
        if sum(2.0 ** min(float(n), 999.0) for c in counts for n in c.reshape(-1)) > limit:
            raise few
        found: list[Path] = []
        for name, value in self._values.items():
            for element in range(self._shape(name).numel()):
                for hops in builder.kept.every(value, element, zeros):
                    if len(found) == limit:
                        raise few
                    found.append(builder.path(value, element, hops))
        return Paths(tuple(found), "All paths")

    def _sampled(self, builder: Builder, names: list[str], sample: int, seed: int) -> LazyPaths:
        sizes = {name: self._shape(name).numel() for name in names}
        drawn = sampled(sizes, sample, seed)
        starts = {self._leaf(name): e.to(self._device) for name, e in drawn.items() if len(e)}
        return builder.woven(starts, self.rule)

    def _builder(self, pair: int) -> Builder:
        self._unchanged()
        if not 0 <= pair < self.pairs:
            raise UnknownName(f"pair {pair} is none of the {self.pairs} losses of this trace")
        if pair not in self._kept:
            seed = self.program.seed
            if self.pairs > 1:
                seed = torch.zeros_like(seed).index_fill(
                    0, torch.tensor(pair, device=seed.device), 1
                )
            self._kept = {
                pair: PathFollower(self.program, seed, self._room())
            }  # one pair at a time
        return Builder.of(self._kept[pair], self.names, pair)

    def _room(self) -> int | None:
        """The bytes that values may take while paths are followed; None: all fit."""
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
        """Through which components the paths of all parameter elements run, as a table.

        ``components`` is None (every module, with all inside it), ``"classes"``, ``"operators"``,
        ``"labels"`` (``gradtrace.label``), ``"arguments"`` (which argument of a sum or a
        concatenation), a list of module names or patterns, or ``{group: names}``. A name is a
        module's, or begins with ``class:``, ``operator:``, ``label:`` or ``argument:``.

        With ``sample`` only the paths of that many elements are followed, drawn at random from all
        leaves; counts are then of these. It costs little more than recording did.
        """
        self._unchanged()
        by = checked_weight(weight)
        chosen = self._survey().choose(components)
        if sample is not None:
            return self._counted(chosen, _positive("sample", sample), seed).by(by)
        table = self._counted(chosen).by(by)
        if isinstance(components, str):
            self.asked[components] = table
        return table

    def _survey(self) -> ComponentFinder:
        others = {name: self.aliases.get(name, ()) for name in self._values}
        return ComponentFinder(self.program, self.modules, others)

    def _counted(
        self, chosen: ComponentSelection, sample: int | None = None, seed: int = 0
    ) -> Influence:
        """The table of some components, by the paths of all elements or of a sample."""
        tally = Tally(chosen.components, self.program, chosen.marks, self.names, self.pairs)
        if sample is not None:
            self._count_some(tally, chosen.marks, sample, seed)
            drawn = sum(leaf.total for leaf in tally.leaves) // self.pairs
            return tally.result(self.rule, "count", (f"paths of {drawn:,} elements", *self.notes))
        what = "measuring influence"
        remedy = (
            "trace fewer samples at a time, sampled elements: influence(sample=10_000), or whole "
            "tensors: granularity='operator'"
        )
        narrow = False
        if self.granularity == "scalar":
            narrow, tally.room = self._sparing(what, remedy)
        with torch.no_grad(), memory.within(self._device, what, remedy):
            for found, gradient in self._found(chosen.marks, narrow):
                tally.add(found, gradient)
            return tally.result(self.rule, "count", self.notes)

    def _sparing(self, what: str, remedy: str) -> tuple[bool, int]:
        """Whether marks are to be narrow while they wait, and the bytes that leaves may hold while
        they do; a pass that does not fit is refused.
        """
        free = memory.available(self._device)
        room = free if self.budget is None else self.budget
        if self.budget is None and memory.ample(self.program, self._device, room):
            return False, memory.LEAF_BATCH_MAX_BYTES
        needed = memory.streaming(self.program, self._uses_kept)
        narrow = memory.short(needed, self._device, room)
        if narrow:
            needed = memory.streaming(self.program, self._uses_kept, narrow)
        if narrow or self.budget is not None:  # else there is more than enough
            memory.see(needed, self._device, what, remedy, free)
        # where memory is not short, there is as much again
        return narrow, 0 if narrow else min(memory.LEAF_BATCH_MAX_BYTES, needed)

    def _count_some(self, tally: Tally, marks: ComponentBits, sample: int, seed: int) -> None:
        """Follow the paths of sampled elements, for each pair."""
        if self.granularity == "operator":
            raise GradtraceError(
                "at operator granularity a leaf has one path, and there is nothing to sample; "
                "trace with granularity='scalar', or leave sample out"
            )
        sizes = {name: self._shape(name).numel() for name in self.gradients}
        drawn = {self._leaf(name): e for name, e in sampled(sizes, sample, seed).items()}
        starts = {value: e.to(self._device) for value, e in drawn.items()}
        for pair in range(self.pairs):
            forest = self._builder(pair).kept.follow(starts, self.rule)
            found, first = marked(forest, self.program, marks), 0
            gradient = forest.gradient[forest.starts]
            for value, elements in drawn.items():
                mine = slice(first, first + len(elements))
                first = mine.stop
                size = sizes[self.names[value]]
                tally.add_some(value, pair, found.marks, found.number[mine], gradient[mine], size)

    @isolated()
    def flow(self) -> Flow:
        """Gradient magnitude along depth, per module, and in plain words whether it vanishes,
        explodes or dies.
        """
        self._unchanged()
        what, remedy = "measuring flow", "trace fewer samples at a time"
        memory.see(memory.streaming(self.program), self._device, what, remedy)
        return flow_of(self.program, self.names, self.modules)

    # To keep -----------------------------------------------------------------------------------

    @isolated()
    def save(self, path: str | os.PathLike[str], *, sample: int = 1000, seed: int = 0) -> None:
        """Write gradients, influence (of modules, and of the kinds asked for so far), flow and the
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
        """Write one HTML file to look at the trace in a browser; it needs no network and no other
        file.

        ``compare`` puts another trace beside this one. ``name`` is what the report calls this trace
        (or a name for each of the two). Its top paths are those of a uniform ``sample`` of all
        elements. ``training`` is the file of a ``gradtrace.Monitor``, whose run is then shown too.

        >>> import torch, gradtrace as gt
        >>> from tempfile import TemporaryDirectory
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> with TemporaryDirectory() as folder:
        ...     gt.trace((x * x).sum(), names={"x": x}).report(f"{folder}/x.html", name="squares")
        """
        drawn = (_positive("sample", sample), seed)
        saving.write(path, [self, compare], name, training, *drawn)

    def _repr_html_(self) -> str:
        """The report in a frame, for notebooks; of large models a smaller one."""
        many = sum(leaf.tensor.numel() for leaf in self.program.leaves)
        large = many > ELEMENTS or len(self.program.blocks) > OPERATORS
        return reports.framed(lambda: self._view(small=large), repr(self))

    def _view(self, sample: int = 1000, seed: int = 0, small: bool = False) -> reports.View:
        """What a report shows; made once, so it is there even after an optimiser's step."""
        key = (_positive("sample", sample), seed, small)
        if key not in self._views:
            self._views[key] = self._seen(sample, seed, small)
        return self._views[key]

    def _seen(self, sample: int, seed: int, small: bool) -> reports.View:
        self._unchanged()
        tables, notes = self._tables(small)
        builder = self._builder(0)
        gradients: Mapping[str, Tensor] = self.gradients
        if self.pairs > 1:
            gradients = {n: builder.kept.gradients[v] for n, v in self._values.items()}
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
        """Influence of the kinds of components that there are, counted together in one pass, and
        what is to be said of them. ``small``: that of a sample of elements.
        """
        survey, parts = self._survey(), dict[str, list[Component]]()
        for key, kind in self._kinds().items():
            with contextlib.suppress(UnknownName):  # there are none of these
                parts[key] = survey.choose(kind).components
        chosen = ComponentSelection([c for some in parts.values() for c in some], survey.marks)
        notes: tuple[str, ...]
        if small and self.granularity == "scalar":
            table, notes = self._counted(chosen, SAMPLED), (SMALLER,)
        else:
            table, notes = self._all_or_some(chosen)
        rows = iter(table.rows)
        cut = {kind: tuple(islice(rows, len(some))) for kind, some in parts.items()}
        return {kind: replace(table, rows=some) for kind, some in cut.items()}, notes

    def _all_or_some(self, chosen: ComponentSelection) -> tuple[Influence, tuple[str, ...]]:
        try:
            return self._counted(chosen), ()
        except TooLarge as error:
            told = f"influence is that of {SAMPLED:,} sampled elements: {error}"
            return self._counted(chosen, SAMPLED), (told,)

    def _kinds(self) -> dict[str, str | None]:
        """The kinds of components that a report tells of, by the key they have there; the first
        are those of ``influence()``, but that whole tensors have no labelled slices.
        """
        blocks, whole = self.program.blocks, self.granularity == "operator"
        inside = any(block.place.module for block in blocks)
        kinds: dict[str, str | None] = {"": "operators" if whole and not inside else None}
        words = ["classes", "operators", *([] if whole else ["labels"])]
        words += [] if len(blocks) > MANY else ["arguments"]
        return kinds | {word: word for word in words}

    def _found(
        self, marks: ComponentBits, narrow: bool = False
    ) -> Iterator[tuple[TracedLeaf, Tensor]]:
        """The leaves after a pass, each with its gradient."""
        seed = self.program.seed
        if self.granularity == "operator":
            yield from self._coarsely(marks)
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
        plain = Tracer(self.program, "gradient", narrow=narrow).run_pairs(seed, pairs)
        for found, other in zip(tracer.run_pairs(seed, pairs), plain):
            yield found, other.gradient

    def _coarsely(self, marks: ComponentBits) -> Iterator[tuple[TracedLeaf, Tensor]]:
        """``_found`` with whole tensors: all elements of a leaf have the marks of its path."""
        if marks.slices:
            raise GradtraceError(
                "a path of whole tensors runs through all slices of a labelled one; measure labels "
                "with granularity='scalar'"
            )
        for pair in range(self.pairs):
            kept = self._builder(pair).kept
            coarse = TensorPaths(self.program, self.rule, kept.seed)
            for leaf in self.program.leaves:
                chain = coarse.chain(leaf.value)
                bits = 1 if chain.links else 0
                for link in chain.links:
                    bits |= marks.block.get(link.block, 0)
                    bits |= marks.position.get((link.block, link.position), 0)
                gradient = kept.gradients[leaf.value]
                state = TracedValue(gradient, 0, chain.reached.int(), ProvenanceTable((bits,)))
                yield TracedLeaf(leaf, state, pair), gradient


def _with(found: TracedLeaf, gradient: Tensor, rule: str) -> tuple[TracedLeaf, Tensor]:
    """A leaf whose gradient was put off, and the gradient."""
    if rule == "greedy":
        found = found._replace(state=found.state._replace(value=gradient))
    return found, gradient


def _positive(word: str, number: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise GradtraceError(f"{word} is a number of paths from 1 on, not {number!r}")
    return number


def _indices(index: int | Sequence[int]) -> tuple[int, ...]:
    """An index as whole numbers; those of NumPy and tensors of one element count as such."""
    try:
        return (operator.index(index),)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        pass
    try:
        return tuple(operator.index(i) for i in index)  # type: ignore[union-attr]
    except TypeError:
        raise UnknownName(f"an element is named by whole numbers, not by {index!r}") from None


def weights_of(program: Program) -> Iterator[Tensor]:
    """The tensors that maps refer to."""
    seen: set[int] = set()
    for step in program.steps():
        for map_, _ in step.terms:
            for name in map_.tensors():
                tensor = getattr(map_, name)
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor
