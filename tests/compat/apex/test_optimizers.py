"""`apex.optimizers` against torch's optimizers and against plain formulas."""

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


def set_gradients(parameters, step):
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
    # Without weight decay and use_nvlamb, the trust ratio is 1.
    "lamb-as-adam": (
        lambda p: optimizers.FusedLAMB(p, lr=0.1, weight_decay=0.0, max_grad_norm=0.0),
        lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-6),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_steps_equal_those_of_the_plain_optimizer(pair):
    fused, plain = PAIRS[pair]
    actual, expected = weights(), weights()
    fused_optimizer, plain_optimizer = fused(actual), plain(expected)
    for step in range(4):
        set_gradients(actual, step)
        set_gradients(expected, step)
        fused_optimizer.step()
        plain_optimizer.step()
    for parameter, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(parameter, reference, rtol=1e-5, atol=1e-6)


def test_adam_without_bias_correction_follows_the_formula():
    (weight,) = parameters = [nn.Parameter(torch.tensor([1.0, -2.0]))]
    optimizer = optimizers.FusedAdam(parameters, lr=0.1, bias_correction=False, weight_decay=0.01)
    value, moment, square = (
        weight.detach().double().clone(),
        torch.zeros(2).double(),
        torch.zeros(2).double(),
    )
    for step in range(5):
        set_gradients(parameters, step)
        gradient = weight.grad.double()
        moment, square = 0.9 * moment + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        value -= 0.1 * (moment / (square.sqrt() + 1e-8) + 0.01 * value)
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), value, rtol=1e-5, atol=1e-6)


def test_lamb_clips_by_the_total_norm_and_does_not_modify_gradients():
    clipped, reference = weights(), weights()
    for parameter, other in zip(clipped, reference, strict=True):
        parameter.grad, other.grad = torch.ones_like(parameter) * 100, torch.ones_like(other)
    norm = math.sqrt(sum(parameter.numel() for parameter in clipped))
    optimizers.FusedLAMB(clipped, lr=0.1, eps=1e-3).step()
    for other in reference:
        other.grad /= norm
    optimizers.FusedLAMB(reference, lr=0.1, eps=1e-3, max_grad_norm=0.0).step()
    assert clipped[0].grad.flatten()[0] == 100.0
    for parameter, other in zip(clipped, reference, strict=True):
        torch.testing.assert_close(parameter, other)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedSGD", "FusedAdagrad"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_optimizer_trains_under_amp(name, level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = getattr(optimizers, name)(model.parameters(), lr=0.05)
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


def test_step_hooks_of_lamb_run_once_even_after_a_plain_lamb_was_created():
    mezzo.LAMB(weights())
    parameters = weights()
    optimizer, called = optimizers.FusedLAMB(parameters), []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    set_gradients(parameters, 0)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert called == [1]


@pytest.mark.parametrize(
    ("name", "sets_to_none"),
    [("FusedAdam", True), ("FusedSGD", False), ("FusedLAMB", True), ("FusedAdagrad", True)],
)
def test_zero_grad_follows_set_grad_none(name, sets_to_none):
    parameters = weights()
    optimizer = getattr(optimizers, name)(parameters, lr=0.1)
    set_gradients(parameters, 0)
    optimizer.zero_grad()
    assert (parameters[0].grad is None) is sets_to_none
    set_gradients(parameters, 0)
    getattr(optimizers, name)(parameters, lr=0.1, set_grad_none=not sets_to_none).zero_grad()
    assert (parameters[0].grad is None) is not sets_to_none


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
def test_unsupported_options_are_runtime_errors(make):
    with pytest.raises(RuntimeError, match=r"does not support|not available"):
        make(weights())


def test_copies_have_the_same_class():
    optimizer = optimizers.FusedAdam(weights(), lr=0.1)
    assert (
        type(copy.deepcopy(optimizer))
        is type(pickle.loads(pickle.dumps(optimizer)))
        is optimizers.FusedAdam
    )
