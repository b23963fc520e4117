"""The hooks of FSDP on outputs of units, which gather parameters in a backward pass.

In a pass of gradtrace units are gathered by ``pytorch.fsdp.Residency``, and these hooks do nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from gradtrace.autodiff.hooks import uncounted
from gradtrace.autodiff.pass_scope import pass_runs
from gradtrace.pytorch.global_switches import Change, Switch

STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
"""The module of the class that registers the hooks."""


def _quiet() -> Change:
    module = sys.modules.get(STATE)
    kind: Any = getattr(module, "FSDPState", None)
    if kind is None:
        yield
        return
    register, initialise = kind._register_pre_backward_hook, kind._lazy_init

    def registered(state: Any, output: Any) -> Any:
        """Register hooks that do nothing in a pass of gradtrace."""
        gather = state._pre_backward

        def hook(grad: Tensor) -> Tensor:
            return grad if pass_runs() else gather(grad)

        state._pre_backward = hook
        try:
            with uncounted():
                return register(state, output)
        finally:
            del state._pre_backward

    def initialised(state: Any) -> None:
        with uncounted():
            initialise(state)

    try:
        kind._register_pre_backward_hook, kind._lazy_init = registered, initialised
        yield
    finally:
        kind._register_pre_backward_hook, kind._lazy_init = register, initialise


QUIET = Switch(_quiet)
"""FSDP's hooks that are registered within do nothing in passes of gradtrace."""
