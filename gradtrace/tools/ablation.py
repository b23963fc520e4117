"""``ablate``: run a model without some of its parts, to see whether they matter."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import getattr_static
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradtrace.autodiff import labels
from gradtrace.errors import GradtraceError, UnknownName, did_you_mean
from gradtrace.pytorch.global_switches import UNFUSED, eager
from gradtrace.pytorch.module_calls import listen
from gradtrace.pytorch.wrapped_modules import named_modules
from gradtrace.tools.ablation_rules import HOWS, Calls, LabelRule, ModuleRule, Value
from gradtrace.tools.batch_dims import BatchDim, SingleSamples, batch_first

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
      time first, too; for the one dimension of an activation; inside ``torch.vmap``. A single
      sample without a batch dimension has no mean and is an error;
    - ``"remove"``: ``out = in``, the first floating tensor that the module is given, and its
      gradient; the module does not run. Its other outputs are inputs that it would pass through,
      or else zero. Slices cannot be removed.

    With ``"zero"`` and ``"mean"`` the module still runs: what it writes to buffers, or in place to
    its input, remains, with its gradient. Outputs that overlap in memory (a tensor and a view of
    it) still do, unless ``values`` differ there; if their means differ, that is an error. A name
    that was never called inside is an error at the end, since nothing was ablated then. Parameters
    are not changed and nothing is added to the model, which may be copied and saved inside;
    afterwards it is as before, also after an error. Blocks under ``torch.utils.checkpoint`` run
    again in the backward pass: call that inside, too.

    Args:
        model: The model; its parameters are not changed.
        names: Modules, patterns or ``"label:..."`` to take away.
        how: ``"zero"``, ``"mean"`` or ``"remove"``, as above.
        values: With ``"mean"``, what an output becomes, by name.
        batch_dim: With ``"mean"``, the batch dimension, for all names or ``{name: dim}``.

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
        self.model = model
        self.names = names
        self.how = how
        self.values = dict(values or {})
        self._batch_dims = _dims(batch_dim, names, how)
        self._open = False
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> tuple[str, ...]:
        if self._open:
            raise GradtraceError("this ablation is already open; make a second gradtrace.ablate")
        modules = dict(named_modules(self.model))
        self._asked = {n: _found(n, modules) for n in self.names if not n.startswith(LABEL)}
        found = dict.fromkeys(n for asked in self.names for n in self._asked.get(asked, [asked]))
        self._check_keys([*found, *self._asked])
        self._make_rules(modules)
        self._open = True
        try:
            self._begin(modules)
        except BaseException:
            self._close()
            raise
        return tuple(found)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close()
        if kind is None:
            self._raise_if_unused()

    def _check_keys(self, known: list[str]) -> None:
        for word, given in (("values", self.values), ("batch_dim", self._batch_dims)):
            for name in given:
                if name not in known:
                    hint = did_you_mean(name, known, show=repr)
                    raise UnknownName(f"{word}[{name!r}] is not ablated{hint}")

    def _make_rules(self, modules: Modules) -> None:
        """One rule for each module, even if several names refer to it, and for each label."""
        timed = next((n for n, m in modules.items() if batch_first(m) is False), None)
        self._singles = SingleSamples(modules if self.how == "mean" else {})
        self._calls = Calls()  # of the model
        self._rules: dict[nn.Module, ModuleRule] = {}
        for asked, found in self._asked.items():
            for name, module in found.items():
                value = self.values.get(name, self.values.get(asked))
                given = self._batch_dims.get(name, self._batch_dims.get(asked))
                around = [modules[parent] for parent in _parents(name)]
                dim = BatchDim(f"module {name!r}", module, around, given, timed, self._singles)
                rule = ModuleRule(name, self.how, value, dim, module)
                self._rules.setdefault(module, rule)
        self._labels: list[LabelRule] = []
        for name in dict.fromkeys(n for n in self.names if n.startswith(LABEL)):
            given = self._batch_dims.get(name)
            dim = BatchDim(repr(name), given=given, timed=timed, singles=self._singles)
            self._labels.append(LabelRule(name, self.how, self.values.get(name), dim))

    def _begin(self, modules: Modules) -> None:
        self._undo.enter_context(eager())
        fused = [module for module in modules.values() if isinstance(module, FUSED)]
        if any(part in self._rules for module in fused for part in module.modules()):
            self._undo.enter_context(UNFUSED())
        names = [rule.name for rule in self._rules.values()]
        self._undo.callback(listen(self._calls, _callers(names, modules)))
        self._undo.callback(listen(self._singles, self._singles.names))
        for rule in self._rules.values():
            self._undo.callback(listen(rule, [rule.module]))
        for label in self._labels:
            labels.CUTS.append(label)
            self._undo.callback(labels.CUTS.remove, label)

    def _close(self) -> None:
        self._undo.close()
        self._open = False

    def _raise_if_unused(self) -> None:
        """Raise an error if the model ran and a name was not ablated."""
        ablated = {rule.module for rule in self._rules.values() if rule.called}
        if self.how == "remove":
            ablated = {part for module in ablated for part in module.modules()}
        for asked, found in self._asked.items():
            if self._calls.called and ablated.isdisjoint(found.values()):
                raise GradtraceError(_never_called(asked, next(iter(found))))
        for label in self._labels:
            if not label.called and (self._calls.called or label.seen):
                wanted = label.name.removeprefix(LABEL)
                raise UnknownName(
                    f"no label {wanted!r} came up inside ablate, so nothing was ablated"
                    f"{did_you_mean(wanted, label.seen, show=repr)}"
                )


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
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if not all(bool(torch.as_tensor(x).isfinite().all()) for x in _several(value)):
            raise GradtraceError(
                f"values[{name!r}] has elements that are NaN or infinite, which the model would "
                "compute with; replace them, as by torch.nan_to_num"
            )
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


def _several(value: Value) -> Sequence[Tensor | float]:
    return value if isinstance(value, Sequence) else (value,)


def _dims(dim: object, names: Sequence[str], how: str) -> dict[str, int]:
    """The user's batch dimensions by name."""
    by_name = dim if isinstance(dim, Mapping) else dict.fromkeys(names, dim)
    dims = {} if dim is None else dict(by_name)
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in dims.values()):
        raise GradtraceError(f"batch_dim is a number, or {{name: number}}, not {dim!r}")
    if dims and how != "mean":
        raise GradtraceError(f"batch_dim is where means are taken; say how='mean', not {how!r}")
    return dims


# Names -------------------------------------------------------------------------------------------


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
    own = getattr_static(type(module), "forward", None)  # that of traced modules cannot be read
    return "forward" in vars(module) or own is not nn.Module.forward


def _never_called(asked: str, name: str) -> str:
    parent = name.rpartition(".")[0]
    return (
        f"module {asked!r} was never called inside ablate though the model ran, so nothing was "
        "ablated: what is around it skips it, or uses its parameters itself (as "
        "nn.MultiheadAttention does with its out_proj); ablate "
        f"{f'the module around it, {parent!r}' if parent else 'another module'}"
    )


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))] if name else []


def _callers(names: list[str], modules: Modules) -> set[nn.Module]:
    """Modules whose calls show that the model runs: the outermost, and those around ``names``."""
    running = {name for name, module in modules.items() if _runs(module)}
    around = {parent for name in names for parent in _parents(name)}
    outermost = {name for name in running if running.isdisjoint(_parents(name))}
    return {modules[name] for name in running & around | outermost}
