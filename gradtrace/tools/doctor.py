"""Checks whether gradtrace works here: versions of torch and Python, kernels, optional packages.

``internals`` checks the meaning of autograd's attributes; here small models are run, and gradients,
hooks, checkpoints and kernels are compared with PyTorch's own. ``gradtrace doctor`` prints it.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from gradtrace import api
from gradtrace.errors import needs, reason_of
from gradtrace.ir import interpreter as engine
from gradtrace.kernels import Reference, backend_of, instruction_set
from gradtrace.pytorch import internals
from gradtrace.semirings import MAX, SUM

OPTIONAL = {
    "pandas": "to_pandas()",
    "matplotlib": "drawing (plot(), experiments, benchmarks)",
    "scikit-learn": "the data set of digits",
    "lightning": "gradtrace.integrations.lightning",
    "transformers": "gradtrace.integrations.transformers",
    "accelerate": "gradtrace.integrations.accelerate (and transformers' Trainer)",
    "tensorboard": "gradtrace.integrations.tensorboard",
    "ray": "running experiments on a cluster",
}
"""Optional packages, and the part of gradtrace that needs each."""


class CheckResult(NamedTuple):
    """One line of the diagnosis."""

    what: str
    verdict: str  # ok, wrong, or missing: slower, or a part that cannot be used
    detail: str


def diagnosis() -> list[CheckResult]:
    """Run all checks, in about a second. The user's random number generators are not advanced."""
    installed = f"gradtrace {sys.modules['gradtrace'].__version__}, torch {torch.__version__}"
    where = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    tested = f"tested: torch {internals.TESTED}"
    found = [CheckResult("versions", "ok", f"{installed}, {where}; {tested}")]
    found.append(_tried("autograd's internals", _internals, "known"))
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        for name, make in MODELS.items():
            found.append(_tried(f"gradient: {name}", partial(_compared, make)))
        found += [_tried("hooks", _hooked), _tried("checkpoints", _recomputed), _kernels()]
    return [*found, *map(_optional, OPTIONAL)]


def _tried(what: str, run_check: Callable[[], str], good: str = "as PyTorch's") -> CheckResult:
    """Run a check, which returns what is wrong, or an empty text."""
    try:
        wrong = run_check()
    except Exception as error:
        wrong = f"{type(error).__name__}: {reason_of(error)}"
    return CheckResult(what, "wrong" if wrong else "ok", wrong or good)


def _internals() -> str:
    return "; ".join(internals.missing() or internals.changed())


# Gradients ---------------------------------------------------------------------------------------


def _of(module: nn.Module, *inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = module(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    return out.square().sum(), dict(module.named_parameters())


def _attention() -> tuple[Tensor, dict[str, Tensor]]:
    q, k, v = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.square().sum(), {"q": q, "k": k, "v": v}


def _views() -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.cat([x.t().reshape(2, 6)[:, 1:4], torch.split(x, [1, 3], 1)[1].exp()[:2] / 3 - 1], 1)
    y = y.clone().mul_(2)[torch.tensor([0, 1, 1])].pow(3)
    return (y.softmax(-1) * torch.where(y > 0, y, -y)).sum() + x.norm() + x.mean() ** 2, {"x": x}


MODELS: Mapping[str, Callable[[], tuple[Tensor, dict[str, Tensor]]]] = {
    "linear layers": lambda: _of(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.GELU()), torch.randn(2, 3)
    ),
    "norms": lambda: _of(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), torch.randn(2, 3)),
    "convolution": lambda: _of(
        nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.MaxPool1d(2)),
        torch.randn(2, 2, 8),
    ),
    "embedding": lambda: _of(nn.Embedding(5, 3), torch.tensor([1, 4, 1])),
    "recurrent layers": lambda: _of(nn.LSTM(2, 3), torch.randn(3, 1, 2)),
    "attention": _attention,
    "views and elementwise functions": _views,
}
"""Functions that return a loss and the leaves to differentiate by."""


def _compared(make: Callable[[], tuple[Tensor, dict[str, Tensor]]]) -> str:
    """Compare the gradients by walking and by the program with PyTorch's; check MAX is finite."""
    loss, leaves = make()
    wanted = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    walked: Mapping[str, Any] = api.backward(loss, names=leaves)
    values = engine.run(api.program(loss), SUM)
    run = {name: values[leaf] for name, leaf in leaves.items()}
    for found, how in ((walked, "walking the graph"), (run, "the program")):
        for name, right in zip(leaves, wanted):
            if not torch.allclose(found[name], right, rtol=1e-4, atol=1e-5):
                off = (found[name] - right).abs().max().item()
                return f"{how} gives {name} a gradient that is off by {off:.2g}"
    largest = api.backward(loss, MAX, names=leaves)
    if not all(torch.isfinite(value).all() for value in largest.values()):
        return "the heaviest paths are not finite"
    return ""


def _hooked() -> str:
    """Check that hooks on a leaf, on a value, before and after a node run as PyTorch's engine."""
    x: Any = torch.tensor([1.0, 2.0], requires_grad=True)
    y: Any = x * 3
    loss = (y * y).sum()
    order: list[str] = []

    def add(name: str, register: Callable[..., Any], change: Callable[[Any], Any]) -> None:
        def hook(first: Any, *_: Any) -> Any:
            order.append(name)
            return change(first)

        register(hook)

    add("leaf", x.register_hook, lambda g: g + 1)
    add("value", y.register_hook, lambda g: g * 2)
    add("before", y.grad_fn.register_prehook, lambda gs: tuple(g - 1 for g in gs))
    add("after", y.grad_fn.register_hook, lambda gs: (gs[0] * 5, *gs[1:]))
    (wanted,) = torch.autograd.grad(loss, x, retain_graph=True)
    engine, order[:] = list(order), []
    (found,) = api.backward(loss).values()
    if order != engine:
        return f"hooks ran in the order {order}, PyTorch's engine runs {engine}"
    if not torch.equal(found, wanted):
        return f"they gave {found.tolist()}, not {wanted.tolist()}"
    return ""


def _recomputed() -> str:
    """Check that a checkpointed part is recomputed exactly once."""
    runs = []

    def part(x: Tensor) -> Tensor:
        runs.append(1)
        return (x.exp() * x).tanh().sin()

    x = torch.tensor([0.5, 1.0], requires_grad=True)
    loss: Tensor = checkpoint(part, x, use_reentrant=False).sum()
    (found,) = api.backward(loss).values()
    (wanted,) = torch.autograd.grad(loss, x)
    if not torch.allclose(found, wanted):
        return f"the gradient is {found.tolist()}, not {wanted.tolist()}"
    return "" if len(runs) == 3 else f"a part ran {len(runs) - 2} times more in one pass, not once"


# The installation --------------------------------------------------------------------------------


def _kernels() -> CheckResult:
    what = "compiled kernels"
    if not instruction_set():
        detail = (
            "there are none, so tracing is many times slower; docs/start.md says how to get them"
        )
        return CheckResult(what, "missing", detail)
    a, b = torch.randn(2, 17, 33), torch.randn(2, 33, 19)
    backends = backend_of(a), Reference(a.device)
    here, right = (backend.contract(a, b, index=True)[:2] for backend in backends)
    if all(x is not None and y is not None and torch.equal(x, y) for x, y in zip(here, right)):
        return CheckResult(what, "ok", f"{instruction_set()}, the bits of the reference")
    return CheckResult(what, "wrong", "other bits than the reference")


def _optional(package: str) -> CheckResult:
    try:
        return CheckResult(package, "ok", version(package))
    except PackageNotFoundError:
        return CheckResult(package, "missing", needs(OPTIONAL[package], package))
