"""``python -m gradtrace.benchmarks``: what ``gradtrace bench`` does, where typer is not installed.

It needs torch and numpy alone, for whole models also transformers: what a machine with a GPU has.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gradtrace.benchmarks.page import markdown
from gradtrace.benchmarks.results import Setting
from gradtrace.benchmarks.run import Places, known, run
from gradtrace.errors import GradtraceError


def main(words: list[str] | None = None) -> int:
    """Run sections; 1 if one failed, 2 if something is wrong with what was asked for."""
    ask = argparse.ArgumentParser("python -m gradtrace.benchmarks", description=__doc__)
    ask.add_argument("--only", action="append", default=[], help="this section; may be repeated")
    ask.add_argument("--rounds", type=int, help="in place of each section's own")
    ask.add_argument("--quick", action="store_true", help="small cases, to try it")
    ask.add_argument("--out", type=Path, help="a Markdown page, and beside it the same as JSON")
    ask.add_argument("--figures", type=Path, help="a folder for the curves")
    ask.add_argument("--device", help="where sections for a GPU run; cpu to try them")
    got = ask.parse_args(words)
    try:
        setting = Setting(got.quick, got.rounds, got.device)
        found = run(known(got.only), setting, Places(got.out, got.figures))
    except GradtraceError as error:
        print(f"gradtrace: {error}", file=sys.stderr)
        return 2
    print(markdown(found.data()))
    return int(found.failed)


if __name__ == "__main__":
    sys.exit(main())
