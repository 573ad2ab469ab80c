"""The first update of a step searches for a loss scale, so that no batch is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mezzo
from mezzo.scaling import scale_search
from mezzo.step import train_step

X, Y = torch.randn(8, 4), torch.randn(8, 2)
LARGE = 100.0
"""Factor of a loss whose gradients overflow float16 at the initial scale."""


class Counting(nn.Module):
    """Counts its forward passes, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(2)
        self.dropout = nn.Dropout(0.1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.dropout(self.norm(self.linear(x)))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum() * LARGE


def make_step(policy: str, **options):
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return mezzo.TrainStep(model, loss_fn, optimizer, policy, dtype="float16", **options)


@pytest.mark.parametrize("policy", ["O1", "O2"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_no_update_is_skipped_and_forward_runs_once_for_each_batch(policy, accumulate):
    step = make_step(policy, accumulate=accumulate)
    for _ in range(2 * accumulate):
        step(X, Y)
    assert step.scaler.state().skipped_steps == 0
    assert step.scaler.state().good_steps == 2
    assert step.scale < 65536
    assert step.model.calls == int(step.model.norm.num_batches_tracked) == 2 * accumulate


def test_the_update_equals_one_at_the_found_scale():
    searched = make_step("O2")
    rng = torch.get_rng_state()
    searched(X, Y)
    torch.manual_seed(0)
    fixed = make_step("O2", scaler=mezzo.GradScaler("cpu", searched.scale, dynamic=False))
    torch.set_rng_state(rng)
    fixed(X, Y)
    for one, other in zip(searched.model.parameters(), fixed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_function_step_searches_too():
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    @mezzo.train_step(models=model, optimizers=optimizer, policy="O2", dtype="float16")
    def step(x, y):
        loss_fn(model(x), y).backward()

    step(X, Y)
    assert not step.skipped
    assert model.calls == 1


def test_a_resumed_step_does_not_search():
    first = make_step("O2", scaler=mezzo.GradScaler("cpu", 4.0))
    first(X, Y)
    resumed = make_step("O2")
    state = first.state_dict()
    resumed.load_state_dict(state)
    resumed(X, Y)
    assert resumed.scale == first.scale


def test_a_batch_with_non_finite_values_is_skipped_as_before():
    step = make_step("O2")
    step(X * float("inf"), Y)
    assert step.skipped
    assert step.scale == 32768


def test_the_first_update_runs_the_model_that_is_not_compiled(monkeypatch):
    compiled_calls = []

    def compile_model(model):
        def call(*args):
            compiled_calls.append(model.calls)
            return model(*args)

        return call

    monkeypatch.setattr(train_step, "_compile", compile_model)
    step = make_step("O2", compile=True)
    for _ in range(3):
        step(X, Y)
    assert compiled_calls == [1, 2]
    assert step.scaler.state().skipped_steps == 0


class _OnlyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.used = False
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.used:
            raise RuntimeError("the context was freed")
        ctx.used = True
        return gradient


def test_where_backward_cannot_run_twice_updates_are_skipped_as_usual(monkeypatch):
    monkeypatch.setattr(scale_search, "_warned", False)
    model = Counting()
    step = mezzo.TrainStep(
        model,
        lambda output, target: loss_fn(_OnlyOnce.apply(output), target),
        torch.optim.SGD(model.parameters(), lr=1e-6),
        "O2",
        dtype="float16",
    )
    with pytest.warns(UserWarning, match="the context was freed"):
        step(X, Y)
    assert step.skipped
    assert step.scale == 32768
    step(X, Y)
    assert model.calls == 2
