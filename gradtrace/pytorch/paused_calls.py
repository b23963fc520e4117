"""Calls that pause: of a ``forward`` that is a generator, a coroutine or an asynchronous generator.

Such a call returns before any of its code has run. So what it returns is wrapped: whenever its code
goes on, the listeners to the call are told (``Listener.resume``), and again when it pauses.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from types import AsyncGeneratorType, CoroutineType, GeneratorType, coroutine
from typing import Any, TypeAlias

PAUSING = frozenset({GeneratorType, CoroutineType, AsyncGeneratorType})
"""The types of what such calls return."""

Step: TypeAlias = Callable[..., Any]
"""Runs a function as a part of the call: ``step(inner.send, value)``."""


def told(inner: Any, step: Step) -> Any:
    """A generator or coroutine that does what ``inner`` does, by this step."""
    kind = type(inner)
    wrap: Any = _generator if kind is GeneratorType else _asynchronous
    if kind is CoroutineType:
        wrap = _coroutine
    outer = wrap(inner, step)
    outer.__name__, outer.__qualname__ = inner.__name__, inner.__qualname__
    return outer


def _generator(inner: Any, step: Step) -> Generator[Any, Any, Any]:
    """``yield from inner``, by steps."""
    advance: Any = inner.send
    given: tuple[Any, ...] = (None,)
    while True:
        try:
            item = step(advance, *given)
        except StopIteration as end:
            return end.value
        try:
            sent = yield item
        except GeneratorExit:
            step(inner.close)
            raise
        except BaseException as error:
            advance, given = inner.throw, (error,)
        else:
            advance, given = inner.send, (sent,)


_steps: Any = coroutine(_generator)


async def _coroutine(inner: Coroutine[Any, Any, Any], step: Step) -> Any:
    return await _steps(inner, step)


async def _asynchronous(inner: AsyncGenerator[Any, Any], step: Step) -> AsyncGenerator[Any, Any]:
    advance: Any = inner.asend(None)
    while True:
        try:
            item = await _steps(advance, step)
        except StopAsyncIteration:
            return
        try:
            sent = yield item
        except GeneratorExit:
            await _steps(inner.aclose(), step)
            raise
        except BaseException as error:
            advance = inner.athrow(error)
        else:
            advance = inner.asend(sent)
