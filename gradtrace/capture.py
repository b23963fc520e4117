"""From a loss to its backward program: every node is called, and what it computes is written down.

The nodes run inside a dispatch mode, which sees the ATen operations that a formula is made of. Those
that depend on the cotangent become steps (``gradtrace.linear`` says which maps they are); the rest
are constants. Values are followed through views and in-place operations by the memory they share,
not by the names of objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradtrace import autograd, linear
from gradtrace.atlas import NOWHERE, Atlas
from gradtrace.autograd import ACCUMULATE, FACTS, Edges, HookWatch, Node, learn
from gradtrace.errors import GradtraceError, NotLinear, TooLarge
from gradtrace.linear import Call, Chains, shape_of
from gradtrace.maps import Dense, Identity, Scale, gather
from gradtrace.program import Block, Leaf, Program, Step, Term
from gradtrace.reconverge import resolve
from gradtrace.schedules import schedule

DENSE_LIMIT = 1 << 24
"""The most entries that an operator without a structured rule may have as a matrix."""

aten = torch.ops.aten


class Way(NamedTuple):
    """How an ATen operation is turned into maps."""

    kind: str  # exact, view, probed, opened, dense
    rule: Callable[..., Any]
    mutates: bool = False
    trusted: bool = True


_WAYS: dict[Any, Way] = {}


def way(func: Any) -> Way:
    """How this operation is handled: by its rule, or the first general way that fits it."""
    found = _WAYS.get(func)
    if found is None:
        found = _WAYS[func] = _find(func)
    return found


def _find(func: Any) -> Way:
    name = func._schema.name.replace("::", ".").removeprefix("aten.")
    overload = func._overloadname
    if func._schema.is_mutable:
        plain = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
        if name.endswith("_") and plain is not None and not plain._schema.is_mutable:
            return way(plain)._replace(mutates=True)
        return Way("dense", _refuse, mutates=True)
    rule = linear.RULES.get(f"{name}.{overload}") or linear.RULES.get(name)
    if rule is not None:
        return Way("exact", rule)
    if name in linear.OPENED:
        return Way("opened", linear.OPENED[name])
    if torch.Tag.pointwise in func.tags:
        return Way("probed", linear.probe, trusted=name.endswith("_backward"))
    if func.is_view:
        return Way("view", linear.view)
    opened = torch._decomp.decomposition_table.get(func)
    if opened is not None:
        return Way("opened", opened)
    if func._can_decompose():
        return Way("opened", func.decompose)
    return Way("dense", linear.dense, trusted=False)


def _refuse(call: Call) -> Chains:
    raise NotLinear(f"{call.name} writes on its arguments in a way that is not followed")


class Recorder(TorchDispatchMode):
    """Writes down, for one node after the other, the operations that depend on the cotangent."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here, and the guard costs as much as the operation

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.count = 0
        self.values: dict[int, int] = {}  # by identity of a tensor, which ``alive`` keeps
        self.alive: list[Any] = []
        self.steps: list[Step] = []

    def begin(self, steps: list[Step]) -> None:
        """Start on a new formula."""
        self.steps = steps
        self.values.clear()
        self.alive.clear()

    def new(self) -> int:
        """A value not used before."""
        self.count += 1
        return self.count - 1

    def track(self, tensor: Tensor, value: int) -> None:
        """From now on this tensor is that value."""
        self.values[id(tensor)] = value
        self.alive.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        values = self.values
        deps = [a for a in args if id(a) in values]
        for a in (*args, *kwargs.values()) if kwargs else args:
            if type(a) is list or type(a) is tuple:
                deps += [b for b in a if id(b) in values]
        if kwargs:
            deps += [a for a in kwargs.values() if id(a) in values]
        if not deps:
            if func._schema.is_mutable:
                self._disown(args[0])
            out = func(*args, **kwargs)
            self.alive.append(out)
            return out
        if len(deps) > 1:
            deps = list({id(a): a for a in deps}.values())
        found = _WAYS.get(func) or way(func)
        if found.kind == "opened" and not found.mutates:
            with self:
                return found.rule(*args, **kwargs)
        out = func(*args, **kwargs)
        self.alive.append(out)
        call = Call(func, args, kwargs, deps, out, self.limit)
        if isinstance(out, Tensor):
            if out.layout is not torch.strided:
                autograd.refuse_layout(out)
            if out.is_floating_point() or out.is_complex():
                self._single(call, found)
        elif isinstance(out, (list, tuple)):
            self._several(call, found)
        return out

    def _single(self, call: Call, found: Way) -> None:
        chains = self._chains(call, found)
        value = self._sum(call.out, chains)
        if not found.trusted and value is not None:
            self._verify(call, chains)
        if found.mutates:
            self._write(call.out, value)
        elif value is not None:
            self.values[id(call.out)] = value

    def _several(self, call: Call, found: Way) -> None:
        chains = self._chains(call, found)
        for out, some in zip(call.out, chains):
            if isinstance(out, Tensor):
                value = self._sum(out, some)
                if value is not None:
                    self.track(out, value)

    def _chains(self, call: Call, found: Way) -> Any:
        if found.mutates and call.func._schema.name == "aten::copy_":
            source = call.args[1]
            return [(linear.spread(source, tuple(call.out.shape)), source)] if call.depends(source) else []
        try:
            return found.rule(call)
        except linear.Undecided:
            return linear.dense(call)

    def _sum(self, out: Tensor, chains: Chains) -> int | None:
        """The value that the chains add up to; none if there are none."""
        if not chains:
            return None
        values, dtype, steps = self.values, out.dtype, self.steps
        if dtype.is_complex:
            dtype = dtype.to_real()
        terms = []
        for maps, dep in chains:
            value = values[id(dep)]
            if not maps:
                if len(chains) == 1 and dep.dtype is out.dtype:
                    return value
                terms.append(Term(Identity(shape_of(dep), shape_of(out)), value))
                continue
            for step in maps[:-1]:
                between = self.new()
                steps.append(Step(between, (Term(step, value),), step.out_shape, dtype))
                value = between
            terms.append(Term(maps[-1], value))
        result = self.new()
        steps.append(Step(result, tuple(terms), shape_of(out), dtype))
        return result

    def _verify(self, call: Call, chains: Chains) -> None:
        """A probe tells the derivative only if the operation is linear; see that it is."""
        from gradtrace.semirings import SUM

        total = torch.zeros(shape_of(call.out), dtype=call.out.dtype.to_real())
        for maps, dep in chains:
            x = torch.view_as_real(dep.resolve_conj()) if dep.is_complex() else dep
            for step in maps:
                x = step.pull(x, SUM)
            total = total + x
        out = torch.view_as_real(call.out.resolve_conj()) if call.out.is_complex() else call.out
        if not _close(total, out):
            raise NotLinear(f"{call.name} is not linear in the gradient it is given")

    # In place: who shares the memory that was written? ---------------------------------------

    def _write(self, target: Tensor, value: int | None) -> None:
        """``target`` now holds ``value`` (None: a constant), and so do its aliases where they
        overlap."""
        storage = target.untyped_storage()
        aliases = {id(a): a for a in self._tensors() if a is not target and _shares(a, storage)}
        if aliases:
            size = storage.nbytes() // target.element_size()
            numbers = torch.full((size,), -1, dtype=torch.int64)
            window = numbers.as_strided(target.size(), target.stride(), target.storage_offset())
            window.copy_(torch.arange(target.numel()).reshape(target.shape))
            for alias in aliases.values():
                self._overwrite(alias, numbers, target, value)
        if value is None:
            self.values.pop(id(target), None)
        else:
            self.values[id(target)] = value

    def _overwrite(self, alias: Tensor, numbers: Tensor, target: Tensor, value: int | None) -> None:
        if alias.dtype is not target.dtype or alias.is_conj() != target.is_conj():
            raise NotLinear("a value was written in place through a view of another dtype")
        source = numbers.as_strided(alias.size(), alias.stride(), alias.storage_offset())
        written = source >= 0
        if not bool(written.any()):
            return
        terms = []
        old = self.values.get(id(alias))
        shape = shape_of(alias)
        kept = (~written).to(alias.dtype.to_real())
        if alias.is_complex():
            source = torch.stack([2 * source, 2 * source + 1], -1).clamp(min=-1)
            kept = kept.unsqueeze(-1)
        if old is not None and bool(kept.any()):
            terms.append(Term(Scale(kept, shape), old))
        if value is not None:
            terms.append(Term(gather(source, shape_of(target)), value))
        if not terms:
            self.values.pop(id(alias), None)
            return
        now = self.new()
        self.steps.append(Step(now, tuple(terms), shape, alias.dtype.to_real()))
        self.values[id(alias)] = now

    def _disown(self, target: Any) -> None:
        """A constant is about to be overwritten: maps that refer to it get a copy."""
        if not isinstance(target, Tensor):
            return
        storage = target.untyped_storage()
        for step in self.steps:
            for term in step.terms:
                for name in term.map.tensors():
                    weight = getattr(term.map, name)
                    if _shares(weight, storage):
                        setattr(term.map, name, weight.clone())

    def _tensors(self) -> Iterable[Tensor]:
        for x in self.alive:
            if isinstance(x, Tensor):
                yield x
            elif isinstance(x, (list, tuple)):
                yield from (y for y in x if isinstance(y, Tensor))


def _shares(x: Tensor, storage: torch.UntypedStorage) -> bool:
    return bool(x.untyped_storage()._cdata == storage._cdata)


class Record:
    """One pass over the nodes that leaves a program behind; ``Walk`` with a pen."""

    def __init__(
        self, loss: Tensor, seed: Tensor, atlas: Atlas, hooks: HookWatch, limit: int
    ) -> None:
        self.atlas = atlas
        self.clear_since = hooks.clear_since()
        self.root = autograd.root_of(loss)
        self.recorder = Recorder(limit)
        self.seed = seed
        self.first = self.recorder.new()
        self.adjoints: dict[Node, dict[int, tuple[Tensor, int]]] = {
            self.root: {autograd.slot_of(loss): (seed, self.first)}
        }
        self.blocks: list[Block] = []
        self.leaves: list[Leaf] = []

    def visit(self, node: Node, edges: Edges) -> None:
        """Record the formula of a node and hand its results to its arguments."""
        arrived = self.adjoints.pop(node, None)
        if arrived is None:
            return
        if type(node) is ACCUMULATE:
            self._leaf(node.variable, *arrived[0])
            return
        block = Block(
            autograd.name_of(node),
            self.atlas.place_of(node),
            {slot: value for slot, (_, value) in arrived.items()},
        )
        recorder = self.recorder
        try:
            outs = self._formula(node, arrived, block)
        except GradtraceError as error:
            raise _placed(error, self.atlas.describe(node)) from error
        except Exception as error:
            raise autograd.explain(error, node, self.atlas.where(node)) from error
        given = set(block.takes.values())
        handed: list[tuple[Node, int, int, Tensor]] = []
        asked = (FACTS.get(type(node)) or learn(type(node))).asked
        for position, ((child, slot), out) in enumerate(zip(edges, outs)):
            if child is None or out is None:
                continue
            if asked is None or position in asked:
                out = autograd.conform(out, child._input_metadata[slot])
            value = recorder.values.get(id(out))
            if value is None:
                continue  # a constant: nothing comes this way
            if value in given:
                shape = shape_of(out)
                dtype = out.dtype.to_real() if out.is_complex() else out.dtype
                value, before = recorder.new(), value
                block.steps.append(Step(value, (Term(Identity(shape), before),), shape, dtype))
            given.add(value)
            block.gives[position] = value
            handed.append((child, slot, position, out))
        shapes = {value: shape_of(tensor) for tensor, value in arrived.values()}
        resolve(block, recorder.new, shapes)
        for child, slot, position, out in handed:
            value = block.gives[position]
            waiting = self.adjoints.setdefault(child, {})
            there = waiting.get(slot)
            waiting[slot] = (out, value) if there is None else self._merge(block, there, out, value)
        self.blocks.append(block)

    def _leaf(self, leaf: Tensor, tensor: Tensor, value: int) -> None:
        if leaf._backward_hooks:
            block = Block("hooks", NOWHERE, {0: value})
            self.recorder.begin(block.steps)
            self.recorder.track(tensor, value)
            (changed,) = autograd.run_leaf_hooks(leaf, [tensor])
            value = self.recorder.values.get(id(changed), -1)
            if value < 0:
                raise NotLinear("a hook replaced the gradient of a leaf by one that is unrelated")
            block.gives[0] = value
            self.blocks.append(block)
        self.leaves.append(Leaf(leaf, value))

    def _merge(
        self, block: Block, there: tuple[Tensor, int], out: Tensor, value: int
    ) -> tuple[Tensor, int]:
        """A value that is used twice: its cotangent is the sum of both."""
        total = there[0] + out
        shape = shape_of(out)
        dtype = out.dtype.to_real() if out.is_complex() else out.dtype
        result = self.recorder.new()
        terms = (Term(Identity(shape), there[1]), Term(Identity(shape), value))
        block.merges.append(Step(result, terms, shape, dtype))
        return total, result

    def _formula(
        self, node: Node, arrived: dict[int, tuple[Tensor, int]], block: Block
    ) -> Sequence[Tensor | None]:
        many = (FACTS.get(type(node)) or learn(type(node))).many
        grads: list[Tensor | None] = [None] * (len(node._input_metadata) if many else 1)
        recorder = self.recorder
        recorder.begin(block.steps)
        for slot, (tensor, value) in arrived.items():
            grads[slot] = tensor
            recorder.track(tensor, value)
        try:
            outs = self._call(node, grads)
            if all(o is None or id(o) in recorder.values or not _nonzero(o) for o in outs):
                return outs
            hidden: GradtraceError = NotLinear("the formula hides what it does with the gradient")
        except (NotLinear, TooLarge) as error:
            hidden = error
        return self._written_out(node, grads, arrived, block, hidden)

    def _call(self, node: Node, grads: list[Tensor | None]) -> Sequence[Tensor | None]:
        if node._sequence_nr() < self.clear_since:
            return autograd.call_with_hooks(node, grads)
        return autograd.call(node, grads)

    def _written_out(
        self,
        node: Node,
        grads: list[Tensor | None],
        arrived: dict[int, tuple[Tensor, int]],
        block: Block,
        reason: GradtraceError,
    ) -> Sequence[Tensor | None]:
        """A formula that cannot be followed, as matrices, if it is small enough."""
        recorder = self.recorder
        block.steps.clear()
        recorder.begin(block.steps)
        with torch._C._DisableTorchDispatch():
            outs = list(self._call(node, grads))
            found = matrices(lambda g: self._call(node, g), grads, outs, recorder.limit, reason)
        for k, out in enumerate(outs):
            if out is None:
                continue
            recorder.alive.append(out)
            terms = []
            for slot, matrix in found[k]:
                tensor, value = arrived[slot]
                terms.append(Term(Dense(matrix, shape_of(tensor), shape_of(out)), value))
            if terms:
                dtype = out.dtype.to_real() if out.is_complex() else out.dtype
                value = recorder.new()
                block.steps.append(Step(value, tuple(terms), shape_of(out), dtype))
                recorder.values[id(out)] = value
        return outs


def matrices(
    f: Callable[[list[Tensor | None]], Sequence[Tensor | None]],
    grads: list[Tensor | None],
    outs: Sequence[Tensor | None],
    limit: int,
    reason: GradtraceError,
) -> list[list[tuple[int, Tensor]]]:
    """For each result, the matrices that lead to it from each cotangent, by unit cotangents."""
    found: list[list[tuple[int, Tensor]]] = [[] for _ in outs]
    rows = sum(shape_size(o) for o in outs if o is not None)
    columns = sum(shape_size(g) for g in grads if g is not None)
    if rows * columns > limit:
        raise reason
    totals = [None if o is None else torch.zeros_like(_flat(o)) for o in outs]
    for slot, grad in enumerate(grads):
        if grad is None:
            continue
        results = []
        for j in range(shape_size(grad)):
            unit = torch.zeros(shape_of(grad), dtype=grad.dtype.to_real(), device=grad.device)
            unit.reshape(-1)[j] = 1
            only: list[Tensor | None] = [None if g is None else torch.zeros_like(g) for g in grads]
            only[slot] = torch.view_as_complex(unit) if grad.is_complex() else unit
            results.append(f(only))
        for k, out in enumerate(outs):
            total = totals[k]
            if out is None or total is None:
                continue
            columns_k = [total * 0 if (c := r[k]) is None else _flat(c) for r in results]
            matrix = torch.stack(columns_k, -1) if columns_k else total.new_zeros(len(total), 0)
            found[k].append((slot, matrix))
            totals[k] = total + matrix @ _flat(grad)
    for out, total in zip(outs, totals):
        if out is not None and total is not None and not _close(total, _flat(out)):
            raise reason
    return found


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding, and where one is not finite the other is not either."""
    scale = float(b.abs().nan_to_num(0, 0, 0).amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def shape_size(x: Tensor) -> int:
    """How many real numbers a tensor holds."""
    return x.numel() * (2 if x.is_complex() else 1)


def _flat(x: Tensor) -> Tensor:
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)


def _nonzero(x: Tensor) -> bool:
    with torch._C._DisableTorchDispatch():
        return bool((x != 0).any())


def _placed(error: GradtraceError, where: str) -> GradtraceError:
    """The same error, saying where in the user's model it happened."""
    text = str(error)
    return error if text.startswith(where) else type(error)(f"{where}: {text}")


def record(
    loss: Tensor,
    seed: Tensor,
    atlas: Atlas,
    hooks: HookWatch,
    order: str = "kahn",
    limit: int = DENSE_LIMIT,
) -> Program:
    """The backward program of a loss."""
    pen = Record(loss, seed, atlas, hooks, limit)
    with autograd.one_pass(), pen.recorder:
        schedule(order)(pen.root, pen.visit)
    return Program(seed, pen.first, pen.blocks, pen.leaves)
