"""A real browser, offline, that notes everything that should not happen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome")
DESK, PHONE = (1280, 900), (390, 844)
PATIENCE = 120_000
"""Milliseconds that a page may take on a machine that has much else to do."""


def chromium() -> str | None:
    """Where the browser is: what GRADTRACE_CHROMIUM names, or the system's."""
    named = os.environ.get("GRADTRACE_CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api")
    where = chromium()
    if where is None:
        pytest.skip("there is no Chromium here: `make chromium` installs it where it may")
    with playwright.sync_playwright() as run:
        # Chromium has no sandbox for root, and small shared memory in containers.
        found = run.chromium.launch(
            executable_path=where, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield found
        found.close()


@dataclass
class Visit:
    """A page that is open, and what went wrong so far."""

    page: Page
    file: Path
    wrong: list[str] = field(default_factory=list)

    def go(self, place: str = "") -> Page:
        """Open the file at a place (what follows the #), and wait until it is drawn."""
        self.page.goto(self.file.as_uri() + (f"#{place}" if place else ""))
        self.ready()
        return self.page

    def ready(self) -> None:
        self.page.wait_for_selector("#panel, .failure")
        self.page.locator("[aria-busy=true]").wait_for(state="detached")

    def until(self, true: Callable[[], object]) -> None:
        """Wait until something holds. The page's policy forbids to wait in its own scripts."""
        for _ in range(PATIENCE // 50):
            if true():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("it never came")

    def tab(self, name: str) -> Page:
        self.page.locator(f"#tab-{name}").click()
        self.ready()
        return self.page

    def shot(self, name: str) -> None:
        """Keep a picture for people to look at."""
        folder = ROOT / "out" / "screenshots"
        folder.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=folder / f"{name}.png")

    def width(self) -> int:
        found: int = self.page.evaluate("document.documentElement.scrollWidth")
        return found


class Opener:
    """Opens files, each in a window of its own."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.contexts: list[BrowserContext] = []
        self.visits: list[Visit] = []

    def __call__(
        self, file: Path, size: tuple[int, int] = DESK, dark: bool = False, **options: Any
    ) -> Visit:
        context = self.browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            offline=True,
            accept_downloads=True,
            has_touch=size == PHONE,
            **options,
        )
        context.set_default_timeout(PATIENCE)
        self.contexts.append(context)
        visit = Visit(context.new_page(), file)
        self.visits.append(visit)
        page, wrong = visit.page, visit.wrong
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (wrong.append("a dialog"), dialog.dismiss()))
        page.on(
            "console",
            lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None,
        )
        page.on(
            "request",
            lambda asked: (
                None
                if asked.url.partition("#")[0] == file.as_uri()
                or asked.url.startswith(("blob:", "data:", "about:"))
                else wrong.append(f"a request: {asked.url}")
            ),
        )
        return visit

    def close(self) -> None:
        for context in self.contexts:
            context.close()


@pytest.fixture
def look(browser: Browser) -> Iterator[Opener]:
    """Open files; in the end nothing must have gone wrong in any of them."""
    opener = Opener(browser)
    yield opener
    opener.close()
    assert [w for visit in opener.visits for w in visit.wrong] == []
