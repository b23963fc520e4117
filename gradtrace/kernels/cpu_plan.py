"""Executes a whole plan in the compiled library; see ``kernels/cpu/run_plan.cpp``.

The library is called again after 0.2 s at the latest, so that Python sees Ctrl-C, and where it
needs a tensor that is computed only when it is counted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradtrace.kernels import cpu_library, tuning
from gradtrace.kernels.operands import Floats, Whole, Words

DONE, CONTINUE, BEYOND, WANTED, ASKED = range(5)
"""What the library answers."""


class PlanWords(NamedTuple):
    """A plan as the library reads it: instructions, views (15 words each) and sets of bits (words
    each); the number of words of a set, and of values.
    """

    ops: Whole
    views: Whole
    bits: Words
    width: int
    slots: int


class PlanCounts(NamedTuple):
    """What was counted. ``leaves``: (leaves, 5), of each its number, where its counts begin, how
    many they are, how many of the first stand for no path, and its table; ``extra``: (leaves,
    words), bits of all its sets; ``sets`` of table n begin at ``starts[n]``.
    """

    leaves: Whole
    counts: Whole
    sums: Floats
    extra: Words
    sets: Words
    starts: Whole


def run_plan(
    words: PlanWords,
    pointers: Whole,
    wanted: Callable[[int], int],
    asked: Callable[[int, Tensor], Tensor],
) -> PlanCounts | None:
    """Execute a plan on the tensors at these addresses; None if it needs what only Python has.
    ``wanted`` gives the address of a tensor that was left out (0), by its number; ``asked`` the ids
    that a map selects, given the number of the question and the ids of the input, flat.
    """
    library: Any = cpu_library.library()
    arrays: tuple[npt.NDArray[Any], ...] = (words.ops, words.views, pointers, words.bits)
    sizes = (len(words.ops), len(words.views), len(pointers), len(words.bits))
    head = [n for array, size in zip(arrays, sizes) for n in (array.ctypes.data, size)]
    threads = torch.get_num_threads(), tuning.SINGLE_THREAD_MAX_ELEMENTS
    plan = (ctypes.c_int64 * 12)(*head, words.width, words.slots, *threads)
    held, answer = ctypes.c_void_p(), (ctypes.c_int64 * 10)()
    last, ids = -1, torch.empty(0, dtype=torch.int32, device="cpu")
    try:
        while True:
            cpu_library.checked(library.gradtrace_run_plan(plan, ctypes.byref(held), answer))
            if answer[0] == WANTED:
                if last >= 0:
                    pointers[last] = 0
                last = answer[1]
                pointers[last] = wanted(last)
            elif answer[0] == ASKED:
                given = torch.from_numpy(_array(answer[2], np.dtype(np.int32), answer[3]))
                ids = asked(answer[1], given).to(torch.int32).reshape(-1).contiguous()
                answer[2] = ids.data_ptr()
            elif answer[0] != CONTINUE:
                return None if answer[0] == BEYOND else _counts(list(answer), words.width)
    finally:
        library.gradtrace_end_plan(held)


def _counts(answer: list[int], width: int) -> PlanCounts:
    """The results, copied."""
    _, many, counts, tables, *places = answer
    starts = _array(places[5], np.dtype(np.int64), tables + 1)
    shapes = ((many, 5), (counts,), (counts,), (many, width), (int(starts[-1]), width))
    found = [
        _array(place, np.dtype(kind), int(np.prod(shape))).reshape(shape)
        for place, kind, shape in zip(places, "qqdQQ", shapes)
    ]
    return PlanCounts(found[0], found[1], found[2], found[3], found[4], starts)


def _array(place: int, kind: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """A copy of an array of the library's."""
    if not count:
        return np.zeros(0, kind)
    raw = ctypes.string_at(place, kind.itemsize * count)
    return np.frombuffer(bytearray(raw), kind)
