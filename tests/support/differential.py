"""A differential harness: train a model in two ways, from the same seed on the same data.

On a GPU the two ways are a captured TrainStep and an eager one (`tests/gpu/test_differential.py`),
on a CPU a TrainStep and the loop that a user writes by hand (`tests/step/test_differential.py`).
Losses, weights, skipped steps and loss scales are compared bit for bit where the kernels are
deterministic: the second way runs twice, and where it does not repeat itself the comparison allows
for a multiple of that difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import mezzo

UPDATES = 8
OVERFLOWS = (1, 5, 6)
"""Updates with an infinite loss: one in the warm-up of a capture, two in a row among its
replays."""


@dataclass(frozen=True)
class Row:
    """A model with its data."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Any, tuple[torch.Tensor, ...]]]
    """Make the model's inputs and the loss function's further arguments."""
    loss: Callable[..., torch.Tensor]
    """The loss of the model's output and those arguments."""


@dataclass(frozen=True)
class Variant:
    """How a model is trained."""

    level: str
    dtype: str
    channels_last: bool = False
    accumulate: int = 1
    clip_norm: float | None = None
    optimizer: str = "SGD"
    overflows: Sequence[int] = OVERFLOWS

    def __str__(self) -> str:
        parts = [
            self.level,
            self.dtype,
            "channels_last" if self.channels_last else "",
            f"x{self.accumulate}" if self.accumulate > 1 else "",
        ]
        return " ".join(
            [*filter(None, parts), "clip" if self.clip_norm else "", self.optimizer]
        ).replace("  ", " ")

    @property
    def planted(self) -> Sequence[int]:
        """Updates with an overflow: float16 only, since nothing skips them in bfloat16."""
        return self.overflows if self.dtype == "float16" else ()


@dataclass(frozen=True)
class Trajectory:
    """Results of a run."""

    losses: torch.Tensor
    state: dict[str, torch.Tensor]
    skipped_steps: int
    scale: float
    captured: bool
    reason: str | None = None
    norms: Sequence[float] = ()
    """Norms of the gradients after each call, if they are computed."""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def make_model(row: Row, variant: Variant, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, always from the same seed."""
    torch.manual_seed(0)
    model = row.build().to(device).train()
    return model, OPTIMIZERS[variant.optimizer](model.parameters())


def batches(row: Row, variant: Variant, device: str) -> list[tuple[Any, tuple[torch.Tensor, ...]]]:
    """Return the data of a run.

    The last argument of the loss is a factor, infinite where an overflow is planted.
    """
    generator, data = torch.Generator().manual_seed(7), []
    for call in range(UPDATES * variant.accumulate):
        update, within = divmod(call, variant.accumulate)
        x, y = row.batch(generator)
        # In the middle of an accumulation, where there is one.
        overflows = update in variant.planted and within == variant.accumulate // 2
        data.append(
            (
                moved(x, device),
                (
                    *moved(y, device),
                    torch.tensor(float("inf") if overflows else 1.0, device=device),
                ),
            )
        )
    return data


def moved(value: Any, device: str) -> Any:
    """Move nested tensors to a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(one, device) for key, one in value.items()}
    return tuple(moved(one, device) for one in value)


def loss_of(row: Row) -> Callable[..., torch.Tensor]:
    """Return the row's loss function, multiplied by the factor."""

    def loss(outputs: Any, *arguments: torch.Tensor) -> torch.Tensor:
        return row.loss(outputs, *arguments[:-1]) * arguments[-1]

    return loss


def in_steps(row: Row, variant: Variant, device: str, *, capture: bool | str) -> Trajectory:
    """Train with TrainStep."""
    model, optimizer = make_model(row, variant, device)
    data = batches(row, variant, device)
    step = mezzo.TrainStep(
        model,
        loss_of(row),
        optimizer,
        variant.level,
        dtype=variant.dtype,
        channels_last=variant.channels_last,
        accumulate=variant.accumulate,
        clip_norm=variant.clip_norm,
        capture=capture,
    )
    torch.manual_seed(1)
    losses = [step(x, y) for x, y in data]
    scaler = step.scaler
    skips, scale = (
        (0, 1.0) if scaler is None else (scaler.state().skipped_steps, scaler.get_scale())
    )
    return Trajectory(
        torch.stack(losses).double().cpu(),
        state_of(model),
        skips,
        scale,
        step.captured,
        step.eager_reason,
    )


def by_hand(row: Row, variant: Variant, device: str) -> Trajectory:
    """Train with the loop that TrainStep replaces."""
    model, optimizer = make_model(row, variant, device)
    data, loss_fn = batches(row, variant, device), loss_of(row)
    if variant.channels_last:
        model.to(memory_format=torch.channels_last)
    model, optimizer = mezzo.decorate(
        model, optimizer, variant.level, dtype=variant.dtype, clip_norm=variant.clip_norm
    )
    scaler = mezzo.GradScaler(device, enabled=variant.dtype == "float16")
    losses, before, skips = [], [], 0
    torch.manual_seed(1)
    for call, (x, y) in enumerate(data):
        if call % variant.accumulate == 0:
            before = [buffer.clone() for buffer in model.buffers()]
        with mezzo.autocast(variant.level, device_type=device, dtype=variant.dtype):
            loss = loss_fn(
                (
                    model(**x)
                    if isinstance(x, dict)
                    else model(*x)
                    if isinstance(x, tuple)
                    else model(x)
                ),
                *y,
            )
        if call == 0:
            # As a step does: the first batch is not lost to a scale that is too high.
            scaler.find_scale(loss / variant.accumulate, optimizer)
        scaler.scale(loss / variant.accumulate).backward()
        losses.append(loss.detach())
        if (call + 1) % variant.accumulate == 0:
            result = scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skips += result.skipped
            if result.skipped:
                for buffer, old in zip(model.buffers(), before, strict=True):
                    buffer.copy_(old)
    return Trajectory(
        torch.stack(losses).double().cpu(),
        state_of(model),
        skips,
        scaler.get_scale(),
        captured=False,
    )


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return weights, buffers and master weights."""
    state = {
        name: tensor.detach().clone()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    return state | {
        f"master {name}": value.clone() for name, value in mezzo.master_params(model).items()
    }


@dataclass(frozen=True)
class Difference:
    """Differences between two runs: 0 if they are bit-equal."""

    loss: float
    weight: float
    where: str
    skipped_steps: tuple[int, int]
    scales: tuple[float, float]

    @property
    def exact(self) -> bool:
        """Return whether the runs are bit-equal."""
        return self.loss == self.weight == 0.0


def difference(one: Trajectory, other: Trajectory) -> Difference:
    """Compare two runs. Non-finite values must be the same ones."""
    distances = {name: _distance(value, other.state[name]) for name, value in one.state.items()}
    where = max(distances, key=lambda name: distances[name])
    return Difference(
        _distance(one.losses, other.losses),
        distances[where],
        where,
        (one.skipped_steps, other.skipped_steps),
        (one.scale, other.scale),
    )


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    if torch.equal(one, other):
        return 0.0
    one, other = one.double(), other.double()
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return float("inf")
    one, other = one[finite], other[finite]
    return (
        0.0
        if not len(one)
        else ((one - other).abs().max() / other.abs().max().clamp_min(1e-12)).item()
    )


@contextmanager
def on_the_captured_path() -> Iterator[None]:
    """Run models of transformers eagerly on the path that they take while they are captured.

    A model that reads from the device in eager mode only is captured on that path: it builds masks
    which it omits otherwise, and attention runs another kernel.
    """
    name = "transformers.utils.import_utils.is_cuda_stream_capturing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, lambda: True)
        yield


SLACK = 20.0
"""Where kernels are not deterministic: allowed multiple of the difference between equal runs."""


_REPEATS = 4
"""Repetitions of an eager run to measure the effect of atomics: one may be bit-equal by chance."""


def assert_agree(
    one: Trajectory, other: Trajectory, repeat: Callable[[], Trajectory]
) -> Difference:
    """Assert that a run is bit-equal to another, or as close as the other's own repetitions."""
    found = difference(one, other)
    assert found.skipped_steps[0] == found.skipped_steps[1], f"skipped steps: {found.skipped_steps}"
    assert found.scales[0] == found.scales[1], f"loss scales: {found.scales}"
    if found.exact:
        return found
    noises = [difference(repeat(), other) for _ in range(_REPEATS)]
    loss, weight = max(noise.loss for noise in noises), max(noise.weight for noise in noises)
    assert found.loss <= SLACK * loss, (
        f"losses differ by {found.loss:.2e}; the eager run repeats itself to {loss:.2e}"
    )
    assert found.weight <= SLACK * weight, (
        f"{found.where} differs by {found.weight:.2e}; the eager run repeats itself to {weight:.2e}"
    )
    return found


@contextmanager
def deterministic() -> Any:
    """Use deterministic kernels where torch has them."""
    before, fill = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    with warnings.catch_warnings(), torch.backends.cudnn.flags(deterministic=True):
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
            torch.utils.deterministic.fill_uninitialized_memory = fill
