import math

import pytest
import torch
from torch import nn

from mezzo.compat.megengine import amp
from mezzo.compat.megengine.autodiff import GradManager
from mezzo.compat.megengine.optimizer import SGD


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(2))


@pytest.fixture
def gm(weight):
    return GradManager().attach(weight)


def run(gm, scaler, weight, factor, **words):
    with gm:
        scaler.backward(gm, (weight * factor).sum(), **words)


def test_the_defaults_are_megengines():
    scaler = amp.GradScaler()
    assert (
        scaler.scale_factor,
        scaler.growth_factor,
        scaler.backoff_factor,
        scaler.growth_interval,
    ) == (16.0, 2.0, 0.5, 2000)


def test_automatic_gradients_come_out_unscaled_and_the_scale_grows_after_the_interval(gm, weight):
    scaler, seen = amp.GradScaler(growth_interval=2), []
    for _ in range(4):
        run(gm, scaler, weight, 3.0)
        assert weight.grad.tolist() == [3.0, 3.0]
        weight.grad = None
        seen.append(scaler.scale_factor)
    assert seen == [16.0, 32.0, 32.0, 64.0]


def test_a_gradient_that_is_not_finite_drops_all_of_them_and_the_scale_backs_off(gm, weight):
    other = nn.Parameter(torch.ones(1))
    gm.attach(other)
    scaler = amp.GradScaler(init_scale=8.0)
    with gm:
        scaler.backward(gm, (weight * math.inf).sum() + other.sum())
    assert (weight.grad, other.grad, scaler.scale_factor) == (None, None, 4.0)
    SGD([weight, other], lr=1.0, momentum=0.9).step().clear_grad()
    assert weight.tolist() == [1.0, 1.0]


def test_manual_is_the_same_in_three_calls(gm, weight):
    scaler = amp.GradScaler(growth_interval=1)
    with gm:
        gm.backward((weight * 3.0).sum(), dy=torch.tensor(scaler.scale_factor))
    assert weight.grad.tolist() == [48.0, 48.0]
    assert scaler.unscale(gm.attached_tensors()) is scaler
    scaler.update()
    assert (weight.grad.tolist(), scaler.scale_factor) == ([3.0, 3.0], 32.0)


def test_gradients_add_up_scaled_until_somebody_unscales_them(gm, weight):
    scaler = amp.GradScaler(growth_interval=1)
    run(gm, scaler, weight, 1.0, unscale_grad=False)
    assert (weight.grad.tolist(), scaler.scale_factor) == ([16.0, 16.0], 16.0)
    run(gm, scaler, weight, 2.0)
    assert (weight.grad.tolist(), scaler.scale_factor) == ([3.0, 3.0], 32.0)


def test_a_bad_gradient_is_remembered_until_the_update(gm, weight):
    scaler, other = amp.GradScaler(), nn.Parameter(torch.ones(1))
    weight.grad, other.grad = torch.full((2,), math.nan), torch.ones(1)
    scaler.unscale([weight])
    scaler.unscale([other])
    assert other.grad is None
    scaler.update()
    assert scaler.scale_factor == 8.0
    other.grad = torch.full((1,), 8.0)
    scaler.unscale([other])
    assert other.grad.item() == 1.0


def test_the_scale_can_be_left_alone_or_set(gm, weight):
    scaler = amp.GradScaler(growth_interval=1)
    run(gm, scaler, weight, 1.0, update_scale=False)
    assert scaler.scale_factor == 16.0
    scaler.update(new_scale=512)
    assert scaler.scale_factor == 512.0
    scaler.scale_factor = 4.0
    run(gm, scaler, weight, 1.0)
    assert scaler.scale_factor == 8.0


@pytest.mark.parametrize(
    "words", [{"growth_interval": 0}, {"growth_factor": 0}], ids=["interval", "factor"]
)
def test_a_static_scale_never_changes_and_still_drops_bad_gradients(gm, weight, words):
    scaler = amp.GradScaler(**words)
    run(gm, scaler, weight, math.inf)
    assert weight.grad is None
    run(gm, scaler, weight, 1.0)
    scaler.update(new_scale=512)
    assert (scaler.scale_factor, weight.grad.tolist()) == (16.0, [1.0, 1.0])


def test_several_outputs_and_their_weights_are_scaled(gm, weight):
    scaler = amp.GradScaler()
    with gm:
        scaler.backward(
            gm, [weight.sum(), (2.0 * weight).sum()], [torch.tensor(1.0), torch.tensor(10.0)]
        )
    assert weight.grad.tolist() == [21.0, 21.0]


def test_a_saved_scaler_goes_on(gm, weight):
    scaler = amp.GradScaler(init_scale=8.0, growth_interval=2)
    run(gm, scaler, weight, 1.0)
    again = amp.GradScaler()
    again.load_state_dict(scaler.state_dict())
    run(gm, again, weight, 1.0)
    assert again.scale_factor == 16.0


@pytest.mark.parametrize(
    "words",
    [
        {"init_scale": 0.0},
        {"init_scale": math.inf},
        {"growth_factor": 0.5},
        {"growth_interval": -1},
    ],
    ids=str,
)
def test_numbers_that_cannot_be_meant_are_refused(words):
    with pytest.raises(ValueError, match="must be"):
        amp.GradScaler(**words)
