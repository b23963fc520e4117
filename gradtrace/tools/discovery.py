"""A watch over a forward pass whose model is not known beforehand."""

from __future__ import annotations

import contextlib
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from gradtrace.autodiff import nodes
from gradtrace.autodiff.names import ModuleCall, NameTable, unused
from gradtrace.autodiff.traversal import walk
from gradtrace.pytorch.module_calls import listen_to_all
from gradtrace.session import Noted, join, named_modules, named_parameters, unwrapped, watch


class Discovery(watch):
    """Watch whatever is called: ``with Discovery() as found: loss = anything()``.

    Every module that is called is noted; what each is called by the user comes to light after, in
    ``settle``. Until then its name is a number.
    """

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self._leaves: dict[int, tuple[Tensor, nn.Module, str]] = {}
        self._kinds: dict[str, str] = {}

    def _attach(self) -> Callable[[], None]:
        return listen_to_all(self)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Noted | None:
        """A module is called, which may be one that was not seen before."""
        if id(module) not in self._modules:
            self._know(module, str(len(self._modules)))
        return super().enter(module, args, kwargs)

    def _name_parameters(self, module: nn.Module) -> None:
        """torch.func.functional_call has put other tensors there, for the time of the call."""
        for key, tensor in module._parameters.items():
            if isinstance(tensor, Tensor) and tensor.is_leaf:
                self._leaves.setdefault(id(tensor), (tensor, module, key))

    def _classes(self) -> dict[str, str]:
        return self._kinds

    # Names -----------------------------------------------------------------------------------

    def settle(
        self, loss: Tensor, model: nn.Module | None = None, known: Mapping[str, Any] | None = None
    ) -> None:
        """Give modules and parameters the names that ``model`` has for them, if there is one.

        ``known`` are other things that the user has a name for, such as a script's globals. What is
        in none of them is named by its class; where one module alone has parameters, it is the
        model. Calls are counted from the first that this loss knows of.
        """
        seen = [unwrapped(module) for module in self._modules.values()]
        roots = dict(self._roots(seen, model, known or {}))
        names: dict[nn.Module, str] = {}
        atlas = NameTable()
        for prefix, root in roots.items():
            for name, module in named_modules(root):
                names.setdefault(module, join(prefix, name) if name else prefix)
            for name, parameter in named_parameters(root):
                atlas.name(parameter, join(prefix, name))
        for key, (tensor, module, last) in self._leaves.items():
            if key not in atlas.leaves:
                atlas.name(tensor, join(names[unwrapped(module)], last))
        self._kinds = {name: type(module).__name__ for module, name in names.items()}
        numbers = [self._names[key] for key in self._modules]
        self._write(atlas, loss, dict(zip(numbers, (names[m] for m in seen))))

    def _write(self, atlas: NameTable, loss: Tensor, final: Mapping[str, str]) -> None:
        """Keep the notes from the loss's first operator on, with the names that are final."""
        first = bisect_right(self.name_table.starts, _earliest(loss)) - 1
        starts, places = (
            self.name_table.starts[max(first, 0) :],
            self.name_table.places[max(first, 0) :],
        )
        skipped: dict[str, int] = {}
        for module, call in places:
            skipped[module] = min(call, skipped.get(module, call))
        for start, (module, call) in zip(starts, places):
            atlas.enter(start, ModuleCall(final.get(module, ""), call - skipped[module]))
        self.name_table = atlas

    def _roots(
        self, seen: list[nn.Module], model: nn.Module | None, known: Mapping[str, Any]
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules that hold all others, with the name of each; the model's is ``""``."""
        called = set(seen)
        named = {
            value: name
            for name, value in known.items()
            if isinstance(value, nn.Module) and called & {m for _, m in named_modules(value)}
        }
        inside = {module for _, module in named_modules(model)} if model is not None else set()
        tops = [m for m in outermost([*map(unwrapped, named), *seen]) if m not in inside]
        owners = [m for m in tops if next(named_parameters(m), None) is not None]
        if model is None and len(owners) == 1:
            (model,) = owners
        taken = set[str]()
        if model is not None:
            yield "", model
            taken = set(unwrapped(model)._modules)
        variables = {unwrapped(module): name for module, name in named.items()}
        for module in tops:
            if module is not model:
                name = unused(variables.get(module, type(module).__name__), taken)
                taken.add(name)
                yield name, module


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Here ``torch.compile`` gives back what it is given: one node for a whole graph would hide it.

    To ask PyTorch for it takes an import of seconds, so where nothing was compiled before, its own
    variable has to do.
    """
    if "torch._dynamo" in sys.modules:
        with import_module("torch._dynamo.config").patch(disable=True):
            yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
        if "torch._dynamo" in sys.modules:
            config: Any = import_module("torch._dynamo.config")
            config.disable = before == "1"


VARIABLE = "TORCH_COMPILE_DISABLE"


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that lie in none of the others, each once."""
    inside: set[nn.Module] = set()
    found: dict[nn.Module, None] = {}
    for module in modules:
        if module not in inside and module not in found:
            found[module] = None
            inside.update(m for _, m in named_modules(module) if m is not module)
    return [module for module in found if module not in inside]


def _earliest(loss: Tensor) -> int:
    """The sequence number of the loss's first operator."""
    numbers: list[int] = []

    def visit(node: nodes.Node, _: nodes.Edges) -> None:
        number = nodes.sequence_of(node)
        if number is not None:
            numbers.append(number)

    nodes.root_of(loss)
    walk(loss, visit)
    return min(numbers, default=0)
