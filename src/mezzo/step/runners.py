"""Choose the runner of a step: one that captures its calls, or an eager one."""

from __future__ import annotations

from mezzo.step.capture import CaptureRunner
from mezzo.step.capture_obstacles import (
    capture_obstacle,
    optimizer_obstacle,
    process_obstacle,
    warn_not_captured,
)
from mezzo.step.components import Capture
from mezzo.step.eager_runner import EagerRunner, Runner
from mezzo.step.executor import StepExecutor
from mezzo.step.shared_calls import do_all_capture, process_groups


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
