"""Time over tokens, width and layers of a transformer, exact and sampled, with exponents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradtrace.benchmarks.cases import Problem, gpt2
from gradtrace.benchmarks.devices import place, settle, tidy, told, waited
from gradtrace.benchmarks.models import BACKWARD, INFLUENCE, influence, plain, samples
from gradtrace.benchmarks.results import Absent, ResultColumn, Section, Setting, say
from gradtrace.experiments.harness.interleaved_timing import Timed, interleaved, power_fit
from gradtrace.kernels.precision import without_tf32

HEAD = 32
SAMPLED_ELEMENTS = 10_000
TOKENS, WIDTH, LAYERS = "tokens", "width", "layers"


class Grid(NamedTuple):
    """The sizes that are tried, each with the others as in ``base``."""

    base: dict[str, int]
    sizes: dict[str, Sequence[int]]
    words: int


SMALL = Grid({TOKENS: 8, WIDTH: 32, LAYERS: 1}, {TOKENS: (8, 16)}, 50)
ON_CPU = Grid(
    {TOKENS: 128, WIDTH: 192, LAYERS: 4},
    {TOKENS: (64, 128, 256, 512), WIDTH: (96, 192, 384, 768), LAYERS: (2, 4, 8, 16)},
    5_000,
)
ON_GPU = Grid(
    {TOKENS: 512, WIDTH: 768, LAYERS: 6},
    {TOKENS: (256, 512, 1024, 2048), WIDTH: (384, 768, 1536), LAYERS: (3, 6, 12)},
    10_000,
)


def growth(setting: Setting) -> Section:
    """On the CPU."""
    return _grown(setting, ON_CPU, torch.device("cpu"), "")


def gpu_growth(setting: Setting) -> Section:
    """On a GPU."""
    device = place(setting)
    return told(_grown(setting, ON_GPU, device, ", on a GPU"), device, setting)


def _grown(setting: Setting, grid: Grid, device: torch.device, where: str) -> Section:
    if not setting.has("transformers", "growth"):
        raise Absent("transformers is not installed")
    grid = SMALL if setting.quick else grid
    base = ", ".join(f"{size:,} {what}" for what, size in grid.base.items())
    columns = [
        ResultColumn("over"),
        ResultColumn("size", ",d"),
        ResultColumn("backward, ms", ".2f"),
    ]
    for name in ("exact", "paths sampled", "rows sampled"):
        columns += [ResultColumn(name, ".2f"), ResultColumn(f"{name}, median", ".2f")]
    section = Section(f"Time over tokens, width and layers of GPT-2's build{where}", columns)
    found: dict[tuple[str, int], Timed] = {}
    for what, sizes in grid.sizes.items():
        for size in sizes:
            key = (what, size)
            found[key] = _timed(_problem(grid, {what: size}, device), setting, device)
            timed = found[key]
            ways = list(timed.seconds)[1:]
            ratios = [ratio for way in ways for ratio in (timed.ratio(way), timed.typical(way))]
            section.add(what, size, timed.baseline * 1e3, *ratios)
    for what, sizes in grid.sizes.items():
        section.note(_exponents(what, {size: found[what, size] for size in sizes}))
    section.note(
        f"Ratios are to `loss.backward()`, recording included: the best of rounds over its best, "
        f"and the median of rounds. Unless they grow: {base}; {grid.words:,} words, "
        f"{SAMPLED_ELEMENTS:,} paths, one row in 16 of large weights. Exponents are by least "
        "squares of logarithms of the best times."
    )
    return section


def _problem(grid: Grid, grown: dict[str, int], device: torch.device) -> Problem:
    sizes = grid.base | grown
    tokens, width = sizes[TOKENS], sizes[WIDTH]
    with torch.device(device):
        found = gpt2(
            tokens,
            vocab_size=grid.words,
            n_embd=width,
            n_head=max(1, width // HEAD),
            n_layer=sizes[LAYERS],
            n_positions=tokens,
        )
    settle(device)
    return found


def _timed(problem: Problem, setting: Setting, device: torch.device) -> Timed:
    ways = {BACKWARD: plain(problem), INFLUENCE: influence(problem)}
    ways |= samples(problem, SAMPLED_ELEMENTS)
    with without_tf32():
        for run in ways.values():  # later traces of a structure are measured, not the first
            run()()
        timed = interleaved(ways, setting.turns(5), patience=8, clock=waited(device))
    tidy(device)
    say(f"  {timed.rounds} rounds")
    return timed


def _exponents(what: str, found: dict[int, Timed]) -> str:
    """How the time of each way grows, in words."""
    sizes, ways = list(found), list(next(iter(found.values())).seconds)
    fits = {way: power_fit(sizes, [found[n].best(way) for n in sizes]) for way in ways}
    told = ", ".join(f"{way} ^{fit.slope:.2f} (R² {fit.r2:.3f})" for way, fit in fits.items())
    return f"Over {what}, {sizes[0]:,} to {sizes[-1]:,}, time grows as: {told}."
