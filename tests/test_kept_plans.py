"""Plans that are kept for the next loss of the same structure."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import architectures
import pytest
import randomgraphs
import thorough
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.traced import Trace
from gradtrace.tracing.kept_plans import KEPT, KeptPlans, PlanCache, forget

RULES = ("greedy", "edge", "viterbi")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget()
    yield
    forget()


class Branches(nn.Module):
    """Two branches side by side, joined by a concatenation or a sum."""

    def __init__(self, swapped: bool = False, added: bool = False) -> None:
        super().__init__()
        self.embed, self.left, self.right = (nn.Linear(4, n) for n in (4, 3, 3))
        self.out = nn.Linear(3 if added else 6, 2)
        self.swapped, self.added = swapped, added

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        parts = [self.left(x).tanh(), self.right(x).sigmoid()]
        if self.swapped:
            parts.reverse()
        return self.out(parts[0] + parts[1] if self.added else torch.cat(parts, 1))


def traced(model: nn.Module, x: Tensor, rule: str = "greedy") -> Trace:
    with gt.watch(model) as watch:
        loss = model(x).square().mean()
    return watch.trace(loss, rule=rule)


def kept_in(cache: PlanCache, trace: Trace) -> KeptPlans:
    return cache.of(trace.program, trace.names, trace.modules, trace.gradients.aliases)


def fresh(ask: Callable[[], Any]) -> Any:
    """The answer without plans of other losses."""
    KEPT.clear()
    return ask()


@pytest.mark.parametrize("rule", RULES)
def test_another_loss_of_the_same_structure_uses_the_plan(rule: str) -> None:
    model, x = Branches(), torch.randn(5, 4)
    tables = []
    for step in range(3):
        tables.append(traced(model, x, rule).influence())
        assert [row.hits for row in KEPT.summary().rows] == [step]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        x = torch.randn(5, 4)
    assert KEPT.summary().hits == 2 and KEPT.summary().misses == 1
    assert len({tuple(row["|g| eligible"] for row in table) for table in tables}) == 3
    kept = traced(model, x, rule).influence()
    assert kept == fresh(lambda: traced(model, x, rule).influence())


@pytest.mark.parametrize(
    "kind", ["modules", nn.Linear, "operators", ["left", "o*"], {"a": ["left"]}]
)
def test_every_choice_of_components_has_its_plan(kind: Any) -> None:
    model, x = Branches(added=True), torch.randn(5, 4)
    traced(model, x).influence("forks")
    tables = [traced(model, x).influence(kind) for _ in range(2)]
    of = [traced(model, x).influence(kind, of="left") for _ in range(2)]
    assert tables[0] == tables[1] == fresh(lambda: traced(model, x).influence(kind))
    assert of[0] == of[1] == fresh(lambda: traced(model, x).influence(kind, of="left"))


def test_influence_on_some_leaves_has_plans_of_its_own() -> None:
    model, x = Branches(), torch.randn(5, 4)
    trace = traced(model, x)
    assert trace.influence(of="left")["left"].own == 15
    assert trace.influence()["right"].own == 15
    assert sorted((row.leaves, row.plans) for row in KEPT.summary().rows) == [(2, 1), (8, 1)]


def test_what_is_different_is_told() -> None:
    model = Branches()
    for x in (torch.randn(5, 4), torch.randn(7, 4), torch.randn(5, 4)):
        traced(model, x).influence()
    last, other = KEPT.summary().rows
    assert (last.hits, last.missed) == (1, "its first loss")
    assert (other.hits, other.missed) == (0, "MeanBackward0: shape (7, 2), not (5, 2)")
    model.swapped = True
    traced(model, torch.randn(5, 4)).influence()
    missed = KEPT.summary().rows[0].missed
    assert missed == "TanhBackward0 in place of SigmoidBackward0"


def test_names_are_part_of_the_structure() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    x = torch.randn(5, 4)
    first = traced(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), x).influence()
    second = traced(Renamed(), x).influence()
    assert (first.names, second.names) == (("0", "1"), ("one", "two"))
    assert KEPT.summary().hits == 0


def test_paths_that_differ_only_in_where_they_are_written_differ() -> None:
    """Concatenations of equal shapes in another order have another structure."""
    x = torch.randn(5, 4)
    model, other = Branches(), Branches(swapped=True)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():  # the same function
        other.out.weight.copy_(model.out.weight[:, [3, 4, 5, 0, 1, 2]])
    first = traced(model, x).influence()
    second = traced(other, x).influence()
    assert KEPT.summary().hits == 0
    assert first["left"].through == second["left"].through


class Fickle(nn.Module):
    """Other operators in every step: dropout, and control flow that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.a(x))
        return self.b(x) if x.sum() > 0 else x + self.b(x).tanh()


def test_control_flow_and_dropout() -> None:
    torch.manual_seed(0)
    model = Fickle()
    for seed in range(12):
        torch.manual_seed(seed)
        kept = traced(model, torch.randn(3, 4)).influence()
        torch.manual_seed(seed)
        alone = PlanCache()
        trace = traced(model, torch.randn(3, 4))
        trace.__dict__["kept"] = kept_in(alone, trace)
        assert trace.influence() == kept
    assert len(KEPT.summary().rows) == 2 and KEPT.summary().hits == 10


@pytest.mark.parametrize("start", range(0, thorough.few(100, 2000), 50))
def test_random_graphs(start: int) -> None:
    """A table by a kept plan is that by a new one."""
    for seed in range(start, start + 50):
        loss = randomgraphs.build(seed).loss
        KEPT.clear()
        first, again = (
            gt.trace(loss, rule=RULES[seed % 3]).influence("operators") for _ in range(2)
        )
        assert again == first
        assert KEPT.summary().hits == 1, seed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own
@pytest.mark.parametrize("name", thorough.some(architectures.ARCHITECTURES, 6))
def test_architectures(name: str) -> None:
    """After a step, that is with other weights."""
    model, loss = architectures.ARCHITECTURES[name]()

    def ask() -> Any:
        torch.manual_seed(0)
        with gt.watch(model) as watch:
            found = loss(model)
        return watch.trace(found).influence()

    ask()  # the first pass of a process takes hooks for possible, and may record formulas whole
    first = ask()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)
    again = ask()
    routed = {
        "switch",
        "mixtral",
        "qwen2_moe",
    }  # experts get as many tokens as the weights give them
    assert KEPT.summary().hits >= 1 or name in routed
    assert again == fresh(ask) and set(first.names) == set(again.names)


def test_structures_are_forgotten() -> None:
    cache = PlanCache(structures=2)
    model = Branches()
    for batch in (2, 3, 4, 3):
        kept_in(cache, traced(model, torch.randn(batch, 4)))
    assert len(cache.summary().rows) == 2 and cache.summary().hits == 1
    kept_in(cache, traced(model, torch.randn(2, 4)))
    assert cache.summary().misses == 4  # it had been forgotten
    small = PlanCache(steps=1)
    for batch in (2, 3):
        kept_in(small, traced(model, torch.randn(batch, 4)))
    assert len(small.summary().rows) == 1  # the last stays, however large
    small.clear()
    assert not small.summary().rows and not small.summary().bytes


def test_plans_hold_no_tensors() -> None:
    model, x = Branches(), torch.randn(5, 4)
    traced(model, x).influence()
    seen: set[int] = set()
    stack: list[Any] = list(KEPT._kept.items())
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type) or item is sys.modules:
            continue
        seen.add(id(item))
        assert not isinstance(item, (Tensor, nn.Module)), type(item)
        if not callable(item):
            stack += gc.get_referents(item)
    assert 1_000 < KEPT.summary().bytes < 1_000_000


def test_many_choices_are_forgotten() -> None:
    model, x = Branches(), torch.randn(2, 4)
    for n in range(70):
        traced(model, x).influence({f"group {n}": "left"})
    (kept,) = KEPT._kept.values()
    assert len(kept.selections) <= 32 and len(kept._facts) <= 32


def test_threads() -> None:
    """Each sees its own table, whoever made the plan."""
    models = [Branches(added=n % 2 == 0) for n in range(4)]
    x = torch.randn(6, 4)
    wanted = [traced(model, x).influence() for model in models]
    KEPT.clear()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(lambda model: traced(model, x).influence(), models))
            assert found == wanted
    assert KEPT.summary().hits + KEPT.summary().misses == 20
