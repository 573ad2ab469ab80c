"""Capture and replay the graphs of a step: a whole call, or only its update."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mezzo import _events
from mezzo.autocasting.regions import clear_weight_cache, innermost_region
from mezzo.optim.device_binding import DeviceBinding, ReplayPlan, device_binding
from mezzo.scaling import captured_scaler
from mezzo.scaling.step_result import NO_SOURCE, NonfiniteSource
from mezzo.step.cuda_graph import CapturedGraph, CaptureFailed, GraphCapturer, HostDrawsFound
from mezzo.step.executor import StepContext, StepExecutor
from mezzo.step.inputs import Call, format_shapes
from mezzo.step.options import AccumulationPhase
from mezzo.step.replay_timing import ReplayTiming
from mezzo.step.static_gradients import Gradients


class ReplayedBinding(NamedTuple):
    """An optimizer that a captured graph steps."""

    binding: DeviceBinding
    plan: ReplayPlan
    """What the graph updates."""


@dataclass(frozen=True, eq=False)
class CapturedUpdate:
    """What the host prepares before each replay of a graph that updates."""

    bindings: tuple[ReplayedBinding, ...]
    schedule_tables: tuple[int, ...]
    """Addresses of the schedules' tables at the capture."""
    kept_alive: tuple[Any, ...]
    """Tensors that the graph reads."""


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A captured graph of a call or of an update."""

    graph: CapturedGraph
    update: CapturedUpdate | None
    """None if the graph does not update."""
    gradients: Gradients = field(default_factory=list)
    """Gradients in the graph's memory, from which an eager update steps."""


class CaptureAttempt(NamedTuple):
    """How a call is captured; see `GraphCapturer.capture`."""

    hides_capture: bool = True
    """Whether the capture is hidden from model code; see `hide_capture`."""
    records_draws: bool = False
    """Whether random numbers without an effect may be drawn on the host; see `HostDraws`."""

    def after(self, failure: CaptureFailed) -> CaptureAttempt | None:
        """Return what to try after a failure, None if there is nothing left.

        Some models read from the device unless they see that they are captured: these need
        `hides_capture=False`.
        """
        if isinstance(failure, HostDrawsFound) and not self.records_draws:
            return self._replace(records_draws=True)
        return self._replace(hides_capture=False) if self.hides_capture else None


class StepGraphs:
    """Captures and replays the graphs of one step."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self.capturer = GraphCapturer.on(executor.components.device)
        self.assignments = self.capturer.assignments
        bindings = [device_binding(optimizer) for optimizer in executor.components.optimizers]
        self.bindings = [binding for binding in bindings if binding is not None]
        self.captures_update = len(self.bindings) == len(bindings)
        """Whether every optimizer can be stepped in a graph. Otherwise all are stepped eagerly,
        after a graph of the forward and backward pass."""

    def recapture_key(self) -> list[Any]:
        """Return what a captured update depends on besides its gradients."""
        scaler = self._executor.components.scaler
        return [
            self._executor.metrics.revision,
            len(self.assignments.places),
            None if scaler is None else captured_scaler.counts_revision(scaler),
            None if scaler is None else captured_scaler.scale_rule(scaler),
            *[binding.recapture_key() for binding in self.bindings],
        ]

    # -- capture -----------------------------------------------------------------------------------

    def capture_call(
        self, call: Call, phase: AccumulationPhase, modes: Hashable, attempt: CaptureAttempt
    ) -> CapturedStep:
        """Capture a call, with its update if possible; raise `CaptureFailed` if it cannot be.

        The inputs are on the device of the models.
        """
        executor, updates = self._executor, phase.last and self.captures_update
        if not executor.static_gradients.exist:
            executor.clear_gradients()

        def run(inputs: Call) -> Any:
            context, returned = self._run_body(inputs, phase, modes)
            if updates:
                executor.update(context)
            return (context.loss, returned) if phase.last and not updates else returned

        captured = self._capture(run, call, updates=updates, attempt=attempt)
        if updates or executor.static_gradients.exist:
            return captured
        gradients = executor.gradients()
        executor.clear_gradients()
        return CapturedStep(captured.graph, None, gradients)

    def _run_body(
        self, inputs: Call, phase: AccumulationPhase, modes: Hashable
    ) -> tuple[StepContext, Any]:
        """Run forward and backward; check that static gradients are those of eager calls."""
        executor, static = self._executor, self._executor.static_gradients
        versions = static.versions()
        context, returned = executor.run_body(inputs, phase, modes)
        if static.exist and not static.were_added_to(versions, executor.gradients()):
            raise CaptureFailed(
                "calls accumulate gradients, and these add to those of other parameters than the"
                " calls before"
            )
        return context, returned

    def capture_update(self, loss: torch.Tensor | None, gradients: Gradients) -> CapturedStep:
        """Capture an update from these gradients."""
        executor = self._executor

        def run(values: tuple[torch.Tensor | None, list[torch.Tensor]]) -> None:
            context = StepContext(
                executor.components, loss_factor=1.0, can_update=True, loss=values[0]
            )
            for (parameter, _), gradient in zip(gradients, values[1], strict=True):
                parameter.grad = gradient
            executor.update(context)

        values = (loss, [gradient for _, gradient in gradients])
        return self._capture(run, values, updates=True, attempt=CaptureAttempt())

    def _capture(
        self, run: Callable[[Any], Any], values: Any, *, updates: bool, attempt: CaptureAttempt
    ) -> CapturedStep:
        scaler, gradients = self._executor.components.scaler, self._executor.gradients()
        schedule_tables = () if scaler is None else captured_scaler.schedule_tables(scaler)
        begin = time.perf_counter()
        for binding in self.bindings if updates else ():
            binding.before_capture()
        try:
            graph = self.capturer.capture(
                run,
                values,
                self._executor.metrics.memory,
                models=self._executor.components.models,
                **attempt._asdict(),
            )
        except CaptureFailed:
            self._discard(gradients)
            raise
        if _events.listening():
            seconds = time.perf_counter() - begin
            _events.emit(_events.StepCaptured(format_shapes(graph.inputs), seconds))
        if not updates:
            return CapturedStep(graph, None)
        bindings, read_by_updates = [], []
        for binding in self.bindings:
            binding.after_capture()
            plan, kept = binding.captured()
            read_by_updates.append(kept)
            if plan is not None:
                bindings.append(ReplayedBinding(binding, plan))
        update = CapturedUpdate(tuple(bindings), schedule_tables, tuple(read_by_updates))
        return CapturedStep(graph, update)

    def _discard(self, gradients: Gradients) -> None:
        """Return to the gradients before a failed capture, without the scaler's records of it."""
        if self._executor.components.scaler is not None:
            captured_scaler.discard_records(self._executor.components.scaler)
        for optimizer in self._executor.components.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for parameter, gradient in gradients:
            parameter.grad = gradient

    # -- replay ------------------------------------------------------------------------------------

    def replay_call(
        self,
        captured: CapturedStep,
        leaves: list[torch.Tensor],
        phase: AccumulationPhase,
        modes: Hashable,
        source: NonfiniteSource,
    ) -> tuple[Any] | None:
        """Replay a call; return its outputs in a 1-tuple, None if it cannot be replayed any more.

        `source` names the parameter of the last non-finite gradient, if it is known.
        """
        if captured.update is not None:
            return self._replay(captured, captured.update, leaves, source)
        if not captured.graph.prepare():
            return None
        returned = captured.graph.replay(leaves)
        if phase.last:
            loss, returned = returned
            for parameter, gradient in captured.gradients:
                # A copy: an optimizer may keep it, and the next replay overwrites this one.
                parameter.grad = gradient.clone()
            self._executor.update_after_replay(loss, modes)
        else:
            self._executor.static_gradients.note_replay()
        return (returned,)

    def replay_update(self, captured: CapturedStep, leaves: list[torch.Tensor]) -> bool:
        """Replay an update from other gradients; return False if it cannot be replayed any more."""
        if captured.update is None:
            return False
        if self._replay(captured, captured.update, leaves, NO_SOURCE) is None:
            return False
        self._executor.clear_gradients()
        return True

    def _replay(
        self,
        captured: CapturedStep,
        update: CapturedUpdate,
        leaves: list[torch.Tensor],
        source: NonfiniteSource,
    ) -> tuple[Any] | None:
        """Replay a graph that updates, with the host work around it."""
        if not captured.graph.prepare():
            return None
        scaler = self._executor.components.scaler
        for binding, plan in update.bindings:
            binding.before_replay(plan)
        if scaler is not None and captured_scaler.before_replay(scaler) != update.schedule_tables:
            return None
        returned = captured.graph.replay(leaves)
        if self._executor.static_gradients.exist:
            self._executor.static_gradients.note_zeros()
        if scaler is not None:
            captured_scaler.after_replay(scaler, self._executor.metrics.scale_and_skips, source)
        if innermost_region() is not None:
            # A region around the training loop holds cached casts of the old weights.
            clear_weight_cache()
        return (returned,)


class UpdateRunner:
    """Runs the updates of a step whose forward and backward pass cannot be captured.

    The update is captured by itself after a few calls, on copies of the gradients, and replayed if
    that is faster.
    """

    WARM_UP = 3
    """Eager updates that are timed before the capture."""

    def __init__(self, executor: StepExecutor, graphs: StepGraphs) -> None:
        self._executor, self._graphs = executor, graphs
        self._captured: CapturedStep | None = None
        self._key: list[Any] | None = None
        """What the captured update depends on."""
        self._eager_updates = 0
        self._is_off = not graphs.captures_update or executor.options.takes_update
        self._timing = ReplayTiming(executor.components.device)

    def __call__(self, context: StepContext) -> None:
        """Update from the current gradients."""
        scaler = self._executor.components.scaler
        if (
            self._is_off
            or self._executor.finds_scale
            or (scaler is not None and not captured_scaler.is_warmed_up(scaler))
        ):
            self._executor.update(context)
            return
        gradients = self._executor.gradients()
        if any(gradient.is_sparse for _, gradient in gradients):
            self._executor.update(context)
            return
        key: list[Any] = [
            (parameter.data_ptr(), gradient.dtype) for parameter, gradient in gradients
        ]
        key += [*self._executor.buffers.current, *self._graphs.recapture_key()]
        if key != self._key:
            self.drop()
            self._key = key
        if self._captured is None:
            self._run_or_capture(context, gradients)
        else:
            self._replay(self._captured, context, gradients)

    def drop(self) -> None:
        """Drop the captured update: what it depends on may have changed."""
        self._captured, self._key, self._eager_updates = None, None, 0
        self._timing = ReplayTiming(self._executor.components.device)

    def _run_or_capture(self, context: StepContext, gradients: Gradients) -> None:
        if self._eager_updates < self.WARM_UP:
            self._eager_updates += 1
            self._timing.time_eager(lambda: self._executor.update(context))
            return
        try:
            self._captured = self._graphs.capture_update(context.loss, gradients)
        except CaptureFailed:
            self._is_off = True
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if self._captured is None:
            self._executor.update(context)
        else:
            self._replay(self._captured, context, gradients)

    def _replay(self, captured: CapturedStep, context: StepContext, gradients: Gradients) -> None:
        loss = [] if context.loss is None else [context.loss.detach()]
        leaves = [*loss, *[gradient for _, gradient in gradients]]
        if not self._timing.time_replay(lambda: self._graphs.replay_update(captured, leaves)):
            self.drop()
            self._executor.update(context)
        elif self._timing.judges_slower():
            self.drop()
            self._is_off = True
