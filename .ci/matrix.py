"""The tests on many versions of torch and Python: ``make matrix``. Writes docs/versions.md.

Not every torch with every Python: each torch once, each Python once, and the two ends. A cell is a
fresh environment with the wheel of this checkout in it, so no cell needs a compiler for gradtrace.
A cell whose torch or Python is not to be had is a row that says so, and the command fails.

    make matrix                          # a part of the tests that touches everything
    make matrix SAMPLE=1                 # all of that part, in place of one test in six
    make matrix FULL=1                   # all tests
    make matrix CELLS="2.8.0:3.12"       # one cell; the other rows stay as they are
    make matrix CUDA=1                   # with NVIDIA's packages, where torch wants them
    make matrix WORKERS=1                # one process for tests, in place of one for each core
    make matrix KEEP=1                   # environments stay, and are used again with a new wheel
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
FOLDER = ROOT / "build" / "matrix"

CELLS = (
    *("2.6.0:3.10", "2.7.1:3.11", "2.8.0:3.12", "2.9.1:3.12", "2.10.0:3.13", "2.11.0:3.12"),
    *("2.12.1:3.13", "2.13.0:3.11", "2.14.1:3.11", "2.15.0:3.14", "2.6.0:3.10:lowest"),
)
"""torch:Python, and ``lowest``: with the lowest version of every dependency that is allowed."""

CORE = (
    "tests/test_operators.py::test_gradient_equals_autograd_in_float64",  # a tenth of op_db
    "tests/test_operators.py::test_sparse_layouts_are_refused_clearly",
    "tests/test_architectures.py",
    "tests/test_from_scratch.py",
    "tests/test_hooks.py",
    "tests/test_internals.py",
    "tests/test_recorder.py",
    "tests/test_by_hand.py",
    "tests/test_watch.py",
    "tests/test_monitor.py",
    "tests/test_saving.py",
    "tests/test_container.py",
    "tests/test_compiled_library.py",
    "tests/test_contraction_kernels.py",
    "tests/test_low_rank_kernels.py",
    "tests/test_kernels.py",
    "tests/test_selection_kernels.py",
    "tests/test_precision.py",
    "tests/test_undisturbed.py",
    "tests/test_freed.py",
    "tests/test_wrapped.py",
    "tests/test_run_files.py",
    "tests/test_plain_tensors.py",
    "tests/test_module_calls.py",
    "tests/test_several_outputs.py",
    "tests/test_sparse.py",
    "tests/test_identity.py",
)
ALWAYS = (
    "tests/test_precision.py",
    "tests/test_monitor.py::test_compiled_models[inner]",
    "tests/test_monitor.py::test_training_has_the_same_bits[Checkpointed]",
)
"""What versions of torch have been found to differ in: these all run in every cell."""
TESTING = [
    "transformers",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "scipy",
    "expecttest",
    "pandas",
    "setuptools",
]
HEAVY = re.compile(r"(nvidia|cuda|triton)")
"""What a CUDA build of torch asks for beside it, and the CPU does not need."""


class Unavailable(Exception):
    """A cell that cannot be made here."""


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """A command, its output kept; an error shows the end of it."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        wrong = [line for line in lines if line.startswith("ERROR")] or lines
        raise Unavailable(wrong[-1][:200] if wrong else f"status {done.returncode}")
    return done  # type: ignore[no-any-return]


def interpreter(version: str) -> str:
    """The Python of this version: named by PYTHON_3_14 and the like, on the PATH, or of pyenv."""
    named = os.environ.get(f"PYTHON_{version.replace('.', '_')}")
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    found = named or shutil.which(f"python{version}") or (str(pyenv[-1]) if pyenv else None)
    for candidate in filter(None, (found, str(pyenv[-1]) if pyenv else None)):
        show = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", show], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return candidate
    raise Unavailable(f"no Python {version} here (set PYTHON_{version.replace('.', '_')})")


def requirements(python: Path, package: str) -> list[str]:
    """What a package in an environment asks for there, without extras."""
    show = (
        "import importlib.metadata as m, json, sys\n"
        "print(json.dumps(m.requires(sys.argv[1]) or []))"
    )
    lines = json.loads(run(python, "-c", show, package).stdout)
    return [line for line in lines if "extra ==" not in line]


def lowest(requirement: str) -> str:
    """The lowest version that a requirement allows."""
    return requirement.replace(">=", "==")


def install(python: Path, *what: object) -> None:
    """Into another environment, by uv where there is one, which is quicker, or by pip."""
    if shutil.which("uv"):
        run("uv", "pip", "install", "--quiet", "--python", python, *what)
    else:
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
        words = ("--force-reinstall" if word == "--reinstall" else word for word in what)
        run(*pip, "--disable-pip-version-check", "--no-warn-conflicts", *words)


def environment(torch: str, version: str, wheel: Path, at_lowest: bool) -> Path:
    """A fresh environment with torch, the wheel and what tests need; its Python."""
    name = f"env-{torch}-{version}" + "-lowest" * at_lowest if keep() else "env"
    where, whole = FOLDER / name, FOLDER / name / "whole"
    python = where / "bin" / "python"
    if keep() and whole.exists():
        install(python, "--no-deps", "--reinstall", wheel)
        return python
    shutil.rmtree(where, ignore_errors=True)
    run(interpreter(version), "-m", "venv", "--without-pip", where)
    if os.environ.get("CUDA") == "1":
        install(python, f"torch=={torch}")
    else:
        install(python, "--no-deps", f"torch=={torch}")
        install(python, *(r for r in requirements(python, "torch") if not HEAVY.match(r)))
        lib = next(where.glob("lib/python*/site-packages/torch/lib"))
        run(sys.executable, ROOT / ".ci" / "standins.py", lib)
    install(python, "--no-deps", wheel)
    ours = [r for r in requirements(python, "gradtrace") if not r.startswith("torch")]
    install(python, *(lowest(r) if at_lowest else r for r in ours), *TESTING)
    if os.environ.get("FULL") == "1":
        extra = "accelerate lightning tensorboard transformers matplotlib"
        install(python, "--no-deps", *extra.split())
        install(
            python,
            *(
                r
                for p in extra.split()
                for r in requirements(python, p)
                if not r.startswith("torch")
            ),
        )
    run(python, "-c", "import torch")
    whole.touch()
    return python


def keep() -> bool:
    """Whether environments are used again."""
    return os.environ.get("KEEP") == "1"


def share() -> int:
    """One in so many tests is run, other ones in every cell; of all tests, every one."""
    return int(os.environ.get("SAMPLE") or (1 if os.environ.get("FULL") == "1" else 6))


def tests(python: Path, workers: str, name: str, at_lowest: bool) -> dict[str, int]:
    """Run them beside the installed package, not in the checkout; how many passed, failed, ...

    And the seconds that they took of a processor.
    """
    where, report = FOLDER / "tests", FOLDER / "report.xml"
    shutil.rmtree(where, ignore_errors=True)
    report.unlink(missing_ok=True)
    where.mkdir()
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for file in listed.stdout.splitlines():
        if not file.startswith("gradtrace/") and (ROOT / file).exists():
            (where / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, where / file)
    full = os.environ.get("FULL") == "1"
    chosen = ["tests"] if full else [c for c in CORE if (ROOT / c.split("::")[0]).exists()]
    command = [
        python.parent / "pytest",
        "-q",
        "--continue-on-collection-errors",
        *("-p", "sample"),
        "-n",
        workers,
        f"--junitxml={report}",
        *(("-W", "ignore::DeprecationWarning") if at_lowest else ()),
        *chosen,
    ]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / ".ci")}
    settings["GRADTRACE_SAMPLE"] = f"{share()}:{name}"
    settings["GRADTRACE_ALWAYS"] = " ".join(ALWAYS)
    settings.pop("GRADTRACE_NATIVE", None)
    before = processor()
    with (FOLDER / "log.txt").open("w") as log:
        subprocess.run([str(c) for c in command], cwd=where, env=settings, stdout=log, stderr=log)
    if not report.exists():
        raise Unavailable("the tests did not start: " + (FOLDER / "log.txt").read_text()[-200:])
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "seconds": round(processor() - before),
    }


def processor() -> float:
    """Seconds of a processor that the commands run so far have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cell(name: str, wheel: Path, workers: str) -> list[str]:
    """One row of the table."""
    torch, version, *rest = name.split(":")
    started = time.monotonic()
    row = [torch, version, "lowest" if rest else "newest"]
    what = "all" if os.environ.get("FULL") == "1" else "core"
    what += f", 1 in {share()}" if share() > 1 else ""
    try:
        python = environment(torch, version, wheel, bool(rest))
        show = "import platform, numpy; print(platform.python_version(), numpy.__version__)"
        row[1], number = run(python, "-c", show).stdout.split()
        row[2] += f" (numpy {number})"
        counts = tests(python, workers, name, bool(rest))
    except Unavailable as error:
        text = re.sub(r"(\w+://)?/\S+", "...", str(error)).replace("|", "/")
        print(f"NOT RUN: torch {torch} with Python {version}: {error}", file=sys.stderr)
        return [*row, what, "**not run**", "", "", "", today(), text]
    took = f"{(time.monotonic() - started) / 60:.0f} min"
    print(f"torch {torch}, Python {version}: {counts} in {took}", flush=True)
    log = FOLDER / "log.txt"
    if counts["failed"]:
        print(
            *[line for line in log.read_text().splitlines() if line.startswith(("FAILED", "ERR"))],
            sep="\n",
            file=sys.stderr,
        )
    shutil.copy(log, FOLDER / f"log-{name.replace(':', '-')}.txt")
    numbers = [str(counts[key]) for key in ("passed", "failed", "skipped", "seconds")]
    return [*row, what, *numbers, today(), ""]


def today() -> str:
    """The date, as it stands in the table."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


HEAD = [
    "torch",
    "Python",
    "other packages",
    "tests",
    "passed",
    "failed",
    "skipped",
    "CPU seconds",
    "on",
    "why not",
]
TEXT = """# Versions

`make matrix` runs the tests on each of these, in a fresh environment with the wheel of the
checkout, and writes this page. *Core* is SUM against autograd for a tenth of PyTorch's operator
database, the architectures, hooks, `watch`, the monitor, files, freed memory and the kernels
against their reference. Of these each cell runs the share that its row tells, other tests in each,
and all of those in which versions were found to differ. `make matrix SAMPLE=1` runs the whole core,
`make matrix FULL=1` the whole suite. *Lowest* has the lowest version of every dependency that is
allowed, whose warnings of deprecation among themselves are no errors there. Tests that need a GPU,
a browser or a package that is not installed are skipped. A torch built for CUDA is run on the CPU,
with stand-ins for NVIDIA's libraries.

"""
NOTES = """
The last torch for Python 3.10 is 2.14. Other versions of torch may work: what gradtrace reads of
autograd is checked when it is imported, so that a torch in which it has changed is an error and not
a wrong number.
"""


def read() -> dict[tuple[str, str, str], list[str]]:
    """The rows of the page as it is."""
    found = {}
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        row = [word.strip() for word in line.strip("|").split("|")]
        if len(row) == len(HEAD) and row[0][:1].isdigit():
            found[key(row)] = row
    return found


def key(row: list[str]) -> tuple[str, str, str]:
    """What a row is of."""
    return row[0], ".".join(row[1].split(".")[:2]), row[2].split()[0]


def write(rows: dict[tuple[str, str, str], list[str]]) -> None:
    """The page, rows by version."""
    ordered = sorted(rows.values(), key=lambda r: [*map(int, re.findall(r"\d+", r[0])), r[2]])
    lines = [HEAD, ["---"] * len(HEAD), *ordered]
    table = "\n".join("| " + " | ".join(row) + " |" for row in lines)
    where = f"\nRun on {platform.system()} {platform.machine()}.\n"
    PAGE.write_text(TEXT + table.replace("  |", " |") + "\n" + where + NOTES)


def main() -> int:
    """Run the cells; 1 if any failed or could not be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--workers", default=os.environ.get("WORKERS") or "auto")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    chosen = os.environ.get("CELLS", "").split() or CELLS
    rows, bad = read(), 0
    for name in chosen:
        row = cell(name, options.wheel.resolve(), options.workers)
        rows[key(row)] = row
        bad += row[5] != "0"
        write(rows)
    shutil.rmtree(FOLDER / "env", ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
