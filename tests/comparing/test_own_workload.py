"""A workload of the user's own model, sample, loss function and optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo._errors import PolicyError
from mezzo.comparing.own_workload import own_workload

X, Y = torch.ones(8, 4), torch.zeros(8, 2)


def test_the_model_and_the_optimizer_are_copied_and_the_copy_trains_alike():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(
        [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.1}], momentum=0.9
    )
    before = copy.deepcopy(model.state_dict())
    workload = own_workload("mine", model, (X, Y), F.mse_loss, optimizer)
    copied = workload.make_model()
    of_copy = workload.make_optimizer(copied)
    assert [group["lr"] for group in of_copy.param_groups] == [0.5, 0.1]
    assert of_copy.param_groups[0]["params"][0] is copied.weight
    workload.loss(copied, workload.make_batch(0)).backward()
    of_copy.step()
    assert not torch.equal(copied.weight, model.weight)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_the_title_has_the_model_the_batch_and_the_optimizer():
    workload = own_workload("mine", nn.Linear(4, 2), (X, Y), F.mse_loss)
    assert workload.title == "Linear, batch 8, AdamW"
    assert (workload.samples, workload.data) == (8, "the sample of the factory")


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, a, b=None):
        return {"logits": self.layer(a) + b, "kept": [1]}


class OwnLoss(nn.Linear):
    def forward(self, x):
        hidden = super().forward(x)
        return {"loss": hidden.mean(), "hidden": hidden}


@pytest.mark.parametrize(
    ("model", "sample", "loss_fn", "expected"),
    [
        (nn.Linear(4, 2), (X, Y), F.mse_loss, lambda m: F.mse_loss(m(X), Y)),
        (nn.Linear(4, 2), [X, Y], nn.MSELoss(), lambda m: F.mse_loss(m(X), Y)),
        (nn.Linear(4, 2), X, None, lambda m: m(X).square().mean()),
        (OwnLoss(4, 2), X, None, lambda m: m(X)["loss"]),
        (TwoInputs(), {"a": X, "b": Y}, None, lambda m: m(X, Y)["logits"].square().mean()),
        (TwoInputs(), (X, Y), None, lambda m: m(X, Y)["logits"].square().mean()),
        (
            TwoInputs(),
            ((X, Y), Y),
            lambda out, y: (out["logits"].sum() + y.sum(), "aux"),
            lambda m: m(X, Y)["logits"].sum(),
        ),
    ],
)
def test_the_loss_is_that_of_the_function_the_model_or_the_square_of_the_outputs(
    model, sample, loss_fn, expected
):
    workload = own_workload("mine", model, sample, loss_fn)
    assert torch.equal(workload.loss(model, workload.make_batch(0)), expected(model))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, X), "compare takes a model, got int."),
        ((nn.Linear(4, 2).half(), X), "float16 parameters"),
        ((nn.ReLU(), X), "ReLU has no parameters that are trained."),
        ((nn.Linear(4, 2), X, F.mse_loss), "With loss_fn the sample is (inputs, target)"),
        ((nn.Linear(4, 2), X, None, []), "optimizer is list. Return one optimizer"),
    ],
)
def test_what_cannot_be_trained_is_refused(arguments, message):
    with pytest.raises(PolicyError) as error:
        own_workload("mine", *arguments)
    assert message in str(error.value)


def test_a_decorated_model_is_refused():
    model = mezzo.decorate(nn.Linear(4, 2), None, "O1", dtype="bfloat16")
    with pytest.raises(PolicyError, match="The model is decorated"):
        own_workload("mine", model, X)


def test_a_loss_function_without_a_loss_is_refused():
    workload = own_workload("mine", nn.Linear(4, 2), (X, Y), lambda out, y: {"no": out})
    with pytest.raises(PolicyError, match="loss_fn returned no loss"):
        workload.loss(nn.Linear(4, 2), workload.make_batch(0))


def test_a_model_without_floating_outputs_and_without_a_loss_is_refused():
    workload = own_workload("mine", nn.Linear(4, 2), X)
    with pytest.raises(PolicyError, match="There is no loss in the model's output"):
        workload.loss(lambda x: x.long(), workload.make_batch(0))
