"""Regions around functions of every kind."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mezzo

HALF = torch.bfloat16
WORDS = {"default": {}, "custom": {"half": {"add"}}}


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@pytest.fixture(params=WORDS.values(), ids=WORDS.keys())
def region(request: pytest.FixtureRequest) -> mezzo.autocast:
    return mezzo.autocast("cpu", dtype=HALF, **request.param)


def test_a_decorated_function_runs_in_the_region_at_every_call(region: mezzo.autocast) -> None:
    decorated = region(product)
    assert [decorated(), product(), decorated()] == [HALF, torch.float32, HALF]


def test_a_decorated_function_keeps_its_name_signature_and_result(region: mezzo.autocast) -> None:
    @region
    def scaled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        """Scale."""
        return x * by

    assert (scaled.__name__, scaled.__doc__, list(inspect.signature(scaled).parameters)) == (
        "scaled",
        "Scale.",
        ["x", "by"],
    )
    assert scaled(torch.ones(1), by=3.0).item() == 3.0


def test_methods_are_decorated(region: mezzo.autocast) -> None:
    class Model(nn.Module):
        @region
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

        @staticmethod
        @region
        def fixed() -> torch.dtype:
            return product()

        @classmethod
        @region
        def of_class(cls) -> torch.dtype:
            return product()

    assert Model()(torch.ones(2, 2)).dtype is HALF
    assert (Model.fixed(), Model.of_class()) == (HALF, HALF)


def test_a_module_can_be_decorated_as_a_function(region: mezzo.autocast) -> None:
    assert region(nn.Linear(2, 2).__call__)(torch.ones(1, 2)).dtype is HALF


def test_a_decorated_function_calls_itself(region: mezzo.autocast) -> None:
    @region
    def descend(depth: int) -> torch.dtype:
        return descend(depth - 1) if depth else product()

    assert descend(3) is HALF
    assert product() is torch.float32


def test_an_exception_in_a_decorated_function_puts_everything_back(region: mezzo.autocast) -> None:
    @region
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert product() is torch.float32


def test_a_generator_runs_in_the_region_and_its_caller_does_not(region: mezzo.autocast) -> None:
    @region
    def numbers() -> Iterator[torch.dtype]:
        yield product()
        yield product()

    found = []
    for one in numbers():
        found += [one, product()]
    assert found == [HALF, torch.float32] * 2


def test_a_generator_receives_what_is_sent_and_thrown_and_gives_its_result(
    region: mezzo.autocast,
) -> None:
    closed = []

    @region
    def talk() -> Any:
        try:
            heard = yield product()
            try:
                yield heard
            except ValueError as error:
                yield str(error), product()
            return "done"
        finally:
            closed.append(product())

    running = talk()
    assert next(running) is HALF
    assert running.send("hello") == "hello"
    assert running.throw(ValueError("oops")) == ("oops", HALF)
    with pytest.raises(StopIteration, match="done"):
        next(running)
    assert closed == [HALF]


def test_a_closed_generator_cleans_up_in_the_region(region: mezzo.autocast) -> None:
    closed = []

    @region
    def numbers() -> Any:
        try:
            yield 1
        finally:
            closed.append(product())

    running = numbers()
    next(running)
    running.close()
    assert closed == [HALF]
    assert product() is torch.float32


def test_two_generators_are_driven_in_turns(region: mezzo.autocast) -> None:
    @region
    def numbers() -> Iterator[torch.dtype]:
        for _ in range(3):
            yield product()

    assert {one for pair in zip(numbers(), numbers(), strict=True) for one in pair} == {HALF}
    assert product() is torch.float32


def test_a_decorated_generator_function_is_still_one(region: mezzo.autocast) -> None:
    @region
    def numbers() -> Iterator[int]:
        yield 1

    assert inspect.isgeneratorfunction(numbers)
    assert inspect.isgenerator(numbers())


def test_a_coroutine_runs_in_the_region_and_others_in_between_do_not(
    region: mezzo.autocast,
) -> None:
    @region
    async def inside() -> list[torch.dtype]:
        before = product()
        await asyncio.sleep(0)
        return [before, product()]

    async def outside() -> list[torch.dtype]:
        before = product()
        await asyncio.sleep(0)
        return [before, product()]

    async def main() -> Any:
        return await asyncio.gather(inside(), outside(), inside())

    assert inspect.iscoroutinefunction(inside)
    assert asyncio.run(main()) == [[HALF] * 2, [torch.float32] * 2, [HALF] * 2]


def test_an_exception_and_a_cancellation_pass_through_a_coroutine(region: mezzo.autocast) -> None:
    seen = []

    @region
    async def waits() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            seen.append(product())
            raise

    async def main() -> None:
        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen.append(product())

    asyncio.run(main())
    assert seen == [HALF, torch.float32]


def test_an_asynchronous_generator_runs_in_the_region_and_its_caller_does_not(
    region: mezzo.autocast,
) -> None:
    closed = []

    @region
    async def numbers() -> AsyncIterator[torch.dtype]:
        try:
            for _ in range(3):
                await asyncio.sleep(0)
                yield product()
        finally:
            closed.append(product())

    async def main() -> list[torch.dtype]:
        found = []
        async for one in numbers():
            found += [one, product()]
        running = numbers()
        await running.__anext__()
        await running.aclose()
        return found

    assert inspect.isasyncgenfunction(numbers)
    assert asyncio.run(main()) == [HALF, torch.float32] * 3
    assert closed == [HALF, HALF]


def test_module_rules_hold_for_the_calls_of_a_decorated_function() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    @mezzo.autocast("cpu", dtype=HALF, modules={"1": "full"}, model=model)
    def run() -> torch.dtype:
        return model(torch.ones(1, 2)).dtype

    assert run() is torch.float32
    assert "forward" not in model[1].__dict__


def test_module_rules_hold_inside_a_decorated_generator_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    @mezzo.autocast("cpu", dtype=HALF, modules={"1": "full"}, model=model)
    def run() -> Iterator[torch.dtype]:
        yield model(torch.ones(1, 2)).dtype

    for found in run():
        assert found is torch.float32
        assert "forward" not in model[1].__dict__


def test_what_cannot_be_called_is_refused(region: mezzo.autocast) -> None:
    with pytest.raises(TypeError, match="goes over a function"):
        region(torch.ones(1))


def test_one_decorator_serves_several_functions_in_several_threads(region: mezzo.autocast) -> None:
    from concurrent.futures import ThreadPoolExecutor

    decorated = [region(product), region(lambda: product())]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda function: function(), decorated * 4)) == [HALF] * 8
