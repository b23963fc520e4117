"""Random networks with branches: the chapter's procedure, and their parts by name."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.experiments.branching import (
    PROBABILITY,
    WIDTH,
    Branching,
    Diamond,
    Layer,
    Plan,
    branching,
    plan,
    units,
)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def test_a_seed_gives_the_same_network_and_leaves_random_numbers_alone() -> None:
    one, x = branching(3), torch.randn(1, 10)
    torch.rand(1)
    before = torch.get_rng_state()
    again, other = branching(3), branching(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert str(one) == str(again) != str(other)
    assert torch.equal(one(x), again(x))
    assert not torch.equal(one(x), other(x))


@pytest.mark.parametrize("seed", range(20))
def test_networks_lead_from_10_to_10(seed: int) -> None:
    model = branching(seed)
    *hidden, last = linears(model)
    assert {layer.in_features for layer in hidden} == {10}  # all side by side, on the input
    assert last.in_features == sum(layer.out_features for layer in hidden)
    assert last.out_features == 10
    assert all(10 <= layer.out_features <= 500 for layer in hidden)
    assert sum(isinstance(m, nn.Tanh) for m in model.modules()) == len(hidden) + 1
    model(torch.randn(1, 10)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_sizes_can_be_others() -> None:
    model = branching(5, probability=1.0, width=(2, 3), inputs=4, outputs=6)
    *hidden, last = linears(model)
    assert {layer.in_features for layer in hidden} == {4} and last.out_features == 6
    assert {layer.out_features for layer in hidden} <= {2, 3}
    assert isinstance(model.layers[0], Diamond)
    assert isinstance(branching(5, probability=0.0).layers[0], Layer)


@pytest.mark.parametrize("wrong", [{"probability": 1.5}, {"width": (20, 10)}, {"layers": 0}])
def test_impossible_networks_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="probability lies in"):
        branching(0, **wrong)  # type: ignore[arg-type]


def test_expanded_layers_follow_each_other() -> None:
    model = branching(7, layers=3)
    widths = [10]
    for part in model.layers:
        ends = linears(part)
        assert {layer.in_features for layer in ends} == {widths[-1]}
        widths.append(sum(layer.out_features for layer in ends))
    assert linears(model.output)[0].in_features == widths[-1]
    assert [units(planned) for planned in model.plans] == widths[1:]


def test_a_diamond_concatenates_what_both_sides_make_of_one_input() -> None:
    x = torch.tensor([[1.0, 2.0]])
    found = Diamond(nn.Tanh(), nn.Identity())(x)
    assert torch.equal(found, torch.cat([x.tanh(), x], 1))


# Chances -----------------------------------------------------------------------------------------


def levels(planned: Plan, level: int = 0) -> Iterator[tuple[int, bool]]:
    """The level of every layer, and whether it was expanded."""
    yield level, not isinstance(planned, int)
    if not isinstance(planned, int):
        for part in planned:
            yield from levels(part, level + 1)


def test_the_chance_of_a_diamond_is_halved_at_each_level() -> None:
    draw = random.Random(0)
    seen = [x for _ in range(5_000) for x in levels(plan(draw, PROBABILITY, WIDTH))]
    for level, chance in enumerate((0.95, 0.475, 0.2375, 0.11875)):
        splits = [split for at, split in seen if at == level]
        error = math.sqrt(chance * (1 - chance) / len(splits))
        assert abs(sum(splits) / len(splits) - chance) < 4 * error, (level, len(splits))


def test_units_are_uniform() -> None:
    draw = random.Random(1)
    drawn = [units(plan(draw, 0.0, WIDTH)) for _ in range(5_000)]
    assert min(drawn) == 10 and max(drawn) == 500
    spread = 491 / math.sqrt(12 * len(drawn))
    assert abs(sum(drawn) / len(drawn) - 255) < 4 * spread


# Components --------------------------------------------------------------------------------------


def test_components_are_the_sub_layers_of_the_diamonds() -> None:
    model = Branching(((3, (4, 5)),), 2, 2)
    assert model.components() == {
        "left": "layers.0.left",
        "right": "layers.0.right",
        "right.left": "layers.0.right.left",
        "right.right": "layers.0.right.right",
    }
    assert model.rivals() == [("left", "right"), ("right.left", "right.right")]
    assert list(Branching((3, (4, 5)), 2, 2).components()) == ["2.left", "2.right"]
    assert Branching((3,), 2, 2).components() == {}


def ablated(model: Branching, x: Tensor, name: str, **how: str) -> Tensor:
    with torch.no_grad(), gt.ablate(model, name, **how):  # type: ignore[arg-type]
        found: Tensor = model.layers(x)
    return found


def test_every_component_can_be_ablated_and_has_its_own_columns() -> None:
    """Zero where it was, and all else as before; together the outer two are all of the layer."""
    model, x = branching(7, width=(3, 9)), torch.randn(4, 10)
    before = model.layers(x).detach()
    changed = {n: ablated(model, x, m) != before for n, m in model.components().items()}
    assert len(changed) == 12
    for name, columns in changed.items():
        part = model.get_submodule(model.components()[name])
        assert int(columns.all(0).sum()) == part(x).shape[-1]
        assert torch.equal(columns.any(0), columns.all(0))
        parent = name.rpartition(".")[0]
        assert not parent or not (columns & ~changed[parent]).any()
    for left, right in model.rivals():
        assert not (changed[left] & changed[right]).any()
    assert bool((changed["left"] | changed["right"]).all())
    mean = ablated(model, x, model.components()["left"], how="mean")
    assert torch.equal(mean[0] == mean[1], changed["left"][0])


@pytest.mark.parametrize("layers", [1, 2])
def test_influence_needs_parameters_before_a_diamond(layers: int) -> None:
    model = branching(7, width=(3, 9), layers=layers).double()
    with gt.watch(model) as watch:
        loss = model(torch.ones(2, 10).double()).square().sum()
    components = model.components()
    table = watch.trace(loss).influence(list(components.values()))
    eligible = {name: table[path].count.e for name, path in components.items()}
    assert {n for n, count in eligible.items() if count} == {
        name for name in components if name.startswith("2.")
    }
