"""The interval between samples: what the user passed, or what 1 % of the time of a run allows."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import mezzo
from mezzo._errors import PolicyError
from mezzo.observing.numerics import NumericsCollector
from mezzo.observing.sample_interval import DEFAULT_INTERVAL, SampleInterval


def intervals(passed, *, step, sample, samples):
    """Return the intervals that are chosen in a run of steps and samples of these seconds."""
    interval, now, number, chosen = SampleInterval(passed), 0.0, 1, []
    for _ in range(samples):
        interval.begin(number, now)
        now += step + sample
        interval.end(number, now)
        chosen.append(interval.choose())
        now += step * (chosen[-1] - 1)
        number += chosen[-1]
    return chosen


def test_a_passed_interval_stays():
    assert intervals(7, step=1e-4, sample=1.0, samples=4) == [7, 7, 7, 7]


def test_samples_of_short_steps_take_one_percent_of_the_time():
    chosen = intervals(None, step=1e-4, sample=5e-3, samples=5)
    assert chosen[0] == DEFAULT_INTERVAL
    assert chosen[1:] == [5000] * 4


def test_long_steps_are_sampled_every_hundred():
    assert intervals(None, step=0.02, sample=0.015, samples=4) == [DEFAULT_INTERVAL] * 4


def test_time_that_reading_takes_counts():
    interval = SampleInterval(None)
    for number, began in ((1, 0.0), (101, 1.0)):
        interval.begin(number, began)
        interval.end(number, began + 0.01)
        interval.spend(0.5)
        interval.choose()
    interval.begin(201, 2.0)
    interval.end(201, 2.01)
    interval.spend(0.1)
    # 0.1 s, and steps of 10 ms.
    assert interval.choose() == pytest.approx(1000, rel=0.1)


def made_step():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, "O2", dtype="bfloat16")


def slow(method):
    """Return a method that waits before, as on a busy machine."""

    def run(*args):
        time.sleep(0.2)
        return method(*args)

    return run


@pytest.mark.parametrize("every", [None, 50])
def test_a_run_with_expensive_samples_takes_fewer_by_default(monkeypatch, every):
    monkeypatch.setattr(NumericsCollector, "stop", slow(NumericsCollector.stop))
    step = made_step()
    with mezzo.observe(step, every=every) as run:
        for _ in range(102):
            step(torch.ones(8, 4), torch.zeros(8, 2))
    assert run.every == 50 if every else run.every > 2 * DEFAULT_INTERVAL
    assert run.numerics["activations"]


@pytest.mark.parametrize(("every", "waits"), [(None, 2), (100, 0)])
def test_steps_on_a_device_are_timed_when_it_has_done_them(monkeypatch, every, waits):
    """The host only launches replays: a hundred of them may wait for the device."""
    waited = []
    monkeypatch.setattr("mezzo.observing.run.needs_sync", lambda _: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(SampleInterval, "choose", lambda _: 100)
    step = made_step()
    with mezzo.observe(step, every=every):
        for _ in range(102):
            step(torch.ones(8, 4), torch.zeros(8, 2))
    assert len(waited) == waits


def test_several_processes_sample_the_same_steps(monkeypatch):
    monkeypatch.setattr("mezzo.observing.run.ranks", lambda: (0, 2))
    monkeypatch.setattr(NumericsCollector, "stop", slow(NumericsCollector.stop))
    step = made_step()
    with mezzo.observe(step) as run:
        for _ in range(102):
            step(torch.ones(8, 4), torch.zeros(8, 2))
    assert run.every == DEFAULT_INTERVAL


def test_an_interval_that_is_no_number_of_steps_is_refused():
    with pytest.raises(PolicyError, match="every=0 is not a positive integer"):
        mezzo.observe(made_step(), every=0)
