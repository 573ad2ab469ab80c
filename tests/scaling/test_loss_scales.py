"""The scales of a scaler: made where their loss is, advanced and loaded together."""

from __future__ import annotations

import pytest
import torch

from mezzo import PolicyError, ScalerError, ScaleRule, ScaleState
from mezzo.scaling.diagnostics import CollapseMonitor
from mezzo.scaling.loss_scales import LossScales, first_states
from mezzo.scaling.step_result import NO_SOURCE

CPU = torch.device("cpu")


def scales(losses: int = 2) -> LossScales:
    rule = ScaleRule(growth_interval=1, min_scale=1.0)
    return LossScales(
        rule, first_states(rule, 8.0, losses), [CollapseMonitor() for _ in range(losses)]
    )


def test_a_scale_is_made_once():
    made = scales()
    assert made.make(CPU, 1) is made.make(CPU, 1)
    assert made.made[0] is None
    with pytest.raises(ScalerError, match="loss_id=0 was not scaled yet"):
        made.of(0)


def test_any_scaled_loss_will_do_to_go_on():
    made = scales()
    with pytest.raises(ScalerError, match=r"step\(\) was called before"):
        made.require("step()")
    made.make(CPU, 1)
    made.require("step()")


def test_each_scale_advances_by_its_own_flags():
    made = scales()
    for index in (0, 1):
        made.make(CPU, index)
    made.advance(0, [torch.tensor(0.0), torch.tensor(0.0)], NO_SOURCE)
    made.advance(1, [torch.tensor(0.0), torch.tensor(1.0)], NO_SOURCE)
    assert [state.scale for state in made.states()] == [16.0, 4.0]


def test_loading_reaches_scales_that_are_made_and_those_that_will_be():
    made = scales()
    made.make(CPU, 0)
    made.load([ScaleState(2.0), ScaleState(4.0)], ScaleRule())
    made.make(CPU, 1)
    assert [state.scale for state in made.states()] == [2.0, 4.0]
    assert made.rule == ScaleRule()


@pytest.mark.parametrize("losses", [0, -1, 1.5, True])
def test_a_number_of_losses_is_a_positive_whole_number(losses):
    with pytest.raises(PolicyError, match="losses="):
        first_states(ScaleRule(), 1.0, losses)


@pytest.mark.parametrize("scale", [0.0, 1e60, float("nan"), 1e-60])
def test_an_initial_scale_is_a_positive_finite_float32(scale: float):
    with pytest.raises(PolicyError, match="init_scale="):
        first_states(ScaleRule(), scale, 1)


def test_an_initial_scale_out_of_bounds_is_brought_within_them():
    assert first_states(ScaleRule(min_scale=4.0), 1.0, 1)[0].scale == 4.0
