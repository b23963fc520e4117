"""Run sections one by one and save what they find."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradtrace.benchmarks import figures
from gradtrace.benchmarks.page import markdown
from gradtrace.benchmarks.results import Absent, Section, Setting, say
from gradtrace.benchmarks.table import ELSEWHERE, section
from gradtrace.benchmarks.table import SECTIONS as NAMES
from gradtrace.errors import GradtraceError, did_you_mean
from gradtrace.experiments.harness import machine
from gradtrace.io import container
from gradtrace.io.atomic_files import BadFile, content, make_folder

SECTIONS: dict[str, Callable[[Setting], Section]] = {name: section(name) for name in NAMES}


@dataclass(frozen=True)
class Places:
    """Where results go: a page (and beside it the same as JSON), a folder of pictures."""

    page: Path | None = None
    pictures: Path | None = None


@dataclass
class BenchmarkRun:
    """One run: what was found so far, and where it goes."""

    setting: Setting
    places: Places
    sections: dict[str, Section] = field(default_factory=dict)
    earlier: dict[str, Any] = field(default_factory=dict)  # of the page that is there
    head: dict[str, Any] = field(default_factory=dict)  # its machine, where that stays
    failed: bool = False
    load: float = field(default_factory=machine.load)
    begun: float = field(default_factory=time.perf_counter)

    def data(self) -> dict[str, Any]:
        """All numbers, with the machine, versions and load."""
        found = self.earlier | {name: asdict(one) for name, one in self.sections.items()}
        own = {
            "machine": machine.machine(),
            "versions": machine.versions(),
            "load": {"start": self.load, "end": machine.load()},
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(time.perf_counter() - self.begun, 1),
            "quick": self.setting.quick,
        }
        return {
            **own,
            **self.head,
            "sections": {name: found[name] for name in SECTIONS if name in found},
            "left_out": self.setting.left_out,
        }

    def do(self, name: str) -> None:
        """Run a section; one that fails is left out, and the others go on."""
        torch.manual_seed(0)
        say(name)
        begun, load = time.perf_counter(), machine.load()
        try:
            found = self.sections[name] = SECTIONS[name](self.setting)
            found.seconds = round(time.perf_counter() - begun, 1)
            found.taken = f"{time.strftime('%Y-%m-%d %H:%M')}, load {load:.2f} before"
        except Absent as reason:
            if name in self.earlier:
                say(f"  {reason}; the figures that the page has are kept")
            else:
                self.setting.leave_out(f"{name}: {reason}")
        except Exception as error:  # whatever one dies of, hours of others are not lost
            self.failed = True
            if not isinstance(error, (GradtraceError, RuntimeError, MemoryError)):
                traceback.print_exc()
            self.setting.leave_out(f"{name}: {type(error).__name__}: {error}")

    def save(self) -> None:
        """Write what there is so far."""
        if self.places.page is not None:
            path = self.places.page
            data = self.data()
            try:
                make_folder(path.parent)
                numbers = json.dumps(data, indent=1, allow_nan=False) + "\n"
                container.put(path.with_suffix(".json"), numbers)
                container.put(path, markdown(data, self._folder()))
            except BadFile as error:  # a full disk: what comes next is printed all the same
                self.failed = True
                say(f"{error}; what is found is printed at the end")

    def try_places(self) -> None:
        """Raise an error before anything is measured if the page cannot be written."""
        page = self.places.page
        try:
            if page is not None:
                make_folder(page.parent)
                page.open("a", encoding="utf-8").close()
        except (OSError, BadFile) as error:
            why = getattr(error, "strerror", None) or error
            raise GradtraceError(
                f"--out {page} cannot be written ({why}); it is the file of a Markdown "
                "page, such as --out benchmarks.md"
            ) from error

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        """The numbers of the page that is there."""
        try:
            data = json.loads(content(path))
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict) or not {*HEAD, "sections"} <= data.keys():
            raise GradtraceError(
                f"{path} is not what gradtrace bench wrote beside a page, whose other sections are "
                "to be kept: restore it, or give another --out"
            )
        return data

    def draw(self) -> None:
        """Draw the curves, also those of sections that were kept."""
        if self.places.pictures is not None:
            figures.draw(self.data()["sections"].values(), self.places.pictures)

    def _folder(self) -> str | None:
        """The folder of pictures, as seen from the page."""
        if self.places.pictures is None or self.places.page is None:
            return None
        return Path(os.path.relpath(self.places.pictures, self.places.page.parent)).as_posix()

    def keep(self, names: set[str]) -> None:
        """Take over from the page that is there what is not run again.

        Sections that were taken elsewhere stay; the others only beside those of the same machine.
        """
        page = self.places.page
        if page is None or not page.with_suffix(".json").exists():
            return
        data = self._read(page.with_suffix(".json"))
        if names <= ELSEWHERE:
            self.head = {name: data[name] for name in HEAD}
            self.earlier = data["sections"]
        elif names | ELSEWHERE >= set(SECTIONS):
            self.earlier = {n: one for n, one in data["sections"].items() if n in ELSEWHERE}
        elif data["machine"] == machine.machine():
            self.earlier = data["sections"]
        else:
            raise GradtraceError(
                f"{page} is of another machine ({data['machine']['processor']}); run all sections, "
                "or give another --out"
            )


HEAD = ("machine", "versions", "load", "date", "seconds", "quick")
"""What a page says of the run at its top."""


def run(names: Iterable[str], setting: Setting, places: Places) -> BenchmarkRun:
    """Run sections by name."""
    if places.pictures is not None and not setting.has("matplotlib", "the figures"):
        places = Places(places.page)
    names = list(names)
    found = BenchmarkRun(setting, places)
    found.keep(set(names))
    found.try_places()
    with torch.random.fork_rng():
        for name in names:
            found.do(name)
            found.save()
    found.draw()
    return found


def known(names: Iterable[str]) -> list[str]:
    """Names of sections, checked; all of them if there are none."""
    names = list(names)
    for name in names:
        if name not in SECTIONS:
            raise GradtraceError(
                f"there is no section {name!r}{did_you_mean(name, sorted(SECTIONS), 99)}"
            )
    return names or list(SECTIONS)
