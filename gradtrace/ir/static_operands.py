"""The tensors of a program in memory of their own, to which those of the next loss are copied.

What a pass reads then lies where it lay for the first loss, so that the launches of a pass may be
made again as they were. Weights are read where they are, as long as they stay there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.ir.lazy_gradient import LazyGradient, LazyPart
from gradtrace.ir.program import Constants, Leaf, MapTable
from gradtrace.ir.tape import MapParts, NotReplayable, replaced
from gradtrace.kernels.capture import NotCapturable
from gradtrace.kernels.strides import is_dense
from gradtrace.linops import Map


class _Asked(NamedTuple):
    """All that a pass may read of a program: its maps and those of gradients that are computed on
    demand, and the tensors beside them.
    """

    maps: list[Map]
    tensors: list[Tensor]
    layout: tuple[object, ...]


def _asked(constants: Constants) -> _Asked:
    maps, tensors = [*constants.maps], [*constants.kept.values()]
    layout: list[object] = [tuple(constants.kept)]
    for leaf in constants.leaves:
        if isinstance(leaf.given, LazyGradient):
            for part in leaf.given.parts:
                maps += part.maps
                tensors.append(part.x)
            layout.append(tuple([len(part.maps) for part in leaf.given.parts]))
        else:
            tensors.append(leaf.given)
            layout.append(None)
    return _Asked(maps, tensors, tuple(layout))


@dataclass
class _Group:
    """Tensors that share memory, by number; the addresses of all from that of the first on, and the
    copy of their memory. ``whole``: it is one tensor, without gaps.
    """

    numbers: list[int]
    steps: list[int]
    memory: Tensor
    whole: bool

    def source(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The memory of other tensors that lie alike; None if they do not."""
        first = tensors[self.numbers[0]]
        if self.whole:
            there = self.memory
            return first if first.shape == there.shape and first.dtype is there.dtype else None
        at = first.data_ptr()
        if [tensors[n].data_ptr() - at for n in self.numbers] != self.steps:
            return None
        try:
            return first.as_strided(self.memory.shape, (1,), first.storage_offset())
        except RuntimeError:  # beyond its memory
            return None


class StaticOperands:
    """Memory for the tensors of a program; ``constants`` are the program's, in that memory."""

    def __init__(self, given: Constants, most_bytes: int) -> None:
        asked = _asked(given)
        try:
            self._parts = MapParts(given.seed, asked.maps)
        except (NotReplayable, AttributeError) as error:
            raise NotCapturable(f"it is not known what it depends on: {error}") from error
        tensors = [*self._parts.tensors, *asked.tensors]
        self._parts.tensors = []
        self._layout = asked.layout
        weights = {_memory(leaf.tensor) for leaf in given.leaves}
        self._first = len(tensors) - len(asked.tensors)  # of those beside the maps
        self._beside: list[tuple[int, Tensor]] = []  # on the CPU, where they have to be the same
        self._there: list[tuple[int, int]] = []  # read where they lie: number and address
        self._groups: list[_Group] = []
        self.nbytes = 0
        others = self._laid(tensors, weights, given.seed.device, most_bytes)
        whole = {group.numbers[0] for group in self._groups if group.whole}
        self._about = [  # what maps have is compared with them
            (n, (x.dtype, x.device, x.shape, x.stride()))
            for n, x in enumerate(tensors)
            if n >= self._first and n not in whole
        ]
        self.constants = _in_their_place(given, others)

    def _laid(
        self, tensors: list[Tensor], weights: set[int], device: torch.device, most_bytes: int
    ) -> dict[int, Tensor]:
        """The tensors in new memory, by the ``id()`` of those given."""
        others: dict[int, Tensor] = {}
        shared: dict[int, dict[int, int]] = {}  # numbers by id(), by memory
        for n, x in enumerate(tensors):
            if x.is_conj() or x.is_neg() or x.layout is not torch.strided:
                raise NotCapturable("a tensor that is not in memory as it is")
            if x.device != device:
                self._beside.append((n, x.clone()))
                others[id(x)] = self._beside[-1][1]
            elif not x.numel():
                others[id(x)] = x.detach().clone()
            elif _memory(x) in weights:
                self._there.append((n, x.data_ptr()))
                others[id(x)] = x.detach()
            else:
                shared.setdefault(_memory(x), {}).setdefault(id(x), n)
        needed = 0
        for ids in shared.values():
            found = [tensors[n] for n in ids.values()]
            needed += _reach(found) * found[0].itemsize
            if len({x.dtype for x in found}) > 1:
                raise NotCapturable("memory that is read in two ways")
        if needed > most_bytes:
            raise NotCapturable(f"its tensors take {needed / 2**20:,.0f} MiB")
        for ids in shared.values():
            self._add([*ids.values()], tensors, others)
        return others

    def _add(self, numbers: list[int], tensors: list[Tensor], others: dict[int, Tensor]) -> None:
        """Add a group of tensors that share memory."""
        numbers.sort(key=lambda n: tensors[n].data_ptr())
        first, *rest = found = [tensors[n] for n in numbers]
        at, whole = first.data_ptr(), not rest and is_dense(first)
        if whole:
            memory = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype,
                                         device=first.device)  # fmt: skip
        else:
            memory = torch.empty(_reach(found), dtype=first.dtype, device=first.device)
        for x in found:
            start = (x.data_ptr() - at) // x.itemsize
            others[id(x)] = memory if whole else memory.as_strided(x.shape, x.stride(), start)
        steps = [x.data_ptr() - at for x in found]
        self._groups.append(_Group(numbers, steps, memory, whole))
        self.nbytes += memory.nbytes

    def take(self, given: Constants) -> str:
        """Copy the tensors of another loss; why that is not possible, empty if it is."""
        asked = _asked(given)
        if asked.layout != self._layout:
            return "other gradients were kept in memory"
        tensors = self._parts.matched(given.seed, asked.maps)
        if tensors is None:
            return "derivatives of another kind"
        tensors += asked.tensors
        for n, about in self._about:
            x = tensors[n]
            if (x.dtype, x.device, x.shape, x.stride()) != about:
                return "other gradients were kept in memory"
        if any(tensors[n].data_ptr() != at for n, at in self._there):
            return "weights lie elsewhere"
        if any(not torch.equal(tensors[n], x) for n, x in self._beside):
            return "numbers on the CPU are others"
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for group in self._groups:
            source = group.source(tensors)
            if source is None:
                return "its tensors lie otherwise in memory"
            both = copies.setdefault(group.memory.dtype, ([], []))
            both[0].append(group.memory)
            both[1].append(source)
        for memory, sources in copies.values():
            torch._foreach_copy_(memory, sources, non_blocking=True)
        return ""


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _reach(tensors: Sequence[Tensor]) -> int:
    """The number of elements from the first address of some tensors to their last."""
    ends = [
        x.data_ptr() + x.itemsize * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())))
        for x in tensors
    ]
    return (max(ends) - min(x.data_ptr() for x in tensors)) // tensors[0].itemsize


def _in_their_place(given: Constants, others: Mapping[int, Tensor]) -> Constants:
    """The constants with other tensors."""
    leaves = [Leaf(given.seed, leaf.value, _gradient(leaf.given, others)) for leaf in given.leaves]
    return Constants(
        others[id(given.seed)],
        MapTable([replaced(map_, others) for map_ in given.maps]),
        leaves,
        {value: others[id(x)] for value, x in given.kept.items()},
    )


def _gradient(given: Tensor | LazyGradient, others: Mapping[int, Tensor]) -> Tensor | LazyGradient:
    if not isinstance(given, LazyGradient):
        return others[id(given)]
    found = LazyGradient(
        [
            LazyPart(tuple([replaced(map_, others) for map_ in part.maps]), others[id(part.x)])
            for part in given.parts
        ]
    )
    found.versions = []  # what it reads is written to for every loss
    return found
