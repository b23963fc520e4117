"""A watch on a forward pass whose model is not known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gradtrace.autodiff import nodes
from gradtrace.autodiff.names import ModuleCall, NameTable, first_number, unused
from gradtrace.diagnosis import Subject
from gradtrace.pytorch.module_calls import listen_to_all
from gradtrace.pytorch.wrapped_modules import join, named_modules, named_parameters, unwrapped
from gradtrace.watching import Noted, watch


class Discovery(watch):
    """Watches all modules that are called: ``with Discovery() as found: loss = anything()``.

    Every called module is recorded under a number; ``resolve_names`` replaces the numbers by the
    user's names afterwards.
    """

    def __init__(self, *, diagnose: bool = False) -> None:
        super().__init__(nn.Module(), diagnose=diagnose)
        self._tops: dict[str, nn.Module] = {}
        self._leaves: dict[int, tuple[Tensor, nn.Module, str]] = {}
        self._kinds: dict[str, str] = {}

    def _attach(self) -> Callable[[], None]:
        return listen_to_all(self)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Noted | None:
        """Called when a module's forward pass begins; registers a new module."""
        if id(module) not in self._tree.modules:
            self._tree.know(module, str(len(self._tree.modules)))
        return super().enter(module, args, kwargs)

    def _name_parameters(self, module: nn.Module) -> None:
        """Record the tensors that ``torch.func.functional_call`` puts in place of parameters for
        the duration of a call.
        """
        for key, tensor in module._parameters.items():
            if isinstance(tensor, Tensor) and tensor.is_leaf:
                self._leaves.setdefault(id(tensor), (tensor, module, key))

    def _classes(self) -> dict[str, str]:
        return self._kinds

    def _subject(self) -> Subject:
        return replace(super()._subject(), roots=self._tops)

    # Names -----------------------------------------------------------------------------------

    def resolve_names(
        self,
        loss: Tensor | float,
        model: nn.Module | None = None,
        known: Mapping[str, Any] | None = None,
    ) -> None:
        """Give modules and parameters their names in ``model``, if there is one.

        ``known`` are other named objects, such as a script's globals. Modules in none of them are
        named by their class; if only one outermost module has parameters, it is taken as the model.
        Calls are counted from the first one that ``loss`` depends on.
        """
        seen = [unwrapped(module) for module in self._tree.modules.values()]
        self._tops = roots = dict(self._roots(seen, model, known or {}))
        self.model = roots.get("", self.model)  # heads and layers are found from its modules
        names: dict[nn.Module, str] = {}
        table = NameTable()
        for prefix, root in roots.items():
            for name, module in named_modules(root):
                names.setdefault(module, join(prefix, name) if name else prefix)
            for name, parameter in named_parameters(root):
                table.name(parameter, join(prefix, name))
        for key, (tensor, module, last) in self._leaves.items():
            if key not in table.leaves:
                table.name(tensor, join(names[unwrapped(module)], last))
        self._kinds = {name: type(module).__name__ for module, name in names.items()}
        numbers = [self._tree.name(module) for module in self._tree.modules.values()]
        final = dict(zip(numbers, (names[m] for m in seen)))
        graph = isinstance(loss, Tensor) and nodes.maker_of(loss) is not None
        earliest = 0 if self._record is not None and not graph else first_number(loss)
        self._write_calls(table, earliest, final)
        self._calls = {final[number]: count for number, count in self._calls.items()}
        if self._record is not None:
            self._record.rename(final)

    def _write_calls(self, table: NameTable, earliest: int, final: Mapping[str, str]) -> None:
        """Keep the module calls from the loss's first operator on, under their final names."""
        found = self.name_table.since(earliest)
        for start, (module, call) in zip(found.starts, found.places):
            table.enter(start, ModuleCall(final.get(module, ""), call))
        self.name_table = table

    def _roots(
        self, seen: list[nn.Module], model: nn.Module | None, known: Mapping[str, Any]
    ) -> Iterator[tuple[str, nn.Module]]:
        """The outermost modules, each with its name; the model's is ``""``."""
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


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are not inside another of them, each once."""
    inside: set[nn.Module] = set()
    found: dict[nn.Module, None] = {}
    for module in modules:
        if module not in inside and module not in found:
            found[module] = None
            inside.update(m for _, m in named_modules(module) if m is not module)
    return [module for module in found if module not in inside]
