"""Text of the Penn Treebank's size from a grammar of ours, with the probability of every word.

A sentence has a subject, perhaps a clause or a phrase beside it, a verb, and what follows that.
Nouns and verbs are singular or plural and belong to topics; a verb agrees with its subject in
number and topic, however many words are between: *the dogs that a cat near the trees sees run*. The
topic goes on from one sentence to the next in most cases. Within a kind (singular nouns of topic 3)
words are drawn by Zipf's law.

Every word is of one kind, and what has been said determines what may follow: so the probability of
each word given *all* before it is known, and their mean surprisal is the least loss that any model
can have. It is no natural language.
"""

from __future__ import annotations

from functools import lru_cache
from math import log
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.experiments.harness.statistics import Floats

TOPICS = 20
FIXED = {"end": 1, "that": 1, "one": 3, "many": 3, "preposition": 8}
"""Words of the kinds whose size does not depend on the vocabulary's."""

STAYS, OBJECT_STAYS = 0.8, 0.6
"""How often a subject has the topic of the one before, an object that of its verb."""
ADJECTIVE, CLAUSE, PHRASE = 0.3, 0.25, 0.15
DEEPEST = 2
"""Clauses within clauses."""


class Kinds(NamedTuple):
    """The kinds of words: where the words of each begin, and how many there are."""

    start: dict[str, int]
    size: dict[str, int]

    @property
    def words(self) -> int:
        """The size of the vocabulary."""
        return sum(self.size.values())


class Text(NamedTuple):
    """A text of n words."""

    words: Tensor  # (n,), their numbers
    surprisal: Tensor  # (n,), -log of their probability given all words before
    hard: Tensor  # (n,), 1 or 2 for a singular or plural verb far from its subject; see ``hard``
    number: Tensor  # (vocabulary,), 1 or 2 for singular and plural verbs, else 0


def kinds(words: int) -> Kinds:
    """A vocabulary of so many words.

    >>> kinds(10_000).size["noun 0 one"], kinds(10_000).words
    (124, 10000)
    """
    rest = words - sum(FIXED.values())
    topics = min(TOPICS, rest // 40)
    if topics < 2:
        raise GradtraceError(f"a vocabulary has at least 96 words, not {words}")
    size = dict(FIXED) | {"adjective": rest * 3 // 20}
    for topic in range(topics):
        for number in ("one", "many"):
            size[f"noun {topic} {number}"] = rest // (4 * topics)
            size[f"verb {topic} {number}"] = rest * 3 // (20 * topics)
    size["adverb"] = words - sum(size.values())
    ends = np.cumsum(list(size.values())).tolist()
    return Kinds(dict(zip(size, [0, *ends])), size)


def zipf(size: int) -> Floats:
    """The probabilities of so many words, the n-th proportional to 1/n.

    >>> zipf(3).round(3).tolist()
    [0.545, 0.273, 0.182]
    """
    weights = 1 / np.arange(1, size + 1)
    found: Floats = weights / weights.sum()
    return found


class Speaker:
    """Says which kinds of words follow each other, and with what probability."""

    def __init__(self, topics: int, seed: int) -> None:
        self.draw = Random(f"treebank text/{seed}")
        self.share = zipf(topics).tolist()
        self.topic = 0  # of the last subject
        self.said: list[str] = []
        self.surprisal: list[float] = []
        self.hard: list[int] = []
        self.near = ""  # the number of the last noun

    def say(self, kind: str, chance: float, hard: int = 0) -> None:
        """A word of this kind, which has that chance."""
        self.said.append(kind)
        self.surprisal.append(-log(chance))
        self.hard.append(hard)

    def sentence(self) -> None:
        """A sentence, to its end."""
        number, self.topic = self.noun(self.topic, STAYS, 1.0)
        chance = self.beside(number, self.topic, 0)
        self.verb(number, self.topic, chance)
        choice = self.draw.random()
        if choice < 0.55:
            self.noun(self.topic, OBJECT_STAYS, 0.55)
            self.say("end", 1.0)
        elif choice < 0.75:
            self.say("adverb", 0.2)
            self.say("end", 1.0)
        else:
            self.say("end", 0.25)

    def noun(self, topic: int, stays: float, chance: float) -> tuple[str, int]:
        """A noun with its article and adjectives; its number and topic."""
        number = self.draw.choice(("one", "many"))
        self.say(number, chance / 2)
        while self.draw.random() < ADJECTIVE:
            self.say("adjective", ADJECTIVE)
        found = topic
        if self.draw.random() >= stays:
            (found,) = self.draw.choices(range(len(self.share)), self.share)
        known = stays * (found == topic) + (1 - stays) * self.share[found]
        self.say(f"noun {found} {number}", (1 - ADJECTIVE) * known)
        self.near = number
        return number, found

    def beside(self, number: str, topic: int, depth: int) -> float:
        """A clause or a phrase beside a subject, if any; the chance of a verb after it."""
        clause = CLAUSE if depth < DEEPEST else 0.0
        choice = self.draw.random()
        if choice < PHRASE:
            self.say("preposition", PHRASE)
            self.noun(topic, OBJECT_STAYS, 1.0)
            return 1.0
        if choice >= PHRASE + clause:
            return 1 - PHRASE - clause
        self.say("that", clause)
        if self.draw.random() < 0.6:  # that sees the cat
            self.verb(number, topic, 0.6)
            self.noun(topic, OBJECT_STAYS, 1.0)
        else:  # that the cat sees
            inner, other = self.noun(topic, OBJECT_STAYS, 0.4)
            self.verb(inner, other, self.beside(inner, other, depth + 1))
        return 1.0

    def verb(self, number: str, topic: int, chance: float) -> None:
        """The verb of a subject; it is hard if the noun before it is of the other number."""
        far = 0 if self.near == number else 1 if number == "one" else 2
        self.say(f"verb {topic} {number}", chance, far)


@lru_cache(maxsize=2)
def text(count: int, words: int = 10_000, seed: int = 0) -> Text:
    """A text of ``count`` words, always the same for the same numbers.

    >>> found = text(1000, 200)
    >>> len(found.words), bool(found.words.max() < 200)
    (1000, True)
    """
    known = kinds(words)
    speaker = Speaker(sum(kind.startswith("verb") for kind in known.size) // 2, seed)
    while len(speaker.said) < count:
        speaker.sentence()
    numbers = {kind: n for n, kind in enumerate(known.size)}
    said = np.array([numbers[kind] for kind in speaker.said[:count]])
    surprisal = np.array(speaker.surprisal[:count])
    found = np.zeros(count, dtype=np.int64)
    source = np.random.default_rng(seed)
    for kind, number in numbers.items():
        places = np.flatnonzero(said == number)
        chances = zipf(known.size[kind])
        ranks = np.minimum(
            np.searchsorted(np.cumsum(chances), source.random(len(places)), side="right"),
            len(chances) - 1,
        )
        found[places] = known.start[kind] + ranks
        surprisal[places] -= np.log(chances[ranks])
    return Text(
        torch.from_numpy(found),
        torch.from_numpy(surprisal),
        torch.tensor(speaker.hard[:count]),
        torch.tensor([_number(kind) for kind in known.size for _ in range(known.size[kind])]),
    )


def _number(kind: str) -> int:
    if not kind.startswith("verb"):
        return 0
    return 1 if kind.endswith("one") else 2
