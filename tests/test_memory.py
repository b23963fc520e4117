"""What a pass takes, told before it begins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from sanitized import UNSANITIZED
from torch import nn

import gradtrace as gt
from gradtrace.errors import TooLarge
from gradtrace.ir import memory
from gradtrace.ir.memory import ID_BYTES
from gradtrace.ir.passes import storage
from gradtrace.ir.passes.provenance import analyse_provenance
from gradtrace.kernels import backend_of
from gradtrace.traced import Trace
from gradtrace.tracing import tally, uniform_tally
from gradtrace.tracing.counting import component_finder
from gradtrace.tracing.traced_value import sizes


def chain(layers: int, keep: bool) -> Trace:
    x = torch.ones(1000, requires_grad=True)
    y = x
    for _ in range(layers):
        y = y.tanh()
    trace = gt.trace(y.sum(), names={"x": x})
    if not keep:
        trace.program.kept.clear()
    return trace


def test_a_chain_holds_two_values_at_a_time() -> None:
    """A value and the one it becomes, each of float32 with a mark."""
    short, long = (memory.streaming(chain(n, keep=False).program) for n in (5, 50))
    assert short == long == 2 * 1000 * (4 + ID_BYTES)


def test_kept_values_cost_their_marks_only() -> None:
    program = chain(5, keep=True).program
    assert memory.streaming(program) == 2 * 1000 * ID_BYTES
    assert memory.streaming(program, kept=False) == 2 * 1000 * (
        4 + ID_BYTES
    )  # of no use to viterbi


def expanded(rule: str) -> Trace:
    """One user of y sums three contributions, the other has one."""
    x = torch.ones(1000, requires_grad=True)
    y = x * 1.0
    loss = y.expand(3, 1000).sum() + (y * 2.0).sum()
    trace = gt.trace(loss, names={"x": x}, rule=rule)
    trace.program.kept.clear()
    return trace


def test_sizes_of_edges_count() -> None:
    """By ``edge`` the sums of ``expand`` are held with the size of their largest contribution."""
    trace = expanded("edge")
    chosen = component_finder(trace).choose("operators")
    bounds = analyse_provenance(trace.program, chosen.component_bits)
    (sized,) = storage._sized(trace.program, bounds)
    needed = memory.streaming(trace.program, kept=False, sized={sized})
    assert needed - memory.streaming(trace.program, kept=False) == 1000 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_size_of_an_edge_is_as_wide_as_it_is_compared(dtype: torch.dtype) -> None:
    assert memory.size_bytes(dtype) == sizes(torch.ones(1, dtype=dtype)).element_size()


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
def test_the_estimate_knows_the_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as much memory as greedy takes, edge is refused: before it begins."""
    trace = expanded(rule)
    free = memory.streaming(trace.program, kept=False, narrow=True)
    monkeypatch.setattr(memory, "available", lambda device: free)
    if rule == "edge":
        with pytest.raises(TooLarge, match="influence takes about"):
            trace.influence("operators")
    else:
        assert len(trace.influence("operators"))


def test_whole_counts_every_value_that_was_not_kept() -> None:
    short, long = (memory.whole(chain(n, keep=False).program) for n in (5, 50))
    assert long - short == 45 * 1000 * 4
    kept = chain(5, keep=True).program
    assert memory.whole(kept) < 5 * 1000 * 4 < memory.whole(kept, kept=False)


def test_too_large_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = chain(3, keep=False)
    monkeypatch.setattr(memory, "available", lambda device: 10_000)
    with pytest.raises(TooLarge, match=r"influence takes about 15\.6 KiB, and 9\.8 KiB are free"):
        trace.influence("operators")
    with pytest.raises(TooLarge, match=r"following paths takes about .* fewer samples"):
        trace.path("x", 0)
    monkeypatch.setattr(memory, "available", lambda device: 16_000)
    assert len(trace.influence("operators"))
    monkeypatch.setattr(memory, "available", lambda device: None)  # nobody tells
    assert len(trace.influence("operators"))


def test_semirings_hold_more_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """By viterbi every step makes sizes of weights, products and what they are compared with."""
    x = torch.ones(3000, requires_grad=True)
    trace = gt.trace(x.tanh().sum(), names={"x": x}, rule="viterbi")
    beside = memory.SEMIRING_TEMPORARIES * 3000 * 4
    needed = memory.streaming(trace.program, kept=False) + beside
    monkeypatch.setattr(memory, "available", lambda device: needed - 1)
    with pytest.raises(TooLarge, match="following paths takes about"):
        trace.path("x", 0)
    monkeypatch.setattr(memory, "available", lambda device: needed)
    assert len(trace.path("x", 0).steps)


def attention_in_max(queries: int, pieces: bool) -> int:
    """How much the memory of a process grows while softmax over as many keys is computed in MAX, in
    values of that size; ``pieces``: some rows at a time.
    """
    code = f"""
import torch
from gradtrace.linops import Normaliser, tuning
from gradtrace.semirings import MAX
if not {pieces}:
    tuning.SEMIRING_PIECE_ELEMENTS = 1 << 40
def soft(n):
    y = torch.softmax(torch.randn(n, n), -1)
    return Normaliser(y, [(-y, y)], [1], (n, n))
soft(64).apply_in((torch.rand(64, 64),), MAX)
m, x = soft({queries}), (torch.rand({queries}, {queries}),)
def told(word):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if word in line)
open("/proc/self/clear_refs", "w").write("5")
before = told("VmRSS")
found = m.apply_in(x, MAX)
print((told("VmHWM") - before) // found[0].nbytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak to reset")
@UNSANITIZED
def test_a_large_softmax_is_computed_some_rows_at_a_time() -> None:
    assert attention_in_max(3000, pieces=True) < 4 < attention_in_max(3000, pieces=False)


def test_this_machine_tells_how_much_is_free() -> None:
    free = memory.available(backend_of(torch.device("cpu")))
    assert free is None or 0 < free < 1 << 60
    assert memory.available(backend_of(torch.device("meta"))) is None


def test_gradients_are_kept_within_bounds() -> None:
    """Recording keeps what it computed anyway, in no more memory than the leaves have."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(200)))  # 3.3 MB of parameters
    with gt.watch(model) as watch:
        loss = model(torch.randn(600, 64)).square().mean()  # 0.15 MB a layer
    kept = watch.trace(loss).program.kept
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept.values()}
    leaves = sum(p.nbytes for p in model.parameters())
    assert 0 < sum(sizes.values()) <= max(leaves, 1 << 24)


class Card:
    """A GPU's memory as PyTorch tells it: free, in all, allocated, reserved, and the share that
    this process may have.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sizes: int, share: float = 1.0) -> None:
        free, total, allocated, reserved = sizes
        told = {
            "mem_get_info": (free, total),
            "memory_stats_as_nested_dict": {
                "allocated_bytes": {"all": {"current": allocated}},
                "reserved_bytes": {"all": {"current": reserved}},
            },
            "get_per_process_memory_fraction": share,
            "get_device_name": "H200",
        }
        for name, answer in told.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)


GPU = torch.device("cuda", 0)


def test_on_a_gpu_what_pytorch_has_reserved_and_nobody_uses_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Card(monkeypatch, 100, 1000, 300, 700)
    assert memory.available(backend_of(GPU)) == 100 + 400
    Card(monkeypatch, 100, 1000, 300, 700, share=0.5)
    assert memory.available(backend_of(GPU)) == 500 - 300
    Card(monkeypatch, 0, 1000, 300, 300, share=0.2)
    assert memory.available(backend_of(GPU)) == 0
    Card(monkeypatch, 100, 1000, 300, 700)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
    assert memory.available(backend_of(GPU)) == 100  # nobody has used it yet


def test_errors_name_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, 1 << 20, 1 << 30, 0, 0)
    wanted = r"^a takes about 2\.0 MiB on the GPU \(cuda:0, H200\), and 1\.0 MiB are free; b$"
    with pytest.raises(TooLarge, match=wanted):
        memory.see(2 << 20, backend_of(GPU), "a", "b")
    wanted = r"^a ran out of memory on the GPU \(cuda:0, H200\) \(1\.0 MiB are free now\); b$"
    with pytest.raises(TooLarge, match=wanted), memory.within(backend_of(GPU), "a", "b"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_running_out_of_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = chain(3, keep=False)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tally.Tally, "add", full)
    monkeypatch.setattr(uniform_tally.UniformTally, "counted", full)
    with pytest.raises(
        TooLarge, match=r"measuring influence ran out of memory on cpu.*sample=10_000"
    ):
        trace.influence("operators")
