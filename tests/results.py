"""Digests of results, to compare two versions of gradtrace: they should have the same bits.

    python tests/results.py before.json            # in a checkout of the version before
    python tests/results.py --against before.json  # in this one, with the same torch

For the operators of PyTorch's database and the architectures of the other tests: gradients, tables
of influence by all rules, values in MAX and COUNT, and paths. Public names only, so that this file
runs in older checkouts too: copy it there (before there was an edge: ``--rules greedy viterbi``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from architectures import ARCHITECTURES
from operators import entries, label, losses

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.semirings import COUNT, MAX

RULES = ("greedy", "edge", "viterbi")
PATHS = 20


def digest(*found: object) -> str:
    """Of tensors their bits, of anything else its text."""
    line = hashlib.sha256()
    for each in found:
        if isinstance(each, Tensor):
            x = each.detach().cpu().resolve_conj().resolve_neg().contiguous()
            line.update(f"{x.dtype} {tuple(x.shape)}".encode())
            line.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            line.update(repr(each).encode())
    return line.hexdigest()[:16]


def table(found: object) -> str:
    """Every row of an influence table, exactly."""
    return digest(*(row.values for row in found.rows))  # type: ignore[attr-defined]


def of_trace(trace: object, kind: str | None) -> Iterator[str]:
    """Digests of the gradients, the table and some paths of a trace."""
    yield digest(*trace.gradients.values())  # type: ignore[attr-defined]
    yield table(trace.influence(kind))  # type: ignore[attr-defined]
    paths = trace.paths(sample=PATHS, seed=0)  # type: ignore[attr-defined]
    yield digest(*(str(path) for path in paths))


def attempted(results: dict[str, list[str]], name: str, parts: Iterator[str]) -> None:
    """Add what can be found; a refusal is a result too."""
    found: list[str] = []
    try:
        for part in parts:
            found.append(part)
    except GradtraceError as error:
        found.append(f"{type(error).__name__}: {error}"[:60])
    results[name] = found


def of_semirings(loss: Tensor, names: dict[str, Tensor]) -> Iterator[str]:
    """Digests of the values of one loss in other semirings."""
    for semiring in (MAX, COUNT):
        values = gt.backward(loss, semiring, names=names)
        yield digest(*values.values())


def of_operator(loss: Tensor, names: dict[str, Tensor], rule: str) -> Iterator[str]:
    """Digests for one loss."""
    yield from of_trace(gt.trace(loss, names=names, rule=rule), "operators")


def of_architecture(name: str, rule: str) -> Iterator[str]:
    """Digests for a watched model."""
    model, loss_of = ARCHITECTURES[name]()
    torch.manual_seed(1)
    with gt.watch(model) as watch:
        loss = loss_of(model)
    yield from of_trace(watch.trace(loss, rule=rule), None)


def results(samples: int, share: int, rules: Sequence[str] = RULES) -> dict[str, list[str]]:
    """Digests by name."""
    found: dict[str, list[str]] = {}
    for name in [*ARCHITECTURES][::share]:
        for rule in rules:
            attempted(found, f"{name} by {rule}", of_architecture(name, rule))
    for op in [*entries()][::share]:
        for k, (loss, leaves) in enumerate(losses(op, torch.float32, samples)):
            names, called = {f"x{n}": leaf for n, leaf in enumerate(leaves)}, f"{label(op)} {k}"
            attempted(found, called, of_semirings(loss, names))
            for rule in rules:
                attempted(found, f"{called} by {rule}", of_operator(loss, names, rule))
    return found


def main() -> int:
    """Write digests, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?")
    parser.add_argument("--against")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--share", type=int, default=1, help="one in so many")
    parser.add_argument("--rules", nargs="+", default=RULES)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = results(given.samples, given.share, given.rules)
    if given.out:
        Path(given.out).write_text(json.dumps(found, indent=1))
    if not given.against:
        print(len(found), "results")
        return 0
    before = json.loads(Path(given.against).read_text())
    other = [name for name in before if name in found and found[name] != before[name]]
    other += sorted(before.keys() ^ found.keys())
    for name in other:
        print("differs:", name, before.get(name), found.get(name))
    print(f"{len(before.keys() & found.keys()) - len(other)} equal, {len(other)} differ")
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
