"""Question: What do a language model of the Penn Treebank's size, and its trace, cost?

Expectation: Of an RNN with 10,000 words and 1,000 hidden units, on n words, the chapter says
"roughly 2.1 million parameters and 30·n million edges", and that tracing is linear in the edges.
The parameters cannot be right: a matrix between 10,000 words and 1,000 units has 10 million
elements, and a language model has two unless it shares them. The edges can: an output layer of 10
million weights has 30 million a step if each product is a vertex with two edges in and one out.

Method: The model is Elman's, ``h = tanh(E[word] + W·h + b)``, with an output layer: the one-hot
input weight E goes straight into the state, which is the plainest reading of the chapter.
Parameters of this and of other readings are counted on models of the chapter's size that hold no
numbers. Edges are those of ``gradtrace.graph``, with cross entropy as PyTorch has it (log-softmax
is one operator, in which each of V words depends on all V), and taken apart into a log-sum-exp and
a difference; they are held against a formula. Time: ``loss.backward()``, ``watch.trace(loss)``, and
that with the influence of all modules, in turns, the best round of each. Memory: the peak beyond
model and activations, in a new process. The words are random, since costs do not depend on them.

Seeds: The seed says weights and words: 0, 1, 2, ...

Limits: Words are random and the model is not trained: costs do not depend on either, influence
does. The chapter does not say how it counts edges, so three ways are shown. Times of the published
run are of one thread of a machine that had other work to do, and rough; counts and bytes do not
depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.experiments.harness.findings import (
    Cell,
    Findings,
    Plot,
    Result,
    Row,
    Seeds,
    Series,
    Table,
    Tick,
)
from gradtrace.experiments.harness.interleaved_timing import (
    Fit,
    Way,
    Ways,
    interleaved,
    linear_fit,
    quotient,
    told,
)
from gradtrace.experiments.harness.peak_memory import apart, beyond
from gradtrace.experiments.harness.statistics import (
    Interval,
    geometric,
    student,
    with_interval,
)

QUICK = {"words": 1_000, "units": 100, "steps": [10, 20, 40], "rounds": 3}
FULL = {"words": 10_000, "units": 1_000, "steps": [*range(10, 101, 10)], "rounds": 3}
SEEDS = Seeds(quick=1, full=3)
TIMED = True
FIGURE = "treebank-time"

WORDS, UNITS = 10_000, 1_000
"""The chapter's model."""
CLAIMED = {"parameters": 2.1e6, "edges": 30e6}
"""The chapter's estimates; edges for each step."""
NEAR = 0.15
"""How far, of an estimate, a count may be from it to be called near."""
LINEAR = 0.99
"""The least R² that is called linear."""

TORCH, RECORDING, TRACING = "loss.backward()", "trace", "trace and influence"
WAYS = (TORCH, RECORDING, TRACING)


# The model ---------------------------------------------------------------------------------------


class Elman(nn.Module):
    """``h = tanh(E[word] + W·h + b)``, and scores of the next word from each h."""

    def __init__(self, words: int, units: int) -> None:
        super().__init__()
        self.input = nn.Embedding(words, units)
        self.recurrent = nn.Linear(units, units)
        self.output = nn.Linear(units, words)

    def forward(self, ids: Tensor) -> Tensor:  # (time,) -> (time, words)
        """Scores at every step, from a state of zeros on."""
        state = self.input.weight.new_zeros(self.input.embedding_dim)
        states = []
        for word in self.input(ids):
            state = torch.tanh(word + self.recurrent(state))
            states.append(state)
        found: Tensor = self.output(torch.stack(states))
        return found


def entropy(scores: Tensor, ids: Tensor) -> Tensor:
    """Cross entropy taken apart: ``mean of log Σ exp(scores) - scores[id]``."""
    logs = scores - torch.logsumexp(scores, 1, keepdim=True)
    return F.nll_loss(logs, ids)


class Problem(NamedTuple):
    """A model, and its loss on a sequence."""

    model: Elman
    loss: Callable[[], Tensor]
    apart: Callable[[], Tensor]


def _problem(words: int, units: int, steps: int, seed: int) -> Problem:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Elman(words, units)
        ids = torch.randint(words, (steps + 1,))
    return Problem(
        model,
        lambda: F.cross_entropy(model(ids[:-1]), ids[1:]),
        lambda: entropy(model(ids[:-1]), ids[1:]),
    )


def edges(steps: int, words: int, units: int, fused: bool = True) -> int:
    """|E'| by hand, with V words and H units, over n steps.

    A step has 2·V·H + V in the output layer, 3·H² + H in the recurrent one (with the transpose of
    its weight, which PyTorch makes at every step), 8·H in the tanh, the sum and what moves numbers
    about, V² in the log-softmax or 3·V where it is taken apart, and 1 in the loss. Once there are
    V·H to transpose the output weight; and the first state is no function of anything, which saves
    H² + H.

    >>> edges(1, 10, 3), edges(2, 10, 3) - edges(1, 10, 3)
    (243, 225)
    """
    softmax = words**2 if fused else 3 * words
    step = softmax + 2 * words * units + words + 3 * units**2 + 9 * units + 1
    return steps * step + words * units - units**2 - units


READINGS: Mapping[str, Callable[[int, int], list[nn.Module]]] = {
    "Elman's network, one-hot input": lambda v, h: [Elman(v, h)],
    "embedding of 1,000 and nn.RNN": lambda v, h: [
        *(nn.Embedding(v, h), nn.RNN(h, h), nn.Linear(h, v)),
    ],
    "the same, output weight shared with the embedding": lambda v, h: [
        *(nn.Embedding(v, h), nn.RNN(h, h)),
    ],
    "embedding of 1,000 and nn.LSTM": lambda v, h: [
        *(nn.Embedding(v, h), nn.LSTM(h, h), nn.Linear(h, v)),
    ],
    "nn.RNN alone, without words": lambda _, h: [nn.RNN(h, h)],
    "embedding of 100 and nn.LSTM with 100 units, not 1,000": lambda v, h: [
        *(nn.Embedding(v, h // 10), nn.LSTM(h // 10, h // 10), nn.Linear(h // 10, v)),
    ],
}
"""Models that the chapter may have had in mind."""


# What there is to measure ------------------------------------------------------------------------


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for the parameters, and one for each length and seed."""
    sizes = {key: settings[key] for key in ("words", "units", "rounds")}
    return [
        {"kind": "parameters", "words": WORDS, "units": UNITS},
        *(
            {"kind": "sequence", **sizes, "steps": steps, "seed": seed}
            for seed in range(seeds)
            for steps in settings["steps"]
        ),
    ]


def measure(cell: Cell, tick: Tick) -> Result:
    """Counts; for a sequence, times and memory too."""
    if cell["kind"] == "parameters":
        return _parameters(cell["words"], cell["units"])
    sizes = (cell["words"], cell["units"], cell["steps"], cell["seed"])
    tick(f"{cell['steps']} steps: edges")
    problem = _problem(*sizes)
    counts = _counts(problem)
    tick(f"{cell['steps']} steps: time")
    timed = interleaved(_ways(problem), cell["rounds"])
    del problem
    tick(f"{cell['steps']} steps: memory")
    return {
        **counts,
        "seconds": {way: timed.best(way) for way in WAYS},
        "memory": apart(f"{__name__}:peaks", *sizes),
    }


def _parameters(words: int, units: int) -> Result:
    found = {}
    with torch.device("meta"):
        for name, build in READINGS.items():
            parameters = [p for part in build(words, units) for p in part.parameters()]
            found[name] = sum(p.numel() for p in parameters)
    found["the same, output weight shared with the embedding"] += words  # the output bias
    return {"parameters": found}


def _counts(problem: Problem) -> Result:
    with gt.watch(problem.model) as watch:
        fused, opened = problem.loss(), problem.apart()
    graph = watch.graph(fused)
    return {
        "parameters": sum(p.numel() for p in problem.model.parameters()),
        "operators": len(graph),
        "vertices": graph.scalar_vertices,
        "edges": graph.scalar_edges,
        "edges_apart": watch.graph(opened).scalar_edges,
        "difference": abs(fused.item() - opened.item()),
    }


def _ways(problem: Problem) -> Ways:
    def plain() -> Callable[[], object]:
        problem.model.zero_grad(set_to_none=True)
        backward: Callable[[], object] = problem.loss().backward
        return backward

    return {
        TORCH: plain,
        RECORDING: _watched(problem, lambda watch, loss: watch.trace(loss)),
        TRACING: _watched(problem, lambda watch, loss: watch.trace(loss).influence()),
    }


def _watched(problem: Problem, run: Callable[[gt.watch, Tensor], object]) -> Way:
    def prepare() -> Callable[[], object]:
        problem.model.zero_grad(set_to_none=True)
        with gt.watch(problem.model) as watch:
            loss = problem.loss()
        return lambda: run(watch, loss)

    return prepare


def peaks(words: int, units: int, steps: int, seed: int) -> dict[str, float]:
    """In a new process: MiB of model and activations, and the peaks of passes beyond them."""
    for way in _ways(_problem(9, 3, 2, 0)).values():
        way()()  # load all that is loaded at first
    ways = _ways(_problem(words, units, steps, seed))
    before, theirs = beyond(ways[TORCH]())
    _, ours = beyond(ways[TRACING]())
    return {"before": before, TORCH: theirs, TRACING: ours}


# What came out -----------------------------------------------------------------------------------


class Point(NamedTuple):
    """One length: counts, the medians over seeds of milliseconds, and of MiB."""

    steps: int
    result: Result
    times: dict[str, float]
    memory: dict[str, float]
    by_seed: dict[int, dict[str, float]]


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in a sentence; counts, which no draw changes."""
    edges = facts["edges_of_a_step"]["PyTorch's operators"]
    words = "exactly" if facts["edges_linear"] else "not exactly"
    said = (
        f"each word of a text adds {edges / 1e6:.0f} million edges to its graph, {words} as many "
        "as the one before."
    )
    if not facts["parameters"]:
        return f"Of a language model of the Penn Treebank's size {said}"
    elements = next(iter(facts["parameters"].values()))
    return (
        f"A language model of the Penn Treebank's size has {elements / 1e6:.1f} million "
        f"parameters, where the chapter says {CLAIMED['parameters'] / 1e6:.1f}; {said}"
    )


def conclude(rows: Sequence[Row]) -> Findings:
    """Parameters and edges beside the chapter's, and lines over the steps."""
    readings: dict[str, int] = {}
    for row in rows:
        if row.cell["kind"] == "parameters":
            readings = row.result["parameters"]
    points = _points([row for row in rows if row.cell["kind"] == "sequence"])
    sizes = _sizes(rows)
    facts = _facts(points, sizes, readings)
    return Findings(
        sentence=" ".join([_on_parameters(readings), _on_edges(facts), _on_cost(points, sizes)]),
        tables=(_read(readings), _edge_table(), _costs(points)),
        plots=_plots(points, sizes) if points else (),
        facts=facts,
    )


def _sizes(rows: Sequence[Row]) -> tuple[int, int]:
    """Words and units of what was measured."""
    cell = next((row.cell for row in rows if row.cell["kind"] == "sequence"), {})
    return cell.get("words", 0), cell.get("units", 0)


def _points(rows: Sequence[Row]) -> list[Point]:
    found = []
    for steps in sorted({row.cell["steps"] for row in rows}):
        same = sorted((r for r in rows if r.cell["steps"] == steps), key=lambda r: r.cell["seed"])
        times = {way: median(r.result["seconds"][way] for r in same) * 1e3 for way in WAYS}
        memory = {k: median(r.result["memory"][k] for r in same) for k in same[0].result["memory"]}
        by_seed = {
            r.cell["seed"]: {way: r.result["seconds"][way] * 1e3 for way in WAYS} for r in same
        }
        found.append(Point(steps, same[0].result, times, memory, by_seed))
    return found


def _facts(points: list[Point], sizes: tuple[int, int], readings: dict[str, int]) -> dict[str, Any]:
    """What is a count, and cannot be otherwise on another machine."""
    return {
        "parameters": readings,
        "edges_linear": _exactly_linear([(p.steps, p.result["edges"]) for p in points]),
        "vertices_linear": _exactly_linear([(p.steps, p.result["vertices"]) for p in points]),
        "edges_by_hand": all(
            p.result["edges"] == edges(p.steps, *sizes)
            and p.result["edges_apart"] == edges(p.steps, *sizes, fused=False)
            for p in points
        ),
        "losses_equal": all(p.result["difference"] < 1e-4 for p in points),
        "edges_of_a_step": {name: count for name, count, _ in _kinds()},
    }


def _exactly_linear(points: list[tuple[int, int]]) -> bool:
    """Whether whole numbers y over x lie on one line, to the last digit."""
    slopes = {((d - b), (c - a)) for (a, b), (c, d) in pairwise(points)}
    return all(p * s == q * r for (p, q) in slopes for (r, s) in slopes)


def _kinds() -> list[tuple[str, int, str]]:
    """Edges that a step adds at the chapter's size, by three ways to count."""
    fused = edges(2, WORDS, UNITS) - edges(1, WORDS, UNITS)
    opened = edges(2, WORDS, UNITS, fused=False) - edges(1, WORDS, UNITS, fused=False)
    products = WORDS * UNITS + UNITS**2
    return [
        ("PyTorch's operators", fused, "log-softmax connects each word with every word"),
        ("log-softmax taken apart", opened, "two edges for each multiplication"),
        ("products as vertices", opened + products, "three edges for each multiplication"),
    ]


# In words ----------------------------------------------------------------------------------------


def _near(count: float, claim: float) -> bool:
    return abs(count - claim) <= NEAR * claim


def _on_parameters(readings: Mapping[str, int]) -> str:
    if not readings:
        return ""
    claim = CLAIMED["parameters"]
    (name, count), *_ = readings.items()
    text = f"The model has {count / 1e6:.1f} million parameters ({name}), "
    if _near(count, claim):
        return f"{text}near the chapter's {claim / 1e6:.1f} million."
    text += f"{count / claim:.1f} times the chapter's {claim / 1e6:.1f} million"
    if _near(count, 10 * claim):
        text += ", which looks like a slip by a factor of ten"
    alike = [f"{n} ({c / 1e6:.2f} million)" for n, c in readings.items() if _near(c, claim)]
    others = f"near it come {' and '.join(alike)}" if alike else "no other reading comes near it"
    return f"{text}; {others}."


def _on_edges(facts: Mapping[str, Any]) -> str:
    claim = CLAIMED["edges"]
    counts = facts["edges_of_a_step"]
    found = ", ".join(f"{count / 1e6:.1f} million with {name}" for name, count in counts.items())
    near = [name for name, count in counts.items() if _near(count, claim)]
    verdict = f"fits with {' and '.join(near)}" if near else "fits with none of these"
    exact = "exactly" if facts["edges_linear"] else "not exactly"
    return (
        f"A step adds {found}; the chapter's estimate, {claim / 1e6:.0f} million, {verdict}. "
        f"Measured edges are {exact} linear in n"
        f"{' and those of the formula' if facts['edges_by_hand'] else ', unlike the formula'}."
    )


def _on_cost(points: list[Point], sizes: tuple[int, int]) -> str:
    if len(points) < 3:  # a line goes through any two
        return ""
    steps = [float(p.steps) for p in points]
    time = linear_fit(steps, [p.times[TRACING] for p in points])
    memory = linear_fit(steps, [p.memory[TRACING] for p in points])
    slope, ratio = _over_seeds(points)
    last = points[-1]
    return (
        f"With {sizes[0]:,} words and {sizes[1]:,} units, n = {points[0].steps} to {last.steps}, "
        f"an influence trace takes {with_interval(slope, '.1f')} ms a step ({_verdict(time)}), "
        f"{with_interval(ratio)} times loss.backward() (intervals over seeds). At n = "
        f"{last.steps} it takes {told(last.memory[TRACING], '.0f')} MiB beyond model and "
        f"activations ({told(memory.slope, '+.2g')} MiB a step, {_verdict(memory)}), where "
        f"loss.backward() takes {told(last.memory[TORCH], '.0f')}."
    )


def _over_seeds(points: list[Point]) -> tuple[Interval, Interval]:
    """Of an influence trace, the milliseconds a step and the ratio to PyTorch's pass."""
    seeds = [seed for seed in points[0].by_seed if all(seed in p.by_seed for p in points)]
    steps = [float(p.steps) for p in points]
    slopes = [linear_fit(steps, [p.by_seed[s][TRACING] for p in points]).slope for s in seeds]
    ratios = [
        geometric([quotient(p.by_seed[s][TRACING], p.by_seed[s][TORCH]) for p in points]).value
        for s in seeds
    ]
    return student(slopes), geometric(ratios)


def _verdict(fit: Fit) -> str:
    if not isfinite(fit.r2):
        return "no line can be told"
    return f"R² {fit.r2:.3f}, {'linear' if fit.r2 >= LINEAR else 'not a plain line'}"


# Tables and figures ------------------------------------------------------------------------------


def _read(readings: Mapping[str, int]) -> Table:
    claim = CLAIMED["parameters"]
    return Table(
        f"Parameters with {WORDS:,} words and {UNITS:,} units; the chapter has 2.1 million",
        ("model", "parameters", "over the chapter's"),
        tuple((name, count, count / claim) for name, count in readings.items()),
    )


def _edge_table() -> Table:
    return Table(
        f"Scalar edges that a step adds, with {WORDS:,} words and {UNITS:,} units",
        ("counted with", "edges", "over the chapter's 30 million", "why"),
        tuple((name, count, count / CLAIMED["edges"], why) for name, count, why in _kinds()),
    )


def _costs(points: list[Point]) -> Table:
    return Table(
        "Cost over the length of the sequence",
        (
            *("steps", "|V'|", "|E'|", "|E'|, softmax apart"),
            *(f"{way}, ms" for way in WAYS),
            *("model and activations, MiB", f"{TORCH}, MiB", f"{TRACING}, MiB"),
        ),
        tuple(
            (
                *(p.steps, p.result["vertices"], p.result["edges"], p.result["edges_apart"]),
                *(p.times[way] for way in WAYS),
                *(p.memory["before"], p.memory[TORCH], p.memory[TRACING]),
            )
            for p in points
        ),
        "Memory of passes is what they take beyond model and activations, at their peak.",
    )


def _plots(points: list[Point], sizes: tuple[int, int]) -> tuple[Plot, ...]:
    steps = [float(p.steps) for p in points]
    title = f"RNN language model, {sizes[0]:,} words, {sizes[1]:,} units"
    return (
        Plot(
            *("treebank-time", f"{title}: time", "steps", "milliseconds"),
            tuple(Series(way, steps, [p.times[way] for p in points]) for way in WAYS),
        ),
        Plot(
            *("treebank-memory", f"{title}: peak memory", "steps", "MiB beyond activations"),
            tuple(Series(w, steps, [p.memory[w] for p in points]) for w in (TORCH, TRACING)),
        ),
        Plot(
            *("treebank-edges", f"{title}: scalar edges", "steps", "million edges"),
            (
                Series("PyTorch's operators", steps, [p.result["edges"] / 1e6 for p in points]),
                Series(
                    "log-softmax taken apart",
                    steps,
                    [p.result["edges_apart"] / 1e6 for p in points],
                ),
                *_claimed(points, sizes),
            ),
            log_y=True,
        ),
    )


def _claimed(points: list[Point], sizes: tuple[int, int]) -> tuple[Series, ...]:
    """The chapter's line, where its model was measured."""
    if sizes != (WORDS, UNITS):
        return ()
    steps = [float(p.steps) for p in points]
    line = [CLAIMED["edges"] / 1e6 * n for n in steps]
    return (Series("the chapter, 30·n million", steps, line, style="dashed"),)
