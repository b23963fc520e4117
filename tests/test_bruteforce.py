"""Random graphs against the list of all their paths: 200 of them, in the thorough run 1,000.

``python tests/test_bruteforce.py 0 100000`` runs a longer range of seeds, on all processors.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from os import cpu_count

import pytest
import torch
from against_bruteforce import check
from randomgraphs import build
from thorough import few

GRAPHS, EACH = few(200, 1000), 20


@pytest.mark.parametrize("first", range(0, GRAPHS, EACH))
def test_random_graphs(first: int) -> None:
    assert seeds(first, first + EACH) == []


def seeds(first: int, last: int) -> list[str]:
    """What went wrong on a range of seeds, one line each."""
    found = []
    for seed in range(first, last):
        try:
            check(build(seed))
        except Exception as error:  # all are counted, none hides the next
            found.append(f"{seed}: {type(error).__name__}: {error}".replace("\n", " | ")[:400])
    return found


if __name__ == "__main__":
    first, last = int(sys.argv[1]), int(sys.argv[2])
    edges = [*range(first, last, 250), last]
    wrong: list[str] = []
    with ProcessPoolExecutor(cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for some in pool.map(seeds, edges[:-1], edges[1:]):
            wrong += some
    print("\n".join(wrong[:50]))
    print(f"seeds {first} to {last}: {len(wrong)} of {last - first} graphs differ")
    sys.exit(bool(wrong))
