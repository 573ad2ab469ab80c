"""Entering and leaving: torch's defects are gone on the default path, threads do not disturb each other, `carry` takes the precision along."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.autocasting.regions import Region, current_regions, enter_regions

HALF, FLOAT = torch.bfloat16, torch.float16
PAIRS = pytest.mark.parametrize(("outer", "inner"), [(HALF, FLOAT), (FLOAT, HALF)], ids=str)
CUSTOM = {"dtype": "bfloat16", "half": {"add"}}


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def total() -> torch.dtype:
    return (torch.ones(2) + torch.ones(2)).dtype


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@PAIRS
def test_the_other_half_type_in_a_nested_region_is_not_served_stale_weights(
    outer: torch.dtype, inner: torch.dtype
) -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with mezzo.autocast("cpu", dtype=outer):
        assert layer(x).dtype is outer
        with mezzo.autocast("cpu", dtype=inner):
            assert layer(x).dtype is inner
        assert layer(x).dtype is outer
        with mezzo.autocast("cpu", dtype=inner):
            assert layer(x).dtype is inner
    with mezzo.autocast("cpu", dtype=inner):
        assert layer(x).dtype is inner


@PAIRS
def test_the_other_half_type_is_right_after_a_disabled_region_between(
    outer: torch.dtype, inner: torch.dtype
) -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with mezzo.autocast("cpu", dtype=outer):
        assert layer(x).dtype is outer
        with mezzo.autocast("cpu", enabled=False):
            assert layer(x).dtype is torch.float32
            with mezzo.autocast("cpu", dtype=inner):
                assert layer(x).dtype is inner
        assert layer(x).dtype is outer


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.5, foreach=True),
        lambda p: torch.optim.Adam(p, 0.5, fused=True),
    ],
    ids=["SGD", "Adam"],
)
@pytest.mark.parametrize(
    "words", [{}, {"cache": "versioned"}, {"half": {"add"}}], ids=["default", "versioned", "custom"]
)
def test_an_optimizer_step_inside_a_region_is_seen(make: Any, words: dict[str, Any]) -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    optimizer = make(layer.parameters())
    with mezzo.autocast("cpu", dtype=HALF, **words):
        for _ in range(2):
            layer(x).float().sum().backward()
            optimizer.step()
            expected = nn.functional.linear(x.to(HALF), layer.weight.to(HALF), layer.bias.to(HALF))
            assert torch.equal(layer(x), expected)


def test_gradients_reach_the_weights_through_torchs_cache_after_a_nested_region() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with mezzo.autocast("cpu", dtype=HALF):
        first = layer(x)
        with mezzo.autocast("cpu", dtype=FLOAT):
            second = layer(x)
        (first.float().sum() + second.float().sum()).backward()
    assert layer.weight.grad is not None
    assert torch.allclose(layer.bias.grad, torch.full((3,), 4.0))


@pytest.mark.parametrize(
    "words", [{}, {"half": {"add"}}, {"cache": "versioned"}], ids=["default", "custom", "versioned"]
)
def test_two_threads_with_different_half_types_on_one_module_never_meet(
    words: dict[str, Any],
) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    wrong: list[object] = []
    start = threading.Barrier(4)

    def hammer(dtype: torch.dtype, other: torch.dtype) -> None:
        start.wait()
        try:
            for turn in range(60):
                with mezzo.autocast("cpu", dtype=dtype, **words):
                    wrong.extend(
                        found for found in (layer(x).dtype, layer(x).dtype) if found is not dtype
                    )
                    if turn % 3 == 0:
                        with mezzo.autocast("cpu", enabled=False):
                            wrong.extend(
                                found for found in (layer(x).dtype,) if found is not torch.float32
                            )
                    if turn % 3 == 1:
                        with mezzo.autocast("cpu", dtype=other, **words):
                            wrong.extend(found for found in (layer(x).dtype,) if found is not other)
                    wrong.extend(found for found in (layer(x).dtype,) if found is not dtype)
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            wrong.append(error)

    threads = [
        threading.Thread(target=hammer, args=pair) for pair in [(HALF, FLOAT), (FLOAT, HALF)] * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def step_by_step(*turns: Callable[[], None]) -> None:
    """Run the first of each pair of turns here and the others in one other thread, strictly in order."""
    with ThreadPoolExecutor(1) as pool:
        for number, turn in enumerate(turns):
            if number % 2:
                pool.submit(turn).result()
            else:
                turn()


def test_a_thread_that_opened_while_ours_was_switched_off_does_not_feed_us_its_half_type() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    ours, off, theirs = (
        mezzo.autocast("cpu", dtype=HALF),
        mezzo.autocast("cpu", enabled=False),
        mezzo.autocast("cpu", dtype=FLOAT),
    )
    found: list[torch.dtype] = []
    step_by_step(
        lambda: (ours.__enter__(), off.__enter__()),
        lambda: (theirs.__enter__(), found.append(layer(x).dtype)),
        lambda: (off.__exit__(None, None, None), found.append(layer(x).dtype)),
        lambda: (found.append(layer(x).dtype), theirs.__exit__(None, None, None)),
        lambda: (found.append(layer(x).dtype), ours.__exit__(None, None, None)),
    )
    assert found == [FLOAT, HALF, FLOAT, HALF]


def test_a_thread_that_opened_while_ours_was_in_its_half_type_does_not_feed_us_that_later() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    ours, inner, theirs = (
        mezzo.autocast("cpu", dtype=HALF),
        mezzo.autocast("cpu", dtype=FLOAT),
        mezzo.autocast("cpu", dtype=FLOAT),
    )
    found: list[torch.dtype] = []
    step_by_step(
        lambda: (ours.__enter__(), inner.__enter__()),
        lambda: (theirs.__enter__(), found.append(layer(x).dtype)),
        lambda: (inner.__exit__(None, None, None), found.append(layer(x).dtype)),
        lambda: (found.append(layer(x).dtype), theirs.__exit__(None, None, None)),
        lambda: (found.append(layer(x).dtype), ours.__exit__(None, None, None)),
    )
    assert found == [FLOAT, HALF, FLOAT, HALF]


def test_threads_of_one_dtype_keep_torchs_cache() -> None:
    cached: list[bool] = []
    ours, theirs = mezzo.autocast("cpu"), mezzo.autocast("cpu", dtype=HALF)
    step_by_step(
        lambda: ours.__enter__(),
        lambda: (
            theirs.__enter__(),
            cached.append(torch.is_autocast_cache_enabled()),
            theirs.__exit__(None, None, None),
        ),
        lambda: ours.__exit__(None, None, None),
    )
    assert cached == [True]


@pytest.mark.parametrize("words", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_one_instance_entered_by_two_threads_is_left_by_each_on_its_own(
    words: dict[str, Any],
) -> None:
    region = mezzo.autocast("cpu", dtype=HALF, **words)
    found: list[Any] = []

    def in_a_region_of_its_own() -> None:
        with mezzo.autocast("cpu", dtype=FLOAT, full={"mul"}):
            region.__enter__()
            inner.set()
            left.wait(5)
            region.__exit__(None, None, None)
            found.append((product(), torch._C._len_torch_function_stack()))

    inner, left = threading.Event(), threading.Event()
    other = threading.Thread(target=in_a_region_of_its_own)
    region.__enter__()
    other.start()
    inner.wait(5)
    region.__exit__(None, None, None)
    found.append((product(), torch._C._len_torch_function_stack()))
    left.set()
    other.join()
    assert found == [(torch.float32, 0), (FLOAT, 1)]


def test_a_worker_starts_without_the_region() -> None:
    with mezzo.autocast("cpu", **CUSTOM):
        assert in_thread(total) is torch.float32


@pytest.mark.parametrize("words", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_carry_takes_the_precision_into_a_thread(words: dict[str, Any]) -> None:
    with mezzo.autocast("cpu", dtype=HALF, **words):
        assert in_thread(mezzo.propagate_autocast(product)) is HALF
        assert in_thread(mezzo.propagate_autocast(total)) is (HALF if words else torch.float32)


def test_carry_outside_any_region_carries_nothing() -> None:
    carried = mezzo.propagate_autocast(product)
    assert carried() is torch.float32
    assert in_thread(carried) is torch.float32


def test_a_carried_function_takes_the_precision_to_a_later_moment() -> None:
    with mezzo.autocast("cpu", **CUSTOM):
        carried = mezzo.propagate_autocast(total)
    assert carried() is HALF
    assert total() is torch.float32


def test_carry_takes_the_dtype_in_force_where_the_region_named_none() -> None:
    with mezzo.autocast("cpu", dtype=FLOAT), mezzo.autocast("cpu"):
        assert in_thread(mezzo.propagate_autocast(product)) is FLOAT


@pytest.mark.parametrize(
    "off",
    [lambda: torch.autocast("cpu", enabled=False), lambda: mezzo.autocast("cpu", enabled=False)],
    ids=["torch", "mezzo"],
)
def test_carry_inside_a_switched_off_region_carries_float32(off: Any) -> None:
    with mezzo.autocast("cpu", **CUSTOM), off():
        carried = mezzo.propagate_autocast(lambda: (total(), product()))
        assert carried() == (torch.float32, torch.float32)
    assert in_thread(carried) == (torch.float32, torch.float32)


def test_carry_takes_a_torch_region_inside_ours_along() -> None:
    with mezzo.autocast("cpu", **CUSTOM), torch.autocast("cpu", dtype=FLOAT):
        assert in_thread(mezzo.propagate_autocast(lambda: (total(), product()))) == (FLOAT, FLOAT)


def test_carry_keeps_the_functions_name_arguments_result_and_errors() -> None:
    @mezzo.propagate_autocast
    def divide(x: int, *, by: int) -> float:
        """Divide."""
        return x / by

    assert (divide.__name__, divide.__doc__, divide(6, by=3)) == ("divide", "Divide.", 2.0)
    with mezzo.autocast("cpu", **CUSTOM), pytest.raises(ZeroDivisionError):
        mezzo.propagate_autocast(divide)(1, by=0)


@pytest.mark.parametrize(
    "words", [{}, {"full": {"linear"}, "half": {"add"}}], ids=["default", "custom"]
)
def test_modules_in_parallel_threads_run_in_the_carried_precision(words: dict[str, Any]) -> None:
    replicas = [nn.Linear(3, 3) for _ in range(3)]
    inputs = [(torch.randn(2, 3),) for _ in range(3)]
    with mezzo.autocast("cpu", dtype=HALF, **words):
        expected = [replica(*one) for replica, one in zip(replicas, inputs, strict=True)]
        results = _in_threads([mezzo.propagate_autocast(replica) for replica in replicas], inputs)
    assert all(
        torch.equal(one, other) and one.dtype is other.dtype
        for one, other in zip(results, expected, strict=True)
    )


def _in_threads(functions: list[Callable[..., Any]], inputs: list[tuple[Any, ...]]) -> list[Any]:
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda function, arguments: function(*arguments), functions, inputs))


def test_a_thread_that_ended_inside_a_region_leaves_nothing_to_its_successors() -> None:
    def ends_inside() -> int:
        mezzo.enable_autocast("cpu", **CUSTOM)
        return threading.get_ident()

    def successor() -> tuple[int, int]:
        return threading.get_ident(), len(current_regions())

    found: dict[Any, Any] = {}

    def run(function: Any) -> None:
        thread = threading.Thread(target=lambda: found.__setitem__(function, function()))
        thread.start()
        thread.join()

    # Thread numbers are used again, if not always at once.
    for _ in range(50):
        run(ends_inside)
        run(successor)
        ident, regions = found[successor]
        assert regions == 0
        if ident == found[ends_inside]:
            return
    pytest.skip("the system never gave a thread the number of a dead one")


def test_a_thread_that_ended_inside_a_region_does_not_cost_others_torchs_cache() -> None:
    thread = threading.Thread(target=lambda: mezzo.enable_autocast("cpu", dtype=FLOAT))
    thread.start()
    thread.join()
    with mezzo.autocast("cpu", dtype=HALF):
        assert torch.is_autocast_cache_enabled()


def test_current_regions_are_the_innermost_of_each_device_as_they_are_in_force() -> None:
    assert current_regions() == ()
    with mezzo.autocast("cpu", dtype=HALF):
        (found,) = current_regions()
        assert (found.device, found.enabled, found.dtype) == ("cpu", True, HALF)
        with mezzo.autocast("cpu", enabled=False):
            (found,) = current_regions()
            assert not found.enabled
    assert current_regions() == ()


def test_a_region_is_read_back_from_the_string_that_names_it() -> None:
    for region in (
        Region("cpu", True, HALF, False, "some key"),
        Region("cuda", False, None, False),
    ):
        assert Region.decode(region.encode()) == region


def test_regions_given_together_are_entered_in_order_and_left_in_reverse() -> None:
    both = enter_regions(Region("cpu", True, HALF, None), Region("cpu", True, FLOAT, None))
    with both:
        assert product() is FLOAT
        with both:
            assert product() is FLOAT
        assert product() is FLOAT
    assert product() is torch.float32


@pytest.mark.parametrize("words", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_a_generator_that_is_suspended_in_a_region_and_closed_later_puts_back_what_it_found(
    words: dict[str, Any],
) -> None:
    def numbers() -> Any:
        with mezzo.autocast("cpu", dtype=HALF, **words):
            yield product()

    running = numbers()
    assert next(running) is HALF
    running.close()
    assert product() is torch.float32


@pytest.mark.parametrize("words", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_a_suspended_generators_region_that_is_closed_inside_another_leaves_that_one_in_force(
    words: dict[str, Any],
) -> None:
    def numbers() -> Any:
        with mezzo.autocast("cpu", dtype=FLOAT, **words):
            yield

    running = numbers()
    next(running)
    with mezzo.autocast("cpu", dtype=HALF, **words):
        running.close()
        assert (product(), total()) == (HALF, HALF if words else torch.float32)
    assert (product(), total()) == (torch.float32, torch.float32)
    assert torch.get_autocast_dtype("cpu") is HALF
