"""A network of ``shared_ptr`` objects in C++, trained by a program that is built when it is needed.

The sources lie beside this file, so that they are in an installed package, too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import Tensor

from gradtrace.errors import GradtraceError

HERE = Path(__file__).parent
PROGRAM = "pointer_graph"
COMPILERS = ("c++", "g++", "clang++")
INSTALL = (
    "install them (Debian, Ubuntu: apt-get install cmake g++; Fedora: dnf install cmake gcc-c++; "
    "macOS: xcode-select --install, brew install cmake)"
)


def digest() -> str:
    """A digest of the sources: rows that another program measured are not ours."""
    files = sorted(path for path in HERE.iterdir() if path.suffix in (".cpp", ".hpp", ".txt"))
    text = b"\0".join(path.name.encode() + path.read_bytes() for path in files)
    return sha256(text).hexdigest()[:12]


def built() -> Path:
    """The program, built by CMake once in this process, in a folder that ends with it."""
    missing = [] if shutil.which("cmake") else ["cmake"]
    if not any(map(shutil.which, COMPILERS)):
        missing.append("a C++ compiler")
    if missing:
        raise GradtraceError(
            "shadow-cost-cpp builds a program in C++ and needs cmake and a C++ compiler; "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not found: {INSTALL}"
        )
    return Path(_folder(digest()).name) / PROGRAM


@cache
def _folder(sources: str) -> TemporaryDirectory[str]:
    folder: TemporaryDirectory[str] = TemporaryDirectory(prefix=f"gradtrace-{PROGRAM}-")
    _run("cmake", "-S", HERE, "-B", folder.name, "-DCMAKE_BUILD_TYPE=Release")
    _run("cmake", "--build", folder.name, "--target", PROGRAM)
    return folder


def _run(*words: object) -> str:
    """What a command prints; its last lines are the error if it fails."""
    command = [str(word) for word in words]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()[-60:])
        raise GradtraceError(f"{Path(command[0]).name} ended with {done.returncode}: {said}")
    return done.stdout


def train(
    release: str,
    images: Tensor,
    labels: Tensor,
    parameters: list[Tensor],
    *,
    epochs: int,
    batch: int,
    rate: float,
    dropout: float,
    seed: int,
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Train in a new process: its measurements by name, and the parameters at the end.

    Parameters are weights (inputs, outputs) and biases (1, outputs) of three layers.
    """
    program = built()
    hidden, classes = parameters[0].shape[1], parameters[-1].shape[1]
    sizes = np.array([*images.shape, hidden, classes], np.int32)
    with TemporaryDirectory() as folder:
        data, end = Path(folder, "data"), Path(folder, "weights")
        with data.open("wb") as file:
            file.write(sizes.tobytes())
            file.write(images.numpy().astype(np.float32).tobytes())
            file.write(labels.numpy().astype(np.int32).tobytes())
            for one in parameters:
                file.write(one.numpy().astype(np.float32).tobytes())
        options = (epochs, batch, rate, dropout, seed)
        said = _run(program, release, data, *options, end)
        flat = np.fromfile(end, np.float32)
    cuts = np.cumsum([one.numel() for one in parameters])[:-1]
    parts = np.split(flat, cuts)
    return json.loads(said), [a.reshape(b.shape) for a, b in zip(parts, parameters)]
