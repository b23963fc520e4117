"""Records the ATen operations of a backward formula while PyTorch runs it.

The formula runs under a dispatch mode. Operations that depend on the cotangent become steps
(``aten_rules`` gives their linear maps); the results of others are constants. Values are followed
through views and in-place operations by the storage they share, not by object identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gradtrace.autodiff import nodes
from gradtrace.errors import NotLinear
from gradtrace.ir.program import MapTable, Step
from gradtrace.kernels import backend_of
from gradtrace.kernels.sync import DeferredChecks
from gradtrace.linops import Identity, Index, Map, gather
from gradtrace.linops.enclosed import copy_what_is_in, memory_of
from gradtrace.pytorch.nested import tensors_in
from gradtrace.pytorch.plain_tensors import is_wrapper, refuse_wrapper
from gradtrace.pytorch.side_effects import is_fresh, written_tensors
from gradtrace.recording import aten_rules, placeholders
from gradtrace.recording.aten_rules import Call, Chains, shape_of

aten = torch.ops.aten
CONVOLUTION = aten.convolution_backward.default
ZEROS = aten._efficientzerotensor.default
"""Makes a zero tensor without storage; replaced by ``torch.zeros``, since kernels need storage."""

FUSED = frozenset(rule for name, rule in aten_rules.OPENED.items() if "attention" in name)
"""Decompositions of operators that users know as several operators (attention)."""


class Lowering(NamedTuple):
    """How an ATen operation is turned into maps."""

    kind: str  # exact, view, probed, opened, dense
    rule: Callable[..., Any]
    mutates: bool = False
    trusted: bool = True


_LOWERINGS: dict[Any, Lowering] = {}


def lowering_of(func: Any) -> Lowering:
    """How this operation is handled: by its rule, or by the first general method that fits."""
    found = _LOWERINGS.get(func)
    if found is None:
        found = _LOWERINGS[func] = _find_lowering(func)
    return found


def _find_lowering(func: Any) -> Lowering:
    name = func._schema.name.replace("::", ".").removeprefix("aten.")
    overload = func._overloadname
    if func._schema.is_mutable:
        plain = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
        if name.endswith("_") and plain is not None and not plain._schema.is_mutable:
            return lowering_of(plain)._replace(mutates=True)
        return Lowering("dense", _refuse, mutates=True)
    rule = aten_rules.RULES.get(f"{name}.{overload}") or aten_rules.RULES.get(name)
    if rule is not None:
        return Lowering("exact", rule)
    if name in aten_rules.OPENED:
        return Lowering("opened", aten_rules.OPENED[name])
    if torch.Tag.pointwise in func.tags:
        return Lowering("probed", aten_rules.probe, trusted=name.endswith("_backward"))
    if func.is_view:
        return Lowering("view", aten_rules.view)
    opened = torch._decomp.decomposition_table.get(func)
    if opened is not None:
        return Lowering("opened", opened)
    if func._can_decompose():
        return Lowering("opened", func.decompose)
    return Lowering("dense", aten_rules.dense, trusted=False)


def _refuse(call: Call) -> Chains:
    raise NotLinear(f"{call.name} writes on its arguments in a way that is not followed")


class DispatchRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records, one node at a time, the operations that depend on the cotangent.

    ``begin`` starts a node and ``track`` declares its cotangents. ``values`` maps the id of each
    dependent tensor to its value number in the program.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under this mode, and the guard costs as much as an op

    def __init__(
        self, limit: int, bare: bool = False, checks: DeferredChecks | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self.bare = bare  # gradients are not needed: placeholders for convolutions
        self.checks = checks  # collects checks that would synchronise; None: check at once
        self.new: Callable[[], int] = count().__next__  # the next unused value number
        self.values: dict[int, int] = {}  # value number by id of a tensor
        self.alive: list[Any] = []  # keeps the tensors alive, so that their ids stay unique
        self.steps: list[Step] = []
        self.maps = MapTable()
        self.opened = False
        self.users = False  # code of the user's is running
        self._fresh: set[int] = set()  # memory that this code has allocated
        self._written: dict[int, torch.UntypedStorage] = {}  # other memory that it has written to

    def begin(self, users: bool = False) -> None:
        """Start a new formula, whose steps are appended to ``steps``. ``users``: code of the user's
        is part of it, which may write to any tensor.
        """
        self.steps = []
        self.users = users
        self._fresh.clear()
        self.opened = False
        self.values.clear()
        self.alive.clear()

    def track(self, tensor: Tensor, value: int) -> None:
        """Declare that this tensor holds this value."""
        self.values[id(tensor)] = value
        self.alive.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        deps = self._dependent((*args, *kwargs.values()) if kwargs else args)
        if func._schema.is_mutable or self.users:
            self._before_write(func, args, kwargs)
        if not deps:
            out = torch.zeros(*args, **kwargs) if func is ZEROS else func(*args, **kwargs)
            self._keep(func, out)
            return out
        found = _LOWERINGS.get(func) or lowering_of(func)
        if found.kind == "opened":
            return self._open(func, found, args, kwargs)
        if self.bare and func is CONVOLUTION:
            out = placeholders.convolution_backward(*args)
        else:
            out = func(*args, **kwargs)
        self._keep(func, out)
        call = Call(func, args, kwargs, deps, out, self.limit)
        if isinstance(out, Tensor):
            if out.layout is not torch.strided:
                nodes.refuse_layout(out)
            if out.is_meta:  # only its shape is used, as where a factor is a zero tensor
                return out
            if is_wrapper(out):
                refuse_wrapper(out)
            if out.is_floating_point() or out.is_complex():
                self._single(call, found)
        elif isinstance(out, (list, tuple)):
            self._several(call, found)
        return out

    def _dependent(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, and elements of lists among them, that depend on the cotangent."""
        values = self.values
        deps = [a for a in args if id(a) in values]
        for a in args:
            if type(a) is list or type(a) is tuple:
                deps += [b for b in a if id(b) in values]
        return deps if len(deps) < 2 else list({id(a): a for a in deps}.values())

    def _open(self, func: Any, found: Lowering, args: Sequence[Any], kwargs: Any) -> Any:
        """Run the decomposition of an operation, which is recorded in its place."""
        self.opened |= found.rule in FUSED
        with self:
            result = found.rule(*args, **kwargs)
        if not found.mutates:
            return result
        value = self.values.get(id(result))
        func(*args, **kwargs)
        self._write(args[0], value)
        return args[0]

    def _single(self, call: Call, found: Lowering) -> None:
        chains = self._chains(call, found)
        value = self._sum(call.out, chains)
        if not found.trusted and value is not None:
            self._verify(call, chains)
        if found.mutates:
            self._write(call.out, value)
        elif value is not None:
            self.values[id(call.out)] = value

    def _several(self, call: Call, found: Lowering) -> None:
        chains = self._chains(call, found)
        for out, some in zip(call.out, chains):
            if isinstance(out, Tensor):
                value = self._sum(out, some)
                if value is not None:
                    self.track(out, value)

    def _chains(self, call: Call, found: Lowering) -> Any:
        if found.mutates and call.func._schema.name == "aten::copy_":
            source = call.args[1]
            return (
                [(aten_rules.broadcast_maps(source, tuple(call.out.shape)), source)]
                if call.depends(source)
                else []
            )
        try:
            return found.rule(call)
        except aten_rules.Undecided:
            return aten_rules.dense(call)

    def _sum(self, out: Tensor, chains: Chains) -> int | None:
        """Append steps for the sum of the chains; the value of the sum, or None without chains."""
        if not chains:
            return None
        values, dtype, steps, table = self.values, out.dtype, self.steps, self.maps
        if dtype.is_complex:
            dtype = dtype.to_real()
        terms = []
        for maps, dep in chains:
            value = values[id(dep)]
            if not maps:
                if len(chains) == 1 and dep.dtype is out.dtype:
                    return value
                terms.append(table.term(Identity(shape_of(dep), shape_of(out)), value))
                continue
            for step in maps[:-1]:
                intermediate = self.new()
                steps.append(table.single(intermediate, step, value, dtype))
                value = intermediate
            terms.append(table.term(maps[-1], value))
        result = self.new()
        steps.append(Step(result, tuple(terms), shape_of(out), dtype))
        return result

    def _verify(self, call: Call, chains: Chains) -> None:
        """Check that the recorded maps give the operation's own result.

        A probe gives the derivative only of linear operations. On a GPU the check is deferred.
        """
        out = call.out
        total = torch.zeros(shape_of(out), dtype=out.dtype.to_real(), device=out.device)
        for maps, dep in chains:
            x = torch.view_as_real(dep.resolve_conj()) if dep.is_complex() else dep
            for step in maps:
                x = step.apply(x)
            total = total + x
        out = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
        if not backend_of(out).check(self.checks, lambda: elementwise_close(total, out)):
            raise NotLinear(f"{call.name} is not linear in the gradient it is given")

    # In-place operations: which tensors share the storage that was written? ------------------

    def _write(self, target: Tensor, value: int | None) -> None:
        """``target`` now holds ``value`` (None: a constant), and so do its aliases where they
        overlap.
        """
        storage = target.untyped_storage()
        aliases = {id(a): a for a in self._tensors() if a is not target and _shares(a, storage)}
        numbers = None
        for alias in aliases.values():
            if _reads(alias) != _reads(target):
                raise NotLinear("a value was written in place through a view of another dtype")
            if (inside := aten_rules.overwritten(target, alias)) is not None:
                self._set(alias, inside, value)
                continue
            numbers = _numbered(target) if numbers is None else numbers
            if (found := _overlap(alias, numbers, target)) is not None:
                self._set(alias, found, value)
        if value is None:
            self.values.pop(id(target), None)
        else:
            self.values[id(target)] = value

    def _set(self, alias: Tensor, maps: tuple[Index | None, Index], value: int | None) -> None:
        """Give an alias its new value, by maps from the old one and from what was written."""
        kept, new = maps
        old = self.values.get(id(alias))
        terms = []
        if old is not None and kept is not None:
            terms.append(self.maps.term(kept, old))
        if value is not None:
            terms.append(self.maps.term(new, value))
        if not terms:
            self.values.pop(id(alias), None)
            return
        now = self.new()
        self.steps.append(Step(now, tuple(terms), shape_of(alias), alias.dtype.to_real()))
        self.values[id(alias)] = now

    def _before_write(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Before a constant is overwritten, copy what recorded maps hold of it: those of this
        formula, and all others if code of the user's writes, which may refer to any tensor.
        """
        written = {memory_of(x): x for x in written_tensors(func, args, kwargs)}
        if not written:
            return
        maps: Iterable[Map] = self.maps
        if not self.users or self._fresh.issuperset(written):
            maps = [map_ for step in self.steps for map_ in self.maps.of(step)]
        for map_ in maps:
            copy_what_is_in(map_, written)
        if self.users:
            old = {key: x for key, x in written.items() if key not in self._fresh}
            self._written.update((key, x.untyped_storage()) for key, x in old.items())

    def end_users_code(self) -> None:
        """Copy what the maps of this formula hold of memory that code of the user's has written to:
        it may write there again, and what a pass has changed is put back at its end.
        """
        self.users = False
        if self._written:
            with _disable_current_modes():
                for map_ in (map_ for step in self.steps for map_ in self.maps.of(step)):
                    copy_what_is_in(map_, self._written)

    def _keep(self, func: Any, out: Any) -> None:
        """Keep a result alive, and note whether it is new memory."""
        self.alive.append(out)
        if self.users and is_fresh(func):
            self._fresh.update(map(memory_of, tensors_in(out)))

    def _tensors(self) -> Iterable[Tensor]:
        for x in self.alive:
            if isinstance(x, Tensor):
                yield x
            elif isinstance(x, (list, tuple)):
                yield from (y for y in x if isinstance(y, Tensor))


def _reads(x: Tensor) -> tuple[torch.dtype, bool, bool]:
    """How a tensor reads its memory."""
    return x.dtype, x.is_conj(), x.is_neg()


def _shares(x: Tensor, storage: torch.UntypedStorage) -> bool:
    return bool(x.untyped_storage()._cdata == storage._cdata)


def _numbered(target: Tensor) -> Tensor:
    """For each element of a tensor's storage its index in the tensor, or -1."""
    size, device = target.untyped_storage().nbytes() // target.element_size(), target.device
    numbers = torch.full((size,), -1, dtype=torch.int64, device=device)
    window = numbers.as_strided(target.size(), target.stride(), target.storage_offset())
    window.copy_(torch.arange(target.numel(), device=device).reshape(target.shape))
    return numbers


def _overlap(alias: Tensor, numbers: Tensor, target: Tensor) -> tuple[Index | None, Index] | None:
    """``aten_rules.overwritten``, by ``numbers`` of the elements of ``target``; None if the two do
    not overlap.
    """
    source = numbers.as_strided(alias.size(), alias.stride(), alias.storage_offset())
    written = source >= 0
    if not bool(written.any()):
        return None
    spared, shape = ~written, shape_of(alias)
    if alias.is_complex():
        source = torch.stack([2 * source, 2 * source + 1], -1).clamp(min=-1)
        spared = spared.unsqueeze(-1)
    kept = aten_rules.mask_map(spared, shape) if bool(spared.any()) else None
    return kept, gather(source, shape_of(target))


def close(a: Tensor, b: Tensor, slack: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding; NaN and infinities must match.

    ``slack`` is added to the absolute tolerance. Synchronises with a GPU.
    """
    scale = float(b.abs().nan_to_num(0, 0, 0).amax()) if b.numel() else 0.0
    slack = slack if slack < float("inf") else 0.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * scale + slack, equal_nan=True)


def elementwise_close(a: Tensor, b: Tensor) -> Tensor:
    """``close`` for each element, as a boolean tensor; does not synchronise."""
    a, b = a.double(), b.double()
    scale = b.abs().nan_to_num(0, 0, 0).amax() if b.numel() else 0.0
    off = (a - b).abs()
    alike = (a == b) | (a.isnan() & b.isnan())
    return alike | (off.isfinite() & (off <= 1e-3 * (scale + b.abs())))
