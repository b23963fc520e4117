"""Question: What memory do training and a trace take over depth, with and without checkpoints?

Expectation: The slides say "additional memory ≈ 2·(model size)", and that checkpointing computes
activations again where they are needed. Activations should grow linearly with depth L, and as √L
with √L checkpoints; gradients should take what the model takes. Activations also grow with the
batch, and parameters do not: so the rule can only hold for some batch size. They say too that the
gradient of a ReLU is "very cheap to store". A trace holds what it records, so checkpoints should
not help it.

Method: L layers of w units with w inputs, on a batch of B, and the mean square of the output. Every
operation is looked at, and the storages of tensors that are alive are added up: after the forward
pass (activations), at the peak of ``loss.backward()`` with no gradients before it, and with
gradients there already to be added to; and after ``watch.trace(loss)``. What autograd saved is
counted once more by its own hooks. Checkpoints divide the layers into √L parts. The compiled
kernels of an influence pass make no tensors; so that, and the others for comparison, are measured
by the system too, in a process of their own.

Seeds: The seed says weights and inputs; counts do not depend on it, and one is enough.

Limits: Counts are of plain chains of equal layers and hold for PyTorch's allocator on a CPU; what
the system reports beside them varies by pages. What a trace keeps has in it a copy of each weight
of at most 65,536 elements, as all of these are, by which it notices that weights were changed; of
larger ones it copies 4,096 elements. Nothing is drawn, so there are no intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import ceil, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.experiments.harness.findings import (
    Cell,
    Findings,
    Plot,
    Result,
    Row,
    Seeds,
    Series,
    Table,
    Tick,
)
from gradtrace.experiments.harness.interleaved_timing import linear_fit
from gradtrace.experiments.harness.live_bytes import LiveBytes, tensors_alive
from gradtrace.experiments.harness.peak_memory import apart, beyond
from gradtrace.experiments.rivals import listed

QUICK = {
    "width": 32,
    "depths": [1, 4, 9, 16, 25],
    "batch": 32,
    "batches": [8, 32, 128],
    "functions": ["tanh", "relu", "gelu"],
    "system": [512, 128, 9],
}
FULL = {
    "width": 128,
    "depths": [1, 4, 9, 16, 25, 36, 49, 64, 81, 100, 144, 196, 256],
    "batch": 128,
    "batches": [1, 8, 32, 64, 128, 256, 512, 1024],
    "functions": ["tanh", "relu", "sigmoid", "gelu", "silu"],
    "system": [1024, 128, 36],
}
SEEDS = Seeds(quick=1, full=1)
TIMED = False
FIGURE = "memory-depth"
TABLE = "Additional memory over the model's, by batch; the slides say 2"

FUNCTIONS: Mapping[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
RULE = 2.0
"""Additional memory over that of the model, by the slides."""
NEAR = 0.25
"""How far, of the rule, a ratio may be from it to be called near."""
FLOAT = 4


# The network -------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Layers ``f(W·x + b)`` after each other, in so many parts that each is a checkpoint, or 0."""

    def __init__(self, depth: int, width: int, function: str, parts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), FUNCTIONS[function]()) for _ in range(depth)
        )
        self.size = ceil(depth / parts) if parts else 0

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return ceil(len(self.layers) / self.size) if self.size else 0

    def forward(self, x: Tensor) -> Tensor:  # (batch, width) -> (batch, width)
        """All layers; those of a part run again in the backward pass."""
        if not self.size:
            return self._run(x, 0, len(self.layers))
        for first in range(0, len(self.layers), self.size):
            last = min(first + self.size, len(self.layers))
            x = checkpoint(self._run, x, first, last, use_reentrant=False)
        return x

    def _run(self, x: Tensor, first: int, last: int) -> Tensor:
        for layer in self.layers[first:last]:
            x = layer(x)
        return x


def _built(cell: Mapping[str, Any]) -> tuple[Deep, Tensor]:
    parts = round(sqrt(cell["depth"])) if cell["checkpoint"] else 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cell["seed"])
        model = Deep(cell["depth"], cell["width"], cell["function"], parts)
        return model, torch.randn(cell["batch"], cell["width"])


def activations(cell: Mapping[str, Any], parts: int) -> int:
    """The bytes that the forward pass should leave: by hand.

    Of each layer, or of each checkpointed part, the output; of a layer with a GELU or SiLU, whose
    derivatives need their input, that too; and the loss.
    """
    layers = parts or cell["depth"]
    kept = 2 if cell["function"] in ("gelu", "silu") and not parts else 1
    return FLOAT * (kept * layers * int(cell["batch"]) * int(cell["width"]) + 1)


# What there is to measure ------------------------------------------------------------------------


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """Over depth, over batches, over functions, each once; and one of the system's count."""
    width, depths = settings["width"], settings["depths"]
    base = {"width": width, "batch": settings["batch"], "function": "tanh", "checkpoint": False}
    middle = depths[len(depths) // 2]
    found: list[Cell] = []
    for seed in range(seeds):
        same = {"kind": "bytes", "seed": seed, **base, "depth": middle}
        found += [{**same, "depth": d, "checkpoint": c} for d in depths for c in (False, True)]
        found += [{**same, "batch": batch} for batch in settings["batches"]]
        found += [{**same, "function": function} for function in settings["functions"]]
    wide, batch, deep = settings["system"]
    for checkpointed in (False, True):
        sizes = {"width": wide, "batch": batch, "depth": deep, "function": "tanh"}
        found.append({"kind": "system", "seed": 0, **sizes, "checkpoint": checkpointed})
    return [cell for n, cell in enumerate(found) if cell not in found[:n]]


def measure(cell: Cell, tick: Tick) -> Result:
    """Bytes by the ledger; or MiB by the system, too."""
    tick(f"{cell['depth']} layers{', checkpoints' if cell['checkpoint'] else ''}")
    found = _measured(cell)
    if cell["kind"] == "system":
        found["system"] = apart(f"{__name__}:peaks", cell)
    return found


def _measured(cell: Cell) -> Result:
    model, x = _built(cell)
    parameters = list(model.parameters())
    known = [x, *parameters]
    ledger = LiveBytes(known)
    with ledger:
        loss = _loss(model, x)
    kept = ledger.now()
    fresh = _peak(ledger, loss.backward)
    gradients = [p.grad for p in parameters if p.grad is not None]
    again = LiveBytes([*known, *gradients])
    with again:
        loss = _loss(model, x)
    added = _peak(again, loss.backward)
    size = _bytes(parameters)
    return {
        "parts": model.parts,
        "model": size,
        "gradients": _bytes(gradients),
        "activations": kept,
        "saved": _saved(model, x) if not cell["checkpoint"] else None,
        "held": ledger.held,
        "peak": fresh,
        "peak_added": added + _bytes(gradients),
        "difference": _difference(cell, gradients),
        "trace": _traced(model, x),
    }


def _loss(model: Deep, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _peak(ledger: LiveBytes, run: Callable[[], object]) -> int:
    """The most that is alive in a run, what was before it included."""
    ledger.peak = ledger.held = 0
    with ledger:
        run()
    return ledger.peak


def _saved(model: Deep, x: Tensor) -> int:
    """The bytes that autograd's own hooks see saved, without the model and its input."""
    given = {t.untyped_storage()._cdata for t in (x, *model.parameters())}
    seen: dict[int, Tensor] = {}  # holds them, so that no address is used again

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in given:
            seen[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _loss(model, x)
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


def _difference(cell: Cell, gradients: Sequence[Tensor]) -> float:
    """To half of two added passes of a model without checkpoints, over the largest element."""
    model, x = _built({**cell, "checkpoint": False})
    plain = torch.autograd.grad(_loss(model, x), list(model.parameters()))
    largest = max(float(g.abs().max()) for g in plain)
    return max(float((ours / 2 - g).abs().max()) for ours, g in zip(gradients, plain)) / largest


def _traced(model: Deep, x: Tensor) -> int:
    """What a trace adds to the activations."""
    model.zero_grad(set_to_none=True)
    ledger = LiveBytes([x, *model.parameters(), *tensors_alive()])
    with gt.watch(model) as watch, ledger:
        loss = _loss(model, x)
    watch.trace(loss)  # what is made once in a process
    ledger.note_all()  # states of random numbers, which checkpoints keep
    before = ledger.now()
    trace = watch.trace(loss)
    ledger.note_all()
    kept = ledger.now() - before
    del trace
    return kept


def peaks(cell: Cell) -> dict[str, float]:
    """In a new process: MiB after the forward pass, and beyond them in passes."""
    _passes(*_built({**cell, "depth": 2}))  # what is loaded, or set aside, at first
    return _passes(*_built(cell))


def _passes(model: Deep, x: Tensor) -> dict[str, float]:
    before, backward = beyond(_loss(model, x).backward)
    model.zero_grad(set_to_none=True)
    with gt.watch(model) as watch:
        loss = _loss(model, x)
    kept: list[Any] = []
    _, trace = beyond(lambda: kept.append(watch.trace(loss)))
    _, influence = beyond(lambda: kept[0].influence())
    return {
        "before": before,
        "backward": backward,
        "trace": trace,
        "influence": trace + influence,
    }


# What came out -----------------------------------------------------------------------------------


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in a sentence; counts of bytes, which no draw changes."""
    whole = "in" if facts["activations_linear"] else "not quite in"
    parted = "in" if facts["checkpointed_linear_in_parts"] else "not quite in"
    held = facts["rule_holds"]
    rule = f"batches of {listed([str(each) for each in held])}" if held else "no batch"
    return (
        f"Activations take memory {whole} proportion to depth, with checkpoints {parted} "
        f"proportion to its square root, and the gradient {_stays(facts['largest_difference'])}; "
        f"that training takes twice the model's memory holds for {rule} only."
    )


def _stays(difference: float) -> str:
    return "stays the same" if difference == 0 else f"changes by {difference:.1g} at most"


def conclude(rows: Sequence[Row]) -> Findings:
    """Bytes over depth, batch and function, beside the slides' rule."""
    ordered = sorted(rows, key=_key)
    counted = [row for row in ordered if row.cell["kind"] == "bytes"]
    groups = _groups(counted)
    facts = _facts(counted, groups)
    return Findings(
        sentence=_sentence(groups, facts),
        tables=(
            _depths(groups),
            _rules(groups["batch"]),
            _functions(groups["function"]),
            _system([row for row in ordered if row.cell["kind"] == "system"]),
        ),
        plots=_plots(groups),
        facts=facts,
    )


def _key(row: Row) -> tuple[Any, ...]:
    names = ("depth", "batch", "width", "function", "checkpoint", "seed")
    return tuple(row.cell[name] for name in names)


def _groups(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each sweep, by what is varied; of the first seed."""
    rows = [row for row in rows if row.cell["seed"] == 0]
    depths = [row for row in rows if row.cell["checkpoint"]]
    sizes = {(row.cell["width"], row.cell["batch"]) for row in depths}
    tanh = [row for row in rows if row.cell["function"] == "tanh" and not row.cell["checkpoint"]]
    at = [row for row in tanh if (row.cell["width"], row.cell["batch"]) in sizes]
    swept = sorted({row.cell["depth"] for row in depths})
    middle = swept[len(swept) // 2] if swept else None
    here = [row for row in rows if row.cell["depth"] == middle and not row.cell["checkpoint"]]
    return {
        "checkpoint": depths,
        "depth": at,
        "batch": [row for row in tanh if row.cell["depth"] == middle],
        "function": [row for row in here if (row.cell["width"], row.cell["batch"]) in sizes],
    }


def _facts(rows: list[Row], groups: Mapping[str, list[Row]]) -> dict[str, Any]:
    plain, parted = groups["depth"], groups["checkpoint"]
    return {
        "activations_by_hand": all(
            r.result["activations"] == activations(r.cell, r.result["parts"]) for r in rows
        ),
        "activations_linear": _linear(plain, "depth", "activations"),
        "checkpointed_linear_in_parts": _linear(parted, "parts", "activations"),
        "saved_are_activations": all(
            r.result["saved"] == r.result["activations"] - FLOAT
            for r in rows
            if r.result["saved"] is not None
        ),
        "gradients_are_the_models_size": all(
            r.result["gradients"] == r.result["model"] for r in rows
        ),
        "trace_linear": _linear(plain, "depth", "trace"),
        "rule_holds": [row.cell["batch"] for row in _near(groups["batch"])],
        "trace_with_checkpoints_is_the_same_in_all": all(
            _whole(a) == _whole(b) for a, b in zip(plain, parted)
        ),
        "largest_difference": max((r.result["difference"] for r in rows), default=0.0),
    }


def _whole(row: Row) -> int:
    """What activations and a trace take together."""
    return int(row.result["activations"] + row.result["trace"])


def _linear(rows: list[Row], over: str, what: str) -> bool:
    """Whether bytes lie on one line over depth or parts, to the last byte."""
    points = sorted({({**r.result, **r.cell}[over], r.result[what]) for r in rows})
    steps = [(c - a, d - b) for (a, b), (c, d) in pairwise(points)]
    return all(p * s == q * r for p, q in steps for r, s in steps)


def _ratio(row: Row, what: str) -> float:
    """Of bytes, over those of the model."""
    return float(row.result[what] / row.result["model"])


# In words ----------------------------------------------------------------------------------------


def _sentence(groups: Mapping[str, list[Row]], facts: Mapping[str, Any]) -> str:
    return " ".join(
        [
            _on_depth(groups, facts),
            _on_rule(groups["batch"]),
            _on_functions(groups["function"]),
            _on_trace(groups, facts),
        ]
    ).strip()


def _on_depth(groups: Mapping[str, list[Row]], facts: Mapping[str, Any]) -> str:
    if not groups["depth"] or not groups["checkpoint"]:
        return ""
    plain, parted = groups["depth"][-1], groups["checkpoint"][-1]
    exactly = "exactly" if facts["activations_linear"] else "not exactly"
    apart = "exactly" if facts["checkpointed_linear_in_parts"] else "not exactly"
    same = "as large as the model" if facts["gradients_are_the_models_size"] else "of another size"
    less = plain.result["activations"] / parted.result["activations"]
    held = plain.result["held"] / parted.result["held"]
    return (
        f"Activations are {exactly} linear in depth, and with √L checkpoints {apart} linear in √L: "
        f"at {plain.cell['depth']} layers {_size(plain.result['activations'])} become "
        f"{_size(parted.result['activations'])} ({less:.1f} times less), and the peak of the "
        f"backward pass without gradients is {held:.1f} times less. Gradients are {same}, and with "
        f"checkpoints {_same(facts['largest_difference'])}."
    )


def _same(difference: float) -> str:
    if difference == 0:
        return "the same to the last bit"
    return f"they differ by {difference:.1g} of the largest element at most"


def _near(rows: list[Row]) -> list[Row]:
    """Where the slides' rule holds."""
    return [row for row in rows if abs(_ratio(row, "peak_added") - RULE) <= NEAR * RULE]


def _on_rule(rows: list[Row]) -> str:
    if not rows:
        return ""
    ratios = [_ratio(row, "peak_added") for row in rows]
    near = _near(rows)
    text = (
        f"Training takes {min(ratios):.1f} to {max(ratios):.1f} times the model beyond it, over "
        f"batches of {rows[0].cell['batch']} to {rows[-1].cell['batch']} samples on "
        f"{rows[0].cell['width']} units; the slides' rule of {RULE:.0f} "
    )
    if not near:
        return f"{text}holds for none of them."
    if len(near) == len(rows):
        return f"{text}holds for all of them (within {NEAR:.0%})."
    held = ", ".join(str(row.cell["batch"]) for row in near)
    why = "since activations grow with the batch"
    return f"{text}holds (within {NEAR:.0%}) for {held} only, {why}."


def _on_functions(rows: list[Row]) -> str:
    taken = {row.cell["function"]: row.result["activations"] for row in rows}
    if "tanh" not in taken or "relu" not in taken:
        return ""
    ratio = taken["relu"] / taken["tanh"]
    text = f"A ReLU keeps {ratio:.2f} times what a tanh keeps"
    if ratio < 0.9:
        text += ", so it is cheaper to store, as the slides say"
    else:
        text += ", not less as the slides suggest: PyTorch keeps the output of either"
    more = {n: size / taken["tanh"] for n, size in taken.items() if size > taken["tanh"]}
    costly = [f"{name} keeps {ratio:.2f} times as much" for name, ratio in more.items()]
    return "; ".join([text, *costly]) + "."


def _on_trace(groups: Mapping[str, list[Row]], facts: Mapping[str, Any]) -> str:
    if len(groups["depth"]) < 2 or not groups["checkpoint"]:
        return ""
    plain, parted = groups["depth"][-1], groups["checkpoint"][-1]
    depths = [float(row.cell["depth"]) for row in groups["depth"]]
    fit = linear_fit(depths, [float(row.result["trace"]) for row in groups["depth"]])
    exactly = "exactly" if facts["trace_linear"] else f"by R² {fit.r2:.4f}"
    ratio = plain.result["trace"] / (plain.result["activations"] + plain.result["gradients"])
    text = (
        f"A trace keeps {_size(plain.result['trace'])} more at that depth, {ratio:.1f} times "
        f"activations and gradients, {exactly} linear in depth; "
    )
    if facts["trace_with_checkpoints_is_the_same_in_all"]:
        return (
            f"{text}checkpoints do not help it: it holds what they compute again, to the same sum."
        )
    return f"{text}with checkpoints all is {_whole(parted) / _whole(plain):.2f} times as large."


def _size(count: float) -> str:
    """Bytes in words.

    >>> _size(2048), _size(3 << 20)
    ('2.0 KiB', '3.0 MiB')
    """
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


# Tables and figures ------------------------------------------------------------------------------


COUNTED = {
    "model": "model",
    "gradients": "gradients",
    "activations": "activations",
    "held": "peak without gradients",
    "peak": "peak",
    "peak_added": "peak, gradients kept",
    "trace": "trace keeps",
}


def _depths(groups: Mapping[str, list[Row]]) -> Table:
    rows = sorted([*groups["depth"], *groups["checkpoint"]], key=_key)
    return Table(
        "Bytes over depth",
        ("layers", "checkpoints", *COUNTED.values()),
        tuple(
            (r.cell["depth"], r.result["parts"], *(r.result[what] for what in COUNTED))
            for r in rows
        ),
        "Peaks are of activations and all that a pass makes, without the model; what a "
        "trace keeps is beyond the activations.",
    )


def _rules(rows: list[Row]) -> Table:
    return Table(
        "Additional memory over the model's, by batch; the slides say 2",
        ("batch", "batch over width", "activations", "gradients", "peak", "peak, gradients kept"),
        tuple(
            (
                *(r.cell["batch"], r.cell["batch"] / r.cell["width"]),
                *(_ratio(r, w) for w in ("activations", "gradients", "peak", "peak_added")),
            )
            for r in rows
        ),
        "The backward pass frees activations while gradients come, so that its peak is less than "
        "both together, unless gradients of a step before are there to be added to. An optimiser's "
        "own state comes on top: one model for momentum, two for Adam.",
    )


def _functions(rows: list[Row]) -> Table:
    return Table(
        "Bytes of activations by function",
        ("function", "activations", "saved, by autograd's hooks"),
        tuple((r.cell["function"], r.result["activations"], r.result["saved"]) for r in rows),
    )


def _system(rows: list[Row]) -> Table:
    return Table(
        "Beyond model and activations, by the ledger and by the system, MiB",
        (
            *("layers", "checkpoints", "peak of backward", "by the system"),
            *("trace", "by the system ", "peak of influence, by the system"),
        ),
        tuple(
            (
                r.cell["depth"],
                r.result["parts"],
                (r.result["peak"] - r.result["activations"]) / 2**20,
                r.result["system"]["backward"],
                r.result["trace"] / 2**20,
                r.result["system"]["trace"],
                r.result["system"]["influence"],
            )
            for r in rows
        ),
        "Peaks by the system include what allocators keep, and buffers that are no tensors.",
    )


def _plots(groups: Mapping[str, list[Row]]) -> tuple[Plot, ...]:
    plots = []
    if groups["depth"]:
        plots.append(_depth_plot(groups))
    if groups["batch"]:
        plots.append(_batch_plot(groups["batch"]))
    return tuple(plots)


def _depth_plot(groups: Mapping[str, list[Row]]) -> Plot:
    series = [_over(groups["depth"], "gradients", "gradients", "line")]
    for group, suffix, style in (("depth", "", "line"), ("checkpoint", ", √L", "dashed")):
        for what in ("activations", "held", "trace"):
            label = f"{COUNTED[what]}{suffix}"
            like = COUNTED[what] if suffix else ""
            series.append(_over(groups[group], what, label, style, like))
    title = "Memory over depth, with and without √L checkpoints"
    return Plot("memory-depth", title, "layers", "MiB", tuple(series), log_x=True, log_y=True)


def _over(rows: list[Row], what: str, label: str, style: str, like: str = "") -> Series:
    x = [float(r.cell["depth"]) for r in rows]
    return Series(label, x, [r.result[what] / 2**20 for r in rows], style=style, like=like)


def _batch_plot(rows: list[Row]) -> Plot:
    batches = [float(r.cell["batch"]) for r in rows]
    series = [
        Series(COUNTED[what], batches, [_ratio(r, what) for r in rows])
        for what in ("activations", "peak", "peak_added")
    ]
    series.append(Series("the slides' rule", batches, [RULE] * len(rows), style="dashed"))
    title = "Additional memory of training over the model's"
    return Plot(
        "memory-batch", title, "batch", "times the model", tuple(series), log_x=True, log_y=True
    )
