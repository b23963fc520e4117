"""Stand-ins for NVIDIA's libraries, so that a CUDA build of torch imports without 3 GB of them.

On x86-64 Linux the index has torch as a CUDA build only, and ``import torch`` fails unless every
library it is linked with is there. The matrix compares versions on the CPU: there it is enough
that the names exist. Each stand-in defines the symbols that torch asks for; each of them answers
100, which is CUDA's "no device", so ``torch.cuda.is_available()`` is False.

    python .ci/standins.py SITE_PACKAGES/torch/lib
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

SYSTEM = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|util|gcc_s|stdc\+\+|gomp.*|z)\.so\.\d+)$")
"""Libraries that every Linux has."""

NVIDIA = re.compile(r"(__cuda|cu|nccl|nv)[A-Za-z]")
"""How names of NVIDIA's begin, where no version says whose a symbol is."""

TEXT = {"cudaGetErrorString", "cudaGetErrorName", "cudnnGetErrorString", "ncclGetErrorString"}
"""Functions that answer with a text."""


def _tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _symbols(file: Path, kind: str) -> set[tuple[str, str]]:
    """Names with their versions; the empty version for those without one."""
    lines = _tool("nm", "-D", f"--{kind}-only", str(file)).splitlines()
    found = [line.split() for line in lines]
    strong = [words[-1] for words in found if words[-2] not in "wv"]
    return {(name, version) for name, _, version in (word.partition("@") for word in strong)}


def _versions(file: Path, absent: set[str]) -> dict[str, str]:
    """Which of the absent libraries a version of a symbol belongs to."""
    found, library = {}, ""
    for line in _tool("objdump", "-p", str(file)).splitlines():
        if line.strip().startswith("required from "):
            library = line.strip().removeprefix("required from ").rstrip(":")
        elif library in absent and line.strip().startswith("0x"):
            found[line.split()[-1]] = library
    return found


Wanted = dict[str, dict[str, set[str]]]
"""The libraries that are absent; of each, its versions; of each, the symbols."""


def missing(folder: Path) -> Wanted:
    """What torch's own libraries need and nobody here has."""
    files = sorted(folder.glob("*.so*"))
    needed = {
        name
        for file in files
        for name in re.findall(r"\(NEEDED\).*\[(.+)\]", _tool("readelf", "-d", str(file)))
    }
    absent = {n for n in needed if not SYSTEM.match(n) and not (folder / n).exists()}
    wanted: Wanted = {name: {name: set()} for name in absent}
    defined = {name for file in files for name, _ in _symbols(file, "defined")}
    for file in files:
        versions = _versions(file, absent)
        for name, version in _symbols(file, "undefined"):
            version = version.lstrip("@")
            if version in versions:
                wanted[versions[version]].setdefault(version, set()).add(name)
            elif not version and name not in defined and NVIDIA.match(name):
                for library in absent:  # nothing says whose it is
                    wanted[library][library].add(name)
    return wanted


def build(folder: Path) -> list[str]:
    """Write the stand-ins beside torch's libraries, where these look first."""
    made = []
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "standin.c"), Path(scratch, "standin.map")
        for library, versions in sorted(missing(folder).items()):
            symbols = sorted(set().union(*versions.values()))
            text = [
                f'const char *{n}(void) {{ return "a stand-in"; }}' for n in symbols if n in TEXT
            ]
            other = [f"long {n}(void) {{ return 100; }}" for n in symbols if n not in TEXT]
            source.write_text("\n".join(text + other) + "\n")
            script.write_text("\n".join(_node(*item) for item in versions.items()) + "\n")
            _tool(
                *("cc", "-w", "-fno-builtin", "-shared", "-fPIC", str(source)),
                *(f"-Wl,-soname,{library}", f"-Wl,--version-script={script}"),
                *("-o", str(folder / library)),
            )
            made.append(library)
    return made


def _node(version: str, symbols: set[str]) -> str:
    names = "".join(f" {name};" for name in sorted(symbols))
    return f"{version} {{ global:{names} }};" if names else f"{version} {{ }};"


if __name__ == "__main__":
    print(*build(Path(sys.argv[1])))
