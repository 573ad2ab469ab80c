"""Presets by name."""

import pytest
import torch

from mezzo import PolicyError
from mezzo.policy import presets
from mezzo.policy.presets import NAMES, PRESETS, preset_lists, torch_amp
from mezzo.policy.types import Level, Rule


def test_every_system_is_a_preset_and_torch_is_three():
    assert ("torch", "torch-cuda", "torch-cpu", *PRESETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_read_from_its_name(name):
    assert presets.parse_preset(name) == name


@pytest.mark.parametrize("word", ["padle", "", None, 3, ["torch"], "Torch"])
def test_an_unknown_preset_is_refused_with_those_that_are_known(word):
    with pytest.raises(
        PolicyError,
        match=(
            r"^Unknown preset .*\. Choose one of: torch, torch-cuda, torch-cpu, paddle, oneflow,"
            r" megengine, mxnet, apex\."
        ),
    ):
        presets.parse_preset(word)


@pytest.mark.parametrize(
    ("preset", "level"), [(preset, level) for preset in PRESETS for level in Level]
)
def test_a_level_is_allowed_just_where_the_system_has_it_and_o0_everywhere(preset, level):
    if level is Level.O0 or level in PRESETS[preset].LEVELS:
        presets.check_preset(preset, level)
    else:
        with pytest.raises(
            PolicyError,
            match=rf"^The preset '{preset}' has no level {level.value}\. Choose one of: ",
        ):
            presets.check_preset(preset, level)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_follows_the_device_and_its_namesakes_do_not(device):
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
