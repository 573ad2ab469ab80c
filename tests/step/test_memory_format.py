"""channels_last: on request, by measurement, and where it is left alone."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from support.step_models import Made, batches, in_steps
from torch import nn

import mezzo
from mezzo import _events
from mezzo.prepare.rng_state import capture_host_rng_state, host_rng_has_moved
from mezzo.step import memory_format
from mezzo.step.cuda_graph import HostDrawsFound
from mezzo.step.memory_format import LayoutChoice
from mezzo.step.options import Layout


def is_channels_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last)


def test_modules_and_tensors_are_converted():
    conv = mezzo.channels_last(nn.Conv2d(3, 8, 3))
    assert is_channels_last(conv.weight)
    assert is_channels_last(mezzo.channels_last(torch.ones(2, 3, 4, 4)))


def test_a_tensor_that_is_not_a_batch_of_images_is_refused():
    with pytest.raises(mezzo.PolicyError, match=r"4 dimensions, got shape \(2, 3\)"):
        mezzo.channels_last(torch.ones(2, 3))


def test_a_decorated_model_is_refused():
    made = Made("cnn")
    mezzo.decorate(made.model, made.optimizer, "O2", dtype="bfloat16")
    with pytest.raises(mezzo.PolicyError, match="before decorate"):
        mezzo.channels_last(made.model)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_in_channels_last_gives_the_same_losses(level):
    last, contiguous = (
        in_steps(Made("cnn"), batches("cnn", 10), level, "bfloat16", channels_last=channels_last)[0]
        for channels_last in (True, False)
    )
    assert torch.allclose(torch.tensor(last), torch.tensor(contiguous), rtol=3e-2, atol=1e-2)


def test_parameters_are_converted_before_they_are_decorated():
    made = Made("cnn")
    _, step = in_steps(made, batches("cnn", 2), "O2", "bfloat16", channels_last=True)
    assert is_channels_last(made.model.conv.weight)
    assert step.channels_last_reason == "channels_last=True"


@pytest.mark.parametrize(
    ("name", "reason"), [("mlp", "no Conv2d"), ("cnn", "no tensor cores on cpu")]
)
def test_auto_gives_the_reason_why_a_model_is_left_alone(name, reason):
    made = Made(name)
    with _events.listen() as events:
        _, step = in_steps(made, batches(name, 1), "O1", "bfloat16", channels_last="auto")
    assert reason in step.channels_last_reason
    choices = [event for event in events if isinstance(event, _events.LayoutChosen)]
    assert [choice.channels_last for choice in choices] == [False]


@pytest.mark.parametrize("faster", [False, True])
def test_a_measurement_at_the_first_call_decides_and_training_goes_on(faster, monkeypatch):
    unknown = LayoutChoice(channels_last=None, reason="not measured yet")
    monkeypatch.setattr(memory_format, "decide", lambda *_: unknown)
    measured = []

    def measure(model, run, *, captured):
        state = torch.get_rng_state()
        measured.extend(run(copy.deepcopy(model), last).item() for last in (False, True))
        torch.set_rng_state(state)
        return LayoutChoice(channels_last=faster, reason="measured")

    monkeypatch.setattr(memory_format, "measure", measure)
    made, other = Made("cnn"), Made("cnn")
    losses, step = in_steps(
        made, batches("cnn", 5), "O2", "float16", accumulate=2, channels_last="auto"
    )
    assert len(measured) == 2
    assert step.channels_last_reason == "measured"
    assert is_channels_last(made.model.conv.weight) is faster
    assert (step.position, step.state_dict()["updates"]) == (1, 2)
    monkeypatch.undo()
    expected, _ = in_steps(
        other, batches("cnn", 5), "O2", "float16", accumulate=2, channels_last=faster
    )
    assert losses == expected


def test_a_model_that_draws_on_the_host_is_timed_eagerly_and_draws_as_without_it(monkeypatch):
    class Capturer:
        def run_on_capture_stream(self, run):
            run()

        def capture(self, run, values):
            raise HostDrawsFound

    class Event:
        def __init__(self, **_):
            pass

        def record(self):
            pass

        synchronize = record

        def elapsed_time(self, _):
            return 1.0

    monkeypatch.setattr(memory_format.GraphCapturer, "on", lambda _: Capturer())
    monkeypatch.setattr(memory_format, "find_host_syncs", lambda: nullcontext([]))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    formats = []

    def run(model, last):
        formats.append(last)
        return model(torch.rand(2, 3, 4, 4)).sum() * random.random()

    model, before = nn.Conv2d(3, 2, 3), capture_host_rng_state()
    assert not memory_format.measure(model, run, captured=True).channels_last
    assert formats == [False] * 8 + [True] * 8
    assert not host_rng_has_moved(before)


def test_a_channels_last_model_stays_so():
    model = mezzo.channels_last(nn.Sequential(nn.Conv2d(3, 8, 3)))
    assert memory_format.decide(model, Layout.AUTO).channels_last
