"""Inference under a policy."""

from __future__ import annotations

import pytest
import torch
from support.step_models import Made, batches, in_steps
from torch import nn

import mezzo


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_outputs_are_those_of_the_region_in_evaluation_mode():
    plain = make_model()
    with mezzo.autocast("O1", device_type="cpu", dtype="bfloat16"), torch.no_grad():
        expected = plain.eval()(X)
    assert torch.equal(mezzo.EvalStep(make_model(), "O1", dtype="bfloat16")(X), expected)


def test_modes_of_modules_and_statistics_do_not_change():
    model = make_model()
    model[1].eval()
    before = model[1].running_mean.clone()
    mezzo.EvalStep(model, "O1", dtype="bfloat16")(X)
    assert [module.training for module in model] == [True, False, True, True]
    assert torch.equal(model[1].running_mean, before)


def test_modes_are_restored_when_the_model_raises():
    model = make_model()
    with pytest.raises(RuntimeError, match="shapes"):
        mezzo.EvalStep(model, "O1", dtype="bfloat16")(torch.ones(2, 3))
    assert model.training


def test_outputs_are_ordinary_tensors_that_can_be_changed():
    evaluate = mezzo.EvalStep(make_model(), "O1", dtype="bfloat16")
    outputs = evaluate(X)
    assert not outputs.is_inference()
    outputs.add_(1)
    assert not torch.equal(evaluate(X), outputs)


def test_a_trained_model_keeps_its_policy_and_new_weights_are_used():
    made = Made("mlp")
    _, step = in_steps(made, batches("mlp", 3), "O2", "bfloat16")
    evaluate = mezzo.EvalStep(made.model)
    (x, y), *_ = batches("mlp", 1)
    before = evaluate(x)
    step(x, y)
    assert before.dtype is torch.bfloat16
    assert not torch.equal(evaluate(x), before)


class Forces(nn.Linear):
    """Returns an energy and its gradient by the positions."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = super().forward(x).square().sum()
        return energy, torch.autograd.grad(energy, x)[0]


class ForcesWithoutGraph(Forces):
    @torch.enable_grad()
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("model_class", [Forces, ForcesWithoutGraph])
def test_a_model_may_compute_gradients_itself(model_class):
    model, x = model_class(4, 2), torch.randn(3, 4)
    evaluate = mezzo.EvalStep(model, "O0")
    for _ in range(2):
        energy, forces = evaluate(x)
        assert torch.equal(forces, model(x)[1])
        assert not energy.requires_grad
    with torch.inference_mode(), pytest.raises(RuntimeError):
        mezzo.EvalStep(model_class(4, 2), "O0")(x)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_another_policy_than_that_of_a_decorated_model_is_refused():
    made = Made("mlp")
    in_steps(made, batches("mlp", 1), "O2", "bfloat16")
    with pytest.raises(mezzo.PolicyError, match="to use the model's"):
        mezzo.EvalStep(made.model, "O1")


def test_parameters_of_a_model_in_training_mode_are_not_made_16_bit():
    with pytest.raises(mezzo.PolicyError, match=r"model\.eval\(\) first"):
        mezzo.EvalStep(make_model(), "O2", dtype="bfloat16")
    assert mezzo.EvalStep(make_model().eval(), "O2", dtype="bfloat16")(X).dtype is torch.bfloat16


def test_nothing_is_captured_on_a_cpu():
    evaluate = mezzo.EvalStep(make_model(), dtype="bfloat16")
    assert not evaluate.captured
    assert "no CUDA graphs" in evaluate.eager_reason
    with pytest.raises(mezzo.UnsupportedError, match="no CUDA graphs"):
        mezzo.EvalStep(make_model(), dtype="bfloat16", capture=True)
