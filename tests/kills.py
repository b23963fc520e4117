"""``kill -9`` at random moments of an influence over a data set: does it go on to the same table?

``python tests/kills.py`` does it ten times on one process, and ten times on two of torchrun, of
which one is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

BATCHES, SLEEP, LONG = 40, 0.01, 600


def run(folder: Path) -> None:
    """What is killed: it says when it counts, and writes its table."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    found = measured(folder)
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


def measured(folder: Path) -> object:
    """The table, as JSON, of this run or of one that goes on."""
    import torch
    from torch import Tensor, nn

    import gradtrace as gt

    rank = os.environ.get("RANK", "0")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 2))
    batches = torch.randn(BATCHES, 4, 8, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        (folder / f"{rank}.pid").write_text(str(os.getpid()))
        time.sleep(SLEEP)
        found: Tensor = model(x).square().mean()
        return found

    table = gt.influence(model, loss, list(batches), journal=folder / "journal")
    return json.loads(json.dumps(table.to_dict()))


def begun(folder: Path, world: int) -> subprocess.Popen[bytes]:
    """The processes, as soon as they count."""
    for file in folder.glob("*.pid"):
        file.unlink()
    words = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    launch = [*words, f"--nproc-per-node={world}"] if world > 1 else []
    with open(folder / "said", "ab") as said:
        told = [sys.executable, *launch, __file__, "run", str(folder)]
        process = subprocess.Popen(told, stdout=said, stderr=said)
    while len(list(folder.glob("*.pid"))) < world:
        if process.poll() is not None:
            assert not process.poll(), (folder / "said").read_text()[-2000:]
            break  # all batches were counted before
        time.sleep(0.001)
    return process


def tables(folder: Path, world: int) -> list[object]:
    """What each process finds, undisturbed or of the journals that there are."""
    begun(folder, world).wait(LONG)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def killed(folder: Path, world: int, seconds: float) -> int:
    """Kill one process after so long; how many batches are in the journals then."""
    process, rank = begun(folder, world), random.randrange(world)
    time.sleep(seconds)
    while not (pid := (folder / f"{rank}.pid").read_text()):
        time.sleep(0.001)
    os.kill(int(pid), signal.SIGKILL)
    process.wait(LONG)
    return sum(file.read_bytes().count(b'"batch"') for file in folder.glob("journal.rank*"))


def differing(folder: Path, moments: int, world: int) -> list[str]:
    """Kill as many runs; those whose tables differ from the undisturbed one afterwards."""
    whole = folder / f"{world} whole"
    whole.mkdir()
    began, start = begun(whole, world), time.monotonic()
    while not (whole / "0.json").exists():
        assert not began.poll(), (whole / "said").read_text()[-2000:]
        time.sleep(0.001)
    took = time.monotonic() - start
    began.wait(LONG)
    wanted = json.loads((whole / "0.json").read_text())
    wrong = []
    for moment in range(moments):
        at = folder / f"{world} {moment}"
        at.mkdir()
        seconds = random.uniform(0, took)
        count = killed(at, world, seconds)
        same = [found == wanted for found in tables(at, world)]
        print(f"{world} processes, killed after {seconds:.2f} s, {count} batches: {same}")
        wrong += [] if all(same) else [at.name]
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(Path(sys.argv[2]))
    else:
        with TemporaryDirectory() as name:
            found = [x for world in (1, 2) for x in differing(Path(name), 10, world)]
        sys.exit(f"differing: {found}" if found else 0)
