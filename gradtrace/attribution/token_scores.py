"""Scores of positions, and the recordings they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.traced import Trace


class Recording(NamedTuple):
    """A trace of the scalar at one point, and its weight in the mean over points."""

    trace: Trace
    weight: float


class TokenScore(NamedTuple):
    """The score of one position of an input: the sum over its last dimension."""

    input: str
    position: tuple[int, ...]
    token: str
    score: float


def token_rows(
    scores: Mapping[str, Tensor], tokens: Mapping[str, Sequence[str]]
) -> tuple[TokenScore, ...]:
    """The scores summed over the last dimension of inputs that have several."""
    rows = []
    for name, each in scores.items():
        summed = each.sum(-1) if each.dim() > 1 else each
        words = list(tokens.get(name, ()))
        last = summed.shape[-1] if summed.dim() else 1
        if words and len(words) not in (last, summed.numel()):
            raise GradtraceError(
                f"tokens[{name!r}] has {len(words)} words for {last} positions of an input of "
                f"shape {tuple(each.shape)}"
            )
        places = product(*map(range, summed.shape))
        for n, (place, score) in enumerate(zip(places, summed.reshape(-1).tolist())):
            word = str(words[n % len(words)]) if words else ""
            rows.append(TokenScore(name, place, word, score))
    return tuple(rows)
