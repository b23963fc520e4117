"""Settings that all tests share: one thread a worker, reproducible examples, who runs what."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import warnings
import zlib
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else threads that wait take all cores

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
logging.getLogger().addHandler(logging.NullHandler())  # else warnings are printed
torch.set_num_threads(1)
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():  # else each torch.manual_seed puts the whole stack into text
        device.manual_seed_all = lambda seed: None

import forks  # noqa: E402 - found by the line above
from architectures import ARCHITECTURES  # noqa: E402
from thorough import THOROUGH, few  # noqa: E402

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=few(30, 100),
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("ci")

SLOW = (
    "test_emulated",
    "browser",
    "test_docs",
    "test_notebooks",
    "test_process_group",
    "test_bruteforce",
    "test_large_graphs",
    "test_compiled_library",
    "test_monitor_ranks",
)
"""Files and folders with tests of seconds, which begin first so that no core idles at the end."""

CHUNK = 25
"""Tests of other files that a worker takes at a time."""

MANY = 5_000
"""Tests from which on it pays to import beforehand what some of them need."""

MECHANISMS = {
    *("test_captured_pass", "test_compact_storage", "test_executor_shortcuts", "test_fuse_moves"),
    *("test_kept_plans", "test_lazy_gradients", "test_mass_device", "test_passes"),
    *("test_path_machine", "test_plan_run", "test_provenance", "test_recompute", "test_replay"),
    *("test_select", "test_tape", "test_uniform_leaves"),
}
"""Files that pin how the engine that will be rewritten does things. What it answers is held by
others, so of all tests one in four of theirs runs, the same ones each time; `THOROUGH` runs all.
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests first, and those of the thorough run only there; tests that share a fixture of
    their module in one worker (`--dist loadgroup`), so that it is computed once and not once a
    worker.
    """
    if not THOROUGH:
        sampled = len(items) > MANY
        left = {item for item in items if _is_left_out(item, sampled)}
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))
    rank = {path: _rank(path) for path in {item.path for item in items}}
    items.sort(key=lambda item: rank[item.path])
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for n, item in enumerate(items):
        place = item.path.name
        if not _shares(item):
            place += f" {n if rank[item.path] < len(SLOW) else n // CHUNK}"
        item.add_marker(pytest.mark.xdist_group(place))


def _is_left_out(item: pytest.Item, sampled: bool) -> bool:
    if sampled and item.path.stem in MECHANISMS:
        return zlib.crc32(item.nodeid.encode()) % 4 > 0
    return item.get_closest_marker("thorough") is not None


def _rank(path: Path) -> int:
    """The place of a file or of its folder among the slow ones; the others come after them."""
    found = {path.stem, *(folder.name for folder in path.parents)}
    return min((n for n, name in enumerate(SLOW) if name in found), default=len(SLOW))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there now stays: to look through a million objects takes half a second each time
    that a test, or something that measures memory, collects garbage.
    """
    gc.collect()
    gc.freeze()


def _shares(item: pytest.Item) -> bool:
    """Whether a test uses a fixture that its own folder computes once for a whole module."""
    info = getattr(item, "_fixtureinfo", None)
    return info is not None and any(
        each.scope in ("module", "session") and not each.params and each.baseid.startswith("tests/")
        for found in info.name2fixturedefs.values()
        for each in found
    )


ONEDNN = torch._C._get_mkldnn_enabled()  # type: ignore[attr-defined]
set_onednn = torch._C._set_mkldnn_enabled  # type: ignore[attr-defined] # some tests take it away


def pytest_runtest_teardown() -> None:
    """PyTorch turns oneDNN off for good at the first product of bfloat16 matrices on a processor
    of Arm without bfloat16; other tests compare what is computed with it.
    """
    set_onednn(ONEDNN)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many processes run tests (`forks`)."""
    parser.addoption("--forks", type=int, default=0, help="processes, copied after collection")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In copies of this process, where that is asked for."""
    count = session.config.getoption("forks")
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    if torch.cuda.is_available():
        raise pytest.UsageError("--forks: CUDA does not outlive a fork; use -n")
    if len(session.items) > MANY:
        _preload()
    forks.run(session, count)
    return True


def _preload() -> None:
    """What many tests import when they first use it, which takes half a minute: copies share it."""
    for name in ("torch._dynamo", "torch.distributed.fsdp", "matplotlib.figure", "pandas"):
        with suppress(ImportError):
            importlib.import_module(name)
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")  # transformers' own
        for build in ARCHITECTURES.values():
            build()
    gc.collect()
    gc.freeze()
