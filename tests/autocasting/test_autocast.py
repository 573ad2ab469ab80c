"""`mezzo.autocast`: its call shapes, what torch tells inside, and everything put back."""

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

CUSTOM = {"device_type": "cpu", "dtype": "bfloat16", "half": {"add"}}
HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
REGIONS = {
    "default": lambda **words: mezzo.autocast("cpu", dtype=torch.bfloat16, **words),
    "custom": lambda **words: mezzo.autocast("O1", **CUSTOM, **words),
    "versioned": lambda **words: mezzo.autocast(
        "cpu", dtype=torch.bfloat16, cache="versioned", **words
    ),
}
KINDS = pytest.mark.parametrize("make", REGIONS.values(), ids=REGIONS.keys())


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def total() -> torch.dtype:
    return (torch.ones(2) + torch.ones(2)).dtype


def test_torchs_positional_call_shape_is_read() -> None:
    with mezzo.autocast("cpu", torch.float16, True, False):
        assert product() is torch.float16
        assert not torch.is_autocast_cache_enabled()


def test_torchs_keyword_call_shape_is_read() -> None:
    with mezzo.autocast(device_type="cpu", dtype=torch.float16, enabled=True, cache_enabled=True):
        assert product() is torch.float16
        assert torch.is_autocast_cache_enabled()


def test_disabled_by_its_word_a_region_casts_nothing() -> None:
    with mezzo.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert product() is torch.float32
        assert not torch.is_autocast_enabled("cpu")


def test_a_torch_device_stands_for_its_type() -> None:
    with mezzo.autocast(torch.device("cpu"), dtype=torch.bfloat16):
        assert product() is torch.bfloat16
    with mezzo.autocast("cpu:0", dtype=torch.bfloat16):
        assert product() is torch.bfloat16
    with mezzo.autocast(device_type=torch.device("cpu"), dtype=torch.bfloat16):
        assert product() is torch.bfloat16


def test_without_words_the_current_device_and_a_dtype_of_its_are_taken() -> None:
    with mezzo.autocast():
        assert torch.is_autocast_enabled(mezzo.hardware().device)
        if mezzo.hardware().device == "cpu":
            assert product() is mezzo.hardware().preferred.dtype


def test_torch_and_mezzo_take_the_same_dtype_when_none_is_given() -> None:
    with torch.autocast("cpu"):
        expected = product()
    with mezzo.autocast("cpu"):
        assert product() is expected


def test_no_dtype_in_a_nested_region_is_the_outer_ones_as_in_torch() -> None:
    with mezzo.autocast("cpu", dtype=torch.float16), mezzo.autocast("cpu"):
        assert product() is torch.float16


def test_a_level_with_overrides_is_a_policy() -> None:
    with mezzo.autocast("O1", **CUSTOM):
        assert total() is torch.bfloat16
        assert product() is torch.bfloat16


def test_a_policy_value_is_read_with_and_without_overrides() -> None:
    policy = mezzo.Policy("O1", "bfloat16", half={"add"})
    with mezzo.autocast(policy, device_type="cpu"):
        assert total() is torch.bfloat16
    with mezzo.autocast(policy, device_type="cpu", dtype="float16", half=()):
        assert total() is torch.float32
        assert product() is torch.float16
    with mezzo.autocast(policy=policy, device_type="cpu"):
        assert total() is torch.bfloat16


def test_a_policy_file_is_read_by_its_name_and_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    mezzo.Policy("O1", "bfloat16", half={"add"}).save(file)
    for word in (file, str(file)):
        with mezzo.autocast(word, device_type="cpu"):
            assert total() is torch.bfloat16


def test_a_policy_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for op, expected in (("add", torch.bfloat16), ("sub", torch.float32)):
        mezzo.Policy("O1", "bfloat16", half={op}).save(file)
        for word in (file, str(file)):
            with mezzo.autocast(word, device_type="cpu"):
                assert total() is expected
            with mezzo.autocast(policy=word, device_type="cpu"):
                assert total() is expected


def test_op_lists_given_as_lists_tuples_and_sets_mean_the_same() -> None:
    for words in ({"add"}, ["add"], ("add",), frozenset({"add"})):
        with mezzo.autocast("cpu", dtype="bfloat16", half=words):
            assert total() is torch.bfloat16


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_every_level_is_entered_by_its_name(level: str) -> None:
    expected = torch.float32 if level == "O0" else torch.bfloat16
    with mezzo.autocast(level, device_type="cpu", dtype="bfloat16"):
        assert product() is expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"args": ("cqu",)}, "neither a device type"),
        ({"args": ("01",)}, "letter O, not a zero"),
        ({"args": ("cpu",), "device_type": "cpu"}, "given twice"),
        ({"args": ("O1",), "policy": "O2"}, "given twice"),
        ({"args": ("cpu",), "halff": {"add"}}, "halff"),
        ({"args": ("cpu",), "half": {"adds"}}, "Did you mean 'add'"),
        ({"args": ("cpu",), "half": {"add"}, "full": {"add"}}, "both"),
        ({"args": ("cpu",), "dtype": "float64"}, "float64"),
        ({"args": (3,)}, "got 3"),
    ],
    ids=str,
)
def test_words_that_make_no_sense_are_refused_when_the_region_is_made(
    words: dict[str, Any], message: str
) -> None:
    keywords = dict(words)
    with pytest.raises(mezzo.PolicyError, match=message):
        mezzo.autocast(*keywords.pop("args"), **keywords)


def test_an_unknown_device_is_refused_in_the_words_that_torch_has_for_it() -> None:
    with pytest.raises(RuntimeError, match="Invalid device string: 'cqu'"):
        mezzo.autocast(device_type="cqu")


def test_a_device_without_autocast_is_refused() -> None:
    with pytest.raises(mezzo.MezzoError, match="meta"):
        mezzo.autocast("meta")


@HALVES
@pytest.mark.parametrize("custom", [False, True])
def test_torch_tells_the_truth_inside(half: torch.dtype, custom: bool) -> None:
    words = {"half": {"add"}} if custom else {}
    with mezzo.autocast("cpu", dtype=half, **words):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is half
        with mezzo.autocast("cpu", enabled=False, **words):
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
def test_custom_fwd_with_cast_inputs_casts_and_switches_off(make: Any) -> None:
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
def test_a_disabled_region_inside_casts_nothing_whoever_opens_it(make: Any) -> None:
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


def test_a_torch_region_inside_a_custom_one_keeps_the_custom_entries_in_its_dtype() -> None:
    with mezzo.autocast("O1", **CUSTOM), torch.autocast("cpu", dtype=torch.float16):
        assert product() is torch.float16
        assert total() is torch.float16


def test_a_default_region_inside_a_custom_one_has_torchs_lists() -> None:
    with mezzo.autocast("O1", **CUSTOM):
        with mezzo.autocast("cpu", dtype=torch.bfloat16):
            assert total() is torch.float32
        assert total() is torch.bfloat16


def test_custom_regions_nest_and_the_innermost_speaks() -> None:
    with mezzo.autocast("O1", **CUSTOM):
        with mezzo.autocast("cpu", dtype="bfloat16", full={"mm"}):
            assert (total(), product()) == (torch.float32, torch.float32)
            with mezzo.autocast("cpu", dtype="float16", half={"add"}):
                assert (total(), product()) == (torch.float16, torch.float16)
            assert (total(), product()) == (torch.float32, torch.float32)
        assert (total(), product()) == (torch.bfloat16, torch.bfloat16)


def test_regions_of_different_device_types_do_not_disturb_each_other() -> None:
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
def test_an_exception_puts_everything_back(make: Any) -> None:
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
def test_an_exception_inside_a_steered_op_puts_everything_back(make: Any) -> None:
    with make():
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        with pytest.raises(RuntimeError):
            torch.ones(2) + torch.ones(3)
        assert torch.is_autocast_enabled("cpu")
        assert product() is torch.bfloat16


@KINDS
def test_one_instance_entered_twice_leaves_nothing_on(make: Any) -> None:
    region = make()
    with region:
        with region:
            assert product() is torch.bfloat16
        assert product() is torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert product() is torch.float32


@KINDS
def test_one_instance_is_entered_again_and_again(make: Any) -> None:
    region = make()
    for _ in range(3):
        with region:
            assert product() is torch.bfloat16
        assert product() is torch.float32


def test_recursion_through_one_instance_unwinds() -> None:
    region = mezzo.autocast("O1", **CUSTOM)

    def descend(depth: int) -> torch.dtype:
        with region:
            inner = descend(depth - 1) if depth else torch.bfloat16
            assert total() is inner
            return total()

    assert descend(5) is torch.bfloat16
    assert total() is torch.float32


@KINDS
def test_an_exception_in_the_inner_of_two_uses_of_one_instance_keeps_the_outer(make: Any) -> None:
    region = make()
    with region:
        with pytest.raises(ZeroDivisionError), region:
            raise ZeroDivisionError
        assert product() is torch.bfloat16
    assert product() is torch.float32


def test_a_region_instance_gives_itself() -> None:
    region = mezzo.autocast("cpu")
    with region as entered:
        assert entered is region


@pytest.mark.parametrize("words", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_a_region_is_copied_and_pickled(words: dict[str, Any]) -> None:
    region = mezzo.autocast("cpu", dtype="bfloat16", **words)
    for again in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        with again:
            assert product() is torch.bfloat16
            assert total() is (torch.bfloat16 if words else torch.float32)


def test_a_pickled_custom_region_works_in_a_process_that_has_not_met_its_policy(
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


def test_enable_inside_a_region_outlives_it_and_disable_leaves_nothing_on() -> None:
    with mezzo.autocast("cpu", dtype=torch.bfloat16):
        mezzo.enable_autocast("cpu", dtype=torch.float16)
    try:
        assert product() is torch.float16
    finally:
        mezzo.disable_autocast()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


@KINDS
def test_disable_inside_a_region_leaves_the_region_and_nothing_after_it(make: Any) -> None:
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


def test_enable_again_replaces_what_was_enabled() -> None:
    mezzo.enable_autocast("cpu", dtype="bfloat16", half={"add"})
    mezzo.enable_autocast("cpu", dtype="float16")
    try:
        assert total() is torch.float32
        assert product() is torch.float16
    finally:
        mezzo.disable_autocast()
    assert product() is torch.float32


def test_a_policy_that_makes_no_sense_leaves_what_was_enabled() -> None:
    mezzo.enable_autocast("cpu", dtype="bfloat16")
    try:
        with pytest.raises(mezzo.PolicyError):
            mezzo.enable_autocast("cpu", half={"no_such_op"})
        assert product() is torch.bfloat16
    finally:
        mezzo.disable_autocast()


def test_disable_where_nothing_is_on_does_nothing() -> None:
    mezzo.disable_autocast()
    mezzo.disable_autocast()
    assert product() is torch.float32


def test_enable_takes_module_rules_and_disable_undoes_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mezzo.enable_autocast("cpu", dtype="bfloat16", modules={"1": "full"}, model=model)
    try:
        assert model(torch.ones(1, 2)).dtype is torch.float32
    finally:
        mezzo.disable_autocast()
    assert "forward" not in model[1].__dict__


@pytest.mark.parametrize("cache_enabled", [None, True, False])
def test_code_written_for_torch_amp_sees_no_new_warning(cache_enabled: bool | None) -> None:
    words = {"dtype": torch.bfloat16, "enabled": True, "cache_enabled": cache_enabled}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with mezzo.autocast("cpu", **words):
            model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
            model(torch.ones(1, 2)).float().sum().backward()
        with mezzo.autocast("cpu", torch.float16, False), mezzo.autocast(device_type="cpu"):
            model(torch.ones(1, 2))
    assert not heard


def test_a_dtype_that_torch_warns_about_is_warned_about_and_switched_off() -> None:
    with pytest.warns(UserWarning, match="not supported"):
        torch.autocast("cpu", dtype=torch.float32)
    with pytest.warns(UserWarning, match="float32"):
        region = mezzo.autocast("cpu", dtype=torch.float32)
    with region:
        assert product() is torch.float32


def test_o0_is_a_region_that_is_switched_off() -> None:
    with mezzo.autocast("cpu", dtype=torch.bfloat16), mezzo.autocast("O0", device_type="cpu"):
        assert not torch.is_autocast_enabled("cpu")
        assert product() is torch.float32
