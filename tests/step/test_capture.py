"""When a step is captured, replayed and captured anew: shown with programs that only pretend, since a CPU captures nothing."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from support.step_models import Made, batches, boosted, same, weights

import mezzo
from mezzo.step import capture as module
from mezzo.step.capture import MAX_GRAPHS, CaptureRunner
from mezzo.step.components import Capture
from mezzo.step.inputs import copy_outputs, make_static_buffers


@dataclass
class Pretended:
    """A program that runs again what was to be captured."""

    run: object
    held: object
    inputs: list
    replayed: int = 0

    def replay(self, leaves):
        torch._foreach_copy_(self.inputs, leaves)
        self.replayed += 1
        return copy_outputs(self.run(self.held))


@dataclass
class PretendedStudio:
    programs: list = field(default_factory=list)
    warmed: int = 0
    fails: bool = False

    def with_new_pool(self):
        return self

    def run_on_capture_stream(self, run):
        self.warmed += 1
        return run()

    def fail(self):
        try:
            {}["what was wrong"]
        except KeyError:
            torch.ones(2).view(3)

    def capture(self, run, values, leaves, kept):
        if self.fails:
            self.fail()
        held, inputs = make_static_buffers(values)
        self.programs.append(Pretended(run, held, inputs))
        return self.programs[-1]


@pytest.fixture
def studio(monkeypatch):
    made = PretendedStudio()

    @contextmanager
    def watching():
        yield made.found

    made.found = []
    monkeypatch.setattr(module.GraphCapturer, "on", lambda _: made)
    monkeypatch.setattr(module, "find_host_syncs", watching)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return made


def step_of(made, capture="auto", **words):
    step = mezzo.TrainStep(
        made.model,
        boosted,
        made.optimizer,
        words.pop("policy", "O1"),
        dtype="bfloat16",
        channels_last=False,
        capture=False,
        **words,
    )
    step._runner = CaptureRunner(step._executor, Capture.parse(capture))
    return step


def run(step, count, size=8):
    return [float(step(x, y)) for x, y in batches("mlp", count, size=size)]


def test_three_real_steps_warm_up_and_then_one_program_is_replayed(studio):
    made, other = Made("mlp"), Made("mlp")
    step = step_of(made)
    losses = run(step, 8)
    assert studio.warmed == 3
    assert [program.replayed for program in studio.programs] == [5]
    assert step.captured
    plain = mezzo.TrainStep(other.model, boosted, other.optimizer, dtype="bfloat16", capture=False)
    assert losses == run(plain, 8)
    assert same(weights(made.model), weights(other.model))


def test_warm_ups_run_on_inputs_as_the_program_holds_them(studio, monkeypatch):
    step = step_of(Made("mlp"), policy="O2")
    seen, run_one = [], step._executor.run
    monkeypatch.setattr(
        step._executor,
        "run",
        lambda call, *rest: (seen.append(call.args[0].dtype), run_one(call, *rest))[1],
    )
    run(step, 5)
    assert seen == [torch.bfloat16] * 5


def test_a_new_shape_is_captured_after_two_steps(studio):
    step = step_of(Made("mlp"))
    run(step, 5)
    run(step, 3, size=4)
    run(step, 2)
    assert [program.replayed for program in studio.programs] == [4, 1]


def test_too_many_shapes_run_eagerly_and_are_told_once(studio):
    step = step_of(Made("mlp"))
    for size in range(1, MAX_GRAPHS + 1):
        run(step, 4, size=size)
    with pytest.warns(UserWarning, match=r"\(20, 8\) float32") as heard:
        run(step, 3, size=20)
    assert len(heard) == 1
    run(step, 3, size=21)
    assert len(studio.programs) == MAX_GRAPHS


@pytest.mark.parametrize("change", ["eval", "frozen"])
def test_modes_and_frozen_parameters_have_programs_of_their_own(studio, change):
    made = Made("mlp")
    step = step_of(made)
    run(step, 5)
    if change == "eval":
        made.model.eval()
    else:
        made.model.layers[0].requires_grad_(requires_grad=False)
    run(step, 5)
    assert len(studio.programs) == 2


def test_parameters_that_moved_are_captured_anew(studio):
    made = Made("mlp")
    step = step_of(made)
    run(step, 5)
    made.model.layers[0].weight.data = made.model.layers[0].weight.data.clone()
    run(step, 5)
    assert len(studio.programs) == 2


def test_a_changed_value_of_the_loss_functions_closure_is_another_program(studio):
    made, factor = Made("mlp"), 1.0

    def loss(outputs, target, boost):
        return boosted(outputs, target, boost) * factor

    step = mezzo.TrainStep(made.model, loss, made.optimizer, dtype="bfloat16", capture=False)
    step._runner = CaptureRunner(step._executor, Capture.AUTO)
    first = run(step, 5)
    factor = 0.0
    assert run(step, 3) == [0.0] * 3
    assert first[0] > 0
    assert len(studio.programs) == 2


@pytest.mark.parametrize("accumulate", [2, 3])
def test_calls_that_share_gradients_are_captured_by_phase(studio, accumulate):
    made, other = Made("mlp"), Made("mlp")
    step = step_of(made, accumulate=accumulate)
    losses = run(step, 30)
    assert len(studio.programs) == accumulate
    plain = mezzo.TrainStep(
        other.model,
        boosted,
        other.optimizer,
        dtype="bfloat16",
        capture=False,
        accumulate=accumulate,
    )
    assert losses == run(plain, 30)
    assert same(weights(made.model), weights(other.model))


def test_a_partial_accumulation_can_be_flushed_after_replays(studio):
    made, other = Made("mlp"), Made("mlp")
    steps = [
        step_of(made, accumulate=3),
        mezzo.TrainStep(
            other.model, boosted, other.optimizer, dtype="bfloat16", capture=False, accumulate=3
        ),
    ]
    for step in steps:
        run(step, 31)
        step.flush()
        run(step, 6)
    assert studio.programs
    assert same(weights(made.model), weights(other.model))


def test_a_host_read_is_told_and_runs_eagerly(studio):
    studio.found = ["model.py:3: x.item()"]
    step = step_of(Made("mlp"))
    with pytest.warns(UserWarning, match=r"model\.py:3: x\.item\(\)"):
        run(step, 6)
    assert not step.captured
    assert "model.py:3" in step.eager_reason
    assert studio.programs == []


def test_a_capture_that_fails_is_told_with_its_first_cause_and_the_call_still_happens(studio):
    studio.fails = True
    made, other = Made("mlp"), Made("mlp")
    step = step_of(made)
    with pytest.warns(UserWarning, match="what was wrong"):
        losses = run(step, 6)
    plain = mezzo.TrainStep(other.model, boosted, other.optimizer, dtype="bfloat16", capture=False)
    assert losses == run(plain, 6)


def test_capture_that_must_be_raises_instead(studio):
    studio.fails = True
    step = step_of(Made("mlp"), capture=True)
    with pytest.raises(mezzo.UnsupportedError, match="capture=True"):
        run(step, 6)


def test_inputs_that_cannot_be_compared_run_eagerly(studio):
    made = Made("mlp")
    step = mezzo.TrainStep(
        made.model,
        lambda outputs, _: outputs.square().mean(),
        made.optimizer,
        dtype="bfloat16",
        capture=False,
    )
    step._runner = CaptureRunner(step._executor, Capture.AUTO)
    with pytest.warns(UserWarning, match="type set"):
        step(torch.ones(2, 8), {1, 2})
    step(torch.ones(2, 8), {1, 2})
    assert studio.programs == []


def test_what_the_model_casts_first_is_cast_by_the_copy_of_the_inputs(studio):
    made, other = Made("mlp"), Made("mlp")
    step = step_of(made, policy="O2")
    losses = run(step, 8)
    assert [buffer.dtype for buffer in studio.programs[0].inputs] == [
        torch.bfloat16,
        torch.int64,
        torch.float32,
    ]
    plain = mezzo.TrainStep(
        other.model, boosted, other.optimizer, "O2", dtype="bfloat16", capture=False
    )
    assert losses == run(plain, 8)


def test_a_loaded_state_drops_the_programs(studio):
    step = step_of(Made("mlp"))
    run(step, 5)
    step.load_state_dict(step.state_dict())
    assert not step.captured
    run(step, 5)
    assert step.captured
