"""Passes whose calls are made again for the next loss (``gradtrace.ir.tape``)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from architectures import ARCHITECTURES
from backends import imitate_gpu
from thorough import some
from torch import Tensor, nn
from torch.nn import functional as F

import gradtrace as gt
from gradtrace.ir.tape import Tape, Tapes
from gradtrace.table import Table
from gradtrace.tracing.kept_plans import forget


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_gpu(monkeypatch)


class Attention(nn.Module):
    """Two layers with attention, norms, a table of words and slices; tied, or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(8, 11, bias=False)
        if tied:
            self.out.weight = self.embed.weight
        self.factor = 0.5

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) * self.factor + torch.cat([x[:, 2:], x[:, :2]], 1)
        return self.out(x)


def taped(model: nn.Module, ids: Tensor, **how: Any) -> tuple[Table, list[Tape | None]]:
    """The mass of a loss, and the tapes that are kept for its structure then."""
    with gt.watch(model) as watch:
        loss = F.cross_entropy(model(ids).transpose(1, 2), ids)
    trace = watch.trace(loss)
    found = trace.mass(**how)
    slots = [s for facts in trace.kept._facts.values() for s in facts.mass_tapes.kept.values()]
    return found, [slot.noted and slot.noted[0] for slot in slots]


def untaped(model: nn.Module, ids: Tensor, **how: Any) -> Table:
    forget()
    return taped(model, ids, **how)[0]


def same_table(a: Table, b: Table) -> bool:
    return a.shares == b.shares and a.about["mass"] == b.about["mass"]


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_calls_are_made_again_for_other_tensors(gpu: None, p: float) -> None:
    """The third loss of a structure makes the calls of the second; tables are those of a fresh
    pass to the bit.
    """
    torch.manual_seed(0)
    model = Attention().double()
    runs: list[tuple[dict[str, Tensor], Tensor, Table]] = []
    forget()
    seen = []
    for _ in range(4):
        ids = torch.randint(0, 11, (2, 6))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
        table, kept = taped(model, ids, p=p)
        state = {name: x.clone() for name, x in model.state_dict().items()}
        runs.append((state, ids, table))
        seen.append(kept[0])
    assert seen[0] is None and seen[1] is not None and seen[1] is seen[2] is seen[3]
    assert len({table.about["mass"] for *_, table in runs}) == 4
    for state, ids, table in runs:
        model.load_state_dict(state)
        assert same_table(untaped(model, ids, p=p), table)


def test_a_tape_is_of_equal_maps_only(gpu: None) -> None:
    """Numbers, ties and strides that differ: the table is right, whatever the tape was of."""
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (2, 6))
    model = Attention()
    for _ in range(3):
        taped(model, ids)
    model.factor = 0.75
    changed = taped(model, ids)[0]
    assert same_table(changed, untaped(model, ids))
    for _ in range(3):
        taped(model, ids)
    model.out.weight = nn.Parameter(model.out.weight.detach().T.contiguous().T)
    turned = taped(model, ids)[0]
    assert same_table(turned, untaped(model, ids))
    factors = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    forget()
    for factor in factors:  # another number each time: no tape is recorded again and again
        model.factor = factor
        kept = taped(model, ids)[1]
    fourth = kept[0]
    model.factor = 7.0
    assert taped(model, ids)[1][0] is fourth


def test_one_tensor_twice_is_not_two_tensors(gpu: None) -> None:
    """Maps of equal shapes whose weights were one tensor when the calls were noted."""
    x, w = torch.rand(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    leaf = torch.rand(3, dtype=torch.float64, requires_grad=True)

    def mass(first: Tensor, second: Tensor) -> Table:
        return gt.trace((leaf * first * second).sum(), names={"x": leaf}).mass("operators")

    forget()
    for _ in range(3):
        mass(w, w)
    found = mass(w, x)
    forget()
    assert same_table(found, mass(w, x))


def test_a_tape_holds_no_tensor(gpu: None) -> None:
    torch.manual_seed(0)
    model, ids = Attention(), torch.randint(0, 11, (2, 6))
    forget()
    for _ in range(3):
        _, kept = taped(model, ids)
    (tape,) = kept
    assert tape is not None
    held = [each for call in tape.calls for each in (*call.args, *call.kwargs.values())]
    assert not any(isinstance(each, Tensor) for each in held)
    weight = ref(model.out.weight)
    del model
    assert weight() is None


def test_what_reads_elements_is_not_noted() -> None:
    """A pass that depends on elements, or on tensors from elsewhere, runs as it is."""
    elsewhere = torch.ones(2)
    passes: list[Callable[[Tensor], Tensor]] = [
        lambda x: x * 2 if x[0] > 1 else x * 3,
        lambda x: x * x.sum().item(),
        lambda x: x[x > 1],
        lambda x: x[x.nonzero()[:, 0]],
        lambda x: x * elsewhere,
        lambda x: x * x.unique().numel(),
    ]
    for run in passes:
        tapes = Tapes()
        for numbers in ([1.0, 2.0], [2.0, 1.0], [3.0, 3.0], [0.0, 0.0]):
            seed = torch.tensor(numbers)
            elsewhere = elsewhere + 1
            _, (found,) = tapes.run("", seed, [], lambda: (None, [run(seed)]))  # noqa: B023
            assert torch.equal(found, run(seed))
        assert tapes.kept[""].noted is None


def test_calls_without_use_are_left_out() -> None:
    def run(x: Tensor) -> Tensor:
        x.exp().sin()
        out = x.new_zeros(4)
        out.narrow(0, 1, 2).copy_(x.reshape(1, 2).reshape(2, 1).reshape(2))
        return torch.cat([out, *x.split(1)])

    tapes = Tapes()
    for numbers in ([1.0, 2.0], [2.0, 1.0], [3.0, 4.0]):
        seed = torch.tensor(numbers)
        _, (found,) = tapes.run("", seed, [], lambda: (None, [run(seed)]))  # noqa: B023
        assert torch.equal(found, run(seed))
    noted = tapes.kept[""].noted
    assert noted is not None
    names = [call.function.__name__ for call in noted[0].calls]
    assert names == ["new_zeros", "narrow", "as_strided", "copy_", "split", "cat"]


@pytest.mark.parametrize("name", some(ARCHITECTURES, 6))
def test_architectures(name: str, gpu: None) -> None:
    """The fourth loss of a model in training: as if it were the first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loss_of = ARCHITECTURES[name]()
        forget()
        for _ in range(4):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.125)
            torch.manual_seed(0)
            with gt.watch(model) as watch:
                loss = loss_of(model)
            trace = watch.trace(loss)
            found = trace.mass()
        forget()
        assert same_table(watch.trace(loss).mass(), found)


def test_views_in_a_row_are_one() -> None:
    """Of tensors that begin anywhere in their storage, and of results; not across copies."""

    def run(x: Tensor) -> list[Tensor]:
        turned = x.reshape(3, 2).mT.unsqueeze(0).expand(4, 2, 3)
        part = turned.narrow(1, 1, 1).transpose(0, 2).permute(1, 0, 2)
        total = turned.reshape(8, 3).view(2, 4, 3).transpose(0, 1) + 1
        return [turned * 2, part + 1, total.permute(2, 0, 1).reshape(3, 8).mT.reshape(-1)]

    tapes = Tapes()
    for start in (0, 5, 2):
        seed = torch.arange(20.0)[start : start + 6]
        _, found = tapes.run("", seed, [], lambda: (None, run(seed)))  # noqa: B023
        assert all(map(torch.equal, found, run(seed)))
    noted = tapes.kept[""].noted
    assert noted is not None
    names = [call.function.__name__ for call in noted[0].calls]
    assert " ".join(names).replace("reshape", "copy") == (
        "as_strided narrow as_strided copy as_strided add mul add permute copy __get__ copy"
    )


def test_a_reshape_that_copies_stays_a_copy() -> None:
    """What is then written to the original is not in it, and what is written to it is."""

    def run(x: Tensor) -> Tensor:
        base = x * 1
        copy = base.reshape(2, 2).mT.reshape(4)
        base.add_(1)
        copy.reshape(2, 2).reshape(4).mul_(3)
        return torch.cat([base, copy])

    tapes = Tapes()
    for first in (1.0, 5.0, 9.0):
        seed = torch.arange(first, first + 4)
        _, (found,) = tapes.run("", seed, [], lambda: (None, [run(seed)]))  # noqa: B023
        assert torch.equal(found, run(seed))
    assert tapes.kept[""].noted is not None
