"""From the words of a call to a region: what torch's own lists carry out, and what needs steering."""

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


def settled(*first: Any, **words: Any) -> Any:
    defaults = {
        "first": None,
        "dtype": None,
        "enabled": True,
        "cache_enabled": None,
        "device_type": None,
        "policy": None,
        "overrides": (),
    }
    given = defaults | words | ({"first": first[0]} if first else {})
    return resolve_call(tuple(AutocastCall(**given)))


def test_torchs_own_policy_needs_no_steering() -> None:
    region, _ = settled("cpu", dtype=torch.bfloat16)
    assert region.key == ""


@pytest.mark.parametrize(
    "words",
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
        {"level": "O2"},
        {"level": "O3"},
        {"level": "OD"},
    ],
    ids=str,
)
def test_every_word_that_torchs_lists_do_not_know_is_steered(words: dict[str, Any]) -> None:
    assert not uses_torch_lists(Policy(**words), "cpu")
    assert region_for(Policy(dtype="bfloat16", **words), "cpu").key


@pytest.mark.parametrize(
    "words",
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
def test_words_that_speak_of_no_op_leave_the_work_to_torch(words: dict[str, Any]) -> None:
    assert uses_torch_lists(Policy(**words), "cpu")
    assert not region_for(Policy(dtype="bfloat16", **words), "cpu").key


def test_the_versioned_cache_is_to_be_had_for_torchs_own_policy() -> None:
    assert region_for(Policy(dtype="bfloat16", cache="versioned"), "cpu").key


@pytest.mark.parametrize(
    ("words", "expected"),
    [({"cache": "off"}, False), ({"cache": "torch"}, None), ({}, None)],
    ids=str,
)
def test_torchs_cache_is_off_only_where_that_is_said(
    words: dict[str, Any], expected: bool | None
) -> None:
    assert region_for(Policy(dtype="bfloat16", **words), "cpu").cache_enabled is expected


def test_cache_enabled_false_switches_every_cache_off() -> None:
    region = region_for(Policy(dtype="bfloat16", half={"add"}), "cpu", cache_enabled=False)
    assert region.cache_enabled is False
    assert "versioned" not in region.key


def test_the_same_words_give_the_same_region() -> None:
    first, _ = settled("cpu", overrides=(("half", frozenset({"add"})),))
    second, _ = settled("cpu", overrides=(("half", frozenset({"add"})),))
    assert first is second


def test_words_that_cannot_be_hashed_are_read_all_the_same() -> None:
    region, policy = settled("cpu", overrides=(("exempt_args", {"linear": ["bias"]}),))
    assert region.key
    assert policy.exempt_args == (("linear", ("bias",)),)


def test_a_type_error_that_is_not_about_hashing_is_raised() -> None:
    with pytest.raises((TypeError, mezzo.PolicyError)):
        settled("cpu", overrides=(("half", 3),))


def test_equal_policies_share_one_table_whatever_words_made_them() -> None:
    one = region_for(Policy("O1", "bfloat16", half={"add"}), "cpu")
    other = region_for(Policy("O1", torch.bfloat16, half=["__add__"]), "cpu")
    assert one == other


def test_another_dtype_or_cache_is_another_table() -> None:
    keys = {
        region_for(Policy("O1", dtype, half={"add"}, cache=cache), "cpu").key
        for dtype in ("bfloat16", "float16")
        for cache in ("versioned", "off")
    }
    assert len(keys) == 4


def test_a_device_that_lacks_the_dtype_runs_in_float32_and_says_so() -> None:
    with (
        _events.listen() as heard,
        (
            pytest.warns(UserWarning, match="cuda")
            if not torch.cuda.is_available()
            else pytest.warns(None)
        ),
    ):
        region = region_for(Policy("O1", "float16", half={"sub", "add", "mul"}), "cuda")
    assert not region.enabled
    assert [event.used for event in heard if isinstance(event, _events.PolicyDowngraded)] == [
        "float32"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_an_error_where_the_policy_says_so() -> None:
    with pytest.raises(mezzo.UnsupportedError):
        mezzo.autocast("cuda", dtype="float16", on_unsupported="error")


def test_a_region_for_export_is_carried_out_by_the_mode_alone() -> None:
    region = without_torch_autocast(region_for(Policy(dtype="bfloat16"), "cpu"))
    assert region.key
    assert region.dtype is torch.bfloat16


def test_a_region_for_export_takes_the_dtype_in_force() -> None:
    region, _ = settled("cpu")
    with mezzo.autocast("cpu", dtype=torch.float16):
        assert without_torch_autocast(region).dtype is torch.float16


def test_a_policy_that_leaves_every_op_alone_needs_no_region() -> None:
    # Apex casts the model at O2 and patches nothing: a region would only look at every op.
    plain = Policy("O2", "float16", preset="apex")
    assert not region_for(plain, "cpu").enabled
    assert region_for(Policy("O2", "float16", preset="apex", full={"softmax"}), "cpu").enabled
    assert region_for(Policy("O1", "float16", preset="apex"), "cpu").enabled
    assert region_for(Policy("O2", "float16"), "cpu").enabled
