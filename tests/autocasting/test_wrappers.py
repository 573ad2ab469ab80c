"""Decorated functions, generators and coroutines; `propagate_autocast` with module rules."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo

HALF = torch.bfloat16
POLICY_FIELDS = {"default": {}, "custom": {"half": {"add"}}}


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@pytest.fixture(params=POLICY_FIELDS.values(), ids=POLICY_FIELDS.keys())
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


def test_a_decorated_function_may_recurse(region: mezzo.autocast) -> None:
    @region
    def descend(depth: int) -> torch.dtype:
        return descend(depth - 1) if depth else product()

    assert descend(3) is HALF
    assert product() is torch.float32


def test_an_exception_in_a_decorated_function_restores_the_state(region: mezzo.autocast) -> None:
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


def test_a_decorated_generator_supports_send_throw_and_return(
    region: mezzo.autocast,
) -> None:
    closed = []

    @region
    def talk() -> Any:
        try:
            events = yield product()
            try:
                yield events
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


def test_closing_a_generator_runs_its_cleanup_in_the_region(region: mezzo.autocast) -> None:
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


def test_two_generators_can_be_interleaved(region: mezzo.autocast) -> None:
    @region
    def numbers() -> Iterator[torch.dtype]:
        for _ in range(3):
            yield product()

    assert {one for pair in zip(numbers(), numbers(), strict=True) for one in pair} == {HALF}
    assert product() is torch.float32


def test_a_decorated_generator_function_is_a_generator_function(region: mezzo.autocast) -> None:
    @region
    def numbers() -> Iterator[int]:
        yield 1

    assert inspect.isgeneratorfunction(numbers)
    assert inspect.isgenerator(numbers())


def test_a_coroutine_runs_in_the_region_and_interleaved_ones_do_not(
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


def test_module_rules_apply_in_calls_of_a_decorated_function() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    @mezzo.autocast("cpu", dtype=HALF, modules={"1": "full"}, model=model)
    def run() -> torch.dtype:
        return model(torch.ones(1, 2)).dtype

    assert run() is torch.float32
    assert "forward" not in model[1].__dict__


def test_module_rules_apply_only_inside_a_decorated_generator() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    @mezzo.autocast("cpu", dtype=HALF, modules={"1": "full"}, model=model)
    def run() -> Iterator[torch.dtype]:
        yield model(torch.ones(1, 2)).dtype

    for found in run():
        assert found is torch.float32
        assert "forward" not in model[1].__dict__


def test_decorating_something_that_is_not_callable_raises(region: mezzo.autocast) -> None:
    with pytest.raises(TypeError, match="decorates functions"):
        region(torch.ones(1))


def test_one_decorator_can_wrap_several_functions_in_several_threads(
    region: mezzo.autocast,
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    decorated = [region(product), region(lambda: product())]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda function: function(), decorated * 4)) == [HALF] * 8


KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "plain"])
PLACES = pytest.mark.parametrize(
    "inside", [True, False], ids=["backward inside", "backward outside"]
)
RULES = {
    "first": {"body.0": "half"},
    "all": {"body": "full"},
    "child": {"body": "full", "body.0": "half"},
    "kept": {"body.2": "keep", nn.Linear: "half"},
}
X = torch.linspace(-3, 3, 8).reshape(2, 4)


class Layer(nn.Linear):
    """Accepts any dtype, since the layer before may have its own rule."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(Layer(4, 4), Layer(4, 4), Layer(4, 4))
        self.reentrant: bool | None = None
        """`use_reentrant` of the checkpoint; None for no checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.body(x)
            if self.reentrant is None
            else checkpoint(self.body, x, use_reentrant=self.reentrant)
        )


class Whole(Model):
    """A checkpoint inside a module with a rule, around one with another rule."""

    def __init__(self) -> None:
        super().__init__()
        inner = Model()
        inner.body = self.body[0]
        self.body = nn.Sequential(inner, self.body[1], self.body[2])

    def forward(self, x: Tensor) -> Tensor:
        self.body[0].reentrant = self.reentrant
        return self.body(x)


def gradients(
    run: Callable[[Tensor], Tensor], model: nn.Module, region: Any, *, inside: bool
) -> list[Tensor]:
    x = X.clone().requires_grad_()
    with region:
        result = run(x)
        loss = (result.float() * torch.arange(8.0).reshape(2, 4)).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [result.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def with_rules(
    kind: type[Model], modules: Any, *, reentrant: bool | None, inside: bool
) -> list[Tensor]:
    model = kind()
    model.reentrant = reentrant
    region = mezzo.autocast("cpu", dtype=HALF, modules=modules, model=model)
    found = gradients(model, model, region, inside=inside)
    assert not any("forward" in module.__dict__ for module in model.modules())
    return found


@KINDS
@PLACES
@pytest.mark.parametrize("modules", RULES.values(), ids=RULES.keys())
def test_checkpointing_recomputes_under_the_rules_of_forward(
    modules: Any, reentrant: bool, inside: bool
) -> None:
    expected = with_rules(Model, modules, reentrant=None, inside=inside)
    found = with_rules(Model, modules, reentrant=reentrant, inside=inside)
    assert all(map(torch.equal, found, expected))


@KINDS
@PLACES
def test_a_checkpoint_inside_a_full_module_keeps_the_rules_of_its_children(
    reentrant: bool, inside: bool
) -> None:
    modules = {"body": "full", "body.0.body": "half"}
    expected = with_rules(Whole, modules, reentrant=None, inside=inside)
    found = with_rules(Whole, modules, reentrant=reentrant, inside=inside)
    assert all(map(torch.equal, found, expected))


@KINDS
def test_recomputation_uses_the_rules_of_forward_when_backward_runs_under_others(
    reentrant: bool,
) -> None:
    expected = with_rules(Model, {"body.0": "half"}, reentrant=None, inside=False)
    for forward in ({"body.0": "half"}, None):
        model = Model()
        model.reentrant = reentrant
        x = X.clone().requires_grad_()
        with mezzo.autocast("cpu", dtype=HALF, modules=forward or (), model=model):
            result = model(x)
        if forward is None:
            expected = gradients(
                again := Model(), again, mezzo.autocast("cpu", dtype=HALF), inside=False
            )
        with mezzo.autocast(
            "cpu", dtype=HALF, modules={"body.2": "full", "body.0": "full"}, model=model
        ):
            (result.float() * torch.arange(8.0).reshape(2, 4)).sum().backward()
            assert model.body[2](X).dtype is torch.float32
        assert all(
            map(
                torch.equal,
                [x.grad, *(parameter.grad for parameter in model.parameters())],
                expected[1:],
            )
        )


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result()


def test_propagate_binds_module_rules_to_a_thread_and_a_later_time(
    elsewhere: Callable[..., Any],
) -> None:
    model = Model()
    with mezzo.autocast("cpu", dtype=HALF, modules={"body.2": "full"}, model=model):
        propagated = mezzo.propagate_autocast(
            lambda: (model.body[0](X).dtype, model.body[2](X).dtype)
        )
        assert elsewhere(propagated) == (HALF, torch.float32)
        assert elsewhere(lambda: model.body[2](X).dtype) is torch.float32
    for call in (elsewhere, lambda function: function()):
        assert call(propagated) == (HALF, torch.float32)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_propagated_function_keeps_its_rules_inside_other_rules() -> None:
    model = Model()
    run = lambda: [layer(X).dtype for layer in model.body]  # noqa: E731
    with mezzo.autocast("cpu", dtype=HALF, modules={"body.0": "full"}, model=model):
        propagated, expected = mezzo.propagate_autocast(run), run()
    with mezzo.autocast("cpu", dtype=HALF):
        plain = mezzo.propagate_autocast(run)
    with mezzo.autocast("cpu", dtype=HALF, modules={"body.2": "full"}, model=model):
        assert propagated() == expected == [torch.float32, HALF, HALF]
        assert plain() == [HALF, HALF, HALF]
        assert run() == [HALF, HALF, torch.float32]
        with pytest.raises(ZeroDivisionError):
            mezzo.propagate_autocast(lambda: 1 / 0)()
        assert run() == [HALF, HALF, torch.float32]


def test_a_function_propagated_outside_any_region_uses_the_rules_of_its_caller() -> None:
    model = Model()
    propagated = mezzo.propagate_autocast(lambda: model.body[0](X).dtype)
    with mezzo.autocast("cpu", dtype=HALF, modules={"body.0": "full"}, model=model):
        assert propagated() is torch.float32
    with mezzo.autocast("cpu", dtype=HALF):
        assert propagated() is HALF
