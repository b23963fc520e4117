"""The kernels on a GPU give the bits of plain torch on the CPU. Skipped where there is none.

``test_emulated`` runs the same cases, and the same sources, on the processor.
"""

from __future__ import annotations

import devices
import measured
import numpy as np
import pytest
import test_captured_pass as passes
import torch
from backends import plainly
from random_transformers import gpt2
from test_aggregate import drawn
from test_maps import KINDS

import gradtrace as gt
from gradtrace.ir import memory
from gradtrace.kernels import backend_of, cuda_contraction, cuda_tiling, tuning
from gradtrace.tracing.aggregate import LeafSums, Reach, groups_of
from gradtrace.tracing.kept_plans import KEPT, forget
from gradtrace.tracing.provenance import words_of

SHAPES = [
    (1, 128, 128, 300),
    (2, 130, 257, 170),
    (1, 300, 1096, 20),
    (1, 64, 9000, 16),
    (12, 100, 64, 100),
    (1, 3, 40_000, 64),
    (3, 2, 1, 5),
]
CASES = [
    (torch.float64, False),
    (torch.float64, True),
    (torch.float32, False),
    (torch.float32, True),
]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_a_plan_covers_all_k_in_shares_of_whole_blocks() -> None:
    for k in (1, 15, 16, 17, 768, 4096, 4097, 40_000, 10_000_000):
        for m, n in ((1, 1), (12_800, 128), (1_280_000, 64)):
            found = cuda_tiling.plan(1, m, n, k, 132)
            tiles = -(-m // found.rows) * -(-n // found.columns)
            assert found.padded >= k > found.padded - max(found.block, cuda_tiling.K_PER_STEP)
            assert found.padded % found.block == 0
            assert found.total == tiles * found.steps
            assert found.parts * found.share >= found.total > (found.parts - 1) * found.share
            if found.cut:
                assert found.share * cuda_tiling.K_PER_STEP % found.block == 0
            assert (
                min(found.share, found.steps) * cuda_tiling.K_PER_STEP
                <= cuda_tiling.MAX_K_BLOCKS * found.block
            )


def test_shares_are_equal_and_tiles_fit() -> None:
    """A share for each processor, of GPT-2's shapes; few columns or few rows make no zeros."""
    for i, m, k, n in ((1, 768, 1024, 3072), (1, 1024, 3072, 768), (12, 1024, 1024, 64)):
        found = cuda_tiling.plan(i, m, n, k, 132)
        assert 120 <= found.parts <= 132
        assert found.total * cuda_tiling.K_PER_STEP * found.rows * found.columns == i * m * k * n
    assert cuda_tiling.plan(12, 1024, 64, 1024, 132)[1:3] == (256, 64)
    assert cuda_tiling.plan(12, 64, 1024, 1024, 132)[1:3] == (64, 256)
    for k in (4096, 4097):  # other tiles have no larger blocks
        found = cuda_tiling.plan(1, 1024, 64, k, 132)
        assert found[:3] == ((16, 256, 64) if k == 4096 else (32, 128, 128))


@pytest.mark.parametrize("asked", [(True, False), (True, True), (False, True)], ids=str)
def test_a_workspace_holds_all_and_nothing_overlaps(asked: tuple[bool, bool]) -> None:
    for m, n, k in ((1, 1, 1), (130, 257, 40_000), (300, 20, 150)):
        for lie in ((None, None), ((9, 1, 300), (9, 150, 1))):
            how = cuda_tiling.contraction_plan((3, m, n), k, lie, asked, 132)
            at, where = how.plan, how.space
            assert list(where) == sorted(where)
            assert all(start % 16 == 0 for start in where)
            area = at.parts * at.rows * at.columns if at.cut else 0
            assert where.right - where.left >= 4 * 3 * at.padded * m * how.copied[0]
            assert where.value - where.right >= 4 * 3 * at.padded * n * how.copied[1]
            assert where.blocks - where.value >= 4 * 3 * m * n * (not asked[0])
            assert where.parts - where.blocks >= 3 * m * n * asked[1]
            assert where.numbers - where.parts >= 4 * area
            assert where.size - where.numbers >= area * asked[1]
            assert how.shared[0] < 227 << 10
            assert how.shared[1] <= tuning.SEARCH_SHARED_MAX_BYTES
            assert how.joined == (asked[1] or at.cut)


def test_cpu_tensors_are_not_served() -> None:
    assert not cuda_contraction.serves(torch.ones(1, 2, 2), torch.ones(1, 2, 2))


@on_a_gpu
@pytest.mark.parametrize("shape", [*SHAPES, *devices.SMALL], ids=str)
@pytest.mark.parametrize("dtype", devices.FLOATS, ids=str)
@pytest.mark.parametrize("name", devices.DATA)
def test_contraction(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "MAX_PRODUCTS", 1 << 26)
    devices.contraction("cuda", shape, name, dtype)


@on_a_gpu
@pytest.mark.parametrize("worth", [0, 1 << 62], ids=["CUDA", "Triton"])
def test_windows_are_read_where_they_lie(worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "CUDA_MIN_PRODUCTS", worth)
    devices.windows("cuda", 10)
    devices.mixed("cuda")
    devices.nothing("cuda")


@on_a_gpu
@pytest.mark.parametrize("worth", [0, 1 << 62], ids=["CUDA", "Triton"])
@pytest.mark.parametrize("dtype", devices.FLOATS, ids=str)
def test_marks_through_contractions_in_all_their_forms(
    dtype: torch.dtype, worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "CUDA_MIN_PRODUCTS", worth)
    devices.carried("cuda", dtype)


@on_a_gpu
def test_a_contraction_too_large_for_the_room_goes_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "SMALL_WORKSPACE_BYTES", 0)
    monkeypatch.setattr(tuning, "CUDA_MIN_PRODUCTS", 0)
    for most in (3_000_000, 700_000, 1):
        monkeypatch.setattr(tuning, "WORKSPACE_MAX_BYTES", most)
        devices.contraction("cuda", (2, 700, 64, 300), "ties", torch.float32)


@on_a_gpu
@pytest.mark.parametrize("many", [1, 2, 5, 8])
def test_the_largest_few(many: int) -> None:
    devices.top("cuda", many, [(2, 3, 5, 4), (1, 2, 0, 3), (3, 130, 257, 170)])


@on_a_gpu
def test_merge() -> None:
    devices.merge("cuda", True)


@on_a_gpu
def test_the_larger_of_two_terms() -> None:
    devices.duel("cuda")


@on_a_gpu
def test_ids_of_products_of_half_precision() -> None:
    devices.scaled("cuda")
    devices.underflows("cuda")


@on_a_gpu
def test_tally() -> None:
    devices.tally("cuda", True)
    devices.tally_of_matrices("cuda")
    devices.tally_of_far_numbers("cuda")


@on_a_gpu
def test_leaves_are_counted_together() -> None:
    devices.leaves("cuda", 5)


@on_a_gpu
@pytest.mark.parametrize("pairs", [1, 7])
@pytest.mark.parametrize("room", [1, 3000, 1 << 28])
def test_influence_does_not_depend_on_what_is_counted_together(
    room: int, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        monkeypatch.setattr(memory, "LEAF_BATCH_MAX_BYTES", 0)
        wanted = devices.influences("cuda", dtype, pairs), devices.cancelling("cuda")
        monkeypatch.setattr(memory, "LEAF_BATCH_MAX_BYTES", room)
        assert (devices.influences("cuda", dtype, pairs), devices.cancelling("cuda")) == wanted


@on_a_gpu
@pytest.mark.parametrize("pairs", [1, 7])
def test_sums_over_components_are_always_the_same_bits(pairs: int) -> None:
    """Many terms for each pair and component, of all sizes, so that any other order would show."""
    bits = [1, 1 << 61 | 1 << 72, 1 << 60, 2 << 60]
    here = [
        each._replace(counts=each.counts.cuda(), sums=torch.randn_like(each.sums).exp().cuda())
        for each in drawn(3, 2000, pairs)
    ]
    everything = Reach(words_of([(1 << 100) - 1] * 40), np.zeros((2, 0), np.int64))
    place, totals = [n % 40 for n in range(len(here))], np.full(len(here), 99.0)
    backend = backend_of(here[0].counts)
    first, *others = (
        groups_of(here).added(LeafSums(pairs, everything, place, totals, bits), backend)
        for _ in range(10)
    )
    assert first.through.any()
    for other in others:
        assert all(np.array_equal(mine, wanted) for mine, wanted in zip(other, first))


@on_a_gpu
def test_reduce() -> None:
    devices.reduce("cuda", True)


@on_a_gpu
def test_scatter() -> None:
    devices.scatter("cuda", True)


@on_a_gpu
def test_gather() -> None:
    devices.gather("cuda")


@on_a_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_normalise(kind: str) -> None:
    devices.normalise("cuda", kind, (1, 2, 17, 65, 127, 300, 768, 1100), (4097,))


@on_a_gpu
def test_normalise_what_is_not_finite() -> None:
    devices.normalise_many("cuda", 3000)
    devices.normalise_odd("cuda", 10)
    devices.normalise_expanded("cuda")
    devices.normalise_lying("cuda")
    devices.normalised_sums("cuda")


@on_a_gpu
def test_terms_with_the_same_marks() -> None:
    devices.shared_sums("cuda")


@on_a_gpu
def test_numbers_of_marks() -> None:
    devices.numbering("cuda", True)


DEVICES = [
    pytest.param("cpu", torch.float64, False),
    *[pytest.param("cpu", *each, marks=pytest.mark.thorough) for each in CASES[1:]],
    *[pytest.param("cuda", *each, marks=on_a_gpu) for each in CASES],
]


@pytest.mark.parametrize(("device", "dtype", "pairs"), DEVICES)
def test_measures(device: str, dtype: torch.dtype, pairs: bool) -> None:
    """Influence by all rules, coverage, agreement, decompose, mass, spectrum and choices are those
    of plain torch on the CPU.
    """
    wanted = plainly(measured.measures, "cpu", dtype, pairs)
    measured.agree(measured.measures(device, dtype, pairs), wanted, dtype)


@on_a_gpu
@pytest.mark.parametrize("name", ["gpt2", "conv", "gather", "sparse"])
def test_pairs_of_scalars_are_counted(name: str) -> None:
    """What the operators connect is counted, wherever their tensors are."""
    assert devices.scalar_edges(name, "cuda") == devices.scalar_edges(name, "cpu") > 0


@on_a_gpu
@pytest.mark.parametrize("recurrent", [torch.nn.LSTM, torch.nn.GRU])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_measures_of_fused_cells(recurrent: type[torch.nn.RNNBase], dtype: torch.dtype) -> None:
    """Of modules they are those of the CPU, where the cells are written out."""
    wanted = plainly(measured.of_modules, "cpu", dtype, recurrent)
    measured.agree(measured.of_modules("cuda", dtype, recurrent), wanted, dtype)


@on_a_gpu
@pytest.mark.parametrize("rule", ["greedy", "edge"])
@pytest.mark.parametrize("above", [4, 512])
def test_captured_passes(rule: str, above: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph gives the table of the pass that it was captured from, with other weights and inputs,
    ties, zeros, and tables that are too small.
    """
    passes.compacting(monkeypatch, above)
    forget()
    torch.manual_seed(0)
    model = passes.Towers().cuda()
    for step in range(16):
        x = torch.randn(5, 4) if step % 5 else torch.randint(-1, 2, (5, 4)).float()
        trace = passes.traced(model, x.cuda(), rule=rule)
        assert trace.influence() == passes.uncaptured(trace), step
        if step == 2 and above == 4:
            fixed = passes.captured_pass().fixed
            fixed.capacities = [1] * len(fixed.capacities)
        if step == 3 and above == 4:
            assert KEPT.summary().rows[0].executed.endswith("more than 1")
        passes.changed(model)
        if step % 4 == 3:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.mul(3).round())
    assert KEPT.summary().rows[0].graphs > 3
    held = KEPT.summary().device_bytes
    assert 0 < held < 1 << 30
    forget()


@on_a_gpu
def test_a_captured_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings, attention and norms, by a graph and what is left to be done after it."""
    pytest.importorskip("transformers")
    passes.compacting(monkeypatch, 16)
    forget()
    torch.manual_seed(0)
    sizes = {"vocab_size": 900, "n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 32}
    with torch.device("cuda"):
        model = gpt2(32, **sizes).model
    for step in range(7):
        ids = torch.randint(0, 900, (1, 32), device="cuda")
        with gt.watch(model) as watch:
            loss = model(input_ids=ids, labels=ids).loss
        trace = watch.trace(loss)
        assert trace.influence() == passes.uncaptured(trace), step
        passes.changed(model)
    assert KEPT.summary().rows[0].graphs == 4
    forget()
