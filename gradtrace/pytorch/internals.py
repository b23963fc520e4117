"""Checks, at import, of the private parts of PyTorch that gradtrace relies on.

Most of the autograd graph has no public interface. ``NAMES`` lists attributes that must exist,
``MEANINGS`` tests how they must behave; ``check`` tests both in under a millisecond, without a
backward pass of PyTorch (which would start threads that a forked process cannot use). A torch in
which something has changed is refused with an error that says what, before any number is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.utils.checkpoint  # so that NAMES finds it
from torch.utils.hooks import RemovableHandle

from gradtrace.errors import IncompatibleTorch

TESTED = "2.6 to 2.15"
"""The versions of torch on which tests have passed; docs/versions.md lists which tests on each."""


NAMES = {
    "autograd._get_sequence_nr": "finding the module that made an operator",
    "autograd.function.BackwardCFunction": "telling Python functions from PyTorch's own",
    "autograd._engine_run_backward": "taking back what a pass inside a pass adds to .grad",
    "autograd.graph.GradientEdge": "running hooks",
    "autograd.graph.get_gradient_edge": "running hooks on leaves",
    "utils.hooks.RemovableHandle.next_id": "noticing that a hook was registered",
    "_C._nn.cross_entropy_loss": "opening the cross entropy into elementary operators",
    "_C._get_tracing_state": "leaving modules to torch.jit.trace",
    "_C._current_graph_task_id": "telling whether a backward pass runs",
    "_C._will_engine_execute_node": "running multi-grad hooks once",
    "_C._autograd._unsafe_set_version_counter": "undoing what a recomputation writes",
    "_C._get_graph_exec_group": "recomputing checkpoints once",
    "_C._set_graph_exec_group": "recomputing checkpoints once",
    "utils.checkpoint.GraphExecGroup": "recomputing checkpoints once",
    "utils.checkpoint._CheckpointFrame": "recomputing checkpoints with the kernels of a watch",
    "_C._has_mkldnn": "opening fused recurrent layers",
    "_C._get_mkldnn_enabled": "opening fused recurrent layers",
    "_VF": "opening fused recurrent layers",
    "nn.Module._call_impl": "seeing the calls of modules",
    "_C.DisableTorchFunction": "gradient checks",
    "_C.DisableTorchFunctionSubclass": "reading tensors of a user's class",
    "_C._disabled_torch_dispatch_impl": "telling wrappers from plain tensors",
    "_C._len_torch_dispatch_stack": "keeping a caller's modes out",
    "_C._functorch.is_functorch_wrapped_tensor": "refusing losses of torch.func",
    "_C._functorch.maybe_current_level": "refusing losses of torch.func",
    "_C._functorch.is_batchedtensor": "noticing torch.vmap",
    "_C._functorch.get_unwrapped": "noticing torch.vmap",
    "_C._dispatch_get_all_op_names": "the list of operators",
    "_C._set_cudnn_allow_tf32": "products in full float32",
    "_foreach_abs": "mass: weights of all layers lifted at once",
    "_foreach_copy_": "influence by a CUDA graph",
    "_foreach_mul": "mass: values of all layers rescaled at once",
    "_foreach_norm": "finding gradients that are not finite",
    "multiprocessing.reductions.StorageWeakRef": "following values through shared memory",
    "_C._is_torch_function_mode_enabled": "mass on a GPU: passes that are made again",
    "overrides.TorchFunctionMode": "recording forward passes",
    "overrides._get_current_function_mode": "keeping a caller's modes out",
    "overrides._get_current_function_mode_stack": "keeping a caller's modes out",
    "overrides._pop_mode": "keeping a caller's modes out",
    "overrides._push_mode": "keeping a caller's modes out",
    "overrides.handle_torch_function": "mass on a GPU: passes that are made again",
    "utils._device.DeviceContext": "keeping a caller's modes out",
    "utils._python_dispatch.TorchDispatchMode": "recording formulas",
    "utils._python_dispatch._disable_current_modes": "recording formulas",
}
"""Attributes that must exist, by path under ``torch``, and what gradtrace needs them for."""

INSTEAD = dict.fromkeys(
    ("_C._get_graph_exec_group", "_C._set_graph_exec_group", "utils.checkpoint.GraphExecGroup"),
    "utils.checkpoint.uuid",
)
"""The equivalents in other versions."""


def _leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32, device="cpu", requires_grad=True)


def _equal(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise IncompatibleTorch(f"{what} is {found!r}, not {wanted!r}")


def edges_follow_arguments() -> None:
    """A node lists (node, output) for each argument, in order; None where nothing is derived by."""
    x, y = _leaf(2), _leaf(2)
    node: Any = (x * y).grad_fn
    pairs = node.next_functions
    _equal([slot for _, slot in pairs], [0, 0], "the outputs that x * y is made of")
    _equal([end.variable is leaf for (end, _), leaf in zip(pairs, (x, y))], [True] * 2, "the leaf")
    constant: Any = (y * torch.ones(2, device="cpu")).grad_fn
    _equal(constant.next_functions[1], (None, 0), "the edge to a constant")
    parts: Any = torch.stack(_leaf(2, 3).mul(2.0).unbind()[::-1]).grad_fn
    _equal([slot for _, slot in parts.next_functions], [1, 0], "the outputs of unbind, reversed")


def nodes_can_be_called() -> None:
    """A node called on a gradient gives one for each edge, by the formula of its operator."""
    x, y = _leaf(2), _leaf(2)
    with torch.no_grad():
        node: Any = (x * 2.0).grad_fn
        _equal(node, None, "the node of a product under no_grad")
        y *= 3
    with torch.enable_grad():
        node = (x * y).grad_fn
    with torch.no_grad():
        outs = node(torch.full((2,), 5.0, dtype=torch.float32, device="cpu"))
    _equal([out.tolist() for out in outs], [[15.0, 15.0], [5.0, 5.0]], "the gradient of a product")
    _equal(node._saved_self.tolist(), [1.0, 1.0], "the first operand that a product saves")
    _equal(node._saved_other.tolist(), [3.0, 3.0], "the second operand that a product saves")


def metadata_describes_outputs() -> None:
    """``_input_metadata`` has shape, dtype and device of each output of an operator."""
    first, _ = torch.split(_leaf(2, 3), [1, 2], 1)
    node: Any = first.grad_fn
    found = [(tuple(m.shape), m.dtype, m.device.type) for m in node._input_metadata]
    wanted = [((2, n), torch.float32, "cpu") for n in (1, 2)]
    _equal(found, wanted, "what split says of its outputs")
    _equal(first.output_nr, 0, "the number of the first output")


def numbers_follow_time() -> None:
    """``_sequence_nr`` counts the nodes of a thread; the next one's is ``_get_sequence_nr()``."""
    now: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
    x = _leaf(2)
    start = now()
    first: Any = x.exp().grad_fn
    between = now()
    second: Any = x.sin().grad_fn
    order = [start, first._sequence_nr(), between, second._sequence_nr(), now()]
    if not order[0] <= order[1] < order[2] <= order[3] < order[4]:
        raise IncompatibleTorch(f"nodes made one after the other have the numbers {order}")


def hooks_are_counted() -> None:
    """Every hook takes the next number of ``RemovableHandle``, and stands in its table."""
    x = _leaf(2)
    product = x * 2.0
    node: Any = product.grad_fn
    if x._backward_hooks:
        raise IncompatibleTorch("a leaf without hooks has _backward_hooks")
    registers = {
        "Tensor.register_hook": x.register_hook,
        "Tensor.register_hook (not a leaf)": product.register_hook,
        "Node.register_hook": node.register_hook,
        "Node.register_prehook": node.register_prehook,
        "Tensor.register_post_accumulate_grad_hook": x.register_post_accumulate_grad_hook,
    }
    for what, register in registers.items():
        before = RemovableHandle.next_id
        handle = register(_nothing)
        _equal(RemovableHandle.next_id - before, 1, f"the count of hooks after {what}, less before")
        table = handle.hooks_dict_ref()
        _equal(table is not None and table.get(handle.id), _nothing, f"the hook of {what}")
        if what == "Tensor.register_hook" and not x._backward_hooks:
            raise IncompatibleTorch("_backward_hooks of a leaf does not hold its hooks")
        handle.remove()


def _nothing(*_: object) -> None:
    """A hook."""


def functions_are_known() -> None:
    """A ``torch.autograd.Function`` makes nodes of ``BackwardCFunction``; other nodes are not."""
    x = _leaf(2)
    made = (_Negative.apply(x), -x)  # type: ignore[no-untyped-call]
    kinds = [isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction) for y in made]
    _equal(kinds, [True, False], "whether the nodes of a Function and of neg are Python's")


class _Negative(torch.autograd.Function):
    """A function, to test which type of node it makes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return -grads[0]


def versions_can_be_set() -> None:
    """Every write on a tensor counts its ``_version`` up, which can be set back."""
    x = torch.ones(2, device="cpu")
    before = x._version
    x.add_(1.0)
    _equal(x._version - before, 1, "the version of a tensor after a write, less before,")
    set_version(x, before)
    _equal(x._version, before, "the version that was set")


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter of a tensor, as it was before writes that were undone."""
    setter: Any = torch._C._autograd._unsafe_set_version_counter
    try:
        setter((tensor,), (version,))
    except TypeError:  # torch 2.6, which takes one at a time
        setter(tensor, version)


def no_pass_runs() -> None:
    """Outside a backward pass the number of the running one is -1."""
    _equal(torch._C._current_graph_task_id(), -1, "the running backward pass, where none runs,")


# The first lines of these docstrings are part of the error message of ``check``.
MEANINGS: tuple[Callable[[], None], ...] = (
    edges_follow_arguments,
    nodes_can_be_called,
    metadata_describes_outputs,
    numbers_follow_time,
    hooks_are_counted,
    functions_are_known,
    versions_can_be_set,
    no_pass_runs,
)


def missing() -> list[str]:
    """One message for each attribute in ``NAMES`` that does not exist."""
    return [
        f"torch.{path} is gone, which {purpose} needs"
        for path, purpose in NAMES.items()
        if not _exists(path) and not _exists(INSTEAD.get(path, path))
    ]


def _exists(path: str) -> bool:
    try:
        attrgetter(path)(torch)
    except AttributeError:
        return False
    return True


def changed() -> list[str]:
    """One message for each test in ``MEANINGS`` that fails.

    They run on a separate thread: gradtrace may be imported under ``no_grad``, ``inference_mode``,
    a default device or a dispatch mode, all of which are thread-local.
    """
    found: list[str] = []

    def ask() -> None:
        for meaning in MEANINGS:
            try:
                meaning()
            except Exception as error:
                promise = (meaning.__doc__ or "").split("\n")[0]
                found.append(f"{promise} Here: {type(error).__name__}: {error}")

    thread = threading.Thread(target=ask, name="gradtrace-internals")
    thread.start()
    thread.join()
    return found


def check() -> None:
    """Raise ``IncompatibleTorch`` if this torch does not have the internals gradtrace needs."""
    wrong = missing() or changed()
    if wrong:
        raise IncompatibleTorch(
            f"gradtrace cannot work with torch {torch.__version__}, whose autograd has changed:\n"
            + "".join(f"  - {line}\n" for line in wrong)
            + f"Use a torch that gradtrace is tested with ({TESTED}), or a newer gradtrace; if "
            "there is none, please report this message."
        )
