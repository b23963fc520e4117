"""Which rule each type of node has, and the rules that are one ATen operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.nodes import Edges, Node, signed
from gradtrace.linops import Scatter
from gradtrace.recording import placeholders
from gradtrace.recording.aten_rules import RULES, Call, Undecided
from gradtrace.recording.node_rules.base import (
    JoinedCotangent,
    NodeRule,
    Product,
    RuleResult,
)
from gradtrace.recording.node_rules.elementwise import (
    absolute,
    add,
    clamp,
    div,
    elementwise,
    masked_fill,
    mul,
    mul_scalar,
    pow_scalar,
    sigmoid,
    sub,
    tanh,
    where,
)
from gradtrace.recording.node_rules.movement import (
    cat,
    cumsum,
    expand,
    identity,
    permute,
    reshape,
    slice_or_select,
    split,
    stack,
    sum_or_mean,
    to_copy,
    transpose,
    transpose_2d,
    unbound,
    weighted,
)
from gradtrace.recording.node_rules.products import (
    addmm,
    euclidean_dist,
    logcumsumexp,
    matmul,
    mv,
    sparse_addmm,
    sparse_mm_reduce,
)

aten = torch.ops.aten


def aten_call(operation: str, arguments: str) -> NodeRule:
    """A rule for a node whose formula is one ATen operation.

    ``arguments`` lists, separated by spaces: ``g`` (the cotangent), ``needed`` (for each argument
    of the node, whether it needs a gradient), ``dtype`` (of the first argument), ``0``, ``false``,
    or the name of a saved value. A formula with one result is that of the first argument.
    """
    func, aten_rule = getattr(aten, operation).default, RULES[operation]
    single = len(func._schema.returns) == 1
    special: dict[str, Callable[[Tensor, Edges], Any]] = {
        "g": lambda grad, edges: grad,
        "needed": lambda grad, edges: [child is not None for child, _ in edges],
        "dtype": lambda grad, edges: nodes.wanted(*edges[0]).dtype,
        "0": lambda grad, edges: 0,
        "false": lambda grad, edges: False,
    }
    names = [(special.get(name), f"_saved_{name}") for name in arguments.split()]

    def rule(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
        if single and any(child is not None for child, _ in edges[1:]):
            return None
        args = [f(grad, edges) if f else signed(getattr(node, name)) for f, name in names]
        bare = product.bare and operation == "convolution_backward"
        out = placeholders.convolution_backward(*args) if bare else func(*args)
        try:
            chains = aten_rule(Call(func, args, {}, [grad], out, 0, product.batched_weights))
        except Undecided:
            return None
        if isinstance(out, Tensor):
            return [(out, chains[0][0])]
        return [(each, some[0][0]) if some else None for each, some in zip(out, chains)]

    return rule


_embedding = aten_call(
    "embedding_dense_backward",
    "g indices weight_sym_argsize_0 padding_idx scale_grad_by_freq",
)


def embedding(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``nn.functional.embedding``: scatters the cotangent into the rows of the table."""
    if node._saved_sparse:
        return None
    rows = node._saved_weight_sym_argsize_0
    lazy = None
    if not node._saved_scale_grad_by_freq:
        lazy = product.defer(edges[0], (rows, grad.shape[-1]), grad)
    if lazy is None:
        return _embedding(node, grad, edges, product)
    padding = signed(node._saved_padding_idx)
    return [(lazy, [Scatter.table(node._saved_indices, tuple(grad.shape), rows, padding)])]


def _added(func: Any, grad: Tensor, shape: Sequence[int], *where: Any) -> RuleResult:
    """The cotangent added to zeros of a shape by an ATen operation of ``RULES``."""
    zeros = grad.new_zeros(tuple(shape))
    args = (zeros, *[grad if each is Tensor else each for each in where])
    call = Call(func, args, {}, [grad], func(*args), 0)
    ((chain, _),) = RULES[func._schema.name.removeprefix("aten::")](call)
    return [(call.out, chain)]


def index(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x[indices]``: adds each element to the one that it was read from."""
    shape, indices = node._saved_self_sym_sizes, node._saved_indices
    return _added(aten.index_put.default, grad, shape, indices, Tensor, True)


def gather(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x.gather(dim, index)``: adds each element to the one that it was read from."""
    if node._saved_sparse_grad:
        return None
    shape, dim = nodes.wanted(*edges[0]).shape, signed(node._saved_dim)
    return _added(aten.scatter_add.default, grad, shape, dim, node._saved_index, Tensor)


_ROWS: tuple[tuple[NodeRule, str], ...] = (
    (transpose_2d, "T0"),
    (transpose, "Transpose0"),
    (permute, "Permute0"),
    (slice_or_select, "Slice0 Select0"),
    (reshape, "View0 UnsafeView0 ReshapeAlias0 Unsqueeze0 Squeeze0 Squeeze1 Squeeze2"),
    (identity, "Clone0 Alias0"),
    (to_copy, "ToCopy0"),
    (cat, "Cat0"),
    (stack, "Stack0"),
    (expand, "Expand0"),
    (sum_or_mean, "Sum0 Sum1 Mean0 Mean1"),
    (weighted, "Logsumexp0 LinalgVectorNorm0 BinaryCrossEntropyWithLogits0"),
    (cumsum, "Cumsum0"),
    (elementwise, "Gelu0 Silu0 Exp0 Sqrt0 Rsqrt0 Sin0 Cos0 Neg0 Log0 Log1P0 Reciprocal0 Erf0"),
    (tanh, "Tanh0"),
    (sigmoid, "Sigmoid0"),
    (pow_scalar, "Pow0"),
    (elementwise, "NativeDropout0"),
    (add, "Add0"),
    (sub, "Sub0"),
    (mul, "Mul0"),
    (mul_scalar, "Mul1"),
    (div, "Div0"),
    (absolute, "Abs0"),
    (where, "Where0"),
    (masked_fill, "MaskedFill0"),
    (clamp, "Clamp1 ClampMin0 ClampMax0"),
    (matmul, "Mm0 Bmm0"),
    (addmm, "Addmm0"),
    (sparse_addmm, "SparseAddmm0"),
    (sparse_mm_reduce, "SparseMmReduceImpl0"),
    (mv, "Mv0"),
    (logcumsumexp, "Logcumsumexp0"),
    (embedding, "Embedding0"),
    (index, "Index0"),
    (gather, "Gather0"),
    (euclidean_dist, "EuclideanDist0"),
)

# Copied from PyTorch's derivatives.yaml: node types, operation, arguments.
_CALLS = (
    ("Relu0", "threshold_backward", "g result 0"),
    ("Softmax0 SafeSoftmax0", "_softmax_backward_data", "g result dim dtype"),
    ("LogSoftmax0", "_log_softmax_backward_data", "g result dim dtype"),
    (
        "NativeLayerNorm0",
        "native_layer_norm_backward",
        "g input normalized_shape result1 result2 weight bias needed",
    ),
    (
        "NativeBatchNorm0",
        "native_batch_norm_backward",
        "g input weight running_mean running_var result1 result2 training eps needed",
    ),
    (
        "Convolution0",
        "convolution_backward",
        "g input weight bias_sym_sizes_opt stride padding dilation transposed output_padding "
        "groups needed",
    ),
    (
        "MaxPool2DWithIndices0",
        "max_pool2d_with_indices_backward",
        "g self kernel_size stride padding dilation ceil_mode result1",
    ),
    (
        "AvgPool2D0",
        "avg_pool2d_backward",
        "g self kernel_size stride padding ceil_mode count_include_pad divisor_override",
    ),
    ("AdaptiveAvgPool2D0", "_adaptive_avg_pool2d_backward", "g self"),
    (
        "UpsampleNearest2D0",
        "upsample_nearest2d_backward",
        "g output_size self_sym_sizes scales_h scales_w",
    ),
    (
        "UpsampleBilinear2D0",
        "upsample_bilinear2d_backward",
        "g output_size self_sym_sizes align_corners scales_h scales_w",
    ),
    ("LeakyRelu0", "leaky_relu_backward", "g self negative_slope false"),
    ("Elu0", "elu_backward", "g alpha scale input_scale false self"),
    ("Hardtanh0", "hardtanh_backward", "g self min_val max_val"),
    ("Hardswish0", "hardswish_backward", "g self"),
    ("Hardsigmoid0", "hardsigmoid_backward", "g self"),
    ("Softplus0", "softplus_backward", "g self beta threshold"),
    ("LogSigmoid0", "log_sigmoid_backward", "g self buffer"),
    ("MseLoss0", "mse_loss_backward", "g self target reduction"),
    ("SmoothL1Loss0", "smooth_l1_loss_backward", "g self target reduction beta"),
    ("HuberLoss0", "huber_loss_backward", "g self target reduction delta"),
    ("BinaryCrossEntropy0", "binary_cross_entropy_backward", "g self target weight reduction"),
    (
        "NllLoss0",
        "nll_loss_backward",
        "g self target weight reduction ignore_index total_weight",
    ),
    (
        "NllLoss2D0",
        "nll_loss2d_backward",
        "g self target weight reduction ignore_index total_weight",
    ),
)


def _named(rows: Iterable[tuple[NodeRule, str]]) -> dict[str, NodeRule]:
    return {
        f"{name[:-1]}Backward{name[-1]}": rule for rule, names in rows for name in names.split()
    }


NODES: dict[str, NodeRule] = {
    **_named(_ROWS),
    **_named((aten_call(operation, arguments), names) for names, operation, arguments in _CALLS),
}
"""Rules by type of node."""

MULTI_OUTPUT_RULES: dict[str, Callable[[Node, Mapping[int, Tensor]], JoinedCotangent]] = {
    "SplitBackward0": split,
    "SplitWithSizesBackward0": split,
    "UnsafeSplitBackward0": split,
    "UnbindBackward0": unbound,
}
"""Rules by type of node, for operators with several outputs that are slices of the argument."""
