"""State dicts of mezzo's scaler and of torch's, and invalid ones."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch

import mezzo
import mezzo.compat.torch
from mezzo import PolicyError, ScalerError, ScaleRule, ScaleState
from mezzo.scaling.scale_state import scaler_from_dict, scaler_to_dict

RULE = ScaleRule(3.0, 0.25, 7, 2, False, 0.5, 2.0**20, False, 9)
STATES = [ScaleState(8.0, 1, 2, 3, 4, 5), ScaleState(16.0, 6, 7, 8, 9, 10)]
TORCH = {
    "scale": 8.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "_growth_tracker": 4,
}


def test_every_field_is_the_same_after_a_round_trip():
    assert scaler_from_dict(scaler_to_dict(STATES, RULE), ScaleRule(), 2) == (STATES, RULE)


def test_a_saved_state_dict_loads_with_weights_only():
    file = io.BytesIO()
    torch.save(scaler_to_dict(STATES, RULE), file)
    file.seek(0)
    assert scaler_from_dict(torch.load(file, weights_only=True), ScaleRule(), 2) == (STATES, RULE)


def test_torchs_entries_come_first_and_are_loaded_without_mezzos():
    assert list(scaler_to_dict(STATES, RULE))[:5] == list(TORCH)
    states, rule = scaler_from_dict(TORCH, ScaleRule(backoff_interval=4), 2)
    assert states == [ScaleState(8.0, 4)] * 2
    assert (
        rule.growth_factor,
        rule.backoff_factor,
        rule.growth_interval,
        rule.backoff_interval,
    ) == (3.0, 0.25, 7, 4)


def test_edited_entries_of_torch_take_precedence_over_mezzos():
    edited = {
        "scale": 1024.0,
        "growth_factor": 5.0,
        "backoff_factor": 0.125,
        "growth_interval": 11,
        "_growth_tracker": 6,
    }
    states, rule = scaler_from_dict(scaler_to_dict(STATES, RULE) | edited, ScaleRule(), 2)
    assert rule == replace(RULE, growth_factor=5.0, backoff_factor=0.125, growth_interval=11)
    # The public scale is that of the first loss.
    assert states == [replace(STATES[0], scale=1024.0, growth_tracker=6), STATES[1]]


@pytest.mark.parametrize("kind", [mezzo.GradScaler, mezzo.compat.torch.GradScaler])
def test_a_scaler_continues_from_an_edited_state_dict(kind):
    state = mezzo.GradScaler("cpu", init_scale=8.0).state_dict()
    state["scale"], state["growth_interval"] = 1024.0, 1
    scaler = kind("cpu", init_scale=2.0)
    scaler.load_state_dict(state)
    assert scaler.scale(torch.ones(())).item() == 1024.0
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2048.0


def test_a_saved_scale_out_of_bounds_is_clamped():
    assert scaler_from_dict(TORCH | {"scale": 2.0**-80}, ScaleRule(), 1)[0][0].scale == 2.0**-24
    rule = ScaleRule(max_scale=2.0**24)
    assert scaler_from_dict(TORCH | {"scale": 2.0**30}, rule, 1)[0][0].scale == 2.0**24


def test_entries_of_a_later_version_are_ignored():
    entries = scaler_to_dict(STATES[:1], RULE)
    entries["mezzo_rule"]["new"] = entries["mezzo_states"][0]["new"] = 1
    assert scaler_from_dict(entries, ScaleRule(), 1) == (STATES[:1], RULE)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_saved_scale_that_is_not_positive_and_finite_raises(scale: float):
    second = scaler_to_dict(STATES, RULE)
    second["mezzo_states"][1]["scale"] = scale
    for broken, losses in (
        (TORCH | {"scale": scale}, 1),
        (scaler_to_dict(STATES[:1], RULE) | {"scale": scale}, 1),
        (second, 2),
    ):
        with pytest.raises(ScalerError, match="Start again"):
            scaler_from_dict(broken, ScaleRule(), losses)


def test_other_dictionaries_raise_with_the_reason():
    with pytest.raises(ScalerError, match="not enabled"):
        scaler_from_dict({}, ScaleRule(), 1)
    with pytest.raises(ScalerError, match="growth_factor, backoff_factor"):
        scaler_from_dict({"scale": 1.0}, ScaleRule(), 1)
    with pytest.raises(ScalerError, match=r"2 losses, this scaler 1.*num_losses=2"):
        scaler_from_dict(scaler_to_dict(STATES, RULE), ScaleRule(), 1)
    with pytest.raises(PolicyError, match="growth_factor"):
        scaler_from_dict(TORCH | {"growth_factor": 0.5}, ScaleRule(), 1)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "is not a dictionary"),
        (TORCH | {"scale": "large"}, "scale is 'large', and must be a number"),
        (TORCH | {"scale": None}, "scale is None"),
        (TORCH | {"growth_interval": 2.5}, "growth_interval is 2.5, and must be a whole number"),
        (TORCH | {"growth_factor": [2.0]}, "growth_factor"),
        (TORCH | {"_growth_tracker": -1}, "growth_tracker is -1"),
        (TORCH | {"_growth_tracker": "few"}, "growth_tracker is 'few'"),
        (TORCH | {"mezzo_rule": 3}, "ScaleRule is 3, not a dictionary"),
        (TORCH | {"mezzo_rule": {"dynamic": "yes"}}, "dynamic is 'yes', and must be True or False"),
        (TORCH | {"mezzo_states": [3]}, "not a list of dictionaries"),
        (TORCH | {"mezzo_states": {"scale": 1.0}}, "not a list of dictionaries"),
        (
            TORCH | {"mezzo_states": [{"scale": 8.0, "skipped_steps": None}]},
            "skipped_steps is None",
        ),
    ],
)
def test_entries_of_other_types_raise_and_change_nothing(entries, message):
    scaler = mezzo.GradScaler("cpu", init_scale=4.0)
    before = scaler.state_dict()
    with pytest.raises(ScalerError, match=message):
        scaler.load_state_dict(entries)
    assert scaler.state_dict() == before


def test_entries_may_be_tensors_of_one_element():
    assert scaler_from_dict(
        TORCH | {"scale": torch.tensor(16.0), "_growth_tracker": torch.tensor(2)}, ScaleRule(), 1
    )[0] == [ScaleState(16.0, 2)]
