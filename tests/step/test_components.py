"""What a step is made of."""

from __future__ import annotations

import pytest
import torch
from support.step_models import Made
from torch.optim import lr_scheduler

import mezzo
from mezzo.step.components import PrecisionArgs, prepare_components


def test_a_plain_pair_is_decorated_as_the_policy_says():
    made = Made("mlp")
    parts = prepare_components(
        made.model, made.optimizer, PrecisionArgs("O2", None, {"dtype": "bfloat16"}), None, None
    )
    assert made.model.layers[0].weight.dtype is torch.bfloat16
    assert parts.policy == mezzo.Policy("O2", "bfloat16")
    assert parts.region.enabled


def test_without_a_policy_it_is_o1():
    made = Made("mlp")
    parts = prepare_components(
        made.model, made.optimizer, PrecisionArgs(None, None, {"dtype": "bfloat16"}), None, None
    )
    assert parts.policy.level.value == "O1"


def test_a_decorated_pair_brings_its_own():
    made = Made("mlp")
    mezzo.decorate(made.model, made.optimizer, "O2", dtype="float16")
    parts = prepare_components(
        made.model, made.optimizer, PrecisionArgs(None, None, {}), None, None
    )
    assert parts.policy == mezzo.Policy("O2", "float16")
    assert parts.scaler is not None


def test_schedulers_are_kept_by_their_optimizer():
    made = Made("mlp")
    scheduler = lr_scheduler.StepLR(made.optimizer, 3)
    assert prepare_components(
        made.model, made.optimizer, PrecisionArgs(None, None, {}), None, [scheduler]
    ).schedulers == {made.optimizer: scheduler}


def test_what_is_no_scheduler_is_refused():
    made = Made("mlp")
    with pytest.raises(mezzo.UnsupportedError, match="not one of torch"):
        prepare_components(
            made.model, made.optimizer, PrecisionArgs(None, None, {}), None, "cosine"
        )


def test_names_of_parameters_are_known_to_the_scaler():
    made = Made("mlp")
    parts = prepare_components(
        made.model, made.optimizer, PrecisionArgs(None, None, {"dtype": "float16"}), None, None
    )
    parts.scaler.scale(made.model(torch.ones(1, 8)).float().sum() * float("inf")).backward()
    assert parts.scaler.step(made.optimizer).first_nonfinite == "layers.0.weight"


@pytest.mark.parametrize(
    "refused",
    [
        lambda made: {"scheduler": lr_scheduler.ReduceLROnPlateau(made.optimizer)},
        lambda _: {"capture": True},
        lambda _: {"scaler": torch.amp.GradScaler("cpu")},
    ],
    ids=["scheduler", "capture on a CPU", "torch's scaler"],
)
def test_a_step_that_cannot_be_made_leaves_the_pair_as_it_was(refused):
    made = Made("cnn")
    before = [
        (id(tensor), tensor.data_ptr(), tensor.stride(), tensor.dtype)
        for tensor in (*made.model.parameters(), *made.model.buffers())
    ]
    step, attributes = made.optimizer.step, set(vars(made.optimizer))
    words = refused(made)
    with pytest.raises(mezzo.MezzoError):
        mezzo.TrainStep(
            made.model,
            torch.nn.functional.cross_entropy,
            made.optimizer,
            "O2",
            dtype="float16",
            channels_last=True,
            **words,
        )
    assert [
        (id(tensor), tensor.data_ptr(), tensor.stride(), tensor.dtype)
        for tensor in (*made.model.parameters(), *made.model.buffers())
    ] == before
    assert (made.optimizer.step, set(vars(made.optimizer))) == (step, attributes)
    assert "forward" not in vars(made.model)
    mezzo.TrainStep(
        made.model, torch.nn.functional.cross_entropy, made.optimizer, "O2", dtype="float16"
    )
