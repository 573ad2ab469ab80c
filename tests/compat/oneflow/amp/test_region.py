import pytest
import torch
from torch.nn import functional as F

import mezzo.compat.oneflow as flow


def test_listed_ops_are_16_bit_followers_follow_and_the_rest_is_float32():
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


def test_a_region_can_be_off_and_decorate():
    @flow.autocast(device_type="cpu", enabled=False)
    def product():
        return torch.ones(2, 2) @ torch.ones(2, 2)

    with flow.amp.autocast("cpu"):
        assert product().dtype is torch.float32


def test_another_device_is_refused_as_there():
    with pytest.raises(
        RuntimeError, match="User specified autocast device_type must be 'cuda' or 'cpu', got 'xpu'"
    ):
        flow.autocast("xpu")
