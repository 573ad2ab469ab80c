"""Gradient scaling on a CUDA device: synchronizations, and the source of non-finite gradients."""

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
    # Raised once in a process by set_sync_debug_mode.
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
def test_a_fused_optimizer_trains_and_skips_without_a_synchronization(name: str, x: torch.Tensor):
    model, overflowing = network(), x * math.inf
    optimizer, scaler = FUSED[name](model.parameters()), mezzo.GradScaler("cuda", growth_interval=2)
    iterate(scaler, model, optimizer, x)
    torch.cuda.synchronize()
    with no_host_reads():
        results = [iterate(scaler, model, optimizer, one) for one in (overflowing, x * 2, x * 3)]
    assert [result.skipped for result in results] == [True, False, False]
    assert scaler.state() == mezzo.ScaleState(2.0**16, 0, 0, 3, 1, 0)
    expected = plain(FUSED[name], [x, x * 2, x * 3])
    for parameter, reference in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, reference)


def test_a_plain_optimizer_on_several_devices_synchronizes_once(x: torch.Tensor):
    on_cpu, on_gpu = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="cuda"))
    optimizer, scaler = torch.optim.SGD([on_cpu, on_gpu], lr=0.5), mezzo.GradScaler(init_scale=2.0)
    for overflows in (False, True):
        scaler.scale(x.sum())
        on_cpu.grad, on_gpu.grad = (
            torch.full((3,), 2.0),
            torch.full((3,), math.inf if overflows else 2.0, device="cuda"),
        )
        scaler.unscale_(optimizer)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            result = scaler.step(optimizer)
            torch.cuda.set_sync_debug_mode("default")
        assert len([one for one in caught if "synchroniz" in str(one.message)]) <= 1
        assert result.skipped is overflows
        scaler.update()
    assert on_cpu.tolist() == on_gpu.tolist() == [0.5] * 3


def test_the_loss_scale_on_the_device_equals_the_one_on_the_host():
    generator = torch.Generator().manual_seed(0)
    for rule in (
        mezzo.ScaleRule(growth_interval=3),
        mezzo.ScaleRule(growth_interval=2, backoff_interval=2, growth_factor=1.7, min_scale=1.0),
    ):
        state = mezzo.ScaleState(64.0)
        scale = DeviceLossScale(state, torch.device("cuda"))
        for nonfinite in torch.randint(0, 2, (150,), generator=generator).tolist():
            scale.advance(torch.full((), float(nonfinite), device="cuda"), rule)
            state = next_state(state, rule, found_nonfinite=bool(nonfinite))
        assert scale.read() == state


@pytest.mark.skipif(not _launch.has_triton(torch.device("cuda")), reason="needs Triton")
def test_the_first_parameter_with_a_nonfinite_gradient_is_named(x: torch.Tensor):
    model = network()
    optimizer, scaler = FUSED["sgd"](model.parameters()), mezzo.GradScaler("cuda")
    scaler.register_parameter_names(model)
    scaler.scale(model(x).mean()).backward()
    model[2].weight.grad[0, 3] = math.nan
    result = scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.update()
    assert result.first_nonfinite == "2.weight"


def test_a_scale_collapse_warns_once_without_a_synchronization(x: torch.Tensor):
    model = network()
    optimizer, scaler = (
        FUSED["sgd"](model.parameters()),
        mezzo.GradScaler("cuda", collapse_patience=3),
    )
    scaler.register_parameter_names(model)
    iterate(scaler, model, optimizer, x)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with no_host_reads():
            for _ in range(12):
                iterate(scaler, model, optimizer, x * math.inf)
                time.sleep(0.01)
    messages = [str(one.message) for one in caught if "in a row" in str(one.message)]
    assert len(messages) == 1
    if _launch.has_triton(torch.device("cuda")):
        assert "'0.weight'" in messages[0]


def test_a_scheduler_follows_successful_steps_without_a_synchronization(x: torch.Tensor):
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
    for parameter, reference in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, reference)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_every_dtype_is_unscaled_and_checked(dtype: torch.dtype):
    for overflows in (False, True):
        parameter = nn.Parameter(torch.ones(70, 33, dtype=dtype, device="cuda"))
        optimizer, scaler = (
            torch.optim.SGD([parameter], lr=1.0),
            mezzo.GradScaler("cuda", init_scale=4.0),
        )
        scaler.scale(torch.zeros((), device="cuda"))
        parameter.grad = torch.full_like(parameter, 4.0)
        if overflows:
            parameter.grad[69, 32] = math.inf
        assert scaler.step(optimizer).skipped is overflows
        assert torch.equal(parameter.detach(), torch.full_like(parameter, float(overflows)))


def test_a_state_saved_on_a_gpu_loads_into_torchs_scaler(x: torch.Tensor):
    model = network()
    optimizer, scaler = (
        FUSED["adam"](model.parameters()),
        mezzo.GradScaler("cuda", growth_interval=3),
    )
    for _ in range(4):
        iterate(scaler, model, optimizer, x)
    loaded = torch.amp.GradScaler("cuda")
    loaded.load_state_dict(scaler.state_dict())
    assert (loaded.get_scale(), loaded._get_growth_tracker()) == (2.0**17, 1)
