"""Training with `mezzo.GradScaler` equals training without scaling, and Paddle's traces."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from support.scaler_cases import INF, X, loss_of, same, sgd, train, values
from support.scaler_traces import Trace, traces
from torch import nn

from mezzo import GradScaler, ScalerError

TRACES = traces()
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def one_parameter(size: int = 3) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.zeros(size))
    return parameter, torch.optim.SGD([parameter], lr=0.5)


# -- the traces ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*steps in a row|.*at its floor")
@pytest.mark.parametrize("trace", TRACES, ids=range(len(TRACES)))
def test_training_with_the_scaler_reproduces_paddles_trace(trace: Trace):
    scaler, (parameter, optimizer) = GradScaler("cpu", **trace.settings), one_parameter(1)
    for step, (kind, (scale, _, _)) in enumerate(zip(trace.kinds, trace.after, strict=True)):
        if step == trace.reload_at:
            reloaded = GradScaler("cpu", **(trace.settings | {"init_scale": 1.0}))
            reloaded.load_state_dict(scaler.state_dict())
            scaler = reloaded
        before = parameter.item()
        scaler.scale((parameter * 0).sum())
        # Set directly: a scale near the largest float32 would overflow in backward.
        parameter.grad = torch.tensor(
            [{".": scaler.get_scale(), "N": math.nan, "I": math.inf, "J": -math.inf}[kind]]
        )
        if trace.mode.startswith("unscale"):
            scaler.unscale_(optimizer)
        result = scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale, step
        assert result.skipped == (kind != ".")
        assert parameter.item() == (before if result.skipped else pytest.approx(before - 0.5))


# -- equal to training without scaling -------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_training_with_a_skipped_step_equals_unscaled_training_without_it(
    name: str, way: str, unscale_first: bool, net, make_net
):
    kind, settings = OPTIMIZERS[name]
    plain = make_net()
    plain_optimizer = kind(plain.parameters(), **settings, **WAYS[way])
    optimizer, scaler = (
        kind(net.parameters(), **settings, **WAYS[way]),
        GradScaler(init_scale=128.0, growth_interval=1),
    )
    for x in (X, INF, X * 0.5, X * 2):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, x)).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        assert scaler.step(optimizer).skipped == (x is INF)
        scaler.update()
        if x is not INF:
            plain_optimizer.zero_grad()
            loss_of(plain, x).backward()
            plain_optimizer.step()
    assert same(values(net), values(plain))
    assert scaler.get_scale() == 128.0 * 2 * 0.5 * 2 * 2


@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
        lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
    ],
)
def test_clipping_acts_on_unscaled_gradients(clip, net, make_net):
    plain = make_net()
    optimizer, plain_optimizer, scaler = sgd(net), sgd(plain), GradScaler()
    scaler.scale(loss_of(net)).backward()
    scaler.unscale_(optimizer)
    clip(net.parameters())
    scaler.step(optimizer)
    loss_of(plain).backward()
    clip(plain.parameters())
    plain_optimizer.step()
    assert same(values(net), values(plain))


def test_clipping_does_not_change_the_name_of_the_nonfinite_parameter(net):
    scaler, optimizer = GradScaler(), sgd(net)
    scaler.register_parameter_names(net)
    scaler.scale(loss_of(net)).backward()
    net.second.weight.grad[0, 1] = math.nan
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert scaler.step(optimizer).first_nonfinite == "second.weight"


def test_gradients_are_not_checked_again_after_unscale(net):
    scaler, optimizer = GradScaler(), sgd(net)
    scaler.scale(loss_of(net)).backward()
    scaler.unscale_(optimizer)
    net.first.bias.grad.fill_(math.inf)
    assert scaler.step(optimizer).skipped is False


def test_accumulated_gradients_are_unscaled_once(net, make_net):
    plain = make_net()
    optimizer, plain_optimizer, scaler = sgd(net), sgd(plain), GradScaler()
    for x in (X, X * 2):
        scaler.scale(loss_of(net, x) / 2).backward()
        (loss_of(plain, x) / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    plain_optimizer.step()
    assert same(values(net), values(plain))


def test_a_gradient_penalty_is_computed_on_unscaled_gradients(net, make_net):
    plain = make_net()
    optimizer, plain_optimizer, scaler = sgd(net), sgd(plain), GradScaler(init_scale=2.0**10)
    scaled = torch.autograd.grad(scaler.scale(loss_of(net)), net.parameters(), create_graph=True)
    penalty = sum((gradient / scaler.get_scale()).square().sum() for gradient in scaled)
    scaler.scale(loss_of(net) + penalty).backward()
    scaler.step(optimizer)
    scaler.update()
    gradients = torch.autograd.grad(loss_of(plain), plain.parameters(), create_graph=True)
    (loss_of(plain) + sum(gradient.square().sum() for gradient in gradients)).backward()
    plain_optimizer.step()
    for value, expected in zip(values(net), values(plain), strict=True):
        torch.testing.assert_close(value, expected)


def test_only_the_optimizer_with_nonfinite_gradients_is_skipped(make_net):
    stepped, skipped = make_net(), make_net()
    optimizers, scaler = [sgd(skipped), sgd(stepped)], GradScaler(init_scale=8.0)
    before_stepped, before_skipped = values(stepped), values(skipped)
    scaler.scale(loss_of(stepped) + loss_of(skipped)).backward()
    skipped.first.weight.grad[0, 0] = math.inf
    results = [scaler.step(optimizer) for optimizer in optimizers]
    scaler.update()
    assert [result.skipped for result in results] == [True, False]
    assert same(values(skipped), before_skipped)
    assert not same(values(stepped), before_stepped)
    assert scaler.get_scale() == 4.0
    assert scaler.state().skipped_steps == 1


def test_the_scale_does_not_overflow(net):
    scaler = GradScaler(growth_interval=1, growth_factor=2**4, init_scale=1e38)
    scaler.scale(torch.zeros((), requires_grad=True))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    scaler.step(sgd(net))
    scaler.update()
    assert math.isfinite(scaler.get_scale())


def test_300_skips_end_at_the_floor_and_do_not_change_parameters(net):
    scaler, optimizer = GradScaler(growth_interval=5), torch.optim.Adam(net.parameters(), lr=0.1)
    train(scaler, net, optimizer)
    before = values(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(300):
            train(scaler, net, optimizer, INF)
    assert ["floor" in str(warning.message) for warning in caught] == [True]
    assert same(values(net), before)
    assert scaler.get_scale() == 2.0**-24
    for _ in range(5 * 40):
        assert not train(scaler, net, optimizer).skipped
    assert scaler.get_scale() == 2.0**16
    assert all(parameter.isfinite().all() for parameter in net.parameters())


# -- several losses --------------------------------------------------------------------------------


def test_each_loss_has_a_scale_and_only_that_of_a_nonfinite_loss_backs_off(net):
    scaler, optimizer = GradScaler(init_scale=16.0, growth_interval=1, num_losses=2), sgd(net)
    before = values(net)
    scaler.backward(loss_of(net), loss_id=0, optimizers=optimizer)
    scaler.backward(loss_of(net, INF), loss_id=1, optimizers=optimizer)
    assert scaler.step(optimizer).skipped
    scaler.update()
    assert (scaler.state(0).scale, scaler.state(1).scale) == (32.0, 8.0)
    assert same(values(net), before)


def test_gradients_of_losses_with_different_scales_add_up_as_without_scaling(net, make_net):
    plain = make_net()
    scaler, optimizer, plain_optimizer = (
        GradScaler(init_scale=16.0, growth_interval=1, num_losses=2),
        sgd(net),
        sgd(plain),
    )
    scaler.load_state_dict(
        {**scaler.state_dict(), "mezzo_states": [{"scale": 2.0}, {"scale": 2.0**12}]}
    )
    for _ in range(2):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        scaler.backward(loss_of(net), loss_id=0, optimizers=optimizer)
        scaler.backward(loss_of(net, X * 2), loss_id=1, optimizers=[optimizer])
        scaler.backward(loss_of(net, X * 3), loss_id=1, optimizers=[optimizer])
        for factor in (1, 2, 3):
            loss_of(plain, X * factor).backward()
        assert not scaler.step(optimizer).skipped
        scaler.update()
        plain_optimizer.step()
    assert same(values(net), values(plain))


def test_a_nonfinite_loss_skips_only_the_optimizer_that_it_reaches(net):
    first, second = (
        torch.optim.SGD(net.first.parameters(), lr=0.1),
        torch.optim.SGD(net.second.parameters(), lr=0.1),
    )
    scaler = GradScaler(num_losses=2)
    scaler.backward(loss_of(net), loss_id=0, optimizers=[first, second])
    scaler.backward(net.first(INF).sum(), loss_id=1, optimizers=[first, second])
    assert scaler.step(first).skipped
    assert not scaler.step(second).skipped
    scaler.update()


def test_scale_with_several_losses_raises_at_unscale_and_step(net):
    scaler, optimizer = GradScaler(num_losses=2), sgd(net)
    scaler.scale(loss_of(net), loss_id=1).backward()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(ScalerError, match=r"scaler\.backward\(loss, loss_id="):
            call(optimizer)


@pytest.mark.parametrize("loss_id", [-1, 2])
def test_a_loss_id_out_of_range_raises(loss_id: int):
    with pytest.raises(ScalerError, match=rf"loss_id={loss_id}: this scaler has 2 losses"):
        GradScaler(num_losses=2).scale(torch.ones(1), loss_id)
