"""`paddle.nn`: gradient clipping, and the errors for names that only Paddle has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle.nn import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    ClipGradByValue,
)
from mezzo.compat.paddle.nn._clip import hook_clip, shared_clip_norm

CLIPS = [
    ClipGradByGlobalNorm(0.5),
    ClipGradByNorm(0.5),
    ClipGradByValue(0.01),
    ClipGradByValue(0.02, min=-0.01),
]


def make_weights():
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    weights[0].grad, weights[1].grad = torch.tensor([3.0, -4.0]), torch.tensor([0.0, 0.3])
    return weights


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
def test_a_clip_limits_gradients_in_place(clip, expected):
    weights = make_weights()
    clip(weights)
    assert [weight.grad.tolist() for weight in weights] == [
        pytest.approx(gradient, rel=1e-4) for gradient in expected
    ]


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


def test_a_fused_step_clips_to_a_global_norm_itself():
    model = nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(
        learning_rate=1.0, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(1.0)
    )
    assert hook_clip(optimizer) == ClipGradByGlobalNorm(1.0)
    paddle.amp.decorate(model, optimizer, level="O2")
    assert hook_clip(optimizer) is None


def test_several_optimizers_share_a_norm_only_if_their_clips_are_equal():
    def clipped_by(clip):
        return paddle.optimizer.SGD(
            learning_rate=1.0, parameters=[nn.Parameter(torch.ones(1))], grad_clip=clip
        )

    assert (
        shared_clip_norm(
            [clipped_by(ClipGradByGlobalNorm(2.0)), clipped_by(ClipGradByGlobalNorm(2.0))]
        )
        == 2.0
    )
    assert shared_clip_norm([clipped_by(ClipGradByGlobalNorm(2.0)), clipped_by(None)]) is None
    assert shared_clip_norm([clipped_by(ClipGradByNorm(2.0))]) is None


def test_a_grad_clip_of_another_type_raises():
    with pytest.raises(
        TypeError,
        match=r"'grad_clip' should be an instance of GradientClipBase's derived class, got 1.0",
    ):
        paddle.optimizer.SGD(
            learning_rate=1.0, parameters=[nn.Parameter(torch.ones(1))], grad_clip=1.0
        )


@pytest.mark.parametrize(
    ("access", "remedy"),
    [
        (lambda: paddle.regularizer.L1Decay, r"Use regularizer.L2Decay, or add the absolute"),
        (lambda: paddle.nn.Fold, r"nn has no Fold. Use torch.nn.Fold"),
        (lambda: paddle.optimizer.lr.CyclicLR, r"Use torch.optim.lr_scheduler.CyclicLR"),
    ],
    ids=["regularizer", "Fold", "lr"],
)
def test_a_name_that_only_paddle_has_raises_with_its_equivalent(access, remedy):
    with pytest.raises(AttributeError, match=remedy):
        access()


@pytest.mark.parametrize(
    "module", [paddle, paddle.nn, paddle.optimizer], ids=lambda module: module.__name__
)
def test_every_public_name_exists(module):
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert not hasattr(module, "__nothing__")


def test_the_documentation_lists_every_substitution():
    page = (Path(__file__).parents[3] / "docs" / "coming-from" / "paddle.md").read_text()
    assert [
        call
        for call, equivalent in SUBSTITUTIONS.items()
        if f"| `{call}` | {equivalent} |" not in page
    ] == []
