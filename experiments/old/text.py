"""Word-level language modelling on any text: ``words("ptb.train.txt")``.

Without a file there is ``story``: sentences that a small grammar of ours makes, so that nothing has
to be downloaded and nobody's text is copied. It has what makes words hard to guess: agreement over
a distance (*the dogs that see the cat run*), and frequent and rare words. It is no natural
language.
"""

from __future__ import annotations

import re
from collections import Counter
from hashlib import sha256
from pathlib import Path
from random import Random

import torch
from torch import Generator, Tensor

from gradtrace.errors import GradtraceError
from gradtrace.experiments.languages import Batch, Draw, Task

UNKNOWN = "<unk>"
"""Any word that is not among the most frequent; the Penn Treebank calls it so, too."""

END = "<eos>"
"""The end of a line."""

PIECE = re.compile(r"<\w+>|[^\W_]+(?:['’-][^\W_]+)*|[^\w\s]")

# The story ----------------------------------------------------------------------------------------

NOUNS = ["dog", "cat", "bird", "girl", "boy", "horse", "king", "farmer", "child", "fox", "baker"]
RUNS = ["run", "sleep", "sing", "wait", "fall", "laugh", "jump", "swim"]
SEES = ["see", "hear", "love", "find", "follow", "help"]
PLACES = ["in the house", "by the river", "under the tree", "on the hill"]


def story(sentences: int = 3000, seed: int = 0) -> str:
    """Sentences of a small grammar, one a line; the same for the same seed.

    >>> print(story(2, seed=1))
    the farmers that find a bird see some children .
    a dog that hears a dog runs .
    """
    draw = Random(seed)
    return "\n".join(_sentence(draw) for _ in range(sentences))


def _sentence(draw: Random) -> str:
    many = draw.random() < 0.5
    parts = [_noun(draw, many)]
    if draw.random() < 0.35:  # the verb is far from its noun, with another one between
        parts += ["that", _verb(draw, SEES, many), _noun(draw, draw.random() < 0.5)]
    if draw.random() < 0.5:
        parts += [_verb(draw, RUNS, many)]
    else:
        parts += [_verb(draw, SEES, many), _noun(draw, draw.random() < 0.5)]
    if draw.random() < 0.3:
        parts.append(draw.choice(PLACES))
    return " ".join([*parts, "."])


def _noun(draw: Random, many: bool) -> str:
    word = NOUNS[min(int(draw.expovariate(0.25)), len(NOUNS) - 1)]  # the first ones most often
    if many:
        return f"{draw.choice(['the', 'some', 'all'])} {_plural(word)}"
    return f"{draw.choice(['the', 'a', 'every'])} {word}"


def _plural(word: str) -> str:
    return {"child": "children", "fox": "foxes"}.get(word, word + "s")


def _verb(draw: Random, verbs: list[str], many: bool) -> str:
    word = draw.choice(verbs)
    return word if many else word + "s"


# Any file -----------------------------------------------------------------------------------------


def split(text: str) -> list[str]:
    r"""The words and marks of a text in lower case, with ``<eos>`` at the end of every line of it.

    >>> split("It's Penn <unk> 9.\n\nYes")
    ["it's", 'penn', '<unk>', '9', '.', '<eos>', 'yes', '<eos>']
    """
    found: list[str] = []
    for line in text.lower().splitlines():
        if pieces := PIECE.findall(line):
            found += [*pieces, END]
    return found


def vocabulary(pieces: list[str], most: int) -> dict[str, int]:
    """Numbers for the ``most`` most frequent words, ``<unk>`` always among them as 0.

    Of equally frequent words the first in the alphabet is taken, so that no order of the text or of
    the process matters.
    """
    counts = Counter(pieces)
    del counts[UNKNOWN]
    order = sorted(counts, key=lambda word: (-counts[word], word))
    return {UNKNOWN: 0} | {word: number for number, word in enumerate(order[: most - 1], 1)}


def digest(file: str | Path) -> str:
    """What tells one text from another."""
    if not Path(file).is_file():
        raise GradtraceError(f"there is no file {str(file)!r} (in {Path.cwd()})")
    return sha256(Path(file).read_bytes()).hexdigest()[:16]


def read(file: str | Path) -> str:
    """The text of a file."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise GradtraceError(f"{file} is not UTF-8 text: {error}") from error


def words(
    file: str | Path | None = None, *, most: int = 100, length: int = 12, held: float = 0.1
) -> Task:
    """The next word of a text: any UTF-8 file, or ``story()``.

    The vocabulary is the ``most`` most frequent words of the part that is trained on; the last
    ``held`` of the text is for evaluation only. A sample is ``length`` + 1 words from a place drawn
    at random; every word but the first is asked for.

    >>> task = words(most=20, length=5)
    >>> task.vocabulary, task.batch(3, torch.Generator()).tokens.shape
    (20, torch.Size([3, 5]))
    """
    text = story() if file is None else read(file)
    pieces = split(text)
    cut = round(len(pieces) * (1 - held))
    if min(cut, len(pieces) - cut) <= length:
        raise GradtraceError(
            f"{file or 'the story'} has {len(pieces):,} words; {length} in a sample and {held:.0%} "
            "for evaluation take more: give a longer text, or a smaller length"
        )
    known = vocabulary(pieces[:cut], most)
    numbers = torch.tensor([known.get(piece, 0) for piece in pieces])
    name = "text" if file is None else Path(file).stem
    size = len(known)
    return Task(name, size, _windows(numbers[:cut], length), _windows(numbers[cut:], length))


def _windows(numbers: Tensor, length: int) -> Draw:
    """Parts of a text, from places drawn at random."""
    places = numbers.unfold(0, length + 1, 1)  # (places, length + 1)

    def draw(samples: int, generator: Generator) -> Batch:
        chosen = places[torch.randint(len(places), (samples,), generator=generator)]
        return Batch(chosen[:, :-1], chosen[:, 1:])

    return draw
