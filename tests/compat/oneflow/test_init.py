import torch

import mezzo.compat.oneflow as flow
from mezzo.compat.oneflow import nn
from mezzo.compat.oneflow.nn import functional


def test_every_other_name_is_torchs():
    assert (flow.randn, flow.optim.SGD, flow.int64, nn.Linear, functional.relu) == (
        torch.randn,
        torch.optim.SGD,
        torch.int64,
        torch.nn.Linear,
        torch.nn.functional.relu,
    )


def test_the_dialects_own_names_go_before_torchs():
    assert flow.nn is nn
    assert flow.autocast is flow.amp.autocast is not torch.autocast
    assert nn.functional is functional
