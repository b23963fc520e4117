"""States that wait for their use where memory is short: their marks in the narrowest type.

A number of a mark takes four bytes while it is worked with. Most palettes have few entries, so that
one byte, or two, hold it while it waits.
"""

from __future__ import annotations

import torch

from gradtrace.maps.places import filled
from gradtrace.states import State

NARROW = ((torch.uint8, 255), (torch.int16, 32_767))
"""Types, and the highest number that each can hold."""


class Shelf(dict[int, State]):
    """States by value: narrowed when they are put there, as they were when they are looked at."""

    def __setitem__(self, value: int, state: State) -> None:
        super().__setitem__(value, packed(state))

    def __getitem__(self, value: int) -> State:
        return unpacked(super().__getitem__(value))


def take(states: dict[int, State], value: int) -> State:
    """A state that nobody asks for again."""
    state = states[value]
    del states[value]
    return state


def packed(state: State) -> State:
    """The same with narrow numbers, unless these lie apart in memory or on top of each other: a
    copy might take more, and would not lie as they do, by which the order of sums is chosen.
    """
    numbers = state.numbers
    if numbers is None or not filled(numbers):
        return state
    kind = narrowest(len(state.palette.rows))
    return state if kind is numbers.dtype else state._replace(numbers=numbers.to(kind))


def unpacked(state: State) -> State:
    """The same with numbers to work with."""
    numbers = state.numbers
    if numbers is None or numbers.dtype is torch.int32:
        return state
    return state._replace(numbers=numbers.int())


def narrowest(count: int) -> torch.dtype:
    """The type that holds the numbers of a palette of so many entries, from 0 on."""
    return next((kind for kind, most in NARROW if count <= most), torch.int32)
