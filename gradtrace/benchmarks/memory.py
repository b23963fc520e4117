"""Peak memory of an influence trace over that of ``loss.backward()``, each in a new process."""

from __future__ import annotations

import torch

from gradtrace.benchmarks.cases import FULL, SMALL, Case
from gradtrace.benchmarks.models import BACKWARD, INFLUENCE, chosen, influence, plain
from gradtrace.benchmarks.results import ResultColumn, Section, Setting
from gradtrace.experiments.harness.peak_memory import apart, beyond

LIMIT = 3.0
WAYS = {BACKWARD: plain, INFLUENCE: influence}


def peak_memory(setting: Setting) -> Section:
    """What passes need beyond the model and its activations."""
    section = Section(
        "Peak memory beyond model and activations",
        [
            ResultColumn("model"),
            ResultColumn("model and activations, MiB", ".1f"),
            ResultColumn("loss.backward(), MiB", ".1f"),
            ResultColumn("influence, MiB", ".1f"),
            ResultColumn("ratio", ".2f"),
            ResultColumn("target", ".0f", limits="ratio"),
        ],
    )
    cases = list(chosen(setting))
    for case in cases[:1] if setting.quick else cases:
        before, theirs = _measured(case, BACKWARD)
        _, ours = _measured(case, INFLUENCE)
        ratio = ours / theirs if theirs else None
        section.add(case.name, before, theirs, ours, ratio, setting.limit(LIMIT))
    section.note(
        "Each in a process of its own, after a pass over a tiny model: the resident size after the "
        "forward pass, and how far its peak rises above that. `loss.backward()` frees activations "
        "on its way, a trace keeps them."
    )
    return section


def _measured(case: Case, way: str) -> tuple[float, float]:
    """MiB in use after the forward pass, and the peak beyond them."""
    before, more = apart("gradtrace.benchmarks.memory:named", case.name, way)
    return before, more


def named(case: str, way: str) -> tuple[float, float]:
    """``measure``, for the new process, which finds the model by its name."""
    return measure({c.name: c for c in (*FULL, *SMALL)}[case], way)


def measure(case: Case, way: str) -> tuple[float, float]:
    """Run a way once, when all that it loads the first time is loaded."""
    torch.manual_seed(0)
    WAYS[way](SMALL[0].make())()()
    return beyond(WAYS[way](case.make())())
