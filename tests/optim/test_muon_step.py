"""Muon over master weights: against float64, against torch's own step, skipped steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.kernel_cases import fresh_seed
from support.patterns import same_bits
from torch import nn

import mezzo
from mezzo.optim import capturable_step
from mezzo.optim.bind_optimizer import bind_optimizer
from mezzo.optim.master_weights import MasterWeights
from mezzo.optim.muon_step import orthogonalize

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = [(8, 16), (16, 8), (8, 16), (5, 5), (8, 16)]
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "original, heavy ball": {"adjust_lr_fn": "original", "nesterov": False, "momentum": 0.8},
    "other iterations": {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "weight_decay": 0.0},
}
BFLOAT16 = 2.0**-8
"""The rounding of one bfloat16 operation."""


def newton_schulz(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return the iterations of `orthogonalize` in float64."""
    a, b, c = COEFFICIENTS
    wide = matrix.double()
    tall = wide.shape[0] > wide.shape[1]
    wide = wide.T if tall else wide
    wide = wide / wide.norm()
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if tall else wide


class Twins:
    """The same matrices with a bound Muon, and in float32 with torch's."""

    def __init__(
        self,
        master: str = "float32",
        half: torch.dtype | None = torch.bfloat16,
        *,
        clip_norm: float | None = None,
        **settings: Any,
    ) -> None:
        self.seed = fresh_seed()
        self.generator = torch.Generator().manual_seed(self.seed)
        values = [torch.randn(shape, generator=self.generator) for shape in SHAPES]
        values[2] = values[2].T.contiguous().T
        self.parameters, self.full = (
            [nn.Parameter(value.clone()) for value in values] for _ in range(2)
        )
        self.masters = MasterWeights("none" if half is None else master)
        self.dtype = torch.float32 if half is None else half
        if half is not None:
            for parameter in self.parameters:
                self.masters.adopt(parameter, half)
        self.optimizer, self.plain = (
            torch.optim.Muon(
                [{"params": one[:3]}, {"params": one[3:], "lr": 0.05}], lr=0.02, **settings
            )
            for one in (self.parameters, self.full)
        )
        self.binding = bind_optimizer(self.optimizer, self.masters, clip_norm=clip_norm)

    def set_gradients(self, scale: float = 1.0) -> None:
        for parameter, full in zip(self.parameters, self.full, strict=True):
            gradient = torch.randn(full.shape, generator=self.generator).to(self.dtype)
            full.grad = gradient.float()
            parameter.grad = (gradient * scale).to(self.dtype)

    def values(self) -> list[torch.Tensor]:
        return [
            self.masters.read(parameter) if parameter in self.masters else parameter.detach()
            for parameter in self.parameters
        ]

    def tensors(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [one.detach().clone() for one in (*self.parameters, *self.values(), *states)]

    def largest_difference(self) -> float:
        """Return the largest difference between both, in units of the learning rate."""
        pairs = zip(self.values(), self.full, strict=True)
        return max(float((one - two.detach()).abs().max()) / 0.05 for one, two in pairs)


def step(
    optimizer: torch.optim.Optimizer, scale: float | None = None, *, found_inf: bool | None = False
) -> None:
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    optimizer.found_inf = None if found_inf is None else torch.tensor(float(found_inf))
    optimizer.step()


# -- Newton-Schulz ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 12), (12, 6), (9, 9)])
def test_stacked_matrices_are_orthogonalized_within_bfloat16_rounding_of_float64(
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(fresh_seed())
    matrices = torch.randn(3, *shape)
    results = orthogonalize(matrices, COEFFICIENTS, 5, 1e-7)
    assert results.dtype is torch.bfloat16
    for matrix, result in zip(matrices, results, strict=True):
        # Five iterations amplify rounding by up to their slope of 3.4 each where singular values
        # are small; torch's own step differs from float64 as much.
        difference = (result.double() - newton_schulz(matrix)).abs().max()
        assert difference < 32 * BFLOAT16


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(1, 3, 4), COEFFICIENTS, 5, 1e-7).any()


# -- steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    ("master", "half"),
    [("float32", torch.float16), ("split", torch.bfloat16), ("none", None)],
    ids=["float32", "split", "no masters"],
)
def test_steps_agree_with_torchs_muon_over_float32(
    master: str, half: torch.dtype | None, settings: dict[str, Any]
) -> None:
    twins = Twins(master, half, **settings)
    for _ in range(3):
        twins.set_gradients(8.0)
        step(twins.optimizer, 8.0)
        twins.plain.step()
    # Of three updates, whose elements are of the size of the learning rate.
    assert twins.largest_difference() < 3 * 16 * BFLOAT16, twins.seed
    for one, two in zip(twins.parameters, twins.full, strict=True):
        ours, theirs = (
            optimizer.state[parameter]["momentum_buffer"]
            for optimizer, parameter in ((twins.optimizer, one), (twins.plain, two))
        )
        assert ours.dtype is torch.float32
        assert torch.equal(ours, theirs), twins.seed


@pytest.mark.parametrize("loads", [False, True], ids=["write", "load and write"])
@pytest.mark.parametrize("master", ["split", "kahan"])
def test_a_write_through_data_to_a_whole_parameter_drops_its_companion(
    master: str, loads: bool
) -> None:
    twins = Twins(master, weight_decay=0.0)
    for _ in range(2):
        twins.set_gradients()
        step(twins.optimizer)
    for group in twins.optimizer.param_groups:
        group["lr"] = 0.0
    if loads:
        for parameter in twins.masters:
            companion = twins.masters.companion(parameter)
            assert companion is not None
            twins.masters.load(parameter, companion)
    *written, kept = twins.parameters
    before = twins.masters.read(kept)
    for parameter in written:
        parameter.data.fill_(1.0)
    twins.set_gradients()
    step(twins.optimizer)
    assert all((twins.masters.read(parameter) == 1.0).all() for parameter in written), twins.seed
    assert torch.equal(twins.masters.read(kept), before), twins.seed


def test_matrices_of_one_shape_and_group_are_updated_together() -> None:
    twins = Twins()
    twins.set_gradients()
    updated = twins.binding._batches(twins.optimizer.param_groups)
    assert [len(batch.parameters) for batch in updated] == [1, 1, 1, 1, 1]
    twins.parameters[2].data = twins.parameters[2].contiguous()
    updated = twins.binding._batches(twins.optimizer.param_groups)
    assert [len(batch.parameters) for batch in updated] == [2, 1, 1, 1]


def test_large_batches_are_split_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturable_step, "BATCH", 3 * 12)
    matrices = [nn.Parameter(torch.randn(3, 4)) for _ in range(4)]
    optimizer = torch.optim.Muon(matrices)
    binding = bind_optimizer(optimizer, MasterWeights("none"))
    for matrix in matrices:
        matrix.grad = torch.randn(3, 4)
    assert [len(one.parameters) for one in binding._batches(optimizer.param_groups)] == [2, 2]


def test_gradients_are_clipped_to_the_norm_before_the_momentum() -> None:
    twins = Twins(clip_norm=0.5)
    twins.set_gradients(4.0)
    norm = nn.utils.clip_grad_norm_(twins.full, 0.5)
    step(twins.optimizer, 4.0)
    twins.plain.step()
    assert torch.allclose(mezzo.grad_norm(twins.optimizer), norm)
    one, two = twins.parameters[0], twins.full[0]
    assert torch.allclose(
        twins.optimizer.state[one]["momentum_buffer"], twins.plain.state[two]["momentum_buffer"]
    )


@pytest.mark.parametrize("master", ["float32", "split", "kahan"])
def test_a_skipped_step_leaves_every_bit(master: str) -> None:
    twins = Twins(master)
    twins.set_gradients()
    step(twins.optimizer)
    before = twins.tensors()
    for parameter in twins.parameters:
        parameter.grad.fill_(torch.nan)
    step(twins.optimizer, found_inf=True)
    assert all(map(same_bits, twins.tensors(), before)), twins.seed


def test_a_state_dict_continues_in_plain_torch() -> None:
    twins = Twins(half=None)
    twins.set_gradients()
    step(twins.optimizer)
    copies = [nn.Parameter(value.clone()) for value in twins.values()]
    plain = torch.optim.Muon([{"params": copies[:3]}, {"params": copies[3:]}])
    plain.load_state_dict(copy.deepcopy(twins.optimizer.state_dict()))
    for parameter, other in zip(twins.parameters, copies, strict=True):
        other.grad = parameter.grad.clone()
    step(twins.optimizer)
    plain.step()
    assert all(
        torch.allclose(one, two, atol=0.05 * 16 * BFLOAT16)
        for one, two in zip(twins.parameters, copies, strict=True)
    ), twins.seed


def test_parameters_that_are_no_matrices_raise_torchs_error() -> None:
    vector = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])
    optimizer.param_groups[0]["params"].append(vector)
    bind_optimizer(optimizer, MasterWeights("none"))
    vector.grad = torch.ones(3)
    with pytest.raises(ValueError, match="2D"):
        optimizer.step()
