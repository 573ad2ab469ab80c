"""The versioned weight cache: never stale, for frozen weights and inference too, and bounded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from mezzo.autocasting.weight_cache import CacheInfo, WeightCache, is_weight

HALF = torch.bfloat16
POLICY_FIELDS = pytest.mark.parametrize(
    "fields", [{"cache": "versioned"}, {"half": {"add"}}], ids=["versioned", "custom"]
)


def region(**fields: Any) -> mezzo.autocast:
    return mezzo.autocast("cpu", dtype=HALF, **({"cache": "versioned"} | fields))


def expected(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x.to(HALF), layer.weight.detach().to(HALF), layer.bias.detach().to(HALF))


def assigned(weight: Tensor) -> None:
    weight.data = torch.full_like(weight, 3.0)


def swapped(weight: Tensor) -> None:
    weight.detach().copy_(torch.full_like(weight, 4.0))


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda weight: weight.add_(1),
    "copy_": lambda weight: weight.copy_(torch.full_like(weight, 2.0)),
    "data =": assigned,
    "detach().copy_": swapped,
    "[0] =": lambda weight: weight.__setitem__(0, 5.0),
    "init": lambda weight: nn.init.ones_(weight),
}


@POLICY_FIELDS
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_weight_is_cast_again(
    fields: dict[str, Any], change: Callable[[Tensor], Any]
) -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with region(**fields):
        layer(x)
        with torch.no_grad():
            change(layer.weight)
        assert torch.equal(layer(x), expected(layer, x))


def test_load_state_dict_inside_a_region_is_detected() -> None:
    layer, other, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(2, 3)
    with region():
        layer(x)
        layer.load_state_dict(other.state_dict())
        assert torch.equal(layer(x), expected(other, x))


def test_an_untracked_change_is_detected_after_clear_weight_cache() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with region():
        layer(x)
        layer.weight.data.add_(1)
        mezzo.clear_weight_cache()
        assert mezzo.weight_cache_info().size == 0
        assert torch.equal(layer(x), expected(layer, x))


@POLICY_FIELDS
def test_weights_are_cast_once(fields: dict[str, Any]) -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with region(**fields):
        for _ in range(5):
            layer(x)
        assert mezzo.weight_cache_info() == CacheInfo(size=2, bytes=2 * (9 + 3), hits=8, misses=2)


def test_frozen_weights_are_cached() -> None:
    layer, x = nn.Linear(3, 3).requires_grad_(requires_grad=False), torch.randn(2, 3)
    with region():
        layer(x)
        layer(x)
        assert mezzo.weight_cache_info().hits == 2


def test_weights_are_cached_in_inference_mode() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with region(), torch.inference_mode():
        layer(x)
        layer(x)
        assert mezzo.weight_cache_info().hits == 2


def test_weights_created_in_inference_mode_are_correct_without_the_cache() -> None:
    with torch.inference_mode():
        layer, x = nn.Linear(3, 3), torch.randn(2, 3)
        with region():
            layer(x)
            layer.weight.add_(1)
            assert torch.equal(layer(x), expected(layer, x))


def test_a_copy_made_without_gradients_is_not_used_with_gradients() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with region():
        with torch.no_grad():
            layer(x)
        with torch.inference_mode():
            layer(x)
        layer(x).float().sum().backward()
    assert layer.weight.grad is not None


def test_a_weight_unfrozen_inside_a_region_gets_its_gradient() -> None:
    layer, x = nn.Linear(3, 3).requires_grad_(requires_grad=False), torch.randn(2, 3)
    with region():
        layer(x)
        layer.requires_grad_(requires_grad=True)
        layer(x).float().sum().backward()
    assert layer.weight.grad is not None


def test_a_weight_frozen_inside_a_region_gets_no_gradient() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with region():
        layer(x)
        layer.weight.requires_grad_(requires_grad=False)
        layer(x).float().sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_gradients_through_a_cached_copy_accumulate() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with region():
        first, second = layer(x).float().sum(), layer(x).float().sum()
        first.backward()
        second.backward()
    assert torch.equal(layer.bias.grad, torch.full((3,), 4.0))


def test_leaving_a_region_in_another_thread_clears_nothing() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)

    def elsewhere() -> None:
        for fields in ({}, {"cache": "versioned"}):
            with mezzo.autocast("cpu", dtype=HALF, **fields):
                layer(x)

    with region():
        layer(x)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(elsewhere).result()
        layer(x)
        assert mezzo.weight_cache_info().hits == 2


def test_the_cache_ends_with_the_outermost_region() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with region():
        with region(half={"add"}):
            layer(x)
        assert mezzo.weight_cache_info().size == 2
        layer(x)
        assert mezzo.weight_cache_info().hits == 2
    assert mezzo.weight_cache_info() == CacheInfo(0, 0, 0, 0)
    with region():
        assert mezzo.weight_cache_info().size == 0


def test_no_copy_outlives_the_region() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with region():
        with torch.no_grad():
            layer(x)
        gc.collect()
        before = _tensors(HALF)
    gc.collect()
    assert _tensors(HALF) == before - 2


def _tensors(dtype: torch.dtype) -> int:
    return sum(1 for thing in gc.get_objects() if type(thing) is Tensor and thing.dtype is dtype)


@pytest.mark.parametrize("recording", [True, False])
def test_a_dead_models_copies_are_dropped_inside_the_region(recording: bool) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
    with region(), torch.set_grad_enabled(recording):
        model(x)
        assert mezzo.weight_cache_info().size == 4
        del model
        gc.collect()
        assert mezzo.weight_cache_info().size == 0


def test_many_short_lived_weights_do_not_accumulate() -> None:
    cache = WeightCache()
    for _ in range(500):
        cache.get(nn.Parameter(torch.zeros(1)), HALF)
    assert len(cache._copies) < 100


def test_a_weight_in_a_graph_keeps_its_gradient_after_its_copy_was_dropped() -> None:
    x = torch.ones(2, 3)
    with region():
        layer = nn.Linear(3, 3)
        weight = layer.weight
        result = layer(x)
        del layer
        mezzo.weight_cache_info()
        result.float().sum().backward()
    assert torch.equal(weight.grad, torch.full((3, 3), 2.0))


def test_both_dtypes_are_cached_at_the_same_time() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with region():
        for dtype in (HALF, torch.float16, HALF):
            with mezzo.autocast("cpu", dtype=dtype, cache="versioned"):
                assert layer(x).dtype is dtype
        assert mezzo.weight_cache_info() == CacheInfo(size=4, bytes=48, hits=2, misses=4)


def test_cache_off_holds_nothing() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    for fields in ({"cache": "off"}, {"cache_enabled": False}):
        with mezzo.autocast("cpu", dtype=HALF, half={"add"}, **fields):
            layer(x)
            assert mezzo.weight_cache_info().size == 0
            assert not torch.is_autocast_cache_enabled()


def test_only_float32_weights_are_cached() -> None:
    x = torch.randn(2, 3)
    with region():
        F.linear(x, torch.randn(3, 3))
        F.linear(x, torch.randn(3, 3, requires_grad=True) * 2)
        assert mezzo.weight_cache_info().size == 0


def test_only_parameters_are_weights() -> None:
    assert is_weight(nn.Parameter(torch.zeros(1)))
    assert is_weight(nn.Parameter(torch.zeros(1), requires_grad=False))
    assert not is_weight(torch.zeros(1))
    assert not is_weight(torch.zeros(1, requires_grad=True))
    with torch.inference_mode():
        assert not is_weight(nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize(
    "fields",
    [{"cache": "versioned"}, {"half": {"add"}}, {"half": {"mm"}, "preset": "oneflow"}],
    ids=str,
)
@pytest.mark.parametrize(
    "make",
    [lambda base: base.view(2, 2).requires_grad_(), lambda base: base.requires_grad_()],
    ids=["view", "leaf"],
)
def test_a_leaf_that_is_not_a_parameter_is_never_cached(fields: dict[str, Any], make: Any) -> None:
    base = torch.zeros(2, 2)
    leaf = make(base)
    with region(**fields):
        torch.mm(leaf, leaf)
        with torch.no_grad():
            base.fill_(2.0)
            leaf.detach().fill_(2.0)
        assert torch.equal(torch.mm(leaf, leaf), torch.full((2, 2), 8.0, dtype=HALF))


def test_uses_of_an_activation_do_not_share_a_cast() -> None:
    x = torch.randn(4, requires_grad=True)
    with region(half={"mul"}):
        one, other = x * 1.0, x * 3.0
    one.backward(torch.full((4,), 1.0, dtype=HALF), retain_graph=True)
    other.backward(torch.full((4,), 2.0**-9, dtype=HALF))
    assert torch.equal(x.grad, torch.full((4,), 1.0 + 3 * 2.0**-9))


def test_transforms_do_not_leave_their_tensors_in_the_cache() -> None:
    weight, x = nn.Parameter(torch.randn(3, 3)), torch.randn(3)
    with region():
        torch.func.grad(lambda one: torch.mm(weight, one[:, None]).float().sum())(x)
        torch.mm(weight, x[:, None]).float().sum().backward()
    assert torch.allclose(weight.grad, x.to(HALF).float().expand(3, 3))


def test_a_copy_made_outside_a_transform_is_right_inside() -> None:
    weight, x = nn.Parameter(torch.randn(3, 3)), torch.randn(4, 3)
    with region():
        outside = torch.mm(x, weight)
        inside = torch.func.vmap(lambda one: torch.mm(one[None], weight)[0])(x)
    assert torch.equal(inside, outside)
