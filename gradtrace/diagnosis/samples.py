"""Samples that cut the gradient off where another term of the loss hides it: of a variational
autoencoder with ``sample()`` in place of ``rsample()``, or with a discrete latent, the KL term
alone trains the encoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from gradtrace.diagnosis.forward_record import ForwardRecord, Operation, plain
from gradtrace.diagnosis.losses import SAME_VALUES
from gradtrace.diagnosis.result import Finding, common_module, listed

JOINS = frozenset(("cat", "concat", "concatenate", "stack", "hstack", "vstack"))
"""Functions that put a sample beside other values, and do not compare it with them."""

DISCRETE = frozenset(("bernoulli", "multinomial", "poisson", "binomial"))
"""Functions that draw whole numbers."""

COMPARISONS = frozenset(
    ("lt", "gt", "le", "ge", "less", "greater", "less_equal", "greater_equal")
    + ("__lt__", "__gt__", "__le__", "__ge__")
)
UNIFORM = frozenset(("rand", "rand_like", "uniform_"))
"""Functions a comparison with which draws from Bernoulli's distribution."""

LABELLED = frozenset(
    ("cross_entropy", "nll_loss", "gather", "take_along_dim", "binary_cross_entropy")
    + ("binary_cross_entropy_with_logits",)
)
"""Functions that compare probabilities with what is to be predicted."""

MEANT = " If what is made of the sample is not meant to train this part, draw it under no_grad()."
ADVICE = (
    "draw so that the gradient passes: rsample(), or mean + std * torch.randn_like(std)." + MEANT
)
RELAX = (
    "no gradient passes through a discrete sample: use Gumbel-softmax or another relaxed "
    "distribution, a straight-through estimator, z + p - p.detach(), or the log-probability of the "
    "sample times the loss." + MEANT
)


@dataclass(eq=False)
class Draw:
    """A sample: how it is called, what it is drawn by, from which values, and what it is."""

    name: str
    first: Operation
    operations: list[Operation] = field(default_factory=list)
    discrete: bool = False

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
    """Samples, drawn without a derivative, of what is trained.

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
        names = tuple(n for v, n in parameters.items() if v in before)
        if line in told or not names or _is_scored(record, draw, before):
            continue
        if draw.discrete and _is_meant(record, draw, parameters):
            continue
        if not _trains_others(record, draw, roots, parameters, before):
            continue
        yield Finding(
            "sample",
            "warning",
            f"a sample cuts the gradient off: {draw.name}",
            common_module([name.rpartition(".")[0] for name in names]),
            names,
            line,
            f"What is computed from the sample does not train {listed(names)}, from which it is "
            "drawn: the gradient that arrives there is of other terms of the loss.",
            RELAX if draw.discrete else ADVICE,
        )


def _trains_others(
    record: ForwardRecord, draw: Draw, roots: set[int], parameters: Collection[int], own: set[int]
) -> bool:
    """Whether a sample leads to the loss by other weights; a discrete one by these alone, and not
    back into those (``own``) that it was drawn with, as a Gibbs sampler or a decoder's words do.
    """
    barred = {value for value in parameters if value in own} if draw.discrete else set[int]()
    after = record.below(draw.made, lambda each: barred.isdisjoint(each.inputs))
    used = {v for each in record.uses(after) for v in each.inputs if v in parameters}
    return not roots.isdisjoint(after) and bool(used - own)


def _draws(record: ForwardRecord) -> Iterator[Draw]:
    """Samples that were drawn without a derivative."""
    last: Draw | None = None
    for operation in record.operations:
        drawn = operation.where.drawn
        if drawn is not None and (not operation.off or operation.off_by.endswith("sample")):
            name = f"{drawn.name}.sample()"
            if last is None or (last.name, _text(last.first)) != (name, _text(operation)):
                last = Draw(name, operation, discrete=not drawn.rsample)
            last.operations.append(operation)
            continue
        if last is not None and last.source:
            yield last
        last = None
        if operation.needs and drawn is None and not operation.off:
            yield from _drawn_by(record, operation)
    if last is not None and last.source:
        yield last


def _drawn_by(record: ForwardRecord, operation: Operation) -> Iterator[Draw]:
    """The sample that a single operation draws, if it does."""
    name = plain(operation.name)
    if name == "normal" or name in DISCRETE:
        yield Draw(f"torch.{name}()", operation, [operation], name in DISCRETE)
    elif operation.name in COMPARISONS:
        makers = [record.maker(value) for value in operation.inputs]
        if any(each is not None and each.name in UNIFORM for each in makers):
            yield Draw("a comparison with torch.rand()", operation, [operation], True)


def _is_meant(record: ForwardRecord, draw: Draw, parameters: Mapping[int, str]) -> bool:
    """Whether a discrete sample is likely meant to train nothing: it is detached, or the scores
    that it is drawn by are compared with labels, as those of a generator of words.
    """
    if any(each.name == "detach" for each in record.uses(draw.made)):
        return True
    own = {id(each) for each in draw.operations}

    def passes(operation: Operation) -> bool:
        return id(operation) not in own and parameters.keys().isdisjoint(operation.inputs)

    near = record.below(record.above(draw.source, passes), passes)
    kin = {value for value in near if _is_trained(record, value)}
    return any(
        each.inputs[0] in kin and kin.isdisjoint(each.inputs[1:])
        for each in record.uses(kin)
        if each.name in LABELLED
    )


def _text(operation: Operation) -> str:
    return str(operation.where.line or "")


def _is_scored(record: ForwardRecord, draw: Draw, before: set[int]) -> bool:
    """Whether an operation takes the sample and a value that has to do with its distribution."""
    own, seen = {id(each) for each in draw.operations}, set[int]()
    below = record.below(before, lambda each: id(each) not in own)
    family = {v for v in before | below if _is_trained(record, v)} | draw.source
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
