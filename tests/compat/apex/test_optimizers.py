"""Apex's fused optimizers by name, against torch's and against plain formulas."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat.apex import amp, optimizers

SHAPES = [(3, 4), (5,)]


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


PAIRS = {
    "adam-w": (
        lambda p: optimizers.FusedAdam(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    ),
    "adam-l2": (
        lambda p: optimizers.FusedAdam(p, 0.1, True, (0.8, 0.9), 1e-6, False, 0.1),
        lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.9), 1e-6, 0.1),
    ),
    "sgd": (
        lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    "adagrad": (
        lambda p: optimizers.FusedAdagrad(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    ),
    "nvlamb": (
        lambda p: optimizers.FusedLAMB(
            p, lr=0.1, weight_decay=0.0, max_grad_norm=0.0, use_nvlamb=True
        ),
        lambda p: mezzo.LAMB(p, lr=0.1, weight_decay=0.0),
    ),
    "lamb": (
        lambda p: optimizers.FusedLAMB(p, lr=0.1, max_grad_norm=0.0),
        lambda p: mezzo.LAMB(p, lr=0.1),
    ),
    # Without decay and without use_nvlamb, LAMB steps at Adam's length.
    "lamb-as-adam": (
        lambda p: optimizers.FusedLAMB(p, lr=0.1, weight_decay=0.0, max_grad_norm=0.0),
        lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-6),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_steps_are_those_of_the_optimizer_behind_the_name(pair):
    fused, plain = PAIRS[pair]
    ours, theirs = weights(), weights()
    one, other = fused(ours), plain(theirs)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        one.step()
        other.step()
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_adam_without_bias_correction():
    (weight,) = parameters = [nn.Parameter(torch.tensor([1.0, -2.0]))]
    optimizer = optimizers.FusedAdam(parameters, lr=0.1, bias_correction=False, weight_decay=0.01)
    value, moment, square = (
        weight.detach().double().clone(),
        torch.zeros(2).double(),
        torch.zeros(2).double(),
    )
    for step in range(5):
        give_gradients(parameters, step)
        gradient = weight.grad.double()
        moment, square = 0.9 * moment + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        value -= 0.1 * (moment / (square.sqrt() + 1e-8) + 0.01 * value)
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), value, rtol=1e-5, atol=1e-6)


def test_lamb_clips_all_gradients_together_and_leaves_them_as_they_are():
    big, small = weights(), weights()
    for parameter, other in zip(big, small, strict=True):
        parameter.grad, other.grad = torch.ones_like(parameter) * 100, torch.ones_like(other)
    norm = math.sqrt(sum(parameter.numel() for parameter in big))
    optimizers.FusedLAMB(big, lr=0.1, eps=1e-3).step()
    for other in small:
        other.grad /= norm
    optimizers.FusedLAMB(small, lr=0.1, eps=1e-3, max_grad_norm=0.0).step()
    assert big[0].grad.flatten()[0] == 100.0
    for one, other in zip(big, small, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["FusedAdam", "FusedLAMB", "FusedSGD", "FusedAdagrad"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_trains_under_amp(kind, level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = getattr(optimizers, kind)(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(32, 4)
    losses = []
    for _ in range(10):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_hooks_of_lamb_run_once_a_step_even_after_a_plain_one_was_made():
    mezzo.LAMB(weights())
    parameters = weights()
    optimizer, called = optimizers.FusedLAMB(parameters), []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    give_gradients(parameters, 0)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert called == [1]


@pytest.mark.parametrize(
    ("kind", "none"),
    [("FusedAdam", True), ("FusedSGD", False), ("FusedLAMB", True), ("FusedAdagrad", True)],
)
def test_gradients_are_cleared_as_the_constructor_says(kind, none):
    parameters = weights()
    optimizer = getattr(optimizers, kind)(parameters, lr=0.1)
    give_gradients(parameters, 0)
    optimizer.zero_grad()
    assert (parameters[0].grad is None) is none
    give_gradients(parameters, 0)
    getattr(optimizers, kind)(parameters, lr=0.1, set_grad_none=not none).zero_grad()
    assert (parameters[0].grad is None) is not none


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optimizers.FusedAdam(p, amsgrad=True),
        lambda p: optimizers.FusedAdam(
            p, bias_correction=False, adam_w_mode=False, weight_decay=0.1
        ),
        lambda p: optimizers.FusedLAMB(p, amsgrad=True),
        lambda p: optimizers.FusedLAMB(p, grad_averaging=False),
        lambda p: optimizers.FusedSGD(p, lr=0.1, wd_after_momentum=True),
        lambda p: optimizers.FusedAdagrad(p, adagrad_w_mode=True),
        lambda p: optimizers.FusedNovoGrad(p, lr=0.1),
        lambda p: optimizers.FusedMixedPrecisionLamb(p),
    ],
    ids=[
        "amsgrad",
        "adam-l2-uncorrected",
        "lamb-amsgrad",
        "averaging",
        "decay-after",
        "adagrad-w",
        "novograd",
        "mixed-lamb",
    ],
)
def test_what_is_not_there_is_a_runtime_error(make):
    with pytest.raises(RuntimeError, match=r"does not support|not available"):
        make(weights())


def test_copies_are_of_the_same_kind():
    optimizer = optimizers.FusedAdam(weights(), lr=0.1)
    assert (
        type(copy.deepcopy(optimizer))
        is type(pickle.loads(pickle.dumps(optimizer)))
        is optimizers.FusedAdam
    )
