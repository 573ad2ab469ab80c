"""Runners of the calls of a step: eager calls, and the choice between them and capture."""

from __future__ import annotations

from typing import Any, Protocol

from mezzo.scaling.step_result import first_nonfinite
from mezzo.step.capture_obstacles import (
    capture_obstacle,
    optimizer_obstacle,
    process_obstacle,
    warn_not_captured,
)
from mezzo.step.capture_runner import CaptureRunner
from mezzo.step.executor import StepExecutor
from mezzo.step.inputs import Call, copy_outputs
from mezzo.step.module_buffers import module_modes
from mezzo.step.options import AccumulationPhase, Capture
from mezzo.step.rank_agreement import do_all_capture, process_groups


class Runner(Protocol):
    """Runs the calls of a step."""

    eager_reason: str | None
    """Why calls run eagerly although they were to be captured."""

    def __call__(self, call: Call, phase: AccumulationPhase) -> Any:
        """Run one call and return detached copies of what the body returned."""

    def run_eagerly(self, call: Call, phase: AccumulationPhase) -> Any:
        """Run one call eagerly, also if it is captured; graphs stay."""

    def flush(self, calls: int) -> None:
        """Update from the gradients of fewer calls than usual."""

    def first_nonfinite(self) -> str | None:
        """Return the name of the parameter with the last non-finite gradient, if it is known.

        This synchronizes.
        """

    @property
    def captured(self) -> bool:
        """Whether calls are replayed as CUDA graphs by now."""

    @property
    def shares_calls(self) -> bool:
        """Whether all ranks run each call alike, so that no rank may run one eagerly by itself."""

    @property
    def graph_count(self) -> int:
        """Kinds of inputs whose calls are replayed."""

    @property
    def replays(self) -> int:
        """Calls replayed so far."""

    def drop_graphs(self) -> None:
        """Drop captured graphs: what they depend on may have changed."""


class EagerRunner:
    """Runs every call eagerly."""

    captured = shares_calls = False
    graph_count = replays = 0

    def __init__(self, executor: StepExecutor, eager_reason: str | None = None) -> None:
        self.eager_reason = eager_reason
        self._executor = executor
        models = executor.components.models
        self._modules = [module for model in models for module in model.modules()]
        self._parameters = [parameter for model in models for parameter in model.parameters()]

    def __call__(self, call: Call, phase: AccumulationPhase) -> Any:
        """Run one call."""
        # Without a scaler no step is skipped, and no buffer is restored.
        modes = (
            None
            if self._executor.components.scaler is None
            else module_modes(self._modules, self._parameters)
        )
        return copy_outputs(self._executor.run(self._executor.move_inputs(call), phase, modes))

    run_eagerly = __call__

    def flush(self, calls: int) -> None:
        """Update from the gradients of fewer calls than usual."""
        self._executor.flush(calls)

    def first_nonfinite(self) -> str | None:
        """Return the name of the first parameter with a non-finite gradient in the last update."""
        return first_nonfinite(self._executor.results)

    def drop_graphs(self) -> None:
        """Do nothing: an eager runner has no graphs."""


def runner_for(executor: StepExecutor, capture: Capture) -> Runner:
    """Return a runner that captures, or an eager one if that is requested or necessary."""
    if capture is Capture.OFF:
        return EagerRunner(executor)
    reason = (
        capture_obstacle(executor.components)
        or process_obstacle(executor)
        or optimizer_obstacle(executor)
    )
    if reason is None:
        return CaptureRunner(executor, capture)
    warn_not_captured(reason, capture, quietly=executor.components.device.type != "cuda")
    return EagerRunner(executor, reason)


def agreed_runner(runner: Runner, executor: StepExecutor, capture: Capture) -> Runner:
    """Return a runner that fits those of the other ranks: eager unless all of them capture.

    All ranks call this before the first call of their steps. Synchronizes.
    """
    captures = isinstance(runner, CaptureRunner)
    if capture is Capture.OFF or not process_groups(executor.components):
        return runner
    if do_all_capture(executor.components, own=captures) or not captures:
        return runner
    reason = "another rank cannot capture its step; its warning states the reason"
    warn_not_captured(reason, capture)
    return EagerRunner(executor, reason)
