"""The fused step, compiled, on a CUDA device."""

from __future__ import annotations

import gc

import pytest
import torch
from support import step_cases
from support.kernel_cases import fresh_seed
from torch import nn

import mezzo
from mezzo.optim.bind_optimizer import bind_optimizer
from mezzo.optim.master_weights import MasterWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAIRS = [
    (kind, half)
    for kind in step_cases.KINDS
    for half in step_cases.HALVES
    if step_cases.fits(kind, half)
]
CASES = [(name, *pair) for name in step_cases.OPTIMIZERS for pair in PAIRS]


@pytest.mark.parametrize(("name", "kind", "half"), CASES)
def test_weights_and_states_equal_the_float64_reference(
    name: str, kind: str, half: torch.dtype
) -> None:
    step_cases.check_against_reference(name, kind, half, "cuda", fresh_seed() % 2**31)


@pytest.mark.parametrize(
    ("name", "kind", "half"), [case for case in CASES if case[1] != "stochastic"]
)
def test_parameters_are_rounded_masters(name: str, kind: str, half: torch.dtype) -> None:
    step_cases.check_that_parameters_are_rounded_masters(
        name, kind, half, "cuda", fresh_seed() % 2**31
    )


@pytest.mark.parametrize(("name", "kind", "half"), CASES)
def test_the_fused_step_agrees_with_the_optimizers_own_step(
    name: str, kind: str, half: torch.dtype
) -> None:
    step_cases.check_against_the_optimizers_own_step(name, kind, half, "cuda", fresh_seed() % 2**31)


@pytest.mark.parametrize(
    ("name", "kind", "half"), [case for case in CASES if case[1] in ("split", "kahan")]
)
def test_a_write_through_data_to_a_whole_parameter_resets_its_companion_tensor(
    name: str, kind: str, half: torch.dtype
) -> None:
    step_cases.check_a_write_through_data(name, kind, half, "cuda", fresh_seed() % 2**31)


def test_stochastic_roundings_equal_those_of_the_cpu() -> None:
    parameters = []
    for device in ("cuda", "cpu"):
        trained = step_cases.training("SGD", "stochastic", torch.bfloat16, device, seed=9)
        trained.gradients()
        trained.step()
        parameters.append(
            torch.cat([parameter.detach().flatten().float().cpu() for parameter in trained.masters])
        )
    # Where a sum differs in its last bit, the rounding may differ.
    assert (parameters[0] != parameters[1]).float().mean() < 1e-3


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_step_with_a_scaler_does_not_synchronize(
    no_host_reads: None, clip_norm: float | None
) -> None:
    torch.cuda.set_sync_debug_mode("default")
    trained = step_cases.training(
        "AdamW", "float32", torch.float16, "cuda", seed=1, clip_norm=clip_norm
    )
    scaler = mezzo.GradScaler("cuda", init_scale=16.0)
    loss = torch.ones((), device="cuda", requires_grad=True)
    for step in range(6):
        torch.cuda.set_sync_debug_mode("default")
        trained.gradients(16.0)
        scaler.scale(loss).backward()
        if step > 1:
            torch.cuda.set_sync_debug_mode("error")
        scaler.step(trained.optimizer)
        scaler.update()


def test_steps_are_deterministic() -> None:
    runs = []
    for _ in range(2):
        trained = step_cases.training(
            "LAMB", "split", torch.bfloat16, "cuda", seed=4, clip_norm=0.1
        )
        for _ in range(5):
            trained.gradients()
            trained.step()
        runs.append(trained.exact())
    assert all(map(torch.equal, *runs))


def test_tables_follow_gradients_that_move_while_the_device_is_busy() -> None:
    trained = step_cases.training("SGD", "float32", torch.float16, "cuda", seed=2)
    busy = torch.randn(4096, 4096, device="cuda")
    other = step_cases.training("SGD", "float32", torch.float16, "cuda", seed=2)
    gradients_of_steps = []
    for _ in range(30):
        for _ in range(4):
            busy = torch.mm(busy, busy).clamp_(-1, 1)
        trained.gradients()
        gradients_of_steps.append([parameter.grad for parameter in trained.parameters])
        trained.step()
    torch.cuda.synchronize()
    for gradients in gradients_of_steps:
        for parameter, gradient in zip(other.parameters, gradients, strict=True):
            parameter.grad = gradient
        other.step()
        torch.cuda.synchronize()
    assert all(map(torch.equal, trained.exact(), other.exact()))


def test_ten_thousand_tiny_parameters_step() -> None:
    parameters = [nn.Parameter(torch.ones(1 + place % 5, device="cuda")) for place in range(10_000)]
    optimizer, masters = (
        torch.optim.AdamW(parameters, lr=0.5, weight_decay=0.0),
        MasterWeights("split"),
    )
    for parameter in parameters:
        masters.adopt(parameter, torch.bfloat16)
        parameter.grad = torch.ones_like(parameter)
    bind_optimizer(optimizer, masters)
    optimizer.step()
    assert torch.allclose(
        torch.cat([masters.read(parameter) for parameter in parameters]),
        torch.tensor(0.5, device="cuda"),
    )


def test_a_parameter_of_more_than_two_to_the_31_elements_is_updated_to_its_end() -> None:
    parameter = nn.Parameter(torch.ones(2**31 + 12_345, device="cuda"))
    masters = MasterWeights("split")
    masters.adopt(parameter, torch.bfloat16)
    parameter.grad = torch.full_like(parameter, 2.0)
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    bind_optimizer(optimizer, masters, clip_norm=1e9)
    optimizer.step()
    for part in (parameter[:10_000], parameter[2**31 - 5000 : 2**31 + 5000], parameter[-20_000:]):
        assert bool((part == 0.5).all())
    del parameter, optimizer, masters
    gc.collect()
    torch.cuda.empty_cache()


def test_parameter_master_and_adam_state_take_twelve_bytes() -> None:
    torch.cuda.empty_cache()
    parameters = [nn.Parameter(torch.ones(1024, 1024, device="cuda")) for _ in range(16)]
    optimizer, masters = torch.optim.AdamW(parameters), MasterWeights("split")
    for parameter in parameters:
        masters.adopt(parameter, torch.bfloat16)
        parameter.grad = torch.zeros_like(parameter)
    bound = bind_optimizer(optimizer, masters)
    optimizer.step()
    optimizer.zero_grad()
    # Without the tables of addresses.
    bound._plan = None
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    count = 16 * 2**20
    del parameters, optimizer, masters, parameter, bound
    gc.collect()
    # The rest are counters: one or two KiB in all.
    assert (allocated - torch.cuda.memory_allocated()) / count <= 12.001
