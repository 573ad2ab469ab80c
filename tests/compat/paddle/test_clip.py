"""Gradient clipping as Paddle's optimizers do it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle.nn import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    ClipGradByValue,
    clip_of,
    norm_for_all,
)

CLIPS = [
    ClipGradByGlobalNorm(0.5),
    ClipGradByNorm(0.5),
    ClipGradByValue(0.01),
    ClipGradByValue(0.02, min=-0.01),
]


def weights():
    pair = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    pair[0].grad, pair[1].grad = torch.tensor([3.0, -4.0]), torch.tensor([0.0, 0.3])
    return pair


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        (ClipGradByGlobalNorm(0.5), [[0.29945, -0.39927], [0.0, 0.029946]]),
        (ClipGradByNorm(0.5), [[0.3, -0.4], [0.0, 0.3]]),
        (ClipGradByValue(1.0), [[1.0, -1.0], [0.0, 0.3]]),
        (ClipGradByValue(max=1.0, min=-2.0), [[1.0, -2.0], [0.0, 0.3]]),
    ],
    ids=["global norm", "norm", "value", "two values"],
)
def test_gradients_are_clipped(clip, expected):
    pair = weights()
    clip(pair)
    assert [one.grad.tolist() for one in pair] == [pytest.approx(one, rel=1e-4) for one in expected]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("clip", CLIPS, ids=["global norm", "norm", "value", "two values"])
def test_a_scaled_step_clips_unscaled_gradients(clip, level):
    torch.manual_seed(0)
    model, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    optimizer = paddle.optimizer.SGD(
        learning_rate=1.0, parameters=model.parameters(), grad_clip=clip
    )
    paddle.amp.decorate(model, optimizer, level=level)
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)
    with paddle.amp.auto_cast(level=level):
        loss = model(torch.ones(2, 4)).square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    plain(torch.ones(2, 4)).square().sum().backward()
    clip(list(plain.parameters()))
    assert torch.allclose(model.weight.float(), plain.weight - plain.weight.grad, atol=1e-3)
    assert not torch.allclose(model.weight.float(), plain.weight, atol=2e-3)


def test_a_bound_step_clips_to_a_global_norm_by_itself():
    model = nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(
        learning_rate=1.0, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(1.0)
    )
    assert clip_of(optimizer) == ClipGradByGlobalNorm(1.0)
    paddle.amp.decorate(model, optimizer, level="O2")
    assert clip_of(optimizer) is None


def test_one_norm_for_several_optimizers_only_where_they_agree():
    def optimizer(clip):
        return paddle.optimizer.SGD(
            learning_rate=1.0, parameters=[nn.Parameter(torch.ones(1))], grad_clip=clip
        )

    assert (
        norm_for_all([optimizer(ClipGradByGlobalNorm(2.0)), optimizer(ClipGradByGlobalNorm(2.0))])
        == 2.0
    )
    assert norm_for_all([optimizer(ClipGradByGlobalNorm(2.0)), optimizer(None)]) is None
    assert norm_for_all([optimizer(ClipGradByNorm(2.0))]) is None


def test_what_clips_nothing_is_refused():
    with pytest.raises(
        TypeError,
        match=r"'grad_clip' should be an instance of GradientClipBase's derived class, got 1.0",
    ):
        paddle.optimizer.SGD(
            learning_rate=1.0, parameters=[nn.Parameter(torch.ones(1))], grad_clip=1.0
        )
