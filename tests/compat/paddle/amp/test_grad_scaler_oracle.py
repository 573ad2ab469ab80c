"""Reproduce every recorded trace of PaddlePaddle's scaler.

A trace has the loss scale, both counters and the unscaled gradients after each of 200 steps, and
which steps were skipped. One difference is deliberate: Paddle's kernel zeroes all gradients of a
skipped step; here they stay, so that the non-finite values can be inspected.
"""

from __future__ import annotations

import pytest
import torch
from support.scaler_traces import Trace, traces

from mezzo.compat import paddle

TRACES = traces()
GRADIENTS = {".": 1.0, "N": float("nan"), "I": float("inf"), "J": float("-inf")}
OPTIMIZERS = {
    "SGD": paddle.optimizer.SGD,
    "AdamW": paddle.optimizer.AdamW,
    "Lamb": paddle.optimizer.Lamb,
}


def step(
    trace: Trace,
    scaler: paddle.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
) -> None:
    """Run one iteration in the order of the recording, without clearing the gradients."""
    scaler.scale(loss).backward()
    if trace.mode.startswith("unscale"):
        scaler.unscale_(optimizer)
    if trace.mode.endswith("minimize"):
        scaler.minimize(optimizer, loss)
    else:
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    "trace",
    TRACES,
    ids=[f"{number}-{trace.mode}-{trace.optimizer}" for number, trace in enumerate(TRACES)],
)
def test_a_recorded_trace_is_reproduced(trace: Trace):
    scaler, weight = paddle.amp.GradScaler(**trace.config), torch.nn.Parameter(torch.ones(2))
    optimizer = OPTIMIZERS[trace.optimizer](learning_rate=1e-3, parameters=[weight])
    for number, (gradient, expected, unscaled) in enumerate(
        zip(trace.kinds, trace.after, trace.unscaled, strict=True)
    ):
        if number == trace.reload_at:
            saved = scaler.state_dict()
            scaler = paddle.amp.GradScaler()
            scaler.load_state_dict(saved)
        before = weight.detach().clone()
        step(trace, scaler, optimizer, (weight * torch.tensor([GRADIENTS[gradient], 1.0])).sum())
        state = scaler.state_dict()
        assert (state["scale"].item(), state["incr_count"], state["decr_count"]) == expected
        assert torch.equal(weight, before) is (gradient != ".")
        if gradient == ".":
            assert weight.grad.tolist() == [unscaled] * 2
        else:
            assert unscaled == 0.0
            assert not weight.grad[0].isfinite()
            assert weight.grad[1].item() == pytest.approx(1.0, rel=1e-6)
        optimizer.clear_grad()


def test_all_traces_are_run():
    assert len(TRACES) == 47
    assert {trace.mode for trace in TRACES} == {
        "step_update",
        "unscale_step_update",
        "minimize",
        "unscale_minimize",
    }
    assert {trace.optimizer for trace in TRACES} == set(OPTIMIZERS)
