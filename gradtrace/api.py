"""The public functions that take a loss; ``*_of`` take a watched model's names as well."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.backward import RECENT, first_nonfinite, gradient, seed_of
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.loss_checks import admit, isolated
from gradtrace.autodiff.names import Gradients, LazyGradients, NameTable
from gradtrace.autodiff.traversal import walk
from gradtrace.errors import GradtraceError, NonFinite, NotScalar, UnknownName, Unsupported
from gradtrace.graphs.graph import Graph, build
from gradtrace.ir import interpreter, memory
from gradtrace.ir.lazy_gradient import LazyGradient, sizes_of
from gradtrace.ir.optimise import simplified
from gradtrace.ir.program import Leaf, Program
from gradtrace.kernels import sync
from gradtrace.kernels.sync import fetch_scalars
from gradtrace.pytorch.plain_tensors import numbers_of
from gradtrace.recording.record import DENSE_MAX_ENTRIES, record
from gradtrace.semirings import SUM, Semiring
from gradtrace.trace import Trace
from gradtrace.tracing.paths import Paths

T = TypeVar("T")


def graph(loss: Tensor, *, names: Mapping[str, Tensor] | None = None) -> Graph:
    """The computation graph behind a loss: operators, edges, leaves, sizes.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> gradtrace.graph(x * x, names={"x": x})
    Graph(2 operators, 2 edges, 1 leaves)
    """
    return graph_of(loss, NameTable.of(names), RECENT)


def backward(
    loss: Tensor,
    semiring: Semiring = SUM,
    *,
    names: Mapping[str, Tensor] | None = None,
    leaves: Iterable[str] | None = None,
    cotangent: Tensor | None = None,
    schedule: str = "kahn",
    nonfinite: str = "raise",
) -> Gradients:
    """Back-propagate in a semiring: ``{name: value}`` for every leaf of the loss.

    ``value[i] = ⊕ over paths from i to the loss of ⊗ of lift(local derivatives)``; in ``SUM``, the
    default, that is the gradient as ``torch.autograd.grad`` gives it. Nothing is written on
    ``.grad`` and the graph can be used again.

    ``names`` names leaves (others are leaf0, leaf1, ...), ``leaves`` restricts the result,
    ``cotangent`` weights the elements of a loss that has several, ``schedule`` is kahn, creation or
    recursive, and ``nonfinite="allow"`` continues where a gradient is NaN or infinite.

    In a semiring other than ``SUM``, an operator that connects two elements by several routes and
    is too large to merge them makes values inexact; then a warning is issued, and ``notes`` of the
    result say so.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> gradtrace.backward(x * x, names={"x": x})
    {'x': tensor(6.)}
    """
    table = NameTable.of(names)
    return backward_of(
        loss,
        semiring,
        table,
        RECENT,
        leaves=leaves,
        cotangent=cotangent,
        schedule=schedule,
        nonfinite=nonfinite,
    )


def program(
    loss: Tensor,
    *,
    names: Mapping[str, Tensor] | None = None,
    cotangent: Tensor | None = None,
    schedule: str = "kahn",
    dense_limit: int = DENSE_MAX_ENTRIES,
) -> Program:
    """The backward pass of a loss as data: steps of structured linear maps.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> gradtrace.program(x.tanh())
    Program(1 operators, 1 steps, 1 leaves)
    """
    return program_of(
        loss,
        NameTable.of(names),
        RECENT,
        cotangent=cotangent,
        schedule=schedule,
        dense_limit=dense_limit,
    )


def trace(
    loss: Tensor,
    *,
    rule: str = "greedy",
    granularity: str = "scalar",
    names: Mapping[str, Tensor] | None = None,
    nonfinite: str = "raise",
    dense_limit: int = DENSE_MAX_ENTRIES,
) -> Trace:
    """Trace the gradient of a loss back to its parameters: along which paths did most of it come?

    ``rule="greedy"`` (Equation 1.7 of the chapter) follows at every element the largest
    ``|weight · gradient|``; ``"viterbi"`` finds the path of greatest ``|product|``. With
    ``granularity="operator"`` whole tensors are followed instead of their elements: from every
    tensor to the user that contributed the most gradient. A vector of losses is traced as separate
    pairs of input and target, one for each loss.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> found = gradtrace.trace(x.tanh() + x * 0.5, names={"x": x})
    >>> found.path("x").operators
    ['MulBackward0', 'AddBackward0']
    """
    return trace_of(
        loss,
        NameTable.of(names),
        RECENT,
        {},
        rule=rule,
        granularity=granularity,
        nonfinite=nonfinite,
        dense_limit=dense_limit,
    )


def enumerate_paths(
    loss: Tensor,
    *,
    names: Mapping[str, Tensor] | None = None,
    limit: int = 10_000,
    zeros: bool = False,
) -> Paths:
    """All paths of a small graph from every leaf element to the loss, with their weights.

    The sum of the weights of an element's paths is its gradient: back-propagation without dynamic
    programming, for teaching and for checks. Paths of weight 0 are left out unless ``zeros``.
    Raises if there are more than ``limit`` paths; their number grows exponentially.

    >>> import torch, gradtrace
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> paths = gradtrace.enumerate_paths(x * x, names={"x": x})
    >>> [path.weight for path in paths], paths.total()
    ([3.0, 3.0], 6.0)
    """
    return trace_of(loss, NameTable.of(names), RECENT, {}).enumerate(limit, zeros)


def graph_of(loss: Tensor, table: NameTable, watch: HookWatch) -> Graph:
    """``graph`` with a name table."""
    return build(loss, table, watch)


@isolated()
def backward_of(
    loss: Tensor,
    semiring: Semiring,
    table: NameTable,
    watch: HookWatch,
    *,
    leaves: Iterable[str] | None = None,
    cotangent: Tensor | None = None,
    schedule: str = "kahn",
    nonfinite: str = "raise",
) -> Gradients:
    """``backward`` with a name table."""
    _check(semiring, cotangent, nonfinite)
    if isinstance(leaves, str):
        raise UnknownName(f"leaves is a list of names: leaves=[{leaves!r}]")
    admit(loss, table, elements=semiring is not SUM)
    seed = seed_of(loss, cotangent)
    notes: tuple[str, ...] = ()
    if semiring is SUM:
        found = gradient(loss, seed, table, watch, schedule)
    else:
        memory.see_recording(loss)
        recorded = simplified(record(loss, seed, table, watch, schedule, bare=True))
        found = list(interpreter.run(recorded, semiring).items())
        notes = tuple(dict.fromkeys(recorded.notes()))
    RECENT.refresh()
    named = Gradients(*_named(found, table, loss), notes)
    if leaves is not None:
        named = Gradients({name: named[name] for name in leaves}, notes=notes)
    if notes:
        warnings.warn(f"values of {semiring.name} are not exact. {'; '.join(notes)}", stacklevel=4)
    if semiring is SUM and nonfinite == "raise":
        _refuse_nonfinite(loss, seed, table, watch, named)
    return named


@isolated()
def trace_of(
    loss: Tensor,
    table: NameTable,
    watch: HookWatch,
    modules: Mapping[str, str],
    *,
    rule: str = "greedy",
    granularity: str = "scalar",
    nonfinite: str = "raise",
    dense_limit: int = DENSE_MAX_ENTRIES,
) -> Trace:
    """``trace`` with a name table, and the classes of a model's modules."""
    _check(SUM, None, nonfinite)
    _one_of("rule", rule, ("greedy", "viterbi"))
    _one_of("granularity", granularity, ("scalar", "operator"))
    admit(loss, table)
    if loss.dim() > 1:
        raise NotScalar(
            f"the loss has shape {tuple(loss.shape)}; trace one loss, or a vector with a loss for "
            "each sample, such as losses.flatten(1).mean(1)"
        )
    if not loss.numel():
        raise NotScalar("the loss is an empty vector; there is nothing to trace")
    seed = torch.ones_like(loss, memory_format=torch.preserve_format).detach()
    opaque, keep = granularity == "operator", kept_gradient_bytes(table, loss.device)
    memory.see_recording(loss, keep)
    recorded = simplified(record(loss, seed, table, watch, "kahn", dense_limit, opaque, keep))
    RECENT.refresh()
    found = [(leaf.tensor, leaf) for leaf in recorded.leaves]
    named, others = _named(found, table, loss)
    gradients = LazyGradients({name: leaf.compute for name, leaf in named.items()}, others)
    if nonfinite == "raise":
        doubtful = {name: gradients[name] for name in _doubtful(named)}
        _refuse_nonfinite(loss, seed, table, watch, doubtful)
    names = {leaf.value: name for name, leaf in named.items()}
    aliases: dict[str, tuple[str, ...]] = {}
    for other, name in others.items():
        aliases[name] = (*aliases.get(name, ()), other)
    return Trace(recorded, gradients, rule, granularity, loss.numel(), modules, names, aliases)


def kept_gradient_bytes(table: NameTable, device: torch.device) -> int:
    """How many bytes of gradients a trace keeps: half the size of its leaves. A GPU's memory
    usually has one user, so there a quarter of the free memory, if that is more.
    """
    least = max(KEPT_MIN_BYTES, sum(x.numel() * x.itemsize for x, _ in table.leaves.values()) // 2)
    free = memory.available(device) if device.type == "cuda" else None
    return least if free is None else max(min(least, free // 2), free // 4)


KEPT_MIN_BYTES = 1 << 24
"""The least number of bytes of gradients that a trace may keep."""


def _one_of(word: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UnknownName(f"{word} is {' or '.join(map(repr, allowed))}, not {value!r}")


@isolated()
def program_of(
    loss: Tensor,
    table: NameTable,
    watch: HookWatch,
    *,
    cotangent: Tensor | None = None,
    schedule: str = "kahn",
    dense_limit: int = DENSE_MAX_ENTRIES,
) -> Program:
    """``program`` with a name table."""
    _check(SUM, cotangent, "raise")
    admit(loss, table)
    recorded = record(loss, seed_of(loss, cotangent), table, watch, schedule, dense_limit)
    recorded = simplified(recorded)
    RECENT.refresh()
    return recorded


def _named(
    found: Sequence[tuple[Tensor, T]], table: NameTable, loss: Tensor
) -> tuple[dict[str, T], dict[str, str]]:
    """Results by leaf name, in the order of the name table, and ``{alias: name}`` for leaves with
    several names. Raises for complex leaves.
    """
    grads = {id(leaf): grad for leaf, grad in found}
    labels = _labels(found, table, loss)
    for leaf, _ in found:
        if leaf.is_complex():
            raise Unsupported(
                f"leaf {labels[id(leaf)]} is complex; a path needs real numbers. Use its real and "
                "imaginary parts as leaves: torch.view_as_complex(parts)"
            )
    named = [(key, names) for key, (_, names) in table.leaves.items() if key in grads]
    aliases = {other: labels[key] for key, names in named for other in names[1:]}
    return {name: grads[key] for key, name in labels.items() if key in grads}, aliases


def _labels(found: Sequence[tuple[Tensor, T]], table: NameTable, loss: Tensor) -> dict[int, str]:
    """The name of each leaf that has a gradient, by the leaf's id, in the order of the table."""
    there = {id(leaf) for leaf, _ in found}
    named = [(key, names[0]) for key, (_, names) in table.leaves.items() if key in there]
    if len({name for _, name in named}) == len(found):
        return dict(named)
    # Leaves without a gradient are numbered too, as in the graph.
    return {id(leaf): name for leaf, name in table.label(_leaves(loss)).items()}


def _leaves(loss: Tensor) -> list[Tensor]:
    """The leaves of a loss in the order of its graph."""
    found: list[Tensor] = []

    def visit(node: nodes.Node, _: nodes.Edges) -> None:
        if type(node) is nodes.ACCUMULATE:
            found.append(node.variable)

    walk(loss, visit)
    return found


def _check(semiring: Semiring, cotangent: Tensor | None, nonfinite: str) -> None:
    """Validate arguments that would otherwise fail deep inside."""
    if not isinstance(semiring, Semiring):
        raise GradtraceError(
            f"{semiring!r} is no semiring; pass one of gradtrace.semirings, such as "
            "gradtrace.semirings.MAX, or a subclass of gradtrace.semirings.Semiring"
        )
    if cotangent is not None and not isinstance(cotangent, Tensor):
        raise NotScalar(
            f"the cotangent is a {type(cotangent).__name__}; pass a tensor of the loss's shape"
        )
    if nonfinite not in ("raise", "allow"):
        raise UnknownName(f"nonfinite is 'raise' or 'allow', not {nonfinite!r}")


def _doubtful(named: Mapping[str, Leaf]) -> list[str]:
    """The leaves whose gradients must be computed to know whether they are finite."""
    lazy = {n: leaf.given for n, leaf in named.items() if isinstance(leaf.given, LazyGradient)}
    sizes = sizes_of(lazy.values())
    sure = {name for name, sum_ in lazy.items() if sum_.surely_finite(sizes)}
    return [name for name in named if name not in sure]


def _refuse_nonfinite(
    loss: Tensor, seed: Tensor, table: NameTable, watch: HookWatch, named: Mapping[str, Tensor]
) -> None:
    if _sums_are_finite(named.values()):
        return
    bad = [
        name
        for name, grad in named.items()
        if not all(bool(torch.isfinite(part).all()) for part in numbers_of(grad))
    ]
    if bad:
        where = first_nonfinite(loss, seed, table, watch)
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise NonFinite(
            f"the gradient of {bad[0]}{more} is not finite; NaN or infinity first appears at "
            f"{where}. Look at the values that go into it, or pass nonfinite='allow'"
        )


def _sums_are_finite(grads: Iterable[Tensor]) -> bool:
    """Whether all gradients are certainly finite, by their sums; False also if a sum overflows.

    Small gradients of one shape are concatenated and summed in one call, to save overhead. On a GPU
    one call per dtype computes the largest magnitude of each.
    """
    by_shape: dict[tuple[object, ...], list[Tensor]] = {}
    on_gpu: dict[tuple[object, ...], list[Tensor]] = {}
    sums: list[Tensor] = []
    for grad in chain.from_iterable(map(numbers_of, grads)):
        if grad.itemsize == 1:  # PyTorch cannot sum float8
            grad = grad.float()
        if sync.would_sync(grad) and grad.numel():
            on_gpu.setdefault((grad.dtype, grad.device), []).append(grad)
        elif grad.numel() < CONCAT_MAX_ELEMENTS:
            by_shape.setdefault((grad.dtype, grad.device, grad.shape), []).append(grad)
        else:
            sums.append(grad.sum())
    for some in on_gpu.values():
        sums.extend(torch._foreach_norm(some, math.inf))
    for some in by_shape.values():
        sums.append((torch.cat(some) if some[0].dim() else torch.stack(some)).sum())
    return all(map(math.isfinite, fetch_scalars(sums)))


CONCAT_MAX_ELEMENTS = 1 << 12
"""Gradients of fewer elements are concatenated before they are summed."""
