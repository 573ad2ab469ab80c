"""Step metrics: what is written and read, and warnings about the loss."""

from __future__ import annotations

import math
import warnings
from math import isinf, isnan
from pathlib import Path

import pytest
import torch
from support.interpreted import needs_triton, run_interpreted
from support.step_models import Made, batches, boosted, in_steps, same, weights
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.step.metrics import MetricsBuffer, StepMetrics

CPU = torch.device("cpu")


@needs_triton
def test_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("metrics_interpreted.py"))


def test_before_the_first_step_only_the_scale_is_known():
    assert MetricsBuffer(CPU, None).read() == StepMetrics(
        0.0, skipped=False, scale=1.0, skipped_steps=0
    )
    assert MetricsBuffer(CPU, mezzo.GradScaler("cpu", init_scale=4.0)).read().scale == 4.0


def test_a_call_without_an_update_writes_its_loss_only():
    metrics = MetricsBuffer(CPU, None)
    metrics.write(torch.tensor(3.0), None)
    assert metrics.read() == StepMetrics(3.0, skipped=False, scale=1.0, skipped_steps=0)


def test_an_update_writes_scale_and_skips():
    scaler = mezzo.GradScaler("cpu", init_scale=4.0)
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum() * float("inf")).backward()
    found_nonfinite = scaler.step(optimizer).skipped
    scaler.update()
    metrics = MetricsBuffer(CPU, scaler)
    metrics.write(torch.tensor(2.0), found_nonfinite)
    assert metrics.read() == StepMetrics(2.0, skipped=True, scale=2.0, skipped_steps=1)
    assert metrics.scale_and_skips() == (2.0, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_writing_metrics_is_not_among_the_ops_of_a_step(dtype):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mezzo.TrainStep(model, torch.nn.functional.mse_loss, optimizer, "O1", dtype=dtype)
    with mezzo.op_stats(step) as ops:
        step(torch.ones(3, 4), torch.zeros(3, 2))
    assert step.metrics.loss > 0.0
    assert "float64" not in {row.dtype for row in ops.rows}


def test_a_nonfinite_loss_without_a_scaler_is_warned_about_once():
    metrics = MetricsBuffer(CPU, None)
    metrics.write(torch.tensor(float("nan")), False)
    with pytest.warns(UserWarning, match="The loss is nan and no GradScaler is used"):
        metrics.warn_if_nonfinite()
    metrics.warn_if_nonfinite()


def test_a_nonfinite_loss_with_a_scaler_is_not_warned_about():
    metrics = MetricsBuffer(CPU, mezzo.GradScaler("cpu"))
    metrics.write(torch.tensor(float("nan")), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.warn_if_nonfinite()


# -- learning rate and gradient norm of a step -----------------------------------------------------

LEVELS = [(level, dtype) for level in ("O1", "O2") for dtype in ("bfloat16", "float16")]


def norm_of(model: nn.Module, x: torch.Tensor, y: tuple[torch.Tensor, ...]) -> float:
    """Return the norm of the gradients in the precision of a float32 model."""
    loss = boosted(model(x), *y)
    return float(nn.utils.get_total_norm(torch.autograd.grad(loss, list(model.parameters()))))


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("options", [{"grad_norm": True}, {"clip_norm": 1e-3}])
def test_the_norm_is_that_of_the_unscaled_gradients_before_clipping(level, dtype, options):
    made = Made("mlp")
    ((x, y),) = batches("mlp", 1)
    expected = norm_of(made.model, x, y)
    _, step = in_steps(made, iter([(x, y)]), level, dtype, **options)
    assert step.grad_norm == step.metrics.grad_norm == pytest.approx(expected, rel=0.03)
    assert float(mezzo.grad_norm(made.optimizer)) == pytest.approx(step.grad_norm)


def test_the_norm_of_sparse_gradients_counts_rows_that_occur_twice_once():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    step = mezzo.TrainStep(embedding, torch.sum, optimizer, "O0", grad_norm=True)
    step(torch.tensor([1, 2, 2]))
    assert step.grad_norm == pytest.approx((2 * 1.0 + 2 * 4.0) ** 0.5)


def test_the_norm_is_none_where_it_is_not_computed():
    _, step = in_steps(Made("mlp"), batches("mlp", 1), "O2", "bfloat16")
    assert step.grad_norm is None


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_computing_the_norm_does_not_change_the_training(level, dtype):
    runs = []
    for grad_norm in (False, True):
        made = Made("mlp", "AdamW")
        data = batches("mlp", 6, overflows=[2] if dtype == "float16" else ())
        losses, _ = in_steps(made, data, level, dtype, grad_norm=grad_norm)
        runs.append((losses, weights(made.model)))
    assert same(runs[0][1], runs[1][1])
    assert runs[0][0][3:] == runs[1][0][3:]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_norm_of_a_skipped_update_is_not_finite(level):
    made = Made("mlp")
    _, step = in_steps(made, batches("mlp", 3, overflows=[2]), level, "float16", grad_norm=True)
    assert step.skipped
    assert isinf(step.grad_norm) or isnan(step.grad_norm)
    (x, y), *_ = batches("mlp", 1)
    step(x, y)
    assert 0.0 < step.grad_norm < 1e6


def test_undecorating_restores_an_optimizer_whose_norm_was_computed():
    made = Made("mlp")
    original = made.optimizer.step.__func__
    in_steps(made, batches("mlp", 1), "O1", "bfloat16", grad_norm=True)
    assert made.optimizer.step.__func__ is not original
    mezzo.undecorate(made.model)
    assert made.optimizer.step.__func__ is original


@pytest.mark.parametrize("accumulate", [1, 2])
def test_several_optimizers_have_one_norm_and_the_rate_of_the_first(accumulate):
    first, second = nn.Linear(3, 4), nn.Linear(4, 1)
    x = torch.randn(5, 3)
    loss = second(first(x)).square().mean()
    trained = [*first.parameters(), *second.parameters()]
    expected = float(nn.utils.get_total_norm(torch.autograd.grad(loss, trained)))
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=rate)
        for model, rate in ((first, 0.25), (second, 0.5))
    ]

    @mezzo.train_step(
        models=[first, second],
        optimizers=optimizers,
        policy="O0",
        accumulate=accumulate,
        grad_norm=True,
    )
    def step(x: torch.Tensor) -> torch.Tensor:
        return second(first(x)).square().mean()

    for _ in range(accumulate):
        step(x)
    assert step.grad_norm == pytest.approx(expected, rel=1e-5)
    assert step.rate == 0.25


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_rate_is_that_of_the_last_update_and_not_of_the_next(dtype):
    made = Made("mlp")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made.optimizer, gamma=0.5)
    before = made.optimizer.param_groups[0]["lr"]
    step = mezzo.TrainStep(
        made.model, boosted, made.optimizer, "O1", dtype=dtype, scheduler=scheduler
    )
    assert step.rate == before
    rates = []
    for x, y in batches("mlp", 3):
        step(x, y)
        rates.append(step.rate)
    assert rates == [before, before / 2, before / 4]
    assert made.optimizer.param_groups[0]["lr"] == before / 8


def test_a_rate_that_the_user_sets_is_read_as_it_was_set():
    made = Made("mlp")
    _, step = in_steps(made, batches("mlp", 1), "O2", "bfloat16")
    made.optimizer.param_groups[0]["lr"] = 0.003
    (x, y), *_ = batches("mlp", 1)
    step(x, y)
    assert step.rate == step.metrics.rate == 0.003


def test_a_tensor_as_rate_is_read_before_it_changes():
    made = Made("mlp")
    rate = torch.tensor(0.5)
    made.optimizer.param_groups[0]["lr"] = rate
    _, step = in_steps(made, batches("mlp", 1), "O1", "bfloat16")
    rate.fill_(0.25)
    assert step.rate == 0.5


def test_an_optimizer_without_a_rate_has_rate_zero():
    made = Made("mlp")

    class Signs(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad.sign() * 0.01)

    step = mezzo.TrainStep(
        made.model, boosted, Signs(made.model.parameters()), "O1", dtype="bfloat16"
    )
    (x, y), *_ = batches("mlp", 1)
    step(x, y)
    assert step.rate == 0.0


@pytest.mark.parametrize("part", ["state_dict", "run_state"])
def test_a_resumed_step_shows_the_loaded_rate_scale_and_skips_at_once(part):
    def make():
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scaler = mezzo.GradScaler("cpu", init_scale=64.0)
        return mezzo.TrainStep(
            model, F.mse_loss, optimizer, "O2", dtype="float16", scaler=scaler, scheduler=scheduler
        )

    first, resumed = make(), make()
    for scale in (1.0, 1.0, math.inf):
        first(torch.ones(2, 4) * scale, torch.ones(2, 4))
    if part == "state_dict":
        resumed.load_state_dict(first.state_dict())
    else:
        resumed.optimizers[0].load_state_dict(first.optimizers[0].state_dict())
        resumed.load_run_state(first.run_state())
    expected = first.optimizers[0].param_groups[0]["lr"], first.scale, 1
    assert expected[0] < 0.1
    assert expected[1] < 64.0
    assert (resumed.rate, resumed.scale, resumed.metrics.skipped_steps) == expected
