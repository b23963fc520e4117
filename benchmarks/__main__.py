"""Run the benchmarks and write their results: ``python -m benchmarks --out docs/benchmarks.md``."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace
from benchmarks.cases import branches, chain, gpt2, tanh_network
from benchmarks.timing import Ways, interleaved, linear_fit

LAYERS = (1, 3, 10, 30, 100, 300, 1000)
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)


def _ways(model: nn.Module, loss_of: Callable[[], Tensor]) -> Ways:
    """PyTorch's backward pass and ours, on one graph."""
    with gradtrace.watch(model) as watch:
        loss = loss_of()
    parameters = list(model.parameters())
    return {
        "torch.autograd.grad": lambda: torch.autograd.grad(loss, parameters, retain_graph=True),
        "gradtrace.backward": lambda: watch.backward(loss),
        "creation order": lambda: watch.backward(loss, schedule="creation"),
        "recording": lambda: watch.program(loss),
    }


def _network_ways(model: nn.Module, x: Tensor, y: Tensor) -> Ways:
    return _ways(model, lambda: F.mse_loss(model(x), y))


def networks(rounds: int) -> list[str]:
    """Figure 1.2's networks, over their depth."""
    rows = [
        "| layers | torch, ms | backward | creation order | recording |",
        "|---|---|---|---|---|",
    ]
    layers, ours = [], []
    for n in LAYERS:
        timed = interleaved(partial(_network_ways, *tanh_network(n)), rounds)
        layers.append(float(n))
        ours.append(timed.seconds["gradtrace.backward"])
        ratios = [timed.ratio(way) for way in list(timed.seconds)[1:]]
        rows.append(
            f"| {n:,} | {timed.baseline * 1e3:.2f} | "
            + " | ".join(f"{r:.2f}" for r in ratios)
            + " |"
        )
        print(rows[-1], file=sys.stderr)
    slope, r2 = linear_fit(layers, ours)
    return [*rows, "", f"backward: {slope * 1e6:.0f} µs a layer, R² = {r2:.5f}."]


def transformer(rounds: int) -> list[str]:
    """A transformer of GPT-2's size."""
    model, ids = gpt2()

    def loss_of() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    timed = interleaved(lambda: _ways(model, loss_of), rounds)
    rows = ["| way | seconds | ratio |", "|---|---|---|"]
    rows += [f"| {way} | {s:.3f} | {timed.ratio(way):.3f} |" for way, s in timed.seconds.items()]
    return rows


def large_graphs(rounds: int) -> list[str]:
    """Chains and branches of up to 100,000 operators."""
    rows = ["| operators | chain, ms | branches, ms |", "|---|---|---|"]
    times: dict[str, list[float]] = {"chain": [], "branches": []}
    for size in SIZES:
        for name, make in (("chain", chain), ("branches", branches)):
            loss, leaf = make(size)
            ways: Ways = {"ours": partial(gradtrace.backward, loss, names={"x": leaf})}
            times[name].append(interleaved(partial(dict, ways), rounds).baseline)
        rows.append(
            f"| {size:,} | {times['chain'][-1] * 1e3:.1f} | {times['branches'][-1] * 1e3:.1f} |"
        )
        print(rows[-1], file=sys.stderr)
    for name, seconds in times.items():
        slope, r2 = linear_fit([float(s) for s in SIZES], seconds)
        rows += ["", f"{name}: {slope * 1e6:.2f} µs an operator, R² = {r2:.5f}."]
    return rows


def memory(repeats: int) -> list[str]:
    """Resident memory while the largest graphs are walked over and over."""
    rows = [
        "| graph | before, MiB | after the first pass | after the last | passes |",
        "|---|---|---|---|---|",
    ]
    for name, make in (("chain", chain), ("branches", branches)):
        loss, leaf = make(SIZES[-1])
        seen = [_resident()]
        for _ in range(repeats):
            gradtrace.backward(loss, names={"x": leaf})
            gc.collect()
            seen.append(_resident())
        rows.append(f"| {name} | {seen[0]:.0f} | {seen[1]:.0f} | {seen[-1]:.0f} | {repeats} |")
    return rows


def _resident() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _processor() -> str:
    if shutil.which("lscpu"):
        told = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
        for line in told.splitlines():
            if line.startswith("Model name:"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "processor unknown"


def _machine() -> list[str]:
    load = os.getloadavg()[0]
    return [
        f"- {platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, load {load:.2f} at the start",
        f"- Python {platform.python_version()}, torch {torch.__version__}, "
        f"gradtrace {gradtrace.__version__}",
        f"- {time.strftime('%Y-%m-%d')}",
    ]


SECTIONS: dict[str, tuple[str, Callable[[int], list[str]], int]] = {
    "networks": ("20-unit tanh networks (Figure 1.2), ratio to torch", networks, 10),
    "transformer": ("GPT-2-sized transformer, 128 tokens", transformer, 8),
    "large": ("Graphs of up to 100,000 operators", large_graphs, 3),
    "memory": ("Memory over repeated passes, 100,000 operators", memory, 100),
}


def main() -> None:
    """Run the sections asked for and write a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results here, as Markdown")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="run only this section")
    parser.add_argument("--rounds", type=int, help="repetitions, in place of each section's own")
    asked = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Times are the best of many, taken in turns",
        "in one process; ratios are to `torch.autograd.grad` in the same run.",
        "",
        *_machine(),
    ]
    for name in asked.only or SECTIONS:
        title, run, rounds = SECTIONS[name]
        print(title, file=sys.stderr)
        lines += ["", f"## {title}", "", *run(asked.rounds or rounds)]
    page = "\n".join(lines) + "\n"
    print(page)
    if asked.out:
        asked.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
