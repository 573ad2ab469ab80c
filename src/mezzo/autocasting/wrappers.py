"""Run a function in an autocast region, or in the regions that are in force where it was passed on."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, nullcontext
from functools import partial, wraps
from types import coroutine
from typing import Any, ParamSpec, TypeVar, cast

from mezzo.autocasting.module_rules import ModuleRuleBinding, current_bindings, only
from mezzo.autocasting.regions import Region, current_regions, enter_regions

P = ParamSpec("P")
R = TypeVar("R")


def wrap_function(
    region: Region, binding: ModuleRuleBinding | None, function: Callable[P, R]
) -> Callable[P, R]:
    """Wrap a function so that its body runs in the region.

    A generator or a coroutine is left and entered again at every suspension: what happens in
    between is not its business.
    """
    if not callable(function):
        raise TypeError(
            f"autocast(...) as a decorator goes over a function, got {function!r}. As a context it"
            " is `with mezzo.autocast(...):`."
        )
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def generator(*args: P.args, **kwargs: P.kwargs) -> Any:
            return (yield from _resumed(region, binding, function(*args, **kwargs)))

        return cast("Callable[P, R]", generator)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return _wrap_asynchronous(region, binding, function)

    @wraps(function)
    def decorated(*args: P.args, **kwargs: P.kwargs) -> R:
        if binding is None:
            # Without a second context, which dynamo would have to trace too.
            with enter_regions(region):
                return function(*args, **kwargs)
        with binding, enter_regions(region):
            return function(*args, **kwargs)

    return decorated


def _wrap_asynchronous(
    region: Region, binding: ModuleRuleBinding | None, function: Callable[P, Any]
) -> Callable[P, Any]:
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def asynchronous(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await coroutine(_resumed)(
                region, binding, cast("Any", function(*args, **kwargs))
            )

        return asynchronous

    @wraps(function)
    async def stream(*args: P.args, **kwargs: P.kwargs) -> Any:
        async with aclosing(_streamed(region, binding, function(*args, **kwargs))) as items:
            async for item in items:
                yield item

    return stream


def _resumed(
    region: Region, binding: ModuleRuleBinding | None, suspended: Generator[Any, Any, Any]
) -> Generator[Any, Any, Any]:
    """Drive a generator or coroutine, in the region only while it runs."""
    resume = partial(suspended.send, None)
    while True:
        with binding or nullcontext(), enter_regions(region):
            try:
                given = resume()
            except StopIteration as stop:
                return stop.value
        try:
            sent = yield given
        except GeneratorExit:
            with binding or nullcontext(), enter_regions(region):
                suspended.close()
            raise
        # Whatever is thrown in belongs to the wrapped generator.
        except BaseException as error:  # noqa: BLE001
            resume = partial(suspended.throw, error)
        else:
            resume = partial(suspended.send, sent)


async def _streamed(
    region: Region, binding: ModuleRuleBinding | None, source: AsyncGenerator[Any, Any]
) -> AsyncGenerator[Any, Any]:
    """Drive an asynchronous generator, in the region only while it runs. It is iterated, not spoken to: `asend` and `athrow` do not reach it."""
    drive = coroutine(_resumed)
    try:
        while True:
            try:
                item = await drive(region, binding, cast("Any", source.__anext__().__await__()))
            except StopAsyncIteration:
                return
            yield item
    finally:
        await drive(region, binding, cast("Any", source.aclose().__await__()))


def propagate_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Bind a function to the precision that is in force here, whatever thread or moment it is called in.

    Autocast state and module rules belong to a thread: a worker starts without them. A carried
    function takes them along.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import mezzo, torch
    >>> with mezzo.autocast("cpu", dtype="bfloat16"), ThreadPoolExecutor() as pool:
    ...     pool.submit(mezzo.propagate_autocast(lambda: torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)).result()
    torch.bfloat16
    """
    regions, bindings = current_regions(), current_bindings()

    @wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        # Outside any region there is nothing to take along. Entering rules again that hold already
        # would cost a visit to every module that has one.
        if not regions or current_bindings() == bindings:
            with enter_regions(*regions):
                return function(*args, **kwargs)
        with only(bindings), enter_regions(*regions):
            return function(*args, **kwargs)

    return carried
