"""Programs on tensors that have values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mezzo.compat.paddle import static
from mezzo.compat.paddle.static._executor import evaluating, replay


class Reshapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x):
        x = x.view(x.shape[0], -1)
        return self.linear(torch.cat([x, x[:, :0]], dim=1)).transpose(0, 1)


class InPlace(nn.Module):
    def forward(self, x):
        y = x + 1
        y[:, 0] = 7.0
        y.mul_(2)
        return y


MODELS = {
    "linear": (nn.Linear(4, 2), (3, 4)),
    "convolution": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4).eval(),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        ),
        (2, 3, 8, 8),
    ),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "recurrent": (nn.LSTM(4, 4, batch_first=True), (2, 5, 4)),
    "reshapes": (Reshapes(), (5, 2, 3)),
    "in place": (InPlace(), (2, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_program_computes_what_the_model_computes(name, program):
    model, shape = MODELS[name]
    given = torch.randn(shape)
    x = static.data("x", list(shape))
    out = model(x)
    out = out[0] if isinstance(out, tuple) else out
    expected = model(given)
    expected = expected[0] if isinstance(expected, tuple) else expected
    (value,) = replay(program.needed_for([out]), {x: given}, [out])
    assert torch.equal(value, expected)


def test_a_size_that_is_not_known_is_that_of_the_feed(program):
    x, y = static.data("x", [-1, 2, 3]), static.data("y", [-1, -1, 2])
    out, flat = Reshapes()(x), y.reshape(y.shape[0] * y.shape[1], 2)
    for batch in (1, 7):
        values = replay(
            program.nodes, {x: torch.ones(batch, 2, 3), y: torch.ones(batch, 5, 2)}, [out, flat]
        )
        assert [value.shape for value in values] == [(2, batch), (5 * batch, 2)]


def test_dropout_and_batch_norm_evaluate_where_they_are_told_to(program):
    norm = nn.BatchNorm1d(2)
    x = static.data("x", [4, 2])
    out = F.dropout(norm(x), 0.5)
    given = torch.randn(4, 2)
    (value,) = replay(program.nodes, {x: given}, [out], evaluating)
    assert torch.equal(value, norm.eval()(given))
