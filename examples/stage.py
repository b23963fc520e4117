"""What the examples share: a training loop, and how a result is shown.

An example has two functions. ``run(steps)`` trains a small model on data made on the spot and
returns ``(model, loss_fn)``, so that ``gradtrace trace example.py:run -- 100`` can take over;
``tell(model, loss_fn, trace)`` returns tables and a sentence, made of the numbers in them.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.traced import Trace

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

Loss: TypeAlias = Callable[[nn.Module], Tensor]
Run: TypeAlias = Callable[..., tuple[nn.Module, Loss]]
Tell: TypeAlias = Callable[[nn.Module, Loss, Trace], tuple[list[Any], str]]


def trained(model: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float = 3e-3) -> None:
    """Some steps of Adam, each on a fresh batch."""
    optimiser = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()


def traced(model: nn.Module, loss_fn: Loss) -> Trace:
    """The trace of one more forward pass."""
    with gt.watch(model) as watch:
        loss = loss_fn(model)
    return watch.trace(loss)


def show(run: Run, tell: Tell, name: str) -> None:
    """Run an example as a script: ``python examples/gpt2.py --steps 50 --out out``."""
    parser = argparse.ArgumentParser(prog=f"{name}.py")
    parser.add_argument("--steps", help="of training, in place of the example's own")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder of the report")
    given = parser.parse_args()
    model, loss_fn = run(given.steps) if given.steps else run()
    trace = traced(model, loss_fn)
    tables, sentence = tell(model, loss_fn, trace)
    print(*tables, sentence, sep="\n\n")
    given.out.mkdir(parents=True, exist_ok=True)
    trace.report(given.out / f"{name}.html", name=name)
    print(f"\nThe report is in {given.out / name}.html")
