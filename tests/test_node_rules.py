"""Nodes that need not be watched: every row gives what watching its formula gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
import torchgen
from agreement import assert_agree
from backends import CPU
from scalar_pairs import block_edges
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradtrace
from gradtrace.autodiff import nodes
from gradtrace.autodiff.backward import RECENT
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import NameTable
from gradtrace.autodiff.nodes import is_number
from gradtrace.errors import GradtraceError, Unsupported
from gradtrace.ir import interpreter
from gradtrace.recording import gradients, node_rules, record
from gradtrace.recording.formula import FormulaRecorder
from gradtrace.recording.node_rules import MULTI_OUTPUT_RULES, NODES, summed
from gradtrace.recording.node_rules.table import _CALLS
from gradtrace.semirings import COUNT, MAX

a = torch.linspace(0.2, 1.7, 12, dtype=torch.float64).reshape(3, 4)
b = torch.linspace(-1.0, 0.9, 20, dtype=torch.float64).reshape(4, 5)
near = torch.where(a > 1, a, 0).to_sparse()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # compressed rows are new to PyTorch
    rows = near.to_sparse_csr()
bias = torch.linspace(-0.5, 0.5, 5, dtype=torch.float64)
batch = torch.linspace(-1.0, 2.0, 24, dtype=torch.float64).reshape(2, 3, 4)

image = torch.linspace(-1.0, 1.0, 2 * 4 * 5 * 5, dtype=torch.float64).sin().reshape(2, 4, 5, 5)
kernel = torch.linspace(0.3, -0.4, 6 * 2 * 3 * 3, dtype=torch.float64).reshape(6, 2, 3, 3)
gain = torch.linspace(0.5, 1.5, 4, dtype=torch.float64)
scores = torch.linspace(-2.0, 1.0, 12, dtype=torch.float64).cos().reshape(3, 4)

words = torch.tensor([[0, 2, 2], [1, 0, 2]])
classes = torch.tensor([3, -100, 0])
empty = torch.zeros(0, dtype=torch.float64)
aten = torch.ops.aten


def dropped(x: Tensor) -> Tensor:
    """Always the same half of the elements, so that the loss can be computed again."""
    torch.manual_seed(3)
    return torch.native_dropout(x, 0.5, True)[0]


BY_PRODUCT = "use_mm_for_euclid_dist"

CASES: dict[str, list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]] = {
    "T": [(torch.t, (a,))],
    "Transpose": [(lambda x: x.transpose(0, 2), (batch,)), (lambda x: x.transpose(-1, -2), (a,))],
    "Permute": [(lambda x: x.permute(2, 0, 1), (batch,))],
    "View": [(lambda x: x.view(2, 6), (a,)), (lambda x: x.view(-1), (a,))],
    "UnsafeView": [(lambda x: torch.ops.aten._unsafe_view(x, [6, 2]), (a,))],
    "ReshapeAlias": [(lambda x: torch.ops.aten._reshape_alias(x, [12], [1]), (a,))],
    "Unsqueeze": [(lambda x: x.unsqueeze(1), (a,))],
    "Clone": [(torch.clone, (a,)), (lambda x: x.t().clone(), (a,))],
    "Tanh": [(torch.tanh, (a,)), (torch.tanh, (torch.tensor(0.3, dtype=torch.float64),))],
    "Sigmoid": [(torch.sigmoid, (a,))],
    "Gelu": [(F.gelu, (a,))],
    "Silu": [(F.silu, (a,))],
    "Exp": [(torch.exp, (a,))],
    "Pow": [
        (lambda x: x**3, (a,)),
        (lambda x: x**0, (a,)),
        (lambda x: x**-0.5, (a,)),
        (lambda x: x**True, (a,)),
        (lambda x: x.mT.float() ** 2, (a,)),
    ],
    "Sqrt": [(torch.sqrt, (a,))],
    "Rsqrt": [(torch.rsqrt, (a,))],
    "Sin": [(torch.sin, (a,))],
    "Cos": [(torch.cos, (a,))],
    "Neg": [(torch.neg, (a,))],
    "Log": [(torch.log, (a,))],
    "Alias": [(aten.alias, (a,))],
    "Slice": [(lambda x: x[1:3], (a,)), (lambda x: x[..., ::2], (batch,)), (lambda x: x[5:], (a,))],
    "Select": [(lambda x: x[:, -1], (a,)), (lambda x: x[0], (bias,))],
    "Squeeze": [
        (lambda x: x.unsqueeze(0).squeeze(), (a,)),
        (lambda x: x.unsqueeze(-1).squeeze(-1), (a,)),
        (lambda x: x[None, :, None].squeeze((0, 2)), (a,)),
    ],
    "ToCopy": [(lambda x: x.float().double(), (a,)), (lambda x: x.to(torch.bfloat16), (a,))],
    "Cat": [
        (lambda x, y: torch.cat([x, y.mT, x], -1), (a, b[:, :3])),
        (lambda x: torch.cat([x, a]), (a,)),
        (lambda x, y: torch.cat([x, y]), (bias, empty)),
        (lambda x: torch.cat([empty, x], -1), (a,)),
        (lambda x, y: torch.cat([x.float(), y]), (a, a)),
    ],
    "Stack": [
        (lambda x, y: torch.stack([x, y, x], -1), (a, a + 1)),
        (lambda x: torch.stack([x, a]), (a,)),
        (lambda x: torch.stack([x[0, 0], x[1, 1]]), (a,)),
    ],
    "Split": [
        (lambda x: x.split(3, -1)[1] * x.split(3, -1)[0][:, :1], (a,)),
        (lambda x: sum(part.sum() for part in x.chunk(3, 1)), (a,)),
    ],
    "SplitWithSizes": [(lambda x: sum(p.pow(2).sum() for p in x.split([1, 0, 3], -1)), (a,))],
    "UnsafeSplit": [(lambda x: torch.unsafe_split(x, 2, 1)[0] * x.unsafe_chunk(2, 1)[1], (a,))],
    "Unbind": [(lambda x: x.unbind(-2)[2] - x.unbind(-2)[0], (a,)), (lambda x: [*x][1], (batch,))],
    "Expand": [
        (lambda x: x.expand(2, 3, 4), (a,)),
        (lambda x: x.expand(3, 4), (a,)),
        (lambda x: x.expand(3, 4), (a[:1],)),
        (lambda x: x.expand(2, 2), (torch.tensor(0.7, dtype=torch.float64),)),
    ],
    "Sum": [
        (torch.sum, (a,)),
        (lambda x: x.sum(-1), (batch,)),
        (lambda x: x.sum((0, -1), keepdim=True), (batch,)),
        (lambda x: x.float().sum(1, dtype=torch.float64), (batch,)),
        (torch.sum, (torch.tensor(2.0, dtype=torch.float64),)),
    ],
    "Mean": [
        (torch.mean, (a,)),
        (lambda x: x.mean((-1, 0)), (batch,)),
        (lambda x: x.mean(1, keepdim=True), (batch,)),
    ],
    "NativeDropout": [(dropped, (a,))],
    "Add": [
        (torch.add, (a, a + 1)),
        (torch.add, (batch, a[0])),
        (torch.add, (a[:, :1], a[:1])),
        (lambda x, y: torch.add(x, y, alpha=0.3), (a, a)),
        (lambda x: x + 3, (a,)),
        (lambda x, y: x + y.float(), (a, a)),
        (lambda x: x + x, (a,)),
        (lambda x, y: x + y, (a[:1], a[:, :1].reshape(1, 3, 1))),
    ],
    "Sub": [
        (torch.sub, (a, a[0])),
        (lambda x, y: torch.sub(x, y, alpha=2), (a, a)),
        (lambda x: a - x, (a,)),
    ],
    "Mul": [
        (torch.mul, (a, a[:1] + 1)),
        (lambda x: x * x, (a,)),
        (lambda x: 0.1 * x, (a,)),
        (lambda x: x * 3, (a,)),
        (lambda x: x * torch.tensor(0.1, dtype=torch.float64), (a,)),
        (lambda x: x * (a > 1), (a,)),
        (lambda x: aten.mul.Scalar(x, 0.1), (a,)),
        (lambda x, y: x * y.bfloat16(), (a.float(), a.float())),
        (lambda x: x.float() * 0.1, (a,)),
        (torch.mul, (torch.tensor(2.0, dtype=torch.float64), a)),
    ],
    "Div": [
        (lambda x: x / 3, (a,)),
        (lambda x: x.float() / 0.3, (a,)),
        (lambda x: x / (a[0] + 1), (a[:, :1],)),
        (torch.div, (a, a + 1)),
        (lambda x: x / torch.tensor(3), (a,)),
    ],
    "Relu": [(lambda x: torch.relu(x - 1), (a,)), (lambda x: F.relu(x - 1).float(), (a,))],
    "Softmax": [(lambda x: x.softmax(-1), (scores,)), (lambda x: x.softmax(0), (scores[0, 0],))],
    "SafeSoftmax": [(lambda x: aten._safe_softmax(x, -1), (scores,))],
    "LogSoftmax": [
        (lambda x: x.log_softmax(0), (scores,)),
        (lambda x: x.log_softmax(-1), (scores.float(),)),
    ],
    "NativeLayerNorm": [
        (lambda x, w, c: F.layer_norm(x, (4,), w, c), (scores, gain, gain + 1)),
        (lambda x: F.layer_norm(x, (3, 4)), (scores,)),
        (lambda w: F.layer_norm(scores, (4,), w), (gain,)),
        (lambda x, w: F.layer_norm(x, (4,), w), (scores.float(), gain.float())),
    ],
    "NativeBatchNorm": [
        (lambda x, w, c: F.batch_norm(x, None, None, w, c, True), (image, gain, gain)),
        (lambda x, w: F.batch_norm(x, gain, gain + 1, w), (image, gain)),
    ],
    "Convolution": [
        (lambda x, w: F.conv2d(x, w, padding=1, stride=2, groups=2), (image, kernel)),
        (
            lambda x, w, c: F.conv1d(x, w, c),
            (batch, kernel[:, :1, 0].expand(6, 3, 3), gain[[0] * 6]),
        ),
        (lambda w: F.conv_transpose2d(image, w, groups=2), (kernel[:4],)),
    ],
    "MaxPool2DWithIndices": [
        (lambda x: F.max_pool2d(x, 2), (image,)),
        (lambda x: F.max_pool2d(x, 3, 2, padding=1, ceil_mode=True), (image,)),
    ],
    "NllLoss": [
        (lambda x: F.nll_loss(x, classes), (scores,)),
        (lambda x: F.nll_loss(x, classes, gain, reduction="none"), (scores,)),
        (lambda x: F.nll_loss(x[0], classes[0], ignore_index=2, reduction="sum"), (scores,)),
    ],
    "NllLoss2D": [(lambda x: F.nll_loss(x, (image[:, 0] > 0).long()), (image,))],
    "MseLoss": [
        (lambda x: F.mse_loss(x, scores), (a,)),
        (lambda x: F.mse_loss(x, scores, reduction="none"), (a.float(),)),
        (lambda x, y: F.mse_loss(x, y, reduction="sum"), (a, scores)),
    ],
    "SmoothL1Loss": [(lambda x: F.smooth_l1_loss(x, scores, beta=0.7), (a,))],
    "HuberLoss": [(lambda x: F.huber_loss(x, scores, delta=0.7), (a,))],
    "BinaryCrossEntropy": [
        (lambda x: F.binary_cross_entropy(x / 2, (scores > 0).double()), (a,)),
        (lambda x: F.binary_cross_entropy(x / 2, scores.abs() / 2, a, reduction="sum"), (a,)),
    ],
    "BinaryCrossEntropyWithLogits": [
        (lambda x: F.binary_cross_entropy_with_logits(x, (scores > 0).double()), (a,)),
        (
            lambda x: F.binary_cross_entropy_with_logits(
                x, scores.abs() / 2, a, pos_weight=gain, reduction="none"
            ),
            (a,),
        ),
        (F.binary_cross_entropy_with_logits, (a, scores.abs() / 2)),
    ],
    "Logsumexp": [
        (lambda x: x.logsumexp(-1), (scores,)),
        (lambda x: x.logsumexp((0, 2), keepdim=True), (batch,)),
    ],
    "LinalgVectorNorm": [
        (lambda x: torch.linalg.vector_norm(x - 1), (scores,)),
        (lambda x: torch.linalg.vector_norm(x, 3, (0, -1)), (batch,)),
        (lambda x: torch.linalg.vector_norm(torch.view_as_complex(x.reshape(3, 2, 2))), (scores,)),
    ],
    "Cumsum": [
        (lambda x: x.cumsum(-1), (a,)),
        (lambda x: x.float().cumsum(0, dtype=torch.double), (a,)),
    ],
    "Log1P": [(torch.log1p, (a,))],
    "Reciprocal": [(torch.reciprocal, (a,))],
    "Erf": [(torch.erf, (a,))],
    "Abs": [
        (torch.abs, (scores,)),
        (lambda x: torch.view_as_complex(x.reshape(3, 2, 2)).abs(), (scores,)),
    ],
    "Where": [
        (lambda x, y: torch.where(a > 1, x, y), (a, scores)),
        (lambda x: torch.where(a > 1, x, 0.0), (a[:1],)),
        (lambda x: torch.where(a[:1] > 1, 2.0, x), (a,)),
    ],
    "MaskedFill": [
        (lambda x: x.masked_fill(scores > 0, -1.0), (a,)),
        (lambda x: x.masked_fill(scores[:, :1] > 0, -1.0), (batch,)),
        (lambda x, y: x.masked_fill(scores > 0, y), (a, gain[0])),
    ],
    "Clamp": [(lambda x: x.clamp(0.5, 1.2), (a,)), (lambda x: x.clamp(max=1.2), (a,))],
    "ClampMin": [(lambda x: x.clamp_min(0.5), (a,))],
    "ClampMax": [(lambda x: x.clamp_max(0.5), (a,))],
    "Index": [
        (lambda x: x[words], (a,)),
        (lambda x: x[:, words[0]], (batch,)),
        (lambda x: x[words[0], words[1]], (a,)),
        (lambda x: x[a > 1], (a,)),
    ],
    "Gather": [
        (lambda x: x.gather(1, words[:, :2]), (a,)),
        (lambda x: x.gather(-1, torch.tensor([1, 1])), (bias,)),
    ],
    "AvgPool2D": [
        (lambda x: F.avg_pool2d(x, 2), (image,)),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), (image,)),
    ],
    "AdaptiveAvgPool2D": [(lambda x: F.adaptive_avg_pool2d(x, (2, 3)), (image,))],
    "UpsampleNearest2D": [(lambda x: F.interpolate(x, scale_factor=2), (image,))],
    "UpsampleBilinear2D": [
        (lambda x: F.interpolate(x, (7, 6), mode="bilinear", align_corners=True), (image,)),
    ],
    "LeakyRelu": [(lambda x, s=s: F.leaky_relu(x, s), (scores,)) for s in (0.3, -1)],
    "Elu": [(F.elu, (scores,)), (F.selu, (scores,))],
    "Hardtanh": [
        (F.hardtanh, (a,)),
        (lambda x: F.hardtanh(x, -1, 1), (a,)),
        (lambda x: F.relu6(x * 4, inplace=True), (a,)),
    ],
    "Hardswish": [(F.hardswish, (4 * scores,))],
    "Hardsigmoid": [(F.hardsigmoid, (4 * scores,))],
    "Softplus": [(F.softplus, (scores,))],
    "LogSigmoid": [(F.logsigmoid, (scores,))],
    "Mm": [(torch.mm, (a, b)), (lambda x: torch.mm(x, b), (a,)), (lambda w: torch.mm(a, w), (b,))],
    "Bmm": [(lambda x, y: torch.bmm(x, y.mT), (batch, batch + 1))],
    "Mv": [(lambda x: torch.mv(a, x), (b[:, 0],)), (lambda x: torch.mv(near, x), (b[:, 0],))],
    "SparseAddmm": [
        (lambda x: torch.sparse.mm(near, x), (b,)),
        (lambda x: torch.sparse.mm(rows, x), (b,)),
        (lambda c, x: torch.sparse.addmm(c, near, x), (b[:3], b)),
    ],
    "SparseMmReduceImpl": [(lambda x: torch.sparse.mm(rows, x, "amax"), (b,))],
    "Logcumsumexp": [(lambda x: x.logcumsumexp(0), (a,)), (lambda x: x.logcumsumexp(1), (a,))],
    "EuclideanDist": [
        (lambda x, y: torch.cdist(x, y, compute_mode=BY_PRODUCT), (batch, batch + 1)),
        (lambda x, y: torch.cdist(x, y, compute_mode=BY_PRODUCT), (batch[0], batch[1, :2])),
    ],
    "Embedding": [
        (lambda w: F.embedding(words, w), (b,)),
        (lambda w: F.embedding(words, w, padding_idx=2), (b,)),
        (lambda w: F.embedding(words, w, scale_grad_by_freq=True), (b,)),
        (lambda w: F.embedding(words[0, 0], w), (b,)),
    ],
    "Addmm": [
        (torch.addmm, (bias, a, b)),
        (lambda c, x: torch.addmm(c, x, b), (torch.ones(3, 5, dtype=torch.float64), a)),
        (lambda c, w: torch.addmm(c, a, w), (torch.ones(1, 5, dtype=torch.float64), b)),
        (lambda c, x, w: torch.addmm(c, x, w, beta=2, alpha=0.5), (bias, a, b)),
        (lambda w: torch.addmm(bias, a, w), (b,)),
    ],
}
ROWS = [(name, n) for name, cases in CASES.items() for n in range(len(cases))]

LATELY = {("MseLoss", 1)}  # of two dtypes: torch 2.11 refuses
"""What older versions of torch cannot differentiate themselves."""


def loss_of(name: str, n: int) -> tuple[Tensor, list[Tensor]]:
    f, inputs = CASES[name][n]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)
    loss = (out * weights).sum()
    differentiated(name, n, loss, leaves)
    return loss, leaves


def differentiated(
    name: str, n: int, out: Tensor, leaves: list[Tensor], cotangent: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The gradients by PyTorch; a case that it refuses to differentiate is skipped."""
    try:
        return torch.autograd.grad(out, leaves, cotangent, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if (name, n) not in LATELY:
            raise
        pytest.skip(f"this torch does not differentiate it: {error}")


GIVEN_UP = {
    ("Add", 3): {"AddBackward0"},  # alpha
    ("Sub", 1): {"SubBackward0"},
    ("Addmm", 3): {"AddmmBackward0"},
    ("MseLoss", 2): {"MseLossBackward0"},  # to the target too
    ("BinaryCrossEntropyWithLogits", 2): {"BinaryCrossEntropyWithLogitsBackward0"},
    ("Cumsum", 1): {"CumsumBackward0"},  # to another dtype
    ("MaskedFill", 2): {"MaskedFillBackward1"},
    ("Abs", 1): {"AbsBackward0", "ViewAsComplexBackward0"},  # of complex numbers
    ("LinalgVectorNorm", 2): {"LinalgVectorNormBackward0", "ViewAsComplexBackward0"},
}
"""What rows leave to those who look inside."""


def followed(loss: Tensor, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The nodes that are looked into."""
    seen: set[str] = set()
    follow = FormulaRecorder.follow

    def watched(self: FormulaRecorder, node: Any, *args: Any) -> Any:
        seen.add(node.name())
        return follow(self, node, *args)

    with monkeypatch.context() as patch:
        patch.setattr(FormulaRecorder, "follow", watched)
        programs.program(loss)
    return seen


def test_every_row_has_a_case() -> None:
    kinds = {
        kind.rstrip("0123456789").removesuffix("Backward") for kind in (*NODES, *MULTI_OUTPUT_RULES)
    }
    assert kinds == set(CASES)


@pytest.fixture(params=[1, 1 << 40], ids=["later", "at once"], autouse=True)
def _large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradients of all leaves put off, and of none."""
    monkeypatch.setattr(gradients, "DEFER_MIN_ELEMENTS", request.param)


@pytest.fixture(autouse=True)
def _no_hooks() -> None:
    """Hooks that were registered before a test do not concern the graph that it makes: else all of
    its nodes would be looked into, in case a hook stands on them.
    """
    RECENT.refresh()


@pytest.mark.parametrize(("name", "n"), ROWS)
def test_a_row_gives_what_its_formula_gives(
    name: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, leaves = loss_of(name, n)
    kinds = {operator.name for operator in gradtrace.graph(loss)}
    assert any(kind.startswith(f"{name}Backward") for kind in kinds)
    wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
    short = programs.program(loss)
    assert followed(loss, monkeypatch) <= GIVEN_UP.get((name, n), set())
    monkeypatch.setattr(node_rules, "NODES", {})
    monkeypatch.setattr(node_rules, "MULTI_OUTPUT_RULES", {})
    watched = programs.program(loss)
    assert_agree(interpreter.run(short, gradtrace.semirings.SUM), leaves, wanted)
    assert_agree({leaf.tensor: leaf.compute() for leaf in short.leaves}, leaves, wanted)
    assert_agree(interpreter.run(watched, gradtrace.semirings.SUM), leaves, wanted)
    for one, other in zip(short.blocks, watched.blocks, strict=True):
        assert (one.operator, one.note, one.opened) == (other.operator, other.note, other.opened)
        assert set(one.gives) >= set(other.gives)  # of an empty tensor: no elements, or nothing
        if (name, n) == ("Pow", 1) and one.operator.startswith("Pow"):  # x**0: weights 0, or none
            assert not block_edges(other, watched.maps, CPU)
        elif set(one.gives) == set(other.gives):
            assert block_edges(one, short.maps, CPU) == block_edges(other, watched.maps, CPU)
    for found, rounded in (
        (lambda p: interpreter.run(p, MAX), ROUNDED),
        (lambda p: interpreter.run(p, COUNT), ROUNDED),
        (lambda p: {leaf.tensor: leaf.compute() for leaf in p.leaves}, ROUNDED | PRODUCTS),
    ):
        one, other = found(short), found(watched)
        same = torch.testing.assert_close if name in rounded else assert_equal
        for leaf, value in other.items():
            same(one[leaf], value)


ROUNDED = {"Gelu", "Sigmoid", "Silu", "Sqrt", "Log", "Log1P", "EuclideanDist", "Logcumsumexp"}
ROUNDED |= {"LinalgVectorNorm", "BinaryCrossEntropyWithLogits"}
"""What the node makes of ones, times the cotangent, may differ from what it makes of that by
rounding."""

PRODUCTS = {"Mm", "Mv", "Addmm", "Bmm", "Convolution", "SparseAddmm"}
"""Gradients that are sums of products: BLAS adds them up in an order that depends on the layout of
the operands and on the processor, so only rounding is promised."""


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    """Bit for bit."""
    assert found.dtype is wanted.dtype
    assert torch.equal(found, wanted)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda w: w.new_ones(()).expand(w.shape),
    "turned": lambda w: w.movedim(0, -1).contiguous().movedim(-1, 0) if w.dim() else w,
    "spread": lambda w: torch.stack([w, w + 1], -1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "n"), ROWS)
def test_cotangents_may_lie_in_memory_as_they_like(
    name: str, n: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, inputs = CASES[name][n]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)
    cotangent = LAYOUTS[layout](weights)
    wanted = differentiated(name, n, out, leaves, cotangent)
    watch = HookWatch()
    watch._sequence = 0  # there are no hooks here
    found = [
        {
            leaf.tensor: leaf.compute()
            for leaf in record.record(out, cotangent, NameTable(), watch).leaves
        }
    ]
    monkeypatch.setattr(node_rules, "NODES", {})
    monkeypatch.setattr(node_rules, "MULTI_OUTPUT_RULES", {})
    program = record.record(out, cotangent, NameTable(), watch)
    found.append({leaf.tensor: leaf.compute() for leaf in program.leaves})
    assert_agree(found[0], leaves, wanted)
    same = torch.testing.assert_close if name in ROUNDED | PRODUCTS else assert_equal
    for leaf, value in found[1].items():
        same(found[0][leaf], value)


@pytest.mark.parametrize(("name", "n"), ROWS)
def test_a_row_asks_for_each_saved_value_once(name: str, n: int) -> None:
    f, inputs = CASES[name][n]
    leaves = [x.clone().requires_grad_() for x in inputs]
    loss = checkpoint(f, *leaves, use_reentrant=False).sum()
    wanted = differentiated(name, n, loss, leaves)
    assert_agree(interpreter.run(programs.program(loss), gradtrace.semirings.SUM), leaves, wanted)


@pytest.mark.parametrize("wanted", [(4,), (1, 4), (3, 1), (1, 1), (1,), (), (3, 4), (2, 3, 4)])
def test_undoing_of_broadcasting(wanted: tuple[int, ...]) -> None:
    shape = (2, 3, 4)
    torch.manual_seed(0)
    y = torch.rand(shape, dtype=torch.float64)
    z = y
    for step in summed(shape, wanted):
        z = step.apply(z)
    torch.testing.assert_close(z, y.sum_to_size(wanted))


@pytest.mark.parametrize("layout", ["as it is", "turned", "expanded"])
@pytest.mark.parametrize("wanted", [(4,), (1, 4), (3, 1), (1, 1), (1,), (), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broadcasting_is_undone_bit_for_bit(
    wanted: tuple[int, ...], layout: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    y = torch.randn(2, 3, 4).to(dtype)
    if layout == "turned":
        y = y.movedim(0, -1).contiguous().movedim(-1, 0)
    elif layout == "expanded":
        y = y[:1].expand(2, 3, 4)
    assert_equal(nodes.conform(y, torch.empty(wanted, dtype=dtype)), y.sum_to_size(wanted))


def test_a_gradient_that_does_not_fit_is_refused() -> None:
    with pytest.raises(GradtraceError, match="gave a gradient of shape"):
        nodes.conform(torch.ones(2, 3, 4), torch.empty(3, 5))


def test_nodes_that_are_alike_share_their_maps() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    loss = x
    for _ in range(2):
        loss = loss.transpose(0, -1).flatten(1).view(4, 3, 2).permute(-1, 1, 0)
    maps: dict[str, list[object]] = {}
    program = programs.program(loss.sum())
    for block in program.blocks[1:]:
        maps.setdefault(block.operator, []).append(program.maps.of(block.steps[0])[0])
    assert {"TransposeBackward0", "PermuteBackward0"} <= set(maps)
    for name in ("TransposeBackward0", "PermuteBackward0"):
        first, second = maps[name]
        assert first is second


# What rows must not be confused by ---------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["Add", "Mul", "Softmax", "NativeLayerNorm", "Relu", "Cat"])
def test_rows_with_infinite_cotangents(
    name: str, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, inputs = CASES[name][0]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    loss = (out.reshape(-1) * torch.tensor([bad] + [1.0] * (out.numel() - 1))).sum()
    short = programs.program(loss)
    monkeypatch.setattr(node_rules, "NODES", {})
    watched = programs.program(loss)
    for one, other in zip(short.leaves, watched.leaves, strict=True):
        torch.testing.assert_close(one.compute(), other.compute(), rtol=0, atol=0, equal_nan=True)


def test_a_split_of_which_only_a_part_is_used() -> None:
    x = torch.arange(10.0).requires_grad_()
    loss = (x.split([2, 3, 5])[1] ** 2).sum()
    program = programs.program(loss)
    (slot,) = program.maps.of(program.blocks[-1].steps[0])
    assert (slot.in_shape, slot.out_shape) == ((3,), (10,))
    found = interpreter.run(program, gradtrace.semirings.SUM)[x]
    assert found.tolist() == [0, 0, 4, 6, 8, 0, 0, 0, 0, 0]


def test_one_tensor_for_several_outputs() -> None:
    """The cotangents of both parts are one and the same tensor."""
    x = torch.arange(4.0).requires_grad_()
    first, second = x.chunk(2)
    found = interpreter.run(programs.program((first + second).sum()), gradtrace.semirings.SUM)[x]
    assert found.tolist() == [1, 1, 1, 1]


def test_a_number_is_told_from_a_tensor() -> None:
    x = torch.ones(2, requires_grad=True)
    numbers = [x * 2, x * 0.5, x / 3, x.double() * 2.5]
    tensors = [
        x * torch.tensor(2),
        x * torch.tensor(0.5),
        x * torch.tensor([0.5], dtype=torch.half),
    ]
    tensors.append(x.double() * torch.tensor(2.5, dtype=torch.float64))
    for y, told in [(y, True) for y in numbers] + [(y, False) for y in tensors]:
        assert is_number(y.grad_fn._saved_other) is told  # type: ignore[union-attr]
    (map_,) = programs.program(x * 0.1, cotangent=torch.ones(2)).maps
    assert map_.weight == 0.1  # type: ignore[attr-defined]


def test_hooks_are_looked_for_before_rows_are() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: grad * 10)  # type: ignore[no-untyped-call]
    found = interpreter.run(programs.program((y + 1).sum()), gradtrace.semirings.SUM)[x]
    assert found.tolist() == [20, 20, 20]


def test_sparse_cotangents_are_refused() -> None:
    table = torch.randn(5, 3, requires_grad=True)
    with pytest.raises(Unsupported, match="sparse=False"):
        programs.program(F.embedding(words, table, sparse=True).sum())


def test_sparse_factors_are_refused() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    loss = torch.sparse.sum(x * torch.eye(2).to_sparse())
    with pytest.raises(Unsupported, match=r"layout torch.sparse_coo|sparse"):
        programs.program(loss)


def test_formulas_are_the_calls_that_pytorch_makes() -> None:
    """On every device, and with nothing done to the arguments before."""
    path = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    formulas = path.read_text().replace("_symint(", "(").replace("/* is_result */ ", "")
    words = {
        "g": "grad",
        "needed": "grad_input_mask",
        "dtype": "self.scalar_type()",
        "bias_sym_sizes_opt": "bias->sym_sizes()",
        "self_sym_sizes": "self.sym_sizes()",
    }
    for names, operation, arguments in _CALLS:
        said = ", ".join(words.get(name, name) for name in arguments.split())
        call = f"{operation}({said})"
        plain = [f": {call}\n", f': "grad.defined() ? {call} : std::tuple']
        assert any(text in formulas for text in plain), names


# Cotangents of any layout ------------------------------------------------------------------------

BEHIND: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda y: y.sum(),
    "expanded in part": lambda y: (y.sum(0) * numbers(y[0])).sum(),
    "turned": lambda y: (y.transpose(0, -1) * numbers(y.transpose(0, -1))).sum(),
    "zeros between": lambda y: (y[..., ::2] * numbers(y[..., ::2])).sum(),
}
"""What follows a node, by how the cotangent lies that comes from there."""

KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_norm": lambda x, w: F.group_norm(x, 2, w[:4], w[4:8]),
    "group_norm, plain": lambda x, w: F.group_norm(x, 1),
    "group_norm, channels last": lambda x, w: F.group_norm(last(x), 2, w[:4]),
    "layer_norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w[:6], w[6:12]),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w[:4], w[4:8], training=True),
    "batch_norm, fixed": lambda x, w: F.batch_norm(x, torch.zeros(4), torch.ones(4), w[:4]),
    "conv2d": lambda x, w: F.conv2d(x, w[:144].reshape(4, 4, 3, 3)),
    "conv2d, channels last": lambda x, w: F.conv2d(last(x), w[:144].reshape(4, 4, 3, 3)),
    "max_pool2d": lambda x, w: F.max_pool2d(x, 2),
    "max_pool2d, channels last": lambda x, w: F.max_pool2d(last(x), 2),
    "softmax": lambda x, w: x.softmax(1) * w[0],
    "log_softmax": lambda x, w: x.log_softmax(1),
    "relu": lambda x, w: x.relu(),
    "embedding": lambda x, w: F.embedding(torch.tensor([[1, 0], [2, 1]]), w[:24].reshape(4, 6)),
    "nll_loss": lambda x, w: F.nll_loss(x.flatten(1), torch.tensor([1, 2, 0]), reduction="none"),
}


def numbers(like: Tensor) -> Tensor:
    return torch.arange(1.0, like.numel() + 1).reshape(like.shape)


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", BEHIND)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_cotangent_may_lie_in_any_way(kernel: str, layout: str) -> None:
    """A kernel that reads memory as it comes would find numbers of others beyond it."""
    gradtrace.backward(torch.ones(2, requires_grad=True).sum())  # from now on nodes are known
    torch.manual_seed(0)
    leaves = {"x": torch.randn(3, 4, 6, 6), "w": torch.randn(160)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = KERNELS[kernel](leaves["x"], leaves["w"])
    loss = BEHIND[layout](y if y.dim() > 1 else y.reshape(1, -1))
    found = gradtrace.trace(loss, names=leaves).gradients
    wanted = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for name, gradient in zip(leaves, wanted):
        assert (name in found) == (gradient is not None)
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-3)
