"""Who is captured, and who is told that he is not."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from support.step_models import Made, boosted

import mezzo
from mezzo import _events
from mezzo.step.capture import EagerRunner, capture_obstacle, root_cause, warn_not_captured
from mezzo.step.components import Capture


def test_on_a_cpu_steps_run_eagerly_and_quietly():
    made = Made("mlp")
    with _events.listen() as heard:
        step = mezzo.TrainStep(made.model, boosted, made.optimizer, dtype="bfloat16")
    assert isinstance(step._runner, EagerRunner)
    assert "no CUDA graphs" in step.eager_reason
    assert sum(isinstance(event, _events.StepNotCaptured) for event in heard) == 1
    assert "cpu" in capture_obstacle(step._components)


def test_who_asks_for_no_capture_needs_no_reason():
    made = Made("mlp")
    assert (
        mezzo.TrainStep(
            made.model, boosted, made.optimizer, dtype="bfloat16", capture=False
        ).eager_reason
        is None
    )


def test_elsewhere_it_is_said_aloud():
    with pytest.warns(
        UserWarning, match="cannot be captured as a CUDA graph and runs eagerly: because"
    ):
        warn_not_captured("because", Capture.AUTO)


def test_the_first_of_several_errors_is_named():
    def fail():
        try:
            {}["first"]
        except KeyError:
            torch.ones(2).view(3)

    with warnings.catch_warnings(), pytest.raises(RuntimeError) as caught:
        fail()
    assert re.fullmatch(
        r"KeyError: 'first', in .*test_eager_runner\.py:\d+: \{\}\[\"first\"\]",
        root_cause(caught.value),
    )
