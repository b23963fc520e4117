"""``ablate``: run a model without some of its parts, to see whether they matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from math import nan
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gradtrace.autodiff import labels
from gradtrace.components.components import spelt
from gradtrace.components.module_parts import expert_lists, head_count, layer_lists
from gradtrace.errors import GradtraceError, NotScalar, UnknownName, did_you_mean, listed
from gradtrace.pytorch.global_switches import UNFUSED, eager
from gradtrace.pytorch.wrapped_modules import named_modules, user_class
from gradtrace.table import Column, Table
from gradtrace.training.state import seed_all, undisturbed

How: TypeAlias = str | Tensor | float
KINDS = ("modules", "layers", "heads", "experts", "labels")
INNER = re.compile(r"(.*_)?(q|k|v|kv|qkv|query|key|value|in|attn|bias)(_.*)?")
"""What attention modules call the parts that have matrices before their heads."""

COLUMNS = (Column("component"), *(Column(name, "number") for name in ("rise", "low", "high")))
DRAWS = 2_000  # of the bootstrap


class Part(NamedTuple):
    """A module, one of its heads, or (without a module) slices that are labelled so."""

    name: str
    module: nn.Module | None = None
    head: int = -1
    kind: str = ""  # as ``by=`` names a class of modules: class:Linear


class ablate:
    """Run a model without some of its parts: ``with gt.ablate(model, "lstm"): loss = ...``.

    Inside, the outputs of these parts become ``how``: 0; their mean over the samples (dimension 0);
    or a tensor or number, broadcast. No gradient comes through them. Heads are replaced in what
    their output projection is given. ``with`` gives the names of the components; one that was never
    called inside is an error at the end. Under ``torch.utils.checkpoint`` blocks run again in the
    backward pass: call that inside, too.

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
        timed = [n for n, m in named_modules(model) if getattr(m, "batch_first", None) is False]
        if timed and isinstance(how, str) and how == "mean":
            raise GradtraceError(
                f"how='mean' is over dimension 0, which is time in {timed[0] or 'the model'!r} "
                "(batch_first=False), and not samples: use 'zero' or a tensor"
            )
        self.model, self.by, self.how, self.known = model, spelt(by), how, _known(model)
        self.components = _components(self.known, self.by)
        self._called, self._labels, self._open = set[Part](), dict[str, None](), ExitStack()

    def __enter__(self) -> tuple[str, ...]:
        self._open.enter_context(self._without(sum(self.components.values(), ())))
        return tuple(self.components)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open.close()
        if kind is None:
            self._check(self.components)

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
        rises, wholes, found = dict[str, list[float]](), list[float](), self.components
        for number, batch in enumerate(loader):
            loss_of = partial(self._loss, loss_fn, batch, seed + number)
            wholes.append(loss_of(()))
            if self.by == "labels":
                found = {name: (Part(name),) for name in self._labels}
            for name, parts in found.items():
                rises.setdefault(name, []).append(loss_of(parts) - wholes[-1])
        if not wholes:
            raise GradtraceError("the loader gave no batch, so there is nothing to compare")
        unmet = [name for name, parts in found.items() if self._called.isdisjoint(parts)]
        if len(unmet) == len(found):
            self._check(found)
        rows: Any = [(n, *_interval(each, seed)) for n, each in rises.items() if n not in unmet]
        notes = (f"never called: {listed(unmet)}",) if unmet else ()
        about = {"batches": len(wholes), "loss": sum(wholes) / len(wholes)}
        return Table("Rise of the loss without it", COLUMNS, tuple(rows), notes, about).sort("rise")

    def _loss(self, loss_fn: Any, batch: Any, seed: int, parts: tuple[Part, ...]) -> float:
        with undisturbed(self.model), torch.no_grad(), self._without(parts):
            seed_all(seed)
            loss = loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise NotScalar("loss_fn(model, batch) must return one number, as by .mean()")
        return float(loss)

    def _check(self, components: Mapping[str, tuple[Part, ...]]) -> None:
        """Raise an error if a component was never called, or there is none."""
        if not components:
            raise UnknownName(f"no {self.by} are known in this model: see gradtrace.label")
        names = [*(part.name for part in self.known), *self._labels]
        for name, parts in components.items():
            if self._called.isdisjoint(parts):
                module = any(part.module for part in parts)
                hint = "" if module else did_you_mean(name, names, show=repr)
                raise UnknownName(
                    f"{name!r} was never called, or given to gradtrace.label, inside ablate{hint}; "
                    "what nn.MultiheadAttention has inside is never called: ablate all of it"
                )

    @contextmanager
    def _without(self, parts: tuple[Part, ...]) -> Iterator[None]:
        """Within, these parts are replaced."""
        cut = partial(self._labelled, [part for part in parts if part.module is None])
        with eager(), UNFUSED(), ExitStack() as stack:  # compiled modules run no new hooks
            for part in parts:
                if part.module is not None:
                    stack.callback(self._hooked(part, part.module).remove)
            labels.CUTS.append(cut)
            stack.callback(labels.CUTS.remove, cut)
            yield

    def _hooked(self, part: Part, module: nn.Module) -> Any:
        """The handle of a hook that replaces what a module returns, or one of its heads."""
        joined = _joined(module) if part.head >= 0 else None
        if joined is not None:
            return joined.register_forward_pre_hook(partial(self._head, part))
        change = self._whole if part.head < 0 else self._head
        return module.register_forward_hook(partial(change, part))

    def _whole(self, part: Part, module: Any, args: Any, out: Any) -> Any:
        """What a module returned, with other floating tensors."""

        def change(x: Tensor) -> Tensor:
            states = isinstance(module, nn.RNNBase) and x is not out[0]  # have layers first
            return self._value(x, part, int(states)) if x.is_floating_point() else x

        self._called.add(part)
        if not any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(out)):
            raise GradtraceError(
                f"{part.name!r} returned a {type(out).__name__}: no floating tensor"
            )
        return tree_map_only(Tensor, change, out)

    def _head(self, part: Part, _: nn.Module, *given: Any) -> Any:
        """What a projection is given, or what a module returned, with another head."""
        self._called.add(part)
        several = isinstance(given[-1], tuple)
        x, *rest = given[-1] if several else given[-1:]
        size = x.shape[-1] // (head_count(part.module) or 1)  # type: ignore[arg-type]
        x = self._cut(x, x.dim() - 1, range(part.head * size, (part.head + 1) * size), part)
        return (x, *rest) if several else x

    def _labelled(self, parts: list[Part], x: Tensor, dim: int, names: labels.Names) -> Tensor:
        """A labelled tensor, with other slices of these names or patterns."""
        self._labels.update(dict.fromkeys(name for name in names if name is not None))
        for part in parts:
            at = [n for n, name in enumerate(names) if name and fnmatchcase(name, part.name)]
            if at:
                self._called.add(part)
                x = self._cut(x, dim, at, part)
        return x

    def _cut(self, x: Tensor, dim: int, at: Iterable[int], part: Part) -> Tensor:
        """The tensor with other slices."""
        index = torch.tensor([*at], device=x.device)
        slices = x.index_select(dim, index)
        return x.index_copy(dim, index, self._value(slices, part, 0 if dim else None))

    def _value(self, x: Tensor, part: Part, samples: int | None) -> Tensor:
        """What takes the place of a tensor, whose samples are along this dimension."""
        if not isinstance(self.how, str) or self.how == "zero":
            value = torch.as_tensor(0.0 if isinstance(self.how, str) else self.how)
            try:
                return value.detach().to(x).expand_as(x).clone()
            except RuntimeError as error:
                raise GradtraceError(f"the value for {part.name!r}: {error}") from None
        if samples is None or x.dim() == 0 or x.shape[samples] == 1:
            raise GradtraceError(
                f"{part.name!r} (shape {tuple(x.shape)}) has one sample, or slices along dimension "
                "0, so there is no mean over samples: use 'zero' or a tensor"
            )
        return x.detach().mean(samples, keepdim=True).expand_as(x).clone()


def _known(model: nn.Module) -> list[Part]:
    """Modules, and the heads of the innermost modules that have some."""
    modules, heads = dict(named_modules(model)), list[Part]()
    for name, module in reversed(modules.items()):
        count = head_count(module) or 0
        if name and not any(head.name.startswith(f"{name}.") for head in heads):
            heads = [*(Part(f"{name} head {n}", module, n) for n in range(count)), *heads]
    kinds = {module: f"class:{user_class(module).__name__}" for module in modules.values()}
    return [*(Part(n, m, kind=kinds[m]) for n, m in modules.items() if n), *heads]


def _joined(attention: nn.Module) -> nn.Module | None:
    """What is given the outputs of all heads: the last part with a matrix, but those that heads are
    made from. None: there is no other, so the module returns them, as in BERT.
    """
    names = [name.split(".")[:-1] for name, p in attention.named_parameters() if p.dim() == 2]
    outputs = [name for name in names if name and not any(map(INNER.fullmatch, name))]
    return attention.get_submodule(".".join(outputs[-1])) if outputs else None


def _components(known: list[Part], by: Any) -> dict[str, tuple[Part, ...]]:
    """The parts that each component is made of."""
    if isinstance(by, Mapping):
        return {str(name): _found(known, parts) for name, parts in by.items()}
    names, modules = list[Any](), {part.name: part.module for part in known if part.module}
    for each in by if isinstance(by, list) else [by]:
        kind = each in KINDS and (each == by or each not in modules)
        names += _kind(known, each) if kind else [each]
    return {str(name): _found(known, name) for name in names}


def _kind(known: list[Part], kind: str) -> list[str]:
    """The names of the components of a kind."""
    modules = {part.name: part.module for part in known if part.module and part.kind}
    if kind in ("modules", "heads"):
        return [part.name for part in known if bool(part.kind) == (kind == "modules")]
    lists = {"layers": layer_lists, "experts": expert_lists}.get(kind, lambda _: [])(modules)
    lists = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    names = [f"{name}.{key}" for name in lists for key in modules[name]._modules]
    return ["label:*"] if kind == "labels" else names


def _found(known: list[Part], wanted: Any) -> tuple[Part, ...]:
    """What one name, pattern or class refers to, or several; else slices of that label."""
    if isinstance(wanted, list):
        return tuple(part for each in wanted for part in _found(known, each))
    if not isinstance(wanted, str):
        raise GradtraceError(f"by= takes names, patterns or classes of modules, not {wanted!r}")
    hits = [p for p in known if wanted in (p.name, p.kind) or fnmatchcase(p.name, wanted)]
    names = {name: None for part in known for name in (part.name, part.kind)}
    if not (hits or re.search("label:| ", wanted)) and get_close_matches(wanted, names):
        raise UnknownName(f"no module {wanted!r} here{did_you_mean(wanted, names, show=repr)}")
    called = tuple(part for hit in hits for part in _called(known, hit))
    return called if hits else (Part(wanted.removeprefix("label:")),)


def _called(known: list[Part], part: Part) -> Iterator[Part]:
    """A part; in place of a list of modules, which is never called itself, its entries."""
    if part.module is None or type(part.module).forward is not nn.Module.forward:
        yield part
        return
    for each in known:
        if each.kind and each.name.rpartition(".")[0] == part.name:
            yield from _called(known, each)


def _interval(rises: list[float], seed: int) -> tuple[float, float, float]:
    """The mean, and its 95% interval by bootstrap; of one batch there is none."""
    found = np.array(rises)
    if len(found) < 2:
        return float(found.mean()), nan, nan
    draws = np.random.default_rng(seed).integers(len(found), size=(DRAWS, len(found)))
    low, high = np.quantile(found[draws].mean(1), [0.025, 0.975])
    return float(found.mean()), float(low), float(high)
