"""Metrics and profiler ranges of captured steps: those of the eager step, without a wait."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.step_models import Made, batches, boosted
from torch.optim import lr_scheduler
from torch.profiler import ProfilerActivity, profile

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LEVELS = [(level, dtype) for level in ("O1", "O2") for dtype in ("bfloat16", "float16")]
STEPS = 12


def _metrics(level: str, dtype: str, **options: Any) -> list[mezzo.StepMetrics]:
    """Return the metrics after each of some steps."""
    made = Made("mlp", "AdamW", "cuda")
    scheduler = lr_scheduler.ExponentialLR(made.optimizer, gamma=0.5)
    step = mezzo.TrainStep(
        made.model, boosted, made.optimizer, level, dtype=dtype, scheduler=scheduler, **options
    )
    found = []
    for x, y in batches("mlp", STEPS, overflows=[8] if dtype == "float16" else (), device="cuda"):
        step(x, y)
        torch.cuda.synchronize()
        found.append(step.metrics)
    assert step.captured == options["capture"]
    return found


@pytest.mark.parametrize("options", [{"grad_norm": True}, {"clip_norm": 0.01}, {}])
@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_captured_metrics_equal_eager_ones(level: str, dtype: str, options: dict[str, Any]) -> None:
    captured = _metrics(level, dtype, capture=True, **options)
    eager = _metrics(level, dtype, capture=False, **options)
    for one, other in zip(captured, eager, strict=True):
        assert one.rate == pytest.approx(other.rate, rel=1e-6)
        assert one.skipped == other.skipped
        if options:
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=0.02, nan_ok=True)
        else:
            assert one.grad_norm is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_rate_that_is_set_between_replays_is_the_next_metric(dtype: str) -> None:
    made = Made("mlp", "AdamW", "cuda")
    step = mezzo.TrainStep(made.model, boosted, made.optimizer, "O2", dtype=dtype, capture=True)
    for index, (x, y) in enumerate(batches("mlp", STEPS, device="cuda")):
        made.optimizer.param_groups[0]["lr"] = 0.001 * (index + 1)
        step(x, y)
        torch.cuda.synchronize()
        assert step.rate == 0.001 * (index + 1)
    assert step.captured


def test_reading_metrics_does_not_wait() -> None:
    made = Made("mlp", "AdamW", "cuda")
    scheduler = lr_scheduler.ExponentialLR(made.optimizer, gamma=0.5)
    step = mezzo.TrainStep(
        made.model,
        boosted,
        made.optimizer,
        "O2",
        dtype="float16",
        scheduler=scheduler,
        grad_norm=True,
        capture=True,
    )
    data = list(batches("mlp", STEPS, device="cuda"))
    for x, y in data:
        step(x, y)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in data:
            step(x, y)
            assert step.rate <= 1.0
            assert step.grad_norm is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_several_optimizers_have_one_norm() -> None:
    first, second = (torch.nn.Linear(8, 8).cuda() for _ in range(2))
    optimizers = [
        torch.optim.SGD(one.parameters(), lr=rate) for one, rate in ((first, 0.0), (second, 0.0))
    ]
    x = torch.randn(4, 8, device="cuda")
    loss = second(first(x)).square().mean()
    trained = [*first.parameters(), *second.parameters()]
    expected = float(torch.nn.utils.get_total_norm(torch.autograd.grad(loss, trained)))
    # Its nodes belong to another stream than those of the step.
    del loss

    @mezzo.train_step(
        models=[first, second], optimizers=optimizers, policy="O0", grad_norm=True, capture=True
    )
    def step(x: torch.Tensor) -> torch.Tensor:
        return second(first(x)).square().mean()

    for _ in range(6):
        step(x)
        torch.cuda.synchronize()
        assert step.grad_norm == pytest.approx(expected, rel=1e-4)
    assert step.captured


def test_a_profiler_shows_replays_by_name() -> None:
    made = Made("mlp", "AdamW", "cuda")
    step = mezzo.TrainStep(made.model, boosted, made.optimizer, "O2", dtype="bfloat16")
    data = list(batches("mlp", STEPS, device="cuda"))
    for x, y in data:
        step(x, y)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for x, y in data[:3]:
            step(x, y)
    names = [event.name for event in profiler.events() if event.name.startswith("mezzo::")]
    assert names == ["mezzo::replay"] * 3
