"""``Session``: what can be asked of a loss; ``watch``: the session of a model's forward pass, which
records the module call that made each operator.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradtrace.autodiff import nodes
from gradtrace.autodiff.backward import RECENT, gradient, seed_of
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.loss_checks import admit, isolated
from gradtrace.autodiff.names import (
    GIVEN,
    MADE,
    NO_MODULE,
    Gradients,
    LazyGradients,
    ModuleCall,
    NameTable,
    ThreadCall,
)
from gradtrace.autodiff.nodes import annotate
from gradtrace.autodiff.pass_scope import backward_runs
from gradtrace.autodiff.traversal import walk
from gradtrace.errors import GradtraceError, NotScalar, UnknownName, Unsupported
from gradtrace.graphs.graph import Graph, build
from gradtrace.ir import interpreter, memory
from gradtrace.ir.nonfinite import maybe_nonfinite, refuse_nonfinite
from gradtrace.ir.optimise import simplified
from gradtrace.ir.program import Program
from gradtrace.pytorch import composed_lstm
from gradtrace.pytorch.global_switches import COMPOSED, eager
from gradtrace.pytorch.module_calls import Listener, listen, same_in_replicas
from gradtrace.pytorch.nested import tensors_in
from gradtrace.pytorch.wrapped_modules import join, named_modules, named_parameters, refuse_sharded
from gradtrace.recording.record import DENSE_MAX_ENTRIES, record
from gradtrace.semirings import SUM, Semiring
from gradtrace.trace import Trace

T = TypeVar("T")
W = TypeVar("W", bound="watch")

KEPT_MIN_BYTES = 1 << 24
"""The least number of bytes of gradients that a trace may keep."""


class Session:
    """Answers questions about losses, by the names of leaves and modules that it knows.

    Without a model these are the ``names`` of leaves; the functions of ``gradtrace.api`` are such
    sessions of one question.
    """

    _frames = 4  # from a warning to the user: this method, ``isolated``, the function, its caller

    def __init__(self, names: Mapping[str, Tensor] | None = None) -> None:
        self.name_table = NameTable.of(names)
        self._hooks = RECENT

    def _classes(self) -> Mapping[str, str]:
        """The class of each module, by name."""
        return {}

    def graph(self, loss: Tensor) -> Graph:
        """The computation graph behind the loss, with the module of each operator."""
        return build(loss, self.name_table, self._hooks)

    @isolated()
    def backward(
        self,
        loss: Tensor,
        semiring: Semiring = SUM,
        *,
        leaves: Iterable[str] | None = None,
        cotangent: Tensor | None = None,
        schedule: str = "kahn",
        nonfinite: str = "raise",
    ) -> Gradients:
        """``{name: value}`` for every leaf; see ``gradtrace.backward``."""
        if not isinstance(semiring, Semiring):
            raise GradtraceError(
                f"{semiring!r} is no semiring; pass one of gradtrace.semirings, such as "
                "gradtrace.semirings.MAX, or a subclass of gradtrace.semirings.Semiring"
            )
        _one_of("nonfinite", nonfinite, "raise", "allow")
        if isinstance(leaves, str):
            raise UnknownName(f"leaves is a list of names: leaves=[{leaves!r}]")
        table, hooks = self.name_table, self._hooks
        admit(loss, table, elements=semiring is not SUM)
        seed = seed_of(loss, cotangent)
        notes: tuple[str, ...] = ()
        if semiring is SUM:
            found = gradient(loss, seed, table, hooks, schedule)
            RECENT.refresh()
        else:
            memory.see_recording(loss)
            recorded = self._recorded(loss, seed, schedule, bare=True)
            found = list(interpreter.run(recorded, semiring).items())
            notes = tuple(dict.fromkeys(recorded.notes()))
        named = Gradients(*_named(found, table, loss), notes)
        if leaves is not None:
            named = Gradients({name: named[name] for name in leaves}, notes=notes)
        if notes:
            text = f"values of {semiring.name} are not exact. {'; '.join(notes)}"
            warnings.warn(text, stacklevel=self._frames)
        if semiring is SUM and nonfinite == "raise":
            refuse_nonfinite(named, loss, seed, table, hooks)
        return named

    @isolated()
    def program(
        self,
        loss: Tensor,
        *,
        cotangent: Tensor | None = None,
        schedule: str = "kahn",
        dense_limit: int = DENSE_MAX_ENTRIES,
    ) -> Program:
        """The backward program of the loss; see ``gradtrace.program``."""
        admit(loss, self.name_table)
        return self._recorded(loss, seed_of(loss, cotangent), schedule, dense_limit)

    @isolated()
    def trace(
        self,
        loss: Tensor,
        *,
        rule: str = "greedy",
        granularity: str = "scalar",
        nonfinite: str = "raise",
        dense_limit: int = DENSE_MAX_ENTRIES,
    ) -> Trace:
        """The paths of the loss's gradient; see ``gradtrace.trace``."""
        _one_of("nonfinite", nonfinite, "raise", "allow")
        _one_of("rule", rule, "greedy", "viterbi")
        _one_of("granularity", granularity, "scalar", "operator")
        table, hooks = self.name_table, self._hooks
        admit(loss, table)
        if loss.dim() > 1:
            raise NotScalar(
                f"the loss has shape {tuple(loss.shape)}; trace one loss, or a vector with a loss "
                "for each sample, such as losses.flatten(1).mean(1)"
            )
        if not loss.numel():
            raise NotScalar("the loss is an empty vector; there is nothing to trace")
        seed = torch.ones_like(loss, memory_format=torch.preserve_format).detach()
        opaque, keep = granularity == "operator", kept_gradient_bytes(table, loss.device)
        memory.see_recording(loss, keep)
        recorded = self._recorded(loss, seed, "kahn", dense_limit, opaque, keep)
        named, aliases = _named([(leaf.tensor, leaf) for leaf in recorded.leaves], table, loss)
        gradients = LazyGradients({name: leaf.compute for name, leaf in named.items()}, aliases)
        if nonfinite == "raise":
            doubtful = {name: gradients[name] for name in maybe_nonfinite(named)}
            refuse_nonfinite(doubtful, loss, seed, table, hooks)
        names = {leaf.value: name for name, leaf in named.items()}
        return Trace(recorded, gradients, rule, granularity, loss.numel(), self._classes(), names)

    def _recorded(self, loss: Tensor, seed: Tensor, *options: Any, **more: Any) -> Program:
        """The program of a loss; the options are those of ``record``."""
        found = simplified(record(loss, seed, self.name_table, self._hooks, *options, **more))
        RECENT.refresh()
        return found


def _one_of(word: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise UnknownName(f"{word} is {' or '.join(map(repr, allowed))}, not {value!r}")


def kept_gradient_bytes(table: NameTable, device: torch.device) -> int:
    """How many bytes of gradients a trace keeps: half the size of its leaves. A GPU's memory
    usually has one user, so there a quarter of the free memory, if that is more.
    """
    least = max(KEPT_MIN_BYTES, sum(x.numel() * x.itemsize for x, _ in table.leaves.values()) // 2)
    free = memory.available(device) if device.type == "cuda" else None
    return least if free is None else max(min(least, free // 2), free // 4)


def _named(
    found: Sequence[tuple[Tensor, T]], table: NameTable, loss: Tensor
) -> tuple[dict[str, T], dict[str, str]]:
    """Results by leaf name, in the order of the name table, and ``{alias: name}`` for leaves with
    several names. Raises for complex leaves.
    """
    results = {id(leaf): result for leaf, result in found}
    known = {key: names for key, (_, names) in table.leaves.items() if key in results}
    labels = {key: names[0] for key, names in known.items()}
    if len(set(labels.values())) < len(found):
        # Leaves without a gradient are numbered too, as in the graph.
        labels = {id(leaf): name for leaf, name in table.label(_leaves(loss)).items()}
    for leaf, _ in found:
        if leaf.is_complex():
            raise Unsupported(
                f"leaf {labels[id(leaf)]} is complex; a path needs real numbers. Use its real and "
                "imaginary parts as leaves: torch.view_as_complex(parts)"
            )
    aliases = {other: labels[key] for key, names in known.items() for other in names[1:]}
    return {name: results[key] for key, name in labels.items() if key in results}, aliases


def _leaves(loss: Tensor) -> list[Tensor]:
    """The leaves of a loss in the order of its graph."""
    found: list[Tensor] = []

    def visit(node: nodes.Node, _: nodes.Edges) -> None:
        if type(node) is nodes.ACCUMULATE:
            found.append(node.variable)

    walk(loss, visit)
    return found


class watch(Session, Listener):
    """Watch a model's forward pass: ``with gt.watch(model) as watch: loss = ...``.

    Inside, module calls are recorded on all threads; fused attention and recurrent layers are
    decomposed and compiled modules run eagerly, so that every operator can be followed. The model
    is not modified, and may be copied and saved inside. Calls on a thread that has opened its own
    watch are recorded by that watch only. With ``composed=False`` kernels stay fused, so that the
    pass gives the same bits as without a watch; on a CPU they can be decomposed later, at a cost.
    """

    _frames = 3  # no function around the method

    def __init__(self, model: nn.Module, *, composed: bool = True) -> None:
        if not isinstance(model, nn.Module):
            raise GradtraceError(
                f"watch takes a torch.nn.Module, got {type(model).__name__}; without a model use "
                "gradtrace.graph(loss, names=...) and gradtrace.backward(loss, names=...)"
            )
        super().__init__()
        self.model = model
        self.composed = composed
        self._hooks = HookWatch()
        self._stop_listening: Callable[[], None] | None = None
        self._modules: dict[int, nn.Module] = {}  # by id
        self._names: dict[int, str] = {}  # by id, and by ``same_in_replicas``
        self._calls: dict[str, int] = {}
        self._lock = threading.RLock()
        self._here = _ThreadState()
        self._thread = 0
        self._contexts = contextlib.ExitStack()

    # The forward pass ------------------------------------------------------------------------

    def __enter__(self: W) -> W:
        if self._stop_listening is not None:
            raise GradtraceError("this watch is already open; make a second gradtrace.watch(model)")
        if self._thread not in (0, threading.get_ident()):
            raise GradtraceError("this watch was open on another thread; make a second one")
        refuse_sharded(self.model)
        self._thread = threading.get_ident()
        self._here = _ThreadState()
        try:
            self._contexts.enter_context(eager())
            if self.composed:
                self._contexts.enter_context(COMPOSED)
            self._stop_listening = self._attach()
        except BaseException:
            self._close()
            raise
        _OPEN.watches += 1
        self._contexts.callback(_decrement)
        self._hooks.reset()
        return self

    def _attach(self) -> Callable[[], None]:
        """Name the parameters, and listen to every module call; returns a function to stop."""
        for name, parameter in named_parameters(self.model):
            self.name_table.name(parameter, name)
        for name, module in named_modules(self.model):
            self._know(module, name)
        return listen(self, self._modules.values())

    def _know(self, module: nn.Module, name: str) -> None:
        """Set the name of a module, if it has none so far."""
        self._modules.setdefault(id(module), module)
        for key in (id(module), same_in_replicas(module)):
            self._names.setdefault(key, name)

    def _name(self, module: nn.Module) -> str:
        found = self._names.get(id(module))
        return self._names[same_in_replicas(module)] if found is None else found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def inside(self, module: nn.Module) -> None:
        """The watch was opened inside the forward pass of this module."""
        self.enter(module, (), {})

    def _close(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None
        while self._here.stack:
            self._here.stack.pop().fuse_again()
        if self._thread == threading.get_ident():
            self.name_table.enter(_now(), NO_MODULE)
        self._contexts.close()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Noted | None:
        """A module is called: nodes created by this thread from now on belong to it."""
        here = self._here
        if self._stop_listening is None or not self._is_recording():
            return None
        if threading.get_ident() == self._thread:
            for each in (module,) if here.stack else tuple(self._modules.values()):
                self._name_parameters(each)
        elif here.away is None:
            here.away, self.name_table.away = ThreadCall(), True
            for tensor in tensors_in((args, kwargs)):
                annotate(tensor, here.away, GIVEN)
        notes = self.name_table if here.away is None else here.away
        noted = Noted(here, self._next_call(self._name(module)))
        here.stack.append(noted)
        notes.enter(_now(), noted.place)
        if self.composed and isinstance(module, nn.LSTM):
            noted.compose()
        return noted

    def _next_call(self, name: str) -> ModuleCall:
        with self._lock:
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
        return ModuleCall(name, call)

    def _name_parameters(self, module: nn.Module) -> None:
        """Name leaves that ``torch.func.functional_call`` substituted for parameters."""
        known = self.name_table.leaves
        for key, tensor in module._parameters.items():
            if isinstance(tensor, Tensor) and tensor.is_leaf and id(tensor) not in known:
                self.name_table.name(tensor, join(self._name(module), key))

    def leave(self, entered: Noted | None, result: Any) -> None:
        """The call has ended: new nodes belong to the enclosing module again."""
        if entered is None:
            return
        entered.fuse_again()
        here = entered.here
        if here is not self._here or not any(entered is each for each in here.stack):
            return  # the watch was closed in between
        while here.stack.pop() is not entered:
            pass  # entered by ``inside``
        notes = self.name_table if here.away is None else here.away
        notes.enter(_now(), here.stack[-1].place if here.stack else NO_MODULE)
        if here.away is not None and not here.stack:
            for tensor in tensors_in(result):
                annotate(tensor, here.away, MADE)
            here.away = None

    def _is_recording(self) -> bool:
        if backward_runs():
            return False
        if threading.get_ident() == self._thread:
            return True
        return not _OPEN.watches and torch.is_grad_enabled()

    def _classes(self) -> dict[str, str]:
        return {name: type(module).__name__ for name, module in named_modules(self.model)}


class _ThreadState(threading.local):
    """A watch's state for one thread."""

    def __init__(self) -> None:
        self.stack: list[Noted] = []
        # calls inside the outermost call, if this is not the watch's own thread
        self.away: ThreadCall | None = None


class Noted:
    """A module call in progress."""

    def __init__(self, here: _ThreadState, place: ModuleCall) -> None:
        self.here = here
        self.place = place
        self._composed = False

    def compose(self) -> None:
        """Run the LSTM of this call operator by operator instead of fused."""
        composed_lstm.begin()
        self._composed = True

    def fuse_again(self) -> None:
        """End ``compose``, if it was called."""
        if self._composed:
            self._composed = False
            composed_lstm.end()


class _OpenCount(threading.local):
    watches = 0  # open watches of this thread


_OPEN = _OpenCount()


def _decrement() -> None:
    _OPEN.watches -= 1


def _now() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
