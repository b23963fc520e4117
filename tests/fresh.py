"""New processes for tests, as ``python -c`` and ``python -m`` begin them, but with torch imported.

Importing torch takes seconds, more than most tests then do. So ``python fresh.py`` imports it, and
nothing of gradtrace, and is forked for each of ``python("-c", code, ...)`` in a test. Not for tests
of what an interpreter does before torch is there, or of memory as the system counts it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

LONG = 240 * int(os.environ.get("GRADTRACE_PATIENCE", "1"))
"""Seconds that a process may take on a machine that has much else to do; where the processor is
emulated it takes several times as long (``GRADTRACE_PATIENCE=4``).
"""

_servers: list[subprocess.Popen[str]] = []


def python(
    *words: str,
    cwd: str | Path | None = None,
    env: dict[str, str] | None = None,
    stdin: str | Path = os.devnull,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What ``python *words`` leaves: ``[-W ACTION] -c CODE ...`` or ``-m MODULE ...``."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        job = {
            "words": words,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "files": [str(stdin), str(out), str(err)],
        }
        done = subprocess.CompletedProcess[str](
            [sys.executable, *words], _asked(job), out.read_text(), err.read_text()
        )
    if check:
        assert done.returncode == 0, done.stderr
    return done


def _asked(job: dict[str, Any]) -> int:
    if not _servers or _servers[-1].poll() is not None:
        _servers.append(
            subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        )
        atexit.register(_end, _servers[-1])
    server = _servers[-1]
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def _end(server: subprocess.Popen[str]) -> None:
    with server:
        server.kill()


# The process that is copied ----------------------------------------------------------------------


def serve() -> None:
    import torch
    import torch._dynamo  # as optimisers do, for a second or two

    torch.set_num_threads(1)
    gc.freeze()  # copies share what is here, and do not look through it again
    for line in sys.stdin:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a process with threads is copied
            process = os.fork()
        if not process:
            become(json.loads(line))
            return
        _, end = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(end), flush=True)


def become(job: dict[str, Any]) -> None:
    """Do what is asked, as if it were the whole program."""
    signal.alarm(LONG)  # ends it where it hangs
    for number, file in enumerate(job["files"]):
        flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
        opened = os.open(file, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        open(n, mode, buffering=1 if n == 2 else -1, closefd=False)  # noqa: SIM115
        for n, mode in enumerate(("r", "w", "w"))
    )
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    renew_threads()
    action, *words = _options(job["words"])
    for each in (os.environ.get("PYTHONWARNINGS", ""), action):
        if each:
            warnings.simplefilter(each)  # type: ignore[arg-type]
    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = sys.path[1:]
    sys.path[:] = ["", *(each for each in more if each and each not in rest), *rest]
    kind, what, *sys.argv[1:] = words
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    assert kind == "-c", kind
    sys.argv[0] = "-c"
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), main.__dict__)


def renew_threads() -> None:
    """Replace PyTorch's pool of threads, which a fork breaks, while there is one thread: where two
    threads of the autograd engine did it at once, the process was ended ("Invalid thread pool!").
    """
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _options(words: list[str]) -> list[str]:
    """How to warn, or nothing, before all other words."""
    return [words[1], *words[2:]] if words[0] == "-W" else ["", *words]


if __name__ == "__main__":
    serve()
