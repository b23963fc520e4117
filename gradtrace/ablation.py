"""``ablate``: run a model without some of its parts, to see whether they matter."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import count
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from gradtrace import labels
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.hooks import ours
from gradtrace.watching import named_modules

Value: TypeAlias = Tensor | float | Sequence[Tensor | float]
Modules: TypeAlias = dict[str, nn.Module]
Forward: TypeAlias = Callable[..., Any]

LABEL = "label:"
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that in evaluation may compute at once all that is inside them, and call none of it."""


class ablate:
    """Run a model without some of its parts: ``with gt.ablate(model, "lstm"): loss = ...``.

    A name is a module's, as in ``model.named_modules()``; or a pattern, in which ``*`` stands for
    one part of a name and ``**`` for any number (``"layers.*.mlp"``); or ``"label:head 3"``, the
    slices of any tensor that ``gradtrace.label`` gave this name, or names of this pattern. The
    context gives the names that were found. ``how`` says what a module's output becomes:

    - ``"zero"``: ``out = 0``, for each floating tensor in it, and no gradient;
    - ``"mean"``: ``out[b] = 1/B · Σ_c out[c]`` over the B samples of the call, and no gradient; or
      ``values[name]``, broadcast (a sequence, where the module returns several tensors; for a
      label, to one slice). Samples lie along dimension 0; in PyTorch's recurrent and attention
      layers, where these have them; in a tensor labelled along dimension 0, along dimension 1;
    - ``"remove"``: ``out = in``, the first floating tensor that the module is given, and its
      gradient; the module does not run. What else it returns is what it was given and would hand
      on, or else zero. Slices cannot be removed.

    A part that never came up is an error at the end, since nothing was ablated then. No parameter
    is touched, and whatever happens inside, the model is as before after it. Blocks under
    ``torch.utils.checkpoint`` run again in the backward pass: call that inside, too.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    >>> x = torch.ones(2, 3)
    >>> with ablate(model, "0") as names:
    ...     print(names, model(x).sum())
    ('0',) tensor(0.)
    >>> with ablate(model, "0", how="remove"):
    ...     bool((model(x) == x.tanh()).all())
    True
    >>> with ablate(model, "1", how="mean", values={"1": 0.5}):
    ...     model(x)[0]
    tensor([0.5000, 0.5000, 0.5000])
    """

    def __init__(
        self,
        model: nn.Module,
        *names: str,
        how: str = "zero",
        values: Mapping[str, Value] | None = None,
    ) -> None:
        _check_arguments(model, names, how, values)
        self.model = model
        self.names = names
        self.how = how
        self.values = dict(values or {})
        self._open = False
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> tuple[str, ...]:
        if self._open:
            raise GradtraceError("this ablation is already open; make a second gradtrace.ablate")
        modules = dict(named_modules(self.model))
        self._asked = {n: _found(n, modules) for n in self.names if not n.startswith(LABEL)}
        found = dict.fromkeys(n for asked in self.names for n in self._asked.get(asked, [asked]))
        self._check_values([*found, *self._asked])
        self._rules = self._ruled()
        self._slices = Slices(
            self.how, {n: self.values.get(n) for n in self.names if n.startswith(LABEL)}
        )
        self._ran = False
        self._open = True
        try:
            self._begin(modules)
        except BaseException:
            self._close()
            raise
        return tuple(found)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
        if kind is None:
            self._complain()

    def _check_values(self, known: list[str]) -> None:
        for name in self.values:
            if name not in known:
                raise UnknownName(f"values[{name!r}] is not ablated; {_hint(name, known)}")

    def _ruled(self) -> dict[nn.Module, Rule]:
        """One rule for each module, under however many names it was asked for."""
        rules: dict[nn.Module, Rule] = {}
        for asked, found in self._asked.items():
            for name, module in found.items():
                value = self.values.get(name, self.values.get(asked))
                rules.setdefault(module, Rule(name, module, self.how, value))
        return rules

    def _begin(self, modules: Modules) -> None:
        if "torch._dynamo" in sys.modules:  # without it nothing is compiled
            self._undo.enter_context(_EAGER)
        if any(_fuses(module, self._rules) for module in modules.values()):
            self._undo.enter_context(_OPENED)
        for module in _callers(self._rules.values(), modules):
            self._hook(module, self._note)
        for module, rule in self._rules.items():
            self._hook(module, rule.note)
            self._undo.callback(rule.end)
            rule.begin()
        self._undo.callback(self._slices.end)
        self._slices.begin()

    def _close(self) -> None:
        self._undo.close()
        self._open = False

    def _hook(self, module: nn.Module, note: Callable[[], None]) -> None:
        self._undo.callback(module.register_forward_pre_hook(Hook(note)).remove)
        ours(1)

    def _note(self) -> None:
        self._ran = True

    def _complain(self) -> None:
        """Say so, if the model ran and nothing was ablated."""
        for asked, found in self._asked.items():
            rules = [self._rules[module] for module in found.values()]
            if self._ran and not any(rule.called or self._went_with(rule) for rule in rules):
                raise GradtraceError(_never_called(asked, rules))
        if self._ran or self._slices.seen:
            self._slices.complain()

    def _went_with(self, rule: Rule) -> bool:
        """Whether it lies in a module that was removed."""
        gone = [r.module for r in self._rules.values() if r.called and r.how == "remove"]
        return any(rule.module in set(module.modules()) for module in gone)


# Names -------------------------------------------------------------------------------------------


def _check_arguments(model: object, names: Sequence[object], how: str, values: object) -> None:
    if not isinstance(model, nn.Module):
        raise GradtraceError(f"ablate takes a torch.nn.Module first, got {type(model).__name__}")
    if not names or not all(isinstance(name, str) for name in names):
        raise GradtraceError(
            f"ablate takes names of modules after the model, got {names}; give some of "
            "model.named_modules(), or 'label:...'"
        )
    if how not in HOWS:
        raise GradtraceError(f"ablate takes how={' or '.join(map(repr, HOWS))}, got {how!r}")
    if values and how != "mean":
        raise GradtraceError(f"values take the place of means; say how='mean', not {how!r}")
    for name in names:
        if how == "remove" and str(name).startswith(LABEL):
            raise GradtraceError(
                f"{name!r} is a slice, which cannot be removed, since it has no input to put in "
                "its place; use how='zero' or 'mean'"
            )
    for part in model.modules():
        if isinstance(part, nn.DataParallel) and len(part.device_ids) > 1:
            raise GradtraceError(
                "nn.DataParallel on several devices runs copies of the model, which ablate does "
                "not reach; call the model that it wraps (.module)"
            )


def _found(asked: str, modules: Modules) -> Modules:
    """The modules that one name, or pattern, stands for."""
    if asked in modules:
        return {asked: _callable(asked, modules[asked])}
    pattern = asked.split(".")
    found = {n: m for n, m in modules.items() if n and matches(pattern, n.split("."))}
    if not found:
        raise UnknownName(f"no module {asked!r} in this model; {_hint(asked, list(modules))}")
    running = {name: module for name, module in found.items() if _runs(module)}
    return {name: _callable(name, module) for name, module in (running or found).items()}


def matches(pattern: Sequence[str], name: Sequence[str]) -> bool:
    """Whether the parts of a name fit those of a pattern.

    >>> [matches(["h", "*", "mlp"], name.split(".")) for name in ("h.0.mlp", "h.0.x.mlp", "h.mlp")]
    [True, False, False]
    >>> [matches(["**", "mlp"], name.split(".")) for name in ("h.0.mlp", "mlp", "mlp.0")]
    [True, True, False]
    """
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(matches(pattern[1:], name[n:]) for n in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and matches(pattern[1:], name[1:])


def _callable(name: str, module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        raise GradtraceError(
            f"module {name!r} is TorchScript, whose calls cannot be changed; ablate the Python "
            "module that it was made from"
        )
    if not _runs(module):
        raise GradtraceError(
            f"module {name!r} is a {type(module).__name__}, which is never called itself; ablate "
            f"what it holds: {(name + '.*').lstrip('.')!r}"
        )
    return module


def _runs(module: nn.Module) -> bool:
    """Whether it has a forward of its own, which nn.ModuleList has not."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _hint(name: str, known: Sequence[str]) -> str:
    if close := get_close_matches(name, known, n=3):
        return f"did you mean {' or '.join(map(repr, close))}?"
    listed = [repr(each) for each in known if each]
    return f"there are {', '.join(listed[:8]) or 'none'}{', ...' if listed[8:] else ''}"


def _never_called(asked: str, rules: Sequence[Rule]) -> str:
    parent = rules[0].name.rpartition(".")[0]
    return (
        f"module {asked!r} was never called inside ablate though the model ran, so nothing was "
        "ablated: what is around it skips it, or uses its parameters itself (as "
        "nn.MultiheadAttention does with its out_proj); ablate "
        f"{f'the module around it, {parent!r}' if parent else 'another module'}"
    )


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))] if name else []


def _callers(rules: Iterable[Rule], modules: Modules) -> set[nn.Module]:
    """Modules whose calls tell that the model runs: the outermost, and those around the rules'."""
    running = {name for name, module in modules.items() if _runs(module)}
    around = {name for rule in rules for name in _parents(rule.name) if name in running}
    outermost = {name for name in running if not running.intersection(_parents(name))}
    return {modules[name] for name in around | outermost}


# Modules -----------------------------------------------------------------------------------------


class StandIn:
    """Takes the place of ``module.forward`` while the module is ablated.

    Ablations may be opened and closed in any order. They share one stand-in, which goes when the
    last is closed; each acts on what those before it leave.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.rules: list[Rule] = []
        self.own = vars(module).get("forward")  # most modules have that of their class
        self.forward = module.forward
        functools.update_wrapper(self, self.forward, updated=())  # its signature may be read

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass, as the rules leave it."""
        run: Forward = self.forward
        for rule in tuple(self.rules):
            run = functools.partial(rule, run)
        return run(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Copies of the module, and files, get its forward as it was."""
        return (getattr, (self.module, "forward")) if self.own is None else (_same, (self.own,))

    def leave(self) -> None:
        """Put back what was there, unless something else has been put there since."""
        attributes = vars(self.module)
        if attributes.get("forward") is not self:
            return
        if self.own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = self.own


class Hook:
    """Notes that a module is called; copies of the module, and files, get one that does not."""

    def __init__(self, note: Callable[[], None]) -> None:
        self.note = note

    def __call__(self, *_: object) -> None:
        """The module is about to run."""
        self.note()

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing() -> None:
    pass


def _same(value: Any) -> Any:
    return value


_LOCK = threading.Lock()


@dataclass(eq=False)
class Rule:
    """What becomes of the calls of one module."""

    name: str
    module: nn.Module
    how: str
    value: Value | None
    called: bool = False
    stand: StandIn | None = None

    def begin(self) -> None:
        """Stand in for the module's forward."""
        with _LOCK:
            stand = vars(self.module).get("forward")
            self.stand = stand if isinstance(stand, StandIn) else StandIn(self.module)
            self.stand.rules.append(self)
            vars(self.module)["forward"] = self.stand

    def end(self) -> None:
        """Give the module's forward back, if no other rule is left."""
        with _LOCK:
            if self.stand is None or self not in self.stand.rules:
                return
            self.stand.rules.remove(self)
            if not self.stand.rules:
                self.stand.leave()

    def note(self) -> None:
        """It was called."""
        self.called = True

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """What the module returns instead of ``forward(*args, **kwargs)``."""
        self.called = True
        return HOWS[self.how](self, forward, args, kwargs)

    def each(
        self,
        out: Any,
        change: Callable[[Tensor, int], Tensor],
        other: Callable[[Any], Any] = _same,
    ) -> Any:
        """``change`` every floating tensor, told its number, and what is no such by ``other``."""
        numbers = count()
        changed = mapped(out, lambda v: change(v, next(numbers)) if floats(v) else other(v))
        if next(numbers) == 0:
            raise GradtraceError(
                f"module {self.name!r} returned a {type(out).__name__} without a floating tensor "
                "that could be found, so nothing would be ablated; ablate a module inside it"
            )
        return changed

    def given(self, like: Tensor, number: int) -> Tensor:
        """The value that the user gives for output ``number``."""
        value = self.value
        if isinstance(value, Sequence):
            if number >= len(value):
                raise GradtraceError(
                    f"values[{self.name!r}] holds {len(value)} values, and the module returns more "
                    "floating tensors; give one for each"
                )
            value = value[number]
        return broadcast(value, like, like.shape, f"module {self.name!r}").clone()

    def samples(self, tensor: Tensor, number: int) -> int:
        """The dimension along which the samples of output ``number`` lie."""
        first = tensor.dim() != 3 or bool(getattr(self.module, "batch_first", True))
        if isinstance(self.module, nn.RNNBase):  # (output, state), and states have layers first
            return 0 if first and (number == 0 or tensor.dim() != 3) else 1
        if isinstance(self.module, nn.MultiheadAttention):  # (output, weights)
            return 0 if first or number else 1
        return 0


def _zero(rule: Rule, forward: Forward, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():
        return rule.each(forward(*args, **kwargs), lambda x, _: torch.zeros_like(x))


def _mean(rule: Rule, forward: Forward, args: Any, kwargs: Any) -> Any:
    sizes: list[int] = []

    def average(x: Tensor, number: int) -> Tensor:
        mean, size = averaged(x, rule.samples(x, number))
        sizes.append(size)
        return mean.expand_as(x).clone()

    with torch.no_grad():
        out = forward(*args, **kwargs)
        if rule.value is not None:
            return rule.each(out, rule.given)
        changed = rule.each(out, average)
    _check_samples(max(sizes), f"module {rule.name!r}")
    return changed


def _remove(rule: Rule, forward: Forward, args: Any, kwargs: Any) -> Any:
    inputs = floating((args, kwargs))
    if not inputs:
        raise GradtraceError(
            f"module {rule.name!r} is given no floating tensor that could take the place of its "
            "output; use how='zero'"
        )
    out, handed = outline(rule, args, kwargs)

    def change(x: Tensor, number: int) -> Tensor:
        if number == 0:
            return _passed(rule, inputs[0], x)
        if id(x) in handed:
            return handed[id(x)][1]  # type: ignore[no-any-return]
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    def other(value: Any) -> Any:
        if id(value) in handed:
            return handed[id(value)][1]
        if isinstance(value, Tensor):
            raise GradtraceError(
                f"module {rule.name!r} also returns a tensor of {value.dtype}, for which nothing "
                "can stand in; use how='zero'"
            )
        return value

    return rule.each(out, change, other)


def _passed(rule: Rule, given: Tensor, wanted: Tensor) -> Tensor:
    if given.shape != wanted.shape:
        raise GradtraceError(
            f"module {rule.name!r} cannot be removed: it is given shape {tuple(given.shape)} and "
            f"returns shape {tuple(wanted.shape)}; use how='zero'"
        )
    # A copy, since the model may write to what a module returns and go on to use what it gave.
    return given.to(wanted.device, wanted.dtype, copy=True)


HOWS: dict[str, Callable[[Rule, Forward, Any, Any], Any]] = {
    "zero": _zero,
    "mean": _mean,
    "remove": _remove,
}


class Hollow(TorchFunctionMode):
    """Copies of tensors get shape, dtype and device, and no data."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``clone`` is how a parameter is copied."""
        if func is Tensor.__deepcopy__ or func is Tensor.clone:
            return self.mode.from_tensor(args[0].detach(), static_shapes=True)
        return func(*args, **(kwargs or {}))


def outline(rule: Rule, args: Any, kwargs: Any) -> tuple[Any, dict[int, tuple[Any, Any]]]:
    """What a module would return, as tensors that have no data: nothing is computed or drawn.

    A copy of the module, of tensors without data, runs on such copies of the arguments, so that
    neither sees a change. The second result tells what of these is handed on:
    ``{id(copy): (copy, original)}``.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {
        id(hooks): OrderedDict()  # hooks belong to others, and may hold anything
        for part in rule.module.modules()
        for key, hooks in vars(part).items()
        if "hooks" in key and isinstance(hooks, dict)
    }
    try:
        with torch.no_grad(), _OPENED:
            with Hollow(mode):
                twin, args, kwargs = copy.deepcopy((rule.module, args, kwargs), memo)
            with mode:
                out = twin.forward(*args, **kwargs)
    except Exception as error:
        raise GradtraceError(
            f"module {rule.name!r} cannot be removed: what it returns cannot be told without "
            f"running it ({type(error).__name__}: {error}); use how='zero'"
        ) from error
    copied = memo[id(memo)]  # where deepcopy keeps the originals alive
    return out, {id(memo[id(old)]): (memo[id(old)], old) for old in copied if id(old) in memo}


# Slices ------------------------------------------------------------------------------------------


class Slices:
    """What becomes of the slices that ``gradtrace.label`` marks with some names."""

    def __init__(self, how: str, values: Mapping[str, Value | None]) -> None:
        self.how = how
        self.values = values  # by name, as asked for
        self.seen: dict[str, None] = {}
        self.met: set[str] = set()

    def __call__(self, tensor: Tensor, dim: int, names: labels.Names) -> Tensor:
        """The tensor, without the slices that were asked for."""
        self.seen.update(dict.fromkeys(name for name in names if name is not None))
        for asked in self.values:
            wanted = asked.removeprefix(LABEL)
            chosen = [n is not None and (n == wanted or fnmatchcase(n, wanted)) for n in names]
            if any(chosen):
                self.met.add(asked)
                tensor = self._cut(asked, tensor, dim, chosen)
        return tensor

    def _cut(self, asked: str, tensor: Tensor, dim: int, chosen: list[bool]) -> Tensor:
        if not floats(tensor):
            raise GradtraceError(
                f"{asked!r} marks a tensor of {tensor.dtype}, which cannot be ablated; label a "
                "floating tensor"
            )
        shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
        mask = torch.tensor(chosen, device=tensor.device).view(shape)
        if self.how == "zero":
            return tensor.masked_fill(mask, 0)
        return torch.where(mask, self._instead(asked, tensor, dim), tensor)

    def _instead(self, asked: str, tensor: Tensor, dim: int) -> Tensor:
        """What the chosen slices become, broadcast along the others."""
        value = self.values[asked]
        if value is not None:
            shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
            return broadcast(value, tensor, shape, f"a slice of {asked!r}").unsqueeze(dim)
        if tensor.dim() == 1:
            raise GradtraceError(
                f"{asked!r} marks elements of a tensor of one dimension, so there is none to take "
                "the mean over; use how='zero', or give values"
            )
        mean, size = averaged(tensor, 0 if dim else 1)
        _check_samples(size, repr(asked))
        return mean

    def begin(self) -> None:
        """From now on ``gradtrace.label`` cuts these slices."""
        if self.values:
            labels.CUTS.append(self)

    def end(self) -> None:
        """From now on it does not."""
        if self in labels.CUTS:
            labels.CUTS.remove(self)

    def complain(self) -> None:
        """Say so, if a label never came up."""
        for asked in self.values:
            if asked not in self.met:
                name = asked.removeprefix(LABEL)
                raise UnknownName(
                    f"no label {name!r} came up inside ablate, so nothing was ablated; "
                    f"{_hint(name, list(self.seen))}"
                )


# Values ------------------------------------------------------------------------------------------


def floats(value: object) -> bool:
    """Whether it is a tensor of numbers that have gradients."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``change`` everything in a nest of tuples, lists, dicts and dataclasses, and leave the nest.

    >>> mapped({"a": [1, 2], "b": (3, None)}, lambda v: v and -v)
    {'a': [-1, -2], 'b': (-3, None)}
    """
    if isinstance(value, PackedSequence):
        return value._replace(data=change(value.data))
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, dict):
        found = copy.copy(value)
        for key in value:
            found[key] = mapped(value[key], change)
        return found
    if is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in fields(value):
            object.__setattr__(twin, field.name, mapped(getattr(value, field.name), change))
        return twin
    return change(value)


def floating(value: Any) -> list[Tensor]:
    """The floating tensors in such a nest, in order."""
    found: list[Tensor] = []

    def collect(item: Any) -> Any:
        if floats(item):
            found.append(item)
        return item

    mapped(value, collect)
    return found


def averaged(tensor: Tensor, dim: int) -> tuple[Tensor, int]:
    """The mean along ``dim``, which stays with size 1, and over how many it was."""
    tensor = tensor.detach()
    return (tensor.mean(dim, keepdim=True), tensor.shape[dim]) if tensor.dim() else (tensor, 1)


def _check_samples(size: int, what: str) -> None:
    if size == 1:
        raise GradtraceError(
            f"{what} holds one sample in this call, and its mean is the sample itself, so nothing "
            "would be ablated; use larger batches (and drop_last), or give values"
        )


def broadcast(value: Any, like: Tensor, shape: Sequence[int], what: str) -> Tensor:
    """A value given by the user, as wide as what it is to replace."""
    found = torch.as_tensor(value).detach().to(like)
    try:
        return found.expand(tuple(shape))
    except RuntimeError:
        raise GradtraceError(
            f"the value given for {what} has shape {tuple(found.shape)}, which does not broadcast "
            f"to {tuple(shape)}"
        ) from None


# Switches ----------------------------------------------------------------------------------------


class Switch:
    """A switch of the whole process, which the first context throws and the last puts back."""

    def __init__(self, throw: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._throw = throw
        self._lock = threading.Lock()
        self._held = 0
        self._thrown = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._held:
                self._thrown.enter_context(self._throw())
            self._held += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._held -= 1
            if not self._held:
                self._thrown.close()


@contextlib.contextmanager
def _opened() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _fuses(module: nn.Module, rules: Mapping[nn.Module, Rule]) -> bool:
    """Whether it may pass over a module that is to be ablated."""
    return isinstance(module, FUSED) and any(part in rules for part in module.modules())


_OPENED = Switch(_opened)
_EAGER = Switch(lambda: torch.compiler.set_stance("force_eager"))
