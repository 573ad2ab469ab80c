"""Enter and leave regions: nested dtypes, threads, suspended generators, and propagation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo._torch import function_mode_count
from mezzo.autocasting.function_mode import active_mode
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
def test_a_nested_region_of_the_other_dtype_does_not_get_stale_weights(
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
def test_the_other_dtype_is_correct_after_a_disabled_region(
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
    "fields",
    [{}, {"cache": "versioned"}, {"half": {"add"}}],
    ids=["default", "versioned", "custom"],
)
def test_an_optimizer_step_inside_a_region_updates_the_cached_weights(
    make: Any, fields: dict[str, Any]
) -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    optimizer = make(layer.parameters())
    with mezzo.autocast("cpu", dtype=HALF, **fields):
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
    "fields",
    [{}, {"half": {"add"}}, {"cache": "versioned"}],
    ids=["default", "custom", "versioned"],
)
def test_threads_with_different_dtypes_on_one_module_do_not_share_weights(
    fields: dict[str, Any],
) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    wrong: list[object] = []
    start = threading.Barrier(4)

    def hammer(dtype: torch.dtype, other: torch.dtype) -> None:
        start.wait()
        try:
            for iteration in range(60):
                with mezzo.autocast("cpu", dtype=dtype, **fields):
                    wrong.extend(
                        found for found in (layer(x).dtype, layer(x).dtype) if found is not dtype
                    )
                    if iteration % 3 == 0:
                        with mezzo.autocast("cpu", enabled=False):
                            wrong.extend(
                                found for found in (layer(x).dtype,) if found is not torch.float32
                            )
                    if iteration % 3 == 1:
                        with mezzo.autocast("cpu", dtype=other, **fields):
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


def step_by_step(*calls: Callable[[], None]) -> None:
    """Run calls in order, alternately in this thread and in another one."""
    with ThreadPoolExecutor(1) as pool:
        for number, call in enumerate(calls):
            if number % 2:
                pool.submit(call).result()
            else:
                call()


def test_a_thread_that_entered_while_ours_was_disabled_does_not_share_its_dtype() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    ours, off, other = (
        mezzo.autocast("cpu", dtype=HALF),
        mezzo.autocast("cpu", enabled=False),
        mezzo.autocast("cpu", dtype=FLOAT),
    )
    found: list[torch.dtype] = []
    step_by_step(
        lambda: (ours.__enter__(), off.__enter__()),
        lambda: (other.__enter__(), found.append(layer(x).dtype)),
        lambda: (off.__exit__(None, None, None), found.append(layer(x).dtype)),
        lambda: (found.append(layer(x).dtype), other.__exit__(None, None, None)),
        lambda: (found.append(layer(x).dtype), ours.__exit__(None, None, None)),
    )
    assert found == [FLOAT, HALF, FLOAT, HALF]


def test_a_thread_that_entered_during_an_inner_region_does_not_share_its_dtype() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    ours, inner, other = (
        mezzo.autocast("cpu", dtype=HALF),
        mezzo.autocast("cpu", dtype=FLOAT),
        mezzo.autocast("cpu", dtype=FLOAT),
    )
    found: list[torch.dtype] = []
    step_by_step(
        lambda: (ours.__enter__(), inner.__enter__()),
        lambda: (other.__enter__(), found.append(layer(x).dtype)),
        lambda: (inner.__exit__(None, None, None), found.append(layer(x).dtype)),
        lambda: (found.append(layer(x).dtype), other.__exit__(None, None, None)),
        lambda: (found.append(layer(x).dtype), ours.__exit__(None, None, None)),
    )
    assert found == [FLOAT, HALF, FLOAT, HALF]


def test_threads_with_one_dtype_keep_torchs_cache() -> None:
    cached: list[bool] = []
    ours, other = mezzo.autocast("cpu"), mezzo.autocast("cpu", dtype=HALF)
    step_by_step(
        lambda: ours.__enter__(),
        lambda: (
            other.__enter__(),
            cached.append(torch.is_autocast_cache_enabled()),
            other.__exit__(None, None, None),
        ),
        lambda: ours.__exit__(None, None, None),
    )
    assert cached == [True]


@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_two_threads_can_enter_and_leave_one_instance(
    fields: dict[str, Any],
) -> None:
    region = mezzo.autocast("cpu", dtype=HALF, **fields)
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


def test_a_worker_thread_starts_without_the_region() -> None:
    with mezzo.autocast("cpu", **CUSTOM):
        assert in_thread(total) is torch.float32


@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_propagate_applies_the_region_in_a_thread(fields: dict[str, Any]) -> None:
    with mezzo.autocast("cpu", dtype=HALF, **fields):
        assert in_thread(mezzo.propagate_autocast(product)) is HALF
        assert in_thread(mezzo.propagate_autocast(total)) is (HALF if fields else torch.float32)


def test_propagate_outside_any_region_changes_nothing() -> None:
    propagated = mezzo.propagate_autocast(product)
    assert propagated() is torch.float32
    assert in_thread(propagated) is torch.float32


def test_a_propagated_function_applies_the_region_later() -> None:
    with mezzo.autocast("cpu", **CUSTOM):
        propagated = mezzo.propagate_autocast(total)
    assert propagated() is HALF
    assert total() is torch.float32


def test_propagate_uses_the_current_dtype_if_the_region_has_none() -> None:
    with mezzo.autocast("cpu", dtype=FLOAT), mezzo.autocast("cpu"):
        assert in_thread(mezzo.propagate_autocast(product)) is FLOAT


@pytest.mark.parametrize(
    "off",
    [lambda: torch.autocast("cpu", enabled=False), lambda: mezzo.autocast("cpu", enabled=False)],
    ids=["torch", "mezzo"],
)
def test_propagate_inside_a_disabled_region_runs_in_float32(off: Any) -> None:
    with mezzo.autocast("cpu", **CUSTOM), off():
        propagated = mezzo.propagate_autocast(lambda: (total(), product()))
        assert propagated() == (torch.float32, torch.float32)
    assert in_thread(propagated) == (torch.float32, torch.float32)


def test_propagate_includes_a_torch_region_inside() -> None:
    with mezzo.autocast("cpu", **CUSTOM), torch.autocast("cpu", dtype=FLOAT):
        assert in_thread(mezzo.propagate_autocast(lambda: (total(), product()))) == (FLOAT, FLOAT)


def test_propagate_keeps_name_arguments_result_and_errors() -> None:
    @mezzo.propagate_autocast
    def divide(x: int, *, by: int) -> float:
        """Divide."""
        return x / by

    assert (divide.__name__, divide.__doc__, divide(6, by=3)) == ("divide", "Divide.", 2.0)
    with mezzo.autocast("cpu", **CUSTOM), pytest.raises(ZeroDivisionError):
        mezzo.propagate_autocast(divide)(1, by=0)


@pytest.mark.parametrize(
    "fields", [{}, {"full": {"linear"}, "half": {"add"}}], ids=["default", "custom"]
)
def test_modules_in_parallel_threads_run_in_the_propagated_region(fields: dict[str, Any]) -> None:
    replicas = [nn.Linear(3, 3) for _ in range(3)]
    inputs = [(torch.randn(2, 3),) for _ in range(3)]
    with mezzo.autocast("cpu", dtype=HALF, **fields):
        expected = [replica(*one) for replica, one in zip(replicas, inputs, strict=True)]
        results = _in_threads([mezzo.propagate_autocast(replica) for replica in replicas], inputs)
    assert all(
        torch.equal(one, other) and one.dtype is other.dtype
        for one, other in zip(results, expected, strict=True)
    )


def _in_threads(functions: list[Callable[..., Any]], inputs: list[tuple[Any, ...]]) -> list[Any]:
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda function, arguments: function(*arguments), functions, inputs))


def test_a_thread_that_ended_inside_a_region_does_not_affect_later_threads() -> None:
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

    # Thread ids are reused, but not always immediately.
    for _ in range(50):
        run(ends_inside)
        run(successor)
        ident, regions = found[successor]
        assert regions == 0
        if ident == found[ends_inside]:
            return
    pytest.skip("the system never gave a thread the number of a dead one")


def test_a_thread_that_ended_inside_a_region_does_not_disable_torchs_cache() -> None:
    thread = threading.Thread(target=lambda: mezzo.enable_autocast("cpu", dtype=FLOAT))
    thread.start()
    thread.join()
    with mezzo.autocast("cpu", dtype=HALF):
        assert torch.is_autocast_cache_enabled()


def test_current_regions_are_the_innermost_of_each_device_with_the_current_state() -> None:
    assert current_regions() == ()
    with mezzo.autocast("cpu", dtype=HALF):
        (found,) = current_regions()
        assert (found.device, found.enabled, found.dtype) == ("cpu", True, HALF)
        with mezzo.autocast("cpu", enabled=False):
            (found,) = current_regions()
            assert not found.enabled
    assert current_regions() == ()


def test_a_region_round_trips_through_its_string() -> None:
    for region in (
        Region("cpu", True, HALF, False, "some key"),
        Region("cuda", False, None, False),
    ):
        assert Region.decode(region.encode()) == region


def test_enter_regions_enters_in_order_and_leaves_in_reverse() -> None:
    both = enter_regions(Region("cpu", True, HALF, None), Region("cpu", True, FLOAT, None))
    with both:
        assert product() is FLOAT
        with both:
            assert product() is FLOAT
        assert product() is FLOAT
    assert product() is torch.float32


@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_a_generator_closed_later_than_an_outer_region_restores_the_state(
    fields: dict[str, Any],
) -> None:
    def numbers() -> Any:
        with mezzo.autocast("cpu", dtype=HALF, **fields):
            yield product()

    running = numbers()
    assert next(running) is HALF
    running.close()
    assert product() is torch.float32


@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_closing_a_suspended_generator_inside_another_region_keeps_that_region(
    fields: dict[str, Any],
) -> None:
    def numbers() -> Any:
        with mezzo.autocast("cpu", dtype=FLOAT, **fields):
            yield

    running = numbers()
    next(running)
    with mezzo.autocast("cpu", dtype=HALF, **fields):
        running.close()
        assert (product(), total()) == (HALF, HALF if fields else torch.float32)
    assert (product(), total()) == (torch.float32, torch.float32)
    assert torch.get_autocast_dtype("cpu") is HALF


@pytest.mark.parametrize("reenters", [False, True])
@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_a_region_that_is_left_inside_one_of_another_device_does_not_stay(
    fields: dict[str, Any], reenters: bool
) -> None:
    def numbers() -> Any:
        with mezzo.autocast("cpu", dtype=FLOAT, **fields):
            yield

    running = numbers()
    next(running)
    (region,) = current_regions()
    # On a machine without CUDA, where `autocast` would warn.
    with enter_regions(replace(region, device="cuda")):
        mode = active_mode("cuda")
        if reenters:
            with mezzo.autocast("cpu", dtype=HALF, **fields):
                running.close()
                assert (product(), total()) == (HALF, HALF if fields else torch.float32)
        else:
            running.close()
        assert (product(), total()) == (torch.float32, torch.float32)
        assert torch.is_autocast_enabled("cuda")
        assert active_mode("cuda") is mode
    assert (product(), total()) == (torch.float32, torch.float32)
    assert torch.get_autocast_dtype("cpu") is HALF
    assert function_mode_count() == 0
