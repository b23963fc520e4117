"""The backward program of a loss, which the library keeps to itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from gradtrace.autodiff.backward import seed_of
from gradtrace.autodiff.loss_checks import admit, isolated
from gradtrace.ir.program import Program
from gradtrace.recording.record import DENSE_MAX_ENTRIES
from gradtrace.session import Session


def program(
    loss: Tensor, *, names: Mapping[str, Tensor] | None = None, **options: object
) -> Program:
    """Of a loss without a watch."""
    return _recorded(Session(names), loss, **options)  # type: ignore[arg-type]


def of(session: Session) -> Callable[..., Program]:
    """Of the losses of a watch."""
    return partial(_recorded, session)


@isolated()
def _recorded(
    session: Session,
    loss: Tensor,
    cotangent: Tensor | None = None,
    schedule: str = "kahn",
    dense_limit: int = DENSE_MAX_ENTRIES,
) -> Program:
    admit(loss, session.name_table)
    return session._recorded(loss, seed_of(loss, cotangent), schedule, dense_limit)
