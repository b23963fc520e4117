"""How long the report of a large graph takes to open.

``python -m gradtrace.benchmarks.opening [layers tokens]``.

A Mamba with random weights, 24 layers over 64 tokens unless told, is traced; its report is written
and opened in Chromium (package playwright), offline, each tab some times in a window of its own,
until it is drawn.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import torch

from gradtrace.errors import GradtraceError
from gradtrace.io.table import TextColumn, TextTable
from gradtrace.traced import Trace
from gradtrace.watch import watch

ROUNDS = 4
DRAWN = {
    "overview": "[data-testid=overview]",
    "graph": ".canvas[aria-busy=false] [data-node], .canvas:not([aria-busy]) [data-node]",
    "paths": "[data-testid=paths]",
}
"""What is there when a tab is drawn."""


class Opened(NamedTuple):
    """One tab."""

    tab: str
    seconds: float
    nodes: int


def mamba(layers: int, tokens: int) -> Trace:
    """A small Mamba, traced."""
    from transformers import MambaConfig, MambaForCausalLM, logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 16, "state_size": 4, "num_hidden_layers": layers}
    model = MambaForCausalLM(MambaConfig(**sizes, use_mambapy=False)).eval()
    ids = torch.randint(0, 100, (1, tokens))
    with watch(model) as watched:
        loss = model(input_ids=ids, labels=ids).loss
    return watched.trace(loss)


def opened(file: Path, rounds: int) -> Iterator[Opened]:
    """The tabs of a report, the best of some rounds each."""
    from playwright.sync_api import sync_playwright

    where = shutil.which("chromium") or shutil.which("chromium-browser")
    if where is None:
        raise GradtraceError("there is no Chromium here; install the system's")
    with sync_playwright() as run:
        browser = run.chromium.launch(executable_path=where, args=["--no-sandbox"])
        for tab, drawn in DRAWN.items():
            best, nodes = float("inf"), 0
            for _ in range(rounds):
                context = browser.new_context(offline=True)
                page = context.new_page()
                begun = perf_counter()
                page.goto(f"{file.as_uri()}#tab={tab}")
                page.locator(drawn).first.wait_for()
                best = min(best, perf_counter() - begun)
                nodes = page.locator("[data-node]").count()
                context.close()
            yield Opened(tab, best, nodes)
        browser.close()


def main(layers: int = 24, tokens: int = 64) -> TextTable:
    """Trace, write, open; the times."""
    begun = perf_counter()
    trace = mamba(layers, tokens)
    traced = perf_counter()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        trace.report(file)
        written, size = perf_counter(), file.stat().st_size
        rows = tuple(tuple(each) for each in opened(file, ROUNDS))
    title = (
        f"Mamba, {layers} layers over {tokens} tokens: {len(trace.program.blocks):,} operators, "
        f"traced in {traced - begun:.1f} s, reported in {written - traced:.1f} s, "
        f"{size / 1e6:.2f} MB"
    )
    columns = (
        TextColumn("tab"),
        TextColumn("drawn after, s", "number"),
        TextColumn("nodes drawn", "count"),
    )
    return TextTable(title, columns, rows)


if __name__ == "__main__":
    print(main(*map(int, sys.argv[1:])))
