"""Short ways of a pass: what they leave out would have changed nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import reduce
from itertools import product
from operator import add

import devices
import pytest
import torch
from backends import CPU, imitate_gpu
from leaves import with_ids
from programs import program
from randomgraphs import build
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.ir.passes.tails import find_tails
from gradtrace.ir.plan import Encoding, Form
from gradtrace.ir.program import Program, Step
from gradtrace.kernels import backend_of
from gradtrace.linops import Contract, Identity, Index, Map, tiling
from gradtrace.linops.base import Best
from gradtrace.linops.diag_low_rank import Normaliser, _line_layout
from gradtrace.linops.gather import Slot
from gradtrace.tracing import executor, greedy_rule
from gradtrace.tracing.executor import concatenated
from gradtrace.tracing.greedy_rule import Greedy
from gradtrace.tracing.provenance import COMPACT_ABOVE_ENTRIES, ProvenanceTable
from gradtrace.tracing.traced_value import (
    PendingContribution,
    TracedValue,
    cancelled,
    made,
    shared,
)
from tests.waits import Waits


def numbers(*given: int) -> Tensor:
    return torch.tensor(given, dtype=torch.int32)


# Moves -------------------------------------------------------------------------------------------


def moved(
    state: TracedValue, map_: Map, dtype: torch.dtype, known: Tensor | None = None
) -> TracedValue:
    return Greedy(backend_of(CPU)).through(map_, state, Form(Encoding.MOVED, dtype), known)


def test_what_becomes_0_by_rounding_keeps_its_path() -> None:
    value = torch.tensor([1e-30, 0.0, 2.0])
    state = made(value, numbers(1, 2, 1), ProvenanceTable((1, 3)), (), True)
    for map_ in (Identity((3,)), Identity((3,), (3, 1))):
        found = moved(state, map_, torch.float16)
        assert found.value is not None and found.value.dtype is torch.float16
        assert found.value.reshape(-1).tolist() == [0.0, 0.0, 2.0]
        assert with_ids(found).ids.reshape(-1).tolist() == [1, 0, 1]  # type: ignore[union-attr]


def test_loose_numbers_stay_loose_where_the_dtype_stays() -> None:
    state = made(torch.tensor([1.0, 0.0]), numbers(1, 2), ProvenanceTable((1, 3)), (), True)
    found = moved(state, Index(lambda x: x.flip(0), (2,), (2,)), torch.float32)
    assert found.unmasked and found.ids is not None and found.ids.tolist() == [2, 1]
    assert with_ids(found).ids.tolist() == [0, 1]  # type: ignore[union-attr]


def test_a_gradient_that_is_known_is_taken() -> None:
    known = torch.tensor([[3.0], [0.0]])
    state = made(torch.tensor([1.0, 1.0]), numbers(1, 2), ProvenanceTable((1, 3)))
    found = moved(state, Identity((2,), (2, 1)), torch.float32, known)
    assert found.value is known and not found.unmasked
    assert found.ids is not None and found.ids.tolist() == [[1], [2]]


def test_a_part_that_is_put_off_learns_of_the_move() -> None:
    x = torch.ones(2)
    state = made(None, None, ProvenanceTable(), (PendingContribution(Identity((2,)), x),))
    map_ = Identity((2,), (2, 1))
    found = moved(state, map_, torch.float32)
    (part,) = found.parts
    assert found.value is None and part.moves == (map_,) and part.x is x
    assert part.value().shape == (2, 1)


# Terms side by side ------------------------------------------------------------------------------


def tiled(rule: str, rows: int = 2) -> TracedValue:
    maps: list[Map] = [Slot(0, 0, (3,), (3,), (6,)), Slot(0, 3, (3,), (3,), (6,))]
    first = TracedValue(torch.tensor([1.0, 0.0, 2.0]), 0, numbers(1, 2, 0), ProvenanceTable((1, 3)))
    other = ProvenanceTable(tuple(range(1, 2 * rows, 2)), 8)
    second = TracedValue(torch.tensor([0.0, 4.0, 5.0]), 0, numbers(1, rows, 0), other)
    order = tiling(maps)
    assert order == [0, 1]
    form = Form(Encoding.DENSE, torch.float32)
    return concatenated(
        maps, [first, second], order, None, form, rule == "viterbi", backend_of(CPU)
    )


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
@pytest.mark.parametrize("rows", [2, COMPACT_ABOVE_ENTRIES])
def test_tiles_have_the_marks_of_their_terms_but_for_zeros(rule: str, rows: int) -> None:
    found = tiled(rule, rows)
    told = with_ids(found).ids
    assert told is not None and told.dtype is torch.int32
    assert found.unmasked == (rule != "viterbi" and rows == 2)
    marks = found.provenance.sets()
    assert [marks[n] for n in told.tolist()] == [1, 0, 0, 0, (2 * rows - 1) | 8, 0]


# Sums of terms with the same marks ---------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True])
def test_terms_with_the_same_marks(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_gpu(monkeypatch, waits)
    devices.shared_sums("cpu")


def test_what_is_not_the_same_is_not_shared() -> None:
    x, marks, provenance = torch.ones(2), numbers(1, 2), ProvenanceTable((1, 3))
    state = made(x, marks, provenance)
    assert shared([state, made(x + 1, marks, provenance, (), True)])
    for other in (
        made(x, marks.clone(), provenance),
        made(x, marks, ProvenanceTable((1, 3), 4)),
        made(x, marks, ProvenanceTable((1, 5))),
        made(x.double(), marks, provenance),
        made(None, marks, provenance, (PendingContribution(Identity((2,)), x),)),
        made(x, None, provenance),
        state._replace(size=x),
    ):
        assert not shared([state, other]) and not shared([other, state])
    long = made(x, marks, ProvenanceTable(tuple(range(COMPACT_ABOVE_ENTRIES + 1))))
    assert not shared([long, long])


class Users(nn.Module):
    """A value with some users that only weigh it: some give 0, some cancel each other."""

    def __init__(self, users: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.users = users

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        gains = torch.randn(self.users, *h.shape, generator=torch.Generator().manual_seed(1))
        gains = gains.round().to(h.dtype)  # many are 0
        gains[1, :2] = -gains[0, :2]
        y = reduce(add, [h * gain for gain in gains])
        return self.last(y + self.second(y)).square().sum()


@pytest.mark.parametrize("users", [2, 3, 4, 7])
@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_influence_is_that_of_comparing(
    users: int, rule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Users(users).to(dtype), torch.randn(5, 3, dtype=dtype)
    tables, used = [], Counter[bool]()

    def noted(states: list[TracedValue]) -> bool:
        found = shared(states)
        used[found] += 1
        return found

    for way in (noted, lambda states: False):
        monkeypatch.setattr(greedy_rule, "shared", way)
        monkeypatch.setattr(executor, "shared", way)
        with gt.watch(model) as watch:
            loss = model(x)
        tables.append(watch.trace(loss, rule=rule).influence(["first", "second", "last"]))
    assert tables[0] == tables[1]
    assert used[True] or rule == "viterbi" or dtype is not torch.float32


# Zeros that something came to --------------------------------------------------------------------


def _cancelled(parts: tuple[PendingContribution, ...], value: Tensor) -> Tensor | None:
    return cancelled(parts, value, backend_of(value))


def test_zeros_are_looked_for_with_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.tensor([[1.0, -1.0], [0.0, 0.0]]), torch.ones(2, 3)
    weight[:, 2] = 2.0
    map_ = Contract("mk,kn->mn", weight, (2, 2), (2, 3))
    part = PendingContribution(map_, x)
    value = part.value()
    wanted = [[True] * 3, [False] * 3]
    for waits in (False, True):
        imitate_gpu(monkeypatch, waits)
        with Waits(2 if waits else None):  # where they are, and whether something came there
            found = _cancelled((part,), value)
        assert found is not None and found.tolist() == wanted
        moved_part = part._replace(moves=(Index(lambda x: x.mT, (2, 3), (3, 2)),))
        turned = _cancelled((moved_part,), value.mT)
        assert turned is not None and turned.mT.tolist() == wanted
        assert _cancelled((part, part._replace(x=-x)), torch.zeros(2, 3)) is None  # all are 0
        ones, quiet = part._replace(x=torch.eye(2)), part._replace(x=torch.zeros(2, 2))
        three = quiet, ones, ones._replace(x=-ones.x)
        missed = _cancelled(three, torch.zeros(2, 3))
        assert missed is not None and bool(missed.all())
        with Waits(1 if waits else None):
            assert _cancelled((part._replace(x=torch.zeros(2, 2)),), torch.zeros(2, 3)) is None


def test_rows_that_read_zeros_alone_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a sequence gets no gradient: its rows have the length of a vocabulary."""
    x, weight = torch.tensor([[1.0, -1.0], [0.0, 0.0]] + [[1.0, 2.0]] * 400), torch.ones(2, 3)
    part = PendingContribution(Contract("mk,kn->mn", weight, (402, 2), (402, 3)), x)
    asked: list[Tensor] = []
    best = Contract.best

    def noted(self: Contract, x: Tensor, at: Tensor | None = None) -> Best:
        assert at is not None
        asked.append(at)
        return best(self, x, at)

    monkeypatch.setattr(Contract, "best", noted)
    found = _cancelled((part,), part.value())
    assert found is not None and found.nonzero().tolist() == [[0, 0], [0, 1], [0, 2]]
    assert torch.cat(asked).tolist() == [0, 1, 2]


# Values that only leaves are made of -------------------------------------------------------------


def slowly(given: Program) -> set[int]:
    """``tails`` from its definition."""
    uses = Counter([term.value for step in given.steps() for term in step.terms])
    found = {leaf.value for leaf in given.leaves}
    while True:
        more = {
            value
            for step in given.steps()
            if step.out in found
            for at, value in step.terms
            if given.maps[at].is_gather and uses[value] == 1
        } - found
        if not more:
            return found
        found |= more


def test_tails() -> None:
    some = 0
    for seed in range(40):
        given = program(build(seed).loss)
        assert find_tails(given) == slowly(given)
        some += len(find_tails(given)) > len(given.leaves)
    assert some > 5


def test_a_value_added_to_itself_is_no_tail() -> None:
    x = torch.ones(2, requires_grad=True)
    given = program(x.sum())
    here = next(leaf.value for leaf in given.leaves)
    maker = next(step for step in given.steps() if step.out == here)
    maker_map = Identity(maker.shape)
    both = tuple(given.maps.term(maker_map, here) for _ in range(2))
    twice = Step(here + 100, both, maker.shape, x.dtype)
    last = given.blocks[-1]  # kept for the next loss of this structure: not changed, but replaced
    added = replace(last, steps=(*last.steps, twice))
    given = replace(given, blocks=(*given.blocks[:-1], added))
    given.leaves[0].value = here + 100
    assert find_tails(given) == slowly(given) == {here + 100}


# Lines as they lie -------------------------------------------------------------------------------


def test_lines_are_found_where_a_view_has_them() -> None:
    shape, count = (3, 4, 1, 5), Counter[bool]()
    for dims, order in product(((3,), (1, 3), (0, 1), (0,), (), (0, 1, 2, 3), (2,)), range(4)):
        m = Normaliser(torch.ones(()), [], dims, shape)
        whole = torch.arange(120.0).reshape(3, 4, 1, 10)[..., ::2]
        turned = [0, 1, 2, 3][order:] + [0, 1, 2, 3][:order]
        back = [turned.index(d) for d in range(4)]
        lying = whole.permute(turned).contiguous().permute(back)
        for x in (lying, whole, whole[:, :1], whole[0], whole[:1, :, :, :1], torch.ones(5)):
            wide = x.expand(shape)
            lies = _line_layout(shape, dims, (x.shape, x.stride()))
            view = m._lines(x)
            shares = view.data_ptr() == wide.data_ptr()
            count[lies is not None] += 1
            assert (lies is not None) == shares, (dims, x.stride())
            if lies is not None:
                lines, n, _, ((line, step),) = lies
                assert torch.equal(x.as_strided((lines, n), (line, step)), view)
    assert count[True] > 20 and count[False] > 20


def test_normalise_tensors_as_they_lie() -> None:
    devices.normalise_lying("cpu")


def test_normalised_sums() -> None:
    devices.normalised_sums("cpu")
