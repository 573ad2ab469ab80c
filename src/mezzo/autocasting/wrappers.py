"""Run a function in an autocast region, or in the regions that were current when it was wrapped."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, nullcontext
from functools import partial, wraps
from types import coroutine
from typing import Any, ParamSpec, TypeVar, cast

from mezzo.autocasting.module_rules import (
    ModuleRuleBinding,
    current_bindings,
    replace_bindings,
)
from mezzo.autocasting.regions import Region, current_regions, enter_regions

P = ParamSpec("P")
R = TypeVar("R")


def wrap_function(
    region: Region, binding: ModuleRuleBinding | None, function: Callable[P, R]
) -> Callable[P, R]:
    """Wrap a function so that its body runs in a region.

    A generator or a coroutine leaves the region at every suspension and enters it again afterwards.
    """
    if not callable(function):
        raise TypeError(
            f"autocast(...) decorates functions, got {function!r}. As a context manager it is"
            " `with mezzo.autocast(...):`."
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
            # No second context manager, which dynamo would have to trace too.
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
    """Run a generator or coroutine, in the region only while it is not suspended."""
    resume = partial(suspended.send, None)
    while True:
        with binding or nullcontext(), enter_regions(region):
            try:
                value = resume()
            except StopIteration as stop:
                return stop.value
        try:
            sent = yield value
        except GeneratorExit:
            with binding or nullcontext(), enter_regions(region):
                suspended.close()
            raise
        # Pass every exception that is thrown in to the wrapped generator.
        except BaseException as error:  # noqa: BLE001
            resume = partial(suspended.throw, error)
        else:
            resume = partial(suspended.send, sent)


async def _streamed(
    region: Region, binding: ModuleRuleBinding | None, source: AsyncGenerator[Any, Any]
) -> AsyncGenerator[Any, Any]:
    """Run an asynchronous generator, in the region only while it is not suspended.

    It is only iterated: `asend` and `athrow` do not reach it.
    """
    resumed = coroutine(_resumed)
    try:
        while True:
            try:
                item = await resumed(region, binding, cast("Any", source.__anext__().__await__()))
            except StopAsyncIteration:
                return
            yield item
    finally:
        await resumed(region, binding, cast("Any", source.aclose().__await__()))


def propagate_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Bind a function to the current autocast regions, for any thread and any later time.

    Autocast state and module rules belong to a thread, and a worker thread starts without them. The
    wrapped function runs in the regions and module rules that were current when it was wrapped.
    Outside any region it returns a function that runs as usual.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import mezzo, torch
    >>> def product_dtype():
    ...     return torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
    >>> with mezzo.autocast("cpu", dtype="bfloat16"), ThreadPoolExecutor() as pool:
    ...     print(pool.submit(product_dtype).result())
    ...     print(pool.submit(mezzo.propagate_autocast(product_dtype)).result())
    torch.float32
    torch.bfloat16
    """
    regions, bindings = current_regions(), current_bindings()

    @wraps(function)
    def propagated(*args: P.args, **kwargs: P.kwargs) -> R:
        # Outside any region there is nothing to propagate. Bindings that are entered already are
        # not entered again, which would visit every module with a rule.
        if not regions or current_bindings() == bindings:
            with enter_regions(*regions):
                return function(*args, **kwargs)
        with replace_bindings(bindings), enter_regions(*regions):
            return function(*args, **kwargs)

    return propagated
