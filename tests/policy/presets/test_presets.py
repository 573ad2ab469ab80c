"""All presets: names, levels, translations and reasons."""

from __future__ import annotations

import itertools

import pytest
import torch

from mezzo import PolicyError
from mezzo.policy import presets
from mezzo.policy.presets import NAMES, PRESETS, preset_lists, torch_amp
from mezzo.policy.registry import registry
from mezzo.policy.types import Level, Rule


def test_every_system_is_a_preset_and_torch_has_three():
    assert ("torch", "torch-cuda", "torch-cpu", *PRESETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_parsed_from_its_name(name):
    assert presets.parse_preset(name) == name


@pytest.mark.parametrize("value", ["padle", "", None, 3, ["torch"], "Torch"])
def test_an_unknown_preset_raises_with_the_known_ones(value):
    with pytest.raises(
        PolicyError,
        match=(
            r"^Unknown preset .*\. Choose one of: torch, torch-cuda, torch-cpu, paddle, oneflow,"
            r" megengine, mxnet, apex\."
        ),
    ):
        presets.parse_preset(value)


@pytest.mark.parametrize(
    ("preset", "level"), [(preset, level) for preset in PRESETS for level in Level]
)
def test_a_level_is_allowed_only_where_the_system_has_it_and_o0_always(preset, level):
    if level is Level.O0 or level in PRESETS[preset].LEVELS:
        presets.check_preset(preset, level)
    else:
        with pytest.raises(
            PolicyError,
            match=rf"^The preset '{preset}' has no level {level.value}\. Choose one of: ",
        ):
            presets.check_preset(preset, level)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_torch_preset_follows_the_device_and_its_variants_do_not(device):
    assert preset_lists("torch", Level.O1, torch.float16, device) == torch_amp.level_lists(
        Level.O1, device
    )
    assert (
        preset_lists("torch-cuda", Level.O1, torch.float16, device).entries["softmax"].rule
        is Rule.FULL
    )
    assert "softmax" not in preset_lists("torch-cpu", Level.O1, torch.float16, device).entries


@pytest.mark.parametrize("preset", NAMES)
def test_no_preset_casts_anything_at_o0(preset):
    lists = preset_lists(preset, Level.O0, torch.float16, "cpu")
    assert (lists.entries, lists.default_rule.rule) == ({}, Rule.KEEP)


HALVES = (torch.float16, torch.bfloat16)
EVERY_LIST = [
    (system, level, dtype)
    for system, preset in PRESETS.items()
    for level in preset.LEVELS
    for dtype in HALVES
]


@pytest.mark.parametrize("system", PRESETS)
def test_every_translated_name_is_an_op_here(system):
    named = set(itertools.chain.from_iterable(PRESETS[system].NAMES.known.values()))
    assert named - registry().names == set()


@pytest.mark.parametrize("system", PRESETS)
def test_a_name_is_either_translated_or_listed_without_a_counterpart(system):
    names = PRESETS[system].NAMES
    assert names.known.keys() & names.unknown.keys() == set()
    assert all(names.known.values())
    assert all(names.unknown.values())


@pytest.mark.parametrize(("system", "level", "dtype"), EVERY_LIST)
def test_every_entry_exemption_and_condition_names_an_op_and_has_a_reason(system, level, dtype):
    lists = PRESETS[system].lists(level, dtype)
    named = (
        lists.entries.keys()
        | lists.exempt_args.keys()
        | {condition.op for condition in lists.conditional}
    )
    assert named - registry().names == set()
    assert all(
        entry.reason for entry in (*lists.entries.values(), lists.default_rule, *lists.conditional)
    )


@pytest.mark.parametrize("system", PRESETS)
def test_lists_are_cached(system):
    preset = PRESETS[system]
    assert preset.lists(preset.LEVELS[0], torch.float16) is preset.lists(
        preset.LEVELS[0], torch.float16
    )


@pytest.mark.parametrize("system", PRESETS)
def test_an_unknown_level_raises_with_the_levels_of_the_system(system):
    missing = next(level for level in Level if level not in PRESETS[system].LEVELS)
    with pytest.raises(
        PolicyError,
        match=(
            rf"{system}.* has no level {missing.value}\. Choose one of:"
            rf" {PRESETS[system].LEVELS[0].value}"
        ),
    ):
        PRESETS[system].lists(missing, torch.float16)


@pytest.mark.parametrize(
    ("system", "op", "rule"),
    [
        ("paddle", "matmul", Rule.HALF),
        ("oneflow", "matmul", Rule.HALF),
        ("megengine", "matmul", Rule.HALF),
        ("mxnet", "matmul", Rule.HALF),
        ("apex", "matmul", Rule.HALF),
        ("paddle", "softmax", Rule.FULL),
        ("oneflow", "softmax", Rule.PROMOTE),
        ("megengine", "softmax", Rule.KEEP),
        ("mxnet", "softmax", Rule.FULL),
        ("apex", "softmax", Rule.FULL),
        ("paddle", "abs", Rule.PROMOTE),
        ("oneflow", "abs", Rule.FULL),
        ("megengine", "abs", Rule.KEEP),
        ("mxnet", "abs", Rule.KEEP),
        ("apex", "abs", Rule.KEEP),
    ],
)
def test_the_systems_differ_as_documented(system, op, rule):
    lists = PRESETS[system].lists(Level.O1, torch.float16)
    assert lists.entries.get(op, lists.default_rule).rule is rule
