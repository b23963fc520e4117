"""Answers to complaints about neighbouring tools (docs/complaints.md) that no other test holds."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import gradtrace as gt


def traced() -> tuple[gt.watch, torch.Tensor]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    with gt.watch(model) as watch:
        loss = model(torch.ones(2, 3)).sum()
    return watch, loss


FETCHED = re.compile(
    r"""(?:src|href|action)\s*=\s*["']?\s*(?:https?:)?//|@import|url\(\s*["']?\s*(?:https?:)?//""",
    re.IGNORECASE,
)


def test_a_report_is_one_file_that_may_ask_for_nothing(tmp_path: Path) -> None:
    watch, loss = traced()
    watch.trace(loss).report(tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    text = (tmp_path / "report.html").read_text()
    assert not FETCHED.search(text)
    policy = re.search(r'Content-Security-Policy"\s+content="([^"]*)"', text)
    assert policy and "default-src 'none'" in policy[1]
    assert "connect-src" not in policy[1] and "http" not in policy[1]


def test_in_a_notebook_a_trace_is_a_document_in_a_frame() -> None:
    """VS Code, Lab and Colab show an ``srcdoc``, and none of them runs scripts of plain HTML."""
    watch, loss = traced()
    shown = watch.trace(loss)._repr_html_()
    frame = re.search(r'<iframe\b[^>]*\bsrcdoc="([^"]*)"', shown)
    assert frame
    document = html.unescape(frame[1])
    assert document.startswith("<!doctype html>") and not FETCHED.search(document)
    assert "<script" not in shown  # but inside the frame, where it is text until shown
    assert shown.count("<iframe") == 1


def test_graphs_are_drawn_without_a_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No Graphviz: there is no program at all to be found."""
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    watch, loss = traced()
    drawn = watch.graph(loss).draw()
    assert drawn.startswith("<svg") and "Tanh" in drawn
