"""Run sections one by one and save what they find."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradtrace.bench import figures
from gradtrace.bench.page import markdown
from gradtrace.bench.results import Section, Setting, say
from gradtrace.bench.table import SECTIONS as NAMES
from gradtrace.bench.table import section
from gradtrace.errors import GradtraceError
from gradtrace.laboratory import machine

SECTIONS: dict[str, Callable[[Setting], Section]] = {name: section(name) for name in NAMES}


@dataclass(frozen=True)
class Places:
    """Where results go: a page (and beside it the same as JSON), a folder of pictures."""

    page: Path | None = None
    pictures: Path | None = None


@dataclass
class Run:
    """One run: what was found so far, and where it goes."""

    setting: Setting
    places: Places
    sections: dict[str, Section] = field(default_factory=dict)
    earlier: dict[str, Any] = field(default_factory=dict)  # of the page that is there
    failed: bool = False
    load: float = field(default_factory=machine.load)
    begun: float = field(default_factory=time.perf_counter)

    def data(self) -> dict[str, Any]:
        """All numbers, with the machine, versions and load."""
        found = self.earlier | {name: asdict(one) for name, one in self.sections.items()}
        return {
            "machine": machine.machine(),
            "versions": machine.versions(),
            "load": {"start": self.load, "end": machine.load()},
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(time.perf_counter() - self.begun, 1),
            "quick": self.setting.quick,
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
        except (GradtraceError, RuntimeError, MemoryError) as error:
            self.failed = True
            self.setting.leave_out(f"{name}: {type(error).__name__}: {error}")

    def save(self) -> None:
        """Write what there is so far."""
        if self.places.page is not None:
            path = self.places.page
            path.parent.mkdir(parents=True, exist_ok=True)
            data = self.data()
            path.with_suffix(".json").write_text(
                json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8"
            )
            path.write_text(markdown(data, self._folder()), encoding="utf-8")

    def draw(self) -> None:
        """Draw the curves."""
        if self.places.pictures is not None:
            figures.draw(list(self.sections.values()), self.places.pictures)

    def _folder(self) -> str | None:
        """The folder of pictures, as seen from the page."""
        if self.places.pictures is None or self.places.page is None:
            return None
        return Path(os.path.relpath(self.places.pictures, self.places.page.parent)).as_posix()


def _earlier(page: Path | None) -> dict[str, Any]:
    """The sections of the page that is there, to keep those that are not run again."""
    if page is None or not page.with_suffix(".json").exists():
        return {}
    data = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    here = machine.machine()
    if data["machine"] != here:
        raise GradtraceError(
            f"{page} is of another machine ({data['machine']['processor']}); run all sections, or "
            "give another --out"
        )
    sections: dict[str, Any] = data["sections"]
    return sections


def run(names: Iterable[str], setting: Setting, places: Places) -> Run:
    """Run sections by name."""
    if places.pictures is not None and not setting.has("matplotlib", "the figures"):
        places = Places(places.page)
    names = list(names)
    found = Run(setting, places)
    if set(names) < set(SECTIONS):
        found.earlier = _earlier(places.page)
    with torch.random.fork_rng():
        for name in names:
            found.do(name)
            found.save()
    found.draw()
    return found
