"""Values of which each rank traced a part: two threads stand for two ranks."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from backends import CPU
from leaves import with_ids
from torch import Tensor

from gradtrace.ir.plan import Encoding, Form
from gradtrace.kernels import backend_of
from gradtrace.linops.across_ranks import RankGather
from gradtrace.tracing.executor import exchanged
from gradtrace.tracing.provenance import ProvenanceTable
from gradtrace.tracing.traced_value import TracedValue

WORLD = 2


class Ranks:
    """What the ranks say, and a barrier that both must have reached."""

    def __init__(self) -> None:
        self.barrier, self.said = Barrier(WORLD, timeout=20), [None] * WORLD


class Side:
    """The layout of one of the ranks: parts side by side along the first dimension."""

    dims: tuple[int | None, ...] = (0,)
    shape = (4,)

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def told(self, mine: Any) -> list[Any]:
        self.ranks.said[self.rank] = mine
        self.ranks.barrier.wait()
        found = list(self.ranks.said)
        self.ranks.barrier.wait()
        return found

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self.told(part))


def together(states: list[TracedValue], form: Form, absolute: bool) -> list[TracedValue]:
    """The value that each rank gets."""
    ranks, found = Ranks(), {}

    def run(rank: int) -> None:
        side: Any = Side(ranks, rank)
        found[rank] = exchanged(
            RankGather(side, (2,)), states[rank], None, form, absolute, backend_of(CPU)
        )

    threads = [Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(WORLD)]


def part(values: list[float], ids: list[int] | None, sets: tuple[int, ...], power: int = 0) -> Any:
    held = None if ids is None else torch.tensor(ids, dtype=torch.int32)
    return TracedValue(
        torch.tensor(values, dtype=torch.float64), power, held, ProvenanceTable(sets)
    )


def sets_of(state: TracedValue) -> list[int]:
    """The set of components of each element."""
    ids = with_ids(state).ids
    assert ids is not None
    return [state.provenance.sets()[n] for n in ids.tolist()]


@pytest.mark.parametrize("absolute", [False, True])
def test_sets_of_ranks_are_told_apart(absolute: bool) -> None:
    form = Form(Encoding.DENSE, torch.float64)
    parts = [part([1.0, 2.0], [1, 2], (1, 3)), part([3.0, 4.0], [2, 1], (5, 9))]
    for found in together(parts, form, absolute):
        assert sets_of(found) == [1, 3, 9, 5]
        assert found.value is not None
        assert found.value.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_uniform_parts_of_different_sets_are_told_apart() -> None:
    form = Form(Encoding.UNIFORM, torch.float64)
    for found in together(
        [part([1.0, 2.0], None, (3,)), part([3.0, 4.0], None, (5,))], form, False
    ):
        assert sets_of(found) == [3, 3, 5, 5]


def test_uniform_parts_of_one_set_stay_uniform() -> None:
    form = Form(Encoding.UNIFORM, torch.float64)
    for found in together(
        [part([1.0, 2.0], None, (3,)), part([3.0, 4.0], None, (3,))], form, False
    ):
        assert found.ids is None
        assert found.provenance.sets() == [0, 3]


def test_parts_have_one_power_of_two_together() -> None:
    form = Form(Encoding.DENSE, torch.float64)
    parts = [part([1.0, 2.0], [1, 1], (1,), 3), part([3.0, 4.0], [1, 1], (1,), 0)]
    for found in together(parts, form, True):
        assert found.value is not None
        assert (found.value * 2.0**found.exponent).tolist() == [8.0, 16.0, 3.0, 4.0]


def test_elements_without_a_path_have_none() -> None:
    form = Form(Encoding.DENSE, torch.float64)
    parts = [part([0.0, 2.0], [0, 1], (3,)), part([0.0, 4.0], [0, 1], (5,))]
    for found in together(parts, form, True):
        assert sets_of(found) == [0, 3, 0, 5]
