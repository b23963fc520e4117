"""Every pass leaves results as they are, to the bit, over random programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from leaves import traced_leaves, with_ids
from randomgraphs import build
from torch import Tensor

from gradtrace.autodiff.backward import RECENT
from gradtrace.autodiff.names import NameTable
from gradtrace.ir import interpreter, memory, optimise
from gradtrace.ir.passes import schedule
from gradtrace.ir.passes.drop_constants import drop_constants
from gradtrace.ir.passes.fuse_moves import fuse_moves
from gradtrace.ir.passes.merge_routes import merge_routes
from gradtrace.ir.passes.provenance import ComponentBits, ProvenanceBounds, analyse_provenance
from gradtrace.ir.passes.storage import choose_storage
from gradtrace.ir.plan import NO_LIMIT, Encoding, Plan, Storage
from gradtrace.ir.program import Program, Step
from gradtrace.kernels import backend_of, tuning
from gradtrace.linops import Map
from gradtrace.recording.record import DENSE_MAX_ENTRIES, record
from gradtrace.semirings import COUNT, MAX, SUM

SEEDS = range(12)
RULES = ("greedy", "edge", "viterbi")
KEEP = 1 << 20


def recorded(seed: int) -> Program:
    """A random program, before any pass."""
    loss = build(seed).loss
    given = torch.ones_like(loss)
    table = NameTable.of(None)
    return record(loss, given, table, RECENT, "kahn", DENSE_MAX_ENTRIES, False, KEEP)


def bits_of(program: Program) -> ComponentBits:
    """A component for each operator but every third, and for one argument of some."""
    blocks = {n: 2 << n for n in range(len(program.blocks)) if n % 3}
    first = len(program.blocks) + 1
    given = {(n, at): 1 << first for n, b in enumerate(program.blocks) for at in (*b.gives,)[1:2]}
    return ComponentBits(blocks, given, {})


def provenance(program: Program, rule: str, storage: Storage = NO_LIMIT) -> list[Any]:
    """For each leaf the set of every element with a path, and the values where the rule has them.

    What set an element without a path is given says nothing: nobody reads it.
    """
    found: dict[int, tuple[Any, Any]] = {}
    with torch.no_grad():
        swept = interpreter.run(program, COUNT)
        for leaf, state, _ in traced_leaves(program, rule, bits_of(program), storage):
            state = with_ids(state)
            assert state.ids is not None
            sets = state.provenance.sets()
            values = None if state.value is None else bits(state.value)
            reached = (swept[leaf.tensor] != 0).reshape(-1).tolist()
            each = zip(state.ids.reshape(-1).tolist(), reached)
            found[leaf.value] = [sets[n] if path else None for n, path in each], values
    return [found[leaf.value] for leaf in program.leaves]


def bits(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


def values(program: Program, semiring: Any) -> list[bytes]:
    """The values of all leaves in a semiring."""
    found = interpreter.run(program, semiring)
    return [bits(found[leaf.tensor]) for leaf in program.leaves]


def everything(program: Program) -> list[Any]:
    """All results of a program."""
    return [
        *(values(program, semiring) for semiring in (SUM, MAX, COUNT)),
        *(provenance(program, rule) for rule in RULES),
        [leaf.compute().tolist() for leaf in program.leaves],
    ]


# Passes over programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("each", [fuse_moves, drop_constants], ids=lambda each: each.__name__)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_pass_over_programs(each: Callable[[Program], Program], seed: int) -> None:
    before = merge_routes(recorded(seed))
    wanted = everything(before)
    after = each(before)
    assert everything(after) == wanted
    assert everything(before) == wanted  # a pass leaves what it was given as it was


def test_passes_over_programs_find_something_to_do() -> None:
    """Or the tests above would show nothing."""
    merged = [merge_routes(recorded(seed)) for seed in SEEDS]
    assert any(len(fuse_moves(p).steps()) < len(p.steps()) for p in merged)
    assert any(len(drop_constants(fuse_moves(p)).maps) < len(fuse_moves(p).maps) for p in merged)


def in_whole_numbers(program: Program, seed: int) -> Program:
    """The program with small whole numbers for weights: sums of them are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    for map_ in program.maps:
        for name in map_.tensors():
            weight = getattr(map_, name)
            if isinstance(weight, Tensor) and weight.is_floating_point():
                whole = torch.randint(-3, 4, weight.shape, generator=generator)
                setattr(map_, name, whole.to(weight.dtype))
    return program


@pytest.mark.parametrize("seed", SEEDS)
def test_merged_routes_give_the_same_sums(seed: int) -> None:
    """In SUM. In other semirings a pair with several routes is what the pass mends."""
    before = in_whole_numbers(recorded(seed), seed)
    assert values(merge_routes(before), SUM) == values(before, SUM)


def test_routes_are_merged_somewhere() -> None:
    found = [recorded(seed) for seed in range(40)]
    assert any(len(merge_routes(p).steps()) != len(p.steps()) for p in found)


def test_all_passes_are_listed_and_tested() -> None:
    assert (merge_routes, fuse_moves, drop_constants) == optimise.PROGRAM_PASSES


# Passes that make a plan -------------------------------------------------------------------------


def nothing_uniform(program: Program, components: ComponentBits) -> ProvenanceBounds:
    """As if every value could have elements of different provenance."""
    found = analyse_provenance(program, components)
    return found._replace(must=dict.fromkeys(found.must, 0))


def no_tails(program: Program) -> set[int]:
    """As if all values were needed at once."""
    return set()


class FreesNothing(schedule.Schedule):
    """Every value stays to the end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.last = dict.fromkeys(self.last, -1)

    def _free(self, step: Step) -> tuple[int, ...]:
        return ()


class NeverLazy(schedule.Schedule):
    """No ids of leaves wait until they are counted."""

    def _is_lazy(self, map_: Map) -> bool:
        return False


WITHOUT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "analyse_provenance": lambda patch: patch.setattr(
        schedule, "analyse_provenance", nothing_uniform
    ),
    "find_tails": lambda patch: patch.setattr(schedule, "find_tails", no_tails),
    "when values are freed": lambda patch: patch.setattr(optimise, "Schedule", FreesNothing),
    "lazy ids": lambda patch: patch.setattr(optimise, "Schedule", NeverLazy),
}
"""How to leave out each pass that makes a plan faster."""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_pass_that_makes_a_plan(
    name: str, rule: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "PIECE_ELEMENTS", 2)  # leaves are large
    program, wanted = with_all_passes(rule, seed)
    WITHOUT[name](monkeypatch)
    found = provenance(program, rule)
    if (name, rule) == ("lazy ids", "viterbi"):  # the largest product of a lazy leaf is not found
        found, wanted = ([sets for sets, _ in each] for each in (found, wanted))
    assert found == wanted


@cache
def with_all_passes(rule: str, seed: int) -> tuple[Any, Any]:
    """A program, and what it gives where leaves are large."""
    program = optimise.simplified(recorded(seed))
    return program, provenance(program, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_compact_storage(rule: str, seed: int) -> None:
    program = optimise.simplified(recorded(seed))
    assert provenance(program, rule, Storage(compact=True)) == provenance(program, rule)


@pytest.mark.parametrize(("budget", "compact"), [(1 << 40, False), (1, True), (None, False)])
def test_storage_is_chosen_by_memory(
    budget: int | None, compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = optimise.simplified(recorded(0))
    monkeypatch.setattr(memory, "available", lambda device: 1 << 40)
    assert (
        choose_storage(program, backend_of(program.seed), True, budget, "this", "less").compact
        is compact
    )


# Plans hold no tensors ---------------------------------------------------------------------------


def planned(program: Program, rule: str = "greedy") -> Plan:
    request = schedule.Request(rule, bits_of(program), gradients=rule != "viterbi")
    return optimise.optimise(program, request)


def held(thing: Any) -> list[type]:
    """The types of everything that is held by tuples, lists, dicts and dataclasses."""
    if isinstance(thing, (tuple, list)):
        return [kind for each in thing for kind in held(each)]
    if hasattr(thing, "__dataclass_fields__"):
        return held([getattr(thing, name) for name in thing.__dataclass_fields__])
    return [type(thing)]


def test_plans_and_programs_hold_no_tensors() -> None:
    for seed in SEEDS:
        program = optimise.simplified(recorded(seed))
        kinds = {*held(planned(program)), *held([b.steps for b in program.blocks])}
        assert not any(issubclass(kind, (Tensor, Map)) for kind in kinds), kinds


def test_a_plan_serves_another_loss_of_the_same_structure() -> None:
    def program_of(x: Tensor, w: Tensor) -> Program:
        loss = ((x @ w).tanh() * x.sum()).square().sum()
        args = (NameTable.of(None), RECENT, "kahn", DENSE_MAX_ENTRIES, False, KEEP)
        return optimise.simplified(record(loss, torch.ones(()), *args))

    torch.manual_seed(0)
    first, second = (
        program_of(torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True))
        for _ in range(2)
    )
    for rule in RULES:
        assert planned(first, rule) == planned(second, rule)
    wanted = provenance(second, "greedy")
    assert provenance(replace(first, constants=second.constants), "greedy") == wanted


def test_encodings_that_occur() -> None:
    """All but lazy ids, which only large leaves have."""
    plans = (planned(optimise.simplified(recorded(seed))) for seed in range(60))
    steps = (op for plan in plans for op in plan.instructions if hasattr(op, "form"))
    found = {op.form.encoding for op in steps}  # type: ignore[union-attr]
    assert {Encoding.MOVED, Encoding.SCALED, Encoding.UNIFORM, Encoding.DENSE} <= found
