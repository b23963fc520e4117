"""The table of rules: one row for each ATen operation, by name, or by name and overload."""

from __future__ import annotations

import torch

from gradtrace.recording.aten_rules import elementwise as e
from gradtrace.recording.aten_rules import movement as m
from gradtrace.recording.aten_rules import norms as n
from gradtrace.recording.aten_rules import products as p
from gradtrace.recording.aten_rules import resampling as r
from gradtrace.recording.aten_rules import scatters as s
from gradtrace.recording.aten_rules import sparse
from gradtrace.recording.aten_rules.call import Rule

aten = torch.ops.aten

ROWS: tuple[tuple[Rule, str], ...] = (
    (e.same, "clone contiguous _to_copy to detach alias lift_fresh positive"),
    (e.same, "resolve_conj resolve_neg prims.convert_element_type"),
    (e.add, "add sub"),
    (e.mul, "mul"),
    (e.div, "div"),
    (e.negative, "neg _neg_view _neg_view_copy"),
    (e.probe, "hardtanh_backward hardsigmoid_backward hardswish_backward"),
    (e.probe, "hardshrink_backward softshrink_backward leaky_relu_backward elu_backward"),
    (e.probe, "mish_backward softplus_backward log_sigmoid_backward rrelu_with_noise_backward"),
    (e.probe, "mse_loss_backward smooth_l1_loss_backward huber_loss_backward"),
    (e.probe, "soft_margin_loss_backward binary_cross_entropy_backward"),
    (e.constant, "zeros_like ones_like full_like empty_like rand_like randn_like"),
    (e.constant, "zero fill.Scalar"),
    (e.constant, "new_zeros new_ones new_full new_empty new_empty_strided"),
    (e.where, "where.self prims.where"),
    (e.masked_fill, "masked_fill.Scalar masked_fill.Tensor"),
    (e.threshold, "threshold_backward"),
    (e.conjugate, "_conj conj_physical _conj_physical conj _conj_copy"),
    (e.complex_parts, "complex"),
    (e.as_parts, "view_as_real view_as_complex"),
    (e.real_part, "real"),
    (e.imaginary_part, "imag"),
    (m.reshape, "view _unsafe_view reshape _reshape_alias _reshape_copy squeeze unsqueeze"),
    (m.strided, "as_strided"),
    (
        m.injective_view,
        "permute transpose t mT slice select diagonal movedim narrow swapaxes flip roll rot90",
    ),
    (
        m.injective_view,
        "split split_with_sizes unsafe_split unsafe_chunk chunk unbind masked_select",
    ),
    (m.view, "expand unfold index_select gather take repeat index _unsafe_index"),
    (m.concatenate, "cat stack"),
    (m.move, "constant_pad_nd copy diag diag_embed block_diag im2col"),
    (e.triangle, "tril triu"),
    (m.put, "slice_backward select_backward diagonal_backward"),
    (m.move, "masked_scatter_backward"),
    (m.move, "slice_scatter select_scatter diagonal_scatter as_strided_scatter"),
    (m.move, "scatter.src scatter.value"),
    (m.move, "index_copy masked_scatter max_unpool2d max_unpool3d _unsafe_masked_index"),
    (m.move, "channel_shuffle pixel_shuffle pixel_unshuffle"),
    (m.total, "sum"),
    (m.mean, "mean"),
    (m.cumsum, "cumsum"),
    (p.product("mk->mn", "kn"), "mm"),
    (p.product("bmk->bmn", "bkn"), "bmm"),
    (p.product("mk->m", "k"), "mv"),
    (p.product("k->", "k"), "dot"),
    (p.vdot, "vdot"),
    (p.trilinear, "_trilinear"),
    (p.solve(1, "left"), "linalg_solve_triangular _linalg_solve_ex"),
    (p.solve(2, "left"), "linalg_lu_solve"),
    (p.solve(0), "triangular_solve cholesky_solve"),
    (p.convolution, "convolution_backward"),
    (p.fourier, "_fft_r2c _fft_c2r _fft_c2c"),
    (s.index_put, "index_put _unsafe_index_put _index_put_impl"),
    (s.index_add, "index_add"),
    (s.scatter_add, "scatter_add"),
    (s.put, "put"),
    (s.embedding, "embedding_dense_backward"),
    (sparse.embedding_bag, "_embedding_bag_backward _embedding_bag_dense_backward"),
    (s.unfold, "unfold_backward"),
    (s.col2im, "col2im"),
    (s.nll, "nll_loss_backward nll_loss2d_backward"),
    (s.max_pool(2, 7), "max_pool2d_with_indices_backward"),
    (s.max_pool(3, 7), "max_pool3d_with_indices_backward"),
    (s.max_pool(2, 2), "adaptive_max_pool2d_backward"),
    (s.max_pool(3, 2), "adaptive_max_pool3d_backward"),
    (s.max_pool(2, 4), "fractional_max_pool2d_backward"),
    (s.max_pool(3, 4), "fractional_max_pool3d_backward"),
    (s.padding_of(aten.reflection_pad1d), "reflection_pad1d_backward"),
    (s.padding_of(aten.reflection_pad2d), "reflection_pad2d_backward"),
    (s.padding_of(aten.reflection_pad3d), "reflection_pad3d_backward"),
    (s.padding_of(aten.replication_pad1d), "replication_pad1d_backward"),
    (s.padding_of(aten.replication_pad2d), "replication_pad2d_backward"),
    (s.padding_of(aten.replication_pad3d), "replication_pad3d_backward"),
    (r.nearest(aten.upsample_nearest1d), "upsample_nearest1d_backward"),
    (r.nearest(aten.upsample_nearest2d), "upsample_nearest2d_backward"),
    (r.nearest(aten.upsample_nearest3d), "upsample_nearest3d_backward"),
    (r.nearest(aten._upsample_nearest_exact1d), "_upsample_nearest_exact1d_backward"),
    (r.nearest(aten._upsample_nearest_exact2d), "_upsample_nearest_exact2d_backward"),
    (r.nearest(aten._upsample_nearest_exact3d), "_upsample_nearest_exact3d_backward"),
    (r.separable(1, r.interpolation(aten.upsample_linear1d, 2)), "upsample_linear1d_backward"),
    (r.separable(2, r.interpolation(aten.upsample_bilinear2d, 2)), "upsample_bilinear2d_backward"),
    (r.separable(2, r.interpolation(aten.upsample_bicubic2d, 4)), "upsample_bicubic2d_backward"),
    (
        r.separable(3, r.interpolation(aten.upsample_trilinear3d, 2)),
        "upsample_trilinear3d_backward",
    ),
    (
        r.separable(2, r.interpolation(aten._upsample_bilinear2d_aa, 2, blurred=True)),
        "_upsample_bilinear2d_aa_backward",
    ),
    (
        r.separable(2, r.interpolation(aten._upsample_bicubic2d_aa, 4, blurred=True)),
        "_upsample_bicubic2d_aa_backward",
    ),
    (r.separable(2, r.average_pool), "avg_pool2d_backward"),
    (r.separable(3, r.average_pool), "avg_pool3d_backward"),
    (r.separable(2, r.adaptive_average_pool), "_adaptive_avg_pool2d_backward"),
    (r.separable(3, r.adaptive_average_pool), "_adaptive_avg_pool3d_backward"),
    (r.grid_sampler, "grid_sampler_2d_backward grid_sampler_3d_backward"),
    (p.cdist, "_cdist_backward"),
    (p.pdist, "_pdist_backward"),
    (e.per_sample(0), "multi_margin_loss_backward multilabel_margin_loss_backward"),
    (e.per_sample(1), "_ctc_loss_backward"),
    (s.segment_reduce, "_segment_reduce_backward"),
    (n.softmax, "_softmax_backward_data"),
    (n.log_softmax, "_log_softmax_backward_data"),
    (n.layer_norm, "native_layer_norm_backward"),
    (n.rms_norm, "_fused_rms_norm_backward"),
    (n.group_norm, "native_group_norm_backward"),
    (n.batch_norm, "native_batch_norm_backward"),
    (n.weight_norm, "_weight_norm_interface_backward"),
)

RULES: dict[str, Rule] = {name: rule for rule, names in ROWS for name in names.split()}
"""Rules by name of the ATen operation, or name and overload."""
