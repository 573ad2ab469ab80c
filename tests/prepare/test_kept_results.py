"""Models whose modules keep tensors with a history are copied wherever mezzo runs a copy."""

from __future__ import annotations

import torch
from torch import nn

import mezzo
from mezzo.cli.explain import explain_model
from mezzo.comparing.own_workload import own_workload
from mezzo.prepare.kept_results import copy_with_results

X = torch.ones(2, 4)


class Normed(nn.Module):
    """Keeps the weight that it computed, as the old `torch.nn.utils.weight_norm` does."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.ones(3, 4))
        self.weight = self.direction / self.direction.norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = self.direction / self.direction.norm()
        return nn.functional.linear(x, self.weight)


def test_a_copy_keeps_the_results_without_their_history():
    model = Normed()
    copied = copy_with_results(model)
    assert torch.equal(copied.weight, model.weight)
    assert not copied.weight.requires_grad
    assert torch.equal(copied(X), model(X))


def test_a_model_that_keeps_results_is_advised_on():
    loss_fn = nn.functional.mse_loss
    assert mezzo.advise(Normed(), (X, torch.ones(2, 3)), loss_fn, rounds=1).verdict
    assert mezzo.advise(Normed(), X, gpu="H100").verdict


def test_a_model_that_keeps_results_is_linted_and_trained_channels_last():
    model = Normed()
    assert mezzo.lint(model, sample=X, policy="O2", dtype="bfloat16") is not None
    optimizer = torch.optim.SGD(model.parameters())
    step = mezzo.TrainStep(
        model, nn.functional.mse_loss, optimizer, "O2", dtype="bfloat16", channels_last="auto"
    )
    assert step(X, torch.ones(2, 3)).isfinite()


def test_a_model_that_keeps_results_is_compared_and_explained(monkeypatch):
    workload = own_workload("mine", Normed(), X)
    assert isinstance(workload.make_model(), Normed)
    setup = {"model": Normed(), "sample": X}
    monkeypatch.setattr("mezzo.cli.explain.load_setup", lambda _: setup)
    assert explain_model("module:make_model", mezzo.Policy("O2", "bfloat16")).ops is not None
