"""``Diagnosis``: findings, worst first, each with its evidence, its line and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import partial
from html import escape
from textwrap import wrap
from typing import Any

from gradtrace.errors import listed as listed_first
from gradtrace.errors import printable
from gradtrace.files import json_value

SEVERITIES = ("error", "warning", "note")
"""From the worst. Errors and warnings are findings; notes say what is unusual and may be meant."""

WIDTH = 100
NAMED_MAX = 4
listed = partial(listed_first, most=NAMED_MAX)


class Reason(str, Enum):
    """Why a parameter gets no gradient."""

    NEVER_CALLED = "module never called"
    UNUSED = "not used in the forward pass"
    REPLACED = "replaced in the forward pass"
    NO_GRAD = "called under no_grad"
    INFERENCE = "called under inference_mode"
    DETACHED = "output detached"
    UNREACHED = "output never reaches the loss"
    CHECKPOINT = "reentrant checkpoint without an input that requires grad"
    FUNCTION = "custom function returns no gradient"
    CUT = "cut off"
    ZERO_FACTOR = "multiplied by zero"
    PLACEHOLDER = "its sum is multiplied by a written 0"
    DEAD_RELU = "dead ReLU"
    CONSTANT = "loss is constant"
    SATURATED = "saturated"
    ONE_CLASS = "softmax over one class"
    FLAT = "derivative is zero"
    NOT_SELECTED = "not selected"
    NO_SAMPLES = "got no samples"
    UNDERFLOW = "underflow"
    HOOK = "a hook returns zeros"
    CANCELLED = "contributions cancel"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class SilentParameter:
    """A parameter that requires grad and gets none, or nothing but zeros.

    ``operator`` and ``line`` are what cut the gradient off, and where; ``evidence`` is what was
    seen there.
    """

    parameter: str
    module: str
    reason: Reason
    line: str = ""
    operator: str = ""
    evidence: str = ""
    severity: str = "error"


@dataclass(frozen=True)
class NonFiniteValue:
    """The first value that is NaN or infinite, in the order of the forward pass.

    ``element`` is its first bad element, ``inputs`` describes what it was made of, ``path`` by
    which operations it spread. ``of`` is "loss" or "gradient".
    """

    of: str
    operator: str
    module: str
    line: str
    value: float
    element: tuple[int, ...] = ()
    inputs: tuple[str, ...] = ()
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: what was seen, where, and what to do."""

    kind: str
    severity: str
    title: str
    module: str = ""
    parameters: tuple[str, ...] = ()
    line: str = ""
    evidence: str = ""
    advice: str = ""

    @property
    def parameter(self) -> str:
        """The first of its parameters."""
        return self.parameters[0] if self.parameters else ""

    def lines(self) -> list[str]:
        """The finding as a paragraph."""
        found = [f"{self.severity.capitalize()}: {self.title}"]
        if self.line:
            found.append(f"  {self.line}")
        for text in (self.evidence, self.advice and f"What to do: {self.advice}"):
            found += [f"  {line}" for line in wrap(text, WIDTH - 2)]
        return [printable(line) for line in found]


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a loss and its gradient, worst first; ``print`` it to read it.

    ``findings`` has all, with notes last; ``silent`` each parameter that requires grad and gets
    none; ``nonfinite`` the first value that is NaN or infinite (None: all are finite);
    ``unused_rows`` the rows of embeddings that do not occur in the batch, ``{name: (unused,
    all)}``.
    ``healthy`` says that there is neither an error nor a warning.
    """

    findings: tuple[Finding, ...]
    silent: tuple[SilentParameter, ...] = ()
    nonfinite: NonFiniteValue | None = None
    unused_rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether there is no error and no warning."""
        return all(finding.severity == "note" for finding in self.findings)

    def __str__(self) -> str:
        counts = [(s, sum(f.severity == s for f in self.findings)) for s in SEVERITIES]
        told = ", ".join(f"{n} {s}{'s' if n > 1 else ''}" for s, n in counts if n)
        head = "healthy" if self.healthy else "not healthy"
        lines = [f"Diagnosis: {head}{f' ({told})' if told else ''}"]
        for finding in self.findings:
            lines += ["", *finding.lines()]
        rows = [f"{name} {n:,} of {total:,}" for name, (n, total) in self.unused_rows.items()]
        if rows:
            lines += ["", printable(f"Rows that do not occur in this batch: {', '.join(rows)}.")]
        lines += [text for remark in self.remarks for text in ("", *wrap(printable(remark), WIDTH))]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre-wrap">{escape(str(self))}</pre>'

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values; numbers that are not finite as strings."""
        return {
            "healthy": self.healthy,
            "findings": [json_value(asdict(finding)) for finding in self.findings],
            "silent": [
                json_value(asdict(each) | {"reason": str(each.reason)}) for each in self.silent
            ],
            "nonfinite": None if self.nonfinite is None else json_value(asdict(self.nonfinite)),
            "unused_rows": {name: list(pair) for name, pair in self.unused_rows.items()},
            "remarks": list(self.remarks),
        }


def common_module(modules: list[str]) -> str:
    """The innermost module that holds all of these; the first, if none does.

    >>> common_module(["encoder.0", "encoder.2"]), common_module(["a", "b"])
    ('encoder', 'a')
    """
    parts = [module.split(".") for module in modules]
    shared = []
    for names in zip(*parts):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared) or (modules[0] if modules else "")
