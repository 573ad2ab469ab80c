"""`GradScaler.find_scale`: the first batch is not lost to a loss scale that is too high."""

from __future__ import annotations

import math

import pytest
import torch
from support.scaler_cases import X, sgd
from torch import nn

from mezzo import GradScaler, ScalerError
from mezzo.scaling import scale_search


def overflowing_loss(model: nn.Module, limit: float = 1000.0) -> torch.Tensor:
    """Return a loss whose gradients overflow at scales above `limit`."""
    largest = torch.finfo(torch.float32).max
    return model(X).sum() * (largest / limit / 8)


def test_the_scale_is_lowered_until_gradients_are_finite_with_headroom(net):
    scaler, optimizer = GradScaler("cpu"), sgd(net)
    loss = overflowing_loss(net)
    found = scaler.find_scale(loss, optimizer)
    # 65536 / 4 / 4 / 4 = 1024 may overflow, 256 does not; divided by 4 once more.
    assert found in (64.0, 256.0)
    assert found == scaler.get_scale()
    assert all(parameter.grad is None for parameter in net.parameters())
    scaler.scale(loss).backward()
    assert not scaler.step(optimizer).skipped


def test_a_scale_that_fits_stays(net):
    scaler = GradScaler("cpu")
    assert scaler.find_scale(net(X).sum(), sgd(net)) == 65536.0


def test_gradients_just_below_the_range_get_headroom_too(net):
    largest = torch.finfo(torch.float32).max
    optimizer = sgd(net)
    # The gradient of the last bias is the number of rows: at 65536 it is half of the range.
    loss = net(X).sum() * (largest / 65536.0 / len(X) / 2)
    assert GradScaler("cpu").find_scale(loss, optimizer) == 16384.0
    (65536.0 * loss).backward()
    assert bool(net.second.bias.grad.isfinite())


def test_gradients_of_the_first_backward_stay_where_the_scale_fits(net):
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    seen = []

    def backward(retain_graph):
        scaler.scale(net(X).sum()).backward()
        seen.append(net.second.bias.grad)

    assert scale_search.search(scaler._scales, 0, list(net.parameters()), backward)
    # The second was computed at four times the scale, to look for headroom.
    assert len(seen) == 2
    assert net.second.bias.grad is seen[0]
    assert scaler.get_scale() == 65536.0


def test_the_search_counts_no_steps(net):
    scaler, optimizer = GradScaler("cpu"), sgd(net)
    scaler.find_scale(overflowing_loss(net), optimizer)
    state = scaler.state()
    assert (state.good_steps, state.skipped_steps, state.growth_tracker) == (0, 0, 0)


def test_gradients_that_overflow_at_every_scale_leave_the_scale(net):
    scaler, optimizer = GradScaler("cpu"), sgd(net)
    loss = (net(X) * 0).sqrt().sum()
    assert scaler.find_scale(loss, optimizer) == 65536.0
    scaler.scale(loss).backward()
    assert scaler.step(optimizer).skipped


def test_a_non_finite_loss_leaves_the_scale(net):
    scaler = GradScaler("cpu")
    assert scaler.find_scale((net(X) * math.inf).sum(), sgd(net)) == 65536.0


def test_a_scale_that_was_used_or_is_fixed_stays(net):
    used, fixed, optimizer = GradScaler("cpu"), GradScaler("cpu", dynamic=False), sgd(net)
    used.scale(net(X).sum()).backward()
    used.step(optimizer)
    used.update()
    optimizer.zero_grad()
    for scaler in (used, fixed):
        assert scaler.find_scale(overflowing_loss(net), optimizer) == 65536.0


def test_existing_gradients_are_not_dropped(net):
    scaler, optimizer = GradScaler("cpu"), sgd(net)
    net(X).sum().backward()
    with pytest.raises(ScalerError, match="there are gradients already"):
        scaler.find_scale(net(X).sum(), optimizer)
    assert all(parameter.grad is not None for parameter in net.parameters())


class _OnlyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.calls = 0
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.calls += 1
        if ctx.calls > 1:
            raise _OnlyOnce.error("the context was freed")
        return gradient


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_backward_that_cannot_run_twice_leaves_the_scale_and_warns_once(net, monkeypatch, error):
    monkeypatch.setattr(scale_search, "_warned", False)
    monkeypatch.setattr(_OnlyOnce, "error", error, raising=False)
    scaler, optimizer = GradScaler("cpu"), sgd(net)
    with pytest.warns(UserWarning, match="the context was freed"):
        found = scaler.find_scale(_OnlyOnce.apply(overflowing_loss(net)), optimizer)
    assert found == scaler.get_scale() == 65536.0
    assert scaler.find_scale(_OnlyOnce.apply(overflowing_loss(net)), optimizer) == 65536.0


@pytest.mark.parametrize("processes", [1, 2])
def test_with_several_processes_nothing_is_searched_which_is_warned_about_once(
    net, monkeypatch, processes
):
    monkeypatch.setattr(scale_search, "_warned", False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    optimizer = sgd(net)
    if processes == 1:
        assert GradScaler("cpu").find_scale(overflowing_loss(net), optimizer) < 65536.0
        return
    with pytest.warns(UserWarning, match="not searched with several processes"):
        assert GradScaler("cpu").find_scale(overflowing_loss(net), optimizer) == 65536.0
    assert GradScaler("cpu").find_scale(overflowing_loss(net), optimizer) == 65536.0
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_low_initial_scale_is_not_warned_about_with_several_processes(net, monkeypatch):
    monkeypatch.setattr(scale_search, "_warned", False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    scaler = GradScaler("cpu", init_scale=1024.0)
    assert scaler.find_scale(overflowing_loss(net), sgd(net)) == 1024.0


def test_a_disabled_scaler_returns_1(net):
    assert GradScaler("cpu", enabled=False).find_scale(net(X).sum(), sgd(net)) == 1.0
