"""The sections of the benchmark, by name: where each is made.

A module is imported when it is asked for, so that the shell can list them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradtrace.benchmarks.results import Section, Setting

SECTIONS = {
    "contraction": "contractions.contractions",
    "trained": "contractions.trained",
    "others": "contractions.others",
    "models": "models.models",
    "monitor": "monitor_share.monitor_share",
    "measures": "measures.measures",
    "peak": "memory.peak_memory",
    "depth": "scaling.depth",
    "size": "scaling.size",
    "growth": "growth.growth",
    "gradient": "passes.gradient",
    "large": "passes.large_graphs",
    "repeated": "passes.repeated",
    "gpu-contraction": "gpu.contractions",
    "gpu-gpt2": "gpu.gpt2_small",
    "gpu-billion": "gpu.billion",
    "gpu-eight-billion": "gpu.eight_billion",
    "gpu-monitor": "monitor_share.gpu_monitor_share",
    "gpu-measures": "measures.gpu_measures",
    "gpu-tokens": "gpu.over_tokens",
    "gpu-width": "gpu.over_width",
    "gpu-growth": "growth.gpu_growth",
}

ELSEWHERE = frozenset(name for name in SECTIONS if name.startswith("gpu-"))
"""Sections for a GPU, which each say where they were taken: seldom on the machine of the others."""


def section(name: str) -> Callable[[Setting], Section]:
    """The function that runs a section."""
    module, function = SECTIONS[name].split(".")
    home = import_module(f"gradtrace.benchmarks.{module}")
    return getattr(home, function)  # type: ignore[no-any-return]
