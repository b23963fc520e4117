"""Peak memory of an influence trace over that of ``loss.backward()``, each in a new process."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import torch

from gradtrace.bench.cases import FULL, SMALL, Case
from gradtrace.bench.models import BACKWARD, INFLUENCE, chosen, influence, plain
from gradtrace.bench.results import Column, Section, Setting
from gradtrace.experiments import machine

LIMIT = 3.0
WAYS = {BACKWARD: plain, INFLUENCE: influence}

EXACT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",  # the GNU library
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MIMALLOC_PURGE_DELAY": "0",  # what torch brings along on ARM
}
"""Settings by which freed memory goes back to the system at once, so that what a process has in
memory is what it uses.
"""


def peak_memory(setting: Setting) -> Section:
    """What passes need beyond the model and its activations."""
    section = Section(
        "Peak memory beyond model and activations",
        [
            Column("model"),
            Column("model and activations, MiB", ".1f"),
            Column("loss.backward(), MiB", ".1f"),
            Column("influence, MiB", ".1f"),
            Column("ratio", ".2f"),
            Column("target", ".0f", limits="ratio"),
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
    command = [sys.executable, "-m", "gradtrace.bench.memory", case.name, way]
    env = {**os.environ, **EXACT, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{case.name}, {way}: {done.stderr.strip().splitlines()[-1:]}")
    before, beyond = json.loads(done.stdout)
    return before, beyond


def measure(case: Case, way: str) -> tuple[float, float]:
    """In the new process: run a way once, when all that it loads the first time is loaded."""
    torch.manual_seed(0)
    WAYS[way](SMALL[0].make())()()
    run = WAYS[way](case.make())()
    gc.collect()
    machine.forget_peak()
    before, highest = machine.resident(), machine.peak()
    start = before if machine.forget_peak() else highest
    run()
    return before, machine.peak() - start


if __name__ == "__main__":
    asked = {case.name: case for case in (*FULL, *SMALL)}[sys.argv[1]]
    print(json.dumps(measure(asked, sys.argv[2])))
