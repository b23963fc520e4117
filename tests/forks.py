"""Tests in several processes, copies of one that has collected them: ``pytest -n 0 --forks 3``.

Each worker of pytest-xdist imports everything and collects all tests for itself, which takes most
of a minute. Here that is done once. As with ``--dist loadgroup``, tests of a group run in one
process, and a process that is done takes the next group. Not with CUDA: it does not outlive a fork.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from itertools import chain, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

WIDTH = 4
"""Bytes of a number in the queue."""

DONE = "done"
"""What a process says last."""


class Queue:
    """Numbers from 0 on, each given to one process: copies share the place in an open file."""

    def __init__(self, count: int) -> None:
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as the tests
        self.file.write(b"".join(n.to_bytes(WIDTH, "little") for n in range(count)))
        self.file.seek(0)

    def __iter__(self) -> Iterator[int]:
        while found := os.read(self.file.fileno(), WIDTH):
            yield int.from_bytes(found, "little")

    def end(self) -> None:
        """Nobody gets another one."""
        self.file.truncate(0)


class Sender:
    """Tells the process that was copied what became of tests."""

    def __init__(self, config: pytest.Config, to: Connection) -> None:
        self.config, self.to = config, to

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.to.send((nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return  # nobody counts these
        hook = self.config.hook
        self.to.send(hook.pytest_report_to_serializable(config=self.config, report=report))


def groups_of(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Tests that one process has to run, in the order of the first of each group."""
    found: dict[object, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        found.setdefault(mark.args[0] if mark else item.nodeid, []).append(item)
    return list(found.values())


def run(session: pytest.Session, count: int) -> None:
    """All tests of a session, in so many processes.

    Args:
        session: The collected tests; it hears of every report.
        count: How many processes.
    """
    groups = groups_of(session.items)
    queue = Queue(len(groups))
    running: dict[Connection, tuple[int, Any]] = {}
    for _ in range(count):
        here, there = Pipe(duplex=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where something imported has started a thread
            process = os.fork()
        if not process:
            _become(session, groups, queue, there)
        there.close()
        running[here] = process, ("before any test", ("", None, ""))
    with queue.file:
        while running:
            for each in wait(list(running)):
                assert isinstance(each, Connection)
                _hear(session, running, each)
            if session.shouldfail or session.shouldstop:
                queue.end()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _hear(
    session: pytest.Session, running: dict[Connection, tuple[int, Any]], each: Connection
) -> None:
    """One message of a process: a test begins, a report, that it is done; or it is no more."""
    process, test = running[each]
    try:
        message = each.recv()
    except EOFError:
        del running[each]
        each.close()
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if test != DONE:  # whatever its status: a test may end a process
            _report_end(session, test, code)
        return
    if not isinstance(message, dict):
        running[each] = process, message
        return
    hook = session.config.hook
    report = hook.pytest_report_from_serializable(config=session.config, data=message)
    hook.pytest_runtest_logreport(report=report)


def _report_end(session: pytest.Session, test: Any, code: int) -> None:
    nodeid, location = test
    told = f"the process of this test, or its next one, has ended with status {code}"
    report = pytest.TestReport(nodeid, location, {}, "failed", told, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


# A process that runs tests ------------------------------------------------------------------------


def _become(
    session: pytest.Session, groups: list[list[pytest.Item]], queue: Queue, to: Connection
) -> None:
    """Run tests until there are no more, and end."""
    code = 1
    try:
        atexit._clear()  # what is to be done when the first process ends is not ours
        plugins = session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the first process
        capture.start_global_capturing()
        capture.suspend_global_capture()
        plugins.register(Sender(session.config, to))
        _run_tests(chain.from_iterable(groups[n] for n in queue), session)
        atexit._run_exitfuncs()
        to.send(DONE)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        to.close()
        os._exit(code)


def _run_tests(items: Iterator[pytest.Item], session: pytest.Session) -> None:
    """A test is told which comes next: fixtures that this one wants, too, are kept."""
    for item, following in pairwise(chain(items, [None])):
        assert item is not None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            return
