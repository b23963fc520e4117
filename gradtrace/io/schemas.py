"""The schema of each kind of file, checked before its contents are used.

- ``TRACE`` and ``VIEW``: the metadata of ``.gradtrace`` files of traces (``trace_tensors`` and
  ``report.checking`` check their tensors),
- ``INCIDENT``: the metadata of ``.gradtrace`` files of steps that went wrong,
- ``JOURNALS``: the metadata of checkpoints of ``gradtrace.influence`` and ``gradtrace.decompose``,
- ``LINES``: the lines of a Monitor's ``.jsonl``, by kind,
- ``ROWS``: the header and the rows of an experiment's journal, and the header of published rows.

Numbers must also be consistent: no more elements pass through a component than are eligible, the
elements of a path are within their tensors, and so on. A checksum detects damage, not malice, so
nothing here relies on one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import inf, isfinite, prod
from typing import Any

import torch
from torch import Tensor

from gradtrace.io import tuning
from gradtrace.io.validation import (
    Schema,
    anything,
    array,
    boolean,
    each_of,
    finite,
    including,
    integer,
    mapping,
    maybe,
    number,
    one_of,
    record,
    sequence,
    text,
    unfit,
    usually,
)
from gradtrace.types import RULES

ROUNDING = Fraction(1, 10**6)
"""Sums of |gradient| are rounded: a part may exceed the whole by this share of it."""

RULE = one_of(*RULES)
GRANULARITY = one_of("scalar", "operator")
WEIGHT = one_of("count", "gradient")
NOTES = array(text(), 100_000)
COUNT = integer(0, 2**80)

# Tables of influence -----------------------------------------------------------------------------

_large = integer(-(2**tuning.SUM_MAX_BITS), 2**tuning.SUM_MAX_BITS)
_positive = integer(1, 2**tuning.SUM_MAX_BITS)
_fraction = sequence(_large, _positive)
MOMENTS = sequence(*[_fraction] * 5)
_sampled_moments = sequence(*[_fraction] * 10)


def _any_moments(value: Any) -> None:
    """Check the sums of a row, with five more if elements were sampled."""
    (_sampled_moments if type(value) is list and len(value) == 10 else MOMENTS)(value)


def _moments(pairs: int, slack: Fraction, found: Sequence[Sequence[int]]) -> None:
    """Check that Σt, Σe, Σt², Σte, Σe² are possible sums over ``pairs`` with ``0 <= t <= e``; whole
    numbers unless they are rounded, by the share ``slack``.
    """
    if len(found) == 10:  # estimates: rounded, and no whole numbers if rows of leaves stand for all
        slack = ROUNDING
        through, both, around, units, left = (Fraction(*each) for each in found[5:])
        if min(through, around, left) < 0 or both**2 > through * around * 2 or left > units * 2:
            unfit("are no variances")
    elif not slack and any(below != 1 for _, below in found):
        unfit("are no whole numbers")
    t, e, tt, te, ee = (Fraction(*each) for each in found[:5])
    more = 1 + slack
    ordered = 0 <= t <= e * more and 0 <= tt <= te * more and te <= ee * more
    squares = all(
        whole <= one * one * more and one * one <= pairs * whole * more
        for one, whole in ((t, tt), (e, ee))
    )
    if not ordered or not squares or te > t * e * more:
        unfit(f"are no sums over {pairs:,} losses")


def _sums(table: Mapping[str, Any]) -> None:
    count, gradient = (partial(_moments, table["pairs"], slack) for slack in (Fraction(), ROUNDING))
    including(rows=array(including(count=count, gradient=gradient)))(table)


_parts = usually(list, lambda x: type(x) is float and isfinite(x), array(finite()))


def _ascending(coverage: Mapping[str, Any]) -> None:
    parts = coverage["parts"]
    if any(a > b for a, b in pairwise(parts)):
        unfit("has parts that do not ascend")


COVERAGE = each_of(
    including(
        parts=_parts, cancellations=COUNT, nonfinite=COUNT, unreached=COUNT, sampled=boolean()
    ),
    _ascending,
)

INFLUENCE = each_of(
    including(
        {"coverage": COVERAGE, "kind": text(100)},
        rows=array(
            including(
                {"alternative": boolean()},
                name=text(),
                own=COUNT,
                unreached=COUNT,
                count=_any_moments,
                gradient=_any_moments,
            )
        ),
        pairs=integer(),
        weight=WEIGHT,
        rule=RULE,
        notes=NOTES,
        interrupted=boolean(),
    ),
    _sums,
)

# Decompositions ----------------------------------------------------------------------------------

_square = finite(0)


def _ordered(pairs: int, found: Sequence[Sequence[int]]) -> None:
    """Check that Σt, Σe, Σt², Σte, Σe² are possible sums over ``pairs`` with ``e >= 0``."""
    t, e, tt, te, ee = (Fraction(*each) for each in found)
    more = 1 + ROUNDING
    squares = all(one * one <= pairs * whole * more for one, whole in ((t, tt), (e, ee)))
    if e < 0 or ee > e * e * more or not squares or te * te > tt * ee * more:
        unfit(f"are no sums over {pairs:,} losses")


def _signed_sums(table: Mapping[str, Any]) -> None:
    sums = partial(_ordered, table["pairs"])
    including(rows=array(including(whole=sums, contested=sums)))(table)


DECOMPOSITION = each_of(
    including(
        rows=array(
            including(
                name=text(),
                own=COUNT,
                leaves=NOTES,
                whole=MOMENTS,
                contested=MOMENTS,
                through=_square,
            )
        ),
        parts=array(sequence(text(), text(), boolean(), boolean(), finite(), _square, _square)),
        products=array(sequence(text(), text(), finite(), _square, _square, boolean(), boolean())),
        pairs=integer(),
        notes=NOTES,
        interrupted=boolean(),
    ),
    _signed_sums,
)

CHOICES = each_of(
    including(
        rows=array(
            including(
                fork=text(),
                branch=text(),
                kind=text(100),
                count=MOMENTS,
                gradient=MOMENTS,
                others=mapping(finite(), 10),
                times=integer(),
            )
        ),
        pairs=integer(1),
        rule=RULE,
        notes=NOTES,
    ),
    _sums,
)

# Traces ------------------------------------------------------------------------------------------

_norm = number(0)
_share = number(0, 1)
LEVEL = record(
    depth=integer(),
    norm=_norm,
    operator=text(),
    module=text(),
    entries=integer(),
    largest=_norm,
    zeros=_share,
)
MODULE = record(
    module=text(),
    kind=text(),
    calls=integer(),
    depth=integer(),
    norm=_norm,
    first=_norm,
    last=_norm,
    handed=maybe(_norm),
    zeros=_share,
    own=maybe(_norm),
    verdict=text(),
)
FLOW = including(profile=array(LEVEL), rows=array(MODULE), findings=NOTES)
SHAPE = array(integer(), tuning.MAX_DIMENSIONS)
STEP = including(operator=text(), module=text(), call=integer(), shape=SHAPE, leaf=text())


def _named(meta: Mapping[str, Any]) -> None:
    leaves = set(meta["leaves"])
    if len(leaves) < len(meta["leaves"]):
        unfit("leaves have a name twice")
    if strange := set(meta["aliases"].values()) - leaves:
        unfit(f"aliases name {min(strange)[:80]!r}, which is no leaf")


TRACE = each_of(
    including(
        rule=RULE,
        pairs=integer(1),
        modules=mapping(text()),
        aliases=mapping(text()),
        leaves=array(text()),
        notes=NOTES,
        tables=mapping(including(title=text()), 1000),
        norms=anything(),
        kinds=array(STEP),
    ),
    _named,
)
VIEW = including(step=integer(0, tuning.MAX_STEPS))

INCIDENT = record(
    step=integer(0, tuning.MAX_STEPS),
    micro=integer(),
    rank=integer(),
    trigger=one_of("spike", "nonfinite"),
    of=one_of("loss", "gradient"),
    evidence=text(),
    loss=number(),
    scale=number(),
    has_batch=boolean(),
    expected=number(),
    words=text(),
    same=boolean(),
    notes=NOTES,
    diagnosis=anything(),
    evaluating=array(text()),
    autocast=mapping(one_of("bfloat16", "float16"), key=one_of("cpu", "cuda")),
    data=anything(),
)

COLUMNS = {
    "lengths": (torch.int64, 0),
    "pairs": (torch.int64, 0),
    "steps": (torch.int64, 2),
    "numbers": (torch.float64, 3),
}
"""The dtype and the number of columns of each tensor of paths (0 columns: a vector)."""


def trace_tensors(meta: Mapping[str, Any], tensors: Mapping[str, Tensor], others: set[str]) -> None:
    """Check the tensors of a trace whose metadata match ``TRACE``; ``others`` are optional ones."""
    gradients = [f"gradient {n}" for n in range(len(meta["leaves"]))]
    if odd := tensors.keys() ^ {*gradients, *COLUMNS, *(others & tensors.keys())}:
        unfit(f"tensor {min(odd)[:80]!r} is missing, or one too many")
    for name in gradients:
        if not tensors[name].is_floating_point():
            unfit(f"{name} is of {tensors[name].dtype}")
    for name, (dtype, columns) in COLUMNS.items():
        found = tensors[name]
        form = found.dim() == (2 if columns else 1) and found.shape[1:] == (columns,)[:columns]
        if found.dtype != dtype or not form:
            unfit(f"tensor {name!r} has another form")
    sizes = {name: tensors[key] for name, key in zip(meta["leaves"], gradients)}
    _paths(meta, tensors, {name: list(grad.shape) for name, grad in sizes.items()})


def _paths(
    meta: Mapping[str, Any], tensors: Mapping[str, Tensor], leaves: Mapping[str, list[int]]
) -> None:
    """Check that steps refer to existing kinds and elements, and that paths begin at leaves."""
    lengths, pairs, steps = (tensors[name] for name in ("lengths", "pairs", "steps"))
    kinds, elements = steps[:, 0], steps[:, 1]
    total = len(steps)
    if len(lengths) != len(pairs) or len(tensors["numbers"]) != total:
        unfit("paths: the tensors differ in length")
    if len(lengths) and not (bool((lengths >= 1).all()) and bool((lengths <= total).all())):
        unfit("paths: a length is out of bounds")
    if int(lengths.sum()) != total:  # no overflow: each is at most the number of steps
        unfit("paths have other lengths than their steps")
    if not _within(pairs, meta["pairs"]) or not _within(kinds, len(meta["kinds"])):
        unfit("paths: a number is out of bounds")
    sizes = torch.tensor(
        [min(prod(kind["shape"]), 2**63 - 1) for kind in meta["kinds"]],
        dtype=torch.int64,
        device="cpu",
    )
    if total and not bool(((elements >= 0) & (elements < sizes[kinds])).all()):
        unfit("paths: an element is outside of its tensor")
    for first in torch.unique(kinds[lengths.cumsum(0) - lengths]).tolist():
        kind = meta["kinds"][first]
        if leaves.get(kind["leaf"]) != kind["shape"]:
            unfit(f"a path begins at {kind['leaf'][:80]!r}, which is no leaf of its shape")


def _within(numbers: Tensor, high: int) -> bool:
    return bool(((numbers >= 0) & (numbers < high)).all())


# Checkpoints of influence ------------------------------------------------------------------------

LOADER = re.compile(r"|([0-9]{1,9})/([0-9]{1,9})")
ENTRY = re.compile(r"[0-9a-f]{1,12}:[0-9a-f]{16}:([0-9a-f]{16})?")


def _loader(name: Any) -> None:
    text(100)(name)
    match = LOADER.fullmatch(name)
    if not match or (match[1] and int(match[1]) >= int(match[2])):
        unfit("is no loader of a rank")


def _batches(value: Any) -> None:
    """Check a text of batches: their numbers, names and content digests."""
    text(50 * tuning.MAX_BATCHES)(value)
    words = value.split()
    if not all(map(ENTRY.fullmatch, words)):
        unfit("is no list of batches")
    if len({word.split(":")[1] for word in words}) < len(words):
        unfit("names a batch twice")


def _counted(kind: str, meta: Mapping[str, Any]) -> None:
    """Check that each counted batch has at least one loss, and each component one row."""
    table = meta[kind]
    many, pairs = sum(len(some.split()) for some in meta["batches"].values()), 0
    if table is not None:
        pairs = table["pairs"]
        if len({row["name"] for row in table["rows"]}) < len(table["rows"]):
            unfit(f"{kind} names a component twice")
    if pairs < many or (pairs > 0 and not many):
        unfit(f"{many:,} batches cannot have {pairs:,} losses")


_settings = mapping(anything())
_identity = ("gradtrace", "python", "model", "tensors", "values", "modules", "mode", "loss")


def _journal(kind: str, table: Schema) -> Schema:
    """The schema of checkpoints with tables of one kind."""
    fields = {kind: maybe(table), "batches": mapping(_batches, 100_000, key=_loader)}
    identity = record(**{name: text(10**8) for name in _identity})
    fields |= {"identity": identity, "digest": text(64), "draws": text(64)}
    whole = each_of(including(**fields), partial(_counted, kind))

    def unless_older(meta: Mapping[str, Any]) -> None:
        """Of older checkpoints, which have no digest or no draws, only the settings are used."""
        if {"digest", "draws"} <= meta.keys():
            whole(meta)

    return each_of(including(settings=_settings), unless_older)


JOURNALS = {
    "influence": _journal("influence", INFLUENCE),
    "decomposition": _journal("decomposition", DECOMPOSITION),
}


# Lines of a run ----------------------------------------------------------------------------------

ROW_TYPES = [int, int, float, float, float, float]
SAMPLED_ROW_TYPES = ROW_TYPES + [float] * 10
_numbers = sequence(COUNT, COUNT, *[finite(0)] * 4)
_sums_of_pairs = sequence(COUNT, COUNT, _any_moments, _any_moments)
_variances = sequence(*[finite()] * 10)


def _row(value: Any) -> None:
    """Check a row: own, unreached, then through and eligible, by count and by |gradient|, and the
    sampling variances of both if elements were sampled.
    """
    if type(value) is not list or len(value) not in (4, 6, 16):
        unfit("is no row of 6 or 16 numbers, or of 2 and two lists of sums")
    if len(value) == 4:
        _sums_of_pairs(value)
        return
    _numbers(value[:6])
    t, e, gt, ge = value[2:6]
    if len(value) == 16:
        _variances(value[6:])
    if t > e or gt > ge * (1 + float(ROUNDING)):
        unfit("has more through than eligible")


def _usual_row(row: Any) -> bool:
    return (
        type(row) is list
        and [*map(type, row)] in (ROW_TYPES, SAMPLED_ROW_TYPES)
        and min(row[:6]) >= 0
        and all(map(isfinite, row[6:]))
        and row[2] <= row[3] < inf
        and row[4] <= row[5] < inf
        and max(row[:2]) < 2**53
    )


def _usual(value: Any) -> bool:
    return value is None or (type(value) is float and 0 <= value < inf)


def _usual_norms(value: Any) -> bool:
    return (
        type(value) is list and len(value) == 2 and value[0] is not None and all(map(_usual, value))
    )


_rows = usually(list, _usual_row, array(_row))
_seconds = usually(list, _usual, array(maybe(finite(0))))
_norms = usually(dict, _usual_norms, mapping(sequence(number(0), maybe(number(0)))))
STEP_TABLE = including(
    rows=_rows,
    pairs=integer(),
    weight=WEIGHT,
    rule=RULE,
    notes=NOTES,
    interrupted=boolean(),
)
_begin = including(
    schema_version=integer(1, 1),
    step=integer(0, tuning.MAX_STEPS),
    settings=_settings,
    versions=mapping(text()),
)


def _timed(line: Mapping[str, Any]) -> None:
    if line["step"] + len(line["seconds"]) > tuning.MAX_STEPS:
        unfit("has steps out of bounds")


def _alternatives(line: Mapping[str, Any]) -> None:
    if len(line.get("alternative", line["names"])) != len(line["names"]):
        unfit("does not say of every component whether it has an alternative")


LINES: dict[str, Schema] = {
    "run": _begin,
    "resume": _begin,
    "names": each_of(
        including(
            {"alternative": array(maybe(boolean())), "components": text()}, names=array(text())
        ),
        _alternatives,
    ),
    "step": including(
        {"influence": STEP_TABLE, "choices": mapping(number()), "terms": mapping(number())},
        step=integer(0, tuning.MAX_STEPS),
        loss=number(),
        verdict=text(),
        norms=_norms,
        scale=number(),
        seconds=number(0),
        share=number(0),
        notes=NOTES,
    ),
    "times": each_of(including(step=integer(0, tuning.MAX_STEPS), seconds=_seconds), _timed),
    "gap": including(),
    "skipped": including(
        step=integer(0, tuning.MAX_STEPS), count=integer(), every=integer(1), budget=number(0)
    ),
    "incident": including(
        {"rank": integer(0)},
        step=integer(0, tuning.MAX_STEPS),
        trigger=text(),
        evidence=text(),
        cause=text(),
        module=text(),
        line=text(),
        file=text(),
    ),
    "end": including({"error": text(), "share": number(0)}, step=integer(0, tuning.MAX_STEPS)),
}
