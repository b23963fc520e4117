"""The glossary has every column of every table, and the words of the report's page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import gradtrace as gt
from gradtrace.table import Table

ROOT = Path(gt.__file__).parent.parent
PAGE = (ROOT / "docs" / "glossary.md").read_text()
PLAIN = {"module", "class", "position", "input", "token", "neuron", "shape", "of", "between", "and"}
"""Columns that say what they are."""


def entries() -> dict[str, str]:
    """The meaning of each word, up to its example."""
    found = {}
    for line in re.split(r"^- ", PAGE, flags=re.MULTILINE)[1:]:
        text = " ".join(line.split("\n\n")[0].split())
        for word in re.findall(r"\*\*(.*?)\*\*", text):
            found.setdefault(word, []).append(text)
    return {word: " ".join(texts) for word, texts in found.items()}


WORDS = entries()


def meanings() -> dict[str, str]:
    """The words of the report's page with their meanings, as its source has them."""
    source = (ROOT / "web" / "src" / "terms.tsx").read_text()
    rules = dict(
        re.findall(r"^  (\w+): \"(.*)\",$", source.split("const MEANING")[0], re.MULTILINE)
    )
    body = re.search(r"const MEANING = \{(.*?)\n\};", source, re.DOTALL)
    assert body
    found = {}
    for key, value in re.findall(r'^  ("[^"]+"|\w+):\s*(.+?),$', body[1], re.MULTILINE | re.DOTALL):
        text = re.sub(r"rules\.(\w+) \+ ", lambda rule: f'"{rules[rule[1]]}" + ', value)
        found[key.strip('"')] = "".join(re.findall(r'"([^"]*)"', text))
    return found


def test_words_of_the_report_are_read() -> None:
    assert {"path", "greedy", "share", "in series", "Σ |gradient|"} <= set(meanings())
    assert meanings()["viterbi"].endswith("derivatives: the heaviest path")


@pytest.mark.parametrize("word", sorted(meanings()))
def test_the_report_and_the_glossary_say_the_same(word: str) -> None:
    """If not, one of web/src/terms.tsx and docs/glossary.md was changed alone."""
    assert meanings()[word] in WORDS[word]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.a(x) + self.b(x).tanh())
        return y


def tables() -> list[Table]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 3)
    with gt.watch(model) as watch:
        losses = model(x).square().squeeze(1)
    trace = watch.trace(losses.mean())
    split = trace.decompose(["a", "b"])
    wide = watch.conflicts(losses[:2])
    found = watch.attribute(lambda x: model(x).sum(), {"x": x})
    shown = [trace.influence(sample=8), trace.influence(), split, trace.mass()]
    shown += [trace.coverage()]
    shown += [trace.norms(), trace.path("a.weight", (0, 0)), trace.paths("a.weight", k=2), wide]
    shown += [watch.conflicts(losses), wide.cosines(), found, found.neurons("a"), found.by(["a"])]
    return [each if isinstance(each, Table) else each.table() for each in shown]


COLUMNS = {column.name for table in tables() for column in table.columns if column.shown}


@pytest.mark.parametrize("column", sorted(COLUMNS - PLAIN))
def test_columns_are_explained(column: str) -> None:
    """Those of terms begin with a word that is: ``cosine ce·kl``."""
    assert column in WORDS or column.split()[0] in ("norm", "cosine")


def test_the_tables_of_all_measures_are_among_them() -> None:
    assert {"through", "contested", "mass", "median", "coverage", "gain"} <= COLUMNS
    assert {"derivative", "wins", "score", "of the sum", "largest norm"} <= COLUMNS
