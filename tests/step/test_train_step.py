"""`TrainStep` on a CPU: the same numbers as the training loop written by hand."""

from __future__ import annotations

from math import isinf, isnan

import pytest
import torch
from support.step_models import (
    INF,
    Made,
    batches,
    boosted,
    by_hand,
    copied,
    in_steps,
    same,
    weights,
)
from torch import nn
from torch.optim import lr_scheduler

import mezzo
from mezzo import _events

STEPS = 200
OVERFLOWS = (0, 7, 8)
LEVELS = [("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16"), ("O2", "float16")]
SCHEDULES = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 100),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=300),
}


def close(one, other):
    return len(one) == len(other) and all(
        first == second or (isnan(first) and isnan(second))
        for first, second in zip(one, other, strict=True)
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_losses_and_weights_equal_the_loop_by_hand(name, level, dtype):
    hand, made = Made(name), Made(name)
    overflows = OVERFLOWS if dtype == "float16" else ()
    expected = by_hand(hand, batches(name, STEPS, overflows), level, dtype)
    losses, step = in_steps(made, batches(name, STEPS, overflows), level, dtype)
    assert close(losses, expected)
    assert same(weights(made.model), weights(hand.model))
    assert step.metrics.skipped_steps == len(overflows)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_schedulers_advance_with_successful_steps_only(level, dtype, schedule):
    hand, made = Made("mlp", "AdamW"), Made("mlp", "AdamW")
    overflows = OVERFLOWS if dtype == "float16" else ()
    expected = by_hand(
        hand, batches("mlp", STEPS, overflows), level, dtype, schedule=SCHEDULES[schedule]
    )
    losses, _ = in_steps(
        made, batches("mlp", STEPS, overflows), level, dtype, schedule=SCHEDULES[schedule]
    )
    assert close(losses, expected)
    assert isinstance(made.optimizer.param_groups[0]["lr"], float)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_three_calls_make_one_update(name, level, dtype):
    hand, made = Made(name), Made(name)
    overflows = OVERFLOWS if dtype == "float16" else ()
    expected = by_hand(hand, batches(name, STEPS + 1, overflows), level, dtype, accumulate=3)
    losses, _ = in_steps(made, batches(name, STEPS + 1, overflows), level, dtype, accumulate=3)
    assert close(losses, expected)
    assert same(weights(made.model), weights(hand.model))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_equals_the_decorated_loop(level):
    hand, made = Made("mlp"), Made("mlp")
    expected = by_hand(hand, batches("mlp", 50), level, "bfloat16", clip_norm=0.1)
    losses, _ = in_steps(made, batches("mlp", 50), level, "bfloat16", clip_norm=0.1)
    assert close(losses, expected)


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 1.0), ("sum", 2.0)])
def test_flush_updates_from_the_calls_so_far(reduction, factor):
    made, hand = Made("mlp"), Made("mlp")
    _, step = in_steps(
        made, batches("mlp", 2), "O0", "auto", accumulate=3, accumulate_reduction=reduction
    )
    step.flush()
    step.flush()
    for x, y in batches("mlp", 2):
        (boosted(hand.model(x), *y) * factor / 2).backward()
    hand.optimizer.step()
    for one, other in zip(weights(made.model), weights(hand.model), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_infinite_inputs_leave_batch_norm_statistics_unchanged():
    made = Made("cnn")
    _, step = in_steps(made, batches("cnn", 3), "O1", "float16")
    before = weights(made.model)
    x, (target, boost) = next(batches("cnn", 1))
    step(torch.full_like(x, INF), (target, boost))
    assert step.skipped
    assert same(weights(made.model), before)


def test_a_skipped_first_step_changes_nothing():
    made = Made("cnn")
    before = weights(made.model)
    _, step = in_steps(made, batches("cnn", 1, overflows=[0]), "O1", "float16")
    assert step.skipped
    assert step.scale == 2.0**15
    assert same(weights(made.model), before)
    assert not made.optimizer.state


def test_on_a_cpu_metrics_are_those_of_the_last_step():
    losses, step = in_steps(Made("mlp"), batches("mlp", 4, overflows=[3]), "O1", "float16")
    assert isinf(step.loss)
    assert isinf(losses[-1])
    assert step.skipped
    assert step.scale == 2.0**15
    assert step.metrics.skipped_steps == 1


def test_the_returned_loss_is_a_detached_copy():
    made = Made("mlp")
    _, step = in_steps(made, batches("mlp", 1), "O1", "bfloat16")
    (x, y), *_ = batches("mlp", 1)
    loss = step(x, y)
    kept = loss.clone()
    step(x, y)
    assert not loss.requires_grad
    assert torch.equal(loss, kept)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("at", [6, 7])
def test_a_saved_step_resumes_bit_for_bit(name, level, dtype, at):
    schedule = SCHEDULES["cosine"]
    made, again = Made(name, "AdamW"), Made(name, "AdamW")
    data = list(batches(name, 20, overflows=[2, 7, 9] if dtype == "float16" else ()))
    _, step = in_steps(made, iter(data[:at]), level, dtype, accumulate=2, schedule=schedule)
    state = copied(step.state_dict())
    expected = [float(step(x, y)) for x, y in data[at:]]
    _, resumed = in_steps(again, iter(data[:3]), level, dtype, accumulate=2, schedule=schedule)
    resumed.load_state_dict(state)
    assert close([float(resumed(x, y)) for x, y in data[at:]], expected)
    first, second = copied(step.state_dict()), resumed.state_dict()
    assert same(
        {key: first[key] for key in first if key != "rng"},
        {key: second[key] for key in second if key != "rng"},
    )


class Proxies(nn.Module):
    """A loss with a trained vector of each class."""

    def __init__(self):
        super().__init__()
        self.vectors = nn.Parameter(torch.eye(4))

    def forward(self, output, y):
        return nn.functional.cross_entropy(output @ self.vectors.t(), y)


def proxies_step(level, dtype, *, by_hand=False, **options):
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(6, 4), Proxies()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss_fn.parameters()], 0.1)
    if not by_hand:
        return mezzo.TrainStep(model, loss_fn, optimizer, level, dtype=dtype, **options)
    mezzo.decorate([model, loss_fn], optimizer, level, dtype=dtype)
    return mezzo.TrainStep(model, loss_fn, optimizer)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_a_loss_function_with_parameters_is_trained_and_saved(level, dtype, by_hand, tmp_path):
    x, y = torch.randn(8, 6), torch.arange(8) % 4
    step = proxies_step(level, dtype, by_hand=by_hand)
    assert step.models == (step.model, step.loss_fn)
    before = step.loss_fn.vectors.detach().clone()
    losses = [float(step(x, y)) for _ in range(10)]
    assert losses[-1] < losses[0] / 2
    assert not torch.equal(step.loss_fn.vectors, before)
    half = getattr(torch, dtype)
    assert step.loss_fn.vectors.dtype is (half if level == "O2" else torch.float32)
    mezzo.save_checkpoint(tmp_path / "run.pt", step=step)
    resumed = proxies_step(level, dtype, by_hand=by_hand)
    mezzo.load_checkpoint(tmp_path / "run.pt", step=resumed)
    assert [float(step(x, y)) for _ in range(3)] == [float(resumed(x, y)) for _ in range(3)]
    assert not mezzo.trace_overflow(step, (x, y))


def test_a_parameter_that_the_model_casts_itself_is_named_when_the_scale_falls():
    class Cast(Proxies):
        def forward(self, output, y):
            # As losses do that follow the dtype of their input.
            self.vectors.data = self.vectors.data.to(output.dtype)
            return super().forward(output, y)

    model, loss_fn = nn.Linear(6, 4), Cast()
    optimizer = torch.optim.Adam([*model.parameters(), *loss_fn.parameters()], 0.1)
    step = mezzo.TrainStep(model, loss_fn, optimizer, "O1", dtype="float16")
    x, y = torch.full((8, 6), INF), torch.arange(8) % 4
    with pytest.warns(UserWarning, match=r"'vectors' is 16-bit.*policy 'O2'"):
        _ = [step(x, y) for _ in range(25)]


def test_a_loss_function_whose_parameters_are_not_trained_stays_as_it_is():
    model, loss_fn = nn.Linear(6, 4), Proxies()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mezzo.TrainStep(model, loss_fn, optimizer, "O2", dtype="bfloat16")
    assert step.models == (model,)
    assert loss_fn.vectors.dtype is torch.float32


def test_a_nan_loss_without_a_scaler_is_warned_about_once():
    with pytest.warns(UserWarning, match="The loss is nan"), _events.listen() as events:
        _, step = in_steps(
            Made("mlp"),
            ((x, (t, torch.tensor(float("nan")))) for x, (t, _) in batches("mlp", 3)),
            "O1",
            "bfloat16",
        )
    assert isnan(step.loss)
    assert sum(isinstance(event, _events.LossNotFinite) for event in events) == 1


def test_a_nan_loss_with_a_scaler_is_skipped_and_training_continues():
    made = Made("mlp")
    data = [
        (x, (t, torch.tensor(float("nan") if place == 1 else 1.0)))
        for place, (x, (t, _)) in enumerate(batches("mlp", 5))
    ]
    losses, step = in_steps(made, iter(data), "O1", "float16")
    assert isnan(losses[1])
    assert not any(isnan(loss) for loss in losses[2:])
    assert step.metrics.skipped_steps == 1


class TestAccumulation:
    def test_calls_and_updates_are_counted(self):
        _, step = in_steps(Made("mlp"), batches("mlp", 7), "O1", "bfloat16", accumulate=3)
        assert (step.state_dict()["position"], step.state_dict()["updates"]) == (1, 2)
        step.flush()
        assert (step.state_dict()["position"], step.state_dict()["updates"]) == (0, 3)

    def test_a_flush_without_calls_does_nothing(self):
        made = Made("mlp")
        _, step = in_steps(made, batches("mlp", 3), "O1", "bfloat16", accumulate=3)
        before = made.model.layers[0].weight.clone()
        step.flush()
        assert step.state_dict()["updates"] == 1
        assert (made.model.layers[0].weight == before).all()

    def test_a_call_that_raises_is_not_counted(self):
        made = Made("mlp")
        _, step = in_steps(made, batches("mlp", 1), "O1", "bfloat16", accumulate=3)
        (x, _), *_ = batches("mlp", 1)
        with pytest.raises(TypeError, match="boost"):
            step(x, "no target")
        assert step.state_dict()["position"] == 1


class TestArguments:
    def made(self):
        model = Two()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    @pytest.mark.parametrize(
        "x",
        [(torch.ones(2, 4), torch.ones(2, 4)), {"one": torch.ones(2, 4), "two": torch.ones(2, 4)}],
        ids=["tuple", "dict"],
    )
    def test_tuples_and_dicts_are_unpacked_into_the_model(self, x):
        model, optimizer = self.made()
        step = mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, dtype="bfloat16")
        assert step(x, torch.zeros(2, 2)).shape == ()

    def test_a_loss_function_may_take_the_output_alone(self):
        model, optimizer = self.made()
        step = mezzo.TrainStep(
            model, lambda output: output.square().mean(), optimizer, dtype="bfloat16"
        )
        assert step((torch.ones(2, 4), torch.ones(2, 4))).shape == ()

    def test_a_compiled_model_gives_the_same_losses(self, monkeypatch):
        compiled = []
        monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
        made = Made("mlp")
        losses, _ = in_steps(made, batches("mlp", 3), "O1", "bfloat16", compile=True)
        assert compiled == [made.model]
        assert close(losses, in_steps(Made("mlp"), batches("mlp", 3), "O1", "bfloat16")[0])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, one, two):
        return self.linear(one + two)


class TestScalers:
    def step(self, **kwargs):
        made = Made("mlp")
        return mezzo.TrainStep(made.model, boosted, made.optimizer, **kwargs)

    @pytest.mark.parametrize(("dtype", "scaled"), [("float16", True), ("bfloat16", False)])
    def test_by_default_float16_has_one(self, dtype, scaled):
        assert (self.step(dtype=dtype).scaler is not None) is scaled

    def test_false_means_none(self):
        assert self.step(dtype="float16", scaler=False).scaler is None

    def test_a_scaler_that_is_passed_is_used(self):
        scaler = mezzo.GradScaler("cpu", init_scale=8.0)
        step = self.step(dtype="bfloat16", scaler=scaler)
        assert step.scaler is scaler
        assert step.scale == 8.0

    def test_a_disabled_scaler_means_none(self):
        assert (
            self.step(dtype="float16", scaler=mezzo.GradScaler("cpu", enabled=False)).scaler is None
        )

    def test_o3_has_a_fixed_scale_of_one(self):
        assert self.step(policy="O3", dtype="float16").scale == 1.0

    def test_torchs_scaler_is_refused(self):
        with pytest.raises(mezzo.PolicyError, match=r"not a mezzo\.GradScaler"):
            self.step(dtype="float16", scaler=torch.amp.GradScaler("cpu"))


class TestErrors:
    def test_another_policy_than_that_of_the_decorated_model(self):
        made = Made("mlp")
        mezzo.decorate(made.model, made.optimizer, "O2", dtype="bfloat16")
        with pytest.raises(mezzo.PolicyError, match="to use the model's"):
            mezzo.TrainStep(made.model, boosted, made.optimizer, "O1")

    def test_the_policy_of_the_decorated_model_may_be_repeated(self):
        made = Made("mlp")
        mezzo.decorate(made.model, made.optimizer, "O2", dtype="bfloat16")
        mezzo.TrainStep(made.model, boosted, made.optimizer, "O2", dtype="bfloat16")

    def test_another_clip_norm_than_that_of_the_decorated_optimizer(self):
        made = Made("mlp")
        mezzo.decorate(made.model, made.optimizer, "O2", dtype="bfloat16")
        with pytest.raises(mezzo.PolicyError, match=r"clip_norm=\.\.\.\) only"):
            mezzo.TrainStep(made.model, boosted, made.optimizer, clip_norm=1.0)

    def test_models_and_optimizers_that_were_not_decorated_together(self):
        made = Made("mlp")
        mezzo.decorate(made.model.eval(), None, "O2", dtype="bfloat16")
        with pytest.raises(mezzo.PolicyError, match="not together"):
            mezzo.TrainStep(made.model, boosted, made.optimizer)

    def test_a_model_that_an_eval_step_has_decorated(self):
        made = Made("mlp")
        mezzo.EvalStep(made.model)
        with pytest.raises(mezzo.PolicyError, match="create it after the step that trains"):
            mezzo.TrainStep(made.model, boosted, made.optimizer, "O2", dtype="bfloat16")

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"accumulate": 0},
            {"accumulate": True},
            {"accumulate_reduction": "median"},
            {"capture": "yes"},
            {"channels_last": 3},
        ],
        ids=str,
    )
    def test_invalid_arguments(self, kwargs):
        made = Made("mlp")
        with pytest.raises(mezzo.PolicyError, match=next(iter(kwargs))):
            mezzo.TrainStep(made.model, boosted, made.optimizer, dtype="bfloat16", **kwargs)

    def test_a_loss_of_several_elements(self):
        made = Made("mlp")
        step = mezzo.TrainStep(
            made.model, lambda output, target: output - target, made.optimizer, dtype="bfloat16"
        )
        with pytest.raises(mezzo.ScalerError, match="one element"):
            step(torch.ones(2, 8), torch.ones(2, 4))

    def test_a_loss_that_is_not_a_tensor(self):
        made = Made("mlp")
        step = mezzo.TrainStep(
            made.model, lambda output: output.sum().item(), made.optimizer, dtype="bfloat16"
        )
        with pytest.raises(mezzo.PolicyError, match=r"without \.item\(\)"):
            step(torch.ones(2, 8))

    def test_a_loss_that_depends_on_no_parameter(self):
        made = Made("mlp")
        step = mezzo.TrainStep(
            made.model, lambda output: output.detach().sum(), made.optimizer, dtype="bfloat16"
        )
        with pytest.raises(mezzo.ScalerError, match="does not depend"):
            step(torch.ones(2, 8))

    def test_a_loss_function_that_is_not_callable(self):
        made = Made("mlp")
        with pytest.raises(mezzo.PolicyError, match="loss_fn"):
            mezzo.TrainStep(made.model, "mse", made.optimizer)

    def test_a_model_that_is_no_module(self):
        made = Made("mlp")
        with pytest.raises(mezzo.PolicyError, match=r"model=list is not a torch\.nn\.Module"):
            mezzo.TrainStep([*made.model.parameters()], boosted, made.optimizer)
        step = mezzo.TrainStep(made.model, boosted, made.optimizer, dtype="bfloat16")
        with pytest.raises(mezzo.PolicyError, match="the attribute model of this TrainStep"):
            mezzo.EvalStep(step)

    def test_a_scheduler_of_another_optimizer(self):
        made, other = Made("mlp"), Made("mlp")
        scheduler = lr_scheduler.StepLR(other.optimizer, 1)
        with pytest.raises(mezzo.PolicyError, match="another optimizer"):
            mezzo.TrainStep(
                made.model, boosted, made.optimizer, dtype="bfloat16", scheduler=scheduler
            )

    def test_capture_on_a_cpu(self):
        made = Made("mlp")
        with pytest.raises(mezzo.UnsupportedError, match="no CUDA graphs"):
            mezzo.TrainStep(made.model, boosted, made.optimizer, dtype="bfloat16", capture=True)
