"""The measures beside influence by greedy: edge, decomposition, mass, over the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradtrace.benchmarks.cases import Problem, gpt2, llama
from gradtrace.benchmarks.devices import place, told, waited
from gradtrace.benchmarks.gpu import TOKENS, made_on, small_llama, tiny
from gradtrace.benchmarks.models import BACKWARD, plain, watched
from gradtrace.benchmarks.results import Absent, ResultColumn, Section, Setting, say
from gradtrace.experiments.harness.interleaved_timing import Timed, Ways, interleaved
from gradtrace.kernels.precision import without_tf32

GREEDY, EDGE, MASS = "influence, greedy", "influence, edge", "mass"
EDGE_LIMIT = 1.1
"""What edge may take, over greedy."""

MASS_LIMIT, MASS_LIMIT_BILLION = 4.0, 6.0
"""What mass may take, over ``loss.backward()``."""


def _blocks(problem: Problem) -> list[str]:
    """The names of the model's layers."""
    names = [name for name, _ in problem.model.named_modules()]
    return [name for name in names if name.rpartition(".")[2].isdigit()]


def _decomposed(problem: Problem) -> str:
    return f"decompose, {len(_blocks(problem))} components"


def _ways(problem: Problem) -> Ways:
    blocks = _blocks(problem)
    return {
        BACKWARD: plain(problem),
        GREEDY: watched(problem, lambda watch, loss: watch.trace(loss).influence()),
        EDGE: watched(problem, lambda watch, loss: watch.trace(loss, rule="edge").influence()),
        _decomposed(problem): watched(
            problem, lambda watch, loss: watch.trace(loss).decompose(blocks).shares
        ),
        MASS: watched(problem, lambda watch, loss: watch.trace(loss).mass().shares),
    }


def _section(title: str) -> Section:
    return Section(
        title,
        [
            ResultColumn("model"),
            ResultColumn("way"),
            ResultColumn("seconds", ".4f"),
            ResultColumn("ratio", ".2f"),
            ResultColumn("median of rounds", ".2f"),
            ResultColumn("target", ".1f", limits="ratio"),
            ResultColumn("rounds", "d"),
        ],
    )


def _add(section: Section, name: str, timed: Timed, limits: dict[str, float]) -> None:
    for way in timed.seconds:
        best, ratio, typical = timed.best(way), timed.ratio(way), timed.typical(way)
        section.add(name, way, best, ratio, typical, limits.get(way), timed.rounds)


def _compared(
    section: Section, name: str, problem: Problem, timed: Timed, setting: Setting
) -> None:
    limits = {_decomposed(problem): len(_blocks(problem)) + 1.0, MASS: MASS_LIMIT}
    _add(section, name, timed, {} if setting.quick else limits)  # small ones are Python alone
    ratio = timed.best(EDGE) / timed.best(GREEDY)
    section.note(f"{name}: edge takes {ratio:.2f} times what greedy does (target {EDGE_LIMIT}).")


def measures(setting: Setting) -> Section:
    """Edge, decomposition and mass of a transformer of GPT-2's size."""
    if not setting.has("transformers", "measures"):
        raise Absent("transformers is not installed")
    section = _section("Other measures, over `loss.backward()`")
    name = "GPT-2 build, 8 tokens" if setting.quick else "GPT-2 size, 128 tokens"
    say(f"  {name} ...")
    problem = tiny() if setting.quick else gpt2(128)
    _compared(section, name, problem, interleaved(_ways(problem), setting.turns(6)), setting)
    section.note(
        "Recording is included, the forward pass is in none of them. decompose: the layers of the "
        "model; mass: all its modules, p = 1."
    )
    return section


def gpu_measures(setting: Setting) -> Section:
    """The same on a GPU, and mass of a Llama of a billion parameters in bfloat16."""
    device = place(setting)
    section = _section("Other measures, over `loss.backward()`, on a GPU")
    name = "GPT-2 build, 8 tokens" if setting.quick else "GPT-2 small, 1,024 tokens, float32"
    problem = made_on(setting, device, tiny if setting.quick else lambda: gpt2(TOKENS))
    _compared(section, name, problem, _timed(_ways(problem), setting, device), setting)
    del problem
    name = "Llama build, 8 tokens" if setting.quick else "Llama, 1.1 billion parameters, bfloat16"
    make: Callable[[], Problem] = lambda: llama(TOKENS, torch.bfloat16)  # noqa: E731
    problem = made_on(setting, device, small_llama if setting.quick else make)
    ways = {way: run for way, run in _ways(problem).items() if way in (BACKWARD, MASS)}
    limits = {} if setting.quick else {MASS: MASS_LIMIT_BILLION}
    _add(section, name, _timed(ways, setting, device), limits)
    return told(section, device, setting)


def _timed(ways: Ways, setting: Setting, device: torch.device) -> Timed:
    with without_tf32():
        for run in ways.values():  # compiles kernels, fills the allocator
            run()()
        return interleaved(ways, setting.turns(6), patience=8, clock=waited(device))
