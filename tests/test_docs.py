"""The site: every block runs and shows what is so, links lead somewhere, nothing is left out."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import blocks
import fresh
import pytest
import torch
from markdown_it import MarkdownIt
from markdown_it.token import Token

import gradtrace
from tests.browser.conftest import chromium

ROOT = blocks.ROOT
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(DOCS.rglob("*.md"))]

NOT_RUN = {
    ("README.md", "$ make demo"),
    ("README.md", "$ pip install"),
    ("docs/start.md", "$ pip install ."),
    ("docs/notebooks.md", "$ pip install jupyterlab"),
    ("docs/guides/teach.md", "$ python docs/from_scratch.py"),
    ("docs/distributed.md", "dist.init_process_group()"),
    ("docs/distributed.md", "$ torchrun --nproc-per-node=4"),
}
"""Blocks that are not run, by page and how they begin; each says why in a comment before it."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


ADVICE = re.compile(r"pip install[^`\n]*gradtrace\[|pip install (-U |--upgrade )?gradtrace(?!`)")
"""To install extras of a package that no index has; what a release will have is said so."""


def test_advice_to_install_is_true() -> None:
    sources = sorted(Path(gradtrace.__file__).parent.rglob("*.py"))
    for path in [*PAGES, ROOT / "examples/README.md", *sources]:
        assert not ADVICE.search(path.read_text()), path


IMPORTS = {
    (page, *found)
    for page in PAGES
    for found in re.findall(r"`from (gradtrace[\w.]*) import (\w+)`", page.read_text())
}


@pytest.mark.parametrize(("page", "module", "name"), sorted(IMPORTS))
def test_imports_in_the_text_work(page: Path, module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


# Code --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one to be in; what a page does to torch is undone."""
    monkeypatch.chdir(tmp_path)
    dtype, state = torch.get_default_dtype(), torch.get_rng_state()
    yield tmp_path
    torch.set_default_dtype(dtype)
    torch.set_rng_state(state)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_blocks_run_and_print_what_is_shown(path: Path, folder: Path) -> None:
    blocks.check(path, folder)


def test_what_is_not_run_is_listed() -> None:
    found = [
        (block.page, block.first)
        for page in PAGES
        for block in blocks.blocks(page)
        if block.mark == "not run"
    ]
    assert len(found) == len(NOT_RUN)
    for page, first in found:
        assert any(page == p and first.startswith(start) for p, start in NOT_RUN), (page, first)


BAD = {
    "a failing block": ("```python\n1 / 0\n```", "ZeroDivisionError"),
    "a failing doctest": ("```python\n>>> 1 + 1\n3\n```", "a doctest fails"),
    "output that is not so": ("```python\nprint(1)\n```\n\n```output\n2\n```", "it prints"),
    "output that is not printed": ("```python\nx = 1\n```\n\n```output\n2\n```", "it prints"),
    "output that is not shown": ("```python\nprint(1)\n```", "no output block follows"),
    "output of nothing": ("```output\n1\n```", "right after"),
    "no language": ("```\nprint(1)\n```", "no language"),
    "another language": ("```bash\nls\n```", "a block of bash"),
    "an indented block": ("Look:\n\n    print(1)\n", "an indented block"),
    "code as text": ("```text\n$ gradtrace demo\n```", "looks like code"),
    "no reason": ("<!-- not run: slow -->\n```python\n1 / 0\n```", "say why"),
    "another program": ("```console\n$ ls\n```", "'ls' is not run here"),
    "a failing command": ("```console\n$ python -c 'raise SystemExit(3)'\n```", "ended with 3"),
    "another exit": ("<!-- exit: 2 -->\n```console\n$ python -c ''\n```", "ended with 0, not 2"),
    "a command that prints other": ("```console\n$ python -c 'print(1)'\n2\n```", "and not"),
    "a warning": ("```python\nimport warnings\nwarnings.warn('x')\n```", "UserWarning"),
    "a warning of a command": (
        "```console\n$ python -c 'import warnings; warnings.warn(\"x\")'\n```",
        "ended with 1",
    ),
}


@pytest.mark.parametrize(("text", "problem"), BAD.values(), ids=BAD)
def test_pages_that_are_wrong_are_found(text: str, problem: str, folder: Path) -> None:
    page = folder / "page.md"
    page.write_text(f"# A page\n\n{text}\n")
    with pytest.raises(blocks.PageError, match=re.escape(problem)):
        blocks.check(page, folder)


GOOD = """
```python
x = 0.12345
print(x)
```

```output
0.12344
```

```python
>>> x + 1          # blocks share their names
1.12345

```

<!-- file: mine.py -->
```python
NAME = "mine"
```

```console
$ python -c 'import mine; print(mine.NAME, 3, 4)'
mine ... 4
```

<!-- not run: it would never end -->
```python
while True:
    pass
```
"""


def test_a_page_that_is_right_passes(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text(GOOD)
    blocks.check(page, folder)


def test_outputs_are_written_into_a_page(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text(
        "```python\nprint(1)\n```\n\n```output\n2\n```\n\n```python\nprint(3)\n```\n\nEnd.\n"
    )
    blocks.refresh(page, folder)
    blocks.check(page, folder)
    assert page.read_text().endswith("```output\n3\n```\n\nEnd.\n")


# Links -------------------------------------------------------------------------------------------


def links(page: Path) -> Iterator[str]:
    """Where links and images of a page point to."""

    def walk(tokens: list[Token]) -> Iterator[str]:
        for token in tokens:
            target = token.attrGet("href") or token.attrGet("src")
            if target:
                yield str(target)
            yield from walk(token.children or [])

    yield from walk(MarkdownIt("commonmark").enable("table").parse(page.read_text()))


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    titles = [tokens[n + 1].content for n, t in enumerate(tokens) if t.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead(page: Path) -> list[str]:
    found = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    assert dead(path) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b!\n\n[a](#a-b) [b](no.md) ![c](no.png) [d](#no) [e](https://x.org)\n")
    assert dead(page) == ["no.md", "no.png", "#no"]


# Pictures ----------------------------------------------------------------------------------------


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


drawing = load(DOCS / "pictures" / "draw.py")


@pytest.mark.parametrize("name", drawing.PICTURES)
def test_pictures_show_what_gradtrace_finds(name: str, folder: Path) -> None:
    """If not, and it should be so: python docs/pictures/draw.py."""
    assert (DOCS / "pictures" / f"{name}.svg").read_text() == drawing.PICTURES[name]()


def test_every_picture_is_drawn_and_used() -> None:
    files = {path.stem for path in (DOCS / "pictures").glob("*.svg")}
    used = {Path(link).stem for page in PAGES for link in links(page) if "pictures/" in link}
    assert files == set(drawing.PICTURES) == used


# The site ----------------------------------------------------------------------------------------


def described() -> set[str]:
    """What the pages of the library describe."""
    text = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    return set(re.findall(r"\.\. auto\w+:: ([\w.]+)", text))


@pytest.mark.parametrize("name", gradtrace.__all__)
def test_every_public_name_is_described(name: str) -> None:
    if inspect.ismodule(getattr(gradtrace, name)):
        assert any(it.startswith(f"gradtrace.{name}") for it in described())
    else:
        assert f"gradtrace.{name}" in described()


def test_every_callback_is_described() -> None:
    files = (Path(gradtrace.__file__).parent / "training" / "callbacks").glob("[!_]*.py")
    public = {f"gradtrace.training.callbacks.{path.stem}.GradTrace" for path in files}
    assert public <= described()


@pytest.mark.parametrize("name", gradtrace.semirings.__all__)
def test_every_semiring_is_described(name: str) -> None:
    if name == "Value" or name.isupper():
        assert f"`{name}`" in (DOCS / "api" / "semirings.md").read_text() or name == "Value"
    else:
        assert f"gradtrace.semirings.{name}" in described()


def test_every_page_is_in_the_site() -> None:
    """Sphinx says so too; this says it without building."""
    listed = set()
    for page in DOCS.rglob("*.md"):
        for block in blocks.blocks(page):
            if block.language == "{toctree}":
                for line in block.text.split("\n"):
                    entry = re.sub(r".*<(.*)>", r"\1", line.strip())
                    if entry and not entry.startswith(":"):
                        listed.add((page.parent / f"{entry}.md").resolve())
    missing = set(DOCS.rglob("*.md")) - listed - set((DOCS / "experiments").rglob("*.md"))
    assert missing == {DOCS / "index.md"}


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    words = ("-q", "-W", "--keep-going", str(DOCS), str(tmp_path))
    done = fresh.python("-m", "sphinx", *words)
    assert done.returncode == 0, done.stderr
    start = (tmp_path / "index.html").read_text()
    assert "gradtrace" in start and 'class="gtp"' in start  # pictures are part of the page
    reference = (tmp_path / "commands.html").read_text()
    assert "gradtrace diagnose" in reference and "--json" in reference
    fetched = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*(?:src|href)=["']?(?:https?:)?//""")
    for page in tmp_path.rglob("*.html"):
        assert not fetched.search(page.read_text()), f"{page.name} would fetch from the network"
    if importlib.util.find_spec("playwright") and chromium():
        with ThreadPoolExecutor(1) as aside:  # this thread may drive another browser already
            height = aside.submit(_height, tmp_path / "experiments" / "index.html").result()
        assert 400 < height <= 2 * SCREEN["height"]


SCREEN = {"width": 1400, "height": 900}


def _height(page: Path) -> int:
    """Of a whole page in a browser, in pixels."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as run:
        found = run.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        shown = found.new_page(viewport={"width": SCREEN["width"], "height": SCREEN["height"]})
        shown.goto(page.as_uri())
        height = int(shown.evaluate("document.documentElement.scrollHeight"))
        found.close()
    return height


def test_the_command_line_is_shown_without_boxes() -> None:
    commands = load(DOCS / "commands.py")
    shown = commands.shown("diagnose")
    assert "Usage: gradtrace diagnose" in shown and "--json" in shown
    assert not set("╭│╰") & set(shown)


def test_the_quick_way_in_is_on_the_first_page() -> None:
    assert "start.md" in set(links(DOCS / "index.md"))


# Tests that pages speak of -----------------------------------------------------------------------


def named_tests() -> list[tuple[str, str]]:
    """What pages say of tests: `file::name` in Python, `file` ("title") in TypeScript."""
    found = set()
    for page in PAGES:
        text = " ".join(page.read_text().split())
        for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
            found.add((file, f"def {test}(" if test else ""))
        for file, titles in re.findall(r"`(web/test/[\w.]+)`(?: \((\".*?\")\))?", text):
            found |= {(file, title) for title in re.findall(r'"(.*?)"', titles) or [""]}
    return sorted(found)


@pytest.mark.parametrize(("file", "name"), named_tests())
def test_tests_that_pages_speak_of_exist(file: str, name: str) -> None:
    assert name in (ROOT / file).read_text()
