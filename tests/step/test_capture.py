"""Eager runs, and when a step is warmed up, captured, replayed and captured again.

Captured graphs are fakes that run the captured function; `tests/gpu/test_step.py` captures.
"""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from support.fake_graphs import fake_captures, use_capture
from support.step_models import Made, batches, boosted, same, weights

import mezzo
from mezzo import _events
from mezzo.scaling import captured_scaler
from mezzo.step import replay_timing
from mezzo.step.capture_obstacles import (
    capture_obstacle,
    optimizer_obstacle,
    warn_not_captured,
)
from mezzo.step.cuda_graph import failure_reason
from mezzo.step.options import Capture
from mezzo.step.runners import EagerRunner


@pytest.fixture
def capturer(monkeypatch):
    return fake_captures(monkeypatch)


def eager_step(made, loss=boosted, policy="O1", optimizer=None, **kwargs):
    return mezzo.TrainStep(
        made.model,
        loss,
        optimizer or made.optimizer,
        policy,
        channels_last=False,
        capture=False,
        **{"dtype": "bfloat16"} | kwargs,
    )


def captured_step(made, loss=boosted, capture="auto", *, captures_update=True, **kwargs):
    step = eager_step(made, loss, **kwargs)
    use_capture(step, capture, captures_update=captures_update)
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
    dtypes, run_body = [], step._executor.run_body
    monkeypatch.setattr(
        step._executor,
        "run_body",
        lambda call, *args: (dtypes.append(call.args[0].dtype), run_body(call, *args))[1],
    )
    run(step, 5)
    assert dtypes == [torch.bfloat16] * 5


def test_the_copy_of_an_input_casts_it_as_the_model_would(capturer):
    made, other = Made("mlp"), Made("mlp")
    losses = run(captured_step(made, policy="O2", preset="paddle"), 8)
    dtypes = [buffer.dtype for buffer in capturer.graphs[0].inputs]
    assert dtypes == [torch.bfloat16, torch.int64, torch.float32]
    assert losses == run(eager_step(other, policy="O2", preset="paddle"), 8)


def test_a_new_shape_is_captured_when_it_comes_again(capturer):
    step = captured_step(Made("mlp"))
    run(step, 5)
    run(step, 1, size=4)
    run(step, 1, size=5)
    assert [graph.replays for graph in capturer.graphs] == [2]
    run(step, 2, size=4)
    assert [graph.replays for graph in capturer.graphs] == [2, 2]
    assert step.replays == 4


class TestManyShapes:
    def test_calls_of_all_shapes_warm_up_and_each_shape_is_captured_when_it_comes_again(
        self, capturer
    ):
        step = captured_step(Made("mlp"))
        for _ in range(2):
            for size in range(8, 3, -1):
                run(step, 1, size=size)
        assert capturer.warm_ups == 5
        assert [graph.replays for graph in capturer.graphs] == [1] * 5

    @pytest.mark.filterwarnings("ignore:The step was called")
    def test_shapes_without_room_do_not_synchronize(self, capturer, monkeypatch):
        step = captured_step(Made("mlp"), max_graphs=1)
        for _ in range(3):
            for size in (8, 7):
                run(step, 1, size=size)
        waits = []
        monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
        run(step, 1, size=8)
        run(step, 1, size=7)
        assert waits == []

    @pytest.mark.filterwarnings("ignore:The step was called")
    def test_shapes_that_take_turns_beyond_the_limit_run_eagerly(self, capturer):
        step = captured_step(Made("mlp"), max_graphs=2)
        for _ in range(5):
            for size in (8, 7, 5):
                run(step, 1, size=size)
        assert len(capturer.graphs) == 2

    def test_more_kinds_of_inputs_than_graphs_cause_one_warning(self, capturer):
        step = captured_step(Made("mlp"), max_graphs=2)
        run(step, 4)
        run(step, 1, size=2)
        with pytest.warns(
            UserWarning,
            match=r"more than 2 kinds of inputs.* \(3, 8\) float32.*pad_to=64.*max_graphs",
        ):
            run(step, 1, size=3)
        run(step, 1, size=4)

    @pytest.mark.filterwarnings("ignore:The step was called")
    def test_the_shape_not_used_for_longest_makes_room_for_one_used_twice_since(self, capturer):
        step = captured_step(Made("mlp"), max_graphs=2)
        for size in (8, 4, 3):
            run(step, 1, size=size)
        run(step, 2)
        run(step, 2, size=4)
        run(step, 1)
        run(step, 3, size=3)
        assert [graph.replays for graph in capturer.graphs] == [3, 2, 2]
        run(step, 1)
        assert capturer.graphs[0].replays == 4

    def test_a_larger_shape_is_captured_into_new_memory_that_serves_the_others(self, capturer):
        step = captured_step(Made("mlp"))
        run(step, 1, size=8)
        run(step, 5, size=4)
        warm_ups = capturer.warm_ups
        run(step, 1, size=8)
        run(step, 2, size=4)
        assert capturer.pools == [1, 2, 2]
        assert [graph.inputs[0].shape[0] for graph in capturer.graphs] == [4, 8, 4]
        assert capturer.warm_ups == warm_ups

    @pytest.mark.filterwarnings("ignore:The step was called")
    def test_a_pool_whose_only_graph_made_room_is_not_used_again(self, capturer):
        step = captured_step(Made("mlp"), max_graphs=1)
        for size in (8, 4, 8, 8):
            run(step, 1, size=size)
        assert capturer.pools == [1]
        run(step, 3, size=4)
        assert capturer.pools == [1, 2]
        assert capturer.reports == [True, True]

    def test_an_eager_call_of_a_large_new_shape_gets_the_memory_of_the_graphs(self, capturer):
        step = captured_step(Made("mlp"))
        run(step, 5, size=20)
        run(step, 1, size=2)
        assert step.captured
        run(step, 1, size=12)
        assert not step.captured
        run(step, 1, size=20)
        assert step.captured
        assert capturer.warm_ups == 5

    def test_nothing_is_captured_while_new_shapes_keep_coming(self, capturer):
        step = captured_step(Made("mlp"))
        for size in range(1, 31):
            run(step, 1, size=size)
            run(step, 1, size=1)
        assert [graph.inputs[0].shape[0] for graph in capturer.graphs] == [1] * len(capturer.graphs)
        before = len(capturer.graphs)
        run(step, 1, size=1)
        run(step, 4, size=30)
        assert len(capturer.graphs) == before + 1

    @pytest.mark.filterwarnings("ignore:The step was called")
    def test_results_are_those_of_eager_calls(self, capturer):
        made, other = Made("mlp"), Made("mlp")
        sizes = [8, 8, 8, 8, 4, 6, 4, 9, 9, 6, 8, 4, 9, 6]
        captured, eager = captured_step(made, max_graphs=2), eager_step(other)
        for size in sizes:
            assert run(captured, 1, size=size) == run(eager, 1, size=size)
        assert same(weights(made.model), weights(other.model))

    @pytest.mark.filterwarnings("ignore:The step was called")
    def test_calls_of_shapes_that_have_no_graph_do_not_wait_for_the_device(
        self, capturer, monkeypatch
    ):
        step = captured_step(Made("mlp"), max_graphs=1)
        run(step, 5, size=20)
        run(step, 1, size=3)
        run(step, 2, size=20)
        waits, timed = [], []
        monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
        monkeypatch.setattr(
            replay_timing.ReplayTiming,
            "_timed",
            lambda _, call: (call(), timed.append(call) or 1.0),
        )
        # Alternating with the captured shape, and each shape once only.
        for size in (3, 20, 3, 20, 3, 20, 1, 2, 4, 5):
            run(step, 1, size=size)
        assert len(capturer.graphs) == 1
        assert (len(waits), len(timed)) == (0, 1)

    def test_inputs_that_cannot_be_captured_leave_the_graphs_of_others(self, capturer):
        made, other = Made("mlp"), Made("mlp")
        step, eager = captured_step(made), eager_step(other)
        losses = run(step, 5)
        capturer.fails = True
        with pytest.warns(UserWarning, match=r"\(2, 8\) float32.*the root cause"):
            losses += run(step, 2, size=2)
        capturer.fails = False
        losses += run(step, 3, size=2) + run(step, 3) + run(step, 2, size=4)
        assert step.captured
        assert step.eager_reason is None
        assert [graph.inputs[0].shape[0] for graph in capturer.graphs] == [8, 4]
        assert capturer.reports == [True, True, False, True]
        assert losses == [
            loss
            for count, size in ((5, 8), (2, 2), (3, 2), (3, 8), (2, 4))
            for loss in run(eager, count, size)
        ]
        assert same(weights(made.model), weights(other.model))

    def test_with_capture_true_inputs_that_cannot_be_captured_raise(self, capturer):
        step = captured_step(Made("mlp"), capture=True)
        run(step, 5)
        capturer.fails = True
        with pytest.raises(mezzo.UnsupportedError, match="capture=True"):
            run(step, 2, size=3)

    @pytest.mark.parametrize("number", [0, -1, 2.5, True, "8"])
    def test_the_limit_is_checked(self, number):
        with pytest.raises(mezzo.PolicyError, match="max_graphs="):
            eager_step(Made("mlp"), max_graphs=number)


class TestOptimizersThatCannotBeCaptured:
    def test_they_step_behind_a_captured_forward_and_backward_pass(self, capturer):
        made, other = Made("mlp"), Made("mlp")
        step = captured_step(made, captures_update=False)
        losses = run(step, 24)
        assert step.captured
        assert losses == run(eager_step(other), 24)
        assert same(weights(made.model), weights(other.model))

    def test_they_may_keep_gradients(self, capturer):
        made = Made("mlp")
        step, kept = captured_step(made, captures_update=False), []
        made.optimizer.register_step_pre_hook(
            lambda *_: kept.append(made.model.layers[0].weight.grad)
        )
        run(step, 8)
        assert step.captured
        assert len({one.data_ptr() for one in kept[-3:]}) == 3

    def test_they_step_eagerly_in_a_body_and_if_calls_accumulate(self):
        made = Made("mlp")
        assert optimizer_obstacle(eager_step(made)._executor) is None
        accumulated = eager_step(Made("mlp"), accumulate=2)._executor
        assert "SGD has no step that can be captured, and calls acc" in optimizer_obstacle(
            accumulated
        )

        @mezzo.train_step(
            models=(one := Made("mlp")).model, optimizers=one.optimizer, dtype="bfloat16"
        )
        def step(update, x):
            update(one.model(x).square().mean(), one.optimizer)

        assert "by update()" in optimizer_obstacle(step._executor)

    def test_an_overflow_is_skipped(self, capturer):
        made, other = Made("mlp"), Made("mlp")
        steps = [
            mezzo.TrainStep(one.model, boosted, one.optimizer, dtype="float16", capture=False)
            for one in (made, other)
        ]
        use_capture(steps[0], captures_update=False)
        steps[0]._runner._warm_up.is_ready = lambda *_: True
        for step in steps:
            for x, (target, boost) in batches("mlp", 12):
                step(x, (target, boost * (float("inf") if step._updates == 8 else 1.0)))
        assert steps[0].captured
        assert [step.metrics.skipped_steps for step in steps] == [1, 1]
        assert same(weights(made.model), weights(other.model))

    def test_one_that_keeps_gradients_steps_as_it_does_eagerly(self, capturer):
        steps = []
        for _ in range(2):
            made = Made("mlp")
            optimizer = Reversing(made.model.parameters(), lr=0.1)
            steps.append((made, eager_step(made, optimizer=optimizer)))
        (made, step), (other, eager) = steps
        use_capture(step, captures_update=False)
        losses = run(step, 8)
        assert step.captured
        assert losses == run(eager, 8)
        assert same(weights(made.model), weights(other.model))


class Reversing(torch.optim.Optimizer):
    """Steps along the difference of the last two gradients, which it does not copy."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                last = state.get("last", parameter.grad)
                parameter.add_(2 * parameter.grad - last, alpha=-group["lr"])
                state["last"] = parameter.grad


class TestModelsThatKnowWhetherTheyAreCaptured:
    def test_a_second_attempt_reports_the_capture(self, capturer):
        capturer.fails_as_eager = True
        step = captured_step(Made("mlp"))
        losses = run(step, 6)
        assert step.captured
        assert capturer.reports == [True, False]
        assert losses == run(eager_step(Made("mlp")), 6)
        run(step, 2, size=3)
        assert capturer.reports == [True, False, False]


class TestModelsThatDrawOnTheHost:
    def test_draws_are_recorded_at_another_attempt(self, capturer):
        capturer.draws = True
        step = captured_step(Made("mlp"))
        losses = run(step, 6)
        assert step.captured
        assert capturer.reports == [True, True]
        assert losses == run(eager_step(Made("mlp")), 6)


class FailsWhileCaptured(torch.nn.Linear):
    """Raises in its captures, with an autograd graph in a local variable."""

    def __init__(self):
        super().__init__(8, 4)
        self.calls, self.graphs, self.kept = 0, [], []

    def forward(self, x):
        result = super().forward(x)
        self.calls += 1
        self.kept.append([graph() is not None for graph in self.graphs])
        if self.calls in (4, 5):
            self.graphs.append(weakref.ref(result))
            raise RuntimeError("not permitted")
        return result


@pytest.mark.filterwarnings("ignore:The step cannot be captured")
def test_a_failed_capture_keeps_no_autograd_graph(capturer):
    made = Made("mlp")
    made.model = FailsWhileCaptured()
    made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
    step = captured_step(made)
    gc.collect()
    gc.disable()
    try:
        run(step, 5)
    finally:
        gc.enable()
    assert made.model.kept[5] == [False, False]


class TestTiming:
    @pytest.fixture
    def slow_replays(self, monkeypatch):
        """Let replays take twice the time of eager calls."""

        def timed(_, run):
            is_replay = "replay" in getattr(run, "func", run).__name__
            return run(), 2.0 if is_replay else 1.0

        monkeypatch.setattr(replay_timing, "MARGIN", 1.02)
        monkeypatch.setattr(replay_timing.ReplayTiming, "_timed", timed)

    def test_a_slower_replay_is_not_used(self, capturer, slow_replays):
        made, other = Made("mlp"), Made("mlp")
        step = captured_step(made)
        with pytest.warns(UserWarning, match=r"a replay takes 2000.00 ms and an eager call 1000"):
            losses = run(step, 10)
        assert not step.captured
        assert capturer.graphs[0].replays == replay_timing.REPLAYS
        assert "a replay takes" in step.eager_reason
        assert losses == run(eager_step(other), 10)
        assert same(weights(made.model), weights(other.model))

    @pytest.mark.filterwarnings("ignore:The step cannot be captured")
    def test_the_update_is_captured_if_that_alone_is_faster(self, capturer, monkeypatch):
        step = captured_step(Made("mlp"))
        monkeypatch.setattr(replay_timing, "MARGIN", 0.0)
        run(step, 6)
        assert not step.captured
        monkeypatch.setattr(replay_timing, "MARGIN", 1e9)
        run(step, 6)
        assert [len(graph.inputs) for graph in capturer.graphs] == [3, 1 + 4]
        assert capturer.pools == [1, 2]

    def test_a_faster_replay_is_timed_three_times_only(self, capturer, monkeypatch):
        timed = []
        plain = replay_timing.ReplayTiming._timed
        monkeypatch.setattr(
            replay_timing.ReplayTiming,
            "_timed",
            lambda self, run: (timed.append(run), plain(self, run))[1],
        )
        run(captured_step(Made("mlp")), 12)
        assert len(timed) == 3 + replay_timing.REPLAYS


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


def test_a_replaced_tensor_that_the_loss_function_closes_over_causes_a_new_capture(capturer):
    weight = first = torch.ones(())

    def loss(outputs, target, boost):
        return boosted(outputs, target, boost) * weight

    step = captured_step(Made("mlp"), loss)
    run(step, 5)
    first.fill_(2.0)
    run(step, 2)
    assert [graph.replays for graph in capturer.graphs] == [4]
    weight = torch.zeros(())
    assert run(step, 3) == [0.0] * 3
    assert len(capturer.graphs) == 2


def test_a_loss_function_that_reads_another_tensor_in_each_call_is_not_captured(capturer):
    tensors = [torch.full((), float(number)) for number in range(8)]
    weight = tensors[0]

    def loss(outputs, target, boost):
        return boosted(outputs, target, boost) * 0 + weight

    step, losses = captured_step(Made("mlp"), loss), []
    for weight in tensors:  # noqa: B007
        losses += run(step, 1)
    assert losses == list(range(8))
    assert not capturer.graphs


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


class Branching(torch.nn.Module):
    """Has parameters that only some calls use."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.always(x) + (self.sometimes(x) if len(x) == 8 else 0)


@pytest.mark.filterwarnings("ignore:The step cannot be captured")
@pytest.mark.parametrize("sizes", [(8, 3), (3, 8)])
def test_parameters_that_some_accumulations_do_not_use_are_not_stepped_in_them(capturer, sizes):
    results = []
    for captured in (True, False):
        made = Made("mlp")
        torch.manual_seed(0)
        made.model = Branching()
        # Both change a parameter whose gradient is zero.
        made.optimizer = torch.optim.SGD(
            made.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
        )
        step = eager_step(made, accumulate=2)
        if captured:
            use_capture(step)
        losses = [run(step, 8, sizes[0]), run(step, 8, sizes[1]), run(step, 5, sizes[0])]
        losses += [run(step, 1, size) for size in (*sizes, *sizes, *sizes)]
        results.append([losses, weights(made.model)])
    assert {graph.inputs[0].shape[0] for graph in capturer.graphs} == {sizes[0]}
    assert same(*results)


def test_gradients_that_the_user_sets_to_none_between_updates_do_not_matter(capturer):
    made, other = Made("mlp"), Made("mlp")
    for step in (captured_step(made, accumulate=2), eager_step(other, accumulate=2)):
        for size in (*[8] * 12, 3, 3, 8, 8, 8):
            if not step.position:
                step.optimizer.zero_grad()
            run(step, 1, size)
        step.flush()
    assert capturer.graphs
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
    def test_a_failed_capture_warns_with_its_root_cause_and_the_call_runs_eagerly(self, capturer):
        capturer.fails = True
        step = captured_step(Made("mlp"))
        with pytest.warns(UserWarning, match="the root cause"):
            losses = run(step, 6)
        assert capturer.reports == [True, False]
        assert losses == run(eager_step(Made("mlp")), 6)

    @pytest.mark.parametrize("accumulate", [1, 3])
    def test_the_update_is_captured_by_itself(self, capturer, accumulate):
        capturer.fails = True
        made, other = Made("mlp"), Made("mlp")
        step = captured_step(made, accumulate=accumulate)
        with pytest.warns(UserWarning, match="the root cause"):
            losses = run(step, 4 * accumulate)
        capturer.fails = False
        losses += run(step, 8 * accumulate)
        assert len(capturer.graphs) == 1
        assert capturer.graphs[0].replays > 1
        assert not step.captured
        eager = eager_step(other, accumulate=accumulate)
        assert losses == run(eager, 4 * accumulate) + run(eager, 8 * accumulate)
        assert same(weights(made.model), weights(other.model))

    @pytest.fixture
    def update_only(self, capturer):
        """Make a step with a model of a name, whose update is captured by itself."""

        def make(name="mlp", **kwargs):
            capturer.fails = True
            made = Made(name)
            step = captured_step(made, **kwargs)
            with pytest.warns(UserWarning, match="the root cause"):
                train(step, name, 5)
            capturer.fails = False
            train(step, name, 6)
            assert len(capturer.graphs) == 1
            return made, step

        def train(step, name, count):
            for x, y in batches(name, count):
                step(x, y)

        make.train = train
        return make

    def test_a_loaded_state_drops_the_captured_update(self, update_only, capturer):
        _, step = update_only()
        step.load_state_dict(step.state_dict())
        run(step, 3)
        assert len(capturer.graphs) == 1
        run(step, 2)
        assert [graph.replays for graph in capturer.graphs] == [5, 2]
        assert capturer.pools == [1, 2]

    def test_a_captured_update_is_for_the_buffers_that_the_model_writes(
        self, update_only, capturer, monkeypatch
    ):
        monkeypatch.setattr(captured_scaler, "is_warmed_up", lambda _: True)
        made, step = update_only("cnn", dtype="float16")
        replays = capturer.graphs[0].replays
        made.model.norm.eval()
        update_only.train(step, "cnn", 3)
        assert capturer.graphs[0].replays == replays
        update_only.train(step, "cnn", 3)
        assert len(capturer.graphs) == 2

    def test_sparse_gradients_are_not_copied_for_a_captured_update(self, capturer):
        capturer.fails = True
        made = Made("transformer")
        made.model.embed.sparse = True
        made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        step = captured_step(made)
        with pytest.warns(UserWarning, match="the root cause"):
            losses = [float(step(x, y)) for x, y in batches("transformer", 4)]
        capturer.fails = False
        losses += [float(step(x, y)) for x, y in batches("transformer", 6)]
        assert capturer.graphs == []
        assert losses[4:8] != losses[:4]

    def test_gradients_are_not_recorded_any_more(self, capturer):
        capturer.fails = True
        step = captured_step(Made("mlp"), accumulate=2)
        with pytest.warns(UserWarning, match="the root cause"):
            run(step, 10)
        assert not step._executor.static_gradients.are_recorded
        assert not step._executor.static_gradients._recorded

    def test_the_warning_points_to_the_line_that_calls_the_step(self, capturer):
        capturer.fails = True
        step = captured_step(Made("mlp"))
        with pytest.warns(UserWarning, match="the root cause") as warned:
            run(step, 6)
        assert [Path(one.filename).name for one in warned] == ["test_capture.py"]

    def test_a_graph_of_an_earlier_loss_is_named_if_the_capture_fails_over_streams(self, capturer):
        capturer.fails, capturer.failure = True, "legacy stream depends on a capturing stream"
        made = Made("mlp")
        kept = made.model(torch.ones(2, 8))
        with pytest.warns(UserWarning, match=r"legacy stream.*Delete it.*torch\.no_grad\(\)"):
            run(captured_step(made), 6)
        assert kept.requires_grad
        with pytest.warns(UserWarning, match="legacy stream") as warned:
            run(captured_step(Made("mlp")), 6)
        assert "no_grad" not in str(warned[0].message)

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
            failure_reason(caught.value, []),
        )

    def test_a_host_read_is_named_before_the_error_that_it_causes(self):
        reason = failure_reason(RuntimeError("invalidated"), ["model.py:3: x.item()"])
        assert reason == "the host reads from the device in model.py:3: x.item()"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_call_that_a_mode_observes_runs_eagerly_between_replays(capturer, accumulate):
    made, other = Made("mlp"), Made("mlp")
    step = captured_step(made, accumulate=accumulate)
    losses, counts = [], []
    for index, (x, y) in enumerate(batches("mlp", 16)):
        replays = step._runner.replays
        if index in {1, 13}:
            with mezzo.op_stats(step) as ops:
                losses.append(float(step(x, y)))
            counts.append(sum(row.calls for row in ops.rows if row.op == "addmm"))
            assert step._runner.replays == replays
        else:
            losses.append(float(step(x, y)))
    assert step._runner.replays == replays + 1
    assert counts[0] == counts[1] > 0
    eager = eager_step(other, accumulate=accumulate)
    assert losses == run(eager, 16)
    assert same(weights(made.model), weights(other.model))
