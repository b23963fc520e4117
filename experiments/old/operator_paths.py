"""The most positive path of operators, as the library of Du et al. (2023) computes it.

Between two operators a value is a pair: the most positive and the most negative weight that any
path of operators has at each element. An operator is linear in what it is given and sums inside: it
is applied to both, and its results are sorted again, element by element, since a negative
derivative swaps them. Where a value is used twice, the larger and the smaller of what comes back
are kept. As sorted halves are mixed inside sums, the result may be the weight of no single path: it
is their definition, taken literally.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Pair: TypeAlias = tuple[Tensor, Tensor]


@torch.no_grad()
def most_positive(
    output: Tensor, leaves: Mapping[str, Tensor], *, sort: bool = True
) -> dict[str, Tensor]:
    """The most positive path of operators from each element of the leaves to the output's sum.

    Without ``sort`` the two are compared only where a value is used twice, and at the end.
    """
    root: Any = output.grad_fn
    waiting = _uses(root)
    ones = torch.ones_like(output)
    held: dict[Any, Pair] = {root: (ones, ones)}
    found: dict[int, Pair] = {}
    ready = [root]
    while ready:
        node = ready.pop()
        pair = held.pop(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = pair
            continue
        given = [_results(node, each) for each in pair]
        for (child, slot), high, low in zip(node.next_functions, *given):
            if child is None:
                continue
            if high is not None:
                _hand(held, child, _conformed((high, low), child, slot), sort)
            waiting[child] -= 1
            if not waiting[child] and child in held:
                ready.append(child)
    return {name: torch.maximum(*found[id(leaf)]) for name, leaf in leaves.items()}


def _uses(root: Any) -> dict[Any, int]:
    """How often each node's output is used."""
    count: dict[Any, int] = {}
    todo, seen = [root], {root}
    while todo:
        for child, _ in todo.pop().next_functions:
            if child is not None:
                count[child] = count.get(child, 0) + 1
                if child not in seen:
                    seen.add(child)
                    todo.append(child)
    return count


def _results(node: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = node(gradient)
    return found if isinstance(found, tuple) else (found,)


def _conformed(pair: Pair, child: Any, slot: int) -> Pair:
    """Summed where the forward pass has broadcast, which is a part of the operator."""
    leaf = getattr(child, "variable", None)
    shape = child._input_metadata[slot].shape if leaf is None else leaf.shape
    high, low = (each.sum_to_size(tuple(shape)) for each in pair)
    return high, low


def _hand(held: dict[Any, Pair], child: Any, pair: Pair, sort: bool) -> None:
    """Keep the larger and the smaller of what a node was given."""
    if sort:
        pair = torch.maximum(*pair), torch.minimum(*pair)
    if child in held:
        pair = torch.maximum(held[child][0], pair[0]), torch.minimum(held[child][1], pair[1])
    held[child] = pair
