"""Check a captured step that skips several updates in a row against the eager step.

The gradients of one update are computed eagerly in addition to the replay, from the same weights,
buffers, random numbers and loss scale. If they are finite and the replay skipped, the captured
graph is wrong: that is an error in mezzo, which is reported, and training continues eagerly. If
they are not, the first parameter with a non-finite gradient is named.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from mezzo import _events, _launch
from mezzo.prepare import rng_state
from mezzo.prepare.arguments import Optimizer
from mezzo.scaling import captured_scaler
from mezzo.scaling.gradients import is_finite, parameters
from mezzo.scaling.step_result import NO_SOURCE, KnownSource, NonfiniteSource
from mezzo.step.assigned_tensors import KeptTensors, module_state
from mezzo.step.executor import StepExecutor
from mezzo.step.inputs import Call
from mezzo.step.rank_agreement import process_groups

LIMIT = 3
"""Consecutive skipped updates that cause a check."""


class _EagerGradient(NamedTuple):
    """A parameter's optimizer, and its gradient in the eager calls so far."""

    optimizer: Optimizer
    gradient: torch.Tensor | None


class StallCheck:
    """Compares replays with eager gradients after consecutive skips. Methods are in call order."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        # A body that takes `update` cannot run without updating. Ranks that train together see
        # skips at different times, and would run different collectives.
        self._can_compare = (
            executor.components.scaler is not None
            and not executor.options.takes_update
            and not process_groups(executor.components)
        )
        self.compared: dict[torch.Tensor, _EagerGradient] | None = None
        """Eager gradients of the current update by parameter; None if it is not compared."""
        self._judged = False
        """Whether the current run of skips was checked."""
        self._warned = False
        self.source: NonfiniteSource = NO_SOURCE
        """The parameter with a non-finite gradient found last."""

    def start(self) -> None:
        """Begin an update: compare it if the last ones were skipped.

        Does not synchronize: on CUDA the count lags a few steps.
        """
        self.compared = None
        if not self._can_compare:
            return
        _, consecutive_skips = self._executor.metrics.scale_and_skips()
        if consecutive_skips < LIMIT:
            self._judged = False
        elif not self._judged:
            self.compared = {
                parameter: _EagerGradient(optimizer, None)
                for optimizer in self._executor.components.optimizers
                for parameter in parameters(optimizer)
            }

    def drop(self) -> None:
        """Do not compare the current update: one of its calls was not replayed."""
        self.compared = None

    def compute(self, call: Call) -> None:
        """Add the eager gradients of a call.

        Gradients, random generators, the tensors that modules have and their values are restored
        afterwards: passes write buffers, and others also codebooks and states in place.
        """
        if self.compared is None:
            return
        gradients = [(parameter, parameter.grad) for parameter in self.compared]
        rng = rng_state.capture_rng_state()
        models = self._executor.components.models
        state = module_state(models)
        values: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            values += _values(state)
            for parameter, eager in self.compared.items():
                parameter.grad = eager.gradient
            self._executor.compute_gradients(self._executor.move_inputs(call))
            self.compared = {
                parameter: _EagerGradient(eager.optimizer, parameter.grad)
                for parameter, eager in self.compared.items()
            }
        except torch.OutOfMemoryError:
            # An eager pass needs more memory than a replay. Training continues unchecked.
            self.compared, self._judged = None, True
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for tensor, before in values:
                    # Data: to the masters a parameter is as it was.
                    tensor.data.copy_(before)
            for kept in state:
                kept.restore()
            rng_state.restore_rng_state(rng)

    def judge(self) -> str | None:
        """Compare the replayed update with the eager gradients; return what is wrong, if anything.

        This synchronizes.
        """
        if self.compared is None:
            return None
        eager, self.compared, self._judged = self.compared, None, True
        device = self._executor.components.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        name, metrics = self._first_nonfinite(eager), self._executor.metrics.read()
        self.source = NO_SOURCE if name is None else KnownSource(name)
        if metrics.skipped == (name is not None):
            if name is not None:
                self._warn(name, metrics.scale)
            return None
        if _events.listening():
            _events.emit(_events.CaptureDisagrees(skipped=metrics.skipped, parameter=name))
        difference = (
            "skipped an update whose gradients are finite"
            if metrics.skipped
            else f"applied an update although the gradient of {name!r} is not finite"
        )
        return (
            f"the captured graph {difference} when the same batch runs eagerly. This is an error in"
            " mezzo: please report it with the model"
        )

    def _first_nonfinite(self, eager: dict[torch.Tensor, _EagerGradient]) -> str | None:
        scaler = self._executor.components.scaler
        for parameter, (optimizer, gradient) in eager.items():
            if scaler is not None and gradient is not None and not is_finite(gradient):
                return captured_scaler.name_of(scaler, parameter, optimizer)
        return None

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


def _values(state: Iterable[KeptTensors]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tensors that a pass may write in place, each with a copy."""
    tensors = {id(tensor): tensor for kept in state for tensor in kept.tensors}
    return [
        (tensor, tensor.detach().clone())
        for tensor in tensors.values()
        if tensor.layout is torch.strided and _launch.is_dense(tensor)
    ]
