"""What an observer needs of a scaler, mezzo's or torch's: its flags, its scale and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mezzo._torch import torch_scaler_flags, torch_scaler_scale
from mezzo.scaling import gradients
from mezzo.scaling.gradient_counts import GradientCounts
from mezzo.scaling.loss_scales import combine, common_device
from mezzo.scaling.scaler import DisabledGradScaler, GradScaler

Scaler = GradScaler | torch.amp.GradScaler
"""A scaler of mezzo's or torch's."""


def is_scaler(scaler: Any) -> bool:
    """Return whether this is a scaler that can be observed."""
    return isinstance(scaler, GradScaler | torch.amp.GradScaler)


def is_enabled(scaler: Scaler) -> bool:
    """Return whether a scaler checks gradients at all."""
    return not isinstance(scaler, DisabledGradScaler) and scaler.is_enabled()


def count_gradients(scaler: Scaler, counts: GradientCounts | None) -> None:
    """Count what overflows and underflows in gradients when they are checked; None stops that.

    On CUDA the kernel that checks them counts, and a captured step is captured again. torch's
    scaler does not count.
    """
    if isinstance(scaler, GradScaler):
        scaler._records.count_gradients(counts)


def is_counted(scaler: Scaler) -> bool:
    """Return whether a scaler counts gradients already."""
    return isinstance(scaler, GradScaler) and scaler._records.counts is not None


def count_unchecked(
    scaler: Scaler, optimizers: Sequence[torch.optim.Optimizer], counts: GradientCounts
) -> None:
    """Count the gradients of torch's scaler, which counts nothing itself, in a pass of their own.

    Call it before the update, while the gradients are there. They are unscaled by then.
    """
    if not isinstance(scaler, GradScaler):
        for optimizer in optimizers:
            gradients.count(optimizer, counts)


def checked_only_others(scaler: Scaler, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether the steps since the last update were all of optimizers with other parameters.

    A loop with several models may share a scaler among them. False for torch's scaler, which does
    not know its optimizers.
    """
    records = list(scaler._records.by_id.values()) if isinstance(scaler, GradScaler) else []
    checked = [record.optimizer for record in records if record.optimizer is not None]
    if (
        not checked
        or len(checked) < len(records)
        or any(optimizer in optimizers for optimizer in checked)
    ):
        return False
    own = {
        id(parameter) for optimizer in optimizers for parameter in gradients.parameters(optimizer)
    }
    return not any(
        id(parameter) in own for other in checked for parameter in gradients.parameters(other)
    )


def found_inf(scaler: Scaler) -> torch.Tensor | None:
    """Return the flag of the steps since the last update: 1 if a gradient was not finite.

    None if no gradients were checked. Does not synchronize.
    """
    if isinstance(scaler, GradScaler):
        flags = [flag for record in scaler._records.by_id.values() for flag in record.all_flags()]
    else:
        flags = torch_scaler_flags(scaler)
    return combine(flags, common_device(flags)) if flags else None


def scale_of(scaler: Scaler) -> torch.Tensor | float:
    """Return the scale of the first loss, on its device."""
    if not isinstance(scaler, GradScaler):
        return torch_scaler_scale(scaler)
    scale = scaler._scales.scales[0]
    return scaler.get_scale() if scale is None else scale.scale
