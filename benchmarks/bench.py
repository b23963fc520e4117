"""What tracing costs beside PyTorch's backward pass: ``make bench``.

Each row is the time of recording and tracing a loss over that of ``loss.backward()``, in turns in
one process, the best of several rounds: on the CPU, CPU time of one thread, on a GPU, wall time
until the GPU is idle. Losses of the same shape were traced before. Rows of a GPU are run where
there is CUDA.

    python benchmarks/bench.py --out out/benchmarks.json            # all rows that run here
    python benchmarks/bench.py --only LSTM residual --rounds 5      # those whose names have a word
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.kernels import instruction_set

WARM = 3
"""Losses that are traced before time is taken."""

ROUNDS = 9


# Networks -----------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A model, and a function that runs it forward to a loss."""

    model: nn.Module
    loss: Callable[[], Tensor]


def perceptron(sizes: tuple[int, ...], batch: int, act: type[nn.Module]) -> Problem:
    """Linear layers with an activation between them, and cross entropy."""
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), act())]
    model = nn.Sequential(*layers[:-1])
    x, y = torch.randn(batch, sizes[0]), torch.randint(0, sizes[-1], (batch,))
    return Problem(model, lambda: F.cross_entropy(model(x), y))


def chain(layers: int, units: int) -> Problem:
    """A deep narrow network of tanh layers, on one sample."""
    parts = [part for _ in range(layers) for part in (nn.Linear(units, units), nn.Tanh())]
    for part in parts[::2]:
        nn.init.orthogonal_(part.weight)
    model, x = nn.Sequential(*parts), torch.randn(1, units)
    return Problem(model, lambda: model(x).square().mean())


class Residual(nn.Module):
    """Layers ``x + tanh(linear(x))``, and an output layer."""

    def __init__(self, layers: int, units: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(units, units) for _ in range(layers))
        self.output = nn.Linear(units, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.output(x)


def residual(layers: int, units: int, batch: int) -> Problem:
    """``Residual`` with cross entropy."""
    model = Residual(layers, units)
    x, y = torch.randn(batch, units), torch.randint(0, 10, (batch,))
    return Problem(model, lambda: F.cross_entropy(model(x), y))


class Recurrent(nn.Module):
    """A language model of words: embedding, one LSTM layer, output layer."""

    def __init__(self, words: int, units: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, units)
        self.lstm = nn.LSTM(units, units)
        self.output = nn.Linear(units, words)

    def forward(self, ids: Tensor) -> Tensor:  # (time, batch) -> (time, batch, words)
        """Logits of the next word at every step."""
        return self.output(self.lstm(self.embed(ids))[0])


def recurrent(words: int, units: int, steps: int, batch: int) -> Problem:
    """``Recurrent`` on random words, with cross entropy."""
    model, ids = Recurrent(words, units), torch.randint(0, words, (steps + 1, batch))
    return Problem(model, lambda: F.cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten()))


def gpt2(tokens: int, device: str = "cpu") -> Problem:
    """A transformer of GPT-2's size: 12 layers of 768, 50,257 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device(device):
        return causal(GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLM")), tokens)


def llama(tokens: int, **sizes: int) -> Problem:
    """A transformer of Llama's build in bfloat16, on the GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return causal(LlamaForCausalLM(LlamaConfig(**sizes)), tokens)
    finally:
        torch.set_default_dtype(torch.float32)


def causal(model: nn.Module, tokens: int) -> Problem:
    """A language model on random words, as in ``eval()``."""
    model.eval()
    device = next(model.parameters()).device
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)
    return Problem(model, lambda: model(input_ids=ids, labels=ids).loss)


BILLION = {
    "vocab_size": 32_000,
    "hidden_size": 2_048,
    "intermediate_size": 5_632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
EIGHT_BILLION = {
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


# Rows ---------------------------------------------------------------------------------------------


EXACT, SAMPLED, MASS, LAYERS = "influence", "influence, 10,000 sampled", "mass", "decompose, layers"

WAYS: Mapping[str, Callable[[Any, Problem], object]] = {
    EXACT: lambda trace, problem: trace.influence(sample=None).shares,
    SAMPLED: lambda trace, problem: trace.influence(sample=10_000).shares,
    MASS: lambda trace, problem: trace.mass().shares,
    LAYERS: lambda trace, problem: trace.decompose(blocks(problem.model)).shares,
}


def blocks(model: nn.Module) -> list[str]:
    """The names of a model's layers: those that are numbers."""
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2].isdigit()]


class Row(NamedTuple):
    """A network, and for each way to ask how much it may cost, in backward passes."""

    name: str
    make: Callable[[], Problem]
    ways: Mapping[str, float]
    device: str = "cpu"


ROWS = (
    Row(
        "784-512-512-10 tanh, batch 32",
        lambda: perceptron((784, 512, 512, 10), 32, nn.Tanh),
        {EXACT: 5},
    ),
    Row(
        "784-512-512-10 ReLU, batch 32",
        lambda: perceptron((784, 512, 512, 10), 32, nn.ReLU),
        {EXACT: 4.5},
    ),
    Row("GPT-2 size, 128 tokens", lambda: gpt2(128), {EXACT: 2.6}),
    Row("LSTM 10,000 × 1,000, batch 4", lambda: recurrent(10_000, 1_000, 35, 4), {EXACT: 1.3}),
    Row("300 layers × 20 units", lambda: chain(300, 20), {EXACT: 5.5}),
    Row("50 residual layers × 32, batch 32", lambda: residual(50, 32, 32), {EXACT: 12}),
    Row(
        "GPT-2, 1,024 tokens",
        lambda: gpt2(1024, "cuda"),
        {EXACT: 4, SAMPLED: 3, MASS: 3.5, LAYERS: 7.5},
        "cuda",
    ),
    Row("GPT-2, 128 tokens", lambda: gpt2(128, "cuda"), {EXACT: 7}, "cuda"),
    Row(
        "Llama 1.1B bfloat16, 1,024 tokens",
        lambda: llama(1024, **BILLION),
        {EXACT: 16, SAMPLED: 5, MASS: 7.5},
        "cuda",
    ),
    Row(
        "Llama 8B bfloat16, 512 tokens",
        lambda: llama(512, **EIGHT_BILLION),
        {EXACT: 29, SAMPLED: 7},
        "cuda",
    ),
)
"""What is measured, the rows of a CPU first."""


# Timing -------------------------------------------------------------------------------------------


def backward(problem: Problem) -> Callable[[], object]:
    """Run forward without a watch; what is timed is ``loss.backward()``."""
    problem.model.zero_grad(set_to_none=True)
    return problem.loss().backward


def traced(problem: Problem, ask: Callable[[Any, Problem], object]) -> Callable[[], object]:
    """Run forward under a watch; what is timed is recording, and one question."""
    problem.model.zero_grad(set_to_none=True)
    with gt.watch(problem.model) as watch:
        loss = problem.loss()
    return lambda: ask(watch.trace(loss), problem)


def seconds(run: Callable[[], object], device: str) -> float:
    """The time of a call: of the CPU, or on a GPU of the wall clock until it is idle."""
    gc.collect()
    if device == "cpu":
        begun = time.process_time()
        run()
        return time.process_time() - begun
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def measured(row: Row, rounds: int) -> Iterator[dict[str, Any]]:
    """A result for each way of a row, timed in turns with ``loss.backward()``."""
    torch.manual_seed(0)
    problem = row.make()
    peaks: dict[str, float] = {}
    best = dict.fromkeys(("", *row.ways), float("inf"))
    for turn in range(-WARM, rounds):
        for way in best:
            if row.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            run = traced(problem, WAYS[way]) if way else backward(problem)
            took = seconds(run, row.device)
            if turn >= 0:
                best[way] = min(best[way], took)
            if row.device == "cuda":
                peaks[way] = torch.cuda.max_memory_allocated() / 2**30
            del run
    for way, most in row.ways.items():
        found = {"row": row.name, "device": row.device, "way": way, "backward": best[""]}
        found |= {"seconds": best[way], "ratio": best[way] / best[""], "at most": most}
        yield found | {"peak GiB": peaks.get(way)}


FIRST = """
import sys, time; sys.path.insert(0, sys.argv[1])
import bench
problem = bench.gpt2(1024, "cuda")
bench.seconds(bench.backward(problem), "cuda")
print(bench.seconds(bench.traced(problem, bench.WAYS[bench.EXACT]), "cuda"))
"""


def first_trace() -> dict[str, Any]:
    """The first exact trace in a process on a GPU, whose kernels nobody has compiled before."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": folder, "CUDA_CACHE_PATH": folder}
        command = [sys.executable, "-c", FIRST, str(Path(__file__).parent)]
        done = subprocess.run(
            command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True
        )
    found = {"row": "first exact trace in a process", "device": "cuda", "way": EXACT}
    return found | {"seconds": float(done.stdout), "at most": 12.0}


# Results ------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """What the figures were measured on and with."""
    named = [line for line in lines("/proc/cpuinfo") if line.startswith("model name")]
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": named[0].partition(":")[2].strip() if named else platform.processor(),
        "kernels": instruction_set() or "none compiled",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gradtrace": gt.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def lines(path: str) -> list[str]:
    """The lines of a file, if there is one."""
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    text = ["| work | way | backward, ms | ms | ratio | at most |", "|---|---|---:|---:|---:|---:|"]
    for each in results:
        base, ratio = each.get("backward"), each.get("ratio")
        cells = (
            "GPU: " * (each["device"] == "cuda") + each["row"],
            each["way"],
            f"{base * 1e3:.2f}" if base else "",
            f"{each['seconds'] * 1e3:.2f}",
            f"{ratio:.2f}" if ratio else "",
            f"{each['at most']:g}" if ratio else f"{each['at most'] * 1e3:,.0f} ms",
        )
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    """Measure the rows that run here; print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--only", nargs="*", default=[""], help="words of the rows to measure")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for row in ROWS:
        runs = row.device == "cpu" or torch.cuda.is_available()
        if runs and any(word in row.name for word in asked.only):
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            results += measured(row, asked.rounds)
            gc.collect()
    if torch.cuda.is_available() and any(word in "first exact trace" for word in asked.only):
        results.append(first_trace())
    told = machine()
    print(table(results), *(f"{name}: {value}" for name, value in told.items()), sep="\n")
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps({"machine": told, "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
