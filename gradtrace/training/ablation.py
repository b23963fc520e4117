"""``ablate``: run a model without some of its parts, to see whether they matter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import nan
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gradtrace.autodiff import labels
from gradtrace.components.module_parts import expert_lists, head_count, layer_lists
from gradtrace.errors import GradtraceError, NotScalar, UnknownName, did_you_mean, listed
from gradtrace.pytorch.global_switches import UNFUSED, eager
from gradtrace.pytorch.wrapped_modules import named_modules
from gradtrace.table import Column, Table
from gradtrace.training.state import seed_all, undisturbed

How: TypeAlias = str | Tensor | float
KINDS = ("modules", "layers", "heads", "experts", "labels")
INPUTS = {"q", "k", "v", "query", "key", "value", "q_proj", "k_proj", "v_proj"}
OUTPUTS = {"o", "out", "wo", "to_out", "o_proj", "out_proj", "c_proj", "proj", "dense", "out_lin"}
"""What attention modules call the projections to their heads, and of what their heads have made."""

COLUMNS = (Column("component"), *(Column(name, "number") for name in ("rise", "low", "high")))
DRAWS = 2_000  # of the bootstrap


class Part(NamedTuple):
    """A module, one of its heads, or (without a module) slices that are labelled so."""

    name: str
    module: nn.Module | None = None
    head: int = -1


@dataclass
class Met:
    """The parts that were called, and the labels that came up."""

    called: set[Part] = field(default_factory=set)
    labels: dict[str, None] = field(default_factory=dict)


class ablate:
    """Run a model without some of its parts: ``with gt.ablate(model, "lstm"): loss = ...``.

    Inside, the outputs of these parts become ``how``: 0; their mean over the samples (dimension 0);
    or a tensor or number, broadcast. No gradient comes through them. Of a head, and of slices that
    ``gradtrace.label`` named, that part of the tensor is replaced (heads: before their output
    projection). The modules still run. ``with`` gives the names of the components; one that was
    never called inside is an error at the end. Blocks under ``torch.utils.checkpoint`` run again in
    the backward pass: call that inside, too.

    Args:
        model: The model; afterwards it is as before.
        by: Components, as for ``Trace.influence``: ``"modules"``, ``"layers"``, ``"heads"``,
            ``"experts"``, ``"labels"``, a name or pattern (``"encoder.*"``, ``"h.0.attn head 1"``),
            a class (``nn.Linear``), a list of these, or ``{group: names}``.
        how: ``"zero"``, ``"mean"``, a tensor or a number.

    >>> model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    >>> with ablate(model, "0") as names:
    ...     print(names, model(torch.ones(2, 3)).sum())
    ('0',) tensor(0.)
    """

    def __init__(self, model: nn.Module, by: Any, how: How = "zero") -> None:
        if not isinstance(model, nn.Module):
            raise GradtraceError(f"ablate takes a torch.nn.Module, not a {type(model).__name__}")
        if isinstance(how, str) and how not in ("zero", "mean"):
            raise GradtraceError(f"how is 'zero', 'mean', a tensor or a number, not {how!r}")
        self.model, self.by, self.how, self.known = model, by, how, _known(model)
        self.components = _components(self.known, by)
        timed = [n for n, m in named_modules(model) if getattr(m, "batch_first", None) is False]
        if timed and isinstance(how, str) and how == "mean":
            raise GradtraceError(
                f"how='mean' is over dimension 0, which is time in {timed[0] or 'the model'!r} "
                "(batch_first=False), and not samples: use 'zero' or a tensor"
            )
        self._open = ExitStack()

    def __enter__(self) -> tuple[str, ...]:
        parts = [part for some in self.components.values() for part in some]
        self._met = self._open.enter_context(_without(parts, self.how, Met()))
        return tuple(self.components)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open.close()
        if kind is None:
            self._check(self.components, self._met)

    def effects(
        self, loss_fn: Callable[[nn.Module, Any], Tensor], loader: Iterable[Any], *, seed: int = 0
    ) -> Table:
        """By how much the loss rises without each component, taken away by itself.

        Args:
            loss_fn: ``loss_fn(model, batch)`` returns one loss. With and without a component it
                draws the same random numbers; buffers, modes and random generators are put back.
            loader: Batches.
            seed: Of these random numbers, and of the bootstrap.

        Returns:
            A row for each component: the mean over batches, and its 95% interval (bootstrap).
        """
        rises, wholes, met, found = dict[str, list[float]](), list[float](), Met(), self.components
        for number, batch in enumerate(loader):
            wholes.append(self._loss(loss_fn, batch, seed + number, (), met))
            if self.by == "labels":
                found = {name: (Part(name),) for name in met.labels}
            for name, parts in found.items():
                loss = self._loss(loss_fn, batch, seed + number, parts, met)
                rises.setdefault(name, []).append(loss - wholes[-1])
        if not wholes:
            raise GradtraceError("the loader gave no batch, so there is nothing to compare")
        unmet = [name for name, parts in found.items() if met.called.isdisjoint(parts)]
        if self.by not in KINDS or len(unmet) == len(found):
            self._check(found, met)
        rows: Any = [(n, *_interval(each, seed)) for n, each in rises.items() if n not in unmet]
        notes = (f"never called: {listed(unmet)}",) if unmet else ()
        how = self.how if isinstance(self.how, str) else "value"
        about = {"how": how, "batches": len(wholes), "loss": sum(wholes) / len(wholes)}
        return Table("Rise of the loss without it", COLUMNS, tuple(rows), notes, about).sort("rise")

    def _loss(self, loss_fn: Any, batch: Any, seed: int, parts: Iterable[Part], met: Met) -> float:
        with undisturbed(self.model), torch.no_grad(), _without(parts, self.how, met):
            seed_all(seed)
            loss = loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise NotScalar("loss_fn must return one number, as by .mean()")
        return float(loss)

    def _check(self, components: Mapping[str, Iterable[Part]], met: Met) -> None:
        """Raise an error if a component was never called, or there is none."""
        for name, parts in components.items():
            if met.called.isdisjoint(parts) and all(part.module is None for part in parts):
                hint = did_you_mean(name, [*self.known, *met.labels], show=repr)
                raise UnknownName(f"no module, head or label {name!r} came up inside ablate{hint}")
            if met.called.isdisjoint(parts):
                raise GradtraceError(
                    f"{name!r} was never called inside ablate, so nothing was ablated: what is "
                    "around it skips it, or uses its parameters itself; ablate what is around it"
                )
        if not components:
            raise GradtraceError(f"no {self.by} are known in this model: name modules instead")


# Components --------------------------------------------------------------------------------------


def _known(model: nn.Module) -> dict[str, Part]:
    """Modules by name, and the heads of the innermost modules that have some."""
    modules = {name: module for name, module in named_modules(model) if name}
    heads = dict[str, Part]()
    for name, module in reversed(modules.items()):
        count, inside = head_count(module), any(head.startswith(f"{name}.") for head in heads)
        if count and not inside and _joined(module) is not None:
            heads = {f"{name} head {n}": Part(name, module, n) for n in range(count)} | heads
    return {name: Part(name, module) for name, module in modules.items()} | heads


def _joined(attention: nn.Module) -> nn.Module | None:
    """The projection that is given what the heads have made; the module itself if it returns that;
    None if this is not known.
    """
    inside = [(n.split("."), m) for n, m in attention.named_modules() if hasattr(m, "weight")]
    outputs = [module for name, module in inside if OUTPUTS.intersection(name)]
    return outputs[-1] if outputs else attention if all(INPUTS & {*n} for n, _ in inside) else None


def _components(known: dict[str, Part], by: Any) -> dict[str, tuple[Part, ...]]:
    """The parts that each component is made of."""
    if isinstance(by, Mapping):
        return {str(name): _found(known, parts) for name, parts in by.items()}
    if isinstance(by, str) and by in KINDS:
        return {name: _found(known, name) for name in _kind(known, by)}
    found = dict[str, tuple[Part, ...]]()
    for each in by if isinstance(by, Iterable) and not isinstance(by, (str, nn.Module)) else [by]:
        if isinstance(each, str) and each in KINDS and each not in known:
            found |= _components(known, each)
        else:
            found[each.__name__ if isinstance(each, type) else str(each)] = _found(known, each)
    return found


def _kind(known: dict[str, Part], kind: str) -> list[str]:
    modules = {n: p.module for n, p in known.items() if p.module is not None and p.head < 0}
    if kind == "labels":
        return ["label:*"]
    if kind in ("heads", "modules"):
        return [name for name, part in known.items() if (part.head >= 0) == (kind == "heads")]
    lists = expert_lists(modules) if kind == "experts" else layer_lists(modules)
    lists = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    return [f"{name}.{key}" for name in lists for key in modules[name]._modules]


def _found(known: dict[str, Part], wanted: Any) -> tuple[Part, ...]:
    """What one name, pattern or class refers to, or several; else slices of that label."""
    if isinstance(wanted, type) and issubclass(wanted, nn.Module):
        hits = [p for p in known.values() if p.head < 0 and isinstance(p.module, wanted)]
        if not hits:
            raise UnknownName(f"no module of class {wanted.__name__} in this model")
        return tuple(hits)
    if isinstance(wanted, str):
        hits = [p for n, p in known.items() if n == wanted or fnmatchcase(n, wanted)]
        if not (hits or ":" in wanted or " " in wanted) and get_close_matches(wanted, known):
            hint = did_you_mean(wanted, known, show=repr)
            raise UnknownName(f"no module {wanted!r} in this model{hint}")
        return tuple(_running(known, hits)) or (Part(wanted.removeprefix("label:")),)
    if isinstance(wanted, (list, tuple)):
        return tuple(part for each in wanted for part in _found(known, each))
    raise GradtraceError(f"by= takes names, patterns or classes of modules, not {wanted!r}")


def _running(known: dict[str, Part], parts: Iterable[Part]) -> Iterator[Part]:
    """In place of lists of modules, which are never called themselves, what they hold."""
    for part in parts:
        if type(part.module).forward is nn.Module.forward:  # type: ignore[union-attr]
            inner = (known[f"{part.name}.{key}"] for key in part.module._modules)  # type: ignore[union-attr]
            yield from _running(known, inner)
        else:
            yield part


# Replacing ---------------------------------------------------------------------------------------


@contextmanager
def _without(parts: Iterable[Part], how: How, met: Met) -> Iterator[Met]:
    """Within, these parts are replaced."""
    parts = tuple(parts)

    def cut(tensor: Tensor, dim: int, names: labels.Names) -> Tensor:
        met.labels.update(dict.fromkeys(name for name in names if name is not None))
        for part in parts:
            at = [n for n, name in enumerate(names) if name and fnmatchcase(name, part.name)]
            if part.module is None and at:
                met.called.add(part)
                tensor = _cut(tensor, dim, at, how, part.name)
        return tensor

    with ExitStack() as stack:
        stack.enter_context(eager())  # hooks inside compiled modules would not run
        stack.enter_context(UNFUSED())
        for part in parts:
            if part.module is not None:
                for handle in _hooked(part, part.module, how, met):
                    stack.callback(handle.remove)
        labels.CUTS.append(cut)
        stack.callback(labels.CUTS.remove, cut)
        yield met


def _hooked(part: Part, module: nn.Module, how: How, met: Met) -> list[Any]:
    """Handles of the hooks that replace what a module returns, or one of its heads."""
    joined = module if part.head < 0 else _joined(module)
    if part.head >= 0 and isinstance(module, nn.MultiheadAttention):
        return _masked(part, module, how, met)

    def head(x: Tensor) -> Tensor:
        size = x.shape[-1] // (head_count(module) or 1)
        return _cut(x, x.dim() - 1, range(part.head * size, (part.head + 1) * size), how, part.name)

    def given(_: nn.Module, args: Any) -> Any:
        met.called.add(part)
        return (head(args[0]), *args[1:])

    def returned(_: nn.Module, args: Any, out: Any) -> Any:
        met.called.add(part)
        if part.head < 0:
            return _replaced(out, isinstance(module, nn.RNNBase), how, part.name)
        return (head(out[0]), *out[1:]) if isinstance(out, tuple) else head(out)

    if joined is None or joined is module:
        return [module.register_forward_hook(returned)]
    return [joined.register_forward_pre_hook(given)]


def _masked(part: Part, module: nn.MultiheadAttention, how: How, met: Met) -> list[Any]:
    """It uses the weight of its output projection itself, of which a head's columns become 0."""
    if not isinstance(how, str) or how != "zero":
        raise GradtraceError(f"{part.name!r}, of nn.MultiheadAttention, can only become 'zero'")
    table: dict[str, Any] = module.out_proj._parameters
    own = list[Tensor]()

    def mask(*_: Any) -> None:
        met.called.add(part)
        own.append(table["weight"])
        columns = range(part.head * module.head_dim, (part.head + 1) * module.head_dim)
        table["weight"] = _cut(own[-1], 1, columns, how, part.name)

    def unmask(*_: Any) -> None:
        table["weight"] = own.pop()

    after = module.register_forward_hook(unmask, always_call=True)
    return [module.register_forward_pre_hook(mask), after]


def _replaced(out: Any, recurrent: bool, how: How, what: str) -> Any:
    """What a module returned, with other floating tensors; states have layers first."""
    dims = list[int]()

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
            return x
        dims.append(1 if recurrent and dims else 0)
        return _value(x, how, what, dims[-1], 3 if recurrent else 1)

    changed = tree_map(change, out)
    if not dims:
        kind = type(out).__name__
        raise GradtraceError(f"{what!r} returned a {kind} in which no floating tensor was found")
    return changed


def _cut(x: Tensor, dim: int, at: Iterable[int], how: How, what: str) -> Tensor:
    """The tensor with some slices replaced."""
    if isinstance(how, str) and how == "mean" and dim == 0:
        raise GradtraceError(f"slices of {what!r} lie along dimension 0, where samples would be")
    index = torch.tensor([*at], device=x.device)
    return x.index_copy(dim, index, _value(x.index_select(dim, index), how, what))


def _value(x: Tensor, how: How, what: str, dim: int = 0, least: int = 1) -> Tensor:
    """What takes the place of a tensor."""
    if not isinstance(how, str):
        value = torch.as_tensor(how).detach().to(x)
        try:
            return value.expand_as(x).clone()
        except RuntimeError:
            shapes = f"{tuple(value.shape)} does not broadcast to {tuple(x.shape)}"
            raise GradtraceError(f"the value for {what!r}: {shapes}") from None
    if how == "zero":
        return torch.zeros_like(x.detach())
    if x.dim() < least or x.shape[dim] == 1:
        raise GradtraceError(
            f"{what!r} has one sample here (shape {tuple(x.shape)}), whose mean is itself, so "
            "nothing would be ablated: use larger batches, 'zero' or a tensor"
        )
    return x.detach().mean(dim, keepdim=True).expand_as(x).clone()


def _interval(rises: list[float], seed: int) -> tuple[float, float, float]:
    """The mean, and its 95% interval by bootstrap; of one batch there is none."""
    found = np.array(rises)
    if len(found) < 2:
        return float(found.mean()), nan, nan
    draws = np.random.default_rng(seed).integers(len(found), size=(DRAWS, len(found)))
    low, high = np.quantile(found[draws].mean(1), [0.025, 0.975])
    return float(found.mean()), float(low), float(high)
