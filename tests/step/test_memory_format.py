"""channels_last on request, and when it is left alone."""

from __future__ import annotations

import pytest
import torch
from support.step_models import Made, batches, in_steps
from torch import nn

import mezzo
from mezzo import _events
from mezzo.step import memory_format
from mezzo.step.components import Layout


def is_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last)


def test_modules_and_tensors_are_converted():
    conv = mezzo.channels_last(nn.Conv2d(3, 8, 3))
    assert is_last(conv.weight)
    assert is_last(mezzo.channels_last(torch.ones(2, 3, 4, 4)))


def test_a_tensor_that_is_no_batch_of_images_is_refused():
    with pytest.raises(mezzo.PolicyError, match="4 dimensions"):
        mezzo.channels_last(torch.ones(2, 3))


def test_a_decorated_model_is_refused():
    made = Made("cnn")
    mezzo.decorate(made.model, made.optimizer, "O2", dtype="bfloat16")
    with pytest.raises(mezzo.PolicyError, match="before decorate"):
        mezzo.channels_last(made.model)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_with_channels_last_gives_the_same_losses(level):
    last, plain = (
        in_steps(Made("cnn"), batches("cnn", 10), level, "bfloat16", channels_last=word)[0]
        for word in (True, False)
    )
    assert torch.allclose(torch.tensor(last), torch.tensor(plain), rtol=3e-2, atol=1e-2)


def test_parameters_are_converted_before_they_are_decorated():
    made = Made("cnn")
    _, step = in_steps(made, batches("cnn", 2), "O2", "bfloat16", channels_last=True)
    assert is_last(made.model.conv.weight)
    assert step.channels_last_reason == "channels_last=True"


@pytest.mark.parametrize(
    ("name", "reason"), [("mlp", "no Conv2d"), ("cnn", "no tensor cores on cpu")]
)
def test_auto_says_why_a_model_is_left_alone(name, reason):
    made = Made(name)
    with _events.listen() as heard:
        _, step = in_steps(made, batches(name, 1), "O1", "bfloat16", channels_last="auto")
    assert reason in step.channels_last_reason
    assert [event.channels_last for event in heard if isinstance(event, _events.LayoutChosen)] == [
        False
    ]


def test_a_model_that_has_its_channels_last_keeps_them():
    choice = memory_format.decide(
        mezzo.channels_last(nn.Sequential(nn.Conv2d(3, 8, 3))), Layout.AUTO
    )
    assert choice.channels_last
