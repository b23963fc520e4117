"""Groups of processes for tests: copies of one process that has imported torch already.

``started("ranks", Group(...), ...)`` runs ``ranks.main(names, rank, world, port, folder)`` in every
process of every group, one group after the other; the store of a group is at its port. Importing
torch takes a process seconds, more than all that it then does, so they are copies of a copy of the
one that ``fresh`` keeps, which has imported it. A process ends as any does, with its threads and
its handlers; what it prints is kept.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import fresh
import torch
import torch.distributed as dist

CODE = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import launch; launch.run()"
)


class Group(NamedTuple):
    """So many processes, what they are told to do, and where they leave what they found."""

    names: str
    world: int
    folder: Path


class Ended(NamedTuple):
    """What the processes of a group left."""

    codes: list[int]
    folder: Path

    def check(self) -> None:
        """Every process ended well; else the code and last lines of each that did not."""
        wrong = {n: code for n, code in enumerate(self.codes) if code}
        ends = [f"rank {n}, code {code}:\n{self.printed[n][-2000:]}" for n, code in wrong.items()]
        assert not wrong, "\n".join(ends)

    @property
    def printed(self) -> list[str]:
        """What each printed, errors last."""
        return [self.out(rank) + self.err(rank) for rank in range(len(self.codes))]

    def out(self, rank: int) -> str:
        return (self.folder / f"{rank}.out").read_text()

    def err(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text()

    def found(self, name: str) -> list[Any]:
        """The results of every rank that has written some."""
        files = [self.folder / f"{name}-{rank}.json" for rank in range(len(self.codes))]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def each(self, name: str, what: str) -> list[Any]:
        """One of these results, of each rank."""
        return [dict(found)[what] for found in self.found(name)]


def started(module: str, *groups: Group) -> list[Ended]:
    """Run all groups; ``module`` is a file beside this one."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in groups]
    told = [
        (each.names, each.world, store.port, str(each.folder))
        for each, store in zip(groups, stores)
    ]
    done = fresh.python("-c", CODE, module, json.dumps(told), check=True)
    codes = json.loads(done.stdout)
    return [Ended(found, each.folder) for found, each in zip(codes, groups)]


# The process that is copied ----------------------------------------------------------------------


def copied(module: Any, names: str, rank: int, world: int, port: int, folder: Path) -> int:
    """The number of a process that does this; in that process nothing comes back."""
    process = os.fork()
    if process:
        return process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number, kind in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    fresh.renew_threads()
    module.main(names, rank, world, port, folder)
    sys.exit(0)


def use_loopback() -> None:
    """Have gloo listen there, whatever this machine's name resolves to, if it does at all."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    for name in names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def main(module: str, groups: list[Any]) -> list[list[int]]:
    found = importlib.import_module(module)
    found.warm()
    gc.freeze()  # copies share what is here, and do not look through it again
    codes = []
    for names, world, port, folder in groups:
        processes = [copied(found, names, n, world, port, Path(folder)) for n in range(world)]
        ends = [os.waitpid(process, 0)[1] for process in processes]
        codes.append([os.waitstatus_to_exitcode(end) for end in ends])
    return codes


def run() -> None:
    """All groups, in a session that ends as a whole where it takes too long (``fresh.LONG``)."""
    os.setsid()
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.set_num_threads(1)
    use_loopback()
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
