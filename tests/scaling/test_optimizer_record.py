"""Flags of an optimizer: kept by loss and device, combined into one."""

from __future__ import annotations

import pytest
import torch

from mezzo.scaling.loss_scales import OptimizerRecord, combine, common_device
from mezzo.scaling.scale_state import OptimizerStage

CPU = torch.device("cpu")


def test_flags_are_kept_for_each_loss():
    record = OptimizerRecord()
    record.flags(0)[CPU] = torch.tensor(0.0)
    record.flags(1)[CPU] = torch.tensor(1.0)
    assert record.flags(0)[CPU].item() == 0
    assert [flag.item() for flag in record.all_flags()] == [0.0, 1.0]
    assert record.stage is OptimizerStage.READY


def test_a_single_flag_is_itself():
    flag = torch.tensor(1.0)
    assert combine([flag], CPU) is flag


def test_combined_flags_are_raised_if_one_is_and_stay_one():
    flags = [torch.tensor(0.0), torch.tensor([1.0]), torch.tensor(1.0)]
    assert combine(flags, CPU).item() == 1.0
    assert combine(flags[:1] * 2, CPU).item() == 0.0
    assert combine(flags, CPU).shape == ()


def test_flags_meet_off_the_cpu_where_one_is():
    assert common_device([torch.tensor(0.0), torch.tensor(0.0, device="meta")]) == torch.device(
        "meta"
    )
    assert common_device([torch.tensor(0.0)]) == CPU


@pytest.mark.parametrize(
    ("told", "bad"),
    [
        ([], None),
        ([False], False),
        ([False, True], True),
        ([False, None], None),
        ([None, False], None),
        ([True, None], None),
    ],
)
def test_the_host_knows_only_if_every_check_told_it(told: list[bool | None], bad: bool | None):
    assert OptimizerRecord(known=told).found_nonfinite is bad
