"""One scale per loss, the record of an optimizer, and bound optimizers."""

from __future__ import annotations

import pytest
import torch

import mezzo
from mezzo import PolicyError, ScalerError, ScaleRule, ScaleState
from mezzo.scaling.diagnostics import CollapseMonitor
from mezzo.scaling.loss_scales import (
    LossScales,
    OptimizerRecord,
    binding_of,
    combine,
    common_device,
    first_states,
)
from mezzo.scaling.scale_state import OptimizerStage
from mezzo.scaling.step_result import NO_SOURCE

CPU = torch.device("cpu")


def new_scales(losses: int = 2) -> LossScales:
    rule = ScaleRule(growth_interval=1, min_scale=1.0)
    return LossScales(
        rule, first_states(rule, 8.0, losses), [CollapseMonitor() for _ in range(losses)]
    )


def test_a_scale_is_created_once():
    scales = new_scales()
    assert scales.make(CPU, 1) is scales.make(CPU, 1)
    assert scales.scales[0] is None
    with pytest.raises(ScalerError, match="loss_id=0 was not scaled yet"):
        scales.of(0)


def test_a_step_needs_at_least_one_scaled_loss():
    scales = new_scales()
    with pytest.raises(ScalerError, match=r"step\(\) was called before"):
        scales.require("step()")
    scales.make(CPU, 1)
    scales.require("step()")


def test_each_scale_adapts_to_the_flags_of_its_loss():
    scales = new_scales()
    for loss_id in (0, 1):
        scales.make(CPU, loss_id)
    scales.advance(0, [torch.tensor(0.0), torch.tensor(0.0)], NO_SOURCE)
    scales.advance(1, [torch.tensor(0.0), torch.tensor(1.0)], NO_SOURCE)
    assert [state.scale for state in scales.states()] == [16.0, 4.0]


def test_loading_sets_scales_that_exist_and_those_created_later():
    scales = new_scales()
    scales.make(CPU, 0)
    scales.load([ScaleState(2.0), ScaleState(4.0)], ScaleRule())
    scales.make(CPU, 1)
    assert [state.scale for state in scales.states()] == [2.0, 4.0]
    assert scales.rule == ScaleRule()


@pytest.mark.parametrize("losses", [0, -1, 1.5, True])
def test_the_number_of_losses_is_a_positive_integer(losses):
    with pytest.raises(PolicyError, match="num_losses="):
        first_states(ScaleRule(), 1.0, losses)


@pytest.mark.parametrize("scale", [0.0, 1e60, float("nan"), 1e-60])
def test_the_initial_scale_is_a_positive_finite_float32(scale: float):
    with pytest.raises(PolicyError, match="init_scale="):
        first_states(ScaleRule(), scale, 1)


def test_an_initial_scale_out_of_bounds_is_clamped():
    assert first_states(ScaleRule(min_scale=4.0), 1.0, 1)[0].scale == 4.0


# -- the record of an optimizer --------------------------------------------------------------------


def test_each_loss_has_its_own_flags():
    record = OptimizerRecord()
    record.flags(0)[CPU] = torch.tensor(0.0)
    record.flags(1)[CPU] = torch.tensor(1.0)
    assert record.flags(0)[CPU].item() == 0
    assert [flag.item() for flag in record.all_flags()] == [0.0, 1.0]
    assert record.stage is OptimizerStage.READY


def test_a_single_flag_is_returned_as_it_is():
    flag = torch.tensor(1.0)
    assert combine([flag], CPU) is flag


def test_combined_flags_are_1_if_any_flag_is_1():
    flags = [torch.tensor(0.0), torch.tensor([1.0]), torch.tensor(1.0)]
    assert combine(flags, CPU).item() == 1.0
    assert combine(flags[:1] * 2, CPU).item() == 0.0
    assert combine(flags, CPU).shape == ()


def test_flags_are_combined_on_the_first_device_that_is_not_a_cpu():
    on_meta = torch.tensor(0.0, device="meta")
    assert common_device([torch.tensor(0.0), on_meta]) == torch.device("meta")
    assert common_device([torch.tensor(0.0)]) == CPU


@pytest.mark.parametrize(
    ("known", "found_nonfinite"),
    [
        ([], None),
        ([False], False),
        ([False, True], True),
        ([False, None], None),
        ([None, False], None),
        ([True, None], None),
    ],
)
def test_the_outcome_is_known_on_the_host_only_if_that_of_every_check_is(known, found_nonfinite):
    assert OptimizerRecord(known=known).found_nonfinite is found_nonfinite


# -- bound optimizers ------------------------------------------------------------------------------


def test_an_optimizer_is_bound_while_its_model_is_decorated():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert binding_of(optimizer) is None
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    assert "lr" in binding_of(optimizer).device_values
    mezzo.undecorate(model)
    assert binding_of(optimizer) is None


def test_a_bound_step_without_a_kernel_reads_rates_on_the_host_and_does_not_check():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adafactor(model.parameters())
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    binding = binding_of(optimizer)
    assert not binding.device_values
    assert not binding.check(lambda: torch.ones(()), {}, None)
