"""Models of which each rank holds a part, in a group of one process: what cannot be traced is
refused, and left as it was. ``test_process_group`` has those that are gathered, on two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, Unsupported
from gradtrace.training import unwrap

dist = torch.distributed
pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
    ),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]

FLAT = (
    "the model is wrapped in FullyShardedDataParallel, whose parameters are slices of one flat "
    "tensor: shard it with torch.distributed.fsdp.fully_shard, or load its full state dict into a "
    "plain module and trace that"
)


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def flat(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def parted(model: nn.Sequential) -> nn.Sequential:
    """As tensor parallelism leaves it: the rows of a weight lie on different ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    for layer in (model[0], model[2]):
        for name, parameter in list(layer.named_parameters()):
            place = Shard(0) if name == "weight" else Replicate()
            whole = distribute_tensor(parameter.detach(), mesh, [place])
            setattr(layer, name, nn.Parameter(whole))
    return model


def losses(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().sum(1)
    return found


def watched(model: nn.Module) -> object:
    with gt.watch(model):
        raise AssertionError("it should have been refused before")


def measured(model: nn.Module) -> object:
    return gt.influence(model, losses, [torch.ones(2, 3)])


def monitored(model: nn.Module) -> object:
    with gt.Monitor(model, every=1) as monitor:
        monitor.step(losses(model, torch.ones(2, 3)).sum())
    return None


def entered(model: nn.Module) -> object:
    with unwrap.apart(model):
        raise AssertionError("it should have been refused before")


def told(act: Callable[[nn.Module], object], model: nn.Module) -> str:
    with pytest.raises(GradtraceError) as error:
        act(model)
    return str(error.value)


@pytest.mark.parametrize("act", [watched, measured, monitored, entered])
@pytest.mark.parametrize("options", [{}, {"use_orig_params": True}], ids=["one", "several"])
@pytest.mark.parametrize("inside", [False, True])
def test_flat_parameters_are_refused(
    act: Callable[[nn.Module], object], options: dict[str, Any], inside: bool
) -> None:
    model: nn.Module = flat(plain(), **options)
    x = torch.ones(2, 3)
    if inside:
        model = nn.Sequential(model, nn.Linear(2, 2))
    before = losses(model, x).tolist()
    assert told(act, model) == FLAT
    assert losses(model, x).tolist() == before
    assert all(p.grad is None for p in model.parameters())


def test_parameters_that_are_parts_are_traced() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    tables = []
    for model in (plain(), parted(plain())):
        x: Any = torch.ones(2, 3)
        if hasattr(model[0].weight, "device_mesh"):
            x = distribute_tensor(x, model[0].weight.device_mesh, [Replicate()])
        with gt.watch(model) as watch:
            out: Any = model(x)
            loss = (out.full_tensor() if hasattr(out, "full_tensor") else out).sum()
        trace = watch.trace(loss)
        tables.append(trace.influence().to_dict()["rows"])
        assert set(trace.gradients) == {name for name, _ in model.named_parameters()}
    assert tables[0] == tables[1]


def test_what_a_refusal_says_to_do_works() -> None:
    """The full state dict, in a plain module, is traced as the model it came from."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole = StateDictOptions(full_state_dict=True)
    x = torch.ones(2, 3)
    wanted = gt.influence(plain(), losses, [x], per_sample=True).to_dict()
    sharded = flat(plain(), use_orig_params=True)
    with pytest.raises(Unsupported):
        measured(sharded)
    for model in (sharded, parted(plain())):
        copy = plain()
        with torch.no_grad():
            for parameter in copy.parameters():
                parameter.zero_()
        copy.load_state_dict(get_model_state_dict(model, options=whole))
        assert gt.influence(copy, losses, [x], per_sample=True).to_dict() == wanted
