"""Schedules on a CUDA device: what torch's optimizers read there, and that nobody waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from mezzo.scaling.schedule import DeviceSchedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Build = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adam, capturable": lambda p: torch.optim.Adam(p, lr=0.1, capturable=True),
    "AdamW, capturable": lambda p: torch.optim.AdamW(p, lr=0.1, capturable=True, foreach=True),
}


@pytest.fixture
def no_host_reads() -> Iterator[Callable[[bool], None]]:
    def switch(on: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield switch
    switch(False)


def parameters() -> list[torch.Tensor]:
    made = [torch.ones(5, device="cuda", requires_grad=True), torch.ones(3, 4, device="cuda", requires_grad=True)]
    for parameter in made:
        parameter.grad = torch.full_like(parameter, 0.5)
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_a_plain_loop_and_waits_for_nothing(name: str, no_host_reads: Callable[[bool], None]) -> None:
    plain, scheduled = parameters(), parameters()
    reference, optimizer = OPTIMIZERS[name](plain), OPTIMIZERS[name](scheduled)
    schedulers = [lr_scheduler.CosineAnnealingLR(one, 50, 1e-3) for one in (reference, optimizer)]
    schedule = DeviceSchedule(optimizer, schedulers[1], "cuda", length=16)
    for _ in range(100):
        reference.step()
        schedulers[0].step()
    good = torch.zeros((), dtype=torch.int64, device="cuda")
    one = torch.ones_like(good)
    for step in range(100):
        no_host_reads(step > 0)
        with schedule.applied(good):
            optimizer.step()
        good += one
    no_host_reads(False)
    for got, want in zip(scheduled, plain, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["lr"] == 0.1
    schedule.reconcile(int(good))
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]


def test_a_busy_device_uses_the_rate_of_its_own_count(no_host_reads: Callable[[bool], None]) -> None:
    seen: list[Any] = []
    optimizer = torch.optim.SGD(parameters(), lr=1.0, fused=True)
    schedule = DeviceSchedule(optimizer, lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 + epoch), "cuda", length=8)
    good = torch.zeros((), dtype=torch.int32, device="cuda")
    skipped = torch.tensor([step % 3 == 1 for step in range(120)], device="cuda")
    no_host_reads(True)
    for step in range(120):
        torch.cuda._sleep(1_000_000)
        with schedule.applied(good):
            seen.append(optimizer.param_groups[0]["lr"].clone())
        good += ~skipped[step]
    no_host_reads(False)
    expected, rate = [], 1.0
    for step in range(120):
        expected.append(rate)
        rate += step % 3 != 1
    assert torch.stack(seen).tolist() == expected
