"""The contraction in (max, ×) over the matrix product of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace import kernels
from gradtrace.benchmarks.results import ResultColumn, Section, Setting
from gradtrace.benchmarks.trained import BATCH, LENGTH, products
from gradtrace.experiments.harness.interleaved_timing import Way, Ways, interleaved

Shape = tuple[int, int, int]

SHAPES: tuple[Shape, ...] = ((512, 512, 512), (2048, 768, 3072), (64, 10_000, 1_000))
LITTLE: tuple[Shape, ...] = ((16, 20, 24),)
OTHERS: Shape = (512, 512, 512)
"""Where ways are compared that take 50 to 800 times as long as the matrix product."""

BLOCK = 32
"""Terms at a time in torch-semiring-einsum: its fastest block here."""

MATMUL, MARKS, VALUE, INDEX = "torch.matmul", "value and marks", "value", "value and index"


class Data(NamedTuple):
    """A kind of numbers: how both factors are drawn, and the most that value and marks may take."""

    left: Callable[..., Tensor]
    right: Callable[..., Tensor]
    limit: float | None = None


def _relu(*shape: int) -> Tensor:
    return torch.randn(*shape).relu()


def _signs(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape) * 2.0 - 1.0


KINDS = {
    "Gaussian": Data(torch.randn, torch.randn, 1.7),
    "all ±1 (worst)": Data(_signs, _signs, 3.5),
    "relu × uniform": Data(_relu, torch.rand),
}


def contractions(setting: Setting) -> Section:
    """``maxₖ |a[m, k] · b[k, n]|`` with the winner's marks, on data of several kinds."""
    section = Section("Contraction in (max, ×), over `torch.matmul`", _columns("data"))
    for name, kind in KINDS.items():
        for m, k, n in LITTLE if setting.quick else SHAPES:
            a, b = kind.left(m, k), kind.right(k, n)
            _compared(section, setting, name, (a, b), setting.limit(kind.limit))
    section.note(
        "float32; marks are one word of 32 bits for each element of a. Survivors: the share of "
        "terms that the bounds let through, if bounds are used; where most are, they are not."
    )
    return section


def trained(setting: Setting) -> Section:
    """The same on the products in the backward pass of a trained transformer."""
    section = Section(
        "Contraction on gradients and weights of a trained model", _columns("product")
    )
    steps, size = (3, 16) if setting.quick else (200, 256)
    found = products(steps, size)
    for name, (a, b) in found.factors.items():
        _compared(section, setting, name, (a, b), None)
    section.note(
        f"A transformer of two layers, {size} wide, over characters of Python's standard library, "
        f"trained for {steps} steps (loss {found.before:.2f} before, {found.after:.2f} after). An "
        "activation gradient is output gradient × weight, a weight gradient output gradient × "
        f"input, of a linear layer, on one batch of {BATCH * LENGTH:,} characters."
    )
    return section


def others(setting: Setting) -> Section:
    """Other ways to the maximum and its index."""
    m, k, n = LITTLE[0] if setting.quick else OTHERS
    section = Section(
        f"Other ways to value and index, Gaussian data, ({m}, {k}, {n})",
        [
            ResultColumn("way"),
            ResultColumn("ms", ".2f"),
            ResultColumn("over torch.matmul", ".1f"),
            ResultColumn("rounds", "d"),
        ],
    )
    timed = interleaved(
        _other_ways(torch.randn(m, k), torch.randn(k, n), setting), setting.turns(5)
    )
    for way in timed.seconds:
        section.add(way, timed.best(way) * 1e3, timed.ratio(way), timed.rounds)
    section.note(
        "At one shape only: on the others these take up to a minute. torch-semiring-einsum adds "
        f"logarithms, which are taken beforehand, in blocks of {BLOCK} terms."
    )
    return section


def _columns(first: str) -> list[ResultColumn]:
    return [
        ResultColumn(first),
        ResultColumn("(m, k, n)"),
        ResultColumn("torch.matmul, ms", ".2f"),
        ResultColumn(MARKS, ".2f"),
        ResultColumn("target", ".1f", limits=MARKS),
        ResultColumn(f"{MARKS}, median", ".2f"),
        ResultColumn(VALUE, ".2f"),
        ResultColumn(INDEX, ".2f"),
        ResultColumn("survivors", ".1%"),
        ResultColumn("rounds", "d"),
    ]


def _compared(
    section: Section,
    setting: Setting,
    name: str,
    factors: tuple[Tensor, Tensor],
    limit: float | None,
) -> None:
    a, b = factors
    timed = interleaved(_ways(a, b), setting.turns(20), patience=20, collect=False)
    section.add(
        name,
        str((a.shape[0], *b.shape)),
        timed.baseline * 1e3,
        timed.ratio(MARKS),
        limit,
        timed.typical(MARKS),
        timed.ratio(VALUE),
        timed.ratio(INDEX),
        kernels.survivors(a[None], b[None]),
        timed.rounds,
    )


def _ways(a: Tensor, b: Tensor) -> Ways:
    ids = torch.randint(0, 2**31 - 1, (1, *a.shape), dtype=torch.int32)
    x, y, contract = a[None], b[None], kernels.backend_of(a).contract
    return {
        MATMUL: _ready(lambda: torch.matmul(a, b)),
        MARKS: _ready(lambda: contract(x, y, ids=ids)),
        VALUE: _ready(lambda: contract(x, y)),
        INDEX: _ready(lambda: contract(x, y, index=True)),
    }


def _other_ways(a: Tensor, b: Tensor, setting: Setting) -> Ways:
    ways = {
        MATMUL: _ready(lambda: torch.matmul(a, b)),
        "gradtrace": _ready(lambda: kernels.winner(a[None], b[None])),
        "torch broadcasting, in chunks": _ready(
            lambda: kernels.Reference(a.device).contract(a[None], b[None], index=True)
        ),
    }
    if setting.has("torch_semiring_einsum", "the comparison with torch-semiring-einsum"):
        ways["torch-semiring-einsum"] = _einsum(a, b)
    return ways


def _einsum(a: Tensor, b: Tensor) -> Way:
    from torch_semiring_einsum import compile_equation, log_viterbi_einsum_forward

    equation = compile_equation("mk,kn->mn")
    logs = a.abs().log(), b.abs().log()
    return _ready(lambda: log_viterbi_einsum_forward(equation, *logs, block_size=BLOCK))


def _ready(run: Callable[[], object]) -> Way:
    """A way that needs no preparation."""
    return lambda: run
