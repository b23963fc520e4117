"""Questions about short words, drawn from families: read some letters, then say one answer.

A *family* is a kind of question with free parameters (which place, which letter, which automaton);
``draw_tasks`` draws them. The answer follows from the word, so that all samples can be answered
rightly, and no answer is that of two words in three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import torch
from torch import Generator, Tensor

Words: TypeAlias = Callable[[int, Generator], Tensor]
"""So many words, drawn from a generator: (samples, time)."""

Answer: TypeAlias = Callable[[Tensor], Tensor]
"""The answers to words: (samples, time) to (samples,)."""


@dataclass(frozen=True)
class Question:
    """A task: words of ``letters`` letters and of one length, and one of ``classes`` answers."""

    name: str
    letters: int
    classes: int
    words: Words
    answer: Answer

    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        """Words and their answers."""
        words = self.words(samples, source)
        return words, self.answer(words)


def letters(count: int, length: int) -> Words:
    """Words of independent letters."""

    def draw(samples: int, source: Generator) -> Tensor:
        return torch.randint(count, (samples, length), generator=source)

    return draw


# The families -------------------------------------------------------------------------------------


def recall(choice: Random) -> Question:
    """Which letter is at a given place?"""
    count, length = choice.randint(3, 5), choice.randint(5, 8)
    place = choice.randrange(length - 2)
    name = f"recall: letter {place + 1} of {length}, {count} letters"
    return Question(name, count, count, letters(count, length), lambda words: words[:, place])


def count(choice: Random) -> Question:
    """How often does a given letter occur: less often than usual, as usual, once more, or more?"""
    kinds, length, most = choice.randint(2, 3), choice.randint(5, 8), choice.randint(2, 3)
    letter, usual = choice.randrange(kinds), round(length / kinds)

    def answer(words: Tensor) -> Tensor:
        return ((words == letter).sum(1) - usual + 1).clamp(0, most)

    name = f"count: letter {letter + 1} of {kinds}, {usual - 1} to {usual + most - 1}, in {length}"
    return Question(name, kinds, most + 1, letters(kinds, length), answer)


def latest(choice: Random) -> Question:
    """Which of some letters came last? The others do not matter; if none came, that is said."""
    asked, others, length = choice.randint(2, 4), choice.randint(2, 4), choice.randint(5, 8)

    def answer(words: Tensor) -> Tensor:
        found = torch.full((len(words),), asked)
        for letter in words.unbind(1):
            found = torch.where(letter < asked, letter, found)
        return found

    name = f"latest: of {asked} letters, among {asked + others}, in {length}"
    return Question(name, asked + others, asked + 1, letters(asked + others, length), answer)


def lookup(choice: Random) -> Question:
    """Pairs of key and value, all keys once, then a key: what is its value?"""
    keys, values = 2, choice.randint(2, 5)

    def draw(samples: int, source: Generator) -> Tensor:
        order = torch.rand(samples, keys, generator=source).argsort(1)
        held = torch.randint(values, (samples, keys), generator=source) + keys
        asked = torch.randint(keys, (samples, 1), generator=source)
        return torch.cat([torch.stack([order, held], 2).flatten(1), asked], 1)

    def answer(words: Tensor) -> Tensor:
        place = (words[:, :-1:2] == words[:, -1:]).int().argmax(1)
        return words[torch.arange(len(words)), 2 * place + 1] - keys

    return Question(f"lookup: {keys} keys, {values} values", keys + values, values, draw, answer)


def automaton(choice: Random) -> Question:
    """In which state is a random automaton of three states after the word?

    One letter sends all states to the first, each other permutes them: what came before a reset
    does not matter, what comes after it does.
    """
    states, kinds, length = 3, 3, choice.randint(4, 7)
    steps = [[0] * states]
    while len(steps) < kinds:
        step = choice.sample(range(states), states)
        if step != sorted(step) and step not in steps:
            steps.append(step)
    table = torch.tensor(steps)

    def answer(words: Tensor) -> Tensor:
        state = torch.zeros(len(words), dtype=torch.long)
        for letter in words.unbind(1):
            state = table[letter, state]
        return state

    moves = " ".join("".join(map(str, step)) for step in steps[1:])
    return Question(
        f"automaton: {moves}, in {length}", kinds, states, letters(kinds, length), answer
    )


def brackets(choice: Random) -> Question:
    """Brackets of some kinds, rightly nested so far: which has to be closed next, if any?

    A letter is an opening bracket of some kind, or closes whichever is open (if none is, nothing).
    """
    kinds, length = choice.randint(2, 4), choice.randint(4, 7)

    def answer(words: Tensor) -> Tensor:
        return torch.tensor([_open(word, kinds) for word in words.tolist()])

    name = f"brackets: {kinds} kinds, in {length}"
    return Question(name, kinds + 1, kinds + 1, letters(kinds + 1, length), answer)


def _open(word: list[int], kinds: int) -> int:
    """The innermost open bracket, ``kinds`` if there is none."""
    stack: list[int] = []
    for letter in word:
        if letter < kinds:
            stack.append(letter)
        elif stack:
            stack.pop()
    return stack[-1] if stack else kinds


FAMILIES: dict[str, Callable[[Random], Question]] = {
    "recall": recall,
    "count": count,
    "latest": latest,
    "lookup": lookup,
    "automaton": automaton,
    "brackets": brackets,
}
"""The families by name."""


def draw_tasks(family: str, count: int) -> list[Question]:
    """So many different tasks of a family; always the same.

    >>> [task.name for task in draw_tasks("lookup", 2)]
    ['lookup: 2 keys, 3 values', 'lookup: 2 keys, 5 values']
    """
    choice, found = Random(f"tasks/{family}"), dict[str, Question]()
    while len(found) < count:
        drawn = FAMILIES[family](choice)
        found.setdefault(drawn.name, drawn)
    return list(found.values())
