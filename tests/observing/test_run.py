"""`mezzo.observe`: what a run records, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import weakref

import pytest
import torch
from support.fake_graphs import fake_captures, use_capture
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo import _events


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def make_step(**options):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mezzo.TrainStep(
        model, F.mse_loss, optimizer, **{"policy": "O2", "dtype": "float16"} | options
    )


def batch(bad=False):
    x = torch.linspace(-1, 1, 32).view(8, 4)
    return (x * torch.inf if bad else x), torch.zeros(8, 2)


def train(step, *, calls=6, bad=()):
    return [step(*batch(number in bad)) for number in range(1, calls + 1)]


# -- a training step -------------------------------------------------------------------------------


def test_every_step_is_recorded_with_its_loss_and_scale():
    step = make_step()
    with mezzo.observe(step) as run:
        losses = train(step)
    assert [one.step for one in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [one.loss for one in run.steps] == [float(loss) for loss in losses]
    assert {one.scale for one in run.steps} == {step.scale}


def test_a_skip_names_its_step_scale_and_first_bad_parameter():
    step = make_step()
    with mezzo.observe(step) as run:
        train(step, bad=(4,))
    (skip,) = run.skips
    assert (skip.step, skip.scale, skip.parameter) == (4, step.scale, "0.weight")
    assert [one.parameter for one in run.steps].count(None) == 5


def test_the_history_can_be_read_while_the_run_goes_on():
    step = make_step()
    with mezzo.observe(step) as run:
        train(step, calls=3, bad=(3,))
        assert len(run.steps) == 3
        assert run.skips[0].step == 3


def test_gradients_that_overflow_and_underflow_are_counted_by_parameter():
    step = make_step(scaler=mezzo.GradScaler(init_scale=2.0**-10, min_scale=2.0**-24))
    with mezzo.observe(step) as run:
        train(step, calls=5, bad=(5,))
    counts = run.gradients["0.weight"]
    assert counts.total == 5 * 32
    assert 0 < counts.overflowed <= 32
    assert counts.underflowed > counts.zeros > 0


def test_accumulating_calls_have_no_update_and_a_flush_is_a_step():
    step = make_step(accumulate=2)
    with mezzo.observe(step) as run:
        train(step, calls=3)
        step.flush()
        train(step, calls=1)
    assert [one.skipped for one in run.steps] == [None, False, None, False, None]
    assert [one.loss is None for one in run.steps] == [False, False, False, True, False]
    assert run.steps[-1].step == 5


def test_the_norm_is_recorded_if_the_step_computes_it():
    step = make_step(clip_norm=1.0)
    with mezzo.observe(step) as run:
        train(step, calls=2)
    assert run.steps[-1].norm == pytest.approx(step.grad_norm)


def test_a_function_step_is_observed():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @mezzo.train_step(models=model, optimizers=optimizer, dtype="float16")
    def step(x, y):
        return F.mse_loss(model(x), y)

    with mezzo.observe(step) as run:
        train(step, calls=3, bad=(2,))
    assert [one.skipped for one in run.steps] == [False, True, False]


def test_a_step_without_a_scaler_has_no_skips_and_no_counts():
    step = make_step(dtype="bfloat16")
    with mezzo.observe(step) as run:
        train(step, calls=2)
    assert [one.skipped for one in run.steps] == [False, False]
    assert run.steps[-1].scale == 1.0
    assert run.gradients == {}


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("options", [{}, {"policy": "O1"}, {"master": "split"}, {"accumulate": 2}])
def test_observing_changes_no_bit_of_training(every, options):
    dtype = {"dtype": "bfloat16"} if "master" in options else {}
    weights = []
    for observed in (False, True):
        step = make_step(**options | dtype)
        if observed:
            with mezzo.observe(step, every=every):
                train(step, bad=(3,) if not dtype else ())
        else:
            train(step, bad=(3,) if not dtype else ())
        weights.append(mezzo.master_params(step.models[0]))
    for name, one in weights[0].items():
        assert torch.equal(one, weights[1][name]), name


# -- a loop ----------------------------------------------------------------------------------------


def run_loop(model, optimizer, scaler, *, calls=4, bad=()):
    for number in range(1, calls + 1):
        x, y = batch(number in bad)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


SCALERS = {
    "mezzo": lambda: mezzo.GradScaler("cpu", init_scale=8.0),
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=8.0),
    "none": lambda: None,
}


@pytest.mark.filterwarnings("ignore:This loss was computed in bfloat16")
@pytest.mark.parametrize("kind", ["mezzo", "torch"])
def test_a_hand_written_loop_is_observed_with_either_scaler(kind):
    model, scaler = make_model(), SCALERS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mezzo.observe(model, optimizer, scaler) as run:
        run_loop(model, optimizer, scaler, bad=(2,))
    assert [one.skipped for one in run.steps] == [False, True, False, False]
    assert [one.scale for one in run.steps] == [8.0, 4.0, 4.0, 4.0]
    assert run.skips[0].parameter == "0.weight"
    assert run.steps[0].loss > 0
    assert run.gradients["2.bias"].total == 8


def test_a_loop_without_a_scaler_counts_the_steps_of_its_optimizer():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mezzo.observe(model, optimizer) as run:
        run_loop(model, optimizer, None)
        with torch.no_grad():
            model(batch()[0])
    assert [one.step for one in run.steps] == [1, 2, 3, 4]
    assert run.numerics["updates"]["0.weight"].lost is not None


@pytest.mark.parametrize(
    ("region", "policy"),
    [
        (lambda: torch.autocast("cpu", torch.float16), ""),
        (lambda: mezzo.autocast("cpu", dtype=torch.float16, full={"linear"}), "linear"),
    ],
)
def test_the_region_around_a_model_is_an_event(region, policy):
    model, entered = make_model(), region()
    with mezzo.observe(model) as run, entered:
        model(batch()[0])
        model(batch()[0])
    (event,) = [one for one in run.events if "region" in str(one.fields.get("reason"))]
    assert event.step == 1
    assert event.fields["dtype"] == "float16"
    assert policy in event.fields["policy"]


def test_a_model_alone_counts_its_forward_passes():
    model = make_model()
    with mezzo.observe(model, every=2) as run:
        for _ in range(3):
            model(batch()[0]).sum().backward()
    assert [one.step for one in run.steps] == [1, 2, 3]
    assert set(run.numerics) == {"parameters", "activations", "gradients"}


def test_updates_of_a_shared_scaler_for_another_model_are_not_steps_of_this_one():
    models, losses = [make_model(), nn.Linear(4, 2)], []
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    scaler = mezzo.GradScaler("cpu", init_scale=8.0)
    x, y = batch()
    with mezzo.observe(models[0], optimizers[0], scaler) as run:
        for model, optimizer in [*zip(models, optimizers, strict=True)] * 3:
            loss = F.mse_loss(model(x), y)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [one.loss for one in run.steps] == losses[::2]


class Frozen(nn.Module):
    """A compiled model: its forward pass does not run hooks that are added later."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()


def test_a_loop_whose_forward_pass_is_not_seen_is_counted_by_its_updates():
    model = Frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mezzo.observe(model, optimizer) as run:
        run_loop(model.inner, optimizer, None)
    assert [one.step for one in run.steps] == [1, 2, 3, 4]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_model_that_is_observed_can_be_copied_and_its_copy_is_not_observed(copied):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Also in a step that is sampled, which has hooks in all modules.
    with mezzo.observe(model, optimizer, every=1) as run:
        output = model(batch()[0])
        other = copied(model)
        other(batch()[0])
        output.sum().backward()
        optimizer.step()
        assert torch.equal(other(batch()[0]), output)
    assert len(run.steps) == 1
    assert len(run.numerics["activations"]) == 3


def test_a_pickled_model_is_read_without_mezzo():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mezzo.observe(model, optimizer):
        model(batch()[0])
        assert b"mezzo" not in pickle.dumps(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_model_that_is_observed_can_be_traced():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, _ = batch()
    with mezzo.observe(model, optimizer, every=1):
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))


def test_steps_of_functorch_transforms_are_sampled_without_their_activations():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    with mezzo.observe(model, optimizer, every=1) as run:
        for _ in range(2):
            F.mse_loss(torch.vmap(model)(x), y).backward()
            optimizer.step()
    assert len(run.steps) == 2
    assert set(run.numerics) == {"parameters", "gradients", "updates"}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("wrap", [torch.compile, lambda one: nn.DataParallel(torch.compile(one))])
def test_names_of_a_compiled_model_are_those_of_the_model(wrap):
    with mezzo.observe(wrap(make_model())) as run:
        pass
    assert repr(run).startswith("Run of Sequential")


def test_hooks_are_not_compiled_into_a_model():
    torch._dynamo.reset()
    model = make_model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mezzo.observe(model, optimizer, every=1) as run:
        run_loop(compiled, optimizer, None, calls=2)
    run_loop(compiled, optimizer, None, calls=2)
    assert len(run.steps) == 2
    torch._dynamo.reset()


# -- a captured step -------------------------------------------------------------------------------


@pytest.fixture
def capturer(monkeypatch):
    return fake_captures(monkeypatch)


def test_a_captured_step_is_captured_again_with_a_run_and_without_it(capturer):
    step = make_step(dtype="bfloat16", channels_last=False)
    use_capture(step)
    train(step, calls=5)
    assert len(capturer.graphs) == 1
    with mezzo.observe(step, numerics=False) as run:
        train(step, calls=6)
        assert len(capturer.graphs) == 2
        assert capturer.graphs[1].replays == 3
    assert len(run.steps) == 6
    train(step, calls=6)
    assert len(capturer.graphs) == 3
    assert capturer.graphs[2].replays == 3


def test_a_sampled_call_of_a_captured_step_runs_eagerly_and_keeps_the_graph(capturer):
    step = make_step(dtype="bfloat16", channels_last=False)
    use_capture(step)
    with mezzo.observe(step, every=4) as run:
        train(step, calls=9)
    # Calls 1, 5 and 9 are sampled; three others warm up. All run on the stream of the capture.
    assert capturer.warm_ups == 3 + 3
    assert [graph.replays for graph in capturer.graphs] == [3]
    assert run.numerics["activations"]["0"].count == 64


@pytest.fixture
def few_looks(monkeypatch):
    """Let runs look at the history every 20 steps, as on a device, and count the calls they see."""
    seen = []
    end = mezzo.Run.end
    monkeypatch.setattr(mezzo.Run, "_steps_to_next_poll", lambda *_: 20)
    monkeypatch.setattr(
        mezzo.Run, "end", lambda run, number: seen.append(number) or end(run, number)
    )
    return seen


def test_a_run_sees_only_the_calls_in_which_it_has_something_to_do(capturer, few_looks):
    step = make_step(dtype="bfloat16", channels_last=False)
    use_capture(step)
    with mezzo.observe(step, every=25) as run:
        train(step, calls=70)
    assert few_looks == [1, 21, 25, 26, 41, 50, 51, 61]
    assert [one.step for one in run.steps] == list(range(1, 71))
    assert run.steps[-1].scale == 1.0


def test_a_call_that_raises_is_observed_again(few_looks):
    step = make_step()
    with mezzo.observe(step, every=20) as run:
        train(step, calls=20)
        with pytest.raises(RuntimeError):
            step(torch.ones(2, 3), torch.ones(2, 2))
        train(step, calls=1)
    assert few_looks == [1, 20, 21]
    assert run.steps[-1].step == 21
    assert run.numerics["activations"]["0"].count == 64


def test_short_steps_are_looked_at_rarely_and_long_ones_often():
    with mezzo.observe(make_step()) as run:
        run._lags = True
        for seconds, steps in ((0.0, 2048), (0.5, 50), (1000.0, 1)):
            run._last_poll = (0, time.perf_counter() - seconds)
            assert run._steps_to_next_poll(100) == pytest.approx(steps, abs=2)


def test_events_have_the_number_of_their_step():
    step = make_step()
    with mezzo.observe(step) as run:
        train(step, calls=2)
        _events.emit(_events.ScalingNotNeeded("bfloat16", "between steps"))
        hook = step.models[0].register_forward_hook(
            lambda *_: _events.emit(_events.ScalingNotNeeded("bfloat16", "in a step"))
        )
        train(step, calls=1)
        hook.remove()
    found = {one.fields["reason"]: one.step for one in run.events if "reason" in one.fields}
    assert (found["between steps"], found["in a step"]) == (2, 3)


def test_a_step_that_is_built_again_is_still_observed():
    step = make_step()
    with mezzo.observe(step) as run:
        train(step, calls=2)
        step._build(step._components, step._executor.options)
        train(step, calls=2)
    assert [one.step for one in run.steps] == [1, 2, 3, 4]
    assert step._executor.metrics.history is None


# -- collectors ------------------------------------------------------------------------------------


class Steps:
    """A collector that notes the steps it was started for."""

    def __init__(self):
        self.started, self.open = [], False

    def start(self, step):
        self.started.append(step)
        self.open = True

    def stop(self):
        self.open = False

    def take(self, time):
        return []


def test_the_ops_of_a_step_of_each_interval_are_counted(tmp_path):
    step = make_step()
    with mezzo.observe(step, every=3, ops=True, log=tmp_path / "run.jsonl") as run:
        assert "No step was sampled" in str(run.ops)
        train(step, calls=5)
    rows = {(row.module, row.op, row.dtype) for row in run.ops.rows}
    assert ("0", "addmm", "float16") in rows
    assert "addmm" in str(run.ops)
    logged = [line for line in mezzo.read_log(tmp_path / "run.jsonl") if line["kind"] == "ops"]
    assert [line["step"] for line in logged] == [2, 5]
    assert {"module", "op", "dtype", "calls", "cast_bytes"} <= set(logged[0]["rows"][0])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_sampled_once(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            hidden = self.first(x)
            return checkpoint(self.second, hidden, use_reentrant=use_reentrant)

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mezzo.observe(model, optimizer) as run:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert list(run.numerics["activations"]) == ["first", "second"]


def test_the_ops_are_those_of_the_step_and_not_of_the_observer():
    step = make_step()
    with mezzo.observe(step, ops=True) as run:
        train(step, calls=2)
    step, (x, y) = make_step(), batch()
    step(x, y)
    with mezzo.op_stats(step) as expected:
        step(x, y)
    assert run.ops.rows == expected.rows


def test_ops_that_are_not_counted_say_what_to_pass():
    with mezzo.observe(make_step()) as run, pytest.raises(mezzo.PolicyError, match="ops=True"):
        _ = run.ops
    with pytest.raises(mezzo.PolicyError, match="Count the ops of a loop"):
        mezzo.observe(make_model(), ops=True)


def test_each_collector_has_steps_of_its_own():
    step = make_step()
    with mezzo.observe(step, every=4, numerics=False) as run:
        first, second = collectors = Steps(), Steps()
        run.collectors += collectors
        train(step, calls=10)
    assert (first.started, second.started) == ([1, 5, 9], [2, 6, 10])
    assert not first.open
    assert not second.open


# -- nothing is left behind ------------------------------------------------------------------------


def state_of(*owners):
    """Attributes and hooks of objects, of modules with those of their submodules."""
    found = []
    for owner in owners:
        modules = owner.modules() if isinstance(owner, nn.Module) else [owner]
        for one in modules:
            found.append({name: id(value) for name, value in vars(one).items()})
            found.append(
                {name: len(value) for name, value in vars(one).items() if "hooks" in name and value}
            )
    return found


def parameter_hooks(model):
    return [one._post_accumulate_grad_hooks for one in model.parameters()]


@pytest.mark.parametrize("raises", [False, True])
def test_stopping_leaves_a_step_as_it_was(raises):
    step = make_step()
    train(step, calls=1)
    owners = step, *step.models, *step.optimizers, step.scaler
    before, sinks = state_of(*owners), _events.listening()
    run = mezzo.observe(step, every=1)
    if raises:
        with pytest.raises(RuntimeError):
            step(torch.ones(2, 3), torch.ones(2, 2))
    run.stop()
    run.stop()
    after = state_of(*owners)
    assert after == before
    assert not any(parameter_hooks(step.models[0]))
    assert _events.listening() is sinks
    assert step.scaler._records.counts is None
    assert step._executor.metrics.history is None
    train(step, calls=1)
    assert run.steps == []


@pytest.mark.parametrize("kind", SCALERS)
def test_stopping_leaves_a_loop_as_it_was(kind):
    model, scaler = make_model(), SCALERS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    owners = [model, optimizer] + [scaler] * (scaler is not None)
    before = state_of(*owners)
    run = mezzo.observe(model, optimizer, scaler, every=1)
    model(batch()[0])
    run.stop()
    assert state_of(*owners) == before
    assert not any(parameter_hooks(model))


def test_a_stopped_run_keeps_neither_the_step_nor_the_model_alive():
    step = make_step()
    with mezzo.observe(step, every=2) as run:
        train(step, calls=3)
    references = [weakref.ref(step), weakref.ref(step.models[0]), weakref.ref(step.optimizers[0])]
    del step
    gc.collect()
    assert [one() for one in references] == [None, None, None]
    assert len(run.steps) == 3


def test_a_step_that_raises_does_not_count():
    step = make_step()
    with mezzo.observe(step, every=1) as run:
        train(step, calls=1)
        with pytest.raises(RuntimeError):
            step(torch.ones(2, 3), torch.ones(2, 2))
        train(step, calls=1)
    assert [one.step for one in run.steps] == [1, 2]


def test_two_runs_observe_one_loop_and_stop_in_any_order():
    model, scaler = make_model(), SCALERS["torch"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = mezzo.observe(model, optimizer, scaler)
    second = mezzo.observe(model, optimizer, scaler)
    run_loop(model, optimizer, scaler, calls=1)
    first.stop()
    run_loop(model, optimizer, scaler, calls=1)
    second.stop()
    run_loop(model, optimizer, scaler, calls=1)
    assert (len(first.steps), len(second.steps)) == (1, 2)
    assert not {"update", "scale"} & set(vars(scaler))


@pytest.mark.parametrize("target", ["step", "scaler"])
def test_a_second_run_of_one_step_or_scaler_is_refused_and_changes_nothing(target, tmp_path):
    if target == "step":
        arguments = (make_step(dtype="bfloat16"),)
    else:
        model = make_model()
        arguments = (model, torch.optim.SGD(model.parameters()), SCALERS["mezzo"]())
    with mezzo.observe(*arguments):
        before = state_of(*arguments)
        with pytest.raises(mezzo.UnsupportedError, match=r"observed by another run.*stop\(\)"):
            mezzo.observe(*arguments, log=tmp_path / "log.jsonl")
        assert state_of(*arguments) == before
    assert not (tmp_path / "log.jsonl").exists()


def test_a_log_that_cannot_be_written_is_refused_and_nothing_is_attached(tmp_path):
    step = make_step()
    before = state_of(step, step.scaler)
    for log in (tmp_path, tmp_path / "missing" / "run.jsonl"):
        with pytest.raises(mezzo.PolicyError, match="is no file in an existing folder"):
            mezzo.observe(step, log=log)
    assert state_of(step, step.scaler) == before


# -- what is printed, and what is refused ----------------------------------------------------------


def test_a_run_prints_a_summary(tmp_path):
    step = make_step()
    with mezzo.observe(step, log=tmp_path / "run.jsonl", every=2) as run:
        train(step, calls=4, bad=(2,))
        assert "running" in repr(run)
    text = repr(run)
    assert "Run of Sequential, O2, float16: stopped" in text
    assert "steps: 4, skipped: 1, loss scale: " in text
    assert "last skip: step 2, 0.weight" in text
    assert str(tmp_path / "run.jsonl") in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: (F.relu,), "got function"),
        (lambda: (make_step(), torch.optim.SGD([torch.zeros(1)])), "Pass the step alone"),
        (lambda: (make_model(), "adam"), "is not a torch.optim.Optimizer"),
        (lambda: (make_model(), None, mezzo.GradScaler("cpu")), "together with the optimizers"),
    ],
)
def test_what_cannot_be_observed_is_refused(arguments, message):
    with pytest.raises(mezzo.PolicyError, match=message):
        mezzo.observe(*arguments())


@pytest.mark.parametrize("options", [{"every": 0}, {"every": True}, {"max_bytes": -1}])
def test_numbers_that_are_not_positive_are_refused(options):
    with pytest.raises(mezzo.PolicyError, match="is not a positive integer"):
        mezzo.observe(make_model(), **options)
