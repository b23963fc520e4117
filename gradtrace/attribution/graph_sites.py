"""Which operators are a node of an attribution graph, and which only connect nodes.

A *site* is a call of a module, with all operators inside it. An attention whose heads are known
ends where these are joined, and is divided there: each head is a node of its own. All other
operators connect: residual sums, norms, output projections of attentions, what lies outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from gradtrace.components.forks import CONCATENATIONS
from gradtrace.components.module_parts import ModuleParts, Slices
from gradtrace.components.operator_names import MOVES, SCALES, spoken
from gradtrace.errors import GradtraceError, UnknownName, did_you_mean, needs
from gradtrace.ir.program import Block
from gradtrace.pytorch.wrapped_modules import user_class
from gradtrace.types import Shape

LETTERS = "qkv"
FACTORS = {"BmmBackward0": (0, 1), "BaddbmmBackward0": (1, 2)}
"""Products of batches of matrices, and their factors."""


@dataclass(frozen=True)
class Site:
    """A call of a module: its operators, and the names of the nodes that it is divided into.

    ``cuts`` are slices of its output, one for each node; none if it is one node.
    """

    module: str
    names: tuple[str, ...]
    blocks: frozenset[int]
    kind: str = "module"
    cuts: tuple[Slices, ...] = ()
    layer: int | None = None
    letters: Mapping[int, int] = field(default_factory=dict)  # 0, 1, 2 for q, k, v, by value

    def cells(self, value: int, shape: Shape, device: torch.device) -> Tensor:
        """Which of the names each element of an output of this shape belongs to."""
        if self.letters:  # (batch * heads, ...)
            count = len(self.names) // len(LETTERS)
            head = torch.arange(shape[0], device=device) % count + self.letters[value] * count
            return head.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
        if not self.cuts:
            return torch.zeros(shape, dtype=torch.long, device=device)
        cut = self.cuts[0]
        along = torch.zeros(cut.size, dtype=torch.long, device=device)
        for n, each in enumerate(self.cuts):
            along[list(each.chosen)] = n
        sides = [1] * len(shape)
        sides[cut.dim] = cut.size
        return along.reshape(sides).expand(shape)


@dataclass
class SiteFinder:
    """Finds the sites of a program."""

    parts: ModuleParts
    heads: dict[str, dict[str, Any]] = field(init=False)
    lists: dict[str, list[str]] = field(init=False)
    children: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        known = bool(self.parts.modules)
        self.heads = dict(self.parts.heads()[0]) if known else {}
        layers = self.parts.layers()[0] if known else {}
        self.lists = {name: list(entries) for name, entries in layers.items()}
        self.children = {}
        for name in self.parts.inside:
            if name:
                self.children.setdefault(name.rpartition(".")[0], []).append(name)

    def find(self, modules: Sequence[str] | None, qkv: bool = False) -> list[Site]:
        """The sites in forward order. By default the largest modules without a residual sum inside;
        else those whose names match. No site can be reached from itself. With ``qkv`` what makes
        queries, keys and values is a site before that of the heads, where they are found.
        """
        chosen = list(self._default("")) if modules is None else self._matching(modules)
        sites = [site for name in chosen for site in self._sites(name)]
        while cyclic := self._in_cycles(sites):
            outer = {n for n in cyclic if sites[n].module in self.children}
            cyclic = outer or {max(cyclic, key=lambda n: len(sites[n].blocks))}
            opened = [site for n, site in enumerate(sites) if n in cyclic]
            names = dict.fromkeys(x for site in opened for x in self.children.get(site.module, ()))
            sites = [site for n, site in enumerate(sites) if n not in cyclic]
            sites += [each for name in names for each in self._sites(name)]
        if qkv:
            sites = [part for site in sites for part in self._divided(site)]
        return sorted(sites, key=lambda site: -max(site.blocks))

    # Modules --------------------------------------------------------------------------------------

    def _matching(self, patterns: Sequence[str]) -> list[str]:
        """Modules whose names match, without those inside another of them."""
        names = [name for name in self.parts.inside if name]
        found: dict[str, None] = {}
        for pattern in patterns:
            hit = [name for name in names if fnmatchcase(name, pattern)]
            if not hit:
                raise UnknownName(
                    f"no path from an input passes a module {pattern!r}"
                    f"{did_you_mean(pattern, names)}"
                )
            found |= dict.fromkeys(hit)
        return [n for n in found if not any(n.startswith(f"{other}.") for other in found)]

    def _default(self, name: str) -> Iterator[str]:
        """The largest modules inside a module in which there is nothing to choose."""
        for child in self.children.get(name, ()):
            if child in self.heads:
                yield child
            elif self._is_open(child):
                yield from self._default(child)
            elif not self._only_connects(child):
                yield child

    def _is_open(self, name: str) -> bool:
        """Whether a module is left for those inside it: it has heads or a list of layers somewhere,
        or it adds the output of a module inside it to something else.
        """
        within = [x for x in self.parts.inside if x == name or x.startswith(f"{name}.")]
        if any(x in self.heads or x in self.lists for x in within):
            return True
        return any(self._adds(x) for x in within)

    def _adds(self, name: str) -> bool:
        """Whether a module itself adds the output of one of its modules to another value."""
        blocks = self.parts.program.blocks
        return any(
            blocks[n].operator in ("AddBackward0", "SubBackward0", *CONCATENATIONS)
            and len(blocks[n].gives) > 1
            and any(self._made_in(v).startswith(f"{name}.") for v in blocks[n].gives.values())
            for n in self.parts.own_blocks(name)
        )

    def _made_in(self, value: int) -> str:
        """The module in which an argument was made, before it was moved."""
        while (block := self._maker(value)) is not None:
            if spoken(block.operator) not in MOVES or len(block.gives) != 1:
                return block.place.module
            (value,) = block.gives.values()
        return ""

    def _maker(self, value: int) -> Block | None:
        number = self.parts.takers.get(self.parts.wholes.get(value, value))
        return None if number is None else self.parts.program.blocks[number]

    def _only_connects(self, name: str) -> bool:
        """Whether a module is a norm, or moves and scales values."""
        module = self.parts.modules.get(name)
        if module is not None and "norm" in user_class(module).__name__.lower():
            return not any(x in self.heads for x in self.children.get(name, ()))
        blocks = [self.parts.program.blocks[n] for n in self.parts.inside[name]]
        return all(
            spoken(block.operator) in MOVES | SCALES and len(block.gives) < 2 for block in blocks
        )

    # Sites ----------------------------------------------------------------------------------------

    def _sites(self, name: str) -> Iterator[Site]:
        """A site for each call of a module. Where calls of modules inside it cannot be assigned to
        its own, those modules are sites instead.
        """
        heads = self.heads.get(name, {})
        if heads and all(part.blocks for part in heads.values()):  # a list of modules
            for head in heads:
                yield from (replace(site, kind="head") for site in self._sites_of(head, {}))
            return
        yield from self._sites_of(name, heads)

    def _sites_of(self, name: str, heads: dict[str, Any]) -> Iterator[Site]:
        if name not in self.parts.inside:
            return
        calls = self.parts.calls(name)
        if not calls:
            for child in self.children.get(name, ()):
                yield from self._sites(child)
        for n, blocks in calls.items():
            live = [b for b in blocks if self.parts.program.blocks[b].takes]
            if live:
                yield self._site(name, n if len(calls) > 1 else None, live, heads)

    def _site(self, name: str, call: int | None, blocks: list[int], heads: dict[str, Any]) -> Site:
        suffix = "" if call is None else f" call {call}"
        layer = self._layer(name)
        mine = {
            head: cut for head, part in heads.items() for cut in part.slices if cut.block in blocks
        }
        if not mine:
            return Site(name, (name + suffix,), frozenset(blocks), layer=layer)
        cuts = tuple(mine.values())
        before = frozenset(b for b in blocks if b >= cuts[0].block)
        return Site(name, tuple(head + suffix for head in mine), before, "head", cuts, layer)

    def _divided(self, site: Site) -> list[Site]:
        """The heads of an attention, and what makes their queries, keys and values."""
        wires = self._wires(site) if site.cuts else {}
        count = len(site.names)
        if not wires or any(self.parts.shapes[v][0] % count for v in wires):
            return [site]
        before, pending = set[int](), list(wires)
        while pending:
            number = self.parts.takers.get(self.parts.wholes.get(v := pending.pop(), v))
            if number in site.blocks and number not in before:
                assert number is not None
                before.add(number)
                pending += self.parts.program.blocks[number].gives.values()
        if not before:
            return [site]
        names = tuple(f"{head} {letter}" for letter in LETTERS for head in site.names)
        made = replace(site, names=names, blocks=frozenset(before), letters=wires)
        return [made, replace(site, blocks=site.blocks - before)]

    def _wires(self, site: Site) -> dict[int, int]:
        """The queries, keys and values (0, 1, 2): the factors of the scores, and the second factor
        of the product of their softmax. Of constant patterns there are values alone.
        """
        blocks = self.parts.program.blocks
        mix = self._factors(site, next(iter(blocks[site.cuts[0].block].takes.values())))
        if mix is None or mix[1] is None:
            return {}
        wires = {mix[1]: 2}
        scores = None if mix[0] is None else self._factors(site, mix[0])
        for at, value in enumerate(scores or ()):
            if value is not None:
                wires[value] = at
        return wires if mix[0] is None or len(wires) == len(LETTERS) else {}

    def _factors(self, site: Site, value: int) -> tuple[int | None, int | None] | None:
        """The factors of the product that a value is, moved, scaled, masked or normalised."""
        while (n := self.parts.takers.get(self.parts.wholes.get(value, value))) in site.blocks:
            assert n is not None
            block = self.parts.program.blocks[n]
            if block.operator in FACTORS:
                first, second = FACTORS[block.operator]
                return block.gives.get(first), block.gives.get(second)
            if len(block.gives) != 1:
                return None
            (value,) = block.gives.values()
        return None

    def _layer(self, name: str) -> int | None:
        for entries in self.lists.values():
            for n, entry in enumerate(entries):
                if name == entry or name.startswith(f"{entry}."):
                    return n
        return None

    def _in_cycles(self, sites: Sequence[Site]) -> set[int]:
        """The sites that can be reached from themselves, by their numbers."""
        try:
            import networkx  # here: it takes as long to import as all of gradtrace
        except ImportError as error:
            raise GradtraceError(needs("an attribution graph", "networkx")) from error
        owner: dict[int, object] = {b: ("site", n) for n, s in enumerate(sites) for b in s.blocks}
        graph: Any = networkx.DiGraph()
        for number, block in enumerate(self.parts.program.blocks):
            user = owner.get(number, number)
            for value in block.gives.values():
                maker = self.parts.takers.get(self.parts.wholes.get(value, value))
                if maker is not None and owner.get(maker, maker) != user:
                    graph.add_edge(owner.get(maker, maker), user)
        return set(_sites_among(networkx.strongly_connected_components(graph)))


def _sites_among(components: Iterable[set[object]]) -> Iterator[int]:
    for component in components:
        if len(component) > 1:
            yield from (vertex[1] for vertex in component if isinstance(vertex, tuple))
