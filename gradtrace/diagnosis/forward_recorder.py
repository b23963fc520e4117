"""Writes down a forward pass while it runs: ``ForwardRecorder`` sees each call of PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from types import BuiltinFunctionType, FrameType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradtrace.autodiff import nodes
from gradtrace.autodiff.pass_scope import own_work_runs
from gradtrace.diagnosis.forward_record import (
    EXITS,
    Element,
    ForwardRecord,
    Operation,
    first_bad,
    is_batched,
)
from gradtrace.diagnosis.read_numbers import ReadNumbers
from gradtrace.diagnosis.source_lines import (
    SourceLine,
    block_line,
    decorator_line,
    place,
    switched_by,
)
from gradtrace.pytorch.function_modes import ForgivingMode
from gradtrace.pytorch.nested import tensors_in
from gradtrace.pytorch.plain_tensors import PLAIN, is_wrapper


class ForwardRecorder(ForgivingMode):
    """Writes a ``ForwardRecord`` while it is entered; ``module`` names the module that runs
    (None: none does).
    """

    def __init__(self, record: ForwardRecord, module: Callable[[], str | None]) -> None:
        super().__init__()
        self.record = record
        self._module = module
        self._off_line: SourceLine | None = None
        self._off_by = ""
        self._read = ReadNumbers()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch, and record it if it takes or makes values."""
        kwargs = kwargs or {}
        name = _name(func) if self.record.whole else ""
        if name == "_set_grad_enabled":
            if not args[0] and torch.is_grad_enabled():
                self._turned_off(sys._getframe(1))
            return func(*args, **kwargs)
        if not name or own_work_runs():  # or inside a backward pass
            return func(*args, **kwargs)
        given, numbers = _arguments(args, kwargs)
        if any(type(each) not in PLAIN and is_lazy(each) for each in given):
            return func(*args, **kwargs)  # parameters that have no numbers yet
        if name in _RUNNING:
            self.record.measure_given(given)
        versions = [*map(_version, given)]
        needing = [tensor for tensor in given if tensor.requires_grad]
        start = nodes.next_sequence()
        out = func(*args, **kwargs)
        made = [out] if type(out) is Tensor else tensors_in(out)
        changed = given[:1]
        if name not in ("data=", "detach_"):  # which count as no change
            changed = [t for t, before in zip(given, versions) if _version(t) != before]
            if UNCOUNTED in versions:
                changed += _written(name, given, made)
        old = {*map(id, given)}
        fresh = [t for t in made if id(t) not in old]
        if fresh or changed or name in EXITS:
            new = {*map(id, fresh), *map(id, changed)}
            same = {id(t) for t in made if id(t) not in new}
            needs = any(id(t) not in same for t in needing)
            written = not _in_flight(func, out)
            moves = name in _MOVES and type(func) is MethodDescriptorType
            self._write(name, numbers, given, needs, fresh, changed, start, written, moves)
            if isinstance(out, float):
                line = self.record.operations[-1].where.line
                self._read.add(out, self.record.count, "" if line is None else str(line[:2]))
        return out

    def _turned_off(self, frame: FrameType) -> None:
        """Note the line that turns gradients off; the end of an ``enable_grad`` leaves them as
        they were before it.
        """
        outer = frame.f_back
        leaving = "__exit__" in (frame.f_code.co_name, outer and outer.f_code.co_name)
        if not leaving or self._off_line is None:
            self._off_line = decorator_line(frame) or place(frame).line
            self._off_by = switched_by(frame)

    def _write(
        self,
        name: str,
        numbers: list[float],
        given: list[Tensor],
        needs: bool,
        fresh: list[Tensor],
        changed: list[Tensor],
        start: int,
        written: bool,
        moves: bool,
    ) -> None:
        record = self.record
        where = place(sys._getframe(2), functions=not torch.is_grad_enabled())
        given, needs = ([], False) if name in _SHAPE_ONLY else (given, needs)
        inputs = self._inputs(given, changed, numbers)
        old = [record.known(each) for each in changed]
        outputs = [*map(record.make, fresh), *map(record.write, changed)]
        made = (*fresh, *changed)
        for value, tensor in zip(outputs, made):
            if written and not (moves and record.carry(inputs, value, tensor)):
                record.measure(value, tensor)
        if name in EXITS:  # the value is the number in Python
            record.count += 1
            outputs.append(record.count)
        off, module = _why_off(where.inside), self._module()
        operation = Operation(
            name,
            module or "",
            where,
            inputs,
            needs,
            tuple(outputs),
            frozenset(value for value, each in zip(outputs, made) if each.requires_grad),
            off,
            where.around if off == "checkpoint" else self._line_off(off),
            not all(map(isfinite, numbers)),
            module is not None,
            off_by=self._off_by if off == "no_grad" else "",
            batched=is_batched(),
            changed=tuple(value for value in old if value is not None),
        )
        operation.element = self._element(operation, given, made)
        record.add(operation, start)

    def _line_off(self, off: str) -> SourceLine | None:
        """The line that turned gradients off, if it is known."""
        if off == "inference_mode":
            return block_line(sys._getframe(3), off)
        return self._off_line if off == "no_grad" else None

    def _inputs(
        self, given: list[Tensor], changed: list[Tensor], numbers: list[float]
    ) -> tuple[int, ...]:
        """The values of a call's arguments, those of numbers that were read from a tensor too."""
        inputs: dict[int, None] = {}
        for tensor in given:
            if changed and any(tensor is each for each in changed):
                own = self.record.known(tensor)  # its numbers are gone
                inputs.update({} if own is None else {own: None})
            else:
                values = self.record.read(tensor)
                inputs.update(dict.fromkeys(values))
                self._note_function(tensor, values)
        if numbers and self._read:
            for number in numbers:
                inputs.update(dict.fromkeys(self._read.values(number)))
        return tuple(inputs)

    def _note_function(self, tensor: Tensor, values: Iterable[int]) -> None:
        """Remember the node of a custom function, whose output was made without a graph."""
        record = self.record
        for value in values:
            maker = record.makers.get(value)
            if maker is not None and record.operations[maker].off and tensor.requires_grad:
                node = nodes.maker_of(tensor)
                number = None if node is None else nodes.sequence_of(node)
                if number is not None:
                    record.wrapped.setdefault(value, number)

    def _element(
        self, operation: Operation, given: list[Tensor], made: tuple[Tensor, ...]
    ) -> Element | None:
        """Which element an operation made NaN or infinite, of inputs that were not."""
        record, extents = self.record, self.record.extents
        for value, tensor in zip(operation.outputs, made):
            extent = extents.get(value)
            if extent is None or not extent.bad:
                continue
            record.measure_given(given)
            before = [extents[v] for v in operation.inputs if v in extents]
            if any(each.nan if extent.nan else each.bad for each in before):
                continue
            kept = [t for t in given if not any(t is each for each in made)]
            return first_bad(tensor.detach(), kept)
        return None


def _in_flight(func: Any, out: Any) -> bool:
    """Whether another thread may still write what a function has made: functional collectives
    return at once, and ``async_op=True`` returns something to wait for. Until then memory holds
    anything.
    """
    if type(func) in _AT_ONCE or out is None:
        return False
    return str(getattr(func, "__module__", "")).startswith(_COLLECTIVES)


def _name(func: Any) -> str:
    """``detach``, ``.data`` for the getter of an attribute, ``data=`` for its setter; empty for
    functions that make no values.
    """
    if type(func) in _NAMED:
        name = func.__name__
        return "" if name in _QUIET else name
    name = str(getattr(func, "__name__", type(func).__name__))
    if name == "__get__":
        name = "." + str(getattr(func.__self__, "__name__", ""))
        return name if name in _GETTERS else ""
    if name == "__set__":
        return "data=" if getattr(func.__self__, "__name__", "") == "data" else ""
    return "" if name in _QUIET else name


_NAMED = (BuiltinFunctionType, FunctionType, MethodDescriptorType)

_AT_ONCE = (BuiltinFunctionType, MethodDescriptorType)
_COLLECTIVES = ("torch._ops._c10d_functional", "torch._ops.c10d", "torch.distributed.")

_MOVES = frozenset(
    ("view", "reshape", "transpose", "permute", "contiguous", "unsqueeze", "squeeze", "flatten")
    + ("unflatten", "movedim", "swapaxes", "t", "clone")
)
"""Methods whose result has the elements of the tensor, if it is of its dtype."""

_GETTERS = frozenset((".data", ".real", ".imag", ".T", ".mT", ".H", ".mH"))
_QUIET = frozenset(
    ("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__", "__repr__")
    + ("__format__", "__bool__", "__hash__", "requires_grad_", "get_device", "is_contiguous")
)


_RUNNING = frozenset(("batch_norm", "instance_norm"))
"""Functions that change running statistics, which PyTorch does not count as a change in place."""

_SHAPE_ONLY = frozenset(
    ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
    + ("randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
)
"""Functions that take the shape of a tensor, and not its values."""


def _version(tensor: Tensor) -> int:
    if type(tensor) not in PLAIN and is_wrapper(tensor):
        return 0
    return UNCOUNTED if tensor.is_inference() else tensor._version


UNCOUNTED = -1
"""The version of tensors of inference mode, whose changes PyTorch does not count."""


def _written(name: str, given: list[Tensor], made: list[Tensor]) -> list[Tensor]:
    """The arguments that a call in inference mode has written to: those that it returns."""
    out = given[:1] if name == "__setitem__" else made
    return [t for t in given if t.is_inference() and any(t is each for each in out)]


def _why_off(inside: str) -> str:
    if torch.is_inference_mode_enabled():
        return "inference_mode"
    return "" if torch.is_grad_enabled() else inside or "no_grad"


_SIMPLE = frozenset((int, bool, str, type(None), torch.dtype, torch.device))


def _arguments(args: Any, kwargs: Any) -> tuple[list[Tensor], list[float]]:
    """The tensors and the Python numbers among the arguments of a call."""
    tensors: list[Tensor] = []
    numbers: list[float] = []
    for each in (*args, *kwargs.values()) if kwargs else args:
        kind = type(each)
        if kind in PLAIN:
            tensors.append(each)
        elif kind not in _SIMPLE:
            tensors += tensors_in(each)
            numbers += _numbers(each)
    return tensors, numbers


def _numbers(call: Any) -> Iterator[float]:
    """The Python numbers in an argument of a call."""
    if isinstance(call, float):
        yield call
    elif isinstance(call, (tuple, list)):
        for each in call:
            yield from _numbers(each)
    elif isinstance(call, dict):
        yield from _numbers(list(call.values()))
