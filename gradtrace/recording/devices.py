"""Programs of graphs over several devices: all values are computed on one of them."""

from __future__ import annotations

from collections import Counter

import torch

from gradtrace.errors import Unsupported
from gradtrace.ir.lazy_gradient import LazyGradient, LazyPart
from gradtrace.ir.program import Constants, Leaf, MapTable
from gradtrace.kernels import backend_of
from gradtrace.linops.read_through import Copies, copied_on_read

COPIED_AT_ONCE_BYTES = 1 << 24
"""Gradients of leaves up to this size are copied to the device of the values at once."""


def on_one_device(constants: Constants) -> Constants:
    """The constants of a program whose values are all on the ``device_of_values``.

    Tensors of maps stay where they are, and are copied there when they are used, and so do large
    gradients of leaves. Other gradients that recording kept on another device are dropped, since
    they can be computed again.
    """
    if constants.parts is not None or any(leaf.shard is not None for leaf in constants.leaves):
        raise Unsupported(
            "the model is sharded over ranks, and its tensors are on several devices of this one; "
            "bring all that this rank has to one device"
        )
    device = device_of_values(constants)
    copies = Copies(device)
    return Constants(
        constants.seed.to(device),
        MapTable([copied_on_read(map_, copies) for map_ in constants.maps]),
        [_leaf(leaf, device) for leaf in constants.leaves],
        {v: x for v, x in constants.kept.items() if not copies.is_away(x)},
    )


def device_of_values(constants: Constants) -> torch.device:
    """The device of the loss; if that is the CPU, the GPU with most elements of leaves, if any."""
    device = constants.seed.device
    if not backend_of(device).host:
        return device
    sizes = Counter[torch.device]()
    for leaf in constants.leaves:
        if not backend_of(leaf.tensor).host:
            sizes[leaf.tensor.device] += leaf.tensor.numel()
    return max(sizes, key=sizes.__getitem__, default=device)


def _leaf(leaf: Leaf, device: torch.device) -> Leaf:
    """A leaf whose value is on this device."""
    given = leaf.given
    if leaf.tensor.device != device:
        leaf.device = device
        if not isinstance(given, LazyGradient):
            large = given.nbytes > COPIED_AT_ONCE_BYTES
            leaf.given = LazyGradient([LazyPart((), given)]) if large else given.to(device)
    return leaf
