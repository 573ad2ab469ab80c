"""Batches in classes of the user's own."""

import copy

import torch
from torch import nn

from mezzo.compat.apex import amp


class Batch:
    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, dtype):
        return Batch(self.tensor.to(dtype))


class Net(nn.Linear):
    def forward(self, batch, extra=None):
        assert batch[0].tensor.dtype is torch.float16
        return Batch(super().forward(batch[0].tensor)), extra


def test_a_batch_is_cast_by_its_own_method_on_the_way_in_and_out():
    model = Net(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    batch, extra = model(
        [Batch(torch.ones(1, 2))], extra={"name": "text", "mask": torch.ones(2, dtype=torch.long)}
    )
    assert batch.tensor.dtype is torch.float32
    assert (extra["name"], extra["mask"].dtype) == ("text", torch.long)


def test_it_is_no_longer_cast_once_the_model_is_released():
    model = nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert model._forward_pre_hooks
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_model_that_casts_batches_is_copied_with_that():
    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level="O3", verbosity=0)
    again = copy.deepcopy(model)
    assert again(torch.ones(1, 2)).dtype is torch.float32
    assert all(value.dtype is torch.float32 for value in again.state_dict().values())
