"""What recording and influence cost, in backward passes: everyday layers, losses and networks.

``python tests/costs.py [PATTERN ...]`` prints a line for each case whose name fits; CPU time of one
thread, the best of several rounds, so that other work on the machine matters little.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace as gt

Case = Callable[[], tuple[nn.Module, Callable[[], Tensor], str | None]]
CASES: dict[str, Case] = {}
randn = torch.randn


class Op(nn.Module):
    """A function of parameters of these shapes."""

    def __init__(self, f: Callable[..., Tensor], *inputs: Tensor) -> None:
        super().__init__()
        self.f = f
        self.w = nn.ParameterList([nn.Parameter(x) for x in inputs])

    def forward(self) -> Tensor:
        return squared(self.f(*[w * 1.0 for w in self.w]))


def squared(x: Tensor) -> Tensor:
    return (x.abs() if x.is_complex() else x).pow(2).mean()


def op(name: str, f: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
    def case() -> tuple[nn.Module, Callable[[], Tensor], str | None]:
        model = Op(f, *(randn(*shape) for shape in shapes))
        return model, model, "operators"

    CASES[name] = case


def positive(name: str, f: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
    op(name, lambda *xs: f(*(x.sigmoid() for x in xs)), *shapes)


def layer(name: str, make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> None:
    def case() -> tuple[nn.Module, Callable[[], Tensor], str | None]:
        model, inputs = make(), [randn(*shape) for shape in shapes]

        def loss() -> Tensor:
            found = model(*inputs)
            return squared(found[0] if isinstance(found, tuple) else found)

        return nn.ModuleDict({"layer": model}), loss, None

    CASES[name] = case


def net(
    name: str, f: Callable[[], tuple[nn.Module, Callable[[], Tensor]]], kind: str | None = None
) -> None:
    CASES[name] = lambda: (*f(), kind)


# Deep and wide networks, and what used to be dear


def cell(steps: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    m, x = nn.ModuleDict({"c": nn.RNNCell(32, 64)}), randn(steps, 4, 32)

    def f() -> Tensor:
        h = torch.zeros(4, 64)
        for t in range(steps):
            h = m["c"](x[t], h)
        return squared(h)

    return m, f


def recurrent(
    kind: type[nn.RNNBase], steps: int, **options: object
) -> tuple[nn.Module, Callable[[], Tensor]]:
    m, x = nn.ModuleDict({"c": kind(32, 64, **options)}), randn(steps, 4, 32)
    return m, lambda: squared(m["c"](x)[0])


def residual(layers: int, size: int = 16) -> tuple[nn.Module, Callable[[], Tensor]]:
    m = nn.ModuleList([nn.Sequential(nn.Linear(size, size), nn.Tanh()) for _ in range(layers)])
    x = randn(4, size)

    def f() -> Tensor:
        h = x
        for q in m:
            h = h + q(h)
        return squared(h)

    return m, f


def labels(n: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    m, x = nn.ModuleDict({"a": nn.Linear(16, n), "o": nn.Linear(n, 4)}), randn(8, 16)
    return m, lambda: squared(m["o"](gt.label(m["a"](x).tanh(), 1, "u")))


def joined(n: int, f: Callable[[list[Tensor]], Tensor]) -> tuple[nn.Module, Callable[[], Tensor]]:
    m = nn.ParameterList([nn.Parameter(randn(4)) for _ in range(n)])
    return m, lambda: squared(f([p * 1.0 for p in m]))


def experts(n: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    m = nn.ModuleDict(
        {"g": nn.Linear(16, n), "e": nn.ModuleList([nn.Linear(16, 16) for _ in range(n)])}
    )
    x = randn(8, 16)

    def f() -> Tensor:
        gate = m["g"](x).softmax(1)
        out = 0
        for k, e in enumerate(m["e"]):
            out = out + gate[:, k : k + 1] * e(x)
        return squared(out)

    return m, f


def routed(n: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Each token goes to one of the experts."""
    m = nn.ModuleDict(
        {"g": nn.Linear(16, n), "e": nn.ModuleList([nn.Linear(16, 16) for _ in range(n)])}
    )
    x = randn(4 * n, 16)

    def f() -> Tensor:
        weight, which = m["g"](x).softmax(1).max(1)
        out = torch.zeros_like(x)
        for k, e in enumerate(m["e"]):
            at = (which == k).nonzero().squeeze(1)
            if len(at):
                out = out.index_add(0, at, weight[at].unsqueeze(1) * e(x[at]))
        return squared(out)

    return m, f


def unet() -> tuple[nn.Module, Callable[[], Tensor]]:
    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1),
            nn.BatchNorm2d(b),
            nn.ReLU(),
            nn.Conv2d(b, b, 3, padding=1),
            nn.ReLU(),
        )

    m = nn.ModuleDict(
        {
            "a": block(1, 8),
            "b": block(8, 16),
            "c": block(16, 32),
            "u": block(48, 16),
            "v": block(24, 8),
            "o": nn.Conv2d(8, 1, 1),
        }
    )
    x = randn(2, 1, 32, 32)

    def f() -> Tensor:
        a = m["a"](x)
        b = m["b"](F.max_pool2d(a, 2))
        c = m["c"](F.max_pool2d(b, 2))
        u = m["u"](torch.cat([F.interpolate(c, scale_factor=2, mode="bilinear"), b], 1))
        v = m["v"](torch.cat([F.interpolate(u, scale_factor=2, mode="bilinear"), a], 1))
        return squared(m["o"](v))

    return m, f


def densenet(layers: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    m = nn.ModuleList(
        [
            nn.Sequential(
                nn.BatchNorm2d(8 + 4 * n), nn.ReLU(), nn.Conv2d(8 + 4 * n, 4, 3, padding=1)
            )
            for n in range(layers)
        ]
    )
    x = randn(4, 8, 16, 16)

    def f() -> Tensor:
        h = x
        for q in m:
            h = torch.cat([h, q(h)], 1)
        return squared(h)

    return m, f


def graphs(layers: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    src, dst = torch.randint(2000, (2, 16000))
    m, x = nn.ModuleList([nn.Linear(32, 32) for _ in range(layers)]), randn(2000, 32)

    def f() -> Tensor:
        h = x
        for q in m:
            h = q(torch.zeros(2000, 32).index_add(0, dst, h[src])).relu()
        return squared(h)

    return m, f


def chain(layers: int, size: int = 16) -> tuple[nn.Module, Callable[[], Tensor]]:
    m = nn.Sequential(
        *[layer for _ in range(layers) for layer in (nn.Linear(size, size), nn.Tanh())]
    )
    x = randn(4, size)
    return m, lambda: squared(m(x))


for steps in (500, 4000):
    net(f"RNNCell {steps}", lambda steps=steps: cell(steps))
for steps in (500, 2000):
    net(f"nn.RNN {steps}", lambda steps=steps: recurrent(nn.RNN, steps))
net("nn.LSTM 2000", lambda: recurrent(nn.LSTM, 2000))
net("nn.GRU 1000", lambda: recurrent(nn.GRU, 1000))
net(
    "nn.LSTM 2 layers, both ways, 200",
    lambda: recurrent(nn.LSTM, 200, num_layers=2, bidirectional=True),
)
for layers in (250, 2000):
    net(f"residual {layers}", lambda layers=layers: residual(layers))
net("residual 500, 64 units", lambda: residual(500, 64))
for n in (1000, 4000, 16000):
    net(f"labels {n}", lambda n=n: labels(n), "labels")
net("stack 16000 arguments", lambda: joined(16000, torch.stack), "arguments")
net("stack 4000 operators", lambda: joined(4000, torch.stack), "operators")
net("cat 4000", lambda: joined(4000, torch.cat), "operators")
net("cat 4000 arguments", lambda: joined(4000, torch.cat), "arguments")
net("sum of 4000", lambda: joined(4000, lambda xs: sum(xs[1:], xs[0])), "operators")
net("experts 1000", lambda: experts(1000))
net("experts 1000 routed", lambda: routed(1000))
net("U-Net", unet)
net("DenseNet 16", lambda: densenet(16))
net("DenseNet 40", lambda: densenet(40))
net("graph network", lambda: graphs(3))
net("chain of Linear 1000", lambda: chain(1000))
SRC, DST = torch.randint(2000, (2, 16000), generator=torch.Generator().manual_seed(0))
op("bilinear x2", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (4, 16, 32, 32))
op("trilinear x2", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (1, 8, 16, 16, 16))
op("avg_pool2d(3, 2, 1)", lambda x: F.avg_pool2d(x, 3, 2, 1), (4, 16, 64, 64))
op("local_response_norm", lambda x: F.local_response_norm(x, 5), (4, 32, 24, 24))
GRID = torch.rand(4, 48, 48, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
for mode in ("bilinear", "nearest", "bicubic"):
    op(
        f"grid_sample {mode}",
        lambda x, mode=mode: F.grid_sample(x, GRID, mode, align_corners=False),
        (4, 8, 48, 48),
    )
op(
    "grid_sample, grid too",
    lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
    (4, 8, 48, 48),
    (4, 48, 48, 2),
)
op("graph operator", lambda x: torch.zeros(2000, 32).index_add(0, DST, x[SRC]), (2000, 32))
for p in (1, 2, 3, float("inf")):
    op(f"cdist {p}", lambda x, y, p=p: torch.cdist(x, y, p=p), (512, 64), (256, 64))
    op(f"pdist {p}", lambda x, p=p: F.pdist(x, p), (200, 32))
for n in (16, 64):
    layer(f"nn.Bilinear {n}", lambda n=n: nn.Bilinear(n, n, n), (64, n), (64, n))

# Losses

CLASS, SIGN = (
    torch.arange(1024) % 128,
    torch.where(torch.arange(1024 * 128) % 3 == 0, 1.0, -1.0).reshape(1024, 128),
)
MANY = torch.arange(1024)[:, None].expand(1024, 128) % 128
for how in ("none", "mean"):
    op(f"cross_entropy {how}", lambda x, r=how: F.cross_entropy(x, CLASS, reduction=r), (1024, 128))
    op(
        f"cross_entropy smoothed {how}",
        lambda x, r=how: F.cross_entropy(x, CLASS, reduction=r, label_smoothing=0.1),
        (1024, 128),
    )
    op(
        f"cross_entropy soft {how}",
        lambda x, r=how: F.cross_entropy(x, SIGN.softmax(1), reduction=r),
        (1024, 128),
    )
    op(
        f"multi_margin {how}",
        lambda x, r=how: F.multi_margin_loss(x, CLASS, reduction=r),
        (1024, 128),
    )
    op(
        f"multilabel_margin {how}",
        lambda x, r=how: F.multilabel_margin_loss(x[:256], MANY[:256], reduction=r),
        (1024, 128),
    )
    op(
        f"multilabel_soft_margin {how}",
        lambda x, r=how: F.multilabel_soft_margin_loss(x, (SIGN > 0).float(), reduction=r),
        (1024, 128),
    )
    op(f"mse {how}", lambda x, r=how: F.mse_loss(x, SIGN, reduction=r), (1024, 128))
    op(f"l1 {how}", lambda x, r=how: F.l1_loss(x, SIGN, reduction=r), (1024, 128))
    op(f"smooth_l1 {how}", lambda x, r=how: F.smooth_l1_loss(x, SIGN, reduction=r), (1024, 128))
    op(f"huber {how}", lambda x, r=how: F.huber_loss(x, SIGN, reduction=r), (1024, 128))
    op(
        f"bce logits {how}",
        lambda x, r=how: F.binary_cross_entropy_with_logits(x, (SIGN > 0).float(), reduction=r),
        (1024, 128),
    )
    positive(
        f"bce {how}",
        lambda x, r=how: F.binary_cross_entropy(x, (SIGN > 0).float(), reduction=r),
        (1024, 128),
    )
    op(
        f"kl_div {how}",
        lambda x, r=how: F.kl_div(x.log_softmax(1), SIGN.softmax(1), reduction=r),
        (1024, 128),
    )
    op(f"soft_margin {how}", lambda x, r=how: F.soft_margin_loss(x, SIGN, reduction=r), (1024, 128))
    op(
        f"hinge_embedding {how}",
        lambda x, r=how: F.hinge_embedding_loss(x, SIGN, reduction=r),
        (1024, 128),
    )
    op(
        f"poisson_nll {how}",
        lambda x, r=how: F.poisson_nll_loss(x, SIGN.abs(), reduction=r),
        (1024, 128),
    )
    op(
        f"gaussian_nll {how}",
        lambda x, v, r=how: F.gaussian_nll_loss(x, SIGN, v.exp(), reduction=r),
        (1024, 128),
        (1024, 128),
    )
    op(
        f"triplet {how}",
        lambda a, p, n, r=how: F.triplet_margin_loss(a, p, n, reduction=r),
        (512, 128),
        (512, 128),
        (512, 128),
    )
    op(
        f"cosine_embedding {how}",
        lambda a, b, r=how: F.cosine_embedding_loss(a, b, SIGN[:512, 0], reduction=r),
        (512, 128),
        (512, 128),
    )
    op(
        f"margin_ranking {how}",
        lambda a, b, r=how: F.margin_ranking_loss(a, b, SIGN, reduction=r),
        (1024, 128),
        (1024, 128),
    )
    op(
        f"ctc {how}",
        lambda x, r=how: F.ctc_loss(
            x.log_softmax(2),
            (MANY[:16, :20] % 19) + 1,
            torch.full((16,), 50),
            torch.full((16,), 20),
            reduction=r,
        ),
        (50, 16, 20),
    )
    op(
        f"nll 2d {how}",
        lambda x, r=how: F.nll_loss(
            x.log_softmax(1), MANY[:4, :32, None].expand(4, 32, 32) % 10, reduction=r
        ),
        (4, 10, 32, 32),
    )
op("cosine_similarity", F.cosine_similarity, (1024, 128), (1024, 128))
op("pairwise_distance", F.pairwise_distance, (1024, 128), (1024, 128))
op(
    "contrastive",
    lambda x: F.cross_entropy(F.normalize(x) @ F.normalize(x).t() / 0.1, torch.arange(256)),
    (256, 64),
)

# Layers

layer("Linear", lambda: nn.Linear(128, 128), (256, 128))
layer("Conv1d", lambda: nn.Conv1d(16, 32, 5, padding=2), (8, 16, 256))
layer("Conv2d", lambda: nn.Conv2d(16, 32, 3, padding=1), (4, 16, 32, 32))
layer("Conv2d grouped", lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), (4, 32, 32, 32))
layer("Conv2d dilated", lambda: nn.Conv2d(16, 32, 3, padding=2, dilation=2), (4, 16, 32, 32))
layer(
    "Conv2d reflect",
    lambda: nn.Conv2d(16, 32, 3, padding=1, padding_mode="reflect"),
    (4, 16, 32, 32),
)
layer("Conv3d", lambda: nn.Conv3d(4, 8, 3, padding=1), (2, 4, 8, 16, 16))
layer("ConvTranspose1d", lambda: nn.ConvTranspose1d(16, 16, 4, 2, 1), (8, 16, 128))
layer("ConvTranspose2d", lambda: nn.ConvTranspose2d(16, 16, 4, 2, 1), (4, 16, 16, 16))
layer("ConvTranspose3d", lambda: nn.ConvTranspose3d(4, 4, 4, 2, 1), (2, 4, 6, 8, 8))
layer("BatchNorm1d", lambda: nn.BatchNorm1d(128), (512, 128))
layer("BatchNorm2d", lambda: nn.BatchNorm2d(16), (4, 16, 32, 32))
layer("BatchNorm2d eval", lambda: nn.BatchNorm2d(16).eval(), (4, 16, 32, 32))
layer("GroupNorm", lambda: nn.GroupNorm(4, 16), (4, 16, 32, 32))
layer("InstanceNorm2d", lambda: nn.InstanceNorm2d(16, affine=True), (4, 16, 32, 32))
layer("LayerNorm", lambda: nn.LayerNorm(128), (512, 128))
layer("RMSNorm", lambda: nn.RMSNorm(128), (512, 128))
layer("Embedding", lambda: Looked(nn.Embedding(1000, 64), 1000, (32, 64)))
layer("EmbeddingBag sum", lambda: Looked(nn.EmbeddingBag(1000, 64, mode="sum"), 1000, (256, 16)))
layer("EmbeddingBag mean", lambda: Looked(nn.EmbeddingBag(1000, 64, mode="mean"), 1000, (256, 16)))
layer("EmbeddingBag max", lambda: Looked(nn.EmbeddingBag(1000, 64, mode="max"), 1000, (256, 16)))
layer(
    "MultiheadAttention", lambda: Self(nn.MultiheadAttention(64, 4, batch_first=True)), (4, 64, 64)
)
layer(
    "TransformerEncoderLayer",
    lambda: nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True),
    (4, 64, 64),
)
layer(
    "TransformerDecoderLayer",
    lambda: nn.TransformerDecoderLayer(64, 4, 128, 0.0, batch_first=True),
    (4, 64, 64),
    (4, 64, 64),
)
layer("GRUCell", lambda: nn.GRUCell(64, 64), (256, 64), (256, 64))
layer("PReLU", lambda: nn.PReLU(16), (4, 16, 64, 64))
op(
    "attention causal",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    *[(4, 4, 64, 32)] * 3,
)
op("attention", F.scaled_dot_product_attention, *[(4, 4, 64, 32)] * 3)
op("spectral norm", lambda w: w / torch.linalg.matrix_norm(w, 2), (64, 64))
op("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), (256, 256), (256, 1))


class Looked(nn.Module):
    """A table that is looked up."""

    def __init__(self, table: nn.Module, rows: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.table, self.at = table, torch.randint(rows, shape)

    def forward(self) -> Tensor:
        found: Tensor = self.table(self.at)
        return found


class Self(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x, x, x)[0]
        return found


# Pooling and images

op("max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1), (16, 16, 512))
op("max_pool2d", lambda x: F.max_pool2d(x, 2), (4, 16, 64, 64))
op("max_pool2d overlapping", lambda x: F.max_pool2d(x, 3, 2, 1), (4, 16, 64, 64))
op("max_pool3d", lambda x: F.max_pool3d(x, 2), (2, 8, 16, 16, 16))
op("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, 1), (16, 16, 512))
op("avg_pool2d", lambda x: F.avg_pool2d(x, 2), (4, 16, 64, 64))
op("avg_pool3d", lambda x: F.avg_pool3d(x, 3, 2, 1), (2, 8, 16, 16, 16))
op("lp_pool2d", lambda x: F.lp_pool2d(x.abs(), 2, 2), (4, 16, 32, 32))
op("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 7), (4, 16, 32, 32))
op("adaptive_avg_pool2d 1", lambda x: F.adaptive_avg_pool2d(x, 1), (4, 64, 32, 32))
op("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, 5), (2, 8, 12, 12, 12))
op("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 7), (4, 16, 32, 32))
op("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 5), (2, 8, 12, 12, 12))
op("fractional_max_pool2d", lambda x: F.fractional_max_pool2d(x, 2, 14), (4, 16, 32, 32))
op(
    "max_unpool2d",
    lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    (4, 16, 32, 32),
)
for mode in ("nearest", "nearest-exact", "bicubic", "area"):
    op(
        f"interpolate {mode}",
        lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode),
        (4, 16, 32, 32),
    )
op("interpolate linear", lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (16, 16, 128))
op(
    "interpolate down, antialias",
    lambda x: F.interpolate(x, (20, 20), mode="bilinear", antialias=True),
    (4, 16, 64, 64),
)
op(
    "affine_grid",
    lambda t, x: F.grid_sample(x, F.affine_grid(t, [4, 8, 32, 32], False), align_corners=False),
    (4, 2, 3),
    (4, 8, 32, 32),
)
op("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (4, 64, 32, 32))
op("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (4, 16, 64, 64))
op("channel_shuffle", lambda x: F.channel_shuffle(x, 4), (4, 16, 64, 64))
op("unfold", lambda x: F.unfold(x, 3, padding=1), (4, 8, 32, 32))
op("fold", lambda x: F.fold(x, (32, 32), 3, padding=1), (4, 72, 1024))
op("Tensor.unfold", lambda x: x.unfold(1, 16, 4), (64, 1024))
for mode in ("constant", "reflect", "replicate", "circular"):
    op(f"pad {mode}", lambda x, mode=mode: F.pad(x, (2, 2, 2, 2), mode), (4, 16, 48, 48))

# Operations

AT, TO = (
    torch.randint(512, (256, 128), generator=torch.Generator().manual_seed(1)),
    torch.randint(512, (2048,), generator=torch.Generator().manual_seed(2)),
)
op("einsum ij,jk", lambda a, b: torch.einsum("ij,jk->ik", a, b), (128, 128), (128, 128))
op(
    "einsum bhqd,bhkd",
    lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b),
    (4, 4, 64, 32),
    (4, 4, 64, 32),
)
op(
    "einsum three",
    lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c),
    (64, 64),
    (64, 64),
    (64, 64),
)
op("einsum outer sum", lambda a, b: torch.einsum("bi,bj->ij", a, b), (64, 64), (64, 64))
op("baddbmm", torch.baddbmm, (16, 32, 32), (16, 32, 32), (16, 32, 32))
op("index", lambda x: x[TO], (512, 64))
op("index_select", lambda x: x.index_select(0, TO), (512, 64))
op("index_add", lambda x: torch.zeros(512, 64).index_add(0, TO, x), (2048, 64))
op("index_put", lambda x: torch.zeros(512, 64).index_put((TO,), x), (2048, 64))
op(
    "index_put accumulate",
    lambda x: torch.zeros(512, 64).index_put((TO,), x, accumulate=True),
    (2048, 64),
)
op("index_copy", lambda x, y: x.index_copy(0, torch.randperm(512)[:256], y), (512, 64), (256, 64))
op("gather", lambda x: x.gather(0, AT), (512, 128))
op("scatter", lambda x: torch.zeros(512, 128).scatter(0, AT, x), (256, 128))
op("scatter_add", lambda x: torch.zeros(512, 128).scatter_add(0, AT, x), (256, 128))
for how in ("sum", "mean", "amax", "prod"):
    op(
        f"scatter_reduce {how}",
        lambda x, how=how: torch.zeros(512, 128).scatter_reduce(0, AT, x, how, include_self=False),
        (256, 128),
    )
op("take_along_dim", lambda x: x.take_along_dim(AT, 0), (512, 128))
op("masked_select", lambda x: x.masked_select(SIGN > 0), (1024, 128))
op("masked_fill", lambda x: x.masked_fill(SIGN > 0, 0.0), (1024, 128))
op("masked_scatter", lambda x, y: x.masked_scatter(SIGN > 0, y), (1024, 128), (1024, 128))
op("where", lambda x, y: torch.where(SIGN > 0, x, y), (1024, 128), (1024, 128))
op("sort", lambda x: x.sort(1).values, (512, 128))
op("topk", lambda x: x.topk(8, 1).values, (512, 128))
op("kthvalue", lambda x: x.kthvalue(8, 1).values, (512, 128))
op("median", lambda x: x.median(1).values, (512, 128))
op("quantile", lambda x: x.quantile(0.3, 1), (512, 128))
op("max", lambda x: x.max(1).values, (512, 128))
op("amax", lambda x: x.amax(1), (512, 128))
op("cummax", lambda x: x.cummax(1).values, (512, 128))
op("cumsum", lambda x: x.cumsum(1), (512, 128))
op("cumprod", lambda x: (x * 0.1 + 1).cumprod(1), (512, 128))
op("logcumsumexp", lambda x: x.logcumsumexp(1), (512, 128))
op("prod", lambda x: (x * 0.1 + 1).prod(1), (512, 128))
op("logsumexp", lambda x: x.logsumexp(1), (512, 128))
op("softmax", lambda x: x.softmax(1), (512, 128))
op("log_softmax", lambda x: x.log_softmax(1), (512, 128))
op("gumbel_softmax", lambda x: F.gumbel_softmax(x, hard=True), (512, 128))
op("var", lambda x: x.var(1), (512, 128))
op("std", lambda x: x.std(1), (512, 128))
op("norm", lambda x: x.norm(dim=1), (512, 128))
op("norm 1", lambda x: x.norm(1, dim=1), (512, 128))
op("norm inf", lambda x: x.norm(float("inf"), dim=1), (512, 128))
op("normalize", F.normalize, (512, 128))
op("renorm", lambda x: x.renorm(2, 0, 1.0), (64, 32))
op("diff", lambda x: x.diff(), (512, 128))
op("roll", lambda x: x.roll((3, 5), (0, 1)), (512, 128))
op("flip", lambda x: x.flip(1), (512, 128))
op("repeat", lambda x: x.repeat(2, 3), (256, 128))
op("repeat_interleave", lambda x: x.repeat_interleave(3, 1), (256, 128))
op("tile, expand", lambda x: x.unsqueeze(1).expand(64, 8, 128) * 2, (64, 128))
op("kron", torch.kron, (32, 32), (16, 16))
op("outer", torch.outer, (400,), (300,))
op("cross", lambda x, y: torch.linalg.cross(x, y), (20000, 3), (20000, 3))
op("tril", torch.tril, (256, 256))
op("diagonal", lambda x: x.diagonal(dim1=1, dim2=2), (64, 32, 32))
op("diag_embed", torch.diag_embed, (64, 32))
op("trapezoid", lambda x: torch.trapezoid(x, dim=1), (512, 128))
op("gelu", F.gelu, (512, 256))
op("silu", F.silu, (512, 256))
op("glu", F.glu, (512, 256))
op("mish", F.mish, (512, 256))
op("softplus", F.softplus, (512, 256))
op("hardswish", F.hardswish, (512, 256))
op("clamp", lambda x: x.clamp(-1, 1), (512, 256))
op("clamp by tensors", torch.clamp, (512, 256), (512, 1), (512, 1))
op("minimum", torch.minimum, (512, 128), (512, 128))
op("atan2", torch.atan2, (512, 128), (512, 128))
op("pow", lambda x, y: x.abs() ** y, (512, 128), (512, 128))
op("lerp", torch.lerp, (512, 128), (512, 128), (512, 1))
op("addcmul", torch.addcmul, (512, 128), (512, 128), (512, 128))
op("logaddexp", torch.logaddexp, (512, 128), (512, 128))
op(
    "complex product",
    lambda x, y: torch.view_as_complex(x) * torch.view_as_complex(y),
    (256, 128, 2),
    (256, 128, 2),
)
op("polar", lambda r, a: torch.polar(r.abs(), a), (256, 128), (256, 128))
op(
    "stft",
    lambda x: torch.stft(x, 64, 16, window=torch.hann_window(64), return_complex=True),
    (2, 2048),
)
op("rfft 512", lambda x: torch.fft.rfft(x), (16, 512))
op("matrix norm", lambda x: torch.linalg.matrix_norm(x), (64, 32, 32))
op("dropout", lambda x: F.dropout(x, 0.5), (512, 256))
op(
    "segment_reduce",
    lambda x: torch.segment_reduce(x, "mean", lengths=torch.full((256,), 8)),
    (2048, 32),
)
op(
    "histogram by cdf",
    lambda x: (x.unsqueeze(2) - torch.linspace(-1, 1, 16)).sigmoid().diff(dim=2).mean(1),
    (64, 128),
)

# Linear algebra


def spd(x: Tensor) -> Tensor:
    return x @ x.mT / x.shape[-1] + torch.eye(x.shape[-1])


op("inverse", lambda x: torch.linalg.inv(x + 8 * torch.eye(16)), (16, 16, 16))
op("inverse 64", lambda x: torch.linalg.inv(x + 16 * torch.eye(64)), (64, 64))
op("solve", lambda a, b: torch.linalg.solve(a + 8 * torch.eye(16), b), (16, 16, 16), (16, 16, 4))
op("cholesky", lambda x: torch.linalg.cholesky(spd(x)), (16, 16, 16))
op("cholesky 64", lambda x: torch.linalg.cholesky(spd(x)), (64, 64))
op(
    "triangular",
    lambda a, b: torch.linalg.solve_triangular(a.tril() + 8 * torch.eye(16), b, upper=False),
    (16, 16, 16),
    (16, 16, 4),
)
op("qr", lambda x: torch.linalg.qr(x)[1], (16, 16, 16))
op("svdvals", torch.linalg.svdvals, (16, 16, 16))
op("eigvalsh", lambda x: torch.linalg.eigvalsh(x + x.mT), (16, 16, 16))
op("det", lambda x: torch.linalg.det(x / 4), (16, 16, 16))
op("logdet", lambda x: torch.logdet(spd(x)), (16, 16, 16))
op("slogdet", lambda x: torch.linalg.slogdet(x)[1], (16, 16, 16))
op("matrix_exp", lambda x: torch.linalg.matrix_exp(x / 4), (4, 8, 8))
op("pinv", torch.linalg.pinv, (8, 8, 6))
op("lstsq", lambda a, b: torch.linalg.lstsq(a, b).solution, (8, 8, 6), (8, 8, 2))


# A loss for each sample, and their mean


def samples(n: int, norm: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A perceptron on ``n`` samples, with batch norm or without."""
    parts = [[nn.Linear(a, 32), *[nn.BatchNorm1d(32)] * norm, nn.Tanh()] for a in (16, 32)]
    m = nn.Sequential(*parts[0], *parts[1], nn.Linear(32, 4))
    x, y = randn(n, 16), torch.arange(n) % 4
    return m, lambda: F.cross_entropy(m(x), y, reduction="none")


def contrasted(n: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    m, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), randn(n, 16)
    z = x + 0.1 * randn(n, 16)

    def f() -> Tensor:
        a, b = F.normalize(m(x)), F.normalize(m(z))
        return F.cross_entropy(a @ b.t() / 0.1, torch.arange(n), reduction="none")

    return m, f


class Gpt(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 32), nn.Embedding(16, 32)
        made = [nn.TransformerEncoderLayer(32, 4, 128, 0.0, "gelu", batch_first=True) for _ in "12"]
        self.layers, self.out = nn.ModuleList(made), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for each in self.layers:
            h = each(h, src_mask=mask, is_causal=True)
        found: Tensor = self.out(h)
        return found


def sequences(n: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    m, (x, y) = Gpt(), torch.randint(64, (2, n, 16))
    return m, lambda: F.cross_entropy(m(x).transpose(1, 2), y, reduction="none").mean(1)


def both(name: str, make: Callable[[], tuple[nn.Module, Callable[[], Tensor]]]) -> None:
    def mean() -> tuple[nn.Module, Callable[[], Tensor]]:
        m, f = make()
        return m, lambda: f().mean()

    net(f"mean of losses: {name}", mean)
    net(f"losses: {name}", make)


for n in (64, 256):
    both(f"MLP {n}", lambda n=n: samples(n, False))
    both(f"batch norm {n}", lambda n=n: samples(n, True))
    both(f"contrastive {n}", lambda n=n: contrasted(n))
both("GPT 8", lambda: sequences(8))


def measured(case: Case, seconds: float) -> tuple[float, float, float]:
    torch.manual_seed(0)
    model, f, kind = case()
    with gt.watch(model) as watched:
        loss = f()
    leaves = [p for p in model.parameters() if p.requires_grad]
    best = [float("inf")] * 3
    begin, rounds = time.process_time(), 0
    while rounds < 2 or (time.process_time() - begin < seconds and rounds < 40):
        rounds += 1
        for _ in range(3):
            t = time.process_time()
            torch.autograd.grad(loss.sum(), leaves, retain_graph=True, allow_unused=True)
            best[0] = min(best[0], time.process_time() - t)
        t = time.process_time()
        trace = watched.trace(loss)
        best[1] = min(best[1], time.process_time() - t)
        t = time.process_time()
        trace.influence(kind)
        best[2] = min(best[2], time.process_time() - t)
    return best[0], best[1], best[2]


def lines(patterns: list[str], seconds: float = 0.6) -> Iterator[str]:
    for name, case in CASES.items():
        if patterns and not any(fnmatch(name, p) for p in patterns):
            continue
        try:
            backward, trace, influence = (1e3 * t for t in measured(case, seconds))
        except Exception as error:
            yield f"{name:34} {type(error).__name__}: {str(error)[:120]!r}"
            continue
        ratio = (trace + influence) / backward
        times = f"{backward:9.2f} {trace:9.1f} {influence:9.1f} {ratio:8.1f}"
        yield f"{name:34} {times}{'  ***' if ratio > 15 else ''}"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(
        f"{'':34} {'backward':>9} {'recording':>9} {'influence':>9} {'times':>8}   (ms of CPU time)"
    )
    for line in lines(sys.argv[1:]):
        print(line, flush=True)
