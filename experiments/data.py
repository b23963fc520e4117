"""Data that several experiments share: language modelling on small languages, and on text.

At every place a model has read all before it, and says which token comes next. What is pure chance
(the word that is to be copied) is not asked for; some is left in the others: whether a bracket
opens, how many letters there are. Samples are drawn from a generator: of a seed always the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Generator, Tensor

from gradtrace.errors import GradtraceError
from gradtrace.files import naming

UNASKED = -100  # the target where nothing is asked for; ``cross_entropy`` leaves it out


class Batch(NamedTuple):
    """What is read, and what comes next."""

    tokens: Tensor  # (samples, time)
    targets: Tensor  # (samples, time)


Draw: TypeAlias = Callable[[int, Generator], Batch]
Word: TypeAlias = tuple[list[int], int]
"""Tokens, and from which of them on they are asked for."""


class Task(NamedTuple):
    """So many samples, to train on and to measure the loss on."""

    vocabulary: int
    draw: Draw
    held: Draw


def task(name: str, vocabulary: int = 100) -> Task:
    """``"copy"``, ``"dyck"``, ``"counting"``; ``"text"``, which is ``story()``; or a file of text.

    >>> task("dyck").vocabulary, task("text", 20).draw(3, Generator()).tokens.shape
    (5, torch.Size([3, 12]))
    """
    if name in LANGUAGES:
        size, longest, word = LANGUAGES[name]
        draw = _words(word, longest)
        return Task(size, draw, draw)
    if name == "text":
        return text(story(), vocabulary)
    with naming(Path(name), "read") as path:
        return text(path.read_text(encoding="utf-8"), vocabulary)


def _words(word: Callable[[Random], Word], longest: int) -> Draw:
    """Samples of single words; shorter ones are filled up to the longest."""

    def draw(samples: int, generator: Generator) -> Batch:
        source = Random(int(torch.randint(2**62, (), generator=generator)))
        drawn = [word(source) for _ in range(samples)]
        rest = [longest - len(said) for said, _ in drawn]
        tokens = [said + [0] * n for (said, _), n in zip(drawn, rest)]
        asked = [[UNASKED] * at + said[at:] for said, at in drawn]
        targets = [some + [UNASKED] * n for some, n in zip(asked, rest)]
        return Batch(torch.tensor(tokens)[:, :-1], torch.tensor(targets)[:, 1:])

    return draw


def copied(source: Random) -> Word:
    """``w # w``: read 1 to 5 letters of 4, then say them again, and the end."""
    read = [source.randrange(4) for _ in range(source.randint(1, 5))]
    return [*read, 4, *read, 5], len(read) + 1


def dyck(source: Random) -> Word:
    """12 balanced brackets of two kinds: ``( [ ] ) [ ]``; where both are possible, a fair coin says
    whether one opens or closes.
    """
    opened, tokens = list[int](), [4]
    for left in range(12, 0, -1):
        closes = opened and (left == len(opened) or source.random() < 0.5)
        tokens.append(2 + opened.pop() if closes else source.randrange(2))
        if not closes:
            opened.append(tokens[-1])
    return tokens, 1


def counting(source: Random) -> Word:
    """``aⁿ bⁿ cⁿ`` and the end, n in 1..4: from the second b on all is certain."""
    n = source.randint(1, 4)
    return [3, *[0] * n, *[1] * n, *[2] * n, 3], 1


LANGUAGES = {"copy": (6, 12, copied), "dyck": (5, 13, dyck), "counting": (4, 14, counting)}
"""Their vocabulary, the tokens of the longest word, and how a word is drawn."""

NOUNS = ["dog", "cat", "bird", "girl", "boy", "horse", "king", "farmer", "child", "fox", "baker"]
PLURALS = {"child": "children", "fox": "foxes"}
RUNS = ["run", "sleep", "sing", "wait", "fall", "laugh", "jump", "swim"]
SEES = ["see", "hear", "love", "find", "follow", "help"]
PLACES = ["in the house", "by the river", "under the tree", "on the hill"]
PIECE = re.compile(r"<\w+>|[^\W_]+(?:['’-][^\W_]+)*|[^\w\s]")


def story(sentences: int = 3000, seed: int = 0) -> str:
    """Sentences of a small grammar, one a line; verbs agree with subjects over a distance.

    >>> print(story(2, seed=1))
    the farmers that find a bird see some children .
    a dog that hears a dog runs .
    """
    draw = Random(seed)
    return "\n".join(_sentence(draw) for _ in range(sentences))


def _sentence(draw: Random) -> str:
    many = draw.random() < 0.5
    parts, end = [_noun(draw, many)], "" if many else "s"
    if draw.random() < 0.35:  # the verb is far from its noun, with another one between
        parts += ["that", draw.choice(SEES) + end, _noun(draw, draw.random() < 0.5)]
    alone = draw.random() < 0.5
    parts.append(draw.choice(RUNS if alone else SEES) + end)
    if not alone:
        parts.append(_noun(draw, draw.random() < 0.5))
    if draw.random() < 0.3:
        parts.append(draw.choice(PLACES))
    return " ".join([*parts, "."])


def _noun(draw: Random, many: bool) -> str:
    word = NOUNS[min(int(draw.expovariate(0.25)), len(NOUNS) - 1)]  # the first ones most often
    article = draw.choice(["the", "some", "all"] if many else ["the", "a", "every"])
    return f"{article} {PLURALS.get(word, word + 's') if many else word}"


def text(whole: str, vocabulary: int, length: int = 12, held: float = 0.1) -> Task:
    """The next word of a text. Words that are not among the most frequent are one, and so are ends
    of lines; the last tenth of the text is not trained on.
    """
    lines = [PIECE.findall(line) for line in whole.lower().splitlines()]
    pieces = [piece for line in lines if line for piece in (*line, "<eos>")]
    cut = round(len(pieces) * (1 - held))
    if min(cut, len(pieces) - cut) <= length:
        raise GradtraceError(f"a text of {len(pieces):,} words is too short")
    counts = Counter(pieces[:cut])
    del counts["<unk>"]
    order = sorted(counts, key=lambda piece: (-counts[piece], piece))[: vocabulary - 1]
    known = {piece: number for number, piece in enumerate(order, 1)}
    numbers = torch.tensor([known.get(piece, 0) for piece in pieces])
    return Task(1 + len(known), _windows(numbers[:cut], length), _windows(numbers[cut:], length))


def _windows(numbers: Tensor, length: int) -> Draw:
    """Parts of a text, from places drawn at random."""
    places = numbers.unfold(0, length + 1, 1)  # (places, length + 1)

    def draw(samples: int, generator: Generator) -> Batch:
        chosen = places[torch.randint(len(places), (samples,), generator=generator)]
        return Batch(chosen[:, :-1], chosen[:, 1:])

    return draw


def kinds(topics: int, seed: int) -> Iterator[tuple[str, float]]:
    """Kinds of words, each with its probability given all before: *the dogs that a cat near the
    trees sees run*. Verbs agree with their subjects in number and topic.
    """
    draw, weights = Random(f"treebank text/{seed}"), 1 / np.arange(1, topics + 1)
    share = (weights / weights.sum()).tolist()

    def noun(topic: int, stays: float, chance: float) -> Any:
        number = draw.choice(("one", "many"))
        yield number, chance / 2
        while draw.random() < 0.3:
            yield "adjective", 0.3
        new = draw.choices(range(topics), share)[0] if draw.random() >= stays else topic
        yield f"noun {new} {number}", 0.7 * (stays * (new == topic) + (1 - stays) * share[new])
        return new, number

    def beside(topic: int, number: str, depth: int = 0) -> Any:
        clause, choice = (0.25 if depth < 2 else 0.0), draw.random()
        if choice >= 0.15 + clause:
            return 0.85 - clause  # the chance of a verb at once
        yield ("preposition", 0.15) if choice < 0.15 else ("that", clause)
        if choice < 0.15:
            yield from noun(topic, 0.6, 1.0)
        elif draw.random() < 0.6:  # that sees the cat
            yield f"verb {topic} {number}", 0.6
            yield from noun(topic, 0.6, 1.0)
        else:  # that the cat sees
            inner, other = yield from noun(topic, 0.6, 0.4)
            chance = yield from beside(inner, other, depth + 1)
            yield f"verb {inner} {other}", chance
        return 1.0

    topic = 0
    while True:
        topic, number = yield from noun(topic, 0.8, 1.0)
        chance = yield from beside(topic, number)
        yield f"verb {topic} {number}", chance
        choice = draw.random()
        if choice < 0.55:
            yield from noun(topic, 0.6, 0.55)
        elif choice < 0.75:
            yield "adverb", 0.2
        yield "end", 1.0 if choice < 0.75 else 0.25


def corpus(count: int, words: int, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of words, and -log of their probabilities; within a kind by Zipf's law.

    >>> numbers, surprisal = corpus(1000, 200, 0)
    >>> len(numbers), bool(numbers.max() < 200), bool(surprisal.min() >= 0)
    (1000, True, True)
    """
    rest, topics = words - 16, min(20, (words - 16) // 40)
    sizes = {"end": 1, "that": 1, "one": 3, "many": 3, "preposition": 8}
    sizes["adjective"] = rest * 3 // 20
    for name in [f"{topic} {number}" for topic in range(topics) for number in ("one", "many")]:
        sizes |= {f"noun {name}": rest // (4 * topics), f"verb {name}": rest * 3 // (20 * topics)}
    sizes["adverb"] = words - sum(sizes.values())
    said, chances = map(np.array, zip(*islice(kinds(topics, seed), count)))
    found, start, draw = np.zeros(count, dtype=np.int64), 0, np.random.default_rng(seed)
    for kind, size in sizes.items():
        places, zipf = np.flatnonzero(said == kind), 1 / np.arange(1, size + 1)
        zipf /= zipf.sum()
        ranks = np.searchsorted(np.cumsum(zipf), draw.random(len(places)), side="right")
        ranks = np.minimum(ranks, size - 1)
        found[places], start = start + ranks, start + size
        chances[places] *= zipf[ranks]
    return torch.from_numpy(found), torch.from_numpy(-np.log(chances))
