"""Models that ``torch.distributed.fsdp.fully_shard`` has sharded, gathered a unit at a time.

A *unit* is what ``fully_shard`` was applied to: its parameters are gathered when its forward pass
begins and freed when that is over. Autograd's graph refers to the gathered parameters, whose memory
is empty from then on, until the unit is gathered again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradtrace.errors import Unsupported
from gradtrace.pytorch.wrapped_modules import named_modules, sharding_hooks

RESIDENT_UNITS = 2
"""The most units whose gathered parameters are kept for maps that read them. One is usually the
root, with embeddings and output layer, which is read beside each of the others."""

POST_BACKWARD = "RegisterPostBackwardFunctionBackward"
"""The node by which FSDP learns that a unit's backward pass is over; it passes gradients on."""


class Parameter(NamedTuple):
    """A parameter of a unit: as it is sharded, and as the graph sees it."""

    sharded: Any  # a DTensor
    gathered: nn.Parameter


class Unit:
    """Modules that are gathered together. All ranks must gather the same units in one order."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.state = module._get_fsdp_state()

    @property
    def groups(self) -> list[Any]:
        """FSDP's groups of parameters; torch had one for each unit before 2.12."""
        found = getattr(self.state, "_fsdp_param_groups", None)
        if found is None:
            found = [self.state._fsdp_param_group]
        return [group for group in found if group is not None]

    @property
    def freed(self) -> bool:
        """Whether parameters are not in memory as a whole."""
        return any(not group.is_unsharded for group in self.groups)

    def parameters(self) -> list[Parameter]:
        """Its parameters; none before the first forward pass."""
        each = [param for group in self.groups for param in group.fsdp_params]
        return [
            Parameter(param.sharded_param, param._unsharded_param)
            for param in each
            if hasattr(param, "_unsharded_param")
        ]

    def storages(self) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """The memory of the gathered parameters, by its identity."""
        for _, gathered in self.parameters():
            storage = gathered.untyped_storage()
            yield storage._cdata, storage

    def values(self) -> dict[int, torch.UntypedStorage]:
        """Copies of the gathered parameters, by the identity of their memory."""
        freed = self.freed
        if freed:
            self.module.unshard()
        found = {key: storage.clone() for key, storage in self.storages()}  # type: ignore[no-untyped-call]
        if freed:
            self.module.reshard()
        return found


class ShardedModel:
    """The units of a model, by the names of their modules."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self.units = units
        self._needed: dict[str, tuple[Unit, ...]] = {}
        self._resident: dict[Unit, dict[int, torch.UntypedStorage]] = {}  # the last one read last

    @classmethod
    def of(cls, model: nn.Module) -> ShardedModel | None:
        """The units of a model; None if it has none, or if all are gathered for good."""
        modules = [(name, each) for name, each in named_modules(model) if is_unit(each)]
        by_state: dict[int, Unit] = {}
        units = {}
        for name, module in modules:
            unit = Unit(module)
            units[name] = by_state.setdefault(id(unit.state), unit)
        return cls(units) if units else None

    def needed(self, module: str) -> tuple[Unit, ...]:
        """The units whose parameters operators of a module may use: those around it."""
        found = self._needed.get(module)
        if found is None:
            around = [module[:n] for n, letter in enumerate(module) if letter == "."]
            names = dict.fromkeys(("", *around, module))
            units = (self.units[name] for name in names if name in self.units)
            found = self._needed[module] = tuple(dict.fromkeys(units))
        return found

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of all units."""
        for unit in dict.fromkeys(self.units.values()):
            yield from unit.parameters()

    def read(self, unit: Unit, key: int) -> torch.UntypedStorage:
        """A copy of a parameter's memory, gathered unless its unit was among the last that were
        read.
        """
        found = self._resident.pop(unit, None)
        if found is None:
            while len(self._resident) >= RESIDENT_UNITS:
                del self._resident[next(iter(self._resident))]
            found = unit.values()
        self._resident[unit] = found
        return found[key]

    def read_all(self) -> None:
        """Gather all units, so that from now on nothing that is read is gathered.

        For reads in an order that depends on values, which are not the same on all ranks.
        """
        for unit in dict.fromkeys(self.units.values()):
            if unit not in self._resident:
                self._resident[unit] = unit.values()

    def agreed(self, fine: bool) -> bool:
        """Whether all ranks that share the parameters say that all is fine. Called by all."""
        mesh = next(self.parameters()).sharded.device_mesh
        said = torch.tensor(int(fine), device=mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(said, dist.ReduceOp.MIN, group=mesh.get_group(dim))
        return bool(said)

    def forget(self) -> None:
        """Free the copies of gathered parameters."""
        self._resident = {}


def is_unit(module: nn.Module) -> bool:
    """Whether FSDP gathers the parameters of a module before each of its calls."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported if anything is sharded
    kind = getattr(fsdp, "FSDPModule", None)
    return (
        kind is not None
        and isinstance(module, kind)
        and bool(sharding_hooks(module._forward_pre_hooks))
    )


class Residency:
    """Gathers the units that a pass over the graph needs, one after the other.

    ``release`` is called before units are freed. At the end, all units are as they were.
    """

    def __init__(self, model: ShardedModel, release: Callable[[], None] = lambda: None) -> None:
        self.model, self.release = model, release
        self.now: tuple[Unit, ...] = ()
        self.found = {unit: unit.freed for unit in dict.fromkeys(model.units.values())}
        self.states = {unit: unit.state._training_state for unit in self.found}

    def at(self, module: str) -> None:
        """Gather the units around a module, and free the others that were gathered before."""
        wanted = self.model.needed(module)
        if wanted is self.now:
            return
        if any(unit not in wanted for unit in self.now):
            self.release()
        for unit in self.now:
            if unit not in wanted:
                self._free(unit)
        for unit in wanted:
            if unit not in self.now:
                unit.module.unshard()
                # so a checkpoint that runs the unit again neither frees nor registers anything
                unit.state._training_state = _before_backward(unit.state)
        self.now = wanted

    def close(self) -> None:
        """Free what was gathered."""
        self.release()
        for unit in self.found:
            self._free(unit)
        self.now = ()

    def _free(self, unit: Unit) -> None:
        unit.state._training_state = self.states[unit]
        if self.found[unit]:
            unit.module.reshard()


def _before_backward(state: Any) -> Any:
    return type(state._training_state).PRE_BACKWARD


@contextmanager
def resident(model: ShardedModel) -> Iterator[Residency]:
    """A ``Residency`` that is closed at the end."""
    found = Residency(model)
    try:
        yield found
    finally:
        found.close()


def freed_leaf(leaf: Tensor) -> Unsupported:
    """The error for a leaf whose memory is FSDP's, in a graph that was not watched."""
    return Unsupported(
        f"a leaf of shape {tuple(leaf.shape)} is a parameter that fully_shard has sharded, and its "
        "memory is freed after the forward pass: run the forward pass inside "
        "gradtrace.watch(model), on all ranks, and trace the loss by that watch"
    )


STATES = "torch.distributed._composable_state"
"""The module that lists sharded models; it is not imported where there are none."""


def all_gathered() -> frozenset[int]:
    """The ids of the gathered parameters of all sharded models in the process."""
    states = sys.modules.get(STATES)
    modules = list(getattr(states, "_module_state_mapping", ()))
    return frozenset(
        id(parameter.gathered)
        for module in modules
        if is_unit(module)
        for parameter in Unit(module).parameters()
    )
