"""``ablate``: run a model without some of its parts, to see whether they matter."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
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
from gradtrace.errors import GradtraceError, UnknownName, did_you_mean
from gradtrace.pytorch.global_switches import UNFUSED, eager
from gradtrace.pytorch.module_calls import Forward, Listener, listen
from gradtrace.pytorch.nested import mapped, tensors_in
from gradtrace.session import named_modules

Value: TypeAlias = Tensor | float | Sequence[Tensor | float]
Modules: TypeAlias = dict[str, nn.Module]
LABEL = "label:"
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules whose fused fast path in evaluation mode does not call the modules inside them."""


class ablate:
    """Run a model without some of its parts: ``with gt.ablate(model, "lstm"): loss = ...``.

    A name is a module's, as in ``model.named_modules()``; or a pattern, in which ``*`` stands for
    one part of a name and ``**`` for any number (``"layers.*.mlp"``); or ``"label:head 3"``, the
    slices of any tensor that ``gradtrace.label`` gave this name, or names of this pattern. The
    context manager returns the matching names. ``how`` determines what a module's output becomes:

    - ``"zero"``: ``out = 0``, for each floating tensor in it, and no gradient;
    - ``"mean"``: ``out[b] = 1/B · Σ_c out[c]`` over the B samples of the call, and no gradient; or
      ``values[name]``, broadcast (a sequence, where the module returns several tensors; for a
      label, to one slice). The batch dimension is 0; in PyTorch's recurrent, attention and
      transformer layers and the modules inside them, that of ``batch_first``; in packed sequences,
      the mean of a time step is over the samples that have it; in a tensor labelled along dimension
      0, it is 1. ``batch_dim`` overrides it, for all names or as ``{name: dim}``, and is required
      for tensors of three dimensions if a layer of the model has time first, since they may have
      time first, too. A single sample without a batch dimension has no mean and is an error;
    - ``"remove"``: ``out = in``, the first floating tensor that the module is given, and its
      gradient; the module does not run. Its other outputs are inputs that it would pass through,
      or else zero. Slices cannot be removed.

    With ``"zero"`` and ``"mean"`` the module still runs: what it writes to buffers, or in place to
    its input, remains, with its gradient. A name that was never called inside is an error at the
    end, since nothing was ablated then. Parameters are not changed and nothing is added to the
    model, which may be copied and saved inside; afterwards it is as before, also after an error.
    Blocks under ``torch.utils.checkpoint`` run again in the backward pass: call that inside, too.

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
        self._rules = self._rules_of(modules)
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
            self._raise_if_unused()

    def _check_values(self, known: list[str]) -> None:
        dims = self.batch_dim if isinstance(self.batch_dim, Mapping) else {}
        for word, given in (("values", self.values), ("batch_dim", dims)):
            for name in given:
                if name not in known:
                    hint = did_you_mean(name, known, show=repr)
                    raise UnknownName(f"{word}[{name!r}] is not ablated{hint}")

    def _rules_of(self, modules: Modules) -> dict[nn.Module, AblationRule]:
        """One rule for each module, even if several names refer to it."""
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

    def _raise_if_unused(self) -> None:
        """Raise an error if the model ran and a name was not ablated."""
        for asked, found in self._asked.items():
            rules = [self._rules[module] for module in found.values()]
            if self._ran and not any(rule.called or self._inside_removed(rule) for rule in rules):
                raise GradtraceError(_never_called(asked, rules))
        if self._ran or self._slices.seen:
            self._slices.raise_if_unseen()

    def _inside_removed(self, rule: AblationRule) -> bool:
        """Whether the rule's module is inside a module that was removed."""
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
    """The modules that a name or a pattern refers to."""
    if asked in modules:
        return {asked: _callable(asked, modules[asked])}
    pattern = asked.split(".")
    found = {n: m for n, m in modules.items() if n and matches(pattern, n.split("."))}
    if not found:
        hint = did_you_mean(asked, modules, show=repr)
        raise UnknownName(f"no module {asked!r} in this model{hint}")
    running = {name: module for name, module in found.items() if _runs(module)}
    return {name: _callable(name, module) for name, module in (running or found).items()}


def matches(pattern: Sequence[str], name: Sequence[str]) -> bool:
    """Whether the parts of a name match those of a pattern.

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
    """Whether it defines ``forward``, which nn.ModuleList does not."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


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
    """Modules whose calls show that the model runs: the outermost, and parents of the rules'."""
    running = {name for name, module in modules.items() if _runs(module)}
    around = {name for rule in rules for name in _parents(rule.name) if name in running}
    outermost = {name for name in running if not running.intersection(_parents(name))}
    return {modules[name] for name in around | outermost}


# Modules -----------------------------------------------------------------------------------------


class Notice(Listener):
    """Calls ``note`` when a module is called."""

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called when a module's forward pass begins."""
        self._note()


def _identity(value: Any) -> Any:
    return value


@dataclass(eq=False)
class AblationRule(Listener):
    """Ablates the calls of one module."""

    name: str
    module: nn.Module
    how: str
    value: Value | None
    samples: Samples
    called: bool = False

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called when the module's forward pass begins."""
        self.called = True

    def around(self, module: nn.Module, forward: Forward) -> Forward:
        """Wrap ``forward``. Of several ablations of a module, each acts on the result of those
        opened before it.
        """
        return functools.partial(self, forward)

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """The output in place of ``forward(*args, **kwargs)``."""
        return HOWS[self.how](self, forward, args, kwargs)

    def each(
        self,
        out: Any,
        change: Callable[[Tensor, int], Tensor],
        other: Callable[[Any], Any] = _identity,
    ) -> Any:
        """Map floating tensors in ``out`` by ``change(tensor, number)``, the rest by ``other``."""
        numbers = count()
        changed = mapped(out, lambda v: change(v, next(numbers)) if floats(v) else other(v))
        if next(numbers) == 0:
            raise GradtraceError(
                f"module {self.name!r} returned a {type(out).__name__} without a floating tensor "
                "that could be found, so nothing would be ablated; ablate a module inside it"
            )
        return changed

    def given(self, like: Tensor, number: int) -> Tensor:
        """The user's value for output ``number``, broadcast to its shape."""
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
        self.sizes: list[int] = []  # number of samples in each tensor

    def __call__(self, x: Tensor, number: int) -> Tensor:
        """The mean, expanded to the shape of the tensor."""
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
    # A copy, since the model may write in place to the output and still use the input.
    return given.to(wanted.device, wanted.dtype, copy=True)


# The batch dimension ------------------------------------------------------------------------------

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
"""Layers with a known batch dimension, for their outputs and for the modules inside them."""


def batch_first(module: nn.Module) -> bool | None:
    """Whether the batch dimension comes before time, in ``LAYERS``; None for other modules."""
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
    """The innermost of ``LAYERS`` that contains a module."""
    around = [modules[parent] for parent in _parents(name)[::-1]]
    return next((module for module in around if batch_first(module) is not None), None)


def packed_in(value: Any) -> list[PackedSequence]:
    """The packed sequences in a nested structure."""
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
    """The number of spatial dimensions of PyTorch's layers that accept unbatched input, or None."""
    kinds = [k for k in type(module).__mro__ if k.__module__.startswith("torch.nn.modules.")]
    for kind in kinds:
        if kind.__name__[-2:] in ("1d", "2d", "3d") and "BatchNorm" not in kind.__name__:
            return int(kind.__name__[-2])
    return None


@dataclass(frozen=True, eq=False)
class Samples:
    """Finds the batch dimension of a module's outputs, or of a labelled tensor."""

    what: str
    module: nn.Module | None = None
    around: nn.Module | None = None  # the layer that contains it
    given: int | None = None  # the user's batch_dim
    timed: str | None = None  # the name of a layer of the model that has time first

    def check(self, args: Any, kwargs: Any) -> None:
        """Raise an error if a layer is called with one sample without a batch dimension."""
        if not self._is_layer():
            return
        named = [kwargs[key] for key in ("input", "query", "src", "tgt") if key in kwargs]
        first = next(iter((*args, *named)), None)
        whole = 2 if isinstance(self.module, nn.RNNCellBase) else 3
        if isinstance(first, Tensor) and first.dim() == whole - 1:
            self._refuse_one(first)

    def dim_of(self, tensor: Tensor, number: int) -> int:
        """The batch dimension of output ``number``."""
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
        """Whether it is one of PyTorch's layers, with ``forward`` not overridden."""
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
    """Makes copies of tensors fake: with shape, dtype and device, and no data."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercepts ``deepcopy`` of tensors, and ``clone``, by which parameters are copied."""
        if func is Tensor.__deepcopy__ or func is Tensor.clone:
            return self.mode.from_tensor(args[0].detach(), static_shapes=True)
        return func(*args, **(kwargs or {}))


def outline(rule: AblationRule, args: Any, kwargs: Any) -> tuple[Any, dict[int, tuple[Any, Any]]]:
    """What a module would return, as fake tensors: nothing is computed, no random numbers drawn.

    A copy of the module with fake tensors runs on fake copies of the arguments, so that neither is
    changed. The second result maps the copies to their originals, to recognise inputs that are
    passed through: ``{id(copy): (copy, original)}``.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {
        id(hooks): OrderedDict()  # hooks are not copied: they may refer to anything
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
    """Ablates the slices that ``gradtrace.label`` gives some names."""

    def __init__(
        self, how: str, values: Mapping[str, Value | None], samples: Mapping[str, Samples]
    ) -> None:
        self.how = how
        self.values = values  # by name or pattern, as the user gave it
        self.samples = samples
        self.seen: dict[str, None] = {}
        self.matched: set[str] = set()

    def __call__(self, tensor: Tensor, dim: int, names: labels.Names) -> Tensor:
        """The tensor with the requested slices ablated."""
        self.seen.update(dict.fromkeys(name for name in names if name is not None))
        for asked in self.values:
            wanted = asked.removeprefix(LABEL)
            chosen = [n is not None and (n == wanted or fnmatchcase(n, wanted)) for n in names]
            if any(chosen):
                self.matched.add(asked)
                tensor = self._ablate(asked, tensor, dim, chosen)
        return tensor

    def _ablate(self, asked: str, tensor: Tensor, dim: int, chosen: list[bool]) -> Tensor:
        if not floats(tensor):
            raise GradtraceError(
                f"{asked!r} marks a tensor of {tensor.dtype}, which cannot be ablated; label a "
                "floating tensor"
            )
        shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
        mask = torch.tensor(chosen, device=tensor.device).view(shape)
        if self.how == "zero":
            return tensor.masked_fill(mask, 0)
        return torch.where(mask, self._replacement(asked, tensor, dim), tensor)

    def _replacement(self, asked: str, tensor: Tensor, dim: int) -> Tensor:
        """The values that replace the chosen slices, broadcastable to the tensor."""
        value = self.values[asked]
        if value is not None:
            shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
            return broadcast(value, tensor, shape, f"a slice of {asked!r}").unsqueeze(dim)
        if tensor.dim() == 1:
            raise GradtraceError(
                f"{asked!r} marks elements of a tensor of one dimension, so there is none to take "
                "the mean over; use how='zero', or give values"
            )
        mean, size = averaged(tensor, self._batch_dim(asked, tensor, dim))
        _check_samples(size, repr(asked))
        return mean

    def _batch_dim(self, asked: str, tensor: Tensor, dim: int) -> int:
        """The batch dimension, which is not the labelled one."""
        samples = self.samples[asked]
        found = samples.dim_of(tensor, 0)
        if samples.given is not None and found == dim:
            raise GradtraceError(
                f"{asked!r} marks slices along dimension {dim}, which batch_dim says are samples"
            )
        return found if found != dim else 1 - min(dim, 1)

    def begin(self) -> None:
        """Make ``gradtrace.label`` ablate these slices from now on."""
        if self.values:
            labels.CUTS.append(self)

    def end(self) -> None:
        """Undo ``begin``."""
        if self in labels.CUTS:
            labels.CUTS.remove(self)

    def raise_if_unseen(self) -> None:
        """Raise an error if a label was never seen."""
        for asked in self.values:
            if asked not in self.matched:
                name = asked.removeprefix(LABEL)
                raise UnknownName(
                    f"no label {name!r} came up inside ablate, so nothing was ablated"
                    f"{did_you_mean(name, self.seen, show=repr)}"
                )


# Values ------------------------------------------------------------------------------------------


def floats(value: object) -> bool:
    """Whether it is a real or complex floating tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def floating(value: Any) -> list[Tensor]:
    """The floating tensors in a nested structure, in order."""
    return [tensor for tensor in tensors_in(value) if floats(tensor)]


def averaged(tensor: Tensor, dim: int) -> tuple[Tensor, int]:
    """The mean along ``dim``, kept with size 1, and the number of samples."""
    tensor = tensor.detach()
    return (tensor.mean(dim, keepdim=True), tensor.shape[dim]) if tensor.dim() else (tensor, 1)


def _check_samples(size: int, what: str) -> None:
    if size == 1:
        raise GradtraceError(
            f"{what} holds one sample in this call, and its mean is the sample itself, so nothing "
            "would be ablated; use larger batches (and drop_last), or give values"
        )


def broadcast(value: Any, like: Tensor, shape: Sequence[int], what: str) -> Tensor:
    """A user's value, expanded to ``shape``, with the dtype and device of ``like``."""
    found = torch.as_tensor(value).detach().to(like)
    try:
        return found.expand(tuple(shape))
    except RuntimeError:
        raise GradtraceError(
            f"the value given for {what} has shape {tuple(found.shape)}, which does not broadcast "
            f"to {tuple(shape)}"
        ) from None


def _fuses(module: nn.Module, rules: Mapping[nn.Module, AblationRule]) -> bool:
    """Whether its fused fast path may skip a module that is to be ablated."""
    return isinstance(module, FUSED) and any(part in rules for part in module.modules())
