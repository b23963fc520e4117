"""Samples that cut the gradient off where another term of the loss hides it: of a variational
autoencoder with ``sample()`` in place of ``rsample()`` the KL term alone trains the encoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from gradtrace.diagnosis.forward_record import ForwardRecord, Operation
from gradtrace.diagnosis.losses import SAME_VALUES
from gradtrace.diagnosis.result import Finding, common_module, listed

JOINS = frozenset(("cat", "concat", "concatenate", "stack", "hstack", "vstack"))
"""Functions that put a sample beside other values, and do not compare it with them."""

ADVICE = (
    "draw so that the gradient passes: rsample(), or mean + std * torch.randn_like(std). If what "
    "is made of the sample is not meant to train this part, draw it under torch.no_grad()."
)


@dataclass(eq=False)
class Draw:
    """A sample: how it is called, what it is drawn by, from which values, and what it is."""

    name: str
    first: Operation
    operations: list[Operation] = field(default_factory=list)

    @property
    def made(self) -> set[int]:
        """The values of the sample, and those on the way to it."""
        return {value for each in self.operations for value in each.outputs}

    @property
    def source(self) -> set[int]:
        """The values that it is drawn from, if a gradient could reach them."""
        needing = (each.inputs for each in self.operations if each.needs)
        return {value for inputs in needing for value in inputs} - self.made


def sample_findings(
    record: ForwardRecord, roots: set[int], parameters: Mapping[int, str], told: Collection[str]
) -> Iterator[Finding]:
    """Samples of a distribution that has a derivative, drawn without it, from what is trained.

    Of those that lead on by other ``parameters`` (of a decoder) to the loss, and are not compared
    with what they were drawn from, as the score function (REINFORCE) does. None at the lines that
    were ``told``, nor where a step uses ``rsample`` as well.
    """
    draws = list(_draws(record))
    if not draws or any(_text(each).count("rsample(") for each in record.operations):
        return
    for draw in draws:
        line, source = str(draw.first.where.line or ""), draw.source
        before = record.above(source)
        names = [n for v, n in parameters.items() if v in before]
        if line in told or not names or _is_scored(record, draw, before):
            continue
        after = record.below(draw.made)
        others = {v for each in record.uses(after) for v in each.inputs if v in parameters}
        if roots.isdisjoint(after) or not others - before:
            continue
        yield Finding(
            "sample",
            "warning",
            f"a sample cuts the gradient off: {draw.name}",
            common_module([name.rpartition(".")[0] for name in names]),
            tuple(names),
            line,
            f"What is computed from the sample does not train {listed(tuple(names))}, from which "
            "it is drawn: the gradient that arrives there is of other terms of the loss.",
            ADVICE,
        )


def _draws(record: ForwardRecord) -> Iterator[Draw]:
    """Samples that could have been drawn with a derivative."""
    last: Draw | None = None
    for operation in record.operations:
        drawn = operation.where.drawn
        if drawn is not None and drawn.rsample and operation.off_by.endswith("sample"):
            name = f"{drawn.name}.sample()"
            if last is None or (last.name, _text(last.first)) != (name, _text(operation)):
                last = Draw(name, operation)
            last.operations.append(operation)
            continue
        if last is not None and last.source:
            yield last
        last = None
        if operation.name == "normal" and operation.needs and drawn is None and not operation.off:
            yield Draw("torch.normal()", operation, [operation])
    if last is not None and last.source:
        yield last


def _text(operation: Operation) -> str:
    return str(operation.where.line or "")


def _is_scored(record: ForwardRecord, draw: Draw, before: set[int]) -> bool:
    """Whether an operation takes the sample and a value that has to do with its distribution."""
    family = {v for v in before | record.below(before) if _is_trained(record, v)} | draw.source
    own, seen = {id(each) for each in draw.operations}, set[int]()
    stack = list(draw.made)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        for operation in record.uses((value,)):
            if id(operation) in own or operation.name in JOINS:
                continue
            if any(each in family for each in operation.inputs if each != value):
                return True
            if operation.name in SAME_VALUES:
                stack += operation.outputs
    return False


def _is_trained(record: ForwardRecord, value: int) -> bool:
    maker = record.maker(value)
    return maker is not None and value in maker.gives
