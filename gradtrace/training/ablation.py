"""``ablate``: run a model without some of its parts, to see whether they matter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import nan
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from gradtrace.autodiff import labels
from gradtrace.components.module_parts import head_count
from gradtrace.errors import GradtraceError, NotScalar, UnknownName, did_you_mean, listed
from gradtrace.pytorch.global_switches import UNFUSED, eager
from gradtrace.pytorch.wrapped_modules import named_modules, user_class
from gradtrace.table import Column, Table
from gradtrace.training.state import seed_all, undisturbed

How: TypeAlias = str | Tensor | float
Modules: TypeAlias = dict[str, nn.Module]
KINDS = ("modules", "layers", "heads", "experts", "labels")
INPUTS = {"q", "k", "v", "query", "key", "value", "q_proj", "k_proj", "v_proj"}
OUTPUTS = {"o", "out", "wo", "to_out", "o_proj", "out_proj", "c_proj", "proj", "dense", "out_lin"}
"""What attention modules call the projections to their heads, and of what their heads have made."""

COLUMNS = (Column("component"), *(Column(name, "number") for name in ("rise", "low", "high")))
DRAWS = 2_000
"""Of the bootstrap."""


class Part(NamedTuple):
    """A module, one of its heads, or (without a module) the slices of labels of this name."""

    name: str
    module: nn.Module | None = None
    head: int = -1


class ablate:
    """Run a model without some of its parts: ``with gt.ablate(model, "lstm"): loss = ...``.

    Inside, the outputs of these parts become ``how``: 0; their mean over the samples (dimension 0);
    or a tensor or number, broadcast. No gradient comes through them. Of a head, and of slices that
    ``gradtrace.label`` named, that part of the tensor is replaced (heads: before their output
    projection). The modules still run. ``with`` gives the names of the components; where the model
    never called one of them inside, the end is an error. Blocks under ``torch.utils.checkpoint``
    run again in the backward pass: call that inside, too.

    Args:
        model: The model; afterwards it is as before.
        by: Components, as for ``Trace.influence``: ``"modules"``, ``"layers"``, ``"heads"``,
            ``"experts"``, ``"labels"``, a name or pattern (``"encoder.*"``, ``"h.0.attn head 1"``),
            a class (``nn.Linear``), a list of these, or ``{group: names}``.
        how: ``"zero"``, ``"mean"``, a tensor or a number.

    >>> import torch
    >>> from torch import nn
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
        self.model, self.by, self.how = model, by, how
        self.known = _known(model)
        self.components = _components(self.known, by)
        timed = [n for n, m in named_modules(model) if getattr(m, "batch_first", None) is False]
        if timed and isinstance(how, str) and how == "mean":
            raise GradtraceError(
                f"{timed[0] or 'the model'!r} has time first (batch_first=False), so dimension 0 "
                "is not samples everywhere, over which how='mean' averages: use 'zero' or a tensor"
            )
        self._open = contextlib.ExitStack()

    def __enter__(self) -> tuple[str, ...]:
        parts = [part for some in self.components.values() for part in some]
        self._met = self._open.enter_context(_without(parts, self.how))
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
        rises, wholes, met = dict[str, list[float]](), list[float](), _Met()
        components = self.components
        for number, batch in enumerate(loader):

            def loss(parts: Iterable[Part]) -> float:
                with undisturbed(self.model), torch.no_grad(), _without(parts, self.how, met):
                    seed_all(seed + number)  # noqa: B023
                    found = loss_fn(self.model, batch)  # noqa: B023
                if not isinstance(found, Tensor) or found.numel() != 1:
                    raise NotScalar(f"batch {number}: loss_fn must return one number")  # noqa: B023
                return float(found)

            wholes.append(loss(()))
            if self.by == "labels":
                components = {name: (Part(name),) for name in met.labels}
            for name, parts in components.items():
                rises.setdefault(name, []).append(loss(parts) - wholes[-1])
        if not wholes:
            raise GradtraceError("the loader gave no batch, so there is nothing to compare")
        unmet = [n for n, parts in components.items() if met.called.isdisjoint(parts)]
        if self.by not in KINDS or len(unmet) == len(components):
            self._check(components, met)
        rows: Any = [(n, *_interval(found, seed)) for n, found in rises.items() if n not in unmet]
        notes = (f"never called: {listed(unmet)}",) if unmet else ()
        how = self.how if isinstance(self.how, str) else "value"
        about = {"how": how, "batches": len(wholes), "loss": sum(wholes) / len(wholes)}
        return Table("Rise of the loss without it", COLUMNS, tuple(rows), notes, about).sort("rise")

    def _check(self, components: Mapping[str, Iterable[Part]], met: _Met) -> None:
        """Raise an error if a component was never called."""
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
            raise GradtraceError(f"there are no {self.by} in this model, so nothing is ablated")


# Components --------------------------------------------------------------------------------------


def _known(model: nn.Module) -> dict[str, Part]:
    """Modules by name, and the heads of attention modules, innermost first."""
    modules = {name: module for name, module in named_modules(model) if name}
    heads = dict[str, Part]()
    for name in sorted(modules, key=lambda name: -name.count(".")):
        count = head_count(modules[name])
        inner = any(part.name.startswith(f"{name}.") for part in heads.values())
        if count and not inner and _joined(modules[name]) is not None:
            some = (Part(name, modules[name], head) for head in range(count))
            heads |= {f"{name} head {part.head}": part for part in some}
    order = sorted(heads, key=lambda head: [*modules].index(heads[head].name))
    return {n: Part(n, m) for n, m in modules.items()} | {head: heads[head] for head in order}


def _components(known: dict[str, Part], by: Any) -> dict[str, tuple[Part, ...]]:
    """The parts that each component is made of."""
    if isinstance(by, Mapping):
        return {str(name): _found(known, parts) for name, parts in by.items()}
    if isinstance(by, str) and by in KINDS:
        return {name: (part,) for name, part in _kind(known, by).items()}
    if isinstance(by, str) or not isinstance(by, Iterable):
        by = [by]
    found = dict[str, tuple[Part, ...]]()
    for each in by:
        if isinstance(each, str) and each in KINDS and each not in known:
            found |= _components(known, each)
        else:
            found[each.__name__ if isinstance(each, type) else str(each)] = _found(known, each)
    return found


def _kind(known: dict[str, Part], kind: str) -> dict[str, Part]:
    modules = {n: p.module for n, p in known.items() if p.module is not None and p.head < 0}
    if kind == "labels":
        return {"labels": Part("*")}  # those that come up
    if kind == "heads":
        return {name: part for name, part in known.items() if part.head >= 0}
    if kind == "modules":
        return {name: known[name] for name in modules}
    lists = list[str]()
    for name, module in modules.items():
        listed = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if listed and kind == "experts" and name.rpartition(".")[2] == "experts":
            lists.append(name)
        elif kind == "layers" and (listed or isinstance(module, nn.Sequential)):
            alike = len({user_class(child) for child in module.children()}) == 1
            inner = any(name.startswith(f"{other}.") for other in lists)
            if alike and not inner and (listed or len(module._modules) > 1):
                lists.append(name)
    return {f"{n}.{key}": known[f"{n}.{key}"] for n in lists for key in modules[n]._modules}


def _found(known: dict[str, Part], wanted: Any) -> tuple[Part, ...]:
    """What one name, pattern or class refers to, or several; else slices of that label."""
    if isinstance(wanted, type) and issubclass(wanted, nn.Module):
        found = [p for p in known.values() if p.head < 0 and isinstance(p.module, wanted)]
        if not found:
            raise UnknownName(f"no module of class {wanted.__name__} in this model")
        return tuple(found)
    if isinstance(wanted, str):
        hits = [p for n, p in known.items() if n == wanted or fnmatchcase(n, wanted)]
        return tuple(_running(known, hits)) or (Part(wanted.removeprefix("label:")),)
    if isinstance(wanted, Iterable) and not isinstance(wanted, (nn.Module, Tensor)):
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


def _joined(attention: nn.Module) -> nn.Module | None:
    """The projection that is given what the heads have made, side by side; the module itself, if
    they are its output; None if that is not known.
    """
    named = [(n.split("."), m) for n, m in attention.named_modules() if n]
    named = [(n, m) for n, m in named if getattr(m, "weight", None) is not None]
    outputs = [module for name, module in named if OUTPUTS.intersection(name)]
    inner = all(INPUTS.intersection(name) for name, _ in named)
    return outputs[-1] if outputs else attention if inner else None


# Replacing ---------------------------------------------------------------------------------------


@dataclass
class _Met:
    """The parts that were called, and the labels that came up."""

    called: set[Part] = field(default_factory=set)
    labels: dict[str, None] = field(default_factory=dict)


@contextlib.contextmanager
def _without(parts: Iterable[Part], how: How, met: _Met | None = None) -> Iterator[_Met]:
    """Within, these parts are replaced."""
    met, parts = met or _Met(), tuple(parts)

    def cut(tensor: Tensor, dim: int, names: labels.Names) -> Tensor:
        met.labels.update(dict.fromkeys(name for name in names if name is not None))
        for part in parts:
            if part.module is None:
                at = [n for n, name in enumerate(names) if name and fnmatchcase(name, part.name)]
                if at:
                    met.called.add(part)
                    tensor = _cut(tensor, dim, at, how, part.name)
        return tensor

    with contextlib.ExitStack() as stack:
        stack.enter_context(eager())  # hooks of compiled modules would not run
        stack.enter_context(UNFUSED())
        for part in parts:
            for handle in _hooked(part, how, met) if part.module else ():
                stack.callback(handle.remove)
        labels.CUTS.append(cut)
        stack.callback(labels.CUTS.remove, cut)
        yield met


def _hooked(part: Part, how: How, met: _Met) -> list[Any]:
    """Handles of the hooks that replace a module's outputs, or one of its heads."""
    module, joined = part.module, None if part.head < 0 else _joined(part.module)  # type: ignore[arg-type]
    assert module is not None
    if part.head >= 0 and isinstance(module, nn.MultiheadAttention):
        return _masked(module, part, how, met)

    def head(x: Tensor) -> Tensor:
        size = x.shape[-1] // (head_count(module) or 1)
        return _cut(x, x.dim() - 1, range(part.head * size, (part.head + 1) * size), how, part.name)

    def given(_: nn.Module, args: Any) -> Any:
        met.called.add(part)
        return (head(args[0]), *args[1:])

    def returned(_: nn.Module, args: Any, out: Any) -> Any:
        met.called.add(part)
        if part.head < 0:
            return _replaced(out, module, how, part.name)
        return (head(out[0]), *out[1:]) if isinstance(out, tuple) else head(out)

    if joined is None or joined is module:
        return [module.register_forward_hook(returned)]
    return [joined.register_forward_pre_hook(given)]


def _masked(module: nn.MultiheadAttention, part: Part, how: How, met: _Met) -> list[Any]:
    """It uses the weight of its output projection itself: the columns of a head become 0."""
    if not isinstance(how, str) or how != "zero":
        raise GradtraceError(f"a head of nn.MultiheadAttention ({part.name!r}) can only be 'zero'")
    table: dict[str, Any] = module.out_proj._parameters
    before = list[Any]()

    def mask(*_: Any) -> None:
        met.called.add(part)
        before.append(table["weight"])
        size = module.head_dim
        columns = range(part.head * size, (part.head + 1) * size)
        table["weight"] = _cut(table["weight"], 1, columns, how, part.name)

    def unmask(*_: Any) -> None:
        table["weight"] = before.pop()

    hooks = [module.register_forward_pre_hook(mask)]
    return [*hooks, module.register_forward_hook(unmask, always_call=True)]


def _replaced(out: Any, module: nn.Module, how: How, what: str) -> Any:
    """What a module returned, with other floating tensors."""
    dims = list[int]()

    def change(x: Any) -> Any:
        if isinstance(x, PackedSequence):
            if isinstance(how, str) and how == "mean":
                raise GradtraceError(f"{what!r} returns packed sequences, which have no 'mean'")
            return x._replace(data=change(x.data))
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
            return x
        recurrent = isinstance(module, nn.RNNBase)
        dims.append(1 if recurrent and dims else 0)  # states have layers first
        return _value(x, how, what, dims[-1], 3 if recurrent else 1)

    changed = tree_map(change, out, is_leaf=lambda x: isinstance(x, PackedSequence))
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
    if x.dim() < least or not x.dim() or x.shape[dim] == 1:
        raise GradtraceError(
            f"{what!r} has one sample here (shape {tuple(x.shape)}), whose mean is itself, so "
            "nothing would be ablated: use larger batches, 'zero' or a tensor"
        )
    return x.detach().mean(dim, keepdim=True).expand_as(x).clone()


def _interval(rises: list[float], seed: int) -> tuple[float, float, float]:
    """The mean, and its 95% interval by bootstrap."""
    found = torch.tensor(rises, dtype=torch.float64)
    mean = float(found.mean())
    if len(found) < 2:
        return mean, nan, nan
    draws = torch.Generator().manual_seed(seed)
    means = found[torch.randint(len(found), (DRAWS, len(found)), generator=draws)].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return mean, low, high
