"""What the kernels of a device find equals, bit for bit, what their definitions find on the CPU.

The operators and architectures of the other tests are traced twice on a device: once as a user
would, and once inside ``defined()``, where every kernel is its plain-torch definition, computed on
the CPU from the very same operands. Marks, values, tables and paths must be the same.

    GRADTRACE_DEVICE=cuda python -m pytest tests/test_equality.py
    python tests/equality.py --device cuda --jobs 16

The second way needs torch, numpy, transformers and expecttest, and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from leaves import traced_leaves, with_ids
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from agreement import WAYS, assert_agree
from architectures import ARCHITECTURES
from operators import CPU, Problem, entries, label, makers

import gradtrace
from gradtrace import kernels
from gradtrace.ir import interpreter
from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.kernels import Reference
from gradtrace.kernels.operands import LargestEntry, LineLayout, LowRankLines
from gradtrace.linops import Normaliser
from gradtrace.semirings import MAX
from gradtrace.traced import Trace

DEVICE = torch.device(os.environ.get("GRADTRACE_DEVICE", "cpu"))
SPARSE = {"sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"}
NOISY = {"native_layer_norm", "nn.functional.layer_norm"}
"""As in the operator tests: what is refused, and what PyTorch itself computes roughly."""

RULES = ("greedy", "edge", "viterbi")

# The seam -----------------------------------------------------------------------------------------


def _normalised(
    lines: LowRankLines,
    ids: Tensor | None = None,
    value: bool = True,
    layout: LineLayout | None = None,
) -> LargestEntry:
    """As ``linops.diag_low_rank`` has it, where no kernel can serve."""
    rank, shape = len(lines.left), tuple(lines.x.shape)
    diagonal, x, *rest = (lines.diagonal, lines.x, *lines.left, *lines.right, *_given(ids))
    if layout is not None:
        count, n, shape, each = layout[0], layout[1], tuple(layout[2]), layout[3]
        tensors = zip((diagonal, x, *rest), each)
        diagonal, x, *rest = (part.as_strided((count, n), step) for part, step in tensors)
    pairs = list(zip(rest[:rank], rest[rank : 2 * rank]))
    most, place = Normaliser(diagonal, pairs, (1,), tuple(x.shape))._best_places(x)
    if ids is None:
        return LargestEntry(most.reshape(shape), place.reshape(shape), None)
    found = rest[-1].gather(1, place.clamp(min=0)).masked_fill((most == 0) | (place < 0), 0)
    return LargestEntry(most.reshape(shape) if value else None, None, found.reshape(shape))


def _given(ids: Tensor | None) -> tuple[Tensor, ...]:
    return () if ids is None else (ids,)


PLAIN = Reference(CPU)
DEFINITIONS: dict[str, Callable[..., Any]] = {
    "contract": PLAIN.contract,
    "contract_strided": PLAIN.contract_strided,
    "contract_lines": PLAIN.contract_lines,
    "merge": PLAIN.merge,
    "masked": PLAIN.masked,
    "tally": PLAIN.tally,
    "measure": PLAIN.measure,
    "measure_many": PLAIN.measure_many,
    "measure_rows": PLAIN.measure_rows,
    "has_zeros": PLAIN.has_zeros,
    "reduce": PLAIN.reduce,
    "scatter": PLAIN.scatter,
    "sparse": PLAIN.sparse,
    "sparse_sum": PLAIN.sparse_sum,
    "normalise": _normalised,
    "normalise_at": PLAIN.normalise_at,
    "zeros": PLAIN.zeros,
}
"""What each operation of a backend is, in plain torch on the CPU."""

IN_PLACE = {"merge"}
"""Operations that write to their first two operands."""

SAME = {
    *("synchronises", "host", "table_entries", "sums_groups", "group_sums", "add_rows"),
    *(
        "used",
        "renumber",
        "gaps",
        "flags",
        "finite_sums",
        "checks",
        "check",
        "label",
        "free_bytes",
        "held_bytes",
    ),
    *("spare_bytes", "workspace_bytes", "workspace_max_bytes", "device", "widened_product"),
}
"""What a backend tells, and does in plain torch or otherwise than by choosing: as on the device."""

NONE = {
    *(
        "fuses",
        "merge_pair",
        "merge_sized",
        "scaled_ids",
        "close_gaps",
        "tally_batch",
        "max_top_k",
        "contract_top",
    ),
    *(
        "sums_lines",
        "executes_plans",
        "captured",
        "normalised_sums",
        "low_rank",
        "low_rank_sums",
        "follows_paths",
        "follow_paths",
        "sizes",
    ),
}
"""What only one kind of device has, as leaves counted in one launch: ``Reference`` does without."""


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A copy that lies in memory as the tensor does, gaps and all."""
    extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride()))
    line = x.detach().as_strided((extent if x.numel() else 0,), (1,))
    return line.to(device, copy=True).as_strided(x.shape, x.stride(), 0)


def _here(x: Any) -> Any:
    return moved(x, CPU) if isinstance(x, Tensor) else x


def defining(name: str, used: Counter[str]) -> Callable[..., Any]:
    """The definition of an operation, on the CPU, wherever its operands are."""

    def run(*args: Any, **named: Any) -> Any:
        used[name] += 1
        device = next(x.device for x in tree_leaves((args, named)) if isinstance(x, Tensor))
        there, by_name = tree_map(_here, (args, named))
        found = DEFINITIONS[name](*there, **by_name)
        if name in IN_PLACE:
            for mine, theirs in zip(args[:2], there[:2]):
                mine.copy_(theirs)
        return tree_map(lambda x: moved(x, device) if isinstance(x, Tensor) else x, found)

    return run


class Defined:
    """A backend whose operations are their definitions on the CPU; counts the calls of each."""

    def __init__(self, device: torch.device, used: Counter[str]) -> None:
        real, plain = kernels.backend_of(device), Reference(device)
        self.by_name = {name: defining(name, used) for name in DEFINITIONS}
        self.by_name |= {name: getattr(plain, name) for name in NONE}
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return self.by_name[name] if name in self.by_name else getattr(self.real, name)


@contextmanager
def defined() -> Iterator[Counter[str]]:
    """No kernel is called in here, but its definition on the CPU; tells how often each was."""
    used: Counter[str] = Counter()
    before = dict(kernels._BACKENDS)
    devices = {
        device if device.index is not None else torch.empty(0, device=device).device
        for device in (DEVICE, CPU)
    }
    try:
        kernels._BACKENDS.update({device: Defined(device, used) for device in devices})
        yield used
    finally:
        kernels._BACKENDS.clear()
        kernels._BACKENDS.update(before)


# What is compared ---------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """All that was found about a loss: tensors and tables, by what they are. Marks are numbers of
    what ``kinds`` holds.
    """

    tensors: dict[str, Tensor]
    tables: dict[str, Any]


def outcome(trace: Trace, marks: ComponentBits, kinds: dict[int, int], paths: int = 0) -> Outcome:
    """Values in MAX; by each rule the mark of every element, the table, some paths."""
    program, tensors, tables = trace.program, {}, {}
    leaves = {leaf.tensor: str(leaf.value) for leaf in program.leaves}
    for tensor, value in interpreter.run(program, MAX).items():
        tensors[f"MAX of {leaves[tensor]}"] = value
    for rule in RULES:
        here = dataclasses.replace(trace, rule=rule)
        with torch.no_grad():
            for found in traced_leaves(program, rule, marks):
                state = with_ids(found.state)
                assert state.ids is not None
                ids = [kinds.setdefault(mark, len(kinds)) for mark in state.provenance.sets()]
                table = torch.tensor(ids, device=state.ids.device)
                name = f"{rule} {found.leaf.value}"
                tensors[f"mark of {name}"] = table[state.ids.long()]
                assert state.value is not None
                tensors[f"value of {name}"] = state.value
        tables[f"influence, {rule}"] = here.influence().to_dict()
        if paths:
            tables[f"paths, {rule}"] = [
                (path.name, path.index, path.operators) for path in here.paths(sample=paths)
            ]
    return Outcome(tensors, tables)


def by_block(trace: Trace) -> ComponentBits:
    """A bit for each block of the program."""
    blocks = range(len(trace.program.blocks))
    return ComponentBits({n: 2 << n for n in blocks}, {}, {})


def assert_equal(trace: Trace, paths: int = 0) -> Counter[str]:
    """The kernels' outcome is that of their definitions; which of these were used."""
    marks = by_block(trace)
    kinds: dict[int, int] = {}
    found = outcome(trace, marks, kinds, paths)
    with defined() as used:
        wanted = outcome(trace, marks, kinds, paths)
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in found.tensors.items():
        assert same(tensor, wanted.tensors[name]), name
    assert found.tables == wanted.tables
    return used


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, shape and dtype too; all NaN count as one."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    equal = a == b
    return bool((equal | (a.isnan() & b.isnan()) if a.is_floating_point() else equal).all())


# Cases --------------------------------------------------------------------------------------------


class NotHere(Exception):
    """What PyTorch cannot run on a device."""


class Checked(NamedTuple):
    """Which definitions were used, and the samples that PyTorch itself cannot run, with why."""

    used: Counter[str]
    left: list[str]


def check_operator(name: str, device: torch.device = DEVICE, most: int = 4) -> Checked:
    """SUM equals autograd, and kernels their definitions, on samples of an operator."""
    op, found = {label(op): op for op in entries(device)}[name], Checked(Counter(), [])
    seen = 0
    for make in makers(op, torch.float32, most, device):
        with ExitStack() as calmly:
            try:
                sample = _sample(make, device, calmly)
            except NotHere as reason:
                found.left.append(str(reason))
                continue
            if sample is None:
                continue
            seen += 1
            loss, leaves, wanted = sample
            for way in WAYS.values():
                assert_agree(way(loss), leaves, wanted, 1e-3 if name in NOISY else 0)
            found.used.update(assert_equal(gradtrace.trace(loss, nonfinite="allow")))
        if seen == most:
            break
    if not seen and found.left:
        raise NotHere(found.left[0])
    assert seen
    return found


REFUSED = (RuntimeError, TypeError, NotImplementedError, IndexError)
"""What PyTorch raises where it cannot run something."""

Sample = tuple[Tensor, list[Tensor], tuple[Tensor | None, ...]]


def _sample(
    make: Callable[[], Problem | None], device: torch.device, calmly: ExitStack
) -> Sample | None:
    """A loss, its leaves and PyTorch's gradients; nothing of gradtrace runs in here.

    What PyTorch cannot run on the device by deterministic algorithms (``index_add`` of tensors
    without dimensions) is run by others, as all that follows on the stack.
    """
    if device.type == "cpu":
        return _derived(make())
    try:
        return _derived(make())
    except REFUSED:
        calmly.enter_context(freely())
    try:
        return _derived(make())
    except REFUSED as error:
        raise NotHere(f"PyTorch on {device}: {type(error).__name__}: {error}") from error


def _derived(problem: Problem | None) -> Sample | None:
    if problem is None:
        return None
    loss, leaves = problem
    return loss, leaves, torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)


def check_architecture(name: str, device: torch.device = DEVICE, paths: int = 40) -> Checked:
    """The same on a whole model in training."""
    model, loss_of = ARCHITECTURES[name]()
    model.to(device)
    torch.manual_seed(0)
    with gradtrace.watch(model) as watch:
        loss = loss_of(model)
    trace = watch.trace(loss)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    leaves = list(named.values())
    wanted = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    assert_agree(interpreter.run(trace.program, gradtrace.semirings.SUM), leaves, wanted)
    ours = {named[name]: grad for name, grad in trace.gradients.items() if name in named}
    assert_agree(ours, leaves, wanted)
    return Checked(assert_equal(trace, paths), [])


CHECKS: dict[str, Callable[..., Checked]] = {
    "operator": check_operator,
    "architecture": check_architecture,
}


def cases(device: torch.device = DEVICE) -> list[tuple[str, str]]:
    """All, or the shard of them that ``GRADTRACE_SHARD=i/n`` names; from 0 on."""
    operators = sorted({label(op) for op in entries(device)} - SPARSE)
    found = [("architecture", n) for n in ARCHITECTURES] + [("operator", n) for n in operators]
    shard, of = map(int, os.environ.get("GRADTRACE_SHARD", "0/1").split("/"))
    return found[shard::of]


@contextmanager
def exactly() -> Iterator[None]:
    """The same twice: no sums in any order, no TF32."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with cudnn.flags(enabled=cudnn.enabled, allow_tf32=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the samples, of transformers, of the above
            yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def freely() -> Iterator[None]:
    """By any algorithm."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)


# Without pytest -----------------------------------------------------------------------------------


class Score(NamedTuple):
    """How many cases, and how many samples of those that passed were left out."""

    passed: int = 0
    failed: int = 0
    away: int = 0
    left: int = 0

    def __str__(self) -> str:
        spared = f" ({self.left} samples of them not here)" if self.left else ""
        return f"{self.passed} passed{spared}, {self.failed} failed, {self.away} not here"


def run(device: torch.device) -> Score:
    """One shard after the other case; says what failed, and which definitions were used."""
    passed, failed, away, left = 0, 0, 0, 0
    used, begun = Counter[str](), time.perf_counter()
    found = cases(device)
    for kind, name in found:
        try:
            with exactly():
                checked = CHECKS[kind](name, device)
        except NotHere as reason:
            away += 1
            print(f"not here: {name}: {_line(reason)}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED {kind} {name}\n{traceback.format_exc()}", flush=True)
        else:
            passed += 1
            left += len(checked.left)
            used += checked.used
            for reason, many in Counter(map(_line, checked.left)).items():
                print(f"not here: {name}, {many} of its samples: {reason}", flush=True)
    score = Score(passed, failed, away, left)
    print(f"definitions used: {dict(sorted(used.items()))}")
    print(f"{score}, of {len(found)}, in {time.perf_counter() - begun:.0f} s on {device}")
    return score


def _line(reason: object) -> str:
    """The first line of a message."""
    return str(reason).partition("\n")[0]


def shared(device: str, jobs: int) -> Score:
    """The same in so many processes. One that ends without a word has failed."""
    with TemporaryDirectory() as folder:
        files = [Path(folder, str(n)) for n in range(jobs)]
        # PyTorch's threads print what they warn of: that put_ is not deterministic, a line each
        calm = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--device", device, "--score", str(file)],
                env={**calm, "GRADTRACE_SHARD": f"{n}/{jobs}"} if jobs > 1 else calm,
            )
            for n, file in enumerate(files)
        ]
        codes = [process.wait() for process in started]
        scores = []
        for n, (file, code) in enumerate(zip(files, codes)):
            if file.exists():
                scores.append(Score(*json.loads(file.read_text())))
            else:
                print(f"FAILED shard {n}: its process ended with status {code}, in the middle")
                scores.append(Score(failed=1))
    return Score(*map(sum, zip(*scores)))


def main() -> int:
    """All cases, over so many processes."""
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--device", default=str(DEVICE))
    ask.add_argument("--jobs", type=int, default=1)
    ask.add_argument("--only", help="one case, by its name")
    ask.add_argument("--score", type=Path, help=argparse.SUPPRESS)  # one process of several
    got = ask.parse_args()
    torch.set_num_threads(1)
    device = torch.device(got.device)
    if got.only:
        with exactly():
            print(
                CHECKS["architecture" if got.only in ARCHITECTURES else "operator"](
                    got.only, device
                )
            )
        return 0
    if got.score:
        got.score.write_text(json.dumps(run(device)))
        return 0
    begun = time.perf_counter()
    score = shared(got.device, got.jobs)
    print(f"in all: {score}, in {time.perf_counter() - begun:.0f} s on {device}", flush=True)
    return int(score.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
