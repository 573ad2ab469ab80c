"""Parameters that come in 16 bits, and groups that are added later: amp casts no model then, and keeps masters all the same."""

import pytest
import torch
from torch import nn

from mezzo.compat.apex import amp

X = torch.ones(2)


class Mixed(nn.Module):
    """Half of its weights are float16 from the start."""

    def __init__(self, start):
        super().__init__()
        self.wide = nn.Parameter(start + torch.arange(2.0))
        self.low = nn.Parameter((1.0 + start + torch.arange(2.0)).half())

    def forward(self, x):
        return (x * self.wide.float() * self.low.float()).sum()


def in_float32(accumulate):
    one, two = Mixed(1.0).float(), Mixed(2.0).float()
    optimizer = torch.optim.SGD([{"params": one.parameters(), "lr": 0.25}], lr=0.25, momentum=0.125)
    one(X).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": two.parameters(), "lr": 0.5})
    for _ in range(2):
        for _ in range(1 + accumulate):
            (one(X) + two(X)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*one.parameters(), *two.parameters()]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("zero", ["optimizer", "model", "none"])
def test_a_group_is_added_while_amp_casts_no_model(level, accumulate, zero):
    one, two = Mixed(1.0), Mixed(2.0)
    optimizer = torch.optim.SGD([{"params": one.parameters(), "lr": 0.25}], lr=0.25, momentum=0.125)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    [one, two], optimizer = amp.initialize(
        [one, two],
        optimizer,
        opt_level=level,
        verbosity=0,
        cast_model_type=False,
        loss_scale="dynamic",
    )
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0

    def clear():
        for parameter in (*one.parameters(), *two.parameters()):
            if zero == "none":
                parameter.grad = None
        if zero == "model":
            one.zero_grad()
            two.zero_grad()
        elif zero == "optimizer":
            optimizer.zero_grad()

    def backward(loss):
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    backward(one(X))
    optimizer.step()
    clear()
    optimizer.add_param_group({"params": two.parameters(), "lr": 0.5})
    for _ in range(2):
        for _ in range(1 + accumulate):
            backward(one(X) + two(X))
        optimizer.step()
        clear()
    for found, expected in zip(
        (*one.parameters(), *two.parameters()), in_float32(accumulate), strict=True
    ):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-3, atol=2e-3)
