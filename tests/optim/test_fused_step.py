"""The fused step where there is no GPU: interpreted in a process of its own, and out of the way everywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import step_cases
from support.interpreted import needs_triton, run_interpreted

from mezzo.optim.fused_step import FusedBinding
from mezzo.scaling.loss_scales import binding_of


@pytest.mark.slow
@needs_triton
def test_the_kernels_do_in_tritons_interpreter_what_they_should() -> None:
    run_interpreted(Path(__file__).with_name("fused_interpreted.py"))


@pytest.mark.parametrize("name", step_cases.OPTIMIZERS)
def test_on_a_cpu_the_optimizers_own_step_runs(name: str) -> None:
    trained = step_cases.training(name, "split", torch.bfloat16, "cpu", seed=5, clip_norm=2.0)
    assert isinstance(trained.bound, FusedBinding)
    for steps in (1, 2):
        trained.gradients(8.0)
        values, _, _ = step_cases.wanted(trained, steps, 8.0, 2.0)
        trained.step(8.0, found=False)
        assert all(
            step_cases.close(got, value) for got, value in zip(trained.exact(), values, strict=True)
        )


def test_unbinding_leaves_steps_where_the_optimizers_own_wants_them() -> None:
    trained = step_cases.training("AdamW", "split", torch.bfloat16, "cpu", seed=5)
    trained.gradients()
    trained.step()
    trained.bound.unbind()
    assert {
        trained.optimizer.state[parameter]["step"].device.type for parameter in trained.parameters
    } == {"cpu"}
    assert binding_of(trained.optimizer) is None
