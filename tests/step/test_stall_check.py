"""Captured steps that skip update after update: compared with the eager step once. Programs only pretend here; `tests/gpu/test_step.py` shows it on a device."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch
from support.step_models import INF, Made, batches, boosted, same, weights

import mezzo
from mezzo import _events
from mezzo.scaling import capture
from mezzo.step import capture as module
from mezzo.step.capture import CaptureRunner, EagerRunner
from mezzo.step.components import Capture
from mezzo.step.inputs import copy_outputs, make_static_buffers


class Program:
    """Runs the step on every replay; a broken one gives every loss an infinite factor, as a graph that reads the wrong memory may."""

    def __init__(self, run, values, *, broken):
        self._run, self._broken = run, broken
        self._held, self.inputs = make_static_buffers(values)

    def replay(self, leaves):
        torch._foreach_copy_(self.inputs, leaves)
        if self._broken:
            self.inputs[-1].fill_(INF)
        return copy_outputs(self._run(self._held))


@pytest.fixture
def pretend(monkeypatch):
    """Make a step whose captures are programs as above."""

    class Studio:
        broken = False

        def with_new_pool(self):
            return self

        def run_on_capture_stream(self, run):
            return run()

        def capture(self, run, values, _leaves, _kept):
            return Program(run, values, broken=self.broken)

    @contextmanager
    def watching():
        yield []

    monkeypatch.setattr(module.GraphCapturer, "on", lambda _: Studio())
    monkeypatch.setattr(module, "find_host_syncs", watching)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(capture, "is_warmed_up", lambda _: True)

    def make(name="mlp", *, broken=False, **words):
        made = Made(name)
        step = mezzo.TrainStep(
            made.model,
            boosted,
            made.optimizer,
            "O1",
            dtype="float16",
            channels_last=False,
            capture=False,
            **words,
        )
        monkeypatch.setattr(Studio, "broken", broken)
        step._runner = CaptureRunner(step._executor, Capture.AUTO)
        return made, step

    return make


def train(step, name, count, overflows=()):
    torch.manual_seed(1)
    return [float(step(x, y)) for x, y in batches(name, count, overflows)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_capture_that_skips_what_the_eager_step_applies_is_given_up_as_our_error(
    pretend, accumulate
):
    made, step = pretend(broken=True, accumulate=accumulate)
    train(step, "mlp", 3 * accumulate)
    assert step.skipped is False
    with pytest.warns(UserWarning, match="error in mezzo"), _events.listen() as heard:
        train(step, "mlp", 6 * accumulate)
    assert not step.captured
    assert "error in mezzo" in step.eager_reason
    assert [event.skipped for event in heard if isinstance(event, _events.CaptureDisagrees)] == [
        True
    ]
    before = weights(made.model)
    train(step, "mlp", 2 * accumulate)
    assert not step.skipped
    assert not same(before, weights(made.model))


def test_skips_that_the_eager_step_would_make_too_name_the_parameter_once_and_go_on(pretend):
    _, step = pretend()
    with pytest.warns(
        UserWarning, match=r"3 updates in a row were skipped: the gradient of 'layers\.0\.weight'"
    ) as heard:
        train(step, "mlp", 30, overflows=[*range(6, 12), *range(20, 26)])
    assert len(heard) == 1
    assert step.captured
    assert not step.skipped


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_comparison_leaves_no_trace(pretend, accumulate):
    overflows = range(15, 27)
    made, step = pretend("cnn", accumulate=accumulate)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*updates in a row")
        losses = train(step, "cnn", 45, overflows)
    other = Made("cnn")
    plain = mezzo.TrainStep(
        other.model,
        boosted,
        other.optimizer,
        "O1",
        dtype="float16",
        channels_last=False,
        capture=False,
        accumulate=accumulate,
    )
    assert losses == train(plain, "cnn", 45, overflows)
    assert same(weights(made.model), weights(other.model))
    assert step.scaler.get_scale() == plain.scaler.get_scale()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_update_that_was_not_replayed_whole_is_not_compared(pretend, monkeypatch, accumulate):
    _, step = pretend(accumulate=accumulate)
    overflows, first_good = range(6 * accumulate, 9 * accumulate), 9 * accumulate
    before, moved = capture.before_replay, []

    def tables_move_once(scaler):
        if not moved and step._updates == first_good // accumulate:
            # The schedule's table was made anew: the graph is dropped, and the call runs eagerly.
            moved.append(scaler)
            return ("elsewhere",)
        return before(scaler)

    monkeypatch.setattr(capture, "before_replay", tables_move_once)
    train(step, "mlp", 12 * accumulate, overflows)
    assert moved
    assert step.eager_reason is None
    assert step.scaler.state().skipped_steps == 3


def test_two_skips_in_a_row_are_not_looked_into(pretend, monkeypatch):
    _, step = pretend()
    monkeypatch.setattr(step._executor, "compute_gradients", None)
    train(step, "mlp", 20, overflows=[6, 7, 10, 11])
    assert step.captured


@pytest.mark.parametrize("captured", [False, True])
def test_a_float16_scale_below_one_is_reported_once_with_the_parameter(pretend, captured):
    _, step = pretend(scaler=mezzo.GradScaler(init_scale=8.0))
    if not captured:
        step._runner = EagerRunner(step._executor)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        train(step, "mlp", 30, overflows=range(5, 30))
    found = [str(one.message) for one in heard if "below 1" in str(one.message)]
    assert len(found) == 1
    assert (
        "The loss scale fell to 0.5, below 1; the gradient of 'layers.0.weight' is not finite"
        in found[0]
    )


def test_a_scale_that_was_chosen_below_one_is_not_reported(pretend):
    _, step = pretend(scaler=mezzo.GradScaler(init_scale=0.5))
    train(step, "mlp", 8, overflows=[4])
