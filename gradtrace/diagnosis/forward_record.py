"""``ForwardRecord``: the operations of a forward pass, their lines and what their values are of.

Other than the graph of autograd, this record also has what autograd does not see: values that were
detached, made under ``no_grad``, rounded to integers, or read into Python. So it tells how a
parameter and a loss are connected where no gradient flows between them.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isinf, isnan
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from gradtrace.diagnosis.source_lines import Place, SourceLine
from gradtrace.pytorch.plain_tensors import PLAIN, is_wrapper
from gradtrace.types import unravel

EXITS = frozenset(
    ("item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "__complex__")
    + ("__dlpack__", "__reduce_ex__")
)
"""Functions that read a tensor's numbers into Python."""


class Extent(NamedTuple):
    """The least and the greatest element of a value; NaN if any is."""

    low: float
    high: float
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nan(self) -> bool:
        """Whether an element is NaN."""
        return isnan(self.low)

    @property
    def bad(self) -> bool:
        """Whether an element is NaN or infinite."""
        return self.nan or isinf(self.low) or isinf(self.high)

    @property
    def zero(self) -> bool:
        """Whether all elements are 0."""
        return self.low == self.high == 0.0

    @property
    def largest(self) -> float:
        """``max |x[i]|``."""
        return max(-self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}" if self.low < self.high else f"{self.low:.4g}"


@dataclass(frozen=True)
class Element:
    """The first element of an output that is not finite, and what the inputs were."""

    index: tuple[int, ...]
    value: float
    count: int
    total: int
    inputs: tuple[str, ...]


@dataclass(eq=False)
class Operation:
    """A call of a PyTorch function in the forward pass."""

    name: str
    module: str
    where: Place
    inputs: tuple[int, ...]
    needs: bool  # an input requires grad
    outputs: tuple[int, ...]
    gives: frozenset[int]  # the outputs that require grad
    off: str  # why no graph is built: "", "no_grad", "inference_mode", "function", "checkpoint"
    off_line: SourceLine | None
    literal: bool  # an argument is a Python number that is infinite or NaN
    inside: bool  # a call of a module was running
    element: Element | None = None
    off_by: str = ""  # the function of a library that turned gradients off
    batched: bool = False  # inside a transform of ``torch.func``, whose results are not recorded
    changed: tuple[int, ...] = ()  # the values that it wrote over, in place

    @property
    def line(self) -> SourceLine | None:
        """The user's line: that which turned gradients off, or that of the call."""
        return self.off_line or self.where.line

    def cuts(self, values: set[int]) -> bool:
        """Whether no gradient passes to these of its outputs, though an input requires grad."""
        return self.needs and self.gives.isdisjoint(values)


Passes = Callable[[Operation], bool] | None
"""Which operations are followed; None: all."""

NAMES = {
    "__array__": "NumPy",
    "numpy": "NumPy",
    "__float__": "float()",
    "__int__": "int()",
    "__setitem__": "x[i] = y",
}


REFLECTED = frozenset(("rdiv", "rtruediv", "rsub", "rpow", "rmul", "radd", "rmatmul", "rmod"))


def plain(name: str) -> str:
    """A function's name as one says it: ``div`` for ``__rdiv__``, which ``1 / x`` calls."""
    name = name.strip("_")
    return {"rtruediv": "div", "truediv": "div"}.get(name, name[name in REFLECTED :])


def shown(operation: Operation) -> str:
    """An operation in words: ``relu() in 'encoder'``."""
    name = NAMES.get(operation.name, plain(operation.name) + "()")
    name = operation.name if operation.name.startswith(".") else name
    return f"{name} in '{operation.module}'" if operation.module else name


@dataclass(eq=False)
class ForwardRecord:
    """What a forward pass did, in order. Values are numbers; an in-place operation makes a new one
    of the same tensor.
    """

    operations: list[Operation] = field(default_factory=list)
    makers: dict[int, int] = field(default_factory=dict)  # by value: its operation
    users: dict[int, list[int]] = field(default_factory=dict)  # by value: operations
    extents: dict[int, Extent] = field(default_factory=dict)
    wrapped: dict[int, int] = field(default_factory=dict)
    # by value made inside a custom function: the sequence number of the function's node
    starts: list[int] = field(default_factory=list)
    # by operation: the sequence number of the first node that it may have made
    tensors: dict[int, tuple[weakref.ref[Tensor], list[int]]] = field(default_factory=dict)
    # by id: all values that a tensor has had
    storages: dict[tuple[int, int], tuple[StorageWeakRef, int]] = field(default_factory=dict)
    memories: dict[int, StorageWeakRef] = field(default_factory=dict)
    # by address, which is no other storage's while the reference is held
    writes: dict[int, int] = field(default_factory=dict)  # by storage: the last value written
    count: int = 0
    room: float = inf  # the number of operations after which nothing more is recorded
    everywhere: bool = True  # measures values on all devices, not on the CPU only
    unmeasured: bool = False  # there were values on other devices

    @property
    def whole(self) -> bool:
        """Whether every operation is in it."""
        return len(self.operations) < self.room

    def measure(self, value: int, tensor: Tensor) -> None:
        """Note the range of a value. On a GPU that waits for all that was begun there."""
        if not self.everywhere and not tensor.is_cpu:
            self.unmeasured |= tensor.is_floating_point()
        elif extent := extent_of(tensor):
            self.extents[value] = extent

    def measure_given(self, tensors: Iterable[Tensor]) -> None:
        """Note the ranges of parameters and data now, and not when somebody asks."""
        for tensor in tensors:
            known = self.known(tensor)
            value = self.make(tensor) if known is None else known
            if value not in self.extents and value not in self.makers:
                self.measure(value, tensor)

    def carry(self, inputs: tuple[int, ...], value: int, tensor: Tensor) -> bool:
        """Note the range of a value that is its only input moved, without looking at it. False if
        that is not known: if it is of another dtype, or if the input was made of nothing
        (``torch.empty``), so that code which PyTorch does not see may have filled it since.
        """
        maker = self.makers.get(inputs[0]) if len(inputs) == 1 else None
        if maker is None or not self.operations[maker].inputs or not _has_memory(tensor):
            return False
        extent = self.extents.get(inputs[0])
        if extent is None or tensor.dtype is not extent.dtype:
            return False
        self.extents[value] = Extent(*extent[:3], tuple(tensor.shape))
        return True

    def extent(self, value: int) -> Extent | None:
        """The range of a value. Those that operations made were measured at once; parameters and
        data are measured now, if they still exist.
        """
        known = value in self.extents or value in self.makers
        if not known and (tensor := self.given(value)) is not None:
            self.measure(value, tensor)
        return self.extents.get(value)

    def given(self, value: int) -> Tensor | None:
        """The tensor that holds a value, if it still exists."""
        return self._given.get(value, lambda: None)()

    @cached_property
    def _given(self) -> dict[int, weakref.ref[Tensor]]:
        """The tensors by the value that they have in the end."""
        return {values[-1]: tensor for tensor, values in self.tensors.values()}

    def known(self, tensor: Tensor) -> int | None:
        """The value of a tensor that was seen, or that shares its memory with one."""
        if values := self.values(tensor):
            return values[-1]
        key = _memory(tensor)
        held = None if key is None else self.storages.get(key)
        return held[1] if held is not None and not held[0].expired() else None  # type: ignore[no-untyped-call]

    def values(self, tensor: Tensor) -> list[int]:
        """All values that a tensor has had; none if it was not seen."""
        found = self.tensors.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else []

    def make(self, tensor: Tensor) -> int:
        """A new value for a tensor."""
        self.count += 1
        if values := self.values(tensor):
            values.append(self.count)
        else:
            self.tensors[id(tensor)] = weakref.ref(tensor), [self.count]
        if _has_memory(tensor):
            storage = tensor.untyped_storage()
            at = storage._cdata
            held = self.memories.get(at)
            if held is None:
                held = self.memories[at] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self.storages[at, int(tensor.storage_offset())] = held, self.count
        return self.count

    def read(self, tensor: Tensor) -> set[int]:
        """The values that a tensor holds: its own, and what was last written to its memory."""
        known = self.known(tensor)
        own = self.make(tensor) if known is None else known
        if not self.writes:
            return {own}
        key = _memory(tensor)
        written = None if key is None else self.writes.get(key[0])
        return {own} if written is None else {own, written}

    def write(self, tensor: Tensor) -> int:
        """A new value for a tensor that was changed in place, and for what shares its memory."""
        value = self.make(tensor)
        key = _memory(tensor)
        if key is not None:
            self.writes[key[0]] = value
        return value

    def add(self, operation: Operation, start: int) -> None:
        """Append an operation."""
        number = len(self.operations)
        self.operations.append(operation)
        self.starts.append(start)
        for value in operation.inputs:
            if value in self.users:
                self.users[value].append(number)
            else:
                self.users[value] = [number]
        for value in operation.outputs:
            self.makers[value] = number

    # Questions ---------------------------------------------------------------------------------

    def below(self, values: Iterable[int], passes: Passes = None) -> set[int]:
        """All values that are made of these, and these; by operations that ``passes``."""
        users, operations = self.users, self.operations

        def made_of(value: int) -> Iterator[int]:
            for number in users.get(value, ()):
                if passes is None or passes(operations[number]):
                    yield from operations[number].outputs

        return _reach(values, made_of)

    def above(self, values: Iterable[int], passes: Passes = None) -> set[int]:
        """All values that these are made of, and these; by operations that ``passes``."""
        makers, operations = self.makers, self.operations

        def made_from(value: int) -> Iterator[int]:
            number = makers.get(value)
            if number is not None and (passes is None or passes(operations[number])):
                yield from operations[number].inputs

        return _reach(values, made_from)

    def uses(self, values: Iterable[int]) -> list[Operation]:
        """The operations that take one of these values, in order."""
        numbers = {number for value in values for number in self.users.get(value, ())}
        return [self.operations[number] for number in sorted(numbers)]

    def alive(self) -> set[int]:
        """The values of tensors that somebody still holds."""
        return {values[-1] for tensor, values in self.tensors.values() if tensor() is not None}

    def maker(self, value: int) -> Operation | None:
        """The operation that made a value; None of parameters and inputs."""
        number = self.makers.get(value)
        return None if number is None else self.operations[number]

    def of_node(self, number: int | None) -> Operation | None:
        """The operation that made the autograd node of this sequence number."""
        if number is None:
            return None
        at = bisect_right(self.starts, number) - 1
        later = self.operations[at + 1 : at + 2]
        if later and later[0].where.inside and self.starts[at + 1] == number + 1:
            return later[0]  # a custom function's node is made before its forward runs
        return self.operations[at] if at >= 0 else None

    def rename(self, names: Mapping[str, str]) -> None:
        """Give modules their final names."""
        for operation in self.operations:
            operation.module = names.get(operation.module, operation.module)


def _reach(start: Iterable[int], step: Callable[[int], Iterator[int]]) -> set[int]:
    found = set(start)
    stack = list(found)
    while stack:
        for value in step(stack.pop()):
            if value not in found:
                found.add(value)
                stack.append(value)
    return found


def _memory(tensor: Tensor) -> tuple[int, int] | None:
    """The storage of a tensor and where in it it begins; None if it has no memory of its own."""
    if not _has_memory(tensor):
        return None
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _has_memory(tensor: Tensor) -> bool:
    if type(tensor) not in PLAIN and (is_wrapper(tensor) or is_lazy(tensor)):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and not is_batched()


_level = torch._C._functorch.maybe_current_level


def is_batched() -> bool:
    """Whether a transform of ``torch.func`` runs, whose tensors are stand-ins without numbers."""
    return _level() is not None


def extent_of(tensor: Tensor) -> Extent | None:
    """The range of a real, dense tensor's elements; None of others."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.itemsize == 1:
        return None
    if not _has_memory(tensor):
        return None
    low, high = torch.aminmax(tensor.detach())
    return Extent(low.item(), high.item(), tensor.dtype, tuple(tensor.shape))


def first_bad(tensor: Tensor, given: list[Tensor]) -> Element | None:
    """The first element that is NaN, or else infinite, with the inputs that belong to it; None if
    another thread has written other numbers since.
    """
    bad = tensor.isnan()
    bad = bad if bool(bad.any()) else ~tensor.isfinite()
    found = bad.reshape(-1).nonzero()
    if not len(found):
        return None
    flat = int(found[0])
    index = unravel(flat, tuple(tensor.shape))
    described = [_input_at(each.detach(), tensor, index) for each in given]
    total, count = tensor.numel(), int((~tensor.isfinite()).sum())
    value = float(tensor.reshape(-1)[flat])
    return Element(index, value, count, total, tuple(filter(None, described)))


def _input_at(given: Tensor, out: Tensor, index: tuple[int, ...]) -> str:
    """An input at the place of an output's element; where shapes do not match, its range."""
    extent = extent_of(given)
    if extent is None:
        return ""
    kind = str(given.dtype).removeprefix("torch.")
    if given.dim() <= out.dim():
        pairs = list(zip(reversed(given.shape), reversed(index)))
        if all(size == 1 or size == whole for (size, _), whole in zip(pairs, reversed(out.shape))):
            at = tuple(0 if size == 1 else i for size, i in reversed(pairs))
            return f"{float(given[at]):.6g} ({kind})"
    return f"{kind} of shape {tuple(given.shape)} between {extent.low:.4g} and {extent.high:.4g}"
