"""Tensors that are not numbers in memory: written out where they can be, refused where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import against_bruteforce
import programs
import pytest
import torch
from bruteforce import ScalarGraph
from randomgraphs import Sample
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.testing._internal.two_tensor import TwoTensor

import gradtrace as gt
from gradtrace.errors import Unsupported
from gradtrace.linops import Contract, Dense, Scale
from gradtrace.pytorch.plain_tensors import plain

F = torch.func

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
"""Forward-mode AD of PyTorch's own uses it."""


def check_all(loss: Tensor, leaves: dict[str, Tensor]) -> None:
    """Every semiring, both rules, every path: against the list of all paths. Influence against
    ``trace.path``.
    """
    graph = ScalarGraph.of(loss, leaves)
    against_bruteforce.check(Sample(0, loss, leaves, [], graph, frozenset()))
    trace = gt.trace(loss, names=leaves)
    table = trace.influence("operators")
    through: dict[str, int] = {}
    for path in trace.paths(sample=10**9):
        for operator in set(path.operators):
            through[operator] = through.get(operator, 0) + 1
    assert {row.name: row.through for row in table if row.through} == through


# Zero tensors ------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def times(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda z: model(z).pow(2).sum() * z[0]


FORWARD: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "jvp": lambda m, x: F.jvp(lambda z: m(z) * z[0], (x,), (torch.ones_like(x),))[1],
    "jvp of a grad": lambda m, x: F.jvp(F.grad(times(m)), (x,), (torch.ones_like(x),))[1],
    "hessian": lambda m, x: F.hessian(lambda z: (z**3).sum() * z[0])(x),
    "hessian of a network": lambda m, x: F.hessian(lambda z: m(z).squeeze())(x),
    "jacfwd": lambda m, x: F.jacfwd(lambda z: m(z) * z)(x),
    "jacfwd of a jacrev": lambda m, x: F.jacfwd(F.jacrev(lambda z: m(z)[0] * z[1]))(x),
    "vmap of a jvp": lambda m, x: F.vmap(
        lambda v: F.jvp(lambda z: m(z) * z[1], (x,), (v,))[1], randomness="error"
    )(torch.eye(2, dtype=x.dtype)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_losses_made_of_forward_mode_derivatives(name: str) -> None:
    """They leave zero tensors in the graph, which have no memory."""
    model = net()
    x = torch.tensor([0.6, 0.2], dtype=torch.float64, requires_grad=True)
    leaves = {"x": x, **dict(model.named_parameters())}
    loss = FORWARD[name](model, x).pow(2).sum()
    wanted = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
    found = gt.backward(loss, names=leaves)
    for key, grad in zip(leaves, wanted):
        if grad is None:
            assert key not in found or not found[key].any()
        else:
            torch.testing.assert_close(found[key], grad)
    check_all(loss, {key: leaf for key, leaf in leaves.items() if key in found})


def test_a_gradient_that_is_a_zero_tensor_is_given_as_zeros() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch._efficientzerotensor(grad.shape, dtype=grad.dtype)

    x = torch.ones(3, requires_grad=True)
    loss = Nothing.apply(x).sum()
    found = gt.backward(loss, names={"x": x})["x"]
    assert not found._is_zerotensor() and found.tolist() == [0, 0, 0]
    assert gt.trace(loss, names={"x": x}).influence("operators") is not None


@pytest.mark.parametrize("kind", ["zero", "negated", "subclass"])
def test_maps_hold_numbers_in_memory(kind: str) -> None:
    class Named(Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("code of the user's is not run by maps")

    x = torch.randn(2, 3)
    weight = {
        "zero": lambda: torch._efficientzerotensor((2, 3)),
        "negated": lambda: torch.complex(x, x).conj().imag,
        "subclass": lambda: torch.Tensor._make_subclass(Named, x),
    }[kind]()
    wanted = {"zero": torch.zeros(2, 3), "negated": -x, "subclass": x}[kind]
    for held in (
        Scale(weight, (2, 3)).weight,
        Contract("mk,kn->mn", weight, (4, 2), (4, 3)).weight,
        Dense(weight, (3,), (2,)).matrix,
    ):
        assert type(held) is Tensor and not held.is_neg() and not held._is_zerotensor()
        assert torch.equal(held, wanted)
    assert plain(x) is x


# Wrappers ----------------------------------------------------------------------------------------


class Quantised(Tensor):
    """A weight that is kept in 8 bits and multiplied in 32, as libraries of quantisation do it."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: float) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.ids, made.scale = data, scale
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def whole(x: Any) -> Any:
            return x.ids.float() * x.scale if isinstance(x, Quantised) else x

        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return Quantised(func(args[0].ids), args[0].scale)
        return func(*map(whole, args), **(kwargs or {}))


def quantised() -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.randn(3, 4, requires_grad=True)
    weight = Quantised(torch.randint(-9, 9, (5, 4), dtype=torch.int8), 0.1)
    return torch.nn.functional.linear(x, weight).tanh().sum(), {"x": x}


def two() -> tuple[Tensor, dict[str, Tensor]]:
    x = TwoTensor(torch.randn(3, 2), torch.randn(3, 2)).requires_grad_()
    return (x @ torch.randn(2, 2)).tanh().sum(), {"x": x}


def two_frozen() -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.randn(3, 2, requires_grad=True)
    return (x * TwoTensor(torch.ones(3, 2), torch.ones(3, 2))).sum(), {"x": x}


def logging() -> tuple[Tensor, dict[str, Tensor]]:
    x = LoggingTensor(torch.randn(3)).requires_grad_()
    return (x * x).sum(), {"x": x}


def masked() -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.randn(4, requires_grad=True)
    kept = masked_tensor(x.detach(), torch.tensor([True, False, True, True]), requires_grad=True)
    return (kept * kept).sum(), {"x": x}


WRAPPED = {f.__name__: f for f in (quantised, two, two_frozen, logging, masked)}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:It is not recommended to create a MaskedTensor")
@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapper_subclasses_are_refused_clearly(kind: str) -> None:
    loss, leaves = WRAPPED[kind]()
    for ask in (
        lambda: gt.backward(loss, gt.semirings.MAX, names=leaves),
        lambda: gt.trace(loss, names=leaves),
        lambda: programs.program(loss, names=leaves),
    ):
        with pytest.raises(Unsupported, match=r"is a \w+ \(.*\): its elements are behind code"):
            ask()


def test_the_gradient_of_a_quantised_network_needs_no_elements() -> None:
    loss, leaves = quantised()
    (wanted,) = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    torch.testing.assert_close(gt.backward(loss, names=leaves)["x"], wanted)


def test_the_gradient_of_a_wrapped_leaf_is_wrapped_as_autograds_is() -> None:
    loss, leaves = two()
    found = gt.backward(loss, names=leaves)["x"]
    (wanted,) = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    assert isinstance(found, TwoTensor)
    torch.testing.assert_close(found.a, wanted.a)


def test_plain_subclasses_are_followed() -> None:
    class Named(Tensor):
        pass

    torch.manual_seed(0)
    w = torch.randn(2, 2, dtype=torch.float64).as_subclass(Named).requires_grad_()
    x = torch.randn(2, 2, dtype=torch.float64).as_subclass(Named)
    loss = (x @ w).tanh().mul(x).sum()
    assert type(loss) is Named
    check_all(loss, {"w": w})
