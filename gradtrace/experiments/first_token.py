"""Through which branch of attention does gradient come, if a word has to be found again?

Question: a model says whether the first word of a sequence comes a second time. Its attention
reads its input x by four branches: query, key, value, and the skip past it. Du et al. (2023) took
the largest path from each word's x to the score of the right answer, and found that most of it runs
through the keys (mean .0301; query .0174, skip .0094, value .00095): that of the repeated word
through its key (.269), that of the first word through its query (.174). Is that so again?

Expectation: the order key > query > skip > value; the repeated word by its key, the first word by
its query. Other numbers: a path's weight depends on the weights that training found, and on what
counts as a path. Du et al. sum inside operators (a matrix product is one step) and keep the sign;
from one *element* to the next there are many more paths, each smaller.

Method: their task (20 words, of which one is never used, length 10, half of the sequences with
exactly one repetition, 10,000, 70% to train) and their model in plain torch: one layer of BERT,
hidden 16, 2 heads, the answer read off the first word. Adam 0.005, batches of 128, no dropout (with
their 0.2 a try did not get beyond 72%), trained for two lengths. On other sequences x is handed to
the four branches as four leaves, so the value of a leaf is that of the paths through its branch.
Four measures: ``operator`` (theirs: the most positive at every fork of operators, sums within
them), ``gradient`` (the sum of all paths, by size), ``positive`` (the most positive path of
elements) and ``largest`` (by size). A word's value is that of its largest element; the branch that
wins gets it and the others 0, as theirs. Beside them influence: whose path takes a branch, by both
rules; at scalar granularity for the first word's elements and the repeated one's, at operator
granularity for x as a whole.

Seeds: one for data, initialisation and order of training; intervals are a bootstrap over seeds.
Models that got less than 95% right did not learn the task, and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
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
from gradtrace.experiments.harness.statistics import Interval, bootstrap
from gradtrace.semirings import EXTREMES, MAX

QUICK = {"sequences": 10_000, "epochs": [10], "samples": 64, "traced": 16}
FULL = {"sequences": 10_000, "epochs": [10, 30], "samples": 1000, "traced": 100}
SEEDS = Seeds(quick=1, full=15)
TIMED = False
FIGURE = "operators"

WORDS, LENGTH, HIDDEN, HEADS, BATCH, RATE = 20, 10, 16, 2, 128, 0.005
BRANCHES = ("key", "query", "skip", "value")
MEASURES = {
    "operator": "largest path of operators, signed",
    "gradient": "gradient, by size",
    "positive": "most positive path of elements",
    "largest": "largest path of elements, by size",
}
THEIRS = {"key": 0.0301, "query": 0.0174, "value": 0.00095, "skip": 0.0094}


class Skip(nn.Module):
    """``out = x``: an operator of its own, so that the branch has a place in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        """A copy."""
        return x.clone()


class Attention(nn.Module):
    """``norm(skip(x) + mix(softmax(query(x)·key(x)ᵀ / √d) · value(x)))``, each branch a module."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.skip, self.mix, self.norm = Skip(), nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        """``x`` is the input by branch: the same tensor, or a leaf for each."""
        q, k, v = (
            getattr(self, name)(x[name]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )  # (batch, head, word, hidden / heads)
        scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
        read = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        out: Tensor = self.norm(self.skip(x["skip"]) + self.mix(read))
        return out


class Encoder(nn.Module):
    """One layer of BERT with a classifier on the first word, cut where gradient forks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.norm, self.last = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.pool, self.answer = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2)

    def embed(self, words: Tensor) -> Tensor:
        """x, the input of attention: (batch, word, hidden)."""
        x: Tensor = self.norm(self.words(words) + self.places.weight)
        return x

    def attend(self, x: Mapping[str, Tensor]) -> Tensor:
        """From x, by branch, to the second fork."""
        out: Tensor = self.attention(x)
        return out

    def decide(self, through: Tensor, past: Tensor) -> Tensor:
        """From the second fork, through the wide layer and past it, to the two scores."""
        wide = self.narrow(nn.functional.gelu(self.wide(through)))
        first = self.last(past + wide)[:, 0]
        scores: Tensor = self.answer(torch.tanh(self.pool(first)))
        return scores

    def read(self, x: Tensor) -> Tensor:
        """The scores of an x that all branches share."""
        u = self.attend(dict.fromkeys(BRANCHES, x))
        return self.decide(u, u)

    def forward(self, words: Tensor) -> Tensor:
        """(batch, word) -> (batch, 2)."""
        return self.read(self.embed(words))


class Data(NamedTuple):
    """Sequences, whether the first word comes again, and where (0: nowhere)."""

    words: Tensor
    labels: Tensor
    places: Tensor

    def part(self, start: int, stop: int) -> Data:
        """Some of them."""
        return Data(*(field[start:stop] for field in self))


def sequences(count: int, seed: int) -> Data:
    """Half of them with one repetition of the first word; word 0 does not occur."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(1, WORDS, (count, 1), generator=generator)
    # A step of 1 to WORDS - 2 around the circle of words that occur is any word but the first.
    step = torch.randint(1, WORDS - 1, (count, LENGTH), generator=generator)
    words = 1 + (first - 1 + step) % (WORDS - 1)
    words[:, :1] = first
    labels = torch.randperm(count, generator=generator) % 2
    places = torch.randint(1, LENGTH, (count,), generator=generator) * labels
    return Data(words.scatter(1, places[:, None], first), labels, places)


def trained(data: Data, cell: Cell, tick: Tick) -> Encoder:
    """The model after all epochs; its weights need no gradient any more."""
    model = Encoder()
    for each in model.modules():
        if isinstance(each, (nn.Linear, nn.Embedding)):
            nn.init.normal_(each.weight, std=0.2)  # BERT's 0.02 is for hidden 768, not 16
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    for epoch in range(cell["epochs"]):
        tick(f"epoch {epoch + 1} of {cell['epochs']}")
        for batch in torch.split(torch.randperm(len(data.words)), BATCH):
            loss = nn.functional.cross_entropy(model(data.words[batch]), data.labels[batch])
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
    return model.requires_grad_(False)


# Measuring ----------------------------------------------------------------------------------------

Values = dict[str, Tensor]
"""A number for every element of x, by branch: (sample, word, hidden)."""


def copies(x: Tensor) -> Values:
    """Leaves that are x, one for each branch."""
    return {name: x.clone().requires_grad_() for name in BRANCHES}


def by_path(model: Encoder, x: Tensor, labels: Tensor) -> dict[str, Values]:
    """Sum, most positive and largest of the paths of elements, through each branch.

    The scores of all samples are added up: each element of x has paths to its own sample's only.
    """
    leaves = copies(x)
    u = model.attend(leaves)
    score = model.decide(u, u).gather(1, labels[:, None]).sum()
    gradient = gt.backward(score, names=leaves)
    extremes = gt.backward(score, EXTREMES, names=leaves)
    largest = gt.backward(score, MAX, names=leaves)
    return {
        "gradient": {name: gradient[name].abs() for name in BRANCHES},
        "positive": {name: extremes[name][0] for name in BRANCHES},
        "negative": {name: extremes[name][1] for name in BRANCHES},
        "largest": {name: largest[name] for name in BRANCHES},
    }


def by_operator(model: Encoder, x: Tensor, labels: Tensor) -> Values:
    """The largest path of operators, signed, as Du et al. define it.

    Inside an operator all is summed; where operators share an input, the most positive of what they
    hand back is kept at every element, and the most negative beside it, for a sign may turn.
    """
    leaves = copies(x)
    u = model.attend(leaves)
    fork = {name: u.detach().clone().requires_grad_() for name in ("through", "past")}
    score = model.decide(**fork).gather(1, labels[:, None]).sum()
    handed = gt.backward(score, names=fork)
    ends = [each(handed["through"], handed["past"]) for each in (torch.maximum, torch.minimum)]
    high, low = (gt.backward(u, names=leaves, cotangent=end) for end in ends)
    return {name: torch.maximum(high[name], low[name]) for name in BRANCHES}


def words_of(values: Values, *, win: bool) -> Tensor:
    """Each word's largest element by branch: (branch, sample, word).

    With ``win`` only the branch of the largest keeps it, and the others have 0.
    """
    best = torch.stack([values[name].amax(-1) for name in BRANCHES])
    return torch.where(best == best.amax(0), best, 0.0) if win else best


def groups_of(data: Data) -> dict[str, Tensor]:
    """Which words are meant: (sample, word)."""
    every = torch.arange(LENGTH).expand(len(data.words), -1)
    first, again = every == 0, (every == data.places[:, None]) & (data.places[:, None] > 0)
    return {"all": every >= 0, "first": first, "repeated": again, "other": ~first & ~again}


def summary(values: Values, groups: Mapping[str, Tensor]) -> Result:
    """``{kind: {words: {branch: mean}}}``: what a branch won, and the best of it anyway."""
    kinds = {"won": words_of(values, win=True), "best": words_of(values, win=False)}
    return {
        kind: {
            group: {name: float(one[where].mean()) for name, one in zip(BRANCHES, found)}
            for group, where in groups.items()
        }
        for kind, found in kinds.items()
    }


def shares(model: Encoder, x: Tensor, labels: Tensor, place: Tensor | None = None) -> Result:
    """Whose path takes each branch, by both rules: ``{rule: {branch: share}}``.

    With a place in each sequence, of the elements of x there; without, x is followed as a whole, at
    operator granularity, and the share is of sequences.
    """
    found: Result = {}
    for rule in ("greedy", "viterbi"):
        with gt.watch(model) as watch:
            if place is None:
                whole = x.clone().requires_grad_()
            else:  # only this word's x needs a gradient, so only its paths are counted
                at = place[:, None, None].expand(-1, 1, HIDDEN)
                whole = x.scatter(1, at, x.gather(1, at).requires_grad_())
            scores = model.read(whole).gather(1, labels[:, None])[:, 0]
        granularity = "operator" if place is None else "scalar"
        trace = watch.trace(scores, rule=rule, granularity=granularity)
        table = trace.influence({name: f"attention.{name}" for name in BRANCHES})
        found[rule] = table.shares
    return found


def expected(values: Values, place: Tensor) -> dict[str, float]:
    """The share of a place's elements at which a branch has the largest value."""
    at = place[:, None].expand(-1, HIDDEN)[:, None]  # (sample, 1, hidden)
    stack = torch.stack([values[name].gather(1, at)[:, 0] for name in BRANCHES])
    return {name: float((stack.argmax(0) == n).double().mean()) for n, name in enumerate(BRANCHES)}


def influence(model: Encoder, x: Tensor, data: Data, paths: dict[str, Values]) -> Result:
    """Shares for the first word, the repeated one and whole sequences; and how far (``apart``) they
    are from what the branches' values say: greedy follows the largest gradient, viterbi the
    largest path.
    """
    found: Result = {"sequence": shares(model, x, data.labels)}
    gaps = []
    for group, some in (("first", data.labels >= 0), ("repeated", data.labels > 0)):
        place = data.places[some] * (group == "repeated")
        found[group] = shares(model, x[some], data.labels[some], place)
        for rule, kind in (("greedy", "gradient"), ("viterbi", "largest")):
            mine = expected({name: v[: len(x)][some] for name, v in paths[kind].items()}, place)
            gaps += [abs(found[group][rule][name] - mine[name]) for name in BRANCHES]
    return {**found, "apart": max(gaps)}


def facts(paths: dict[str, Values], groups: Mapping[str, Tensor]) -> Result:
    """What holds of every model: the largest path is the largest of both signs; and as the answer
    is read off the first word, no other word has a path by its query or past attention.
    """
    largest, up, down = (paths[kind] for kind in ("largest", "positive", "negative"))
    signs = all(
        torch.allclose(largest[name], torch.maximum(up[name], -down[name])) for name in BRANCHES
    )
    silent = all(bool((largest[name][~groups["first"]] == 0).all()) for name in ("query", "skip"))
    return {"signs": signs, "silent": silent}


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """A model for each seed and length of training."""
    lengths = settings["epochs"]
    return [{**settings, "seed": seed, "epochs": n} for seed in range(seeds) for n in lengths]


def measure(cell: Cell, tick: Tick) -> Result:
    """Train a model, and measure its validation sequences."""
    count = cell["sequences"]
    data = sequences(count, cell["seed"])
    train, rest = data.part(0, 7 * count // 10), data.part(7 * count // 10, count)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cell["seed"])
        model = trained(train, cell, tick)
    accuracy = float((model(rest.words).argmax(1) == rest.labels).double().mean())
    some = rest.part(0, cell["samples"])
    x, groups = model.embed(some.words), groups_of(some)
    tick("paths")
    paths = by_path(model, x, some.labels)
    values = {"operator": by_operator(model, x, some.labels), **paths}
    tick("influence")
    few = some.part(0, cell["traced"])
    return {
        "accuracy": accuracy,
        "means": {kind: summary(values[kind], groups) for kind in MEASURES},
        "influence": influence(model, x[: len(few.words)], few, paths),
        "facts": facts(paths, groups),
    }


# Concluding ---------------------------------------------------------------------------------------

LEARNED = 0.95
ORDER = ("key", "query", "skip", "value")
THEIR_WORDS = {("first", "query"): 0.174, ("repeated", "key"): 0.269}


def headline(facts: Mapping[str, Any]) -> str:
    """The result in a sentence."""
    models, learned = facts["models"], facts["learned"]
    if "claims" not in facts:
        return f"{learned} of {models} models learned the task, so nothing can be said of paths."
    held = facts["claims"]["operator"]
    return (
        f"In {held['key']} of {learned} models the key has the largest paths, as Du et al. say; "
        f"their whole order, key > query > skip > value, is that of {held['order']}."
    )


def conclude(rows: Sequence[Row]) -> Findings:
    """Their claims one by one, by each measure."""
    ordered = sorted(rows, key=lambda row: (row.cell["epochs"], row.cell["seed"]))
    lengths: dict[int, list[Result]] = {}
    for row in ordered:
        if row.result["accuracy"] >= LEARNED:
            lengths.setdefault(row.cell["epochs"], []).append(row.result)
    # The shortest training that was enough: longer makes models surer, and gradients smaller.
    results = next(iter(lengths.values()), [])
    checks = {name: all(row.result["facts"][name] for row in rows) for name in ("signs", "silent")}
    apart = max((row.result["influence"]["apart"] for row in rows), default=0.0)
    shortest = min(lengths, default=0)
    models = sum(row.cell["epochs"] == shortest for row in rows) if lengths else len(rows)
    counts = {"models": models, "learned": len(results), "epochs": shortest}
    if not results:
        known = {**checks, **counts, "apart": apart}
        return Findings(f"None of {models} models learned the task.", facts=known)
    held = {kind: claims(results, kind) for kind in MEASURES}
    known = {
        **checks,
        **counts,
        "apart": apart,
        "claims": held,
        "means": {kind: {n: mean(results, kind, "all", n) for n in BRANCHES} for kind in MEASURES},
    }
    tables = (means_table(results), words_table(results), influence_table(results))
    said = f"{sentence(results, held, counts)} {longer(lengths)}".strip()
    return Findings(said, (*tables, lengths_table(lengths)), plots(results), known)


def mean(results: Sequence[Result], kind: str, group: str, branch: str) -> float:
    """What a branch won of some words by one measure, over seeds."""
    return float(sum(r["means"][kind]["won"][group][branch] for r in results) / len(results))


def interval(results: Sequence[Result], kind: str, group: str, branch: str) -> Interval:
    """The same with its interval over seeds; of one seed, nothing is known but its value."""
    found = bootstrap(list(results), lambda some: mean(some, kind, group, branch))
    return found if len(results) > 1 else Interval(found.value, found.value, found.value)


def claims(results: Sequence[Result], kind: str) -> dict[str, int]:
    """In how many models each claim of Du et al. holds."""
    found = {"order": 0, "key": 0, "repeated": 0, "first": 0}
    for result in results:
        won = result["means"][kind]["won"]
        found["order"] += sorted(BRANCHES, key=lambda n: -won["all"][n]) == list(ORDER)
        found["key"] += max(BRANCHES, key=lambda n: won["all"][n]) == "key"
        found["repeated"] += max(BRANCHES, key=lambda n: won["repeated"][n]) == "key"
        found["first"] += max(BRANCHES, key=lambda n: won["first"][n]) == "query"
    return found


def sentence(
    results: Sequence[Result], held: dict[str, dict[str, int]], counts: dict[str, int]
) -> str:
    """What was found, in words."""
    total = counts["learned"]
    theirs, paths = held["operator"], held["largest"]
    ranked = sorted(BRANCHES, key=lambda n: -mean(results, "operator", "all", n))
    said = ", ".join(f"{n} {short(interval(results, 'operator', 'all', n))}" for n in ranked)
    elements = sorted(BRANCHES, key=lambda n: -mean(results, "largest", "all", n))
    small = ", ".join(f"{n} {mean(results, 'largest', 'all', n):.4f}" for n in elements)
    smaller = total_of(results, "operator") / max(total_of(results, "largest"), 1e-300)
    return (
        f"{total} of {counts['models']} models learned the task in {counts['epochs']} epochs. "
        f"Measured as Du et al. did, by the largest signed path of operators, the means are {said} "
        f"(theirs: key .0301, query .0174, skip .0094, value .00095). {judged(theirs, total)} "
        f"Between single elements the largest paths are {smaller:.0f} times smaller in all "
        f"({small}), and there {told(paths, total)}. The numbers are not theirs, as each model "
        f"finds weights of its own (the key's mean runs from {spread(results)}), ours without "
        f"dropout, and as layer norm and softmax are single operators here; the two measures "
        f"differ as one sums inside operators what the other takes apart."
    )


def longer(lengths: Mapping[int, Sequence[Result]]) -> str:
    """How the numbers move if training goes on."""
    if len(lengths) < 2:
        return ""
    means = {n: mean(some, "operator", "all", "key") for n, some in lengths.items()}
    said = ", ".join(f"{value:.4f} after {n} epochs" for n, value in means.items())
    held = ", ".join(
        f"{claims(some, 'operator')['order']} of {len(some)}" for some in lengths.values()
    )
    return f"With longer training the key's mean is {said}; their order is found in {held} models."


def lengths_table(lengths: Mapping[int, Sequence[Result]]) -> Table:
    """What each branch won, by their measure, over the length of training."""
    rows = tuple(
        (n, name, short(interval(some, "operator", "all", name)))
        for n, some in lengths.items()
        for name in ORDER
    )
    return Table("Over training", ("epochs", "branch", MEASURES["operator"]), rows)


def judged(held: dict[str, int], total: int) -> str:
    """Whether their claims were found again."""
    verdict = {total: "Their claims hold in all of them:", 0: "None of their claims holds in any:"}
    counts = set(held.values())
    start = verdict.get(counts.pop(), "") if len(counts) == 1 else ""
    return f"{start or 'Their claims hold in part:'} {told(held, total)}."


def told(held: dict[str, int], total: int) -> str:
    """The claims, each with its number of models."""
    return (
        f"the key has most in {held['key']} of {total} models, the order is key > query > skip > "
        f"value in {held['order']}, the repeated word goes by its key in {held['repeated']}, and "
        f"the first by its query in {held['first']}"
    )


def short(found: Interval) -> str:
    """A small number with its interval."""
    if found.low == found.high:
        return f"{found.value:.4f}"
    return f"{found.value:.4f} [{found.low:.4f}, {found.high:.4f}]"


def spread(results: Sequence[Result]) -> str:
    """The smallest and the largest mean of the key."""
    keys = [r["means"]["operator"]["won"]["all"]["key"] for r in results]
    return f"{min(keys):.4f} to {max(keys):.4f}"


def total_of(results: Sequence[Result], kind: str) -> float:
    """What all branches won together."""
    return sum(mean(results, kind, "all", name) for name in BRANCHES)


def means_table(results: Sequence[Result]) -> Table:
    """What each branch won, over all words."""

    def line(name: str) -> tuple[str | float, ...]:
        ours = [short(interval(results, kind, "all", name)) for kind in MEASURES]
        return (name, THEIRS[name], *ours)

    rows = tuple(line(name) for name in ORDER)
    return Table(
        "Mean of what a branch won, over all words",
        ("branch", "Du et al.", *MEASURES.values()),
        rows,
        f"95% intervals, a bootstrap over {len(results)} models; the first of our columns is their "
        "measure.",
    )


def words_table(results: Sequence[Result]) -> Table:
    """The same for the first word, the repeated word and the others."""

    def line(group: str, name: str) -> tuple[str | float | None, ...]:
        ours = [mean(results, kind, group, name) for kind in MEASURES]
        return (group, name, THEIR_WORDS.get((group, name)), *ours)

    rows = tuple(line(g, n) for g in ("first", "repeated", "other") for n in ORDER)
    return Table(
        "Mean of what a branch won, by word",
        ("word", "branch", "Du et al.", *MEASURES.values()),
        rows,
        "The answer is read off the first word: no other has a path by its query or its skip.",
    )


def influence_table(results: Sequence[Result]) -> Table:
    """Whose path takes a branch, by both rules."""
    rows = tuple(
        (group, rule, *(share(results, group, rule, name) for name in ORDER))
        for group in ("first", "repeated", "sequence")
        for rule in ("greedy", "viterbi")
    )
    return Table(
        "Influence: the share of elements of x whose path takes a branch",
        ("of", "rule", *ORDER),
        rows,
        "A sequence is followed as a whole, at operator granularity.",
    )


def share(results: Sequence[Result], group: str, rule: str, name: str) -> float:
    """The mean share over seeds."""
    return float(sum(r["influence"][group][rule][name] for r in results) / len(results))


def plots(results: Sequence[Result]) -> tuple[Plot, ...]:
    """What the branches won, by each measure, beside theirs."""

    def bars(kind: str) -> Series:
        found = [interval(results, kind, "all", name) for name in ORDER]
        y, low, high = zip(*found)
        return Series(MEASURES[kind], ORDER, y, low, high, style="bars")

    theirs = Series("Du et al.", ORDER, [THEIRS[name] for name in ORDER], style="bars")
    title = "Mean of what each branch won, over all words"
    coarse = (theirs, bars("operator"), bars("gradient"))
    fine = (bars("positive"), bars("largest"))
    return (
        Plot("operators", f"{title}: operators", "branch", "largest path", coarse),
        Plot("elements", f"{title}: elements", "branch", "largest path", fine),
    )
