"""One graph over several devices: traced on one of them, with the results of a model that is on one
device. Without a GPU, tensors are taken for those of another device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import architectures
import measured
import pytest
import thorough
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import gradtrace as gt
from gradtrace import session
from gradtrace.errors import GradtraceError, Unsupported
from gradtrace.ir.lazy_gradient import LazyGradient
from gradtrace.ir.program import Constants, Leaf, MapTable
from gradtrace.linops import Contract, Index, Normaliser, Scale, Sparse, read_through
from gradtrace.linops.read_through import (
    AwayView,
    Copies,
    copied_on_read,
    gathered_on_read,
    views_of,
)
from gradtrace.linops.sparse import Around
from gradtrace.paths.paths import Path
from gradtrace.pytorch.dtensor import LocalParts
from gradtrace.recording import devices, record
from gradtrace.semirings import ENTROPY, MAX, Semiring
from gradtrace.traced import Trace
from gradtrace.tracing.kept_plans import forget

CPU = torch.device("cpu")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Elsewhere(Copies):
    """All tensors count as those of another device; copies are other tensors."""

    made = 0

    def is_away(self, x: object) -> bool:
        return isinstance(x, Tensor) and x.dim() > 0

    def read(self, x: Tensor) -> Tensor:
        Elsewhere.made += 1
        return super().read(x)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are taken for such over several devices; all is copied that a map reads."""
    right = record.ProgramRecorder._leaf

    def recorded(self: record.ProgramRecorder, *given: Any) -> None:
        right(self, *given)
        self.products.changes_device = True

    monkeypatch.setattr(record.ProgramRecorder, "_leaf", recorded)
    monkeypatch.setattr(devices, "_leaf", lambda leaf, device: replace(leaf, device=device))
    monkeypatch.setattr(devices, "Copies", Elsewhere)
    monkeypatch.setattr(read_through, "copied", lambda x, device: x.detach().clone())
    monkeypatch.setattr(read_through, "SMALL_MAX_BYTES", 0)
    forget()  # a recording that is replayed reads no leaf
    Elsewhere.made = 0
    yield
    forget()
    assert Elsewhere.made


@pytest.fixture
def none_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording keeps no gradients, so that those are computed again, as where they are away."""
    monkeypatch.setattr(session, "kept_gradient_bytes", lambda *_: 0)


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_measures_of_maps_that_copy_their_tensors(
    pairs: bool, none_kept: None, request: pytest.FixtureRequest
) -> None:
    wanted = measured.measures("cpu", torch.float64, pairs)
    request.getfixturevalue("elsewhere")
    measured.agree(measured.measures("cpu", torch.float64, pairs), wanted, torch.float64)


def answers(name: str) -> list[Any]:
    model, loss_of = architectures.ARCHITECTURES[name]()
    torch.manual_seed(1)
    with gt.watch(model) as watch:
        loss = loss_of(model)
    found: list[Any] = [watch.backward(loss, MAX)]
    for rule in ("greedy", "edge", "viterbi"):
        found.append(watch.trace(loss, rule=rule).influence())
    trace = watch.trace(loss)
    found += [
        trace.influence(sample=50),
        [(row.module, row.depth, row.verdict) for row in trace.norms().rows],
        [str(path) for path in trace.paths(sample=9)],
    ]
    return found


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", thorough.some(sorted(architectures.ARCHITECTURES), 2))
def test_architectures(name: str, none_kept: None, request: pytest.FixtureRequest) -> None:
    wanted = answers(name)
    request.getfixturevalue("elsewhere")
    found = answers(name)
    for key, x in wanted[0].items():
        torch.testing.assert_close(found[0][key], x, rtol=1e-5, atol=0)
    assert found[1:] == wanted[1:]


def test_a_map_reads_a_copy_and_keeps_few() -> None:
    copies = Elsewhere(CPU)
    weights = [torch.randn(40, 40) for _ in range(20)]
    maps = [copied_on_read(Contract("mk,kn->mn", w, (2, 40), (2, 40)), copies) for w in weights]
    x = torch.randn(2, 40)
    for map_, w in zip(maps, weights):
        assert map_.tensors() == () and isinstance(map_, Contract)
        torch.testing.assert_close(map_.apply(x), x @ w)
        assert map_.structure() == Contract("mk,kn->mn", w, (2, 40), (2, 40)).structure()
        assert [v.tensors for v in views_of(map_) if isinstance(v, AwayView)] == [[w]]
    assert len(copies._recent) == read_through.COPIES_KEPT


def test_tuples_small_tensors_and_functions() -> None:
    copies = Elsewhere(CPU)
    u, v = torch.randn(3, 500), torch.randn(3, 500)
    plain = Normaliser(u, [(u, v)], [1], (3, 500))
    lines, x = copied_on_read(plain, copies), torch.randn(3, 500)
    assert {*lines.views} == {"diagonal", "left", "right"}  # type: ignore[attr-defined]
    torch.testing.assert_close(lines.apply(x), plain.apply(x))
    small = copied_on_read(Scale(torch.randn(3), (3,)), copies)
    assert type(small) is Scale and not views_of(small)
    number = Scale(torch.tensor(2.0), (3,))
    assert copied_on_read(number, copies) is number


def test_other_tuples_stay_what_they_are() -> None:
    """The batch dimensions of a sparse map have names."""
    entries = torch.tensor([0, 1]), torch.tensor([1, 0]), torch.randn(2)
    plain, x = Sparse.of(entries, (2, 2), (2, 2), Around(1, 2, 1)), torch.randn(2, 2)
    for found in (copied_on_read(plain, Elsewhere(CPU)), gathered_on_read(plain, None, {})):
        assert isinstance(found, Sparse) and type(found.around) is Around
        torch.testing.assert_close(found.apply(x), plain.apply(x))


def test_functions_that_hold_tensors_are_applied_where_these_are() -> None:
    places: list[str] = []

    def moving(index: Tensor) -> Any:
        def move(x: Tensor) -> Tensor:
            places.append(x.device.type)
            return x.index_select(0, index)

        return move

    there, here = torch.zeros(2, dtype=torch.int64, device="meta"), torch.tensor([1, 0])
    for index, wanted in ((there, "meta"), (here, "cpu")):
        map_ = copied_on_read(Index(moving(index), (3,), (2,)), Copies(CPU))
        assert isinstance(map_, Index)
        try:
            map_.move(torch.ones(3))
        except NotImplementedError:  # a meta tensor has no elements to bring back
            assert wanted == "meta"
        assert places.pop() == wanted


def test_values_are_on_a_gpu_if_leaves_are() -> None:
    """``meta`` stands for a GPU: it is not the CPU."""

    def chosen(seed: str, *leaves: tuple[int, str]) -> str:
        made = [Leaf(torch.ones(n, device=d), 0, torch.ones(())) for n, d in leaves]
        constants = Constants(torch.ones((), device=seed), MapTable(), made)
        return devices.device_of_values(constants).type

    assert chosen("cpu", (3, "cpu")) == "cpu"
    assert chosen("cpu", (3, "cpu"), (1, "meta")) == "meta"
    assert chosen("meta", (3, "cpu")) == "meta"


def test_ranks_with_several_devices_are_refused() -> None:
    parts = LocalParts(None, frozenset({1}))
    with pytest.raises(Unsupported, match="sharded over ranks"):
        devices.on_one_device(Constants(torch.ones(()), MapTable(), [], {}, parts))


def test_a_leaf_on_another_device_keeps_its_gradient_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaf = Leaf(torch.ones(3, device="meta"), 1, torch.ones(3, device="meta"))
    far, near = torch.ones(3, device="meta"), torch.ones(3)
    constants = Constants(torch.ones(()), MapTable(), [leaf], {5: far, 6: near})
    monkeypatch.setattr(devices, "device_of_values", lambda _: CPU)
    monkeypatch.setattr(devices, "COPIED_AT_ONCE_BYTES", 11)
    found = devices.on_one_device(constants)
    assert [*found.kept] == [6]
    assert isinstance(found.leaves[0].given, LazyGradient) and found.leaves[0].known is None
    assert found.leaves[0].compute().is_meta and found.leaves[0].device == CPU


def test_weights_elsewhere_that_were_changed_are_noticed(elsewhere: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    given = torch.ones(2, 4)
    with gt.watch(model) as watch:
        hidden = model[0](given)
        loss = model[2](model[1](hidden)).sum()
    trace = watch.trace(loss)
    trace.influence()
    with torch.no_grad():
        hidden.add_(1)
        given.add_(1)
    with pytest.raises(GradtraceError, match="changed in place"):
        trace.influence(sample=3)


# On a GPU -----------------------------------------------------------------------------------------

PLACES = {
    "loss on the CPU": ("cuda", {"loss": "cpu"}),
    "table on the CPU": ("cuda", {"embed": "cpu"}),
    "layers on the CPU": (
        "cuda",
        {"recurrent": "cpu", "qkv": "cpu", "mlp.0": "cpu", "norm": "cpu"},
    ),
    "layers on the CPU, and the loss": ("cuda", {"conv": "cpu", "cell": "cpu", "loss": "cpu"}),
    "a layer on the GPU": ("cpu", {"linear": "cuda"}),
    "layers on the GPU, and the loss": ("cpu", {"mlp": "cuda", "conv": "cuda", "loss": "cuda"}),
}


def numbers(trace: Trace) -> dict[str, Any]:
    """Counts by every rule, floats of decompose and mass, and the coverage of all elements."""
    counts: dict[str, Any] = {}
    for rule in ("greedy", "edge", "viterbi"):
        table = replace(trace, rule=rule).influence(measured.COMPONENTS)
        counts[rule] = [(row.name, row.through, row.eligible, row.unreached) for row in table]
    mass, split = trace.mass(measured.COMPONENTS), trace.decompose(measured.COMPONENTS)
    floats = {
        "shares": list(split.shares.values()),
        "mass": [mass.total, *mass.shares.values()],
        "gradients": [gradient.cpu() for gradient in trace.gradients.values()],
    }
    return {"counts": counts, "floats": floats, "coverage": measured.parts(trace)}


def covers_alike(found: Sequence[float], wanted: Sequence[float]) -> None:
    """Quartiles lie where they do among the others. Elements whose gradient cancels to rounding
    are there on one device and not on another, so ranks may differ by a few of them.
    """
    for quantile in (0.25, 0.5, 0.75):
        value = sorted(found)[int(quantile * len(found))]
        rank = sum(part < value for part in wanted)
        assert abs(rank / len(wanted) - quantile) < 0.02


@cache
def on_one_device(device: str, pairs: bool) -> dict[str, Any]:
    return numbers(measured.trace(device, torch.float64, pairs))


@on_a_gpu
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("pairs", [False, True])
def test_measures_over_devices(name: str, pairs: bool) -> None:
    device, places = PLACES[name]
    trace = measured.trace(device, torch.float64, pairs, places=places)
    assert trace.device.type == "cuda"
    wanted = on_one_device(places.get("lstm", device), pairs)  # cells have other operators on a GPU
    found = numbers(trace)
    measured.agree(found, wanted, torch.float64)
    covers_alike(found["coverage"], wanted["coverage"])
    _lies_with_its_parameter(trace)


def without_copies(path: Path) -> list[str]:
    return [operator for operator in path.operators if operator != "ToCopyBackward0"]


def _lies_with_its_parameter(trace: Trace) -> None:
    split = trace.decompose({"mlp": "mlp"})
    through = split.gradients("mlp")
    for name, leaf in trace.leaves.items():
        assert trace.gradients[name].device == through[name].device == leaf.tensor.device
    for name in ("mlp.0.weight", "embed.weight"):
        both = through[name] + split.around("mlp", name)
        torch.testing.assert_close(both, trace.gradients[name])


@on_a_gpu
@pytest.mark.parametrize("semiring", [MAX, ENTROPY], ids=str)
def test_other_semirings_flow_and_paths(semiring: Semiring) -> None:
    def answers(device: str, linear: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 1)).double()
        model.to(device)
        measured._put(model[2], linear, device)
        with gt.watch(model) as watch:
            loss = model(torch.randn(5, 6).double().to(device)).square().mean()
        found, trace = watch.backward(loss, semiring), watch.trace(loss)
        flat = {(name, n): x for name in found for n, x in enumerate(tree_leaves(found[name]))}
        places = {name: p.device for name, p in model.named_parameters()}
        assert all(x.device == places[name] for (name, _), x in flat.items())
        tables = trace.influence(sample=40), trace.influence()
        counts = [[(row.through, row.eligible) for row in table] for table in tables]
        paths = [without_copies(path) for path in trace.paths(sample=20)]
        numbers = [row.norm for row in trace.norms().rows]
        numbers += [path.weight for path in trace.paths("0.weight", k=3)]
        return {key: x.cpu() for key, x in flat.items()}, numbers, counts, paths

    wanted = answers("cpu", "cpu")
    for device, linear in (("cuda", "cpu"), ("cpu", "cuda")):
        found = answers(device, linear)
        torch.testing.assert_close(found[0], wanted[0])
        assert found[1] == pytest.approx(wanted[1])
        assert found[2:] == wanted[2:]
