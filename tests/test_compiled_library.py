"""With and without the compiled library."""

from __future__ import annotations

import logging
import os
import subprocess
from logging.handlers import BufferingHandler
from pathlib import Path

import fresh
import pytest
import torch

from gradtrace.errors import GradtraceError
from gradtrace.kernels import cpu_library, cuda_launch

SCRIPT = """
import torch, gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.kernels import cpu_library
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
for _ in range(2):
    with gt.watch(model) as watch:
        loss = model(torch.randn(3, 5, generator=torch.Generator().manual_seed(1))).square().sum()
    trace = watch.trace(loss, rule="viterbi")
    print(trace.influence(), trace.path("0.weight", (1, 2)))
print("library" if cpu_library.library() else "no library")
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return fresh.python("-c", SCRIPT, env={**os.environ, **environment}, check=True)


def test_without_the_library_results_are_the_same_and_one_line_says_so(tmp_path: Path) -> None:
    there = run()
    missing = run(GRADTRACE_NATIVE=str(tmp_path / "none.so"))
    assert "no library" in missing.stdout
    assert missing.stderr.count("without its compiled kernels") == 1
    assert there.stdout.splitlines()[:-1] == missing.stdout.splitlines()[:-1]
    silent = run(GRADTRACE_NATIVE="0")
    assert "no library" in silent.stdout and not silent.stderr


def test_a_file_that_is_no_library_is_not_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    found = run(GRADTRACE_NATIVE=str(broken))
    assert "no library" in found.stdout
    assert "broken.so cannot be loaded" in found.stderr


@pytest.mark.parametrize(
    ("status", "error"), [(1, MemoryError), (2, RuntimeError), (3, GradtraceError)]
)
def test_what_a_kernel_could_not_do_is_raised(status: int, error: type[Exception]) -> None:
    cpu_library.checked(0)
    with pytest.raises(error):
        cpu_library.checked(status)


@pytest.mark.parametrize("error", [ImportError, RuntimeError, ValueError, TypeError])
def test_a_torch_that_compiles_otherwise_leaves_the_gpu_to_plain_torch(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def module(*_: object) -> None:
        raise error("not as it was")

    told = BufferingHandler(9)
    monkeypatch.setattr(cuda_launch, "_module", module)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(logging.getLogger("gradtrace"), "handlers", [told])
    assert cuda_launch._compiles.__wrapped__(0, "contract.cu") is False
    (record,) = told.buffer
    text = record.getMessage()
    assert "without its CUDA kernels of contract.cu, slower: not as it was" in text


def test_what_is_compiled_comes_alone_or_with_a_name() -> None:
    assert cuda_launch._binary(b"text") == cuda_launch._binary((b"text", "name")) == b"text"
