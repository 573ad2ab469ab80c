"""`oneflow.amp`: autocast regions and loss scalers."""

import pytest
import torch
from torch.nn import functional as F

import mezzo.compat.oneflow as flow
from mezzo.compat.oneflow import amp


def test_listed_ops_are_16_bit_and_all_others_float32():
    with flow.autocast("cpu", dtype=torch.float16):
        half = torch.ones(2, 2) @ torch.ones(2, 2)
        assert half.dtype is torch.float16
        assert F.gelu(half).dtype is torch.float16
        assert F.gelu(torch.ones(2)).dtype is torch.float32
        assert torch.exp(half).dtype is torch.float32
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_norm_parameters_keep_their_dtype():
    norm = torch.nn.BatchNorm1d(2)
    with flow.autocast("cpu"):
        assert norm(torch.ones(4, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    assert norm.running_mean.dtype is torch.float32


def test_a_disabled_region_can_decorate():
    @flow.autocast(device_type="cpu", enabled=False)
    def product():
        return torch.ones(2, 2) @ torch.ones(2, 2)

    with flow.amp.autocast("cpu"):
        assert product().dtype is torch.float32


def test_another_device_raises_as_in_oneflow():
    with pytest.raises(
        RuntimeError, match="User specified autocast device_type must be 'cuda' or 'cpu', got 'xpu'"
    ):
        flow.autocast("xpu")


def test_defaults_are_those_of_oneflow_with_a_scale_of_at_least_one():
    scaler = amp.GradScaler().make_scaler()
    rule = scaler._scales.rule
    assert (
        scaler.get_scale(),
        rule.growth_factor,
        rule.backoff_factor,
        rule.growth_interval,
        rule.min_scale,
    ) == (65536.0, 2.0, 0.5, 2000, 1.0)


def test_a_backoff_other_than_one_over_growth_raises_as_in_oneflow():
    with pytest.raises(
        ValueError,
        match=(
            r"Only support 1.0/growth_factor as backoff_factor at the moment, got 0.25: it must"
            r" be 0.5"
        ),
    ):
        amp.GradScaler(backoff_factor=0.25)
    amp.GradScaler(growth_factor=4.0, backoff_factor=0.25)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_static_scale_must_be_positive(scale):
    with pytest.raises(ValueError, match=r"scale_factor must be a number > 0.0, got"):
        amp.StaticGradScaler(scale)


def test_invalid_scaler_arguments_are_rejected():
    with pytest.raises(ValueError, match="growth_interval"):
        amp.GradScaler(growth_interval=-1)
    with pytest.raises(ValueError, match="init_scale"):
        amp.GradScaler(init_scale=0.0)
