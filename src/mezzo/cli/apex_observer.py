"""Observe the loss scale and the skips of `apex.amp` in the dialect."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.compat.apex.amp._amp_state import _amp_state
from mezzo.compat.apex.amp._scale_loss import LossScaler
from mezzo.observing.attachments import LoopAttachment


def observe_apex(attachment: LoopAttachment) -> bool:
    """Note losses, scales and skips of the first loss scaler; return whether there is one."""
    if not getattr(getattr(_amp_state, "opt_properties", None), "enabled", False):
        return False
    scaler = _amp_state.loss_scalers[0]
    attachment._detach.callback(_ApexScaler(attachment, scaler).restore)
    return True


class _ApexScaler:
    """Wraps a loss scaler and the end of the observed steps.

    A step that is skipped does not call the hooks of its optimizer, so it ends with the check.
    """

    def __init__(self, attachment: LoopAttachment, scaler: LossScaler) -> None:
        self._attachment, self._scaler = attachment, scaler
        self._end, self._scale, self._update = attachment._end, scaler.scale, scaler.update_scale
        # On the instances, which hides the methods of their classes.
        vars(attachment)["_end"] = self._end_step
        vars(scaler).update(scale=self._scale_loss, update_scale=self._update_scale)

    def restore(self) -> None:
        del vars(self._attachment)["_end"]
        for name in ("scale", "update_scale"):
            vars(self._scaler).pop(name, None)

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        self._attachment.note_loss(loss)
        return self._scale(loss)

    def _update_scale(self, flags: list[torch.Tensor]) -> bool:
        overflowed = self._update(flags)
        if overflowed:
            self._end_step(1.0)
        return overflowed

    def _end_step(self, skipped: torch.Tensor | float, _: Any = None) -> None:
        self._end(skipped, self._scaler.loss_scale())
