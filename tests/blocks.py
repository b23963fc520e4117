"""The blocks of a Markdown page, run in order, and what they print held against what is shown.

What a block is, its first word says:

- ``python``: run, in one namespace for the page. With ``>>>`` in it, it is a doctest; otherwise
  what it prints must be shown in an ``output`` block right after it.
- ``console``: lines that begin with ``$`` are commands, of ``gradtrace`` or ``python``, and run;
  the others are what they print. A command that shows nothing may print anything.
- ``output``: what the block before it prints.
- ``text``: no code.
- ``{toctree}`` and the like belong to the site.

A comment right before a block says more: ``<!-- file: mine.py -->`` puts it into a file, and
imports it; ``<!-- exit: 2 -->`` says how a command ends; ``<!-- not run: why -->`` leaves it out
(and the list in ``test_docs`` has to know it). Anything else is refused, so that no block is
passed over unseen.

``python tests/blocks.py PAGE ...`` writes the output of every block into the page.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fresh
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
SITE = {"{toctree}", "{eval-rst}"}
LANGUAGES = {"python", "console", "output", "text"} | SITE
MARK = re.compile(r"<!--\s*(file|exit|not run):\s*(.*?)\s*-->\s*", re.DOTALL)
NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SETTINGS = {
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "error",
    "OMP_NUM_THREADS": "1",
    "NO_COLOR": "1",
    "COLUMNS": "100",
}
"""What commands find in the environment."""

CONVENTION = "python, console, output or text, or a comment before it: see tests/blocks.py"


class PageError(AssertionError):
    """A block that fails, or shows what is not so."""


@dataclass
class Block:
    """A fenced block: where it is, what it is, and what was said right before it."""

    page: str
    line: int  # of its fence, from 0
    end: int
    language: str
    text: str
    mark: str = ""  # file, exit, not run
    said: str = ""
    shown: Block | None = None

    def fail(self, problem: str) -> PageError:
        return PageError(f"{self.page}:{self.line + 1}: {problem}")

    @property
    def first(self) -> str:
        """Its first line, by which lists know it."""
        return self.text.strip().split("\n")[0]


def blocks(page: Path) -> list[Block]:
    """All blocks of a page; one that follows no convention is refused."""
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    found: list[Block] = []
    before: Token | None = None
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            block = _block(name, token, before)
            if block.language == "output":
                if not (found and before and before.type == "fence"):
                    raise block.fail("output must come right after the block that prints it")
                found[-1].shown = block
            found.append(block)
        before = token
    return found


def _block(page: str, token: Token, before: Token | None) -> Block:
    line, end = token.map or [0, 0]
    word = (token.info.split() or [""])[0]
    block = Block(page, line, end, word, token.content)
    if token.type == "code_block":
        raise block.fail(f"an indented block; fence it, as {CONVENTION}")
    if word not in LANGUAGES:
        raise block.fail(f"a block of {word or 'no language'}; it is one of {CONVENTION}")
    if word == "text" and re.search(r"^(>>>|\$) ", block.text, re.MULTILINE):
        raise block.fail("text that looks like code: make it python or console")
    if before is not None and before.type == "html_block":
        said = MARK.fullmatch(before.content)
        if said:
            block.mark, block.said = said[1], said[2]
    if block.mark == "not run" and len(block.said.split()) < 3:
        raise block.fail("not run: say why, in a few words")
    return block


# Running -----------------------------------------------------------------------------------------


class Run:
    """A page being run, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> str | None:
        """What a block printed; None where nothing is run."""
        if block.mark == "not run" or block.language in SITE | {"output", "text"}:
            return None
        if block.language == "console":
            return self._console(block)
        if block.mark == "file":
            (self.folder / block.said).write_text(block.text)
            return self._execute(block, {"__name__": Path(block.said).stem})
        if ">>>" in block.text:
            return self._doctest(block)
        return self._execute(block, self.names)

    def _execute(self, block: Block, names: dict[str, Any]) -> str:
        source = "\n" * (block.line + 1) + block.text  # so that line numbers are the page's
        code = compile(source, block.page, "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                exec(code, names)
            except Exception as error:
                raise block.fail(f"{type(error).__name__}: {error}") from error
        return out.getvalue()

    def _doctest(self, block: Block) -> str:
        test = doctest.DocTestParser().get_doctest(
            block.text, self.names, block.page, block.page, block.line + 1
        )
        test.globs = self.names  # the parser copies them
        told = io.StringIO()
        runner = doctest.DocTestRunner(Checker(), verbose=False, optionflags=FLAGS)
        runner.run(test, out=told.write, clear_globs=False)
        if runner.failures:
            raise block.fail(f"a doctest fails\n{told.getvalue()}")
        return ""

    def _console(self, block: Block) -> str:
        for command, shown in commands(block):
            done = self._command(block, command)
            wanted = int(block.said) if block.mark == "exit" else 0
            if done.returncode != wanted:
                raise block.fail(
                    f"{command!r} ended with {done.returncode}, not {wanted}\n{done.stderr[-2000:]}"
                )
            got = done.stdout + (done.stderr if wanted else "")
            if shown.strip() and not same(shown, got):
                raise block.fail(f"{command!r} prints\n{got}\nand not\n{shown}")
        return ""

    def _command(self, block: Block, command: str) -> subprocess.CompletedProcess[str]:
        program = command.split()[0]
        if program not in ("gradtrace", "python"):
            raise block.fail(f"{program!r} is not run here; say so: <!-- not run: why -->")
        if program == "gradtrace" and not re.search(r"[|<>;&]", command):
            words = shlex.split(command.replace("\\\n", " "))
            return fresh.python("-m", *words, cwd=self.folder, env=os.environ | SETTINGS)
        shims = self.folder / ".bin"
        shims.mkdir(exist_ok=True)
        for name, module in (("python", ""), ("gradtrace", "-m gradtrace")):
            shim = shims / name
            shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            shim.chmod(0o755)
        path = f"{shims}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=os.environ | SETTINGS | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=fresh.LONG,
        )


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with what is shown of its output."""
    if not block.text.startswith("$ "):
        raise block.fail("a console block begins with a command: $ gradtrace ...")
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        lines = part.split("\n")
        last = next(n for n, line in enumerate(lines) if not line.endswith("\\"))
        yield "\n".join(lines[: last + 1]), "\n".join(lines[last + 1 :])


def check(page: Path, folder: Path) -> None:
    """Run a page in a folder; raise if something fails, or is not as it is shown."""
    run = Run(folder)
    for block in blocks(page):
        printed = run.run(block)
        if printed is None or block.language == "console":
            continue
        shown = block.shown.text if block.shown else ""
        if printed.strip() and not block.shown:
            raise block.fail(f"it prints, and no output block follows it\n{printed}")
        if not same(shown, printed):
            raise block.fail(f"it prints\n{printed}\nand not\n{shown}")


# Comparing ---------------------------------------------------------------------------------------


class Checker(doctest.OutputChecker):
    """Numbers may differ in their last digit: machines round sums in different orders."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, got, optionflags) or same(want, got)


def same(shown: str, got: str) -> bool:
    """Whether two texts agree but for spaces, lengths of rules and last digits of numbers.

    ``...`` stands for any words.

    >>> same("loss 0.1234 of 3", "loss  0.1235 of 3"), same("of 3", "of 4"), same("0.12", "0.15")
    (True, False, False)
    >>> same("off by 6.1e-08", "off by 9.4e-08"), same("off by 6.1e-08", "off by 6.1e-04")
    (True, False)
    >>> same("off by 3062.77%", "off by 3062.69%"), same("off by 3062.77%", "off by 3063.77%")
    (True, False)
    >>> same("took ... (40 rows)", "took 3 s (40 rows)"), same("a ... b", "a c")
    (True, False)
    """
    first, *rest = [_words(part) for part in re.split(r"(?<!\S)\.\.\.(?!\S)", shown)]
    words = _words(got)
    if not rest:
        return _match(first, words)
    *middle, last = rest
    if len(first) + len(last) > len(words) or not _match(first, words[: len(first)]):
        return False
    end = len(words) - len(last)
    if not _match(last, words[end:]):
        return False
    at = len(first)
    for part in middle:
        while at + len(part) <= end and not _match(part, words[at : at + len(part)]):
            at += 1
        if at + len(part) > end:
            return False
        at += len(part)
    return True


COVERAGE = re.compile(r"A path carries .* sampled elements")
"""A sentence with figures of some elements, drawn by a loss: by another rounding, others."""


def _words(text: str) -> list[str]:
    return re.sub("─+", "─", COVERAGE.sub("Coverage.", text)).split()


def _match(shown: list[str], got: list[str]) -> bool:
    return len(shown) == len(got) and all(map(_alike, shown, got))


def _alike(shown: str, got: str) -> bool:
    if shown == got:
        return True
    one, other = NUMBER.split(shown), NUMBER.split(got)
    if len(one) != len(other) or one[::2] != other[::2]:
        return False
    return all(map(_close, one[1::2], other[1::2]))


def _close(shown: str, got: str) -> bool:
    """Equal to one and a half of the last digit that is shown, or to 1e-4; whole numbers are exact.
    Rounding, which differs from machine to machine, is below 1e-6.
    """
    if "." not in shown and "e" not in shown:
        return shown == got
    if "e-" in shown and 0 < float(shown) < 1e-6:
        return 0 < float(got.replace(",", "")) < 1e-6
    mantissa, _, power = shown.replace(",", "").partition("e")
    digits = len(mantissa.partition(".")[2])
    unit = 10.0 ** (int(power or 0) - digits)
    number = float(shown.replace(",", ""))
    return abs(number - float(got.replace(",", ""))) <= max(1.5 * unit, 1e-4 * abs(number))


# Writing -----------------------------------------------------------------------------------------


def refresh(page: Path, folder: Path) -> None:
    """Write what plain Python blocks print into the page."""
    run, lines, shift = Run(folder), page.read_text().split("\n"), 0
    for block in blocks(page):
        if block.language != "python" or ">>>" in block.text:
            if block.language != "console":
                run.run(block)
            continue
        printed = run.run(block)
        if printed is None or not (printed.strip() or block.shown):
            continue
        new = ["", "```output", *printed.rstrip().split("\n"), "```"]
        start, stop = block.end + shift, (block.shown or block).end + shift
        lines[start:stop] = new
        shift += len(new) - (stop - start)
    page.write_text("\n".join(lines))


def main(names: list[str]) -> None:
    for name in names:
        page, home = Path(name).resolve(), Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                refresh(page, Path(folder))
            finally:
                os.chdir(home)


if __name__ == "__main__":
    main(sys.argv[1:])
