"""From a loss to its backward program: every node is called, and what it computes is written down.

Nodes that are one map for each argument (``gradtrace.nodes``) are called and that is that. The
formula of any other runs under a ``Recorder``; one that even that cannot follow becomes a matrix,
if it is small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gradtrace import autograd, hooks, standins
from gradtrace.atlas import NOWHERE, Atlas, placed
from gradtrace.autograd import ACCUMULATE, FACTS, Edges, Grads, Node, learn
from gradtrace.deferred import Deferred, Part
from gradtrace.engine import gradient_of
from gradtrace.errors import GradtraceError, NotLinear, TooLarge
from gradtrace.folding import fold
from gradtrace.hooks import HookWatch
from gradtrace.labels import labels_of
from gradtrace.linear import shape_of
from gradtrace.maps import Contract, Convolve, Dense, Identity, Map, Opaque
from gradtrace.nodes import NODES, UNDONE, Edge, summed
from gradtrace.passes import one_pass, recomputed_once
from gradtrace.program import HOOKS, Block, Leaf, Program, Step, Term
from gradtrace.reconverge import resolve
from gradtrace.recorder import Recorder, close
from gradtrace.schedules import walk

DENSE_LIMIT = 1 << 24
"""The most entries that an operator without a structured rule may have as a matrix."""

LARGE = 1 << 16
"""A leaf with fewer elements is not worth the trouble of computing its gradient later."""

COMPOSED = frozenset({"MkldnnRnnLayerBackward0"})
"""Nodes that stand for several operators (a whole recurrent layer), and that PyTorch computes by
elementary operations when these may have to be derived again."""


class Store:
    """Gradients that are worth keeping, in a number of bytes; those of one memory count once.

    What products and convolutions made is dear, so half of the memory is for these alone.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.left = budget
        self.values: dict[int, Tensor] = {}
        self.places: set[int] = set()

    def add(self, value: int, tensor: Tensor, dear: Block | bool) -> None:
        """Keep a gradient, if there is room: that of a block, or one that is dear or not."""
        if self.left <= 0:
            return
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self.places:
            left = self.left - storage.nbytes()
            if left < self.budget // 2:
                if isinstance(dear, Block):
                    dear = _costly(dear)
                if left < 0 or not dear:
                    return
            self.left = left
            self.places.add(place)
        self.values[value] = as_real(tensor)

    def hold(self, value: int, tensor: Tensor) -> None:
        """Count a gradient that is held anyway."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.places:
            self.places.add(storage._cdata)
            self.left -= storage.nbytes()
        self.values[value] = as_real(tensor)


class Products:
    """Products of matrices: computed; or put off, where they are the gradient of a large leaf and
    what is held for it is not larger; or, for a ``bare`` program, never computed.
    """

    def __init__(self, clear_since: int, bare: bool) -> None:
        self.clear_since = clear_since
        self.bare = bare
        self.put_off: dict[int, Tensor] = {}  # by id: what stands in for results
        self.held: dict[int, int] = {}  # elements held for each leaf, by id

    def __call__(
        self, a: Tensor, b: Tensor, edge: Edge, turned: bool = False, grad: Tensor | None = None
    ) -> Tensor:
        """``a @ b``, which is handed to an edge."""
        if self.bare:
            return standins.product(a, b)
        if (
            grad is not None
            and (out := self.later(edge, (*a.shape[:-1], b.shape[-1]), grad)) is not None
        ):
            return out
        return (b.mT @ a.mT).mT if turned else a @ b

    def later(self, edge: Edge, shape: Sequence[int], grad: Tensor) -> Tensor | None:
        """What stands in for the gradient of a leaf, if it is put off."""
        size = prod(shape)
        if self.bare or size < LARGE or (leaf := self._leaf(edge[0])) is None:
            return None
        held = self.held.get(id(leaf), 0) + grad.numel()
        if held > size:
            return None
        self.held[id(leaf)] = held
        out = grad.new_zeros(()).expand(tuple(shape))
        self.put_off[id(out)] = out
        return out

    def _leaf(self, node: Node | None) -> Tensor | None:
        """The leaf whose gradient this node is handed, if no code but PyTorch's own sees it
        before.
        """
        if node is not None and type(node) is not ACCUMULATE:
            if not autograd.ends(node) or node._sequence_nr() < self.clear_since:
                return None
            node = autograd.edges_of(node)[0][0]
        if node is None or node.variable._backward_hooks:
            return None
        leaf: Tensor = node.variable
        return leaf


class Record:
    """One pass over the nodes that leaves a program behind; ``Walk`` with a pen."""

    def __init__(
        self,
        loss: Tensor,
        seed: Tensor,
        atlas: Atlas,
        watch: HookWatch,
        limit: int,
        opaque: bool = False,
        keep: int = 0,
        bare: bool = False,
    ) -> None:
        self.atlas = atlas
        self.store = Store(keep)
        self.sums: set[int] = set()
        self.opaque = opaque
        self.clear_since = watch.clear_since()
        self.recorder = Recorder(limit, bare)
        self.bare = bare
        self.products = Products(self.clear_since, bare)
        self.deferred: dict[int, Deferred] = {}
        self.seed = seed
        self.first = self.recorder.new()
        self.adjoints: dict[Node, dict[int, tuple[Tensor, int]]] = {
            autograd.root_of(loss): {autograd.slot_of(loss): (seed, self.first)}
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
            label=labels_of(node),
        )
        try:
            given = self._known(node, edges, arrived, block)
            if given is None:
                with self.recorder:
                    given = self._followed(node, edges, arrived, block)
        except Exception as error:
            raise self.atlas.place(error, node) from error
        for position, out in given:
            child, slot = edges[position]
            value = block.gives[position]
            if self.store.budget and not autograd.ends(child):
                self.store.add(value, out, block)
            waiting = self.adjoints.setdefault(child, {})
            there = waiting.get(slot)
            waiting[slot] = (out, value) if there is None else self._merge(block, there, out, value)
        self.blocks.append(block)

    def _known(
        self, node: Node, edges: Edges, arrived: dict[int, tuple[Tensor, int]], block: Block
    ) -> list[tuple[int, Tensor]] | None:
        """A node whose formula is known to be one map for each argument: no need to look inside."""
        rule = NODES.get(type(node).__name__)
        if rule is None or node._sequence_nr() < self.clear_since:
            return None
        grad, value = arrived[0]
        found = None if grad.is_complex() else rule(node, grad, edges, self.products)
        if found is None:
            return None
        undone = UNDONE.get(block.operator)
        given = []
        for position, result in enumerate(found):
            if result is None:
                continue
            out, chain = result
            if position == undone:
                child, slot = edges[position]
                meta = child._input_metadata[slot]  # type: ignore[union-attr]
                if out.shape != tuple(meta.shape):
                    chain = [*chain, *summed(tuple(out.shape), tuple(meta.shape))]
                    out = autograd.conform(out, meta)
            chain = chain or [Identity(shape_of(out))]
            number = block.gives[position] = self._chain(chain, value, out, block)
            if value in self.deferred:
                self.deferred[number] = self.deferred[value].then(chain)
            elif id(out) in self.products.put_off:
                self.deferred[number] = Deferred([Part(tuple(chain), grad)])
                self.store.hold(value, grad)
            given.append((position, out))
        self.products.put_off.clear()
        return given

    def _chain(self, chain: list[Map], value: int, out: Tensor, block: Block) -> int:
        for step in chain:
            result = self.recorder.new()
            block.steps.append(Step(result, (Term(step, value),), step.out_shape, real_dtype(out)))
            value = result
        return value

    def _followed(
        self, node: Node, edges: Edges, arrived: dict[int, tuple[Tensor, int]], block: Block
    ) -> list[tuple[int, Tensor]]:
        """Any node: its formula is run, and what it does is written down."""
        recorder = self.recorder
        outs = self._formula(node, arrived, block)
        # What is handed on is nothing else's: a value of its own, even if nothing is done to it.
        taken = set(block.takes.values())
        taken.update(term.value for step in block.steps for term in step.terms)
        given = []
        asked = (FACTS.get(type(node)) or learn(type(node))).asked
        for position, ((child, slot), out) in enumerate(zip(edges, outs)):
            if child is None or out is None:
                continue
            if asked is None or position in asked:
                out = autograd.conform(out, child._input_metadata[slot])
            value = recorder.values.get(id(out))
            if value is None:
                continue  # a constant: nothing comes this way
            if value in taken:
                value = self._chain([Identity(shape_of(out))], value, out, block)
            taken.add(value)
            block.gives[position] = value
            given.append((position, out))
        block.opened = recorder.opened or type(node).__name__ in COMPOSED
        if not block.opened:
            shapes = {value: shape_of(tensor) for tensor, value in arrived.values()}
            resolve(block, recorder.new, shapes, next(iter(arrived.values()))[0].device)
            fold(block)
        return given

    def _leaf(self, leaf: Tensor, tensor: Tensor, value: int) -> None:
        if leaf._backward_hooks:
            block = Block(HOOKS, NOWHERE, {0: value})
            self.recorder.begin(block.steps)
            self.recorder.track(tensor, value)
            name = next(iter(self.atlas.names_of(leaf)), f"of shape {tuple(leaf.shape)}")
            try:
                with self.recorder:
                    (changed,) = hooks.run_leaf_hooks(leaf, [tensor])
                if id(changed) not in self.recorder.values:
                    raise NotLinear(
                        "the gradient was replaced by one that has nothing to do with it"
                    )
                self._see_linear(block.steps, [tensor], [changed])
                value = self.recorder.values[id(changed)]
                tensor = tensor if changed is None else changed
            except GradtraceError as error:
                raise placed(error, f"a hook on leaf {name}") from error.__cause__ or error
            block.gives[0] = value
            if value != block.takes[0]:  # else the hook only looked
                self.blocks.append(block)
        self.leaves.append(Leaf(leaf, value, self.deferred.get(value, tensor)))

    def _merge(
        self, block: Block, there: tuple[Tensor, int], out: Tensor, value: int
    ) -> tuple[Tensor, int]:
        """A value that is used twice: its cotangent is the sum of both."""
        shape, result = shape_of(out), self.recorder.new()
        later = [self.deferred.get(number) for number in (there[1], value)]
        total = there[0] if self.bare or later[0] else out if later[1] else there[0] + out
        if later[0] or later[1]:
            both = (part or Deferred([Part((), x)]) for part, x in zip(later, (there[0], out)))
            self.deferred[result] = next(both).plus(next(both))
        elif there[1] not in self.sums:  # each is compared with the others
            for tensor, number in (there, (out, value)):
                self.store.add(number, tensor, True)
        terms = (Term(Identity(shape), there[1]), Term(Identity(shape), value))
        block.merges.append(Step(result, terms, shape, real_dtype(out)))
        self.sums.add(result)
        if result not in self.deferred:
            self.store.add(result, total, False)
        return total, result

    def _formula(
        self, node: Node, arrived: dict[int, tuple[Tensor, int]], block: Block
    ) -> Sequence[Tensor | None]:
        """Run the node's formula, and the hooks around it, under the recorder."""
        many = (FACTS.get(type(node)) or learn(type(node))).many
        grads: list[Tensor | None] = [None] * (len(node._input_metadata) if many else 1)
        recorder = self.recorder
        recorder.begin(block.steps)
        for slot, (tensor, value) in arrived.items():
            if any(tensor is other for other in grads):  # a + b hands one tensor to both
                tensor = tensor.clone()
            grads[slot] = tensor
            recorder.track(tensor, value)
        hooked = node._sequence_nr() < self.clear_since
        if hooked:
            ready = hooks.before(node, grads)
        elif autograd.is_python(node) and any(grad is None for grad in grads):
            ready = autograd.handed(node, grads)
        else:
            ready = grads
        self._see_linear(block.steps, grads, ready)
        formula = len(block.steps)
        outs = self._call(node, ready, block)
        if autograd.is_python(node):
            self._see_linear(block.steps[formula:], ready, outs)
        if hooked:
            formula, before = len(block.steps), outs
            outs = hooks.after(node, outs, ready)
            self._see_linear(block.steps[formula:], before, outs)
        return outs

    def _see_linear(self, steps: list[Step], given: Grads, wanted: Grads) -> None:
        """Steps that somebody else's code was written down as must give what that code gave."""
        values = self.recorder.values
        if all(any(x is y for y in given) for x in wanted):
            return
        with _disable_current_modes():
            known = {values[id(x)]: as_real(x) for x in given if id(x) in values and x is not None}
            for step in steps:
                known[step.out] = gradient_of(step, known)
            most = max((float(x.abs().amax()) for x in known.values() if x.numel()), default=0.0)
            for x in wanted:
                here = known.get(values.get(id(x), -1))
                if x is None or (here is None and not _nonzero(x)):
                    continue
                if here is None or not close(here, as_real(x), 1e-4 * most):
                    raise NotLinear("it is not linear in the gradient it is given")

    def _call(
        self, node: Node, grads: Sequence[Tensor | None], block: Block
    ) -> Sequence[Tensor | None]:
        """The formula alone; as matrices, if what it does cannot be followed."""
        values, before = self.recorder.values, len(block.steps)
        try:
            if type(node).__name__ in COMPOSED:
                with torch.enable_grad():
                    found = autograd.call_ready(node, grads)
                outs: Sequence[Tensor | None] = [None if o is None else o.detach() for o in found]
            else:
                outs = autograd.call_ready(node, grads)
            if all(o is None or id(o) in values or not _nonzero(o) for o in outs):
                return outs
            reason: GradtraceError = NotLinear("the formula hides what it does with the gradient")
        except (NotLinear, TooLarge) as error:
            reason = error
        del block.steps[before:]
        return self._written_out(node, grads, block, reason)

    def _written_out(
        self, node: Node, grads: Sequence[Tensor | None], block: Block, reason: GradtraceError
    ) -> Sequence[Tensor | None]:
        """A formula that cannot be followed, as matrices, if it is small enough."""
        recorder = self.recorder

        def call(given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            with recomputed_once():  # a checkpoint gives each value once
                return autograd.call_ready(node, given)

        with _disable_current_modes():
            outs = list(call(grads))
            if self.opaque and entries(grads, outs) > recorder.limit:
                return self._closed(call, grads, outs, block, str(reason))
            found = matrices(call, grads, outs, recorder.limit, reason)
        for out, terms in zip(outs, found):
            if out is None:
                continue
            recorder.alive.append(out)
            dense = [
                Term(Dense(matrix, shape_of(grad), shape_of(out)), recorder.values[id(grad)])
                for slot, matrix in terms
                if (grad := grads[slot]) is not None and id(grad) in recorder.values
            ]
            if dense:
                value = recorder.new()
                block.steps.append(Step(value, tuple(dense), shape_of(out), real_dtype(out)))
                recorder.values[id(out)] = value
        return outs

    def _closed(
        self,
        f: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
        grads: Sequence[Tensor | None],
        outs: Sequence[Tensor | None],
        block: Block,
        reason: str,
    ) -> Sequence[Tensor | None]:
        """A formula that is too large to be written out, as a function of each cotangent."""
        recorder = self.recorder
        _see_additive(f, grads, outs, reason)
        for k, out in enumerate(outs):
            if out is None:
                continue
            recorder.alive.append(out)
            terms = tuple(
                Term(
                    Opaque(_one(f, grads, slot, k), shape_of(grad), shape_of(out), reason),
                    recorder.values[id(grad)],
                )
                for slot, grad in enumerate(grads)
                if grad is not None and id(grad) in recorder.values
            )
            value = recorder.new()
            block.steps.append(Step(value, terms, shape_of(out), real_dtype(out)))
            recorder.values[id(out)] = value
        return outs


def _costly(block: Block) -> bool:
    """Whether a block holds a product or a convolution."""
    return any(isinstance(term.map, Contract | Convolve) for s in block.steps for term in s.terms)


def _one(
    f: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    grads: Sequence[Tensor | None],
    slot: int,
    k: int,
) -> Callable[[Tensor], Tensor]:
    """The k-th result as a function of one cotangent, the others zero."""
    like = [None if g is None else (g.shape, g.dtype, g.device) for g in grads]

    def function(x: Tensor) -> Tensor:
        given: list[Tensor | None] = [
            None if a is None else torch.zeros(a[0], dtype=a[1], device=a[2]) for a in like
        ]
        at = like[slot]
        assert at is not None
        given[slot] = torch.view_as_complex(x.contiguous()) if at[1].is_complex else x.to(at[1])
        out = f(given)[k]
        assert out is not None
        return as_real(out)

    return function


def _see_additive(
    f: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    grads: Sequence[Tensor | None],
    outs: Sequence[Tensor | None],
    reason: str,
) -> None:
    """``f(g + r) = f(g) + f(r)`` for a random r, or the formula is not linear."""
    noise = [None if g is None else torch.randn_like(g) for g in grads]
    both = [None if g is None or r is None else g + r for g, r in zip(grads, noise)]
    for out, alone, together in zip(outs, f(noise), f(both)):
        if out is None or alone is None or together is None:
            continue
        size = float(alone.abs().amax()) if alone.numel() else 0.0
        if not close(as_real(out + alone), as_real(together), 1e-3 * size):
            raise NotLinear(reason)


def matrices(
    f: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    grads: Sequence[Tensor | None],
    outs: Sequence[Tensor | None],
    limit: int,
    reason: GradtraceError,
) -> list[list[tuple[int, Tensor]]]:
    """For each result, the matrices that lead to it from each cotangent, by unit cotangents."""
    found: list[list[tuple[int, Tensor]]] = [[] for _ in outs]
    if entries(grads, outs) > limit:
        raise reason
    totals = [None if o is None else torch.zeros_like(_flatten(o)) for o in outs]
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
            columns_k = [total * 0 if (c := r[k]) is None else _flatten(c) for r in results]
            matrix = torch.stack(columns_k, -1) if columns_k else total.new_zeros(len(total), 0)
            found[k].append((slot, matrix))
            totals[k] = total + matrix @ _flatten(grad)
    for out, total in zip(outs, totals):
        if out is not None and total is not None and not close(total, _flatten(out)):
            raise reason
    return found


def entries(grads: Sequence[Tensor | None], outs: Sequence[Tensor | None]) -> int:
    """How many entries the matrix from all cotangents to all results has."""
    rows = sum(shape_size(o) for o in outs if o is not None)
    return rows * sum(shape_size(g) for g in grads if g is not None)


def real_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a tensor's real representation."""
    return x.dtype.to_real() if x.is_complex() else x.dtype


def shape_size(x: Tensor) -> int:
    """How many real numbers a tensor holds."""
    return x.numel() * (2 if x.is_complex() else 1)


def as_real(x: Tensor) -> Tensor:
    """A tensor's real representation."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _flatten(x: Tensor) -> Tensor:
    return as_real(x).reshape(-1)


def _nonzero(x: Tensor) -> bool:
    with _disable_current_modes():
        return bool((x != 0).any())


def _unseen(loss: Tensor, clear_since: int) -> bool:
    """Whether no code but PyTorch's own will see the gradients of a loss: no functions and no hooks
    of a user.
    """
    unseen = True

    def visit(node: Node, _: Edges) -> None:
        nonlocal unseen
        if type(node) is ACCUMULATE:
            unseen &= not node.variable._backward_hooks
        else:
            unseen &= not autograd.is_python(node) and node._sequence_nr() >= clear_since

    walk(loss, visit)
    return unseen


def record(
    loss: Tensor,
    seed: Tensor,
    atlas: Atlas,
    watch: HookWatch,
    order: str = "kahn",
    limit: int = DENSE_LIMIT,
    opaque: bool = False,
    keep: int = 0,
    bare: bool = False,
) -> Program:
    """The backward program of a loss.

    An operator of more than ``limit`` entries and no known structure is refused, or with ``opaque``
    kept as a function. ``keep`` is how many bytes of gradients to keep beside it. A
    ``bare`` program comes without gradients, where these can be spared; its leaves have none.
    """
    if bare and _unseen(loss, watch.clear_since()):
        pen = Record(loss, seed, atlas, watch, limit, opaque, keep, bare)
        try:
            with one_pass():
                walk(loss, pen.visit, order)
            return Program(seed, pen.first, pen.blocks, pen.leaves)
        except (GradtraceError, RuntimeError):
            pass  # with true gradients it may go, or else fail with a true reason
    pen = Record(loss, seed, atlas, watch, limit, opaque, keep)
    with one_pass():
        walk(loss, pen.visit, order)
    return Program(seed, pen.first, pen.blocks, pen.leaves, pen.store.values)
