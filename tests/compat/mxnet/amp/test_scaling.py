import math

import pytest
import torch
from torch import nn

from mezzo.compat.mxnet import amp, autograd, gluon


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(2))


@pytest.fixture
def trainer(weight):
    amp.init()
    made = gluon.Trainer([weight], "sgd", {"learning_rate": 0.5}, update_on_kvstore=False)
    amp.init_trainer(made)
    return made


def test_the_scale_starts_at_two_to_the_sixteenth_and_a_step_unscales(weight, trainer):
    with amp.scale_loss(weight.sum(), trainer) as scaled:
        assert scaled.item() == 2 * 65536.0
        autograd.backward(scaled)
    assert weight.grad.tolist() == [65536.0] * 2
    trainer.step(2)
    assert weight.tolist() == [0.75, 0.75]
    assert weight.grad is None


def test_a_bad_step_is_skipped_and_the_scale_is_halved_at_once(weight, trainer):
    with amp.scale_loss(weight.sum() * math.inf, trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    assert (weight.tolist(), trainer.amp_loss_scale) == ([1.0, 1.0], 32768.0)
    with amp.scale_loss(weight.sum(), trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    assert (weight.tolist(), trainer.amp_loss_scale) == ([0.5, 0.5], 32768.0)


def test_the_scale_doubles_after_two_thousand_good_steps_up_to_its_ceiling(weight, trainer):
    trainer.set_learning_rate(0.0)
    for _ in range(2000):
        with amp.scale_loss(weight.sum(), trainer) as scaled:
            scaled.backward()
        trainer.step(1)
    assert trainer.amp_loss_scale == 131072.0


def test_the_ceiling_is_two_to_the_twenty_fourth(weight, trainer):
    from mezzo.compat.mxnet.gluon import scaled_optimizer_of

    assert scaled_optimizer_of(trainer.optimizer).scaler._scales.rule.max_scale == 2.0**24


def test_several_losses_are_scaled_together(weight, trainer):
    with amp.scale_loss([weight.sum(), 2.0 * weight.sum()], trainer) as scaled:
        assert isinstance(scaled, list)
        autograd.backward(scaled)
    trainer.step(1)
    assert weight.tolist() == [-0.5, -0.5]


def test_a_vector_of_losses_is_scaled_and_divided_by_its_batch(weight, trainer):
    with amp.scale_loss(weight * torch.tensor([1.0, 2.0]), trainer) as scaled:
        autograd.backward(scaled)
    trainer.step(2)
    assert weight.tolist() == [0.75, 0.5]


def test_each_trainer_has_a_scale_of_its_own(weight, trainer):
    other = nn.Parameter(torch.ones(1))
    second = gluon.Trainer([other], "sgd", {"learning_rate": 0.5})
    amp.init_trainer(second)
    with (
        amp.scale_loss(weight.sum(), trainer) as one,
        amp.scale_loss(other.sum() * math.inf, second) as two,
    ):
        autograd.backward([one, two])
    trainer.step(1)
    second.step(1)
    assert (weight.tolist(), other.tolist()) == ([0.5, 0.5], [1.0])
    assert (trainer.amp_loss_scale, second.amp_loss_scale) == (65536.0, 32768.0)
    with amp.scale_loss([weight.sum(), other.sum()], [trainer, second]) as scaled:
        assert [one.item() for one in scaled] == [65536.0, 32768.0]


def test_as_many_losses_as_trainers_are_needed(weight, trainer):
    with (
        pytest.raises(ValueError, match="1 losses and 2 trainers"),
        amp.scale_loss(weight.sum(), [trainer, trainer]),
    ):
        pass


def test_one_of_torchs_optimizers_is_scaled_by_its_own_step(weight):
    amp.init()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    amp.init_trainer(optimizer)
    for factor, expected in ((math.nan, 1.0), (1.0, 0.5)):
        optimizer.zero_grad()
        with amp.scale_loss(weight.sum() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert weight.tolist() == [expected, expected]


def test_unscaled_by_hand_gradients_can_be_clipped(weight, trainer):
    with amp.scale_loss(8.0 * weight.sum(), trainer) as scaled:
        scaled.backward()
    amp.unscale(trainer)
    assert weight.grad.tolist() == [8.0, 8.0]
    torch.nn.utils.clip_grad_value_([weight], 1.0)
    trainer.step(1)
    assert weight.tolist() == [0.5, 0.5]


def test_a_loss_that_was_not_scaled_is_stepped_as_it_is(weight, trainer):
    weight.sum().backward()
    trainer.step(1)
    assert weight.tolist() == [0.5, 0.5]


def test_uninit_takes_trainers_back(weight, trainer):
    amp.uninit()
    assert trainer.amp_loss_scale == 1.0
    with (
        pytest.raises(AssertionError, match="Loss scaler is not initialized"),
        amp.scale_loss(weight.sum(), trainer),
    ):
        pass
    amp.init()
    amp.init_trainer(trainer)
    assert trainer.amp_loss_scale == 65536.0


def test_calls_out_of_order_are_refused_as_there(weight):
    trainer = gluon.Trainer([weight], "sgd")
    with pytest.raises(
        AssertionError, match=r"AMP not initialized, did you forget to call amp.init\(\)"
    ):
        amp.init_trainer(trainer)
    with (
        pytest.raises(AssertionError, match=r"did you forget to call amp.init_trainer\(\)"),
        amp.scale_loss(weight.sum(), trainer),
    ):
        pass


@pytest.mark.parametrize("call", [amp.init_trainer, amp.unscale], ids=["init_trainer", "unscale"])
def test_what_is_no_trainer_is_refused_as_there(call):
    amp.init()
    with pytest.raises(
        TypeError, match="should be a Gluon Trainer or an optimizer, instead is <class 'str'>"
    ):
        call("sgd")
