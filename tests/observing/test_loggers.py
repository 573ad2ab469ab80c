"""Loggers of an observed run: what they get, when, and that a bad one does no harm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.observing import run as run_module
from mezzo.observing.loggers import LoggerWriter


class Recorder:
    """A logger that keeps what it gets."""

    def __init__(self):
        self.scalars, self.texts, self.histograms, self.closed = {}, [], {}, 0

    def log_scalars(self, step, values):
        self.scalars.setdefault(step, {}).update(values)

    def log_text(self, step, name, text):
        self.texts.append((step, name, text))

    def log_histogram(self, step, name, counts):
        self.histograms[step, name] = counts

    def close(self):
        self.closed += 1


class Failing:
    def __init__(self):
        self.calls = 0

    def log_scalars(self, step, values):
        self.calls += 1
        raise ConnectionError("no network")

    def log_text(self, step, name, text):
        pass

    def close(self):
        raise ConnectionError("still none")


def make_step(rate=0.1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return mezzo.TrainStep(
        model, F.mse_loss, optimizer, "O2", dtype="float16", clip_norm=1.0, **options
    )


def train(step, inputs):
    for value in inputs:
        step(torch.full((8, 4), value), torch.zeros(8, 2))


@pytest.fixture
def recorder():
    return Recorder()


def test_a_logger_gets_loss_scale_norm_rate_and_skips_of_every_step(recorder):
    step = make_step()
    with mezzo.observe(step, loggers=[recorder], numerics=False) as run:
        train(step, [1.0, 1.0, 1e30, 1.0])
    assert sorted(recorder.scalars) == [1, 2, 3, 4]
    for record in run.steps:
        logged = recorder.scalars[record.step]
        assert logged["step/scale"] == record.scale
        assert logged["step/rate"] == record.rate == 0.1
        assert logged["step/skipped"] == float(record.skipped)
        assert record.skipped or logged["step/loss"] == record.loss
        assert record.skipped or logged["step/norm"] == record.norm
    assert math.isnan(recorder.scalars[3]["step/loss"])


def test_skips_have_their_cause_and_parameter(recorder):
    step = make_step()
    with mezzo.observe(step, loggers=[recorder], numerics=False):
        train(step, [1.0, 1e30])
    (text,) = [text for _, name, text in recorder.texts if name == "skips"]
    assert text.startswith("the loss was nan")
    assert text.endswith("(first in 0.weight)")


def test_samples_arrive_by_layer_with_histograms(recorder):
    step = make_step()
    with mezzo.observe(step, loggers=[recorder], every=2):
        train(step, [1.0, 1.0])
    assert {"headroom of gradients/0.weight", "underflow of activations/1"} <= set(
        recorder.scalars[1]
    )
    assert "lost of updates/1.bias" in recorder.scalars[1]
    assert "gradient underflow/0.weight" in recorder.scalars[2]
    assert sum(recorder.histograms[1, "exponents of gradients/0.weight"].values()) == 16


def test_the_run_and_its_events_are_texts(recorder):
    step = make_step()
    with mezzo.observe(step, loggers=[recorder], numerics=False):
        train(step, [math.nan])
    texts = {name: text for _, name, text in recorder.texts}
    assert texts["run"].startswith("Sequential, O2, float16, cpu, torch ")
    assert texts["events"] == "LossNotFinite: loss=nan, skipped=True"


def test_loggers_are_closed_once_when_the_run_stops(recorder):
    step = make_step()
    run = mezzo.observe(step, loggers=recorder)
    assert recorder.closed == 0
    run.stop()
    run.stop()
    assert recorder.closed == 1


def test_the_rate_is_the_one_of_the_update_and_not_of_the_next(recorder):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = mezzo.TrainStep(model, F.mse_loss, optimizer, "O2", dtype="float16", scheduler=schedule)
    with mezzo.observe(step, loggers=[recorder], numerics=False):
        train(step, [1.0, 1.0, 1.0])
    assert [recorder.scalars[number]["step/rate"] for number in (1, 2, 3)] == [1.0, 0.5, 0.25]


def test_a_loop_of_the_user_is_logged_too(recorder):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with mezzo.observe(model, optimizer, scaler, loggers=[recorder], numerics=False):
        loss = F.mse_loss(model(torch.ones(8, 4)), torch.zeros(8, 2))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert recorder.scalars[1] == {
        "step/loss": loss.item(),
        "step/scale": 8.0,
        "step/rate": 0.25,
        "step/skipped": 0.0,
        "gradient underflow/weight": 0.0,
        "gradient underflow/bias": 0.0,
    }


def test_a_logger_that_raises_warns_once_and_training_and_others_go_on(recorder):
    step, failing = make_step(), Failing()
    with (
        pytest.warns(UserWarning, match="Failing raised ConnectionError: no network") as caught,
        mezzo.observe(step, loggers=[failing, recorder], numerics=False) as run,
    ):
        train(step, [1.0, 1.0, 1.0])
    assert len(caught) == 1
    assert len(run.steps) == 3
    # Four: the counts of the gradients too.
    assert failing.calls == 4
    assert sorted(recorder.scalars) == [1, 2, 3]
    assert recorder.closed == 1


def test_an_exception_of_the_block_closes_the_loggers_and_is_raised(recorder):
    step = make_step()
    with pytest.raises(KeyError, match="mine"), mezzo.observe(step, loggers=[recorder]):
        raise KeyError("mine")
    assert recorder.closed == 1


def test_ranks_other_than_0_write_no_logger(recorder, monkeypatch):
    monkeypatch.setattr(run_module, "ranks", lambda: (1, 2))
    step = make_step()
    with mezzo.observe(step, loggers=[recorder]):
        train(step, [1.0])
    assert (recorder.scalars, recorder.texts, recorder.closed) == ({}, [], 0)


def test_long_runs_log_the_steps_that_a_log_has(recorder):
    writer = LoggerWriter([recorder])
    fields = {"time": 0.0, "loss": 1.0, "scale": 1.0, "norm": None, "parameter": None}
    for number in (999, 1001, 1010, 10_010, 10_011, 10_100):
        writer.write_steps([{"step": number, "skipped": number == 10_011, **fields}])
    assert sorted(recorder.scalars) == [999, 1010, 10_011, 10_100]
    assert writer.step_interval(5000, together=2048) == 100


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        ("run.csv", r"loggers='run.csv' has no log_scalars\(\)"),
        ([object()], r"has no log_scalars\(\)\. Pass loggers such as mezzo\.CSVLogger"),
        (3, r"loggers=3 has no log_scalars"),
        ([Recorder], "is a class"),
    ],
)
def test_what_is_no_logger_is_refused_and_nothing_is_attached(loggers, message):
    step = make_step()
    with pytest.raises(mezzo.PolicyError, match=message):
        mezzo.observe(step, loggers=loggers)
    mezzo.observe(step).stop()


def test_a_logger_without_histograms_gets_the_rest():
    class Few:
        scalars = 0

        def log_scalars(self, step, values):
            self.scalars += 1

        def log_text(self, step, name, text):
            pass

        def close(self):
            pass

    few, step = Few(), make_step()
    with mezzo.observe(step, loggers=few):
        train(step, [1.0])
    assert few.scalars > 1
    assert isinstance(few, mezzo.Logger)
