"""Says when a watch did not see the forward pass of a loss, or calls of modules in it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from torch import Tensor, nn

from gradtrace.autodiff.names import NO_MODULE, OUTSIDE, ModuleCall, NameTable
from gradtrace.autodiff.nodes import ACCUMULATE, Node, edges_of, root_of, sequence_of
from gradtrace.pytorch.wrapped_modules import named_modules

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


def unseen_modules(
    model: nn.Module, leaves: Iterable[str], aliases: Mapping[str, str], called: Container[str]
) -> tuple[str, ...]:
    """A note on the modules whose parameters take part in a loss, though no call of them was seen.

    Args:
        model: The model that was watched.
        leaves: The first names of the leaves of the loss.
        aliases: The first name of a leaf, by its others.
        called: The names of the modules that were called inside the watch.

    Returns:
        The note; none if all were called. Modules that cannot be called (``nn.ParameterList``)
        stand for the ones that they are in, and classes of PyTorch may use the weights of modules
        inside them, as ``nn.MultiheadAttention`` does.
    """
    if not called:
        return ()  # all was outside the watch, which is told elsewhere
    direct = {name for name in leaves if name.rpartition(".")[0] not in called}
    if not direct:
        return ()
    direct -= {aliases[name] for name in aliases if name.rpartition(".")[0] in called}
    modules = dict(named_modules(model))
    found: dict[str, None] = {}
    for name in sorted(direct):
        owner = name.rpartition(".")[0]
        while owner and _cannot_be_called(modules.get(owner)):
            owner = owner.rpartition(".")[0]
        if owner and owner not in called and not _is_in_class_of_torch(owner, modules):
            found[owner] = None
    if not found:
        return ()
    named = ", ".join(list(found)[:3]) + (f" and {len(found) - 3:,} more" if len(found) > 3 else "")
    return (
        f"{named}: parameters are used, but no call of the module could be seen, so these "
        "operators belong to the module that was running",
    )


def _cannot_be_called(module: nn.Module | None) -> bool:
    return module is None or type(module).forward is nn.Module.forward


def _is_in_class_of_torch(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the nearest module around it that is no mere container is of PyTorch's classes."""
    above = modules.get(name.rpartition(".")[0])
    while name and isinstance(above, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        name = name.rpartition(".")[0]
        above = modules.get(name.rpartition(".")[0])
    return bool(name) and type(above).__module__.startswith("torch.")
