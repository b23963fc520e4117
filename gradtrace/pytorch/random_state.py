"""The state of all random number generators that a forward pass may draw from."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.errors import GradtraceError

MERSENNE = 624
"""Words of the state of a Mersenne twister, as Python and NumPy have one."""

HEADER = object.__basicsize__
"""Bytes at the beginning of an object in CPython: its type, and a reference count that changes."""


def cuda_devices(model: nn.Module) -> list[int]:
    """The numbers of the GPUs that a model is on."""
    tensors = (*model.parameters(), *model.buffers())
    return sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})


def seeded(seed: Any) -> torch.Generator:
    """A generator on the CPU; an error for a seed that is no whole number of 64 bits."""
    if not isinstance(seed, Integral) or not -(1 << 63) <= int(seed) < 1 << 63:
        raise GradtraceError(f"seed is a whole number of at most 64 bits, not {seed!r}")
    return torch.Generator().manual_seed(int(seed))


@dataclass(eq=False)
class RandomState:
    """The generators' states: of PyTorch (CPU, and GPUs by number), Python and NumPy (None: not
    imported).

    >>> before = RandomState.now([])
    >>> drawn = torch.rand(2), random.random()
    >>> before.restore()
    >>> bool((torch.rand(2) == drawn[0]).all()), random.random() == drawn[1]
    (True, True)
    """

    cpu: Tensor
    cuda: dict[int, Tensor] = field(default_factory=dict)
    python: Any = None
    numpy: Any = None

    @classmethod
    def now(cls, devices: Iterable[int], python: bool = True, numpy: bool = True) -> RandomState:
        """The states at this moment; those of Python and NumPy if wanted."""
        return cls(
            torch.default_generator.get_state(),
            {n: torch.cuda.default_generators[n].get_state() for n in devices} if devices else {},
            _PYTHON.get() if python else None,
            _NUMPY.get() if numpy else None,
        )

    def moved(self) -> set[str]:
        """Which of these generators have another state now: "torch", "python", "numpy"."""
        now, found = RandomState.now(self.cuda), set()
        on_gpus = (not torch.equal(now.cuda[n], state) for n, state in self.cuda.items())
        if not torch.equal(now.cpu, self.cpu) or any(on_gpus):
            found.add("torch")
        if now.python != self.python:
            found.add("python")
        if now.numpy is not self.numpy and str(now.numpy) != str(self.numpy):
            found.add("numpy")
        return found

    def completed(self) -> RandomState:
        """With the states of Python and NumPy at this moment where none are known."""
        python = _PYTHON.get() if self.python is None else self.python
        numpy = _NUMPY.get() if self.numpy is None else self.numpy
        return replace(self, python=python, numpy=numpy)

    def restore(self) -> None:
        """Set all generators to these states; GPUs that are not there are left out."""
        torch.default_generator.set_state(self.cpu)
        for n, state in self.cuda.items():
            if n < len(torch.cuda.default_generators):
                torch.cuda.default_generators[n].set_state(state)
        if self.python is not None:
            random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy")
        if self.numpy is not None and numpy is not None:
            numpy.random.set_state(self.numpy)

    def tensors(self) -> dict[str, Tensor]:
        """The states as tensors, for a file; ``of`` is the inverse."""
        found = {"cpu": self.cpu, **{f"cuda {n}": state for n, state in self.cuda.items()}}
        if self.python is not None:
            _, words, cached = self.python
            found["python"] = torch.tensor(words, dtype=torch.int64, device="cpu")
            found["python cached"] = _optional(cached)
        if self.numpy is not None and self.numpy[0] == "MT19937":
            _, key, position, has_cached, cached = self.numpy
            words = [*map(int, key), int(position)]
            found["numpy"] = torch.tensor(words, dtype=torch.int64, device="cpu")
            found["numpy cached"] = _optional(float(cached) if has_cached else None)
        return found

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> RandomState:
        """The states in such tensors; ValueError if they are none."""
        cuda = {name: state for name, state in tensors.items() if name.startswith("cuda ")}
        if "cpu" not in tensors or not all(name[5:].isdecimal() for name in cuda):
            raise ValueError("the states of random number generators are incomplete")
        try:
            torch.Generator().set_state(tensors["cpu"])
        except (RuntimeError, TypeError) as error:
            raise ValueError("the state of the generator of the CPU is none") from error
        if any(state.dtype is not torch.uint8 or state.dim() != 1 for state in cuda.values()):
            raise ValueError("the state of the generator of a GPU is none")
        found = cls(tensors["cpu"], {int(name[5:]): state for name, state in cuda.items()})
        if "python" in tensors:
            words, cached = _words(tensors, "python")
            found.python = (random.Random.VERSION, tuple(words), cached)
        numpy: Any = sys.modules.get("numpy")
        if "numpy" in tensors and numpy is not None:
            words, cached = _words(tensors, "numpy")
            key = numpy.array(words[:-1], dtype=numpy.uint32)
            found.numpy = ("MT19937", key, words[-1], int(cached is not None), cached or 0.0)
        return found


def _optional(number: float | None) -> Tensor:
    numbers = [] if number is None else [number]
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _words(tensors: dict[str, Tensor], name: str) -> tuple[list[int], float | None]:
    words, cached = tensors[name], tensors.get(f"{name} cached")
    right = words.dtype is torch.int64 and words.shape == (MERSENNE + 1,)
    if not right or not bool(((words >= 0) & (words < 2**32)).all()) or words[-1] > MERSENNE:
        raise ValueError(f"the state of the generator of {name} is none")
    if cached is None or cached.dtype is not torch.float64 or cached.shape not in ((0,), (1,)):
        raise ValueError(f"the cached number of the generator of {name} is none")
    numbers: list[float] = cached.tolist()
    return words.tolist(), numbers[0] if numbers else None


class _Reused:
    """The state of a Mersenne twister, read again only if it has moved.

    To read the states of Python's and NumPy's generators makes 625 objects, which takes up to 50
    and 250 µs. A draw moves the position in the state and, after 624 of them, all of its words: so
    the position and two words tell whether it has moved. Where they lie in memory is tried out with
    a generator of its own; if they are not there, the state is read every time.
    """

    def __init__(self) -> None:
        self._source: Any = None  # whose memory the parts are of
        self._can_tell = False
        self._parts: list[Any] = []
        self._seen: list[bytes] = []
        self._state: Any = None

    def get(self) -> Any:
        """The state at this moment."""
        seen, at = self._seen, 0
        for part in self._parts:
            if part.raw != seen[at]:
                return self._again()
            at += 1
        return self._state if at else self._again()

    def _again(self) -> Any:
        source = self.source()
        if source is not self._source:
            self._source, self._can_tell = source, self.can_tell()
        self._parts = self.parts(source) if self._can_tell else []
        self._seen = [part.raw for part in self._parts]
        self._state = self.read()
        return self._state

    def can_tell(self) -> bool:
        """Whether the parts of memory tell that a generator has moved."""
        if sys.implementation.name != "cpython":
            return False
        trial = self.trial()
        parts = self.parts(trial)
        seen = []
        for count in (1, 0, 2 * MERSENNE - 1):
            for _ in range(count):
                self.draw(trial)
            seen.append([part.raw for part in parts])
        return seen[0] == seen[1] != seen[2]

    def source(self) -> Any:
        """What holds the state."""
        raise NotImplementedError

    def parts(self, source: Any) -> list[Any]:
        """The memory to look at."""
        raise NotImplementedError

    def trial(self) -> Any:
        """Another one, to try it out."""
        raise NotImplementedError

    def draw(self, trial: Any) -> None:
        """Draw 32 bits."""
        raise NotImplementedError

    def read(self) -> Any:
        """The state."""
        raise NotImplementedError


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


class _Python(_Reused):
    def source(self) -> Any:
        return getattr(random.getstate, "__self__", None)

    def can_tell(self) -> bool:
        return type(self.source()) is random.Random and super().can_tell()

    def parts(self, source: Any) -> list[Any]:
        return [_memory(id(source) + HEADER, 16)]  # the position, and words

    def get(self) -> Any:
        found = super().get()
        cached = self._source.gauss_next  # an attribute beside the state
        return found if found[2] == cached else (*found[:2], cached)

    def trial(self) -> Any:
        return random.Random(0)

    def draw(self, trial: Any) -> None:
        trial.getrandbits(32)

    def read(self) -> Any:
        return random.getstate()


class _Numpy(_Reused):
    def get(self) -> Any:
        return None if "numpy" not in sys.modules else super().get()

    def source(self) -> Any:
        numpy: Any = sys.modules["numpy"]
        return getattr(numpy.random.get_state, "__self__", None)

    def can_tell(self) -> bool:
        return hasattr(self.source(), "_bit_generator") and super().can_tell()

    def parts(self, source: Any) -> list[Any]:
        bits = source._bit_generator
        if type(bits).__name__ != "MT19937":
            return []
        at = int(bits.ctypes.state_address)  # 624 words, then the position
        size = type(source).__basicsize__ - HEADER  # which bits it draws from, a cached number
        return [_memory(at, 8), _memory(at + 4 * MERSENNE, 4), _memory(id(source) + HEADER, size)]

    def trial(self) -> Any:
        numpy: Any = sys.modules["numpy"]
        return numpy.random.RandomState(0)

    def draw(self, trial: Any) -> None:
        trial.bytes(4)

    def read(self) -> Any:
        return sys.modules["numpy"].random.get_state()


_PYTHON, _NUMPY = _Python(), _Numpy()
