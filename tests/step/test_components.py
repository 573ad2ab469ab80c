"""Models, optimizers, scaler and schedulers of a step; arguments; states that do not fit."""

from __future__ import annotations

import pytest
import torch
from support.states import assert_equal
from support.step_models import Made, batches, copied, in_steps
from torch.optim import lr_scheduler

import mezzo
from mezzo.step.components import PrecisionArgs, prepare_components
from mezzo.step.options import Capture, Layout, Reduction


def prepare(made, policy=None, scheduler=None, **overrides):
    precision = PrecisionArgs(policy, None, overrides)
    return prepare_components(made.model, made.optimizer, precision, None, scheduler)


class TestPreparation:
    def test_plain_models_are_decorated_with_the_policy(self):
        made = Made("mlp")
        components = prepare(made, "O2", dtype="bfloat16")
        assert made.model.layers[0].weight.dtype is torch.bfloat16
        assert components.policy == mezzo.Policy("O2", "bfloat16")
        assert components.region.enabled
        assert not components.backward_region.enabled

    def test_the_default_policy_is_o1(self):
        assert prepare(Made("mlp"), dtype="bfloat16").policy.level.value == "O1"

    def test_decorated_models_keep_their_policy(self):
        made = Made("mlp")
        mezzo.decorate(made.model, made.optimizer, "O2", dtype="float16")
        components = prepare(made)
        assert components.policy == mezzo.Policy("O2", "float16")
        assert components.scaler is not None

    def test_schedulers_are_stored_by_optimizer(self):
        made = Made("mlp")
        scheduler = lr_scheduler.StepLR(made.optimizer, 3)
        assert prepare(made, scheduler=[scheduler]).schedulers == {made.optimizer: scheduler}

    def test_an_object_that_is_not_a_scheduler_is_refused(self):
        with pytest.raises(mezzo.UnsupportedError, match="not one of torch"):
            prepare(Made("mlp"), scheduler="cosine")

    def test_the_scaler_has_the_names_of_parameters(self):
        made = Made("mlp")
        scaler = prepare(made, dtype="float16").scaler
        scaler.scale(made.model(torch.ones(1, 8)).float().sum() * float("inf")).backward()
        assert scaler.step(made.optimizer).first_nonfinite == "layers.0.weight"

    @pytest.mark.parametrize(
        "unsupported",
        [
            lambda made: {"scheduler": lr_scheduler.ReduceLROnPlateau(made.optimizer)},
            lambda _: {"capture": True},
            lambda _: {"scaler": torch.amp.GradScaler("cpu")},
        ],
        ids=["scheduler", "capture on a CPU", "torch's scaler"],
    )
    def test_an_error_leaves_model_and_optimizer_unchanged(self, unsupported):
        made = Made("cnn")

        def layout():
            return [
                (id(tensor), tensor.data_ptr(), tensor.stride(), tensor.dtype)
                for tensor in (*made.model.parameters(), *made.model.buffers())
            ]

        def make(**kwargs):
            return mezzo.TrainStep(
                made.model,
                torch.nn.functional.cross_entropy,
                made.optimizer,
                "O2",
                dtype="float16",
                **kwargs,
            )

        before = layout()
        step, attributes = made.optimizer.step, set(vars(made.optimizer))
        kwargs = unsupported(made)
        with pytest.raises(mezzo.MezzoError):
            make(channels_last=True, **kwargs)
        assert layout() == before
        assert (made.optimizer.step, set(vars(made.optimizer))) == (step, attributes)
        assert "forward" not in vars(made.model)
        make()


class TestEnums:
    @pytest.mark.parametrize("enum", [Capture, Layout])
    @pytest.mark.parametrize(
        ("value", "name"),
        [("auto", "AUTO"), (True, "ON"), (False, "OFF")],
        ids=["auto", "on", "off"],
    )
    def test_switches_are_parsed(self, enum, value, name):
        assert enum.parse(value) is enum[name]

    def test_an_unknown_value_raises_with_the_allowed_ones(self):
        with pytest.raises(
            mezzo.PolicyError,
            match=r"Unknown accumulate_reduction 'median'\. Choose one of: mean, sum",
        ):
            Reduction.parse("median")


def trained(dtype="float16", **kwargs):
    return in_steps(Made("mlp"), batches("mlp", 3), "O1", dtype, **kwargs)[1]


class TestStates:
    """That states which fit resume bit for bit is shown in `test_train_step.py`."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state.pop("rng"), "lacks rng"),
            (lambda state: state["optimizers"].clear(), "0 optimizers"),
            (lambda state: state.update(scaler=None), "the state has none"),
            (lambda state: state.update(position=5), "accumulate=2"),
            (lambda state: state.update(position=-1), "position is -1, not a number of calls"),
            (lambda state: state.update(updates="many"), "updates is 'many'"),
            (lambda state: state.update(models={}), "models are {}, not a list"),
            (lambda state: state.update(gradients=None), "has no gradients, but position 1"),
            (lambda state: state["gradients"][0].pop(), r"gradients\[0\] are not a list"),
            (
                lambda state: state["gradients"][0].__setitem__(0, torch.ones(1)),
                r"'gradients\[0\]\[0\]' has shape \(1,\)",
            ),
            (lambda state: state["gradients"][0].__setitem__(0, 3), r"'gradients\[0\]\[0\]' is 3"),
            (
                lambda state: state["gradients"][0].__setitem__(
                    0, state["gradients"][0][0].double()
                ),
                "gradients and buffers cannot be loaded",
            ),
            (lambda state: state["rng"].pop("python"), "random generators"),
            (
                lambda state: state["scaler"].update(scale=-1.0),
                "GradScaler cannot be loaded.*which no gradient survives",
            ),
            (lambda state: state["optimizers"][0].pop("state"), "not the state of an optimizer"),
            (lambda state: state.clear(), "it lacks models"),
        ],
    )
    def test_a_state_that_does_not_fit_changes_nothing(self, change, message):
        step = trained(accumulate=2)
        state = copied(step.state_dict())
        change(state)
        before = copied(step.state_dict())
        with pytest.raises(mezzo.CheckpointError, match=message):
            step.load_state_dict(state)
        assert_equal(before, step.state_dict())

    def test_a_state_that_is_not_a_dictionary_is_refused(self):
        with pytest.raises(mezzo.CheckpointError, match="not the state of a step"):
            trained().load_state_dict([])

    def test_buffers_of_an_unfinished_update_are_checked(self):
        step = in_steps(Made("cnn"), batches("cnn", 3), "O1", "float16", accumulate=2)[1]
        state = copied(step.state_dict())
        index = next(index for index, value in enumerate(state["buffers"]) if value is not None)
        state["buffers"][index] = torch.ones(2, 2, 2)
        before = copied(step.state_dict())
        with pytest.raises(mezzo.CheckpointError, match="buffers"):
            step.load_state_dict(state)
        assert_equal(before, step.state_dict())

    def test_gradients_are_saved_only_during_an_accumulation(self):
        assert trained().state_dict()["gradients"] is None
        assert trained(accumulate=2).state_dict()["gradients"] is not None
