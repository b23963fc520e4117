"""``ablate``: run a model without some of its parts, to see whether they matter."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from gradtrace.autodiff import labels
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.pytorch.global_switches import UNFUSED, eager
from gradtrace.pytorch.module_calls import Forward, Listener, listen
from gradtrace.pytorch.nested import mapped, tensors_in
from gradtrace.session import named_modules

Value: TypeAlias = Tensor | float | Sequence[Tensor | float]
Modules: TypeAlias = dict[str, nn.Module]
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
      label, to one slice). Samples lie along dimension 0; in PyTorch's recurrent, attention and
      transformer layers and what is inside them, where ``batch_first`` says; in packed sequences,
      the mean of a time step is over the samples that have it; in a tensor labelled along dimension
      0, along dimension 1. ``batch_dim`` says otherwise, for all names or as ``{name: dim}``, and
      must where a layer of the model has time first, so that a tensor of three dimensions may have,
      too. One sample without a batch dimension has no mean, and is refused;
    - ``"remove"``: ``out = in``, the first floating tensor that the module is given, and its
      gradient; the module does not run. What else it returns is what it was given and would hand
      on, or else zero. Slices cannot be removed.

    With ``"zero"`` and ``"mean"`` the module runs as ever: what it writes to buffers, or in place
    to its input, stays, and has its gradient. A part that never came up is an error at the end,
    since nothing was ablated then. No parameter is touched, nothing is put on the model, which may
    be copied and saved inside, and whatever happens the model is as before after it. Blocks under
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
        batch_dim: int | Mapping[str, int] | None = None,
    ) -> None:
        _check_arguments(model, names, how, values)
        _check_dims(batch_dim, how)
        self.model = model
        self.names = names
        self.how = how
        self.values = dict(values or {})
        self.batch_dim = batch_dim
        self._open = False
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> tuple[str, ...]:
        if self._open:
            raise GradtraceError("this ablation is already open; make a second gradtrace.ablate")
        modules = dict(named_modules(self.model))
        self._asked = {n: _found(n, modules) for n in self.names if not n.startswith(LABEL)}
        found = dict.fromkeys(n for asked in self.names for n in self._asked.get(asked, [asked]))
        self._check_values([*found, *self._asked])
        self._timed = next((n for n, m in modules.items() if batch_first(m) is False), None)
        self._rules = self._ruled(modules)
        slices = [name for name in self.names if name.startswith(LABEL)]
        self._slices = LabelledSlices(
            self.how,
            {name: self.values.get(name) for name in slices},
            {
                name: Samples(repr(name), given=self._dim(name, name), timed=self._timed)
                for name in slices
            },
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
        dims = self.batch_dim if isinstance(self.batch_dim, Mapping) else {}
        for word, given in (("values", self.values), ("batch_dim", dims)):
            for name in given:
                if name not in known:
                    raise UnknownName(f"{word}[{name!r}] is not ablated; {_hint(name, known)}")

    def _ruled(self, modules: Modules) -> dict[nn.Module, AblationRule]:
        """One rule for each module, under however many names it was asked for."""
        rules: dict[nn.Module, AblationRule] = {}
        for asked, found in self._asked.items():
            for name, module in found.items():
                value = self.values.get(name, self.values.get(asked))
                samples = Samples(
                    f"module {name!r}",
                    module,
                    _layer_around(name, modules),
                    self._dim(name, asked),
                    self._timed,
                )
                rules.setdefault(module, AblationRule(name, module, self.how, value, samples))
        return rules

    def _dim(self, name: str, asked: str) -> int | None:
        dim = self.batch_dim
        return dim.get(name, dim.get(asked)) if isinstance(dim, Mapping) else dim

    def _begin(self, modules: Modules) -> None:
        self._undo.enter_context(eager())
        if any(_fuses(module, self._rules) for module in modules.values()):
            self._undo.enter_context(UNFUSED)
        callers = _callers(self._rules.values(), modules)
        self._undo.callback(listen(Notice(self._note), callers))
        for rule in self._rules.values():
            self._undo.callback(listen(rule, [rule.module]))
        self._undo.callback(self._slices.end)
        self._slices.begin()

    def _close(self) -> None:
        self._undo.close()
        self._open = False

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

    def _went_with(self, rule: AblationRule) -> bool:
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


def _check_dims(dim: object, how: str) -> None:
    dims = list(dim.values()) if isinstance(dim, Mapping) else [] if dim is None else [dim]
    for each in dims:
        if not isinstance(each, int) or isinstance(each, bool):
            raise GradtraceError(f"batch_dim is a number, or {{name: number}}, not {dim!r}")
    if dims and how != "mean":
        raise GradtraceError(f"batch_dim is where means are taken; say how='mean', not {how!r}")


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


def _never_called(asked: str, rules: Sequence[AblationRule]) -> str:
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


def _callers(rules: Iterable[AblationRule], modules: Modules) -> set[nn.Module]:
    """Modules whose calls tell that the model runs: the outermost, and those around the rules'."""
    running = {name for name, module in modules.items() if _runs(module)}
    around = {name for rule in rules for name in _parents(rule.name) if name in running}
    outermost = {name for name in running if not running.intersection(_parents(name))}
    return {modules[name] for name in around | outermost}


# Modules -----------------------------------------------------------------------------------------


class Notice(Listener):
    """Notes that a module is called."""

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """It is."""
        self._note()


def _same(value: Any) -> Any:
    return value


@dataclass(eq=False)
class AblationRule(Listener):
    """What becomes of the calls of one module."""

    name: str
    module: nn.Module
    how: str
    value: Value | None
    samples: Samples
    called: bool = False

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """It was called."""
        self.called = True

    def around(self, module: nn.Module, forward: Forward) -> Forward:
        """Ablations of one module act each on what those opened before it leave."""
        return functools.partial(self, forward)

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """What the module returns instead of ``forward(*args, **kwargs)``."""
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


def _zero(rule: AblationRule, forward: Forward, args: Any, kwargs: Any) -> Any:
    return rule.each(forward(*args, **kwargs), lambda x, _: torch.zeros_like(x.detach()))


def _mean(rule: AblationRule, forward: Forward, args: Any, kwargs: Any) -> Any:
    out = forward(*args, **kwargs)
    if rule.value is not None:
        return rule.each(out, rule.given)
    rule.samples.check(args, kwargs)
    means = Means(rule.samples, out)
    changed = rule.each(out, means)
    _check_samples(max(means.sizes), rule.samples.what)
    return changed


class Means:
    """The mean over samples of every floating tensor that a module returned."""

    def __init__(self, samples: Samples, out: Any) -> None:
        self.samples = samples
        self.packed = {id(each.data): each for each in packed_in(out)}
        self.sizes: list[int] = []  # how many samples there were

    def __call__(self, x: Tensor, number: int) -> Tensor:
        """The mean, as large as the tensor."""
        if id(x) in self.packed:
            steps = self.packed[id(x)].batch_sizes.tolist()
            self.sizes.append(max(steps, default=0))
            parts = [
                step.mean(0, keepdim=True).expand_as(step)
                for step in x.detach().split_with_sizes(steps)
            ]
            return torch.cat(parts) if parts else x.detach().clone()
        mean, size = averaged(x, self.samples.dim_of(x, number))
        self.sizes.append(size)
        return mean.expand_as(x).clone()


def _remove(rule: AblationRule, forward: Forward, args: Any, kwargs: Any) -> Any:
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


def _passed(rule: AblationRule, given: Tensor, wanted: Tensor) -> Tensor:
    if given.shape != wanted.shape:
        raise GradtraceError(
            f"module {rule.name!r} cannot be removed: it is given shape {tuple(given.shape)} and "
            f"returns shape {tuple(wanted.shape)}; use how='zero'"
        )
    # A copy, since the model may write to what a module returns and go on to use what it gave.
    return given.to(wanted.device, wanted.dtype, copy=True)


# Where samples lie --------------------------------------------------------------------------------

LAYERS = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoderLayer,
    nn.TransformerDecoder,
    nn.Transformer,
)
"""Layers that say where samples lie, in what they return and in what lies inside them."""


def batch_first(module: nn.Module) -> bool | None:
    """Whether samples come before time, in layers that know; None for other modules."""
    if isinstance(module, nn.RNNCellBase):
        return True
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return bool(module.batch_first)
    if isinstance(module, LAYERS):
        parts = (m for m in module.modules() if isinstance(m, nn.MultiheadAttention))
        attention = next(parts, None)
        return None if attention is None else bool(attention.batch_first)
    return None


def _layer_around(name: str, modules: Modules) -> nn.Module | None:
    """The innermost layer that a module lies in."""
    around = [modules[parent] for parent in _parents(name)[::-1]]
    return next((module for module in around if batch_first(module) is not None), None)


def packed_in(value: Any) -> list[PackedSequence]:
    """The packed sequences in a nest."""
    if isinstance(value, PackedSequence):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, field.name, None) for field in fields(value))
    if isinstance(value, (tuple, list)):
        return [each for part in value for each in packed_in(part)]
    return []


def _spatial(module: nn.Module | None) -> int | None:
    """How many dimensions an image has, for PyTorch's layers that also take one without samples."""
    kinds = [k for k in type(module).__mro__ if k.__module__.startswith("torch.nn.modules.")]
    for kind in kinds:
        if kind.__name__[-2:] in ("1d", "2d", "3d") and "BatchNorm" not in kind.__name__:
            return int(kind.__name__[-2])
    return None


@dataclass(frozen=True, eq=False)
class Samples:
    """Where the samples lie in what a module returns, or in a labelled tensor."""

    what: str
    module: nn.Module | None = None
    around: nn.Module | None = None  # the layer that it lies in
    given: int | None = None  # by the user
    timed: str | None = None  # the name of a layer of the model that has time first

    def check(self, args: Any, kwargs: Any) -> None:
        """Refuse a layer that is given one sample without a batch dimension."""
        if not self._is_layer():
            return
        named = [kwargs[key] for key in ("input", "query", "src", "tgt") if key in kwargs]
        first = next(iter((*args, *named)), None)
        whole = 2 if isinstance(self.module, nn.RNNCellBase) else 3
        if isinstance(first, Tensor) and first.dim() == whole - 1:
            self._refuse_one(first)

    def dim_of(self, tensor: Tensor, number: int) -> int:
        """The dimension along which the samples of output ``number`` lie."""
        if self._is_layer():
            return self._in_layer(number)
        if self.given is not None:
            return self._as_given(self.given, tensor)
        size = _spatial(self.module)
        if size is not None and tensor.dim() == size + 2:
            return 0
        if size is not None and tensor.dim() == size + 1:
            self._refuse_one(tensor)
        if self.around is not None:
            if tensor.dim() == 2:
                self._refuse_one(tensor)
            return 0 if batch_first(self.around) or tensor.dim() != 3 else 1
        if tensor.dim() > 2 and self.timed is not None:
            raise GradtraceError(
                f"{self.what} has shape {tuple(tensor.shape)}, where dimension 0 may be samples or "
                f"time, as in {repr(self.timed) if self.timed else 'the model itself'}: say with "
                "batch_dim=0 or batch_dim=1 which dimension samples are"
            )
        return 0

    def _is_layer(self) -> bool:
        """Whether it is one of PyTorch's layers, with their ``forward``."""
        own = getattr(type(self.module), "forward", None)
        home = str(getattr(own, "__module__", ""))
        return isinstance(self.module, LAYERS) and home.startswith("torch.nn.")

    def _in_layer(self, number: int) -> int:
        assert self.module is not None
        if isinstance(self.module, nn.RNNBase) and number:
            return 1  # states have layers first
        if isinstance(self.module, nn.MultiheadAttention) and number:
            return 0  # weights have samples first
        return 0 if batch_first(self.module) else 1

    def _as_given(self, dim: int, tensor: Tensor) -> int:
        dims = max(tensor.dim(), 1)
        if not -dims <= dim < dims:
            raise GradtraceError(
                f"{self.what} has shape {tuple(tensor.shape)}, and so no dimension {dim}, as "
                "batch_dim says"
            )
        return dim % dims

    def _refuse_one(self, tensor: Tensor) -> None:
        raise GradtraceError(
            f"{self.what} works on one sample without a batch dimension here (shape "
            f"{tuple(tensor.shape)}), and one sample has no mean over samples; use batches, "
            "how='zero', or give values"
        )


HOWS: dict[str, Callable[[AblationRule, Forward, Any, Any], Any]] = {
    "zero": _zero,
    "mean": _mean,
    "remove": _remove,
}


class MetaCopies(TorchFunctionMode):
    """Copies of tensors get shape, dtype and device, and no data."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``clone`` is how a parameter is copied."""
        if func is Tensor.__deepcopy__ or func is Tensor.clone:
            return self.mode.from_tensor(args[0].detach(), static_shapes=True)
        return func(*args, **(kwargs or {}))


def outline(rule: AblationRule, args: Any, kwargs: Any) -> tuple[Any, dict[int, tuple[Any, Any]]]:
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
        with torch.no_grad(), UNFUSED:
            with MetaCopies(mode):
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


class LabelledSlices:
    """What becomes of the slices that ``gradtrace.label`` marks with some names."""

    def __init__(
        self, how: str, values: Mapping[str, Value | None], samples: Mapping[str, Samples]
    ) -> None:
        self.how = how
        self.values = values  # by name, as asked for
        self.samples = samples
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
        mean, size = averaged(tensor, self._along(asked, tensor, dim))
        _check_samples(size, repr(asked))
        return mean

    def _along(self, asked: str, tensor: Tensor, dim: int) -> int:
        """The dimension of samples, which is not the one that is labelled."""
        samples = self.samples[asked]
        found = samples.dim_of(tensor, 0)
        if samples.given is not None and found == dim:
            raise GradtraceError(
                f"{asked!r} marks slices along dimension {dim}, which batch_dim says are samples"
            )
        return found if found != dim else 1 - min(dim, 1)

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


def floating(value: Any) -> list[Tensor]:
    """The floating tensors in a nest, in order."""
    return [tensor for tensor in tensors_in(value) if floats(tensor)]


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


def _fuses(module: nn.Module, rules: Mapping[nn.Module, AblationRule]) -> bool:
    """Whether it may pass over a module that is to be ablated."""
    return isinstance(module, FUSED) and any(part in rules for part in module.modules())
