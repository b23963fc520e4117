"""``TracedProgram``: a recorded program, and how its paths are followed. All measures take one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from gradtrace.autodiff.names import LazyGradients, unknown
from gradtrace.autodiff.tuning import COMPARE_ALL_MAX_ELEMENTS, SAMPLE_ELEMENTS
from gradtrace.components.module_parts import WholeProgram
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.ir import memory
from gradtrace.ir.program import Leaf, Program
from gradtrace.kernels import Backend, backend_of
from gradtrace.linops import Cut, Identity, Index, Reduce, Slot
from gradtrace.linops.enclosed import tensors_in
from gradtrace.linops.read_through import AwayView, sharded_model, views_of
from gradtrace.paths.path_search import PathFollower
from gradtrace.paths.paths import Builder
from gradtrace.pytorch.replaced_data import data_of, have_data
from gradtrace.pytorch.wrapped_modules import named_parameters
from gradtrace.tracing.kept_plans import KEPT, KeptPlans
from gradtrace.types import ravel


@dataclass
class TracedProgram:
    """The backward program of ``pairs`` losses, its gradients, and the names of its leaves.

    ``dataclasses.replace(traced, rule=...)`` has the same program, and none of the results.
    """

    program: Program = field(repr=False)
    gradients: LazyGradients = field(repr=False)
    rule: str
    pairs: int
    modules: Mapping[str, str] = field(repr=False)  # class by name
    names: dict[int, str] = field(repr=False)  # by leaf value
    budget: int | None = None
    model: nn.Module | None = field(default=None, repr=False)  # that was watched
    whole: WholeProgram | None = field(default=None, repr=False)  # where parts are found
    unseen: tuple[str, ...] = field(default=(), repr=False)  # notes on modules that were not called
    _states: TensorStates | None = field(default=None, repr=False)  # not checked anew in copies
    _followers: dict[int, PathFollower] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self._states is None:
            self._states = TensorStates(self.program)

    def check_unchanged(self) -> None:
        """Raise if the weights and activations are not those of the forward pass any more."""
        assert self._states is not None
        if not self._states.hold():
            raise GradtraceError(
                "weights or activations were changed in place since the trace was made (by an "
                "optimiser step?), so its paths can no longer be followed; ask for paths and "
                "influence before the step"
            )

    @cached_property
    def kept(self) -> KeptPlans:
        """The plans of losses of this structure."""
        return KEPT.of(self.program, self.names, self.modules, self.gradients.aliases)

    @property
    def sharded(self) -> bool:
        """Whether weights are gathered when they are read, which all ranks must do together."""
        return any(leaf.shard is not None for leaf in self.program.leaves)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not exact, one line per operator, and what was not seen of the forward pass."""
        return (*dict.fromkeys(self.program.notes()), *self.unseen)

    @property
    def device(self) -> torch.device:
        """Where paths are followed."""
        return self.program.seed.device

    @property
    def backend(self) -> Backend:
        """Of the device that all values are on: what is executed for a request is given it."""
        return backend_of(self.program.seed)

    @property
    def silent(self) -> tuple[str, ...]:
        """Parameters of the watched model that require grad, and that the loss does not depend on;
        none if the leaves are inputs.
        """
        if self.model is None or self.whole is not None:
            return ()
        known, found = {*self.names.values(), *self.gradients.aliases}, dict[int, str]()
        for name, parameter in named_parameters(self.model):
            if parameter.requires_grad and name not in known:
                found.setdefault(id(parameter), name)  # tied ones once
        return tuple(found.values())

    # Leaves ---------------------------------------------------------------------------------------

    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """The leaves by name, in the order of the model."""
        by_value = {leaf.value: leaf for leaf in self.program.leaves}
        return {name: by_value[value] for value, name in self.names.items()}

    @cached_property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """The other names of leaves that have several, by the first."""
        found: dict[str, tuple[str, ...]] = {}
        for other, name in self.gradients.aliases.items():
            found[name] = (*found.get(name, ()), other)
        return found

    def leaf(self, name: str) -> Leaf:
        """The leaf of a name, which may be any of its names."""
        first = self.gradients.aliases.get(name, name) if isinstance(name, str) else None
        if first not in self.leaves:
            raise UnknownName(unknown("leaf", name, self.leaves))
        return self.leaves[first]

    def element(self, name: str, index: int | Sequence[int]) -> tuple[int, int]:
        """The value of a leaf, and the flat index of one of its elements."""
        leaf, numbers = self.leaf(name), indices(index)
        shape = tuple(leaf.tensor.shape)
        if len(numbers) != len(shape):
            raise UnknownName(
                f"{name} has {len(shape)} dimensions ({list(shape)}), so an element of it has "
                f"{len(shape)} numbers, not {list(numbers)}"
            )
        if not all(-size <= i < size for i, size in zip(numbers, shape)):
            raise UnknownName(f"{name}{list(numbers)} is outside its shape {list(shape)}")
        return leaf.value, ravel([i % size for i, size in zip(numbers, shape)], shape)

    # Paths ----------------------------------------------------------------------------------------

    def builder(self, pair: int) -> Builder:
        """Builds the paths of one of the losses."""
        self.check_unchanged()
        if not 0 <= pair < self.pairs:
            raise UnknownName(
                f"loss {pair} is none of the {self.pairs} of this trace, counted from 0"
            )
        if pair not in self._followers:
            if (model := sharded_model(self.program.maps)) is not None:
                model.read_all()  # which weights a path reads depends on the rank's own data
            seed = self.program.seed
            if self.pairs > 1:
                chosen = torch.tensor(pair, device=seed.device)
                seed = torch.zeros_like(seed).index_fill(0, chosen, 1)
            # one pair at a time, to save memory
            self._followers = {pair: PathFollower(self.program, seed, self._path_budget())}
        return Builder.of(self._followers[pair], self.names, pair)

    def _path_budget(self) -> int | None:
        """The budget in bytes for values while paths are followed; None: all fit."""
        free = memory.available(self.backend)
        needed, whole = self._path_bytes()
        remedy = "trace fewer samples at a time"
        memory.see(needed, self.backend, "following paths", remedy, free)
        free = free if self.budget is None else self.budget
        return None if free is None or whole <= free else free // 2

    def _path_bytes(self) -> tuple[int, int]:
        """The bytes that following paths takes: a value at a time, and all values at once. Known by
        structure, if that has been looked at.
        """
        known = self.kept.path_bytes if "kept" in self.__dict__ else {}
        found = known.get(self.uses_kept)
        if found is None:
            parts = self.program, self.uses_kept
            beside = 0 if self.uses_kept else memory.semiring_temporaries(self.program)
            found = memory.streaming(*parts) + beside, memory.whole(*parts) + beside
            known[self.uses_kept] = found
        return found

    @property
    def uses_kept(self) -> bool:
        """Whether the gradients that recording kept are the values that are followed."""
        return self.rule != "viterbi" and self.pairs == 1


def indices(index: int | Sequence[int]) -> tuple[int, ...]:
    """An index as a tuple of ints; NumPy integers and one-element tensors are accepted."""
    try:
        return (operator.index(index),)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        pass
    try:
        return tuple(operator.index(i) for i in index)  # type: ignore[union-attr]
    except TypeError:
        raise UnknownName(f"an element is named by whole numbers, not by {index!r}") from None


# Whether tensors were changed ---------------------------------------------------------------------

WITHOUT_WEIGHTS = frozenset({Identity, Index, Reduce, Cut, Slot})
"""Maps that have no weights."""


def weights_of(program: Program) -> Iterable[Tensor]:
    """The tensors that the program's maps refer to, each once."""
    maps = [map_ for map_ in program.maps if type(map_) not in WITHOUT_WEIGHTS]  # half of all
    held = [getattr(map_, name) for map_ in maps for name in map_.weights]
    if any(hasattr(kind, "views") for kind in set(map(type, maps))):
        away = [view for map_ in maps for view in views_of(map_) if isinstance(view, AwayView)]
        held += [tensor for view in away for tensor in view.tensors]
    indices = [map_.move for map_ in program.maps if type(map_) is Index]
    held += [tensor for move in indices for tensor in tensors_in(move)]
    return {id(tensor): tensor for tensor in held if isinstance(tensor, Tensor)}.values()


class TensorStates:
    """The weights and activations that a program was made from, as they were then."""

    def __init__(self, program: Program) -> None:
        shards = (leaf.shard for leaf in program.leaves if leaf.shard is not None)
        tensors = [*weights_of(program), *shards]
        self.versions = [(t, t._version) for t in tensors if not t.is_inference()]
        self._data = data_of(tensors)
        self._shapes = [(leaf.tensor, leaf.tensor.shape) for leaf in program.leaves]
        given = (t for t in tensors if not t.requires_grad)  # inputs, buffers, masks
        self._prints = (
            WeightFingerprints(leaf.stored for leaf in program.leaves),
            WeightFingerprints(given, SAMPLE_ELEMENTS),
        )

    def hold(self) -> bool:
        """Whether none of them has been changed in place, or its ``.data`` set to others."""
        changed = any(tensor._version != version for tensor, version in self.versions)
        reshaped = [tensor for tensor, shape in self._shapes if tensor.shape != shape]
        changed = changed or bool(reshaped)
        return not changed and have_data(self._data) and all(each.hold() for each in self._prints)


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightFingerprints:
    """Copies of tensors, or of samples of them, to compare with later.

    Only tensors on the CPU are compared: reading those on a GPU would synchronise.

    >>> w, v = torch.zeros(3), torch.zeros(100_000)
    >>> prints = WeightFingerprints([w, v])
    >>> prints.hold()
    True
    >>> w.data[1] = -0.0
    >>> prints.hold()
    False
    """

    def __init__(self, tensors: Iterable[Tensor], whole: int = COMPARE_ALL_MAX_ELEMENTS) -> None:
        """Tensors of up to ``whole`` elements are compared as a whole."""
        self._views: dict[torch.dtype, list[Tensor]] = {}  # views, not copies
        with torch.no_grad():  # takes less time than to detach each
            for tensor in tensors:
                plain = tensor.is_cpu and tensor.layout is torch.strided
                if plain and tensor.numel() and not tensor._is_zerotensor():
                    flat = _flat_view(tensor, whole)
                    self._views.setdefault(flat.dtype, []).append(flat)
        every = [view for views in self._views.values() for view in views]
        self._sizes = [(view, view.untyped_storage().nbytes()) for view in every]
        self._held = self._read_bits()

    def _read_bits(self) -> list[Tensor]:
        # as integers, so that NaN equals itself and -0 differs from 0
        return [torch.cat(views).view(BITS[dtype.itemsize]) for dtype, views in self._views.items()]

    def hold(self) -> bool:
        """Whether the tensors have the same bits as when this object was made."""
        if any(view.untyped_storage().nbytes() < size for view, size in self._sizes):
            return False  # freed; reading it would end the process
        return all(map(torch.equal, self._read_bits(), self._held))


def _flat_view(tensor: Tensor, whole: int) -> Tensor:
    """A 1-d view of the elements; of large tensors, of evenly spaced ones.

    A tensor that is not contiguous is viewed as the whole range of storage it spans.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_contiguous():
        flat = tensor.view(-1)
    else:
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        flat = tensor.as_strided((span,), (1,))
    size = flat.numel()
    return flat if size <= whole else flat[:: -(-size // SAMPLE_ELEMENTS)]
