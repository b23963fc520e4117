"""Formal languages as language-modelling tasks: copy, reversal, Dyck and counting.

A task gives batches of sequences; at every place the model has read all before it and says which
token comes next. What is pure chance (the word that is to be copied) is not scored, so that the
loss of a model that has understood the language is as low as it can be; in Dyck and counting some
chance is left: whether the next bracket opens, how many letters there are.

Words are drawn from a generator, one after the other: the same seed gives the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor

from gradtrace.errors import GradtraceError

UNSCORED = -100
"""The target where nothing is asked; ``cross_entropy`` leaves it out."""


class Batch(NamedTuple):
    """What is read, and what comes next."""

    tokens: Tensor  # (samples, time)
    targets: Tensor  # (samples, time), UNSCORED where nothing is asked


Draw: TypeAlias = Callable[[int, Generator], Batch]
"""So many samples, drawn from a generator."""


@dataclass(frozen=True)
class Task:
    """A source of batches. ``held`` draws those that are never trained on, if they are apart."""

    name: str
    vocabulary: int
    draw: Draw
    held: Draw | None = None

    def batch(self, samples: int, generator: Generator) -> Batch:
        """Samples to train on."""
        return self.draw(samples, generator)

    def evaluation(self, samples: int, generator: Generator) -> Batch:
        """Samples to measure the loss on."""
        return (self.held or self.draw)(samples, generator)


class Word(NamedTuple):
    """A sequence, and from which of its tokens on it is scored."""

    tokens: list[int]
    scored: int = 1


Words: TypeAlias = Callable[[Random], Word]


def task(name: str, vocabulary: int, word: Words, length: int) -> Task:
    """A task of single words, the shorter ones filled up to ``length`` and not scored there.

    >>> always = task("abc", 3, lambda draw: Word([0, 1, 2], 2), 4)
    >>> always.batch(1, torch.Generator())
    Batch(tokens=tensor([[0, 1, 2]]), targets=tensor([[-100,    2, -100]]))
    """

    def draw(samples: int, generator: Generator) -> Batch:
        source = Random(int(torch.randint(2**62, (), generator=generator)))
        drawn = [word(source) for _ in range(samples)]
        tokens = [w.tokens + [0] * (length - len(w.tokens)) for w in drawn]
        targets = [
            [UNSCORED] * w.scored + w.tokens[w.scored :] + [UNSCORED] * (length - len(w.tokens))
            for w in drawn
        ]
        return Batch(torch.tensor(tokens)[:, :-1], torch.tensor(targets)[:, 1:])

    return Task(name, vocabulary, draw)


# The languages ------------------------------------------------------------------------------------


def copy(length: int = 5, letters: int = 4) -> Task:
    """``w # w``: read 1 to ``length`` letters, then say them again, and the end."""
    return _repeated("copy", length, letters, lambda word: word)


def reversal(length: int = 5, letters: int = 4) -> Task:
    """``w # reversed(w)``."""
    return _repeated("reversal", length, letters, lambda word: word[::-1])


def _repeated(
    name: str, length: int, letters: int, change: Callable[[list[int]], list[int]]
) -> Task:
    middle, end = letters, letters + 1

    def word(source: Random) -> Word:
        read = [source.randrange(letters) for _ in range(source.randint(1, length))]
        return Word([*read, middle, *change(read), end], scored=len(read) + 1)

    return task(name, letters + 2, word, 2 * length + 2)


def dyck(length: int = 12, kinds: int = 2) -> Task:
    """Balanced brackets of ``kinds`` kinds, ``length`` in all: ``( [ ] ) [ ]``.

    A fair coin says whether a bracket opens or closes, where both are possible.
    """
    if length % 2:
        raise GradtraceError(f"brackets come in pairs, so length is even, not {length}")

    def word(source: Random) -> Word:
        begin, open_, tokens = 2 * kinds, list[int](), list[int]()
        for left in range(length, 0, -1):
            if open_ and (left == len(open_) or source.random() < 0.5):
                tokens.append(kinds + open_.pop())
            else:
                open_.append(source.randrange(kinds))
                tokens.append(open_[-1])
        return Word([begin, *tokens])

    return task("dyck", 2 * kinds + 1, word, length + 1)


def counting(most: int = 4, letters: int = 3) -> Task:
    """``aⁿ bⁿ cⁿ`` and the end, n uniform in 1..``most``: from the second b on all is certain."""
    end = letters

    def word(source: Random) -> Word:
        n = source.randint(1, most)
        return Word([end, *(letter for letter in range(letters) for _ in range(n)), end])

    return task("counting", letters + 1, word, letters * most + 2)


LANGUAGES: dict[str, Callable[..., Task]] = {
    "copy": copy,
    "reversal": reversal,
    "dyck": dyck,
    "counting": counting,
}
"""The languages by name."""
