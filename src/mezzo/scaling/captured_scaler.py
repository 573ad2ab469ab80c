"""What a training step needs of a scaler, in eager calls, captures and replays.

The device work of a scaler is captured with the step. Its host work runs around each replay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mezzo.scaling.scale_search import Backward, can_search, search
from mezzo.scaling.scale_state import ScaleRule
from mezzo.scaling.scale_tensors import DeviceLossScale, HostLossScale
from mezzo.scaling.scaler import GradScaler
from mezzo.scaling.step_result import NonfiniteSource


def before_replay(scaler: GradScaler) -> tuple[int, ...]:
    """Do the host work before a replay; return the addresses of the schedule tables.

    A captured step reads the tables at the addresses that it was captured with.
    """
    return scaler._schedules.before_replay()


def after_replay(
    scaler: GradScaler,
    scale_and_skips: Callable[[], tuple[float, int]],
    source: NonfiniteSource,
) -> None:
    """Count a replayed step, and check for scale collapse. Does not synchronize.

    `scale_and_skips` returns the latest scale and consecutive skips that are on the host, `source`
    names the parameter of the last non-finite gradient, if it is known.
    """
    scaler._scales.replayed(scale_and_skips, source)


def name_of(scaler: GradScaler, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> str:
    """Return the name of a parameter in the scaler's messages."""
    return scaler._records.names.name_of(parameter, optimizer)


def backward_seed(scaler: GradScaler, loss: torch.Tensor) -> torch.Tensor:
    """Return the gradient to start backward with: the scale, which saves multiplying the loss."""
    return scaler._scale_for(loss, 0).to(loss.dtype).reshape(loss.shape)


def find_first_scale(
    scaler: GradScaler, loss: torch.Tensor, parameters: list[torch.Tensor], backward: Backward
) -> bool:
    """Compute gradients at a scale at which they are finite, if the scaler is new.

    Returns False, without gradients, if there is nothing to search: compute them as usual.
    """
    scaler._scale_for(loss, 0)
    scales = scaler._scales
    if not can_search(scales, 0, parameters) or not bool(loss.isfinite().all()):
        return False
    search(scales, 0, parameters, backward)
    return True


def capture_refusal(scaler: GradScaler) -> str | None:
    """Return why steps of this scaler cannot be captured, or None if they can."""
    if scaler._settings.reduce_found_inf is not None:
        return "the scaler's reduce_found_inf communicates with other processes"
    return f"the scaler has {len(scaler._scales)} scales" if len(scaler._scales) > 1 else None


def is_warmed_up(scaler: GradScaler) -> bool:
    """Return whether `warmup_steps` are over: a step captured before would not adapt the scale."""
    scale = scaler._scales.scales[0]
    return isinstance(scale, DeviceLossScale) and scale.steps >= scaler._scales.rule.warmup_steps


def device_counters(scaler: GradScaler) -> torch.Tensor | None:
    """Return scale, skipped steps, consecutive skips and backoff tracker; None on a CPU."""
    scale = scaler._scales.scales[0]
    return scale.counters if isinstance(scale, DeviceLossScale) else None


def host_counters(scaler: GradScaler) -> tuple[float, int, int]:
    """Return scale, skipped steps and consecutive skips. Synchronizes on a device."""
    scale = scaler._scales.scales[0]
    if isinstance(scale, HostLossScale):
        return scale.counters()
    state = scaler._scales.state(0)
    return state.scale, state.skipped_steps, state.consecutive_skips


def scale_rule(scaler: GradScaler) -> ScaleRule:
    """Return the current rule, whose numbers are part of a captured step."""
    return scaler._scales.rule


def counts_revision(scaler: GradScaler) -> int:
    """Return a number that changes with `count_gradients`: counting is part of a captured step."""
    return scaler._records.revision


def schedule_tables(scaler: GradScaler) -> tuple[int, ...]:
    """Return the addresses of the schedule tables."""
    return scaler._schedules.tables()


def discard_records(scaler: GradScaler) -> None:
    """Discard what was recorded since the last update, after a step that did not happen."""
    scaler._records.by_id.clear()
