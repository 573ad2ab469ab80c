"""Eager runs, and when a step is warmed up, captured, replayed and captured again.

Captured graphs are fakes that run the captured function; `tests/gpu/test_step.py` captures.
"""

from __future__ import annotations

import re

import pytest
import torch
from support.fake_graphs import fake_captures, use_capture
from support.step_models import Made, batches, boosted, same, weights

import mezzo
from mezzo import _events
from mezzo.step.capture import (
    MAX_GRAPHS,
    EagerRunner,
    capture_obstacle,
    root_cause,
    warn_not_captured,
)
from mezzo.step.components import Capture


@pytest.fixture
def capturer(monkeypatch):
    return fake_captures(monkeypatch)


def eager_step(made, loss=boosted, policy="O1", **kwargs):
    return mezzo.TrainStep(
        made.model,
        loss,
        made.optimizer,
        policy,
        dtype="bfloat16",
        channels_last=False,
        capture=False,
        **kwargs,
    )


def captured_step(made, loss=boosted, capture="auto", **kwargs):
    step = eager_step(made, loss, **kwargs)
    use_capture(step, capture)
    return step


def run(step, count, size=8):
    return [float(step(x, y)) for x, y in batches("mlp", count, size=size)]


def test_three_calls_warm_up_and_then_one_graph_is_replayed(capturer):
    made, other = Made("mlp"), Made("mlp")
    step = captured_step(made)
    losses = run(step, 8)
    assert capturer.warm_ups == 3
    assert [graph.replays for graph in capturer.graphs] == [5]
    assert step.captured
    assert losses == run(eager_step(other), 8)
    assert same(weights(made.model), weights(other.model))


def test_warm_up_runs_on_inputs_in_the_dtypes_of_the_static_buffers(capturer, monkeypatch):
    step = captured_step(Made("mlp"), policy="O2", preset="paddle")
    dtypes, run_call = [], step._executor.run
    monkeypatch.setattr(
        step._executor,
        "run",
        lambda call, *args: (dtypes.append(call.args[0].dtype), run_call(call, *args))[1],
    )
    run(step, 5)
    assert dtypes == [torch.bfloat16] * 5


def test_the_copy_of_an_input_casts_it_as_the_model_would(capturer):
    made, other = Made("mlp"), Made("mlp")
    losses = run(captured_step(made, policy="O2", preset="paddle"), 8)
    dtypes = [buffer.dtype for buffer in capturer.graphs[0].inputs]
    assert dtypes == [torch.bfloat16, torch.int64, torch.float32]
    assert losses == run(eager_step(other, policy="O2", preset="paddle"), 8)


def test_a_new_shape_is_captured_after_two_calls(capturer):
    step = captured_step(Made("mlp"))
    run(step, 5)
    run(step, 3, size=4)
    run(step, 2)
    assert [graph.replays for graph in capturer.graphs] == [4, 1]


def test_too_many_shapes_run_eagerly_with_one_warning(capturer):
    step = captured_step(Made("mlp"))
    for size in range(1, MAX_GRAPHS + 1):
        run(step, 4, size=size)
    with pytest.warns(
        UserWarning, match=r"Already 8 captured graphs; inputs of shape \(20, 8\) float32"
    ) as warned:
        run(step, 3, size=20)
    assert len(warned) == 1
    run(step, 3, size=21)
    assert len(capturer.graphs) == MAX_GRAPHS


@pytest.mark.parametrize("change", ["eval", "frozen"])
def test_modes_and_frozen_parameters_have_their_own_graphs(capturer, change):
    made = Made("mlp")
    step = captured_step(made)
    run(step, 5)
    if change == "eval":
        made.model.eval()
    else:
        made.model.layers[0].requires_grad_(requires_grad=False)
    run(step, 5)
    assert len(capturer.graphs) == 2


def test_a_parameter_at_another_address_causes_a_new_capture(capturer):
    made = Made("mlp")
    step = captured_step(made)
    run(step, 5)
    made.model.layers[0].weight.data = made.model.layers[0].weight.data.clone()
    run(step, 5)
    assert len(capturer.graphs) == 2


def test_a_changed_closure_value_of_the_loss_function_causes_a_new_capture(capturer):
    factor = 1.0

    def loss(outputs, target, boost):
        return boosted(outputs, target, boost) * factor

    step = captured_step(Made("mlp"), loss)
    first = run(step, 5)
    factor = 0.0
    assert run(step, 3) == [0.0] * 3
    assert first[0] > 0
    assert len(capturer.graphs) == 2


def test_a_loaded_state_drops_the_graphs(capturer):
    step = captured_step(Made("mlp"))
    run(step, 5)
    step.load_state_dict(step.state_dict())
    assert not step.captured
    run(step, 5)
    assert step.captured


@pytest.mark.parametrize("accumulate", [2, 3])
def test_each_call_of_an_accumulation_has_its_own_graph(capturer, accumulate):
    made, other = Made("mlp"), Made("mlp")
    losses = run(captured_step(made, accumulate=accumulate), 30)
    assert len(capturer.graphs) == accumulate
    assert losses == run(eager_step(other, accumulate=accumulate), 30)
    assert same(weights(made.model), weights(other.model))


def test_a_partial_accumulation_can_be_flushed_after_replays(capturer):
    made, other = Made("mlp"), Made("mlp")
    for step in (captured_step(made, accumulate=3), eager_step(other, accumulate=3)):
        run(step, 31)
        step.flush()
        run(step, 6)
    assert capturer.graphs
    assert same(weights(made.model), weights(other.model))


class TestStepsThatCannotBeCaptured:
    def test_a_host_read_is_named_and_the_step_runs_eagerly(self, capturer):
        capturer.host_syncs = ["model.py:3: x.item()"]
        step = captured_step(Made("mlp"))
        with pytest.warns(UserWarning, match=r"model\.py:3: x\.item\(\)"):
            run(step, 6)
        assert not step.captured
        assert "model.py:3" in step.eager_reason
        assert capturer.graphs == []

    def test_a_failed_capture_warns_with_its_root_cause_and_the_call_runs_eagerly(self, capturer):
        capturer.fails = True
        step = captured_step(Made("mlp"))
        with pytest.warns(UserWarning, match="the root cause"):
            losses = run(step, 6)
        assert losses == run(eager_step(Made("mlp")), 6)

    def test_a_failed_capture_raises_with_capture_true(self, capturer):
        capturer.fails = True
        step = captured_step(Made("mlp"), capture=True)
        with pytest.raises(mezzo.UnsupportedError, match="capture=True"):
            run(step, 6)

    def test_inputs_that_cannot_be_compared_run_eagerly(self, capturer):
        step = captured_step(Made("mlp"), lambda outputs, _: outputs.square().mean())
        with pytest.warns(UserWarning, match="type set"):
            step(torch.ones(2, 8), {1, 2})
        step(torch.ones(2, 8), {1, 2})
        assert capturer.graphs == []

    def test_on_a_cpu_steps_run_eagerly_without_a_warning(self):
        made = Made("mlp")
        with _events.listen() as events:
            step = mezzo.TrainStep(made.model, boosted, made.optimizer, dtype="bfloat16")
        assert isinstance(step._runner, EagerRunner)
        assert "no CUDA graphs" in step.eager_reason
        assert sum(isinstance(event, _events.StepNotCaptured) for event in events) == 1
        assert "cpu" in capture_obstacle(step._components)

    def test_capture_false_needs_no_reason(self):
        assert eager_step(Made("mlp")).eager_reason is None

    def test_on_other_devices_there_is_a_warning(self):
        with pytest.warns(
            UserWarning,
            match="cannot be captured as a CUDA graph and runs eagerly: because.*capture=False",
        ):
            warn_not_captured("because", Capture.AUTO)

    def test_the_first_of_several_errors_is_named(self):
        def fail():
            try:
                {}["first"]
            except KeyError:
                torch.ones(2).view(3)

        with pytest.raises(RuntimeError) as caught:
            fail()
        assert re.fullmatch(
            r"KeyError: 'first', in .*test_capture\.py:\d+: \{\}\[\"first\"\]",
            root_cause(caught.value),
        )
