import gc
import math
from weakref import ref

import pytest
import torch
from torch import nn

from mezzo import GradScaler, ScalerError
from mezzo.compat.mxnet.gluon import ScaledOptimizer, scaled_optimizer_of


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(1))


@pytest.fixture
def optimizer(weight):
    return torch.optim.SGD([weight], lr=1.0)


def attached(optimizer, **words):
    return ScaledOptimizer(optimizer, GradScaler("cpu", init_scale=8.0, **words))


def test_a_scaled_step_updates_from_unscaled_gradients(weight, optimizer):
    step = attached(optimizer, growth_interval=1)
    step.scale(weight.sum() * 0.25).backward()
    assert weight.grad.item() == 2.0
    optimizer.step()
    assert (weight.item(), step.scaler.get_scale(), step.last.skipped) == (0.75, 16.0, False)


def test_a_bad_step_is_skipped_and_the_scale_backs_off(weight, optimizer):
    step = attached(optimizer)
    step.scale(weight.sum() * math.inf).backward()
    optimizer.step()
    assert (weight.item(), step.scaler.get_scale(), step.last.skipped) == (1.0, 4.0, True)


def test_a_step_without_a_scaled_loss_is_the_optimizers_own(weight, optimizer):
    step = attached(optimizer)
    (weight.sum() * 0.25).backward()
    optimizer.step()
    assert (weight.item(), step.last) == (0.75, None)


def test_gradients_unscaled_by_hand_are_not_unscaled_again(weight, optimizer):
    step = attached(optimizer)
    step.scale(weight.sum() * 0.25).backward()
    step.unscale()
    step.unscale()
    assert weight.grad.item() == 0.25
    optimizer.step()
    assert weight.item() == 0.75


def test_hooks_of_the_optimizer_run_once(weight, optimizer):
    step, calls = attached(optimizer), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    step.scale(weight.sum()).backward()
    optimizer.step()
    assert calls == ["step"]


def test_a_scheduler_made_later_counts_the_steps(weight, optimizer, recwarn):
    step = attached(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step.scale(weight.sum()).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not recwarn.list


def test_a_scheduler_made_earlier_counts_skipped_steps_too(weight, optimizer, recwarn):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = attached(optimizer)
    step.scale(weight.sum() * math.nan).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not recwarn.list


def test_a_detached_optimizer_steps_by_itself(weight, optimizer):
    own = optimizer.step.__func__
    step = attached(optimizer)
    step.scale(weight.sum()).backward()
    assert scaled_optimizer_of(optimizer) is step
    step.detach()
    assert scaled_optimizer_of(optimizer) is None
    assert optimizer.step.__func__ is own
    optimizer.step()
    assert weight.item() == -7.0


def test_a_scheduler_made_in_between_survives_detaching(weight, optimizer):
    step = attached(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step.detach()
    weight.sum().backward()
    optimizer.step()
    assert weight.item() == 0.0


def test_an_attached_optimizer_is_freed_with_its_owner(weight):
    optimizer = torch.optim.SGD([weight], lr=1.0)
    attached(optimizer)
    gone = ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_closures_are_refused_as_the_scaler_refuses_them(weight, optimizer):
    step = attached(optimizer)
    step.scale(weight.sum()).backward()
    with pytest.raises(ScalerError, match="no closure"):
        optimizer.step(lambda: weight.sum())
    optimizer.step()
    assert weight.item() == 0.0
