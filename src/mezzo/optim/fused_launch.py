"""Launch the kernels of the fused step: coefficients first, then the update of all parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from mezzo import _launch
from mezzo.optim.companion import SAMPLES
from mezzo.optim.fused_algorithms import Algorithm
from mezzo.optim.fused_tables import Launch
from mezzo.optim.master_weights import MasterWeights

BLOCK = 512
"""Elements that a program updates at a time. AdamW over a billion parameters takes 7.1, 7.1 and 7.7
ms with 512, 1024 and 2048 on an H200; copying as many bytes takes 7.4."""
CHUNK = 4 * BLOCK
"""Elements that a program updates in all, block after block, so that it reads its tables once. With
one block a program the same update takes 9.7 ms."""
_LANES = 128


@dataclass(frozen=True)
class StepInputs:
    """What all launches of a step read on the device, besides their own tables."""

    hyper: torch.Tensor
    """Hyper-parameters of all groups, float64 [8, groups]."""
    counters: torch.Tensor
    """Step counts of all parameters."""
    scale: torch.Tensor | None
    """What the gradients are multiplied by; None if they are not scaled."""
    found_inf: torch.Tensor | None
    """1 if the step is skipped; None if no step is."""
    square_sum: torch.Tensor | None
    """Sum of squares of all unscaled gradients, float64; None does not clip."""


def launch_update(
    launch: Launch,
    gradients: torch.Tensor,
    inputs: StepInputs,
    algorithm: Algorithm,
    masters: MasterWeights,
) -> None:
    """Compute the coefficients of a launch, then update its parameters.

    `gradients` is the table of the addresses of their gradients.
    """
    _run_coefficients(launch, inputs, algorithm, masters)
    programs = launch.chunks.shape[1]
    if programs == 0:
        return
    device, found_inf = gradients.device, inputs.found_inf
    tensors = (
        launch.addresses,
        gradients,
        launch.chunks,
        launch.coefficients,
        launch.indices,
        # A placeholder, which the kernel does not read.
        launch.coefficients if found_inf is None else found_inf,
        _seed_on(masters.seed, device),
    )
    update = _kernels().update
    constants = (
        (
            update.PLAIN
            if launch.parameter_dtype is torch.float32
            else getattr(update, masters.format.master.name)
        ).value,
        launch.parameter_dtype is torch.bfloat16,
        _launch.triton_dtype(launch.gradient_dtype),
        found_inf is not None,
        CHUNK,
    )
    if algorithm.code == "LAMB":
        _run_lamb(launch, tensors, constants)
    else:
        code = getattr(_kernels().coefficients, algorithm.code).value
        _launch.run_kernel(
            update.update_kernel,
            programs,
            (*tensors, launch.count),
            (code, launch.variant, *constants, BLOCK),
            device,
        )


def _run_coefficients(
    launch: Launch, inputs: StepInputs, algorithm: Algorithm, masters: MasterWeights
) -> None:
    kernels, counters, count = _kernels().coefficients, inputs.counters, launch.count
    scale, found_inf, squares = inputs.scale, inputs.found_inf, inputs.square_sum
    # A placeholder, which the kernel does not read.
    unused = launch.coefficients
    is_sampled = masters.format.sampled and launch.parameter_dtype is not torch.float32
    _launch.run_kernel(
        kernels.prepare_kernel,
        # One more program for the sample of each parameter.
        -(-count // _LANES) + (count if is_sampled else 0),
        (
            launch.coefficients,
            counters,
            launch.indices,
            inputs.hyper,
            unused if scale is None else scale,
            unused if found_inf is None else found_inf,
            unused if squares is None else squares,
            launch.addresses,
            count,
            inputs.hyper.shape[1],
            counters.shape[1],
        ),
        (
            getattr(kernels, algorithm.code).value,
            scale is not None,
            found_inf is not None,
            squares is not None,
            is_sampled,
            _LANES,
            SAMPLES,
        ),
        launch.addresses.device,
    )


def _run_lamb(launch: Launch, tensors: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
    kernels, count, programs = _kernels().lamb, launch.count, launch.chunks.shape[1]
    device = launch.addresses.device
    partials = torch.zeros(2, programs, dtype=torch.float32, device=device)
    arguments = (*tensors, partials, count)
    _launch.run_kernel(kernels.lamb_kernel, programs, arguments, (*constants, False), device)
    _launch.run_kernel(
        kernels.trust_kernel,
        count,
        (launch.addresses, launch.coefficients, partials, count, programs),
        (CHUNK, 1024),
        device,
    )
    _launch.run_kernel(kernels.lamb_kernel, programs, arguments, (*constants, True), device)


@cache
def _seed_on(seed: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([seed], dtype=torch.int64, device=device)


@cache
def _kernels() -> SimpleNamespace:
    """Import the kernels at first use: Triton is optional, and slow to import."""
    from mezzo.optim import triton_coefficients, triton_lamb, triton_update  # noqa: PLC0415

    return SimpleNamespace(coefficients=triton_coefficients, lamb=triton_lamb, update=triton_update)
