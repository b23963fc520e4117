"""The random numbers of a measurement: each batch has its own, whichever run and rank counts it.

What the loss of a batch draws (dropout, noise) follows from the state of the random generators when
the run began and from the number of the batch, and from nothing else: not from what was drawn for
other batches, which a run that is resumed does not count again, and of which each of several ranks
counts some. The generators go on for the loader as if no loss had drawn from them.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from gradtrace.distributed import digests
from gradtrace.distributed.code_facts import all_code, closure, definition, installed
from gradtrace.pytorch.call_patches import unpatched
from gradtrace.pytorch.python_state import CONSTANTS, MAX_LOOKED_THROUGH, restorer_of
from gradtrace.pytorch.random_state import RandomState, cuda_devices
from gradtrace.pytorch.side_effects import same_draws

MOST_VALUES = 100_000
"""How many values are looked at in search of generators."""


class RandomDraws:
    """Seeds the generators that the loss of a batch may draw from: those of PyTorch, Python and
    NumPy for the whole process, and those that a model's modules and a loss function refer to.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self.model = model
        self._held = _generators(model, loss_fn)

    def start(self) -> str:
        """A digest of the states of all generators, from which a run's numbers follow."""
        states = RandomState.now(cuda_devices(self.model)).tensors()
        return digests.digest(states, *map(_state, self._held))

    @contextmanager
    def of_batch(self, start: str, loader: str, number: int) -> Iterator[None]:
        """Within, what is drawn follows from the start of a run, a loader and a batch's number."""
        restores = [restorer_of(each) for each in self._held]
        with same_draws(self.model) as seed:
            try:
                seed(_number(start, loader, number))
                for n, each in enumerate(self._held):
                    _seed(each, _number(start, loader, number, n))
                yield
            finally:
                for restore in restores:
                    if restore is not None:
                        restore()


def _number(*texts: object) -> int:
    """A seed of 63 bits."""
    return int.from_bytes(blake2b(repr(texts).encode(), digest_size=8).digest(), "big") >> 1


def _generators(model: nn.Module, loss_fn: Callable[..., Any]) -> list[Any]:
    """The generators that modules hold, and those that their code and a loss function refer to, in
    the same order in every process.
    """
    whole = (getattr(random, "_inst", None), torch.default_generator)
    seen: dict[int, Any] = {id(each): each for each in whole}
    found: list[Any] = []
    waiting = deque[Any]([model, loss_fn])
    while waiting and len(seen) < MOST_VALUES:
        value = waiting.popleft()
        if type(value) in CONSTANTS or id(value) in seen:
            continue
        seen[id(value)] = value
        if _state(value) is not None:
            found.append(value)
        else:
            with suppress(Exception):  # objects of the user's may raise anything when looked at
                waiting += _held_by(value)
    return found


def _held_by(value: Any) -> Iterable[Any]:
    """What a value refers to and user code may use; nothing of objects of installed packages."""
    if isinstance(value, (list, tuple, deque, Mapping)):
        items = value.values() if isinstance(value, Mapping) else value
        return items if len(value) <= MAX_LOOKED_THROUGH else ()
    if isinstance(value, FunctionType):
        return _variables(value)
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, type):
        own = (each for each in value.__mro__ if not installed(each))
        return [definition(each) for kind in own for each in unpatched(kind).values()]
    if isinstance(value, ModuleType) or not hasattr(value, "__dict__"):
        return ()
    user = isinstance(value, nn.Module) or not installed(type(value))
    return (type(value), *vars(value).values()) if user else ()


def _variables(function: FunctionType) -> list[Any]:
    """The variables around a function, what it uses of the user's modules, and its defaults."""
    found = [*closure(function).values(), *(function.__defaults__ or ())]
    found += (function.__kwdefaults__ or {}).values()
    if installed(function):
        return found
    names = [name for code in all_code(function.__code__) for name in code.co_names]
    globals_ = function.__globals__
    used = [globals_[name] for name in names if name in globals_]
    modules = [each for each in used if isinstance(each, ModuleType) and not installed(each)]
    inside = (vars(module).get(name) for module in modules for name in names)
    return [*found, *used, *inside]


def _state(generator: Any) -> Any:
    """The state of a generator; None of anything else."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        with suppress(NotImplementedError):  # of the system
            return generator.getstate()
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, numpy.random.Generator):
        generator = generator.bit_generator
    return generator.state if isinstance(generator, numpy.random.BitGenerator) else None


def _seed(generator: Any, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif hasattr(generator, "seed"):  # of NumPy, as of before 1.17
        generator.seed(number % (1 << 32))
    else:
        bits = getattr(generator, "bit_generator", generator)
        with suppress(TypeError, ValueError):  # a kind of the user's, made in another way
            bits.state = type(bits)(number).state
