"""Through which branch of attention does gradient come, if a word has to be found again?

Question: a model says whether the first word of a sequence comes a second time. Its attention
reads its input x by four branches: query, key, value, and the skip past it. Du et al. (2023) took
the largest path from each word's x to the score of the right answer, and found that most of it runs
through the keys (mean .0301; query .0174, skip .0094, value .00095): that of the repeated word
through its key (.269), that of the first word through its query (.174). Is that so again? Does it
depend on how operators are cut? And is it what the model does?

Expectation: both orders hold where softmax and layer norm are written in pieces, as their library
has them, and often not where each is one operator, as in PyTorch: a pilot had 5 of 5 models against
4 and 1 of 15. What the model does is found by path patching, which knows of no operators.

Method: their task (20 words, of which one is never used, length 10, half of the sequences with
exactly one repetition, 10,000, 70% to train) and their settings: one layer of BERT, hidden 16,
intermediate 32, 2 heads, initialisation 0.02, no dropout, Adam 0.001, batches of 32, 42 epochs; the
answer is read off the first word. On held-out sequences x is handed to the four branches as four
leaves. Their measure: sums inside operators, the most positive and the most negative of what
operators hand back, sorted again after every operator (``operator_paths``). A word's value is that
of its largest element; the branch that wins gets it, the others 0. Three writings with equal values
and gradients: ``fused``; ``opened`` by ``gt.watch(model, open=("softmax", "layer_norm"))``; and
``theirs`` by hand, with variance as E[x²] - E[x]² and paths through the shift of softmax. Beside
them, without sorting, the gradient by size and the largest path of elements. Path patching: a
word is replaced by another, so that the answer turns, but only in what one branch reads; the effect
is by how much the score of the right answer falls. Whether it is the same branch is asked of each
model's means, and of single sequences.

Seeds: one for data, initialisation and order of training of each model; models are drawn;
intervals are Wilson's for counts of models, and a bootstrap over models. Models that got less than
95% right did not learn the task, and are left out.

Limits: One task, one small architecture, and one way to train it. Path patching replaces the word
in all that one branch reads, and asks of means over sequences, which is one of several questions
that may be meant by "what the model does". The comparison sequence by sequence was added after
results had been seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import gradtrace as gt
from gradtrace.experiments.first_token_model import (
    BRANCHES,
    LENGTH,
    WORDS,
    Data,
    Encoder,
    sequences,
    trained,
)
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
from gradtrace.experiments.harness.statistics import Interval, bootstrap, out_of, wilson
from gradtrace.experiments.operator_paths import most_positive
from gradtrace.semirings import MAX

QUICK = {"sequences": 4000, "epochs": 4, "samples": 100, "few": 40, "side_by_side": 2}
FULL = {"sequences": 10_000, "epochs": 42, "samples": 1000, "few": 100, "side_by_side": 10}
SEEDS = Seeds(quick=2, full=20)
TIMED = False
FIGURE = "claims"

WRITINGS: dict[str, tuple[str, ...]] = {
    "fused": (),
    "opened": ("softmax", "layer_norm"),
    "theirs": (),
}
MEASURES = {
    "fused": "fused",
    "opened": "opened",
    "theirs": "as theirs",
    "fused, unsorted": "fused, not sorted again",
    "opened, unsorted": "opened, not sorted again",
    "theirs, unsorted": "as theirs, not sorted again",
    "largest, fused": "largest path of elements, fused",
    "largest, opened": "largest path of elements, opened",
    "gradient": "gradient, by size",
}
THEIRS = {"key": 0.0301, "query": 0.0174, "skip": 0.0094, "value": 0.00095}
THEIR_WORDS = {("first", "query"): 0.174, ("repeated", "key"): 0.269}
CLAIMED = {"first": "query", "repeated": "key"}

Values = dict[str, Tensor]
"""A number for every element of x, by branch: (sample, word, hidden)."""


# Measuring ----------------------------------------------------------------------------------------


def scored(model: Encoder, x: Tensor, labels: Tensor, writing: str) -> tuple[Values, Tensor, Any]:
    """A leaf that is x for each branch, the sum of the scores of right answers, and the watch.

    The scores of all samples are added up: each element of x has paths to its own sample's only.
    """
    leaves = {name: x.clone().requires_grad_() for name in BRANCHES}
    model.write(writing == "theirs")
    with gt.watch(model, open=WRITINGS[writing], names=leaves) as watch:
        score = model.read(leaves).gather(1, labels[:, None]).sum()
    model.write(False)
    return leaves, score, watch


def measured(model: Encoder, x: Tensor, labels: Tensor, few: int) -> dict[str, Values]:
    """The values of all measures; those of paths of elements for the first sequences only."""
    found: dict[str, Values] = {}
    for writing in WRITINGS:
        leaves, score, watch = scored(model, x, labels, writing)
        found[writing] = most_positive(score, leaves)
        found[f"{writing}, unsorted"] = most_positive(score, leaves, sort=False)
        if writing == "fused":
            gradient = watch.backward(score)
            found["gradient"] = {name: gradient[name].abs() for name in BRANCHES}
        if writing != "theirs":
            _, score, watch = scored(model, x[:few], labels[:few], writing)
            found[f"largest, {writing}"] = dict(watch.backward(score, MAX))
    return found


def best_of(values: Values) -> Tensor:
    """Each word's largest element by branch: (branch, sample, word)."""
    return torch.stack([values[name].amax(-1) for name in BRANCHES])


def won(best: Tensor) -> Tensor:
    """Only the branch of the largest keeps its value, and the others have 0."""
    return torch.where(best == best.amax(0), best, 0.0)


def groups_of(data: Data) -> dict[str, Tensor]:
    """Which words are meant: (sample, word)."""
    every = torch.arange(LENGTH).expand(len(data.words), -1)
    first, again = every == 0, (every == data.places[:, None]) & (data.places[:, None] > 0)
    return {"all": every >= 0, "first": first, "repeated": again, "other": ~first & ~again}


def means(values: Values, groups: Mapping[str, Tensor]) -> Result:
    """``{words: {branch: mean of what it won}}``."""
    taken = won(best_of(values))
    return {
        group: dict(zip(BRANCHES, (float(one[where[: one.shape[0]]].mean()) for one in taken)))
        for group, where in groups.items()
    }


def another_word(data: Data, group: str, seed: int) -> Tensor:
    """The sequences with the first word, or its repetition, replaced, so that the answer turns.

    The first is replaced by a word that the sequence does not have, the repeated one by any other
    word but the first.
    """
    generator = torch.Generator().manual_seed(seed)
    free = torch.rand(len(data.words), WORDS, generator=generator)
    free[:, 0] = -1.0
    free.scatter_(1, data.words if group == "first" else data.words[:, :1], -1.0)
    at = torch.zeros_like(data.places) if group == "first" else data.places
    return data.words.scatter(1, at[:, None], free.argmax(1, keepdim=True))


def patched(model: Encoder, data: Data, group: str, seed: int) -> Tensor:
    """By how much the score of the right answer falls, by branch and sequence, if only that branch
    reads the other word; last, if all do.
    """
    x, other = model.embed(data.words), model.embed(another_word(data, group, seed))
    clean = dict.fromkeys(BRANCHES, x)
    swaps = [{**clean, name: other} for name in BRANCHES] + [dict.fromkeys(BRANCHES, other)]
    before = model.read(clean)[:, 1]
    return torch.stack([before - model.read(swap)[:, 1] for swap in swaps])


def patching(model: Encoder, data: Data, found: Mapping[str, Values], seed: int) -> Result:
    """Effects by branch of the first word and of the repeated one, and how often a measure has the
    same branch in front: the share of sequences.
    """
    again = data.labels > 0
    some = data.repeated()
    effects = {group: patched(model, some, group, seed) for group in CLAIMED}
    result: Result = {
        group: dict(zip((*BRANCHES, "together"), each.mean(1).tolist()))
        for group, each in effects.items()
    }
    result["same"] = {}
    for kind, values in found.items():
        best = best_of(values)
        which = again[: best.shape[1]]
        places = {"first": torch.zeros_like(some.places), "repeated": some.places}
        result["same"][kind] = {}
        for group, effect in effects.items():
            at = places[group][: int(which.sum())]
            front = best[:, which].gather(2, at.expand(len(BRANCHES), -1)[..., None])[..., 0]
            same = front.argmax(0) == effect[: len(BRANCHES), : len(at)].argmax(0)
            result["same"][kind][group] = float(same.double().mean())
    return result


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """Models that are trained side by side."""
    rest = {name: settings[name] for name in ("sequences", "epochs", "samples", "few")}
    size = settings["side_by_side"]
    return [
        {"seeds": list(range(start, min(start + size, seeds))), **rest}
        for start in range(0, seeds, size)
    ]


def measure(cell: Cell, tick: Tick) -> Result:
    """Train models, and measure their validation sequences."""
    count = cell["sequences"]
    data = [sequences(count, seed) for seed in cell["seeds"]]
    end = 7 * count // 10
    models = trained([each.part(0, end) for each in data], cell["seeds"], cell["epochs"], tick)
    found = []
    for seed, model, each in zip(cell["seeds"], models, data):
        tick(f"paths of model {seed}")
        found.append({"seed": seed, **examined(model, each.part(end, count), cell, seed)})
    return {"models": found}


def examined(model: Encoder, rest: Data, cell: Cell, seed: int) -> Result:
    """Everything that is measured of one model."""
    accuracy = float((model(rest.words).argmax(1) == rest.labels).double().mean())
    some = rest.part(0, cell["samples"])
    x, groups = model.embed(some.words), groups_of(some)
    values = measured(model, x, some.labels, cell["few"])
    # no other word than the first has a path by its query or past attention
    silent = all(
        bool((values["largest, opened"][name][~groups["first"][: cell["few"]]] == 0).all())
        for name in ("query", "skip")
    )
    return {
        "accuracy": accuracy,
        "silent": silent,
        "means": {kind: means(values[kind], groups) for kind in MEASURES},
        "patching": patching(model, some, values, seed),
    }


# Concluding ---------------------------------------------------------------------------------------

LEARNED = 0.95
ORDER = ("key", "query", "skip", "value")


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in two sentences."""
    models, learned = facts["models"], facts["learned"]
    if "claims" not in facts:
        return f"{learned} of {models} models learned the task, so nothing can be said of paths."
    both = {kind: facts["claims"][kind]["both"] for kind in MEASURES}
    said = {
        group: stands(facts["patched"][group], name, int(learned))
        for group, name in CLAIMED.items()
    }
    theirs, fused = (out_of(int(both[kind]), int(learned)) for kind in ("theirs", "fused"))
    return (
        "Which part of a model a gradient seems to come through depends on how finely its "
        f"arithmetic is cut: what Du et al. say of two words holds in {theirs} models cut as "
        f"theirs and in {fused} cut as PyTorch does. By path "
        f"patching their claim on the repeated word {said['repeated']}, on the first it "
        f"{said['first']}."
    )


def conclude(rows: Sequence[Row]) -> Findings:
    """Their claims one by one, by each measure, and what path patching says."""
    models = sorted((each for row in rows for each in row.result["models"]), key=_seed)
    results = [each for each in models if each["accuracy"] >= LEARNED]
    known: dict[str, Any] = {"models": len(models), "learned": len(results)}
    known["silent"] = all(each["silent"] for each in models)
    if not results:
        return Findings(f"None of {len(models)} models learned the task.", facts=known)
    known["claims"] = {kind: claims(results, kind) for kind in MEASURES}
    known["patched"] = {
        group: {name: sum(front(r["patching"][group]) == name for r in results) for name in ORDER}
        for group in CLAIMED
    }
    known["agree"] = {kind: agreeing(results, kind) for kind in MEASURES}
    known["both of all"] = {kind: claims(models, kind)["both"] for kind in MEASURES}
    tables = (claims_table(results), patching_table(results), words_table(results))
    return Findings(sentence(results, known), tables, plots(results), known)


def _seed(result: Result) -> int:
    return int(result["seed"])


def front(values: Mapping[str, float]) -> str:
    """The branch with the largest value."""
    return max(BRANCHES, key=lambda name: values[name])


def claims(results: Sequence[Result], kind: str) -> dict[str, int]:
    """In how many models each claim of Du et al. holds."""
    found = dict.fromkeys(("first", "repeated", "both", "key", "order"), 0)
    for result in results:
        each = result["means"][kind]
        holds = {group: front(each[group]) == name for group, name in CLAIMED.items()}
        for group in CLAIMED:
            found[group] += holds[group]
        found["both"] += all(holds.values())
        found["key"] += front(each["all"]) == "key"
        found["order"] += sorted(BRANCHES, key=lambda n: -each["all"][n]) == list(ORDER)
    return found


def agreeing(results: Sequence[Result], kind: str) -> int:
    """The models in which a measure has the branches of path patching in front, for both words."""
    return sum(
        all(front(r["means"][kind][group]) == front(r["patching"][group]) for group in CLAIMED)
        for r in results
    )


def over(results: Sequence[Result], ask: Any) -> Interval:
    """The mean over models, with its interval; of one model, nothing is known but its value."""
    values = [float(ask(result)) for result in results]
    found = bootstrap(values, lambda some: sum(some) / len(some))
    return found if len(results) > 1 else Interval(found.value, found.value, found.value)


def sentence(results: Sequence[Result], known: Mapping[str, Any]) -> str:
    """What was found, in words."""
    total, held, every = known["learned"], known["claims"], known["models"]
    both = {kind: out_of(held[kind]["both"], total) for kind in MEASURES}
    whole = {kind: out_of(known["both of all"][kind], every) for kind in MEASURES}
    patched_ = known["patched"]
    return (
        f"{out_of(total, every)} models learned the task. {plainly(known)} Both orders, the "
        "repeated word by its key and the first word by its query, hold in "
        f"{both['opened, unsorted']} of these models opened by gradtrace, in "
        f"{both['theirs, unsorted']} with operators cut as theirs, and in "
        f"{both['fused, unsorted']} with softmax and layer norm as one operator each. With the "
        "largest and the least sorted again after every operator, as Du et al. do, these are "
        f"{both['opened']}, {both['theirs']} and {both['fused']}. Of all models, learned or not, "
        f"they hold opened in {whole['opened, unsorted']} without sorting again and in "
        f"{whole['opened']} with it. Path patching has in front for the repeated word "
        f"{fronts(patched_['repeated'], total)}. For the first word it is "
        f"{fronts(patched_['first'], total)}. {agreement(results, known)} {compared(results)}"
    )


def agreement(results: Sequence[Result], known: Mapping[str, Any]) -> str:
    """Which writing has the branches of path patching in front, model by model."""
    agree = {kind: out_of(known["agree"][kind], len(results)) for kind in MEASURES}
    gain = over(results, lambda r: agreeing([r], "fused") - agreeing([r], "opened"))
    sign = gain.sign if len(results) > 1 else 0
    words = {1: "the fused writing", -1: "the opened one", 0: "neither writing for sure"}
    return (
        f"These branches are a measure's for both words in {agree['fused']} models fused, in "
        f"{agree['opened']} opened and in {agree['theirs']} cut as theirs; not sorted again in "
        f"{agree['opened, unsorted']} opened. So model by model path patching agrees more with "
        f"{words[sign]}: fused less opened is {gain} of models."
    )


def same(result: Result, kind: str) -> float:
    """The share of sequences with the branch of path patching in front, mean of both words."""
    found = result["patching"]["same"][kind]
    return float(sum(found[group] for group in CLAIMED) / len(CLAIMED))


def compared(results: Sequence[Result]) -> str:
    """Whether path patching agrees more with opened operators or with fused ones."""
    gain = over(results, lambda r: same(r, "opened") - same(r, "fused"))
    sign = gain.sign if len(results) > 1 else 0
    words = {1: "opened operators name", -1: "fused operators name", 0: "it cannot be told which"}
    end = "the branch of path patching more often" if sign else "names the branch more often"
    return (
        f"Sequence by sequence {words[sign]} {end}: opened less fused is {gain} of sequences, the "
        "mean of both words."
    )


def most(found: Mapping[str, int]) -> str:
    """The branch in front in most models."""
    return max(ORDER, key=lambda name: found[name])


def stands(found: Mapping[str, int], name: str, total: int) -> str:
    """Whether path patching has a branch in front in most models."""
    share = wilson(found[name], total)
    return "stands" if share.low > 0.5 else "does not stand" if share.high < 0.5 else "is open"


def fronts(found: Mapping[str, int], total: int) -> str:
    """Which branches are in front, and in how many models."""
    some = sorted((name for name in found if found[name]), key=lambda name: -found[name])
    return ", ".join(f"the {name} in {out_of(found[name], total)}" for name in some) or "none"


def plainly(known: Mapping[str, Any]) -> str:
    """For a reader who knows none of the words."""
    total, found = known["learned"], known["patched"]
    said = {group: stands(found[group], name, total) for group, name in CLAIMED.items()}
    return (
        "In plain words: which part of the model a gradient seems to come through depends on how "
        "finely the same arithmetic is cut into steps. To swap a word in what one part reads does "
        f"not: by that, the repeated word matters most by its {most(found['repeated'])} and the "
        f"first word by its {most(found['first'])}. So the claim that the repeated word works by "
        f"its key {said['repeated']}, and that the first word works by its query {said['first']}."
    )


def claims_table(results: Sequence[Result]) -> Table:
    """In how many models claims hold, by measure, and agreement with path patching."""
    total = len(results)

    def line(kind: str) -> tuple[str, ...]:
        held = claims(results, kind)
        same = [str(over(results, lambda r, g=g: r["patching"]["same"][kind][g])) for g in CLAIMED]
        return (
            MEASURES[kind],
            out_of(held["first"], total),
            out_of(held["repeated"], total),
            out_of(held["both"], total),
            out_of(held["order"], total),
            out_of(agreeing(results, kind), total),
            *same,
        )

    return Table(
        "Claims of Du et al. by measure, and agreement with path patching",
        ("measure", "first: query", "repeated: key", "both", "whole order", "as patching")
        + ("same, first", "same, repeated"),
        tuple(line(kind) for kind in MEASURES),
        "Models, with Wilson's 95% intervals. As patching: for both words the branch in front is "
        "that of path patching. Same: the share of single sequences where it is, a bootstrap "
        "over models.",
    )


def patching_table(results: Sequence[Result]) -> Table:
    """Effects by branch."""
    rows = tuple(
        (group, name, short(over(results, lambda r, g=group, n=name: r["patching"][g][n])))
        + (
            (sum(front(r["patching"][group]) == name for r in results),)
            if name in ORDER
            else (None,)
        )
        for group in CLAIMED
        for name in (*ORDER, "together")
    )
    return Table(
        "Path patching: by how much the score of the right answer falls",
        ("word", "branch that reads another", "effect", "models with it in front"),
        rows,
        "Sequences with a repetition. Other words than the first have no query or skip that the "
        "answer could read.",
    )


def words_table(results: Sequence[Result]) -> Table:
    """What branches won, by word."""

    def line(group: str, name: str) -> tuple[str | float | None, ...]:
        theirs = THEIRS[name] if group == "all" else THEIR_WORDS.get((group, name))
        ours = [
            short(over(results, lambda r, k=kind: r["means"][k][group][name]))
            for kind in ("theirs", "opened", "fused")
        ]
        return (group, name, theirs, *ours)

    return Table(
        "Mean of what a branch won, by word",
        ("word", "branch", "Du et al.", "as theirs", "opened", "fused"),
        tuple(line(g, n) for g in ("all", "first", "repeated") for n in ORDER),
        f"95% intervals, a bootstrap over {len(results)} models.",
    )


def short(found: Interval) -> str:
    """A small number with its interval."""
    if found.low == found.high:
        return f"{found.value:.4f}"
    return f"{found.value:.4f} [{found.low:.4f}, {found.high:.4f}]"


def plots(results: Sequence[Result]) -> tuple[Plot, ...]:
    """Claims by measure, effects of patching, and what branches won."""
    total = len(results)

    def bars(label: str, names: Sequence[str], found: Sequence[Interval]) -> Series:
        y, low, high = zip(*found)
        return Series(label, names, y, low, high, style="bars")

    kinds = ("theirs", "opened", "fused", "gradient")
    held = {kind: claims(results, kind) for kind in kinds}
    words = {"first": "first word: query", "repeated": "repeated word: key", "both": "both"}
    shares = tuple(
        bars(said, kinds, [wilson(held[kind][group], total) for kind in kinds])
        for group, said in words.items()
    )
    agree = bars("as path patching", kinds, [wilson(agreeing(results, k), total) for k in kinds])
    effects = tuple(
        bars(
            f"{group} word",
            ORDER,
            [over(results, lambda r, g=group, n=name: r["patching"][g][n]) for name in ORDER],
        )
        for group in CLAIMED
    )
    return (
        Plot("claims", "Models in which claims hold", "operators", "share", (*shares, agree)),
        Plot("patching", "Path patching, by branch", "branch", "fall of the score", effects),
    )
