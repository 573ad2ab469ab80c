"""Resolve the arguments of `autocast` to a region: with torch's lists, or with a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mezzo
from mezzo import _events
from mezzo.autocasting.arguments import (
    AutocastCall,
    region_for,
    resolve_call,
    uses_torch_lists,
    without_torch_autocast,
)
from mezzo.policy.policy import Policy


def resolved(*first: Any, **fields: Any) -> Any:
    defaults = {
        "first": None,
        "dtype": None,
        "enabled": True,
        "cache_enabled": None,
        "device_type": None,
        "policy": None,
        "overrides": (),
    }
    given = defaults | fields | ({"first": first[0]} if first else {})
    return resolve_call(tuple(AutocastCall(**given)))


def test_a_policy_with_torchs_lists_needs_no_table() -> None:
    region, _ = resolved("cpu", dtype=torch.bfloat16)
    assert region.table_key == ""
    # Without a function mode, which costs host time at every op.
    for device in ("cpu", "cuda"):
        assert uses_torch_lists(Policy("O2", "bfloat16"), device)


@pytest.mark.parametrize(
    "fields",
    [
        {"half": {"add"}},
        {"full": {"linear"}},
        {"promote": {"add"}},
        {"keep": {"linear"}},
        {"refuse": {"exp"}},
        {"default_rule": "full"},
        {"exempt_args": {"linear": ["bias"]}},
        {"conditional": [("softmax", "dim", [-1])]},
        {"preset": "torch-cuda"},
        {"level": "O3"},
        {"level": "OD"},
    ],
    ids=str,
)
def test_every_field_that_changes_an_op_needs_a_table(fields: dict[str, Any]) -> None:
    assert not uses_torch_lists(Policy(**fields), "cpu")
    assert region_for(Policy(dtype="bfloat16", **fields), "cpu").table_key


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"preset": "torch-cpu"},
        {"master": "float32"},
        {"keep_full": ()},
        {"cache": "torch"},
        {"cache": "off"},
        {"modules": {"a": "full"}},
    ],
    ids=str,
)
def test_fields_that_change_no_op_need_no_table(fields: dict[str, Any]) -> None:
    assert uses_torch_lists(Policy(**fields), "cpu")
    assert not region_for(Policy(dtype="bfloat16", **fields), "cpu").table_key


def test_the_versioned_cache_works_with_torchs_lists() -> None:
    assert region_for(Policy(dtype="bfloat16", cache="versioned"), "cpu").table_key


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"cache": "off"}, False), ({"cache": "torch"}, None), ({}, None)],
    ids=str,
)
def test_torchs_cache_is_off_only_if_requested(
    fields: dict[str, Any], expected: bool | None
) -> None:
    assert region_for(Policy(dtype="bfloat16", **fields), "cpu").cache_enabled is expected


def test_cache_enabled_false_disables_every_cache() -> None:
    region = region_for(Policy(dtype="bfloat16", half={"add"}), "cpu", cache_enabled=False)
    assert region.cache_enabled is False
    assert "versioned" not in region.table_key


def test_equal_arguments_return_the_same_region() -> None:
    first, _ = resolved("cpu", overrides=(("half", frozenset({"add"})),))
    second, _ = resolved("cpu", overrides=(("half", frozenset({"add"})),))
    assert first is second


def test_unhashable_arguments_are_accepted() -> None:
    region, policy = resolved("cpu", overrides=(("exempt_args", {"linear": ["bias"]}),))
    assert region.table_key
    assert policy.exempt_args == (("linear", ("bias",)),)


def test_a_type_error_that_is_not_about_hashing_is_raised() -> None:
    with pytest.raises((TypeError, mezzo.PolicyError)):
        resolved("cpu", overrides=(("half", 3),))


def test_equal_policies_share_one_table() -> None:
    one = region_for(Policy("O1", "bfloat16", half={"add"}), "cpu")
    other = region_for(Policy("O1", torch.bfloat16, half=["__add__"]), "cpu")
    assert one == other


def test_another_dtype_or_cache_is_another_table() -> None:
    keys = {
        region_for(Policy("O1", dtype, half={"add"}, cache=cache), "cpu").table_key
        for dtype in ("bfloat16", "float16")
        for cache in ("versioned", "off")
    }
    assert len(keys) == 4


def test_a_device_without_the_dtype_runs_in_float32_and_warns() -> None:
    with (
        _events.listen() as events,
        (
            pytest.warns(UserWarning, match="cuda")
            if not torch.cuda.is_available()
            else pytest.warns(None)
        ),
    ):
        region = region_for(Policy("O1", "float16", half={"sub", "add", "mul"}), "cuda")
    assert not region.enabled
    assert [event.used for event in events if isinstance(event, _events.PolicyDowngraded)] == [
        "float32"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_absent_device_raises_if_on_unsupported_is_error() -> None:
    with pytest.raises(mezzo.UnsupportedError):
        mezzo.autocast("cuda", dtype="float16", on_unsupported="error")


def test_a_region_for_export_leaves_nothing_to_torch() -> None:
    region = without_torch_autocast(region_for(Policy(dtype="bfloat16"), "cpu"))
    assert region.table_key
    assert region.dtype is torch.bfloat16


def test_a_region_for_export_has_the_current_dtype() -> None:
    region, _ = resolved("cpu")
    with mezzo.autocast("cpu", dtype=torch.float16):
        assert without_torch_autocast(region).dtype is torch.float16


def test_a_policy_that_casts_nothing_is_a_disabled_region() -> None:
    # Apex casts the model at O2 and patches nothing.
    plain = Policy("O2", "float16", preset="apex")
    assert not region_for(plain, "cpu").enabled
    assert region_for(Policy("O2", "float16", preset="apex", full={"softmax"}), "cpu").enabled
    assert region_for(Policy("O1", "float16", preset="apex"), "cpu").enabled
    assert region_for(Policy("O2", "float16"), "cpu").enabled


@pytest.mark.parametrize("rules", [{}, {"full": {"mm"}}, {"policy": "O1"}], ids=str)
def test_a_device_without_autocast_is_refused_with_and_without_a_policy(rules):
    with pytest.raises(mezzo.UnsupportedError, match="no autocast for device type 'meta'"):
        mezzo.autocast("meta", dtype=torch.float16, **rules)
