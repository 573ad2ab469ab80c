"""What a step needs of a scaler: its device work goes into a captured program, its host work comes before and after each replay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mezzo.scaling.scale_state import ScaleRule, ScaleState
from mezzo.scaling.scale_tensors import DeviceLossScale
from mezzo.scaling.scaler import GradScaler
from mezzo.scaling.step_result import NonfiniteSource


def before_replay(scaler: GradScaler) -> tuple[int, ...]:
    """The host's part before a step runs again; where the tables of its schedules lie, which a captured step has to find there."""
    return scaler._schedules.before_replay()


def after_replay(
    scaler: GradScaler, shown: Callable[[], tuple[float, int]], source: NonfiniteSource
) -> None:
    """The host's part afterwards: the step is counted, and a scale that collapses is noticed, by what `shown` gives of the scale and the skips in a row.

    `source` is the parameter that had a non-finite gradient last, if that is known.
    """
    scaler._scales.replayed(shown, source)


def name_of(scaler: GradScaler, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> str:
    """Return what a parameter is called in the scaler's messages."""
    return scaler._names.name_of(parameter, optimizer)


def backward_seed(scaler: GradScaler, loss: torch.Tensor) -> torch.Tensor:
    """What backward of a loss starts from so that its gradients are scaled: the scale itself, without a product before and its derivative after."""
    return scaler._scale_for(loss, 0).to(loss.dtype).reshape(loss.shape)


def capture_refusal(scaler: GradScaler) -> str | None:
    """Why steps of this scaler cannot be captured, if they cannot."""
    if scaler._settings.reduce_found_inf is not None:
        return "the scaler's reduce_found_inf talks to other processes"
    return f"the scaler has {len(scaler._scales)} scales" if len(scaler._scales) > 1 else None


def is_warmed_up(scaler: GradScaler) -> bool:
    """Whether the scale adapts already: during a rule's warm-up another program would run."""
    made = scaler._scales.made[0]
    return isinstance(made, DeviceLossScale) and made.steps >= scaler._scales.rule.warmup_steps


def device_counters(scaler: GradScaler) -> torch.Tensor | None:
    """Scale, skipped steps, skipped steps in a row and counted bad steps on a device; None on a CPU."""
    made = scaler._scales.made[0]
    return made.shown if isinstance(made, DeviceLossScale) else None


def scale_state_of(scaler: GradScaler) -> ScaleState:
    """The scale and its counters, without schedulers that catch up; elsewhere than on a CPU this waits."""
    return scaler._scales.state(0)


def scale_rule(scaler: GradScaler) -> ScaleRule:
    """The rule that holds: its numbers are part of a captured step."""
    return scaler._scales.rule


def schedule_tables(scaler: GradScaler) -> tuple[int, ...]:
    """Where the tables of its schedules lie."""
    return scaler._schedules.tables()


def discard_records(scaler: GradScaler) -> None:
    """Drop what was noted since the last update: the step that it belongs to did not happen."""
    scaler._records.clear()
