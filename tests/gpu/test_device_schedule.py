"""Learning rate schedules on a CUDA device.

torch's optimizers read the rates there, steps do not synchronize, and reads agree with plain torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.schedules import (
    READS,
    SCHEDULERS,
    Plain,
    Scaled,
    Stepped,
    assert_read_alike,
    assert_trained_alike,
    drive,
)
from torch.optim import lr_scheduler

from mezzo.scaling.device_schedule import DeviceSchedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Build = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.fixture
def no_host_reads() -> Iterator[Callable[[bool], None]]:
    def switch(on: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield switch
    switch(False)


def parameters() -> list[torch.Tensor]:
    tensors = [
        torch.ones(5, device="cuda", requires_grad=True),
        torch.ones(3, 4, device="cuda", requires_grad=True),
    ]
    for parameter in tensors:
        parameter.grad = torch.full_like(parameter, 0.5)
    return tensors


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_a_plain_loop_and_does_not_synchronize(
    name: str, no_host_reads: Callable[[bool], None]
) -> None:
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
        with schedule.values_applied(good):
            optimizer.step()
        good += one
    no_host_reads(False)
    for got, want in zip(scheduled, plain, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["lr"] == 0.1
    schedule.reconcile(int(good))
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]


def test_a_busy_device_uses_the_rate_of_its_own_step_count(
    no_host_reads: Callable[[bool], None],
) -> None:
    seen: list[Any] = []
    optimizer = torch.optim.SGD(parameters(), lr=1.0, fused=True)
    schedule = DeviceSchedule(
        optimizer, lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 + epoch), "cuda", length=8
    )
    good = torch.zeros((), dtype=torch.int32, device="cuda")
    skipped = torch.tensor([step % 3 == 1 for step in range(120)], device="cuda")
    no_host_reads(True)
    for step in range(120):
        torch.cuda._sleep(1_000_000)
        with schedule.values_applied(good):
            seen.append(optimizer.param_groups[0]["lr"].clone())
        good += ~skipped[step]
    no_host_reads(False)
    expected, rate = [], 1.0
    for step in range(120):
        expected.append(rate)
        rate += step % 3 != 1
    assert torch.stack(seen).tolist() == expected


class Fused(Scaled):
    """Uses torch's fused kernel, without momentum.

    torch does not initialize momentum if the first step is skipped.
    """

    momentum = 0.0

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1, momentum=self.momentum, fused=True)


class PlainWithoutMomentum(Plain):
    momentum = 0.0


@pytest.mark.parametrize(
    "name", [name for name in SCHEDULERS if name != "OneCycleLR with momentum"]
)
def test_any_sequence_through_a_fused_optimizer_agrees_with_plain_torch(name: str) -> None:
    drive(Fused(SCHEDULERS[name], "cuda"), PlainWithoutMomentum(SCHEDULERS[name]), 0, 60)


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_sequence_through_a_training_step_agrees_with_plain_torch(
    name: str, capture: bool
) -> None:
    drive(Stepped(SCHEDULERS[name], "cuda", capture=capture), Plain(SCHEDULERS[name]), 1, 60)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_captured_steps_do_not_synchronize_before_or_after_rates_are_read_and_set(
    name: str, no_host_reads: Callable[[bool], None]
) -> None:
    run, plain = Stepped(SCHEDULERS[name], "cuda", capture=True), Plain(SCHEDULERS[name])
    for _ in range(8):
        run.step(bad=False)
        plain.step(bad=False)
    assert run.train.captured
    for read in READS:
        no_host_reads(True)
        for bad in (False, True, False, False):
            run.step(bad=bad)
        no_host_reads(False)
        for bad in (False, True, False, False):
            plain.step(bad=bad)
        assert_read_alike(run, plain, read)
        for one in (run, plain):
            for group in one.optimizer.param_groups:
                group["lr"] *= 0.7
    assert run.train.captured
    assert_trained_alike(run, plain)


def test_only_the_first_of_several_reads_synchronizes() -> None:
    run = Stepped(SCHEDULERS["ChainedScheduler"], "cuda", capture=True)
    for _ in range(8):
        run.step(bad=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for read in (
                "scheduler.get_last_lr",
                "param_groups",
                "optimizer.state_dict",
                "scheduler.state_dict",
            ):
                READS[read](run)
            run.optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing CUDA operation" in str(one.message) for one in caught) == 1
