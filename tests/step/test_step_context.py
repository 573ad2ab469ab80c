"""Backward and update within one call."""

from __future__ import annotations

import pytest
import torch
from support.step_models import Made

import mezzo
from mezzo.autocasting.regions import enter_regions
from mezzo.step.components import PrecisionArgs, prepare_components
from mezzo.step.executor import ScaledBackward, StepContext, refuse_manual_step


def turn_of(dtype="float16", factor=1.0, **words):
    made = Made("mlp")
    parts = prepare_components(
        made.model, made.optimizer, PrecisionArgs("O1", None, {"dtype": dtype} | words), None, None
    )
    return StepContext(parts, loss_factor=factor, can_update=True), made


def test_gradients_are_scaled_and_divided():
    turn, made = turn_of(factor=0.5)
    turn.backward(made.model.layers[2].bias.sum())
    assert torch.equal(made.model.layers[2].bias.grad, torch.full((4,), 2.0**15))


def test_backward_runs_outside_the_region():
    turn, made = turn_of("bfloat16")
    seen = []
    made.model.layers[2].bias.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
    with mezzo.autocast("O1", device_type="cpu", dtype="bfloat16"):
        turn.backward(made.model.layers[2].bias.sum())
    assert seen == [False]


@pytest.mark.parametrize("handed", [False, True], ids=["by the body", "by update"])
def test_a_loss_is_scaled_once_under_a_policy_that_is_steered_by_a_mode(handed):
    turn, made = turn_of(preset="oneflow")
    bias = made.model.layers[2].bias
    seen = []
    bias.register_hook(lambda gradient: seen.append(gradient[0].item()))
    with enter_regions(turn._components.region), ScaledBackward(turn):
        loss = bias.sum()
        if handed:
            turn(loss, made.optimizer)
        else:
            loss.backward()
    assert seen == [2.0**16]


def test_only_what_has_gradients_is_stepped():
    turn, _ = turn_of()
    with pytest.raises(mezzo.ScalerError, match="has a gradient"):
        turn.step_remaining()


def test_what_is_known_on_the_host_needs_no_flag():
    turn, made = turn_of()
    turn.backward(made.model.layers[2].bias.sum() * float("nan"))
    turn.step_remaining()
    assert turn.found_nonfinite() is True


def test_losses_of_other_threads_are_left_alone():
    import threading

    turn, made = turn_of()
    bias = made.model.layers[2].bias
    with ScaledBackward(turn):
        thread = threading.Thread(target=lambda: bias.sum().backward())
        thread.start()
        thread.join()
    assert torch.equal(bias.grad, torch.ones(4))
    assert turn.loss is None


def test_a_step_by_hand_is_told_from_ours():
    turn, made = turn_of()
    handle = made.optimizer.register_step_pre_hook(refuse_manual_step)
    turn.backward(made.model.layers[2].bias.sum())
    turn.step_remaining()
    with pytest.raises(mezzo.ScalerError, match=r"SGD\.step\(\) was called"):
        made.optimizer.step()
    handle.remove()
