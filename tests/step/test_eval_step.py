"""Inference under a policy."""

from __future__ import annotations

import pytest
import torch
from support.step_models import Made, batches, in_steps
from torch import nn

import mezzo


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_outputs_are_those_of_the_region_in_evaluation_mode():
    plain, stepped = model(), model()
    with mezzo.autocast("O1", device_type="cpu", dtype="bfloat16"), torch.no_grad():
        expected = plain.eval()(X)
    assert torch.equal(mezzo.EvalStep(stepped, "O1", dtype="bfloat16")(X), expected)


def test_the_models_own_modes_stay():
    stepped = model()
    stepped[1].eval()
    before = stepped[1].running_mean.clone()
    mezzo.EvalStep(stepped, "O1", dtype="bfloat16")(X)
    assert [module.training for module in stepped] == [True, False, True, True]
    assert torch.equal(stepped[1].running_mean, before)


def test_modes_are_restored_when_the_model_raises():
    stepped = model()
    with pytest.raises(RuntimeError, match="shapes"):
        mezzo.EvalStep(stepped, "O1", dtype="bfloat16")(torch.ones(2, 3))
    assert stepped.training


def test_outputs_are_ordinary_tensors_of_ones_own():
    evaluate = mezzo.EvalStep(model(), "O1", dtype="bfloat16")
    outputs = evaluate(X)
    assert not outputs.is_inference()
    outputs.add_(1)
    assert not torch.equal(evaluate(X), outputs)


def test_a_trained_model_brings_its_policy_and_its_new_weights():
    made = Made("mlp")
    _, step = in_steps(made, batches("mlp", 3), "O2", "bfloat16")
    evaluate = mezzo.EvalStep(made.model)
    (x, y), *_ = batches("mlp", 1)
    before = evaluate(x)
    step(x, y)
    assert before.dtype is torch.bfloat16
    assert not torch.equal(evaluate(x), before)


def test_another_policy_than_the_models_own_is_refused():
    made = Made("mlp")
    in_steps(made, batches("mlp", 1), "O2", "bfloat16")
    with pytest.raises(mezzo.PolicyError, match="to use the model's"):
        mezzo.EvalStep(made.model, "O1")


def test_parameters_of_a_model_in_training_are_not_turned_into_16_bits():
    with pytest.raises(mezzo.PolicyError, match=r"model\.eval\(\) first"):
        mezzo.EvalStep(model(), "O2", dtype="bfloat16")
    assert mezzo.EvalStep(model().eval(), "O2", dtype="bfloat16")(X).dtype is torch.bfloat16


def test_nothing_is_captured_on_a_cpu():
    evaluate = mezzo.EvalStep(model(), dtype="bfloat16")
    assert not evaluate.captured
    assert "no CUDA graphs" in evaluate.eager_reason
    with pytest.raises(mezzo.UnsupportedError, match="no CUDA graphs"):
        mezzo.EvalStep(model(), dtype="bfloat16", capture=True)
