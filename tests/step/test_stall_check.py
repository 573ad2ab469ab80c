"""Captured steps that skip several updates in a row are compared with the eager step once.

Captured graphs are fakes here; `tests/gpu/test_step.py` shows it on a device.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from support.fake_graphs import fake_captures, use_capture
from support.step_models import Made, batches, boosted, same, weights

import mezzo
from mezzo import _events
from mezzo.scaling import captured_scaler
from mezzo.step.runners import EagerRunner


def eager_step(made, **kwargs):
    return mezzo.TrainStep(
        made.model,
        boosted,
        made.optimizer,
        "O1",
        dtype="float16",
        channels_last=False,
        capture=False,
        **kwargs,
    )


@pytest.fixture
def captured_step(monkeypatch):
    """Make a step whose captures are fake graphs."""
    capturer = fake_captures(monkeypatch)
    monkeypatch.setattr(captured_scaler, "is_warmed_up", lambda _: True)

    def make(name="mlp", *, broken=False, **kwargs):
        made = Made(name)
        step = eager_step(made, **kwargs)
        capturer.broken = broken
        use_capture(step)
        return made, step

    return make


def train(step, name, count, overflows=()):
    torch.manual_seed(1)
    return [float(step(x, y)) for x, y in batches(name, count, overflows)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_graph_that_skips_what_the_eager_step_applies_is_dropped_as_an_error_in_mezzo(
    captured_step, accumulate
):
    made, step = captured_step(broken=True, accumulate=accumulate)
    train(step, "mlp", 3 * accumulate)
    assert step.skipped is False
    with pytest.warns(UserWarning, match="error in mezzo"), _events.listen() as events:
        train(step, "mlp", 6 * accumulate)
    assert not step.captured
    assert "error in mezzo" in step.eager_reason
    disagreements = [event for event in events if isinstance(event, _events.CaptureDisagrees)]
    assert [event.skipped for event in disagreements] == [True]
    before = weights(made.model)
    train(step, "mlp", 2 * accumulate)
    assert not step.skipped
    assert not same(before, weights(made.model))


def test_skips_that_the_eager_step_makes_too_name_the_parameter_once(captured_step):
    _, step = captured_step()
    with pytest.warns(
        UserWarning, match=r"3 updates in a row were skipped: the gradient of 'layers\.0\.weight'"
    ) as warned:
        train(step, "mlp", 30, overflows=[*range(6, 12), *range(20, 26)])
    assert len(warned) == 1
    assert step.captured
    assert not step.skipped


def count_calls(model):
    """Let a forward pass assign a tensor that counts calls, and count in a parameter in place."""
    model.calls = torch.zeros(())
    model.count = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
    model.register_forward_pre_hook(lambda *_: setattr(model, "calls", model.calls + 1))
    model.register_forward_pre_hook(lambda *_: model.count.data.add_(1) and None)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_comparison_changes_nothing(captured_step, accumulate):
    overflows = range(15, 27)
    made, step = captured_step("cnn", accumulate=accumulate)
    count_calls(made.model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*updates in a row")
        losses = train(step, "cnn", 45, overflows)
    other = Made("cnn")
    eager = eager_step(other, accumulate=accumulate)
    assert losses == train(eager, "cnn", 45, overflows)
    assert same(weights(made.model)[1:], weights(other.model))
    assert made.model.calls == made.model.count == 45
    assert step.scaler.get_scale() == eager.scaler.get_scale()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_update_with_an_eager_call_is_not_compared(captured_step, monkeypatch, accumulate):
    _, step = captured_step(accumulate=accumulate)
    overflows, first_finite = range(6 * accumulate, 9 * accumulate), 9 * accumulate
    before_replay, moved = captured_scaler.before_replay, []

    def tables_move_once(scaler):
        if not moved and step._updates == first_finite // accumulate:
            # The schedule's table is at another address: the graph is dropped, and the call runs
            # eagerly.
            moved.append(scaler)
            return ("elsewhere",)
        return before_replay(scaler)

    monkeypatch.setattr(captured_scaler, "before_replay", tables_move_once)
    train(step, "mlp", 12 * accumulate, overflows)
    assert moved
    assert step.eager_reason is None
    assert step.scaler.state().skipped_steps == 3


def test_two_consecutive_skips_are_not_compared(captured_step, monkeypatch):
    _, step = captured_step()
    monkeypatch.setattr(step._executor, "compute_gradients", None)
    train(step, "mlp", 20, overflows=[6, 7, 10, 11])
    assert step.captured


@pytest.mark.parametrize("captured", [False, True])
def test_a_float16_scale_below_one_is_reported_once_with_the_parameter(captured_step, captured):
    _, step = captured_step(scaler=mezzo.GradScaler(init_scale=8.0))
    if not captured:
        step._runner = EagerRunner(step._executor)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(step, "mlp", 30, overflows=range(5, 30))
    messages = [str(one.message) for one in warned if "below 1" in str(one.message)]
    assert len(messages) == 1
    assert (
        "The loss scale fell to 0.5, below 1; the gradient of 'layers.0.weight' is not finite"
        in messages[0]
    )
    assert "mezzo.trace_overflow(step, batch) names the op that overflows" in messages[0]


def test_a_scale_that_started_below_one_is_not_reported(captured_step):
    _, step = captured_step(scaler=mezzo.GradScaler(init_scale=0.5))
    train(step, "mlp", 8, overflows=[4])
