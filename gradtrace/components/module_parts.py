"""Heads, experts, layers and time steps: parts of modules, found from the modules' own attributes.

What a path must visit to have passed a part:

- *Head* h of an attention: an element of the attention's output that belongs to head h, before the
  output projection. Heads are merged by a view ``(..., heads, size) -> (..., heads * size)``, so
  these are the elements ``h * size`` to ``(h + 1) * size - 1`` along its last dimension.
- *Expert* e: an operator inside the expert, if it is a module; for weights stacked to ``(experts,
  in, out)`` a product with slice e of one of them.
- *Layer*: an operator inside an entry of a ``ModuleList`` or ``Sequential`` of one class.
- *Step* t: an operator of the call t of a cell; in ``nn.LSTM``, ``GRU``, ``RNN`` an operator after
  the product with the recurrent weights of time t, up to that of the next step, in any layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from gradtrace.components.operator_names import MOVES, spoken
from gradtrace.errors import UnknownName
from gradtrace.ir.program import HOOKS, Block, Program
from gradtrace.linops import Map
from gradtrace.linops.gather import Index, Slot
from gradtrace.linops.scatter import Scatter
from gradtrace.pytorch.wrapped_modules import join, user_class, within
from gradtrace.types import Shape

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
"""Attributes of an attention module, or of its ``config``, that say how many heads it has."""

EXPERTS = ("num_experts", "num_local_experts", "n_experts", "n_routed_experts")
"""Attributes that say how many experts are stacked in a module's parameters."""

ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
"""Class names of modules whose heads are expected to be found."""

VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
PRODUCTS = ("BmmBackward0", "BaddbmmBackward0")
JOINS = ("StackBackward0", "CatBackward0")


GATHERS = {"index", "index_select"}
"""Operators that take a slice of stacked weights for each row."""

Rows: TypeAlias = int | tuple[int, ...] | None
"""The expert whose weights a value is, or those of its rows; None: it has the weights of all."""


class Slices(NamedTuple):
    """Slices of what a block takes, which has ``size`` of them along ``dim``."""

    block: int
    dim: int
    size: int
    chosen: Sequence[int]


@dataclass
class Part:
    """What a path visits to pass a part of a module, and the leaves that belong to the part."""

    blocks: list[int] = field(default_factory=list)
    slices: list[Slices] = field(default_factory=list)
    owns: frozenset[str] = frozenset()


Parts = dict[str, Part]


class WholeProgram(NamedTuple):
    """A program with all its leaves, of which the one that is measured has some (the inputs, say).
    Parts of modules are found in it, since weights tell which operator is whose; blocks have the
    same numbers in both. ``names`` and ``leaves`` as in ``ProgramPlaces``.
    """

    program: Program
    names: Mapping[int, str]
    leaves: Mapping[str, Iterable[str]]


@dataclass
class ProgramPlaces:
    """Where things are in a program: blocks by module, shapes, who gives and takes a value.

    ``modules`` are those of the model, by name; ``names`` the names of leaves, by value, and
    ``leaves`` all the names that each of them has.
    """

    program: Program
    modules: Mapping[str, nn.Module]
    names: Mapping[int, str]
    leaves: Mapping[str, Iterable[str]]

    @property
    def device(self) -> torch.device:
        """Where the program's maps are."""
        return self.program.seed.device

    @cached_property
    def inside(self) -> dict[str, list[int]]:
        """The blocks of each module and its submodules, in backward order."""
        found: dict[str, list[int]] = {}
        for number, block in enumerate(self.program.blocks):
            if block.operator != HOOKS:
                name = block.place.module
                while name:
                    found.setdefault(name, []).append(number)
                    name = name.rpartition(".")[0]
                found.setdefault("", []).append(number)
        return found

    @cached_property
    def shapes(self) -> dict[int, Shape]:
        """The shape of each value."""
        found = {step.out: step.shape for step in self.program.steps()}
        return {self.program.root: tuple(self.program.seed.shape)} | found

    @cached_property
    def wholes(self) -> dict[int, int]:
        """``Program.wholes``."""
        return self.program.wholes()

    @cached_property
    def takers(self) -> dict[int, int]:
        """The block that takes each value: that of the operator which made the argument."""
        blocks = self.program.blocks
        return {value: n for n, block in enumerate(blocks) for value in block.takes.values()}

    @cached_property
    def givers(self) -> dict[int, list[tuple[int, int]]]:
        """For each value the blocks that give it, or a term of it, with the value they give."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, block in enumerate(self.program.blocks):
            for value in block.gives.values():
                found.setdefault(self.wholes.get(value, value), []).append((number, value))
        return found

    def own_blocks(self, module: str) -> Iterator[int]:
        """The blocks of a module itself, without those of its submodules."""
        blocks = self.program.blocks
        return (n for n in self.inside.get(module, ()) if blocks[n].place.module == module)

    def whole_module(self, name: str) -> Part:
        """A module, with all its submodules and parameters."""
        prefix = f"{name}."
        owns = [n for n, every in self.leaves.items() if any(x.startswith(prefix) for x in every)]
        return Part(list(self.inside.get(name, ())), owns=frozenset(owns))

    def children(self, name: str) -> Parts:
        """The entries of a list of modules."""
        keys = self.modules[name]._modules
        return {child: self.whole_module(child) for child in (join(name, key) for key in keys)}


class ModuleParts(ProgramPlaces):
    """Finds the parts of a model's modules in a program."""

    def find(self, kind: str, strict: bool = True) -> Parts:
        """The parts of a kind, in the order of the model. If ``strict``, modules that seem to have
        such parts, which are not known, are refused.
        """
        if not self.modules:
            raise UnknownName(
                f"{kind} are found from the modules of a watched model; run the forward pass under "
                "gradtrace.watch, or name slices of tensors with gradtrace.label"
            )
        found, doubtful = getattr(self, kind)()
        order = {name: n for n, name in enumerate(self.modules)}
        parts: Parts = {}
        for module in sorted(found, key=lambda name: order[name]):
            parts |= found[module]
        if not parts or (strict and doubtful):
            raise UnknownName(self._refusal(kind, doubtful, bool(parts)))
        return parts

    def _refusal(self, kind: str, doubtful: Sequence[str], others: bool) -> str:
        """Which modules are in doubt, what would be found, and what to do."""
        where = ""
        if doubtful:
            name = user_class(self.modules[doubtful[0]]).__name__
            more = f" and {len(doubtful) - 1} more" if len(doubtful) > 1 else ""
            where = f" of {doubtful[0] or 'the model'} (a {name}){more}"
        known = f"; or choose those that are known: ['{kind[:-1]}:*']" if others else ""
        if kind == "layers":
            instead = "Name modules instead: ['encoder', 'decoder']"
        else:
            instead = "Name them yourself, tensor = gradtrace.label(tensor, dim, names), and ask "
            instead += "for 'labels'"
        return f"the {kind}{where} are not known; {_FOUND[kind]}. {instead}{known}"

    # Heads ----------------------------------------------------------------------------------------

    def heads(self) -> tuple[dict[str, Parts], list[str]]:
        """The heads of attention modules, by module; and modules where they were not found."""
        found: dict[str, Parts] = {}
        for name in self._innermost_first():
            if any(within(other, name) for other in found):
                continue
            module = self.modules[name]
            if isinstance(module, nn.ModuleList) and _last(name) == "heads":
                found[name] = self.children(name)
            elif (count := head_count(module)) and (parts := self._merged_heads(name, count)):
                found[name] = parts
        doubtful = [
            name
            for name, module in self.modules.items()
            if name in self.inside
            and ATTENTION.search(user_class(module).__name__)
            and not any(within(a, b) for other in found for a, b in ((other, name), (name, other)))
        ]
        return found, doubtful

    def _innermost_first(self) -> list[str]:
        called = [name for name in self.modules if name in self.inside]
        return sorted(called, key=lambda name: -len(name.split(".")) if name else 0)

    def _merged_heads(self, name: str, count: int) -> Parts:
        """The heads that views merge before the output projection, at each call; none if a call has
        no such view.
        """
        cuts = self._merging(self.own_blocks(name), count)
        if not cuts:
            cuts = self._merging(self.inside[name], count)
        parts: Parts = {f"{name} head {n}".lstrip(): Part() for n in range(count)}
        for number, shape in cuts:
            size = shape[-1] // count
            for n, part in enumerate(parts.values()):
                along = range(n * size, (n + 1) * size)
                part.slices.append(Slices(number, len(shape) - 1, shape[-1], along))
        return parts if cuts else {}

    def _merging(self, numbers: Iterable[int], count: int) -> list[tuple[int, Shape]]:
        """The view nearest to the output, at each call of the module where the first one is, that
        joins ``count`` heads in its last dimension; with the shape of its output.
        """
        blocks = self.program.blocks
        found: dict[Any, tuple[int, Shape]] = {}
        calls = set()
        for number in numbers:
            block = blocks[number]
            calls.add(block.place)
            if block.operator not in VIEWS or block.place in found or not block.gives:
                continue
            (taken,), (given,) = block.takes.values(), block.gives.values()
            joined, apart = self.shapes[taken], self.shapes[given]
            if len(apart) > len(joined) > 0 and apart[-1] * count == joined[-1]:
                found[block.place] = number, joined
        module = next((place.module for place in found), None)
        found = {place: cut for place, cut in found.items() if place.module == module}
        complete = len(found) == sum(place.module == module for place in calls)
        return list(found.values()) if complete else []

    # Experts --------------------------------------------------------------------------------------

    def experts(self) -> tuple[dict[str, Parts], list[str]]:
        """The experts of mixtures: entries of a list, or slices of stacked weights."""
        found: dict[str, Parts] = {}
        doubtful = []
        lists = expert_lists(self.modules)
        for name, module in self.modules.items():
            if name in lists:
                found[name] = self.children(name)
            elif name in self.inside and (stacked := stacked_weights(module)):
                count, keys = stacked
                parts = self._stacked_experts(name, count, keys)
                if parts:
                    found[name] = parts
                else:
                    doubtful.append(name)
        return found, doubtful

    def _stacked_experts(self, name: str, count: int, keys: Iterable[str]) -> Parts:
        """The products with each slice of stacked weights; none if they are not all understood."""
        owns = self.whole_module(name).owns
        parts = {f"{name} expert {n}".lstrip(): Part(owns=owns) for n in range(count)}
        wanted = {join(name, key) for key in keys}
        values = [v for v, first in self.names.items() if wanted & {first, *self.leaves[first]}]
        pending: list[tuple[int, Rows]] = [(value, None) for value in values]
        while pending:
            value, expert = pending.pop()
            for number, given in self.givers.get(value, ()):
                more = self._expert_products(number, given, expert, list(parts.values()))
                if more is None:
                    return {}
                pending += more
        return parts if values else {}

    def _expert_products(
        self, number: int, given: int, expert: Rows, parts: Sequence[Part]
    ) -> list[tuple[int, Rows]] | None:
        """Add a product to the experts that it belongs to; or the values to go on from, if the
        operator only moves weights, with the expert if one was selected, or with that of each row
        if weights were gathered for them. None: not understood.
        """
        block, count = self.program.blocks[number], len(parts)
        taken, move = next(iter(block.takes.values())), spoken(block.operator)
        rows = self.shapes[taken]
        if isinstance(expert, int):
            if move in MOVES:
                return [(taken, expert)]
            parts[expert].blocks.append(number)
            return []
        if expert is None and move in GATHERS:
            each = _gathered_rows(self._map_of(block, given), count)
            return None if each is None else [(taken, each)]
        if expert is None and move == "select" and len(rows) < len(self.shapes[given]):
            at = self._selected(block, given, count)
            return None if at is None else [(taken, at)]
        owners = tuple(range(count)) if expert is None else expert
        if move == "grouped_mm" and expert is None:
            sizes = self._group_sizes(block, count)
            owners = tuple(n for n, size in enumerate(sizes) for _ in range(size))
        elif move not in MOVES and block.operator not in PRODUCTS:
            return None
        if not owners or rows[:1] != (len(owners),):
            return None
        if move in MOVES:
            return [(taken, expert)]
        for part, mine in zip(parts, _rows_by_owner(owners, count)):
            part.slices.append(Slices(number, 0, rows[0], mine))
        return []

    def _map_of(self, block: Block, given: int) -> Map | None:
        """The map that makes a value which a block gives, if it is one."""
        (step,) = (step for step in block.steps if step.out == given)
        return self.program.maps[step.terms[0].map] if len(step.terms) == 1 else None

    def _selected(self, block: Block, given: int, count: int) -> int | None:
        """Which of ``count`` slices along the first dimension a selection took."""
        map_ = self._map_of(block, given)
        if not isinstance(map_, Index) or map_.out_shape[0] != count:
            return None
        if isinstance(map_, Slot):
            return map_.start if map_.dim == 0 and map_.cut[0] == 1 else None
        there = map_.apply(torch.ones(map_.in_shape, dtype=torch.uint8, device=self.device))
        hit = there.reshape(count, -1).any(1).nonzero().flatten().tolist()
        return int(hit[0]) if len(hit) == 1 else None

    def _group_sizes(self, block: Block, count: int) -> list[int]:
        """How many rows each expert has in a grouped product: those that its weights' gradient is
        contracted over. Experts without a row have no step.
        """
        made = {step.out: step for step in block.steps}
        sizes = [0] * count
        for step in block.steps:
            if not step.shape or step.shape[0] != count:
                continue
            for term in step.terms:
                slot = self.program.maps[term.map]
                product = made.get(term.value)
                if isinstance(slot, Slot) and slot.dim == 0 and product is not None:
                    over = self.shapes[product.terms[0].value]
                    sizes[slot.start] = over[-1]
        return sizes

    # Layers ---------------------------------------------------------------------------------------

    def layers(self) -> tuple[dict[str, Parts], list[str]]:
        """The entries of outermost lists of modules of one class."""
        found: dict[str, Parts] = {}
        for name in layer_lists(self.modules):
            reached = any(join(name, key) in self.inside for key in self.modules[name]._modules)
            if reached and not any(within(name, other) for other in found):
                found[name] = self.children(name)
        return found, []

    # Steps ----------------------------------------------------------------------------------------

    def steps(self) -> tuple[dict[str, Parts], list[str]]:
        """The calls of cells, and the time steps of recurrent layers."""
        found: dict[str, Parts] = {}
        doubtful = []
        for name, module in self.modules.items():
            if name not in self.inside or any(within(name, other) for other in found):
                continue
            if isinstance(module, nn.RNNBase):
                steps = self._recurrent_steps(name)
            elif isinstance(module, nn.RNNCellBase) or user_class(module).__name__.endswith("Cell"):
                steps = self.calls(name)
            else:
                continue
            if steps:
                named = {f"{name} step {t}".lstrip(): Part(steps[t]) for t in sorted(steps)}
                found[name] = named
            else:
                doubtful.append(name)
        return found, doubtful

    def calls(self, name: str) -> dict[int, list[int]]:
        """The blocks of each call of a module. Of submodules that are called several times in each
        call of it, the calls are divided evenly; empty if that is not possible.
        """
        blocks, by_module = self.program.blocks, dict[str, dict[int, list[int]]]()
        for number in self.inside[name]:
            place = blocks[number].place
            by_module.setdefault(place.module, {}).setdefault(place.call, []).append(number)
        outer = by_module.get(name) or min(by_module.values(), key=len)
        calls, found = sorted(outer), {call: list[int]() for call in outer}
        for inner in by_module.values():
            if len(inner) % len(calls):
                return {}  # not the same number in each
            each = len(inner) // len(calls)
            for n, call in enumerate(sorted(inner)):
                found[calls[n // each]] += inner[call]
        return found

    def _recurrent_steps(self, name: str) -> dict[int, list[int]]:
        """The blocks of each time step of a recurrent layer, of all its layers and directions."""
        found: dict[int, list[int]] = {}
        products = self._recurrent_products(name)
        where: dict[int, tuple[str, int]] = {}  # weights and time of blocks, in forward order
        for number in reversed(self.inside[name]):
            block = self.program.blocks[number]
            if block.operator in JOINS:
                continue
            if number in products:
                where[number] = products[number]
            else:
                given = (self.wholes.get(value, value) for value in block.gives.values())
                before = [where[n] for v in given if (n := self.takers.get(v)) in where]
                if not before:
                    continue
                where[number] = max(before, key=_executed)
            found.setdefault(where[number][1], []).append(number)
        return found

    def _recurrent_products(self, name: str) -> dict[int, tuple[str, int]]:
        """The products with recurrent weights, each with the name of these and its time step."""
        found: dict[int, tuple[str, int]] = {}
        for value, first in self.names.items():
            names = [n for n in {first, *self.leaves[first]} if n.startswith(join(name, ""))]
            if not any(_last(n).startswith("weight_hh_l") for n in names):
                continue
            numbers = sorted(self._multiplied(value), reverse=True)  # the first step first
            back = any(_last(n).endswith("_reverse") for n in names)
            for t, number in enumerate(numbers):
                found[number] = first, len(numbers) - 1 - t if back else t
        return found

    def _multiplied(self, value: int) -> Iterator[int]:
        """The blocks that use a leaf, through operators that only move its elements."""
        for number, _ in self.givers.get(value, ()):
            block = self.program.blocks[number]
            if spoken(block.operator) in MOVES:
                yield from self._multiplied(next(iter(block.takes.values())))
            else:
                yield number


def layer_lists(modules: Mapping[str, nn.Module]) -> list[str]:
    """The lists of modules of one class, also those inside others."""
    return [
        name
        for name, module in modules.items()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(module) > isinstance(module, nn.Sequential)
        and len({user_class(child) for child in module}) == 1
        and _last(name) not in ("experts", "heads")
    ]


def expert_lists(modules: Mapping[str, nn.Module]) -> list[str]:
    """The lists of modules that are called experts."""
    return [
        name
        for name, module in modules.items()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and len(module)
        and (_last(name) == "experts" or user_class(module).__name__.endswith("Experts"))
    ]


def head_count(module: nn.Module) -> int | None:
    """How many heads a module says that it has; the ``config`` is asked of attention modules."""
    owners = [module]
    if ATTENTION.search(user_class(module).__name__) and hasattr(module, "config"):
        owners.append(module.config)  # type: ignore[arg-type]
    return next((n for owner in owners if (n := _number(owner, HEADS))), None)


def _gathered_rows(map_: Map | None, count: int) -> tuple[int, ...] | None:
    """Which of ``count`` slices along the first dimension each row is that was gathered from them,
    by the map of the gradient; None if rows are something else.
    """
    if not isinstance(map_, Scatter) or not map_.inputs or map_.out_shape[0] != count:
        return None
    size = prod(map_.out_shape[1:])
    target = map_.target.reshape(map_.in_shape[0], -1)
    each = target[:, :1] // size
    if target.shape[1] != size or bool((target // size != each).any()) or bool((each < 0).any()):
        return None
    return tuple(each.flatten().tolist())


def _rows_by_owner(owners: Sequence[int], count: int) -> list[list[int]]:
    """The numbers of the rows of each owner."""
    found: list[list[int]] = [[] for _ in range(count)]
    for row, owner in enumerate(owners):
        found[owner].append(row)
    return found


def stacked_weights(module: nn.Module) -> tuple[int, list[str]] | None:
    """The number of experts in a module's own parameters of shape (experts, in, out), and these."""
    count = _number(module, EXPERTS)
    keys = [
        key
        for key, p in module._parameters.items()
        if p is not None and p.dim() == 3 and p.shape[0] == count and p.requires_grad
    ]
    return (count, keys) if count and keys else None


def _number(owner: object, attributes: Iterable[str]) -> int | None:
    """The first of these attributes that is a positive whole number."""
    values = (getattr(owner, name, None) for name in attributes)
    return next((v for v in values if type(v) is int and v > 0), None)


def _executed(place: tuple[str, int]) -> tuple[str, int]:
    """The order in which time steps of one layer and direction were computed."""
    weights, time = place
    return weights, -time if weights.endswith("_reverse") else time


def _last(name: str) -> str:
    return name.rpartition(".")[2]


_FOUND = {
    "heads": "they are found where a module says how many it has (num_heads, num_attention_heads, "
    "n_head, ...) and joins them by a view before its output projection",
    "experts": "they are found as entries of a ModuleList called experts, and as slices of "
    "parameters (num_experts, ...) that require grad and are multiplied one by one, all in one "
    "batch, in groups, or gathered for each row",
    "layers": "they are found as entries of a ModuleList or a Sequential, all of one class",
    "steps": "they are found as calls of a cell, and as steps of nn.LSTM, nn.GRU and nn.RNN whose "
    "recurrent weights require grad, watched with composed=True",
}
