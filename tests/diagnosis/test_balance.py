"""Gradients that vanish, explode, or leave terms, branches and experts with next to nothing."""

from __future__ import annotations

import pytest
import torch
from balance_cases import CASES

import gradtrace as gt


@pytest.mark.parametrize("name", CASES)
def test_the_finding_is_named(name: str) -> None:
    torch.manual_seed(0)
    wanted = CASES[name]
    model, step = wanted.make()
    with gt.watch(model, diagnose=True) as watch:
        loss = step()
    found = watch.diagnose(loss)
    of_kind = [finding for finding in found.findings if finding.kind == wanted.kind]
    assert of_kind and not found.healthy, str(found)
    assert of_kind[0].module.startswith(wanted.module), str(found)
    assert of_kind[0].advice
    if wanted.line:
        assert "# HERE" in of_kind[0].line, str(found)
