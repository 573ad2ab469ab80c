"""Notice that a captured step skips update after update, and find out whether that is right.

The gradients of one batch are computed eagerly beside the replay, from the same weights, buffers,
random numbers and loss scale. If they are finite where the replay skipped, the captured graph is
wrong: that is an error of mezzo's, which is reported, and training goes on eagerly. If they are
not, the first parameter with a non-finite gradient is named.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from mezzo import _events
from mezzo.prepare import rng_state
from mezzo.prepare.arguments import Optimizer
from mezzo.scaling import capture
from mezzo.scaling.gradients import is_finite, parameters
from mezzo.scaling.step_result import NO_SOURCE, KnownSource, NonfiniteSource
from mezzo.step.executor import StepExecutor

LIMIT = 3
"""Skipped updates in a row that are looked into."""


class StallCheck:
    """Compares replays with eager gradients while updates are skipped in a row."""

    def __init__(self, engine: StepExecutor) -> None:
        self._engine = engine
        # A body that steps by itself cannot be run without updating.
        self._can_compare = engine.parts.scaler is not None and not engine.rules.takes_update
        self._eager: dict[torch.Tensor, tuple[Optimizer, torch.Tensor | None]] | None = None
        """Parameters with their optimizers and the eager gradients of the update under way; None
        where nothing is compared."""
        self._judged = False
        """Whether the skips in a row that are under way were looked into."""
        self._warned = False
        self.source: NonfiniteSource = NO_SOURCE
        """The parameter that was found last."""

    def start(self) -> None:
        """Begin an update: compare it if the last ones were skipped in a row. Does not synchronize: on CUDA the count lags a few steps."""
        self.drop()
        if not self._can_compare:
            return
        _, consecutive_skips = self._engine.metrics.scale_and_skips()
        if consecutive_skips < LIMIT:
            self._judged = False
        elif not self._judged:
            self._eager = {
                parameter: (optimizer, None)
                for optimizer in self._engine.parts.optimizers
                for parameter in parameters(optimizer)
            }

    def drop(self) -> None:
        """Compare nothing: a call of this update was not replayed."""
        self._eager = None

    def compute(self, values: tuple[Any, ...]) -> None:
        """Add up the gradients of a call eagerly; weights, gradients, buffers and random generators stay as they were."""
        if self._eager is None:
            return
        held, state = (
            [(parameter, parameter.grad) for parameter in self._eager],
            rng_state.capture_rng_state(),
        )
        buffers = [
            (buffer, buffer.clone())
            for model in self._engine.parts.models
            for buffer in model.buffers()
        ]
        try:
            for parameter, (_, gradient) in self._eager.items():
                parameter.grad = gradient
            self._engine.compute_gradients(*self._engine.place(values))
            self._eager = {
                parameter: (optimizer, parameter.grad)
                for parameter, (optimizer, _) in self._eager.items()
            }
        except torch.OutOfMemoryError:
            # An eager pass needs more memory than a replay. Training goes on without the
            # comparison.
            self._eager, self._judged = None, True
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            rng_state.restore_rng_state(state)

    def judge(self) -> str | None:
        """Compare the update that was just replayed with the eager gradients; return what is wrong with the capture, if anything. This synchronizes."""
        if self._eager is None:
            return None
        eager, self._eager, self._judged = self._eager, None, True
        if self._engine.parts.device.type == "cuda":
            torch.cuda.synchronize(self._engine.parts.device)
        name, now = self._first_nonfinite(eager), self._engine.metrics.read()
        self.source = NO_SOURCE if name is None else KnownSource(name)
        if now.skipped == (name is not None):
            if name is not None:
                self._warn(name, now.scale)
            return None
        if _events.listening():
            _events.emit(_events.CaptureDisagrees(skipped=now.skipped, parameter=name))
        found = (
            "skipped an update whose gradients are finite"
            if now.skipped
            else f"applied an update although the gradient of {name!r} is not finite"
        )
        return (
            f"the captured graph {found} when the same batch runs eagerly. This is an error in"
            " mezzo: please report it with the model"
        )

    def _first_nonfinite(
        self, eager: dict[torch.Tensor, tuple[Optimizer, torch.Tensor | None]]
    ) -> str | None:
        bad = (
            parameter
            for parameter, (_, gradient) in eager.items()
            if gradient is not None and not is_finite(gradient)
        )
        parameter, scaler = next(bad, None), self._engine.parts.scaler
        return (
            None
            if parameter is None or scaler is None
            else capture.name_of(scaler, parameter, eager[parameter][0])
        )

    def _warn(self, name: str, scale: float) -> None:
        if _events.listening():
            _events.emit(_events.UpdatesSkipped(LIMIT, scale, name))
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{LIMIT} updates in a row were skipped: the gradient of {name!r} is not finite, in"
                f" eager mode too. The loss scale is {scale:g} now. At the start of a run it may"
                " still be adapting; later, look for a division or logarithm near zero, or a"
                " learning rate that is too high.",
                UserWarning,
                stacklevel=6,
            )
