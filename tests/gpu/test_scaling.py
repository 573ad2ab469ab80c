"""Gradient scaling on a CUDA device: nothing is read that need not be, and bad parameters are named by the pass that checks them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import mezzo
from mezzo import _launch
from mezzo.scaling.scale_state import next_state
from mezzo.scaling.scale_tensors import DeviceLossScale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Said once a process by the guard itself.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

FUSED = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


@contextmanager
def no_host_reads() -> Iterator[None]:
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).cuda()


def iterate(scaler, model, optimizer, x, **kwargs):
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    result = scaler.step(optimizer, **kwargs)
    scaler.update()
    return result


def plain(make, xs) -> list[torch.Tensor]:
    model = network()
    optimizer = make(model.parameters())
    for x in xs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_trains_and_skips_without_a_host_read(name: str, x: torch.Tensor):
    model, bad = network(), x * math.inf
    optimizer, scaler = FUSED[name](model.parameters()), mezzo.GradScaler("cuda", growth_interval=2)
    iterate(scaler, model, optimizer, x)
    torch.cuda.synchronize()
    with no_host_reads():
        results = [iterate(scaler, model, optimizer, one) for one in (bad, x * 2, x * 3)]
    assert [result.skipped for result in results] == [True, False, False]
    assert scaler.state() == mezzo.ScaleState(2.0**16, 0, 0, 3, 1, 0)
    for ours, theirs in zip(model.parameters(), plain(FUSED[name], [x, x * 2, x * 3]), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_plain_optimizer_reads_one_flag_however_many_devices_it_spans(x: torch.Tensor):
    here, there = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="cuda"))
    optimizer, scaler = torch.optim.SGD([here, there], lr=0.5), mezzo.GradScaler(init_scale=2.0)
    for bad in (False, True):
        scaler.scale(x.sum())
        here.grad, there.grad = (
            torch.full((3,), 2.0),
            torch.full((3,), math.inf if bad else 2.0, device="cuda"),
        )
        scaler.unscale_(optimizer)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            result = scaler.step(optimizer)
            torch.cuda.set_sync_debug_mode("default")
        assert len([one for one in told if "synchroniz" in str(one.message)]) <= 1
        assert result.skipped is bad
        scaler.update()
    assert here.tolist() == there.tolist() == [0.5] * 3


def test_the_device_state_follows_the_value():
    generator = torch.Generator().manual_seed(0)
    for rule in (
        mezzo.ScaleRule(growth_interval=3),
        mezzo.ScaleRule(growth_interval=2, backoff_interval=2, growth_factor=1.7, min_scale=1.0),
    ):
        state = mezzo.ScaleState(64.0)
        scale = DeviceLossScale(state, torch.device("cuda"))
        for bad in torch.randint(0, 2, (150,), generator=generator).tolist():
            scale.advance(torch.full((), float(bad), device="cuda"), rule)
            state = next_state(state, rule, found_nonfinite=bool(bad))
        assert scale.read() == state


@pytest.mark.skipif(not _launch.has_triton(torch.device("cuda")), reason="needs Triton")
def test_the_first_bad_parameter_is_named(x: torch.Tensor):
    model = network()
    optimizer, scaler = FUSED["sgd"](model.parameters()), mezzo.GradScaler("cuda")
    scaler.register_parameter_names(model)
    scaler.scale(model(x).mean()).backward()
    model[2].weight.grad[0, 3] = math.nan
    result = scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.update()
    assert result.first_nonfinite == "2.weight"


def test_a_collapse_is_told_once_from_copies_that_nobody_waits_for(x: torch.Tensor):
    model = network()
    optimizer, scaler = (
        FUSED["sgd"](model.parameters()),
        mezzo.GradScaler("cuda", collapse_patience=3),
    )
    scaler.register_parameter_names(model)
    iterate(scaler, model, optimizer, x)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with no_host_reads():
            for _ in range(12):
                iterate(scaler, model, optimizer, x * math.inf)
                time.sleep(0.01)
    messages = [str(one.message) for one in told if "in a row" in str(one.message)]
    assert len(messages) == 1
    if _launch.has_triton(torch.device("cuda")):
        assert "'0.weight'" in messages[0]


def test_a_scheduler_follows_good_steps_without_a_host_read(x: torch.Tensor):
    model = network()
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
        mezzo.GradScaler("cuda"),
    )
    scheduler = ExponentialLR(optimizer, gamma=0.5)
    iterate(scaler, model, optimizer, x, scheduler=scheduler)
    torch.cuda.synchronize()
    with no_host_reads():
        for one in (x * math.inf, x * 2, x * 3):
            iterate(scaler, model, optimizer, one, scheduler=scheduler)
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert scheduler.get_last_lr() == [pytest.approx(0.0125)]
    twin = network()
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin_scheduler = ExponentialLR(twin_optimizer, gamma=0.5)
    for one in (x, x * 2, x * 3):
        twin_optimizer.zero_grad()
        twin(one).square().mean().backward()
        twin_optimizer.step()
        twin_scheduler.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_every_dtype_is_unscaled_and_checked(dtype: torch.dtype):
    for bad in (False, True):
        parameter = nn.Parameter(torch.ones(70, 33, dtype=dtype, device="cuda"))
        optimizer, scaler = (
            torch.optim.SGD([parameter], lr=1.0),
            mezzo.GradScaler("cuda", init_scale=4.0),
        )
        scaler.scale(torch.zeros((), device="cuda"))
        parameter.grad = torch.full_like(parameter, 4.0)
        if bad:
            parameter.grad[69, 32] = math.inf
        assert scaler.step(optimizer).skipped is bad
        assert torch.equal(parameter.detach(), torch.full_like(parameter, float(bad)))


def test_a_state_saved_on_a_gpu_goes_on_in_torchs_scaler(x: torch.Tensor):
    model = network()
    optimizer, scaler = (
        FUSED["adam"](model.parameters()),
        mezzo.GradScaler("cuda", growth_interval=3),
    )
    for _ in range(4):
        iterate(scaler, model, optimizer, x)
    theirs = torch.amp.GradScaler("cuda")
    theirs.load_state_dict(scaler.state_dict())
    assert (theirs.get_scale(), theirs._get_growth_tracker()) == (2.0**17, 1)
