"""Schedules that advance with the device's count of successful steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from mezzo import _launch
from mezzo._errors import ScalerError, UnsupportedError
from mezzo.scaling import device_schedule as module
from mezzo.scaling.device_schedule import DeviceSchedule
from mezzo.scaling.schedule_sync import groups_of, stop_sync

Make = Callable[[torch.optim.Optimizer], LRScheduler]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda e: 0.97**e, lambda e: 1.0 / (1 + e)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 7, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 9, 10, 50], 0.7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.99),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 12),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 40, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 31, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 11, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.2, 0.4], total_steps=100),
    "OneCycleLR, three phases": lambda o: lr_scheduler.OneCycleLR(
        o, 0.2, total_steps=100, three_phase=True, anneal_strategy="linear"
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=9, mode="triangular2"),
    "CyclicLR, exponential": lambda o: lr_scheduler.CyclicLR(
        o, 0.001, 0.1, step_size_up=9, mode="exp_range", gamma=0.99
    ),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 25),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 10), lr_scheduler.CosineAnnealingLR(o, 60)], [10]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 10), lr_scheduler.ExponentialLR(o, 0.98)], o
    ),
}

STEPS = 90


def sgd(**settings: Any) -> torch.optim.Optimizer:
    parameters = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(
        [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05}],
        **{"lr": 0.1, "momentum": 0.9} | settings,
    )


def adam() -> torch.optim.Optimizer:
    parameters = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.Adam(
        [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05, "betas": (0.8, 0.99)}],
        lr=0.1,
    )


def numbers(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        (group["lr"], group.get("momentum"), group.get("betas")) for group in optimizer.param_groups
    ]


def plain_history(
    make: Make, build: Callable[[], torch.optim.Optimizer], steps: int = STEPS
) -> list[Any]:
    """Return the values of each step in a plain loop."""
    optimizer = build()
    scheduler = make(optimizer)
    used = []
    for _ in range(steps):
        used.append(numbers(optimizer))
        optimizer.step()
        scheduler.step()
    return used


class SlowCopy:
    """An asynchronous copy that arrives after a few calls of `arrived()`."""

    delay = 3
    count = 0

    def __init__(self, number: torch.Tensor) -> None:
        self._values = number.tolist()
        self._left = type(self).delay
        type(self).count += 1

    def arrived(self) -> bool:
        self._left -= 1
        return self._left < 0

    def values(self) -> list[float]:
        return self._values


@pytest.fixture
def new_schedule(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DeviceSchedule]:
    """Return a constructor of schedules that treat the CPU as a device, for any optimizer."""
    monkeypatch.setattr(_launch, "needs_sync", lambda _: True)
    monkeypatch.setattr(_launch, "AsyncCopy", SlowCopy)
    monkeypatch.setattr(module, "_check_reads_on_device", lambda *_: None)
    monkeypatch.setattr(SlowCopy, "delay", 3)
    monkeypatch.setattr(SlowCopy, "count", 0)
    return lambda *arguments, **settings: DeviceSchedule(*arguments, "cpu", **settings)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_values_equal_those_of_a_plain_loop_rounded_to_float32(
    name: str, new_schedule: Callable[..., DeviceSchedule]
) -> None:
    used = plain_history(SCHEDULERS[name], adam)
    optimizer = adam()
    schedule = new_schedule(optimizer, SCHEDULERS[name](optimizer), length=8)
    generator = torch.Generator().manual_seed(torch.Generator().seed())
    good, cycled = torch.tensor(0), "betas" in schedule._keys
    while good < STEPS:
        with schedule.values_applied(good):
            for group, (rate, _, betas) in zip(
                optimizer.param_groups, used[int(good)], strict=True
            ):
                assert group["lr"].shape == ()
                assert group["lr"].item() == torch.tensor(rate).item()
                assert (
                    not cycled
                    or [beta.item() for beta in group["betas"]] == torch.tensor(betas).tolist()
                )
        good = good + int(torch.rand((), generator=generator) < 0.8)
    assert SlowCopy.count > 2


def test_a_host_far_ahead_gets_a_longer_table_and_never_synchronizes(
    monkeypatch: pytest.MonkeyPatch, new_schedule: Callable[..., DeviceSchedule]
) -> None:
    monkeypatch.setattr(SlowCopy, "delay", 10**9)
    optimizer = sgd()
    schedule = new_schedule(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.99), length=4)
    for good in range(200):
        with schedule.values_applied(torch.tensor(good)):
            assert optimizer.param_groups[0]["lr"].item() == pytest.approx(
                0.1 * 0.99**good, rel=1e-6
            )
    assert SlowCopy.count == 1
    assert len(schedule._table) <= 4 * 200


def test_the_table_keeps_its_address_when_it_is_refilled(
    new_schedule: Callable[..., DeviceSchedule],
) -> None:
    optimizer = sgd()
    schedule = new_schedule(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.99), length=64)
    addresses = set()
    for good in range(500):
        with schedule.values_applied(torch.tensor(good)):
            addresses.add((schedule._table.data_ptr(), schedule._base.data_ptr()))
    assert len(addresses) == 1


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_does_not_change_scheduler_and_optimizer(name: str) -> None:
    optimizer = adam()
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.step()
    scheduler.step()
    state, groups = copy.deepcopy(scheduler.state_dict()), copy.deepcopy(optimizer.state_dict())
    called = optimizer._opt_called
    schedule = DeviceSchedule(optimizer, scheduler, "cpu")
    with schedule.values_applied(torch.tensor(50)):
        pass
    assert str(scheduler.state_dict()) == str(state)
    assert str(optimizer.state_dict()) == str(groups)
    assert optimizer._opt_called is called
    assert all(isinstance(group["lr"], float) for group in optimizer.param_groups)


def test_rates_are_floats_again_when_the_step_raises() -> None:
    optimizer = sgd()
    schedule = DeviceSchedule(optimizer, lr_scheduler.StepLR(optimizer, 1), "cpu")
    with pytest.raises(KeyError), schedule.values_applied(torch.tensor(3)):
        raise KeyError
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_reconcile_steps_the_scheduler_once_per_successful_step(name: str) -> None:
    plain = adam()
    expected = SCHEDULERS[name](plain)
    optimizer = adam()
    scheduler = SCHEDULERS[name](optimizer)
    schedule = DeviceSchedule(optimizer, scheduler, "cpu", length=8)
    plain.step()
    with schedule.values_applied(torch.tensor(0)):
        optimizer.step()
    for _ in range(33):
        expected.step()
    schedule.reconcile(20)
    schedule.reconcile(33)
    assert scheduler.get_last_lr() == expected.get_last_lr()
    assert numbers(optimizer) == numbers(plain)
    assert str({**scheduler.state_dict(), "lr_lambdas": 0}) == str(
        {**expected.state_dict(), "lr_lambdas": 0}
    )


def test_scheduler_and_groups_are_updated_when_either_is_read() -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = DeviceSchedule(optimizer, scheduler, "cpu")
    good = torch.tensor(0)
    schedule.reconcile_when_read(lambda: int(good))
    for read in (
        scheduler.get_last_lr,
        scheduler.state_dict,
        lambda: scheduler.last_epoch,
        lambda: copy.copy(scheduler),
        lambda: optimizer.param_groups,
    ):
        with schedule.values_applied(good):
            optimizer.step()
        good += 1
        assert groups_of(optimizer)[0]["lr"] == 0.1 * 0.5 ** (int(good) - 1)
        read()
        assert groups_of(optimizer)[0]["lr"] == 0.1 * 0.5 ** int(good)
    assert scheduler.state_dict()["last_epoch"] == 5
    assert set(scheduler.state_dict()) == set(lr_scheduler.ExponentialLR(sgd(), 0.5).state_dict())


def test_a_synced_scheduler_keeps_its_type_and_its_copies_are_plain() -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    schedule = DeviceSchedule(optimizer, scheduler, "cpu")
    schedule.reconcile_when_read(lambda: 4)
    assert isinstance(scheduler, lr_scheduler.StepLR)
    assert type(scheduler).__name__ == "StepLR"
    assert type(pickle.loads(pickle.dumps(scheduler))) is lr_scheduler.StepLR
    assert type(copy.deepcopy(scheduler)) is lr_scheduler.StepLR
    with pytest.raises(ScalerError, match=r"Remove scheduler.step\(\)"):
        scheduler.step()
    with schedule.values_applied(torch.tensor(3)):
        optimizer.step()
    stop_sync(optimizer)
    assert type(scheduler) is lr_scheduler.StepLR
    assert scheduler.last_epoch == 4
    scheduler.step()


def test_a_synced_scheduler_without_last_epoch_has_none() -> None:
    optimizer = sgd()
    scheduler = SCHEDULERS["ChainedScheduler"](optimizer)
    DeviceSchedule(optimizer, scheduler, "cpu").reconcile_when_read(lambda: 0)
    assert not hasattr(scheduler, "last_epoch")


def test_a_scheduled_step_reads_nothing_from_the_device(
    new_schedule: Callable[..., DeviceSchedule], host_reads: Callable[[], Any]
) -> None:
    optimizer = sgd(fused=True)
    schedule = new_schedule(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9), length=8)
    good = torch.tensor(0)
    SlowCopy.delay = 0
    with host_reads() as reads:
        for _ in range(30):
            with schedule.values_applied(good):
                pass
            good += 1
    assert reads.count == 0
    assert SlowCopy.count > 3


def test_a_second_schedule_continues_after_a_first() -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    first = DeviceSchedule(optimizer, scheduler, "cpu")
    first.reconcile_when_read(lambda: 2)
    with first.values_applied(torch.tensor(1)):
        optimizer.step()
    stop_sync(optimizer)
    second = DeviceSchedule(optimizer, scheduler, "cpu", good=10)
    second.reconcile_when_read(lambda: 11)
    with second.values_applied(torch.tensor(10)):
        optimizer.step()
    assert scheduler.get_last_lr()[0] == 0.1 * 0.5**3


def test_reading_inside_a_step_does_not_update() -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = DeviceSchedule(optimizer, scheduler, "cpu")
    schedule.reconcile_when_read(lambda: 3)
    with schedule.values_applied(torch.tensor(2)):
        assert scheduler.get_last_lr()[0] == 0.1
        assert optimizer.param_groups[0]["lr"] == torch.tensor(0.1 * 0.5**2)
    assert scheduler.get_last_lr()[0] == 0.1 * 0.5**3


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in groups_of(optimizer)]


@pytest.mark.parametrize("read", ["groups", "rates", "kept"])
def test_the_schedule_continues_from_a_rate_that_the_user_set(read: str) -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = DeviceSchedule(optimizer, scheduler, "cpu")
    schedule.reconcile_when_read(lambda: 4)
    kept = optimizer.param_groups
    with schedule.values_applied(torch.tensor(3)):
        pass
    # A kept group is not up to date; the pending scheduler steps come before the new rate anyway.
    (kept if read == "kept" else optimizer.param_groups)[0]["lr"] = 8.0
    if read == "rates":
        assert scheduler.get_last_lr() == [0.1 * 0.5**4, 0.05 * 0.5**4]
    for good in range(4, 7):
        with schedule.values_applied(torch.tensor(good)):
            assert (
                rates(optimizer)
                == torch.tensor([8.0 * 0.5 ** (good - 4), 0.05 * 0.5**good]).tolist()
            )
    schedule.reconcile(6)
    assert scheduler.last_epoch == 6
    assert scheduler.get_last_lr()[0] == 2.0


@pytest.mark.parametrize("reads_first", [False, True])
def test_a_rate_set_in_a_kept_group_is_not_changed_by_earlier_steps(reads_first: bool) -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    group = optimizer.param_groups[0]
    schedule = DeviceSchedule(optimizer, scheduler, "cpu")
    schedule.reconcile_when_read(lambda: 1)
    with schedule.values_applied(torch.tensor(0)):
        optimizer.step()
    group["lr"] = 0.02
    if reads_first:
        assert scheduler.get_last_lr() == [0.05, 0.025]
    assert [one["lr"] for one in optimizer.param_groups] == [0.02, 0.025]
    with schedule.values_applied(torch.tensor(1)):
        assert rates(optimizer) == torch.tensor([0.02, 0.025]).tolist()


def test_a_rate_set_after_a_read_needs_no_read_at_the_next_step(
    new_schedule: Callable[..., DeviceSchedule], host_reads: Callable[[], Any]
) -> None:
    optimizer = sgd(fused=True)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = new_schedule(optimizer, scheduler)
    good = torch.tensor(1)
    schedule.reconcile_when_read(lambda: int(good))
    with schedule.values_applied(torch.tensor(0)):
        pass
    with host_reads() as reads:
        for group in optimizer.param_groups:
            group["lr"] *= 0.1
        assert (scheduler.get_last_lr()[0], optimizer.state_dict()["param_groups"][0]["lr"]) == (
            0.05,
            0.05 * 0.1,
        )
    assert reads.count == 1
    with host_reads() as reads, schedule.values_applied(good):
        pass
    assert reads.count == 0


def test_a_rate_set_between_a_step_and_a_capture_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = sgd()
    schedule = DeviceSchedule(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), "cpu")
    with schedule.values_applied(torch.tensor(0)):
        pass
    optimizer.param_groups[0]["lr"] = 8.0
    with monkeypatch.context() as patched:
        patched.setattr(_launch, "is_capturing", lambda _: True)
        with schedule.values_applied(torch.tensor(0)):
            pass
    with schedule.values_applied(torch.tensor(0)):
        assert rates(optimizer)[0] == 8.0


@pytest.mark.parametrize("order", [("scheduler", "optimizer"), ("optimizer", "scheduler")])
def test_the_schedule_continues_from_a_loaded_state(order: tuple[str, str]) -> None:
    optimizer = sgd()
    parts = {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "optimizer": optimizer}
    saved = {name: copy.deepcopy(one.state_dict()) for name, one in parts.items()}
    schedule = DeviceSchedule(optimizer, parts["scheduler"], "cpu")
    schedule.reconcile_when_read(lambda: 8)
    with schedule.values_applied(torch.tensor(7)):
        pass
    for name in order:
        parts[name].load_state_dict(saved[name])
    assert (parts["scheduler"].get_last_lr(), optimizer.param_groups[0]["lr"]) == ([0.1, 0.05], 0.1)
    for good in (8, 9):
        with schedule.values_applied(torch.tensor(good)):
            assert rates(optimizer)[0] == torch.tensor(0.1 * 0.5 ** (good - 8)).item()


def test_the_schedule_continues_from_a_changed_attribute() -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = DeviceSchedule(optimizer, scheduler, "cpu")
    schedule.reconcile_when_read(lambda: 2)
    with schedule.values_applied(torch.tensor(1)):
        pass
    scheduler.gamma = 0.1
    with schedule.values_applied(torch.tensor(3)):
        assert rates(optimizer)[0] == torch.tensor(0.1 * 0.5**2 * 0.1).item()


def test_an_added_group_is_scheduled_from_then_on() -> None:
    optimizer = sgd()
    schedule = DeviceSchedule(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), "cpu")
    schedule.reconcile_when_read(lambda: 1)
    with schedule.values_applied(torch.tensor(0)):
        optimizer.step()
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 8.0})
    for good in (1, 2):
        with schedule.values_applied(torch.tensor(good)):
            assert (
                rates(optimizer)
                == torch.tensor(
                    [0.1 * 0.5**good, 0.05 * 0.5**good, 8.0 * 0.5 ** (good - 1)]
                ).tolist()
            )


def test_the_end_of_a_schedule_raises_once_when_it_is_read() -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=5)
    schedule = DeviceSchedule(optimizer, scheduler, "cpu")
    count = 5
    schedule.reconcile_when_read(lambda: count)
    with schedule.values_applied(torch.tensor(4)):
        optimizer.step()
    last = scheduler.get_last_lr()
    with schedule.values_applied(torch.tensor(5)):
        optimizer.step()
    count = 6
    with pytest.raises(ValueError, match="number of total steps"):
        optimizer.state_dict()
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == last


def test_the_end_of_a_schedule_raises_late_on_a_device_without_a_sync(
    new_schedule: Callable[..., DeviceSchedule],
) -> None:
    optimizer = sgd()
    schedule = new_schedule(
        optimizer, lr_scheduler.LambdaLR(optimizer, lambda epoch: [1.0, 0.5, 0.25][epoch]), length=8
    )
    with pytest.raises(IndexError):  # noqa: PT012 - any of the steps may raise
        for good in range(40):
            with schedule.values_applied(torch.tensor(good)):
                assert (
                    optimizer.param_groups[0]["lr"].item()
                    == torch.tensor(0.1 * [1.0, 0.5, 0.25][min(good, 2)]).item()
                )
    assert 3 <= good < 12


class OwnStep(lr_scheduler.StepLR):
    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)


class WeightDecay(lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float | torch.Tensor]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.last_epoch * 0.1
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lr_scheduler.ReduceLROnPlateau, "metric"),
        (lambda o: OwnStep(o, 3), "step\\(\\) of its own"),
        (WeightDecay, "weight_decay"),
        (lambda _: lr_scheduler.StepLR(sgd(), 3), "another optimizer"),
        (lambda _: object(), "not one of"),
    ],
)
def test_a_scheduler_that_cannot_run_ahead_raises(make: Callable[[Any], Any], reason: str) -> None:
    optimizer = sgd()
    with pytest.raises(UnsupportedError, match=reason):
        DeviceSchedule(optimizer, make(optimizer), "cpu")


def test_a_rate_that_is_a_tensor_raises() -> None:
    optimizer = sgd(lr=torch.tensor(0.1))
    with pytest.raises(UnsupportedError, match="is a tensor"):
        DeviceSchedule(optimizer, lr_scheduler.StepLR(optimizer, 3), "cpu")


def test_a_table_has_at_least_one_row() -> None:
    optimizer = sgd()
    with pytest.raises(UnsupportedError, match="length=0"):
        DeviceSchedule(optimizer, lr_scheduler.StepLR(optimizer, 3), "cpu", length=0)


@pytest.mark.parametrize(
    "make",
    [sgd, lambda: torch.optim.Adam([torch.zeros(1, requires_grad=True)], capturable=True)],
    ids=["plain", "capturable"],
)
def test_an_optimizer_that_is_not_fused_raises_on_a_device(
    make: Callable[[], torch.optim.Optimizer],
) -> None:
    optimizer = make()
    with pytest.raises(UnsupportedError, match="fused=True"):
        DeviceSchedule(optimizer, lr_scheduler.StepLR(optimizer, 3), "meta")


def test_cycled_momentum_raises_on_a_device() -> None:
    optimizer = sgd(fused=True)
    DeviceSchedule(
        optimizer, lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False), "meta"
    )
    with pytest.raises(UnsupportedError, match="cycle_momentum=False"):
        DeviceSchedule(optimizer, lr_scheduler.CyclicLR(optimizer, 0.1, 0.2), "meta")


def test_an_optimizer_that_skips_on_the_device_may_read_rates_there() -> None:
    class SkipsOnDevice(torch.optim.Optimizer):
        _step_supports_amp_scaling = True

    optimizer = SkipsOnDevice([torch.zeros(1, requires_grad=True)], {"lr": 0.1, "momentum": 0.9})
    schedule = DeviceSchedule(optimizer, lr_scheduler.CyclicLR(optimizer, 0.1, 0.2), "meta")
    with schedule.values_applied(torch.tensor(0, device="meta")):
        assert (
            optimizer.param_groups[0]["lr"].device.type
            == optimizer.param_groups[0]["momentum"].device.type
            == "meta"
        )
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.9)


def test_a_function_object_of_the_scheduler_is_copied() -> None:
    class Counting:
        calls = 0

        def __call__(self, epoch: int) -> float:
            self.calls += 1
            return 0.9**epoch

    optimizer, rate = sgd(), Counting()
    scheduler = lr_scheduler.LambdaLR(optimizer, rate)
    before = rate.calls
    DeviceSchedule(optimizer, scheduler, "cpu")
    assert rate.calls == before
