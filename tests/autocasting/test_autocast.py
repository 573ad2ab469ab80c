"""`mezzo.autocast`: arguments, state inside, nesting, and restoring the state."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd

import mezzo
from mezzo.autocasting import arguments, function_mode, table_lookup
from mezzo.autocasting import autocast as module
from mezzo.autocasting.autocast import (
    autocast_all_devices,
    device_types,
    disable_autocast,
    set_thread_region,
    thread_region,
)

CUSTOM = {"device_type": "cpu", "dtype": "bfloat16", "half": {"add"}}
HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
REGIONS = {
    "default": lambda **fields: mezzo.autocast("cpu", dtype=torch.bfloat16, **fields),
    "custom": lambda **fields: mezzo.autocast("O1", **CUSTOM, **fields),
    "versioned": lambda **fields: mezzo.autocast(
        "cpu", dtype=torch.bfloat16, cache="versioned", **fields
    ),
}
KINDS = pytest.mark.parametrize("make", REGIONS.values(), ids=REGIONS.keys())


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def total() -> torch.dtype:
    return (torch.ones(2) + torch.ones(2)).dtype


def test_torchs_positional_arguments_are_accepted() -> None:
    with mezzo.autocast("cpu", torch.float16, True, False):
        assert product() is torch.float16
        assert not torch.is_autocast_cache_enabled()


def test_torchs_keyword_arguments_are_accepted() -> None:
    with mezzo.autocast(device_type="cpu", dtype=torch.float16, enabled=True, cache_enabled=True):
        assert product() is torch.float16
        assert torch.is_autocast_cache_enabled()


def test_a_region_with_enabled_false_casts_nothing() -> None:
    with mezzo.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert product() is torch.float32
        assert not torch.is_autocast_enabled("cpu")


def test_a_torch_device_is_accepted() -> None:
    with mezzo.autocast(torch.device("cpu"), dtype=torch.bfloat16):
        assert product() is torch.bfloat16
    with mezzo.autocast("cpu:0", dtype=torch.bfloat16):
        assert product() is torch.bfloat16
    with mezzo.autocast(device_type=torch.device("cpu"), dtype=torch.bfloat16):
        assert product() is torch.bfloat16


def test_without_arguments_the_current_device_and_its_dtype_are_used() -> None:
    with mezzo.autocast():
        assert torch.is_autocast_enabled(mezzo.hardware().device)
        if mezzo.hardware().device == "cpu":
            assert product() is mezzo.hardware().preferred.dtype


def test_without_a_dtype_mezzo_uses_the_same_as_torch() -> None:
    with torch.autocast("cpu"):
        expected = product()
    with mezzo.autocast("cpu"):
        assert product() is expected


def test_a_nested_region_without_a_dtype_uses_the_outer_one_as_in_torch() -> None:
    with mezzo.autocast("cpu", dtype=torch.float16), mezzo.autocast("cpu"):
        assert product() is torch.float16


def test_a_level_with_overrides_is_a_policy() -> None:
    with mezzo.autocast("O1", **CUSTOM):
        assert total() is torch.bfloat16
        assert product() is torch.bfloat16


def test_a_policy_is_accepted_with_and_without_overrides() -> None:
    policy = mezzo.Policy("O1", "bfloat16", half={"add"})
    with mezzo.autocast(policy, device_type="cpu"):
        assert total() is torch.bfloat16
    with mezzo.autocast(policy, device_type="cpu", dtype="float16", half=()):
        assert total() is torch.float32
        assert product() is torch.float16
    with mezzo.autocast(policy=policy, device_type="cpu"):
        assert total() is torch.bfloat16


def test_a_policy_file_is_accepted_as_string_and_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    mezzo.Policy("O1", "bfloat16", half={"add"}).save(file)
    for policy in (file, str(file)):
        with mezzo.autocast(policy, device_type="cpu"):
            assert total() is torch.bfloat16


def test_a_changed_policy_file_is_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for op, expected in (("add", torch.bfloat16), ("sub", torch.float32)):
        mezzo.Policy("O1", "bfloat16", half={op}).save(file)
        for policy in (file, str(file)):
            with mezzo.autocast(policy, device_type="cpu"):
                assert total() is expected
            with mezzo.autocast(policy=policy, device_type="cpu"):
                assert total() is expected


def test_op_lists_may_be_lists_tuples_or_sets() -> None:
    for fields in ({"add"}, ["add"], ("add",), frozenset({"add"})):
        with mezzo.autocast("cpu", dtype="bfloat16", half=fields):
            assert total() is torch.bfloat16


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_every_level_can_be_entered(level: str) -> None:
    expected = torch.float32 if level == "O0" else torch.bfloat16
    with mezzo.autocast(level, device_type="cpu", dtype="bfloat16"):
        assert product() is expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"args": ("cqu",)}, "neither a device type"),
        ({"args": ("01",)}, "letter O, not a zero"),
        ({"args": ("cpu",), "device_type": "cpu"}, "passed twice"),
        ({"args": ("O1",), "policy": "O2"}, "passed twice"),
        ({"args": ("cpu",), "halff": {"add"}}, "halff"),
        ({"args": ("cpu",), "half": {"adds"}}, "Did you mean 'add'"),
        ({"args": ("cpu",), "half": {"add"}, "full": {"add"}}, "both"),
        ({"args": ("cpu",), "dtype": "float64"}, "float64"),
        ({"args": (3,)}, "3 is not a policy"),
    ],
    ids=str,
)
def test_invalid_arguments_raise_when_the_region_is_created(
    fields: dict[str, Any], message: str
) -> None:
    keywords = dict(fields)
    with pytest.raises(mezzo.PolicyError, match=message):
        mezzo.autocast(*keywords.pop("args"), **keywords)


def test_an_unknown_device_raises_with_torchs_message() -> None:
    with pytest.raises(RuntimeError, match="Invalid device string: 'cqu'"):
        mezzo.autocast(device_type="cqu")


def test_a_device_without_autocast_raises() -> None:
    with pytest.raises(mezzo.MezzoError, match="meta"):
        mezzo.autocast("meta")


@HALVES
@pytest.mark.parametrize("custom", [False, True])
def test_torchs_autocast_state_matches_the_region(half: torch.dtype, custom: bool) -> None:
    fields = {"half": {"add"}} if custom else {}
    with mezzo.autocast("cpu", dtype=half, **fields):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is half
        with mezzo.autocast("cpu", enabled=False, **fields):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


@KINDS
def test_custom_fwd_and_custom_bwd_see_the_region(make: Any) -> None:
    seen: dict[str, Any] = {}

    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            seen["forward"] = torch.is_autocast_enabled("cpu")
            return x.mm(weight)

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            seen["backward"] = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            return gradient.mm(weight.t()), x.t().mm(gradient)

    x, weight = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    with make():
        result = Product.apply(x, weight)
    assert result.dtype is torch.bfloat16
    result.float().sum().backward()
    assert seen == {"forward": True, "backward": (True, torch.bfloat16)}


@KINDS
def test_custom_fwd_with_cast_inputs_casts_and_disables_autocast(make: Any) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            assert x.dtype is torch.float32
            assert not torch.is_autocast_enabled("cpu")
            return x.mm(y) + x

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return gradient, gradient

    with make():
        assert (
            Product.apply(torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2)).dtype
            is torch.float32
        )


@KINDS
def test_a_disabled_region_inside_casts_nothing_in_torch_and_mezzo(make: Any) -> None:
    with make():
        for off in (
            mezzo.autocast("cpu", enabled=False),
            mezzo.autocast("O0", device_type="cpu"),
            torch.autocast("cpu", enabled=False),
        ):
            with off:
                assert product() is torch.float32
                assert total() is torch.float32
            assert product() is torch.bfloat16


def test_an_enabled_region_inside_a_disabled_one_casts() -> None:
    with mezzo.autocast("cpu", enabled=False), mezzo.autocast("O1", **CUSTOM):
        assert total() is torch.bfloat16


def test_a_torch_region_inside_a_custom_one_keeps_the_policy_in_its_dtype() -> None:
    with mezzo.autocast("O1", **CUSTOM), torch.autocast("cpu", dtype=torch.float16):
        assert product() is torch.float16
        assert total() is torch.float16


def test_a_default_region_inside_a_custom_one_has_torchs_lists() -> None:
    with mezzo.autocast("O1", **CUSTOM):
        with mezzo.autocast("cpu", dtype=torch.bfloat16):
            assert total() is torch.float32
        assert total() is torch.bfloat16


def test_of_nested_custom_regions_the_innermost_applies() -> None:
    with mezzo.autocast("O1", **CUSTOM):
        with mezzo.autocast("cpu", dtype="bfloat16", full={"mm"}):
            assert (total(), product()) == (torch.float32, torch.float32)
            with mezzo.autocast("cpu", dtype="float16", half={"add"}):
                assert (total(), product()) == (torch.float16, torch.float16)
            assert (total(), product()) == (torch.float32, torch.float32)
        assert (total(), product()) == (torch.bfloat16, torch.bfloat16)


def test_regions_of_different_device_types_are_independent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        elsewhere = mezzo.autocast("cuda", dtype="float16", half={"add"}, on_unsupported="ignore")
    with mezzo.autocast("O1", **CUSTOM), elsewhere:
        assert total() is torch.bfloat16
        with mezzo.autocast("cpu", enabled=False):
            assert total() is torch.float32
        assert total() is torch.bfloat16
    with elsewhere, mezzo.autocast("O1", **CUSTOM):
        assert total() is torch.bfloat16


@KINDS
def test_an_exception_restores_the_state(make: Any) -> None:
    with mezzo.autocast("cpu", dtype=torch.float16):
        before = (
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch._C._len_torch_function_stack(),
        )
        with pytest.raises(ZeroDivisionError), make(), make(cache_enabled=False):
            raise ZeroDivisionError
        assert (
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch._C._len_torch_function_stack(),
        ) == before
        assert product() is torch.float16
    assert product() is torch.float32


@KINDS
def test_an_exception_in_an_overridden_op_restores_the_state(make: Any) -> None:
    with make():
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        with pytest.raises(RuntimeError):
            torch.ones(2) + torch.ones(3)
        assert torch.is_autocast_enabled("cpu")
        assert product() is torch.bfloat16


@KINDS
def test_one_instance_entered_twice_restores_the_state(make: Any) -> None:
    region = make()
    with region:
        with region:
            assert product() is torch.bfloat16
        assert product() is torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert product() is torch.float32


@KINDS
def test_one_instance_can_be_entered_repeatedly(make: Any) -> None:
    region = make()
    for _ in range(3):
        with region:
            assert product() is torch.bfloat16
        assert product() is torch.float32


def test_one_instance_can_be_entered_recursively() -> None:
    region = mezzo.autocast("O1", **CUSTOM)

    def descend(depth: int) -> torch.dtype:
        with region:
            inner = descend(depth - 1) if depth else torch.bfloat16
            assert total() is inner
            return total()

    assert descend(5) is torch.bfloat16
    assert total() is torch.float32


@KINDS
def test_an_exception_in_the_inner_use_of_an_instance_keeps_the_outer(make: Any) -> None:
    region = make()
    with region:
        with pytest.raises(ZeroDivisionError), region:
            raise ZeroDivisionError
        assert product() is torch.bfloat16
    assert product() is torch.float32


def test_entering_returns_the_instance() -> None:
    region = mezzo.autocast("cpu")
    with region as entered:
        assert entered is region


@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_a_region_can_be_copied_and_pickled(fields: dict[str, Any]) -> None:
    region = mezzo.autocast("cpu", dtype="bfloat16", **fields)
    for again in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        with again:
            assert product() is torch.bfloat16
            assert total() is (torch.bfloat16 if fields else torch.float32)


def test_a_pickled_custom_region_works_in_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pickled = pickle.dumps(mezzo.autocast("O1", **CUSTOM))
    arguments._table.cache_clear()
    monkeypatch.setattr(table_lookup, "TABLES", {"": {}})
    monkeypatch.setattr(table_lookup.PolicyTable, "_alive", WeakValueDictionary())
    monkeypatch.setattr(function_mode, "TABLES", table_lookup.TABLES)
    with pickle.loads(pickled):
        assert total() is torch.bfloat16
    arguments._table.cache_clear()


def test_enable_inside_a_region_outlives_it_until_disable() -> None:
    with mezzo.autocast("cpu", dtype=torch.bfloat16):
        mezzo.enable_autocast("cpu", dtype=torch.float16)
    try:
        assert product() is torch.float16
    finally:
        mezzo.disable_autocast()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


@KINDS
def test_disable_inside_a_region_keeps_the_region(make: Any) -> None:
    mezzo.enable_autocast("cpu", dtype=torch.float16, half={"mul"})
    with make():
        mezzo.disable_autocast()
        assert product() is torch.bfloat16
    assert product() is torch.float32
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_enable_lasts_until_disable() -> None:
    mezzo.enable_autocast("cpu", dtype="bfloat16", half={"add"})
    try:
        assert total() is torch.bfloat16
        with mezzo.autocast("cpu", enabled=False):
            assert total() is torch.float32
        assert total() is torch.bfloat16
    finally:
        mezzo.disable_autocast()
    assert total() is torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_a_second_enable_replaces_the_first() -> None:
    mezzo.enable_autocast("cpu", dtype="bfloat16", half={"add"})
    mezzo.enable_autocast("cpu", dtype="float16")
    try:
        assert total() is torch.float32
        assert product() is torch.float16
    finally:
        mezzo.disable_autocast()
    assert product() is torch.float32


def test_enable_with_an_invalid_policy_keeps_the_previous_one() -> None:
    mezzo.enable_autocast("cpu", dtype="bfloat16")
    try:
        with pytest.raises(mezzo.PolicyError):
            mezzo.enable_autocast("cpu", half={"no_such_op"})
        assert product() is torch.bfloat16
    finally:
        mezzo.disable_autocast()


def test_disable_without_enable_does_nothing() -> None:
    mezzo.disable_autocast()
    mezzo.disable_autocast()
    assert product() is torch.float32


def test_enable_applies_module_rules_and_disable_removes_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mezzo.enable_autocast("cpu", dtype="bfloat16", modules={"1": "full"}, model=model)
    try:
        assert model(torch.ones(1, 2)).dtype is torch.float32
    finally:
        mezzo.disable_autocast()
    assert "forward" not in model[1].__dict__


@pytest.mark.parametrize("cache_enabled", [None, True, False])
def test_torch_amp_code_gets_no_new_warning(cache_enabled: bool | None) -> None:
    fields = {"dtype": torch.bfloat16, "enabled": True, "cache_enabled": cache_enabled}
    with warnings.catch_warnings(record=True) as events:
        warnings.simplefilter("always")
        with mezzo.autocast("cpu", **fields):
            model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
            model(torch.ones(1, 2)).float().sum().backward()
        with mezzo.autocast("cpu", torch.float16, False), mezzo.autocast(device_type="cpu"):
            model(torch.ones(1, 2))
    assert not events


def test_float32_warns_and_disables_the_region_as_in_torch() -> None:
    with pytest.warns(UserWarning, match="not supported"):
        torch.autocast("cpu", dtype=torch.float32)
    with pytest.warns(UserWarning, match="float32"):
        region = mezzo.autocast("cpu", dtype=torch.float32)
    with region:
        assert product() is torch.float32


def test_o0_is_a_disabled_region() -> None:
    with mezzo.autocast("cpu", dtype=torch.bfloat16), mezzo.autocast("O0", device_type="cpu"):
        assert not torch.is_autocast_enabled("cpu")
        assert product() is torch.float32


def test_device_types_always_contain_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hardware", lambda: type("Hardware", (), {"device": "cuda"}))

    assert device_types() == ("cpu", "cuda")


def test_a_machine_without_an_accelerator_has_one_device_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "hardware", lambda: type("Hardware", (), {"device": "cpu"}))

    assert device_types() == ("cpu",)


def test_all_devices_casts_tensors_on_the_cpu() -> None:
    with autocast_all_devices(preset="megengine", dtype="bfloat16"):
        assert product() is torch.bfloat16
    assert product() is torch.float32


def test_all_devices_disabled_inside_disables_the_outer_region() -> None:
    with (
        autocast_all_devices(preset="megengine", dtype="bfloat16"),
        autocast_all_devices(preset="megengine", enabled=False),
    ):
        assert product() is torch.float32


def test_all_devices_restores_the_state_when_the_body_raises() -> None:
    with pytest.raises(KeyError), autocast_all_devices(preset="megengine", dtype="bfloat16"):
        raise KeyError
    assert product() is torch.float32


def test_all_devices_decorates_a_function() -> None:
    assert autocast_all_devices(preset="megengine", dtype="bfloat16")(product)() is torch.bfloat16


def test_all_devices_in_compiled_code_has_no_graph_break() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        with autocast_all_devices(preset="megengine", dtype="bfloat16"):
            return x @ x

    assert (
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2, 2)).dtype
        is torch.bfloat16
    )


def test_set_thread_region_lasts_until_it_is_disabled() -> None:
    region = autocast_all_devices(preset="megengine", dtype="bfloat16")
    try:
        set_thread_region(region)
        assert thread_region() is region
        assert product() is torch.bfloat16
        mezzo.enable_autocast("cpu", dtype="float16")
        assert product() is torch.float16
    finally:
        disable_autocast()
    assert thread_region() is None
    assert product() is torch.float32
