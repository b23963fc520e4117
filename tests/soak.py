"""Long runs that show what short ones cannot: kills at random moments, memory that creeps, threads.

From the root of the repository::

    python tests/soak.py kills --count 100            # of influence and Monitor each
    python tests/soak.py monitor --steps 20000        # three models, collector on and off
    python tests/soak.py traces --count 3000          # three models, collector on and off
    python tests/soak.py traces --count 100 --only residual    # 5,000 operators
    python tests/soak.py threads --count 100          # traces on each of 8 threads, equal to serial
    python tests/soak.py ranks --count 5              # 2 and 4 processes that do not go in step

Each prints what it found, and ends with an exit code of 1 if something is not as it should be.
``test_soak`` runs short forms of them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from gradtrace.runs import history
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.io import container as files

HERE = Path(__file__).parent


# Models -------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(x)[0][:, -1])  # type: ignore[no-any-return]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body, self.out = nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x).mean(1))  # type: ignore[no-any-return]


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


class Residual(nn.Module):
    """Layers that add to what they are given: 5,000 operators."""

    def __init__(self, layers: int = 1_250) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.05 * layer(x).tanh()
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (perceptron, (16, 8)),
    "lstm": (Recurrent, (4, 10, 8)),
    "transformer": (Attending, (4, 6, 8)),
}
LARGE = {"residual": (Residual, (16, 8))}  # run where it is asked for by name


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return {**MODELS, **LARGE}[name][0]()


def batch(name: str, step: int) -> Tensor:
    shape = {**MODELS, **LARGE}[name][1]
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


# Memory, objects, handles, time -------------------------------------------------------------------


@dataclass
class Gauge:
    """What a process holds, looked at a hundred times in a run."""

    total: int
    rows: list[tuple[int, float, int, int, float]] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)
    _last: float = 0.0

    def look(self, step: int) -> None:
        now = time.process_time()  # of this process alone, whatever else the machine does
        if self._last:
            self._times.append(now - self._last)
        if (step + 1) % max(1, self.total // 100) == 0:
            objects = len(gc.get_objects())
            row = (step + 1, rss(), objects, handles(), fmean(self._times or [0.0]) * 1000)
            self.rows.append(row)
            self._times.clear()
        self._last = time.process_time()

    def verdict(self) -> list[str]:
        """What grows from the first quarter on."""
        quarter = max(1, len(self.rows) // 4)
        early, late = self.rows[quarter : 2 * quarter], self.rows[-quarter:]
        if not early:
            return []
        wrong = []
        for column, name, slack, share in (
            (1, "memory (MB)", 8.0, 0.03),
            (2, "objects", 1000.0, 0.02),
            (3, "handles", 0.0, 0.0),
            (4, "ms a step", 0.5, 0.25),
        ):
            before, after = (median(float(row[column]) for row in some) for some in (early, late))
            if after > before * (1 + share) + slack:
                wrong.append(f"{name} grows from {before:.1f} to {after:.1f}")
        return wrong

    def told(self) -> str:
        some = [self.rows[n] for n in (0, len(self.rows) // 4, len(self.rows) // 2, -1)]
        return "; ".join(
            f"{n:,}: {mb:.0f} MB, {objects:,} objects, {fds} handles, {ms:.2f} ms"
            for n, mb, objects, fds, ms in some
        )


def rss() -> float:
    """Megabytes of memory that this process has."""
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def handles() -> int:
    """Open files."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0


@contextlib.contextmanager
def collector(on: bool) -> Iterator[None]:
    gc.collect()
    if not on:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


def train(name: str, steps: int, folder: Path) -> Gauge:
    """So many steps with a Monitor that traces every 20th."""
    model, gauge = made(name), Gauge(steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file = folder / f"{name}.jsonl"
    with gt.Monitor(model, every=20, budget=None, file=file, view=False) as monitor:
        for step in range(steps):
            loss = loss_of(model, batch(name, step))
            monitor.step(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            gauge.look(step)
    assert len(history.read(file)) == (steps + 19) // 20
    file.unlink()
    return gauge


def trace(name: str, count: int, folder: Path) -> Gauge:
    """So many traces."""
    model, gauge = made(name), Gauge(count)
    for step in range(count):
        with gt.watch(model) as watch:
            loss = loss_of(model, batch(name, step))
        watch.trace(loss).influence()
        gauge.look(step)
    return gauge


def flat(run: Callable[[str, int, Path], Gauge], count: int, models: list[str]) -> int:
    """Run each model with the collector on and off, each in a process of its own."""
    failed = 0
    for name in models:
        for on in (True, False):

            def measure(folder: Path, name: str = name, on: bool = on) -> None:
                with collector(on):
                    gauge = run(name, count, folder)
                (folder / "told").write_text(json.dumps([gauge.told(), gauge.verdict()]))

            with tempfile.TemporaryDirectory() as folder:
                code = forked(lambda: measure(Path(folder)))
                told, wrong = ("", [f"exit code {code}"])
                if code == 0:
                    told, wrong = json.loads((Path(folder) / "told").read_text())
            state = "; ".join(wrong) if wrong else "flat"
            print(f"{name}, collector {'on' if on else 'off'}: {state} ({told})", flush=True)
            failed += bool(wrong)
    return failed


# Processes that are killed ------------------------------------------------------------------------


def started(work: Callable[[], object]) -> int:
    """A copy of this process that does something; torch is imported already."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:  # of a child: told, never raised into the parent's code
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked(work: Callable[[], object]) -> int:
    return ended(started(work))


BATCHES, STEPS = 12, 5


def count_influence(folder: Path) -> None:
    data = [batch("mlp", n) for n in range(BATCHES)]
    table = gt.influence(made("mlp"), loss_of, data, checkpoint=folder / "run.gradtrace")
    (folder / "done").write_text(json.dumps(table.to_dict()))


def left_influence(folder: Path) -> None:
    if (folder / "run.gradtrace").exists():
        files.read(folder / "run.gradtrace", "influence")


def watch_training(folder: Path) -> None:
    """Weights depend on the step alone, so that steps that are done again are the same."""
    file = folder / "run.jsonl"
    known = history.read(file).last if file.exists() and b"\n" in file.read_bytes() else None
    first = 0 if known is None else known + 1
    with gt.Monitor(model := made("mlp"), every=1, budget=None, file=file, start=first) as monitor:
        for step in range(first, STEPS):
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.sin(torch.arange(p.numel()) + step).view_as(p))
            monitor.step(loss_of(model, batch("mlp", step)))
    found = history.read(file)
    told = [[r.step, r.loss, r.influence and r.influence.to_dict()] for r in found.records]
    (folder / "done").write_text(json.dumps([told, found.running]))


def left_training(folder: Path) -> None:
    file = folder / "run.jsonl"
    if file.exists() and b"\n" in file.read_bytes():
        history.read(file)


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "influence": (count_influence, left_influence),
    "monitor": (watch_training, left_training),
}


def kill(kind: str, count: int, seed: int) -> tuple[int, list[str]]:
    """Kill so many times, at random moments of a run; in how many runs, and what was wrong."""
    work, check = KINDS[kind]
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as whole:
        work(Path(whole))  # once here, so that copies of this process have loaded everything
        for path in Path(whole).iterdir():
            if path.name.startswith(("run", "done")):
                subprocess.run(["rm", "-rf", str(path)], check=True)
        begun = time.perf_counter()
        assert forked(lambda: work(Path(whole))) == 0
        took = time.perf_counter() - begun
        expected = (Path(whole) / "done").read_text()
    kills = runs = 0
    wrong: list[str] = []
    while kills < count:
        runs += 1
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for _ in range(draw.randint(1, 4)):
                pid = started(lambda: work(folder))  # noqa: B023
                time.sleep(draw.uniform(0, took))
                os.kill(pid, signal.SIGKILL)
                if ended(pid) == -signal.SIGKILL:
                    kills += 1
                else:
                    took *= 0.8  # the machine is faster now than when it was measured
                try:
                    check(folder)
                except Exception as error:
                    wrong.append(f"{kind}, run {runs}: what is left does not load: {error}")
            (folder / "done").unlink(missing_ok=True)
            if forked(lambda: work(folder)):  # noqa: B023
                wrong.append(f"{kind}, run {runs}: does not go on")
            elif (folder / "done").read_text() != expected:
                wrong.append(f"{kind}, run {runs}: another result")
    return runs, wrong


def kills(count: int, kinds: list[str], seed: int) -> int:
    failed = 0
    for kind in kinds:
        begun = time.perf_counter()
        runs, wrong = kill(kind, count, seed)
        took = f"{time.perf_counter() - begun:.0f} s"
        print(f"{kind}: {count} kills in {runs} runs, {len(wrong)} wrong ({took})", flush=True)
        for line in wrong[:10]:
            print(f"  {line}")
        failed += len(wrong)
    return failed


# Threads ------------------------------------------------------------------------------------------


def threads(count: int, many: int, models: list[str]) -> int:
    """Traces of threads, each with a model of its own, equal to those of one thread."""
    failed = 0
    for name in models:
        models_of = [made(name) for _ in range(many)]  # by the one generator of the process

        def tables(offset: int, name: str = name, made: list[nn.Module] = models_of) -> list[Any]:
            model, found = made[offset], []
            for step in range(count):
                with gt.watch(model) as watch:
                    loss = loss_of(model, batch(name, offset * count + step))
                found.append(watch.trace(loss).influence().to_dict())
            return found

        serial = [tables(n) for n in range(many)]
        with ThreadPoolExecutor(many) as pool:
            side = list(pool.map(tables, range(many)))
        odd = sum(a != b for one, two in zip(serial, side) for a, b in zip(one, two))
        print(f"{name}: {many} threads x {count} traces, {odd} differ from serial", flush=True)
        failed += odd
    return failed


RANK_TESTS = [HERE / f"test_{name}.py" for name in ("monitor_ranks", "process_group")]


def ranks(count: int) -> int:
    """Tests of processes that measure together or do not go in step, again and again."""
    failed = 0
    for n in range(count):
        command = [sys.executable, "-m", "pytest", "-q", *map(str, RANK_TESTS)]
        code = subprocess.run([*command, "-p", "no:cacheprovider"], check=False).returncode
        print(f"round {n + 1} of {count}: {'passed' if code == 0 else 'FAILED'}", flush=True)
        failed += code != 0
    return failed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, option, default in (
        ("kills", "--count", 100),
        ("monitor", "--steps", 20_000),
        ("traces", "--count", 3_000),
        ("threads", "--count", 100),
        ("ranks", "--count", 5),
    ):
        one = commands.add_parser(name)
        one.add_argument(option, dest="count", type=int, default=default)
        one.add_argument("--only", nargs="*", default=None)
        one.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    models = asked.only or list(MODELS)
    if asked.command == "kills":
        return kills(asked.count, asked.only or list(KINDS), asked.seed)
    if asked.command == "monitor":
        return flat(train, asked.count, models)
    if asked.command == "traces":
        return flat(trace, asked.count, models)
    if asked.command == "threads":
        return threads(asked.count, 8, models)
    return ranks(asked.count)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
