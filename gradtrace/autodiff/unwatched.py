"""Says when a loss was computed by a forward pass that a watch did not see."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping

from torch import Tensor

from gradtrace.autodiff.names import NO_MODULE, OUTSIDE, ModuleCall, NameTable
from gradtrace.autodiff.nodes import ACCUMULATE, Node, edges_of, root_of, sequence_of

ADVICE = "run the forward pass inside: with gradtrace.watch(model) as watch: loss = ..."


def unwatched(
    loss: Tensor,
    table: NameTable,
    names: Callable[[], Mapping[int, str]],
    called: Container[str],
) -> str:
    """What of the loss's forward pass ran before the watch was opened or after it was closed.

    Args:
        loss: A loss with a graph.
        table: The module calls of the watch.
        names: Gives the name of each parameter of the model, by id; called if it is needed.
        called: The names of the modules that were called inside the watch.

    Returns:
        The text of a warning; empty if nothing is missing, or modules ran on other threads, whose
        nodes have numbers of their own.
    """
    root = root_of(loss)
    if table.away or type(root) is ACCUMULATE:
        return ""
    late = _place(root, table) is OUTSIDE
    seen, met = False, list[int]()
    for leaf in _not_in_modules(root, table):
        if leaf is not None:
            met.append(id(leaf.variable))
        seen = seen or leaf is None
        if seen and not late:
            return ""
    known = names()
    leaves = dict.fromkeys(known[each] for each in met if each in known)  # in the order of meeting
    if seen:
        leaves = {name: None for name in leaves if name.rpartition(".")[0] not in called}
    if not leaves:
        return ""
    if not table.starts:
        return f"this watch was never open, so the operators of the loss have no modules; {ADVICE}"
    if not seen:
        return (
            "the loss was computed by a forward pass outside the watch (before it was opened, or "
            f"after it was closed), so its operators have no modules; {ADVICE}"
        )
    named = ", ".join(list(leaves)[:3]) + (", ..." if len(leaves) > 3 else "")
    return (
        f"part of the forward pass ran after the watch was closed (what uses {named}), so those "
        f"operators have no modules; {ADVICE}"
    )


def _not_in_modules(root: Node, table: NameTable) -> Iterator[Node | None]:
    """The leaves used by nodes that were made outside the watch, from the root on; None for each
    node that was made in a module call, which is not followed.
    """
    stack, met = [root], {root}
    while stack:
        node = stack.pop()
        place = _place(node, table)
        if place is not OUTSIDE and place is not NO_MODULE:
            yield None
            continue
        for child, _ in edges_of(node):
            if type(child) is ACCUMULATE:
                if place is OUTSIDE:
                    yield child
            elif child is not None and child not in met:
                met.add(child)
                stack.append(child)


def _place(node: Node, table: NameTable) -> ModuleCall:
    number = sequence_of(node)
    return NO_MODULE if number is None else table.place_at(number)
