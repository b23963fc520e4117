"""Sparse constants, bags of embeddings and cumulated logarithms: structured, and of linear cost."""

from __future__ import annotations

from collections.abc import Callable

import programs
import pytest
import torch
from test_plain_tensors import check_all
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.linops import Dense

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

DENSE = [[1.0, 2, 0, 0], [0, 0, 0, 0], [0, -1, 3, 0.5]]


def constant(kind: str) -> Tensor:
    matrix = torch.tensor(DENSE, dtype=torch.float64)
    if kind == "uncoalesced":
        places = torch.tensor([[0, 2, 0, 2, 2, 0], [1, 1, 0, 2, 3, 1]])
        values = torch.tensor([5.0, -1, 1, 3, 0.5, -3], dtype=torch.float64)
        return torch.sparse_coo_tensor(places, values, (3, 4))
    return {
        "coo": matrix.to_sparse,
        "csr": matrix.to_sparse_csr,
        "csc": matrix.to_sparse_csc,
    }[kind]()


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sparse.mm": lambda a, x, b: torch.sparse.mm(a, x),
    "@": lambda a, x, b: a @ x,
    "spmm": lambda a, x, b: torch.spmm(a, x),
    "sparse.addmm": lambda a, x, b: torch.sparse.addmm(b, a, x),
    "sparse.addmm, weighed": lambda a, x, b: torch.sparse.addmm(b, a, x, beta=0.5, alpha=2.0),
    "addmm": lambda a, x, b: torch.addmm(b, a, x),
    "addmm, weighed": lambda a, x, b: torch.addmm(b, a, x, beta=0.5, alpha=2.0),
    "mv": lambda a, x, b: torch.mv(a, x[:, 0]),
    "turned": lambda a, x, b: a.t() @ b,
    "on the right": lambda a, x, b: b.t() @ a,
    "linear": lambda a, x, b: nn.functional.linear(x.t(), a),
}


@pytest.mark.parametrize("kind", ["coo", "uncoalesced", "csr", "csc"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_sparse_constant(name: str, kind: str) -> None:
    torch.manual_seed(0)
    a = constant(kind)
    leaves = {
        "x": torch.randn(4, 2, dtype=torch.float64, requires_grad=True),
        "b": torch.randn(3, 2, dtype=torch.float64, requires_grad=True),
    }
    try:
        loss = PRODUCTS[name](a, leaves["x"], leaves["b"]).tanh().pow(2).sum()
    except (RuntimeError, NotImplementedError):
        pytest.skip("PyTorch has no such product")
    used = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
    check_all(loss, {n: leaf for (n, leaf), g in zip(leaves.items(), used) if g is not None})


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_reduced_products(reduce: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    loss = torch.sparse.mm(constant("csr"), x, reduce).tanh().sum()
    (wanted,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(gt.trace(loss, names={"x": x}).gradients["x"], wanted)
    check_all(loss, {"x": x})


def test_batches_of_sparse_matrices() -> None:
    torch.manual_seed(0)
    a = torch.stack([torch.tensor(DENSE).double(), torch.tensor(DENSE).double() + 1]).to_sparse()
    x = torch.randn(2, 4, 2, dtype=torch.float64, requires_grad=True)
    check_all(torch.bmm(a, x).tanh().sum(), {"x": x})


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_a_graph_network(kind: str) -> None:
    torch.manual_seed(0)
    near = torch.tensor([[1.0, 1, 0], [1, 1, 1], [0, 1, 1]], dtype=torch.float64)
    near = near.to_sparse() if kind == "coo" else near.to_sparse_csr()
    x = torch.randn(3, 2, dtype=torch.float64)
    leaves = {f"w{n}": nn.Parameter(torch.randn(2, 2, dtype=torch.float64)) for n in range(2)}
    hidden = torch.sparse.mm(near, x @ leaves["w0"]).tanh()
    check_all(torch.sparse.mm(near, hidden @ leaves["w1"]).tanh().sum(), leaves)


def program_is_small(loss: Tensor, most: int) -> None:
    """No matrix is written out, and no step has more elements than that."""
    program = programs.program(loss, dense_limit=0)
    for map_ in program.maps:
        assert not isinstance(map_, Dense)
        assert max(map_.inputs, map_.outputs) <= most


def test_the_cost_is_that_of_the_entries() -> None:
    n, entries = 20_000, 60_000
    places = torch.randint(n, (2, entries), generator=torch.Generator().manual_seed(0))
    a = torch.sparse_coo_tensor(places, torch.ones(entries), (n, n))
    x = torch.randn(n, 2, requires_grad=True)
    loss = torch.sparse.mm(a, x).sum()
    program_is_small(loss, 2 * entries)
    (wanted,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(gt.backward(loss, names={"x": x})["x"], wanted)
    assert gt.trace(loss, names={"x": x}).influence("operators")


@pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="PyTorch multiplies blocks by MKL alone"
)
def test_blocks_that_pytorch_cannot_derive_are_refused() -> None:
    a = torch.eye(4).to_sparse_bsr((2, 2))
    x = torch.randn(4, 2, requires_grad=True)
    with pytest.raises(GradtraceError, match=r"Bs[cr]"):
        gt.backward(torch.sparse.mm(a, x).sum(), names={"x": x})


# Bags --------------------------------------------------------------------------------------------

BAGS: dict[str, dict[str, object]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "sum, padded": {"mode": "sum", "padding_idx": 2},
    "mean, padded": {"mode": "mean", "padding_idx": 2},
    "max, padded": {"mode": "max", "padding_idx": 2},
    "by frequency": {"mode": "sum", "scale_grad_by_freq": True},
    "last offset": {"mode": "mean", "include_last_offset": True},
}


@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize("how", ["offsets", "matrix", "weights"])
def test_bags_of_embeddings(name: str, how: str) -> None:
    torch.manual_seed(0)
    options = BAGS[name]
    layer = nn.EmbeddingBag(5, 2, dtype=torch.float64, **options)  # type: ignore[arg-type]
    leaves: dict[str, Tensor] = {"table": layer.weight}
    words = torch.tensor([1, 2, 2, 4, 1, 0])
    if how == "matrix":
        if "include_last_offset" in options:
            pytest.skip("there are no offsets")
        out = layer(words.reshape(3, 2))
    else:
        weights = None
        if how == "weights":
            if options["mode"] != "sum" or "scale_grad_by_freq" in options:
                pytest.skip("PyTorch weighs samples of sums alone")
            leaves["weights"] = weights = torch.rand(6, dtype=torch.float64, requires_grad=True)
        last = [6] if "include_last_offset" in options else []
        out = layer(words, torch.tensor([0, 3, 3, *last]), per_sample_weights=weights)
    check_all(out.tanh().pow(2).sum(), leaves)


def test_a_large_bag_is_no_matrix() -> None:
    layer = nn.EmbeddingBag(50_000, 8, mode="mean")
    words = torch.randint(50_000, (64, 20), generator=torch.Generator().manual_seed(0))
    loss = layer(words).square().sum()
    program_is_small(loss, 400_000)
    found = gt.trace(loss, names={"w": layer.weight}).influence("operators")
    assert "EmbeddingBagBackward0" in str(found)


# Cumulated logarithms ----------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_logcumsumexp(dim: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    check_all(torch.logcumsumexp(x, dim).tanh().sum(), {"x": x})


def test_logcumsumexp_of_numbers_far_apart() -> None:
    """Where one factor would be infinite and the other 0."""
    x = torch.tensor([[-900.0, 3, 800, 801], [0, 1, 2, 3]], dtype=torch.float64, requires_grad=True)
    loss = (torch.logcumsumexp(x, 1) * torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)).sum()
    (wanted,) = torch.autograd.grad(loss, x, retain_graph=True)
    found = gt.trace(loss, names={"x": x})
    torch.testing.assert_close(found.gradients["x"], wanted)
    value = gt.backward(loss, gt.semirings.ABS, names={"x": x})["x"]
    torch.testing.assert_close(value, wanted)  # all derivatives are positive


def test_a_long_logcumsumexp_is_no_matrix() -> None:
    x = torch.randn(8, 5000, requires_grad=True)
    program_is_small(torch.logcumsumexp(x, 1).sum(), 40_000)
