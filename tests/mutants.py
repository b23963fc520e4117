"""Mutated files of every kind: whatever is changed, a file is read or refused with GradtraceError.

``python tests/mutants.py --count 10000`` tries as many of each kind, in processes of their own, and
tells the most time and memory that one took. Checksums are made right again in most mutants, so
that damage gets past them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gradtrace.runs import history
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.training import run_report

BLANK = b"0" * 64
SECONDS, BYTES = 10.0, 10**9
"""The most that one file may take."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).mean(1)
        return self.out(h + torch.tanh(self.mix(h)))


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), batch[:, 0], reduction="none")


def traced(rule: str = "greedy", **options: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    with gt.watch(model) as watch:
        loss = losses(model, torch.randint(0, 6, (3, 2)))
    return watch.trace(loss if rule == "greedy" else loss.mean(), rule=rule, **options)


# Files as they should be, and what reads them -----------------------------------------------------


class Kind(NamedTuple):
    """How to make good files of a kind, to change one, and to read it as a user would."""

    make: Callable[[Path], list[bytes]]
    mutate: Callable[[bytes, random.Random], bytes]
    read: Callable[[bytes, Path], object]


def make_traces(folder: Path) -> list[bytes]:
    found = []
    for rule, options in (("greedy", {}), ("viterbi", {}), ("greedy", {"granularity": "operator"})):
        trace = traced(rule, **options)
        trace.influence("operators")
        trace.save(folder / "made.gradtrace", sample=10)
        found.append((folder / "made.gradtrace").read_bytes())
    return found


def read_trace(blob: bytes, folder: Path) -> None:
    path = folder / "file.gradtrace"
    path.write_bytes(blob)
    found = gt.load(path)
    for kind in list(found._tables):
        str(found.influence(kind or None)), found.influence(kind or None, weight="gradient").shares
        _ = found.influence(kind or None).errors
    str(found), str(found.norms()), str(found.paths()), [str(p) for p in found.paths()[:20]]
    found.report(folder / "out.html")


def make_views(folder: Path) -> list[bytes]:
    run_report.keep(folder / "made.gradtrace", run_report.StoredView(7, traced()._view(10)))
    return [(folder / "made.gradtrace").read_bytes()]


def read_view(blob: bytes, folder: Path) -> None:
    (folder / "file.gradtrace").write_bytes(blob)
    seen = run_report.kept(folder / "file.gradtrace")
    run_report.write_report(history.History({}), seen, folder / "out.html")


def make_runs(folder: Path) -> list[bytes]:
    path = folder / "made.jsonl"
    path.unlink(missing_ok=True)
    for start in (None, 3):  # a run that goes on
        torch.manual_seed(0)
        model = Model()
        with gt.Monitor(model, every=1, file=path, view=False, budget=None, start=start) as monitor:
            for _ in range(5):
                loss = losses(model, torch.randint(0, 6, (2, 2))).mean()
                monitor.step(loss)
    return [path.read_bytes()]


def read_run(blob: bytes, folder: Path) -> None:
    path = folder / "file.jsonl"
    path.write_bytes(blob)
    found = run_report.report_run(path, folder / "out.html")
    repr(found), found.components, found.losses, found.cost, found.last
    for record in found.records:
        history.scalars(record), str(record.influence)


DATA = [
    torch.tensor([[0, 1], [2, 3]]),
    torch.tensor([[4, 5], [1, 0]]),
    torch.tensor([[2, 2], [3, 1]]),
]


def counted(path: Path | None, data: list[Tensor] = DATA) -> Any:
    torch.manual_seed(0)
    return gt.influence(Model(), losses, data, checkpoint=path, progress=False)


def make_journals(folder: Path) -> list[bytes]:
    """Of a run that came to its end, and of one that is to go on."""
    return [journal(counted, folder / "made.influence", data) for data in (DATA, DATA[:2])]


def journal(measure: Callable[..., Any], path: Path, data: list[Tensor]) -> bytes:
    path.unlink(missing_ok=True)
    measure(path, data)
    return path.read_bytes()


def read_journal(blob: bytes, folder: Path) -> None:
    path = folder / "file.influence"
    path.write_bytes(blob)
    table = counted(path)
    str(table), table.errors
    assert table.to_dict() == as_counted(counted), "another table than without the journal"


@cache
def as_counted(measure: Callable[..., Any]) -> Any:
    """The table without a journal."""
    return measure(None).to_dict()


def make_decompositions(folder: Path) -> list[bytes]:
    return [journal(decomposed, folder / "made.decompose", data) for data in (DATA, DATA[:2])]


def decomposed(path: Path | None, data: list[Tensor] = DATA) -> Any:
    torch.manual_seed(0)
    return gt.decompose(Model(), losses, data, checkpoint=path, progress=False)


def read_decomposition(blob: bytes, folder: Path) -> None:
    (folder / "file.decompose").write_bytes(blob)
    found = decomposed(folder / "file.decompose")
    str(found), found.table().to_dicts()
    assert found.to_dict() == as_counted(decomposed), "another table than without the journal"


def make_incidents(folder: Path) -> list[bytes]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    found = []
    for rerun in (None, lambda x, named: model(x).sum() + 0 * named["y"].sum()):
        with gt.Monitor(
            model, every=10**6, view=False, trigger="nonfinite", file=folder / "m.jsonl"
        ) as m:
            x, y = torch.full((2, 3), torch.nan), torch.ones(1, 2, 3, 4)
            loss = model(x).sum()
            given = {} if rerun is None else {"rerun": rerun, "batch": (x, {"y": y})}
            m.step(loss, **given)
        (path,) = m.incidents
        found.append(path.read_bytes())
        path.unlink()
    return found


def read_incident(blob: bytes, folder: Path) -> None:
    path = folder / "file.gradtrace"
    path.write_bytes(blob)
    found = gt.load(path)
    assert all(line.isprintable() for line in str(found).splitlines()), str(found)
    found.to_dict(), repr(found.batch)
    found.load_into(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))


# Changes -----------------------------------------------------------------------------------------

DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]

EVIL: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        7,
        2**31,
        2**31 - 1,
        2**53 + 1,
        2**63,
        2**64,
        10**400,
        -(10**400),
    ),
    *(
        0.5,
        -0.5,
        1e308,
        5e-324,
        -0.0,
        1e-300,
        "nan",
        "inf",
        "-inf",
        "1e99999999",
        "0x",
        "",
        "0",
        "-1",
    ),
    *("x" * 10_000, "\x1b[31m\x1b]0;t\x07", "\ud800", "\u202e", "\x00", "[link=x]", "</script>"),
    *(
        [],
        {},
        [[]],
        [None],
        [0] * 1000,
        [1] * 70,
        [[]] * 100,
        [[0, 0]] * 5,
        [["1e99999999"]] * 5,
        DEEP,
    ),
    *(
        {"$int": "0x" + "f" * 50_000},
        {"$int": "zz"},
        {"$float": "nan"},
        {"$": "f8", "o": 0, "n": 10**9},
    ),
    *({"a": 1}, {"": {}}, "greedy", "viterbi", "count", "gradient", "operator", "trace", "t0"),
]

TEXTS = [
    *(
        "NaN",
        "Infinity",
        "1" * 5000,
        "[" * 5000,
        "1e999999",
        '"\\ud800"',
        '{"a":1,"a":2}',
        "-",
        "tru",
    ),
    *("[" * 100 + "]" * 100, "1.5e-400", "0" * 30, "9" * 30, '"' + "\\u0000" * 50 + '"'),
]


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with a key of it."""
    stack = [value]
    while stack:
        each = stack.pop()
        keys = (
            each if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        )
        for key in keys:
            yield each, key
            stack.append(each[key])


def change(value: Any, rng: random.Random) -> None:
    """Change one thing in JSON."""
    places = list(nodes(value))
    if not places:
        return
    holder, key = rng.choice(places)
    old = holder[key]
    match rng.randrange(9):
        case 0 | 1 | 2:
            holder[key] = deepcopy(rng.choice(EVIL))
        case 3:
            del holder[key]
        case 4:
            other, there = rng.choice(places)
            if there in other if isinstance(other, dict) else there < len(other):
                holder[key] = json.loads(json.dumps(other[there]))
        case 5 if isinstance(holder, list):
            holder[key:key] = [deepcopy(old) for _ in range(rng.choice((1, 2, 50)))]
        case 5 if isinstance(holder, dict):
            holder[rng.choice(("", "x", "$", "schema", "rows", key + "x"))] = deepcopy(old)
        case 6 if isinstance(old, (int, float)):
            holder[key] = rng.choice((old + 1, old - 1, -old, old * 2, old * 10**20, old // 3))
        case 6 if isinstance(old, str):
            at = rng.randrange(len(old) + 1)
            holder[key] = old[:at] + rng.choice(("\x9b", "0", "é", "\n", "x")) + old[at + 1 :]
        case 7 if isinstance(old, (list, dict)) and old:
            holder[key] = type(old)() if rng.random() < 0.5 else list(old)[: len(old) // 2]
        case 8 if isinstance(holder, list):
            rng.shuffle(holder)
        case _:
            holder[key] = [old] if rng.random() < 0.5 else {"a": old}


def changed_text(text: str, rng: random.Random) -> str:
    """JSON with one to three changes, now and then of its very text."""
    if rng.random() < 0.15:
        marks = [m.span() for m in re.finditer(r'-?\d+(\.\d+)?|"[^"\\]*"|null|true|false', text)]
        start, end = rng.choice(marks) if marks else (0, 0)
        return text[:start] + rng.choice(TEXTS) + text[end:]
    value = [json.loads(text)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change(value, rng)
    return json.dumps(value[0] if value else None)


def noisy(blob: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, doubled or moved."""
    data = bytearray(blob)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data) or 1)
        match rng.randrange(5):
            case 0 | 1 if data:
                data[at % len(data)] = rng.randrange(256)
            case 2:
                del data[at : at + rng.choice((1, 8, 100, 10**6))]
            case 3:
                data[at:at] = data[: rng.choice((1, 8, 100))]
            case _:
                data[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 4, 30))))
    return bytes(data)


def sealed(header: str, data: bytes) -> bytes:
    """A file whose checksum is right."""
    text = re.sub(r'(sha256\\+":\s*\\+")[0-9a-f]{64}', rf"\g<1>{BLANK.decode()}", header, count=1)
    raw = text.encode(errors="backslashreplace")
    blob = len(raw).to_bytes(8, "little") + raw + data
    return blob.replace(BLANK, sha256(blob).hexdigest().encode(), 1)


def mutate_container(blob: bytes, rng: random.Random) -> bytes:
    """A ``.gradtrace`` file with something changed, most of them with a right checksum."""
    size = int.from_bytes(blob[:8], "little")
    header, data = json.loads(blob[8 : 8 + size]), blob[8 + size :]
    where = rng.random()
    if where < 0.1:
        return noisy(blob, rng)
    if where < 0.2:
        return sealed(changed_text(json.dumps(header), rng), data)
    if where < 0.3:
        return sealed(json.dumps(header), noisy(data, rng)[: len(data)].ljust(len(data), b"\1"))
    document = json.loads(header["__metadata__"]["gradtrace"])
    view = next((key for key, name in document["names"].items() if name == "view"), None)
    if view is not None and where < 0.55:
        start, end = header[view]["data_offsets"]
        found = changed_view(data[start:end], rng)
        data = data[:start] + found + data[end:]
        for each in header.values():
            if "data_offsets" in each:
                offsets = each["data_offsets"]
                each["data_offsets"] = [
                    n + len(found) - end + start if n >= end else n for n in offsets
                ]
        header[view]["shape"] = [len(found)]
        return sealed(json.dumps(header), data)
    text = header["__metadata__"]["gradtrace"]
    if rng.random() < 0.7:
        whole = json.loads(text)
        whole["meta"] = json.loads("[0]")[0]
        marker = json.dumps(whole).replace('"meta": 0', '"meta": @@')
        text = marker.replace("@@", changed_text(json.dumps(json.loads(text)["meta"]), rng))
    else:
        text = changed_text(text, rng)
    header["__metadata__"]["gradtrace"] = text
    return sealed(json.dumps(header), data)


def changed_view(data: bytes, rng: random.Random) -> bytes:
    size = int.from_bytes(data[:4], "little")
    start = -(-(4 + size) // 8) * 8
    text, blob = data[4 : 4 + size].decode(), data[start:]
    if rng.random() < 0.4:
        blob = noisy(blob, rng)
        blob = blob[: len(data) - start].ljust(len(data) - start, b"\1")
    else:
        text = changed_text(text, rng)
    raw = text.encode(errors="backslashreplace")
    head = len(raw).to_bytes(4, "little") + raw
    return head + bytes(-len(head) % 8) + blob


def mutate_lines(blob: bytes, rng: random.Random) -> bytes:
    """A file of JSON lines with something changed."""
    if rng.random() < 0.15:
        return noisy(blob, rng)
    lines = blob.split(b"\n")
    at = rng.randrange(len(lines) - 1)
    match rng.randrange(8):
        case 0:
            del lines[at]
        case 1:
            lines[at:at] = [lines[rng.randrange(len(lines))]] * rng.choice((1, 3, 200))
        case 2:
            lines[at] = noisy(lines[at], rng)
        case _:
            lines[at] = changed_text(lines[at].decode(), rng).encode(errors="backslashreplace")
    return b"\n".join(lines)


KINDS = {
    "trace": Kind(make_traces, mutate_container, read_trace),
    "view": Kind(make_views, mutate_container, read_view),
    "influence": Kind(make_journals, mutate_container, read_journal),
    "run": Kind(make_runs, mutate_lines, read_run),
    "decompose": Kind(make_decompositions, mutate_container, read_decomposition),
    "incident": Kind(make_incidents, mutate_container, read_incident),
}


# Trying them -------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """What became of a mutant."""

    number: int
    told: str  # "read", "refused", or what went wrong
    seconds: float
    peak: int  # bytes


def mutant(kind: str, made: list[bytes], number: int) -> bytes:
    """The mutant of this number: always the same."""
    rng = random.Random(f"{kind} {number}")
    return KINDS[kind].mutate(rng.choice(made), rng)


def tried(kind: str, made: list[bytes], number: int, folder: Path) -> Trial:
    """Read a mutant."""
    blob = mutant(kind, made, number)
    begun = time.perf_counter()
    try:
        KINDS[kind].read(blob, folder)
        told = "read"
    except GradtraceError as error:
        text = str(error)
        told = "refused" if text.isprintable() else f"unprintable: {text!r:.200}"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return Trial(number, told, time.perf_counter() - begun, 0)


def peak() -> int:
    """The most memory since the last ``reset``, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def work(kind: str, first: int, last: int, folder: Path) -> None:
    """Try mutants one after the other, a line each; a parent watches over the time."""
    torch.set_num_threads(1)
    made = KINDS[kind].make(folder)
    for number in range(first, last):
        print(json.dumps({"begun": number}), flush=True)
        reset()
        trial = tried(kind, made, number, folder)
        print(json.dumps(trial._replace(peak=peak())._asdict()), flush=True)


def watched(kind: str, count: int, folder: Path) -> Iterator[Trial]:
    """Trials of a process of its own; begun again after a mutant that kills or stops it."""
    first = 0
    while first < count:
        command = [sys.executable, __file__, "--work", kind, str(first), str(count), str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            signal.signal(signal.SIGALRM, lambda *_, process=process: process.kill())
            for line in process.stdout:
                signal.alarm(60)
                data = json.loads(line)
                if "begun" in data:
                    first = data["begun"]
                else:
                    yield Trial(**data)
                    first += 1
            signal.alarm(0)
        if process.returncode:
            yield Trial(first, f"killed or over 60 s ({process.returncode})", 60.0, 0)
            first += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--folder", type=Path, default=Path("mutants"))
    parser.add_argument("--work", nargs=4)
    asked = parser.parse_args()
    if asked.work:
        kind, first, last, folder = asked.work
        work(kind, int(first), int(last), Path(folder))
        return
    failed = 0
    for kind in asked.kinds:
        folder = asked.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        told: Counter[str] = Counter()
        slowest, largest = Trial(-1, "", 0.0, 0), Trial(-1, "", 0.0, 0)
        for trial in watched(kind, asked.count, folder):
            over = trial.seconds > SECONDS or trial.peak > BYTES
            bad = over or trial.told not in ("read", "refused")
            told["wrong" if bad else trial.told] += 1
            slowest = max(slowest, trial, key=lambda t: t.seconds)
            largest = max(largest, trial, key=lambda t: t.peak)
            if bad:
                failed += 1
                print(f"{kind} {trial}", flush=True)
        print(
            f"{kind}: {sum(told.values()):,} mutants, {dict(told)}; "
            f"slowest {slowest.seconds:.2f} s ({slowest.number}), most memory "
            f"{largest.peak / 2**20:.0f} MiB ({largest.number})",
            flush=True,
        )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
