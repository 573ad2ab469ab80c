"""Warm up the calls of a step, capture them as CUDA graphs and replay them."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch

from mezzo import _events
from mezzo._torch import dispatch_mode_count, reset_fsdp, shards
from mezzo.parallel.process_groups import drop_before_shutdown
from mezzo.scaling import captured_scaler
from mezzo.scaling.mesh import any_sharded
from mezzo.scaling.step_result import first_nonfinite
from mezzo.step.assigned_tensors import explain_replaced
from mezzo.step.capture_obstacles import (
    kept_graph_hint,
    warn_many_kinds,
    warn_not_captured,
    warn_replay_disagreed,
)
from mezzo.step.captured_step import CaptureAttempt, CapturedStep, StepGraphs, UpdateRunner
from mezzo.step.cuda_graph import CaptureFailed, release_frames
from mezzo.step.executor import StepExecutor
from mezzo.step.input_kinds import InputKind, InputKinds
from mezzo.step.inputs import Call, UnsupportedInput, copy_outputs, format_shapes, signature
from mezzo.step.model_structure import ModelStructure
from mezzo.step.module_buffers import module_modes
from mezzo.step.options import AccumulationPhase, Capture
from mezzo.step.rank_agreement import CallState, shared_calls
from mezzo.step.replay_timing import ReplayTiming
from mezzo.step.stall_check import StallCheck
from mezzo.step.warm_up import WarmUp


class _CallInputs(NamedTuple):
    """One call of a step, with what its graph depends on."""

    call: Call
    leaves: list[torch.Tensor]
    """Tensors of the call, in order."""
    phase: AccumulationPhase
    modes: Hashable
    """Modes of modules and parameters."""


class CaptureRunner:
    """Captures calls as CUDA graphs and replays them."""

    def __init__(self, executor: StepExecutor, capture: Capture) -> None:
        self.eager_reason: str | None = None
        self._replays = 0
        self._executor, self._capture = executor, capture
        components = executor.components
        self._is_sharded = any_sharded(
            [parameter for model in components.models for parameter in model.parameters()]
        )
        self._graphs = StepGraphs(executor)
        self._shared = shared_calls(components, same_shapes=executor.options.same_shapes)
        """Agrees with the other ranks about each call; None if this process trains alone."""
        # The samples of an observed run add hooks, and with several processes calls are replayed
        # during them.
        self._structure = ModelStructure(
            components.models,
            components.optimizers,
            is_sharded=self._is_sharded,
            with_hooks=self._shared is None,
        )
        self._warm_up = WarmUp(executor)
        self._has_reducers = not components.ddp
        """Whether wrappers reduce gradients on the capture stream."""
        self._are_ready = False
        """Whether all ranks can capture the current call."""
        self._has_dropped = False
        """Whether graphs were dropped since the last agreement."""
        self._schedule_tables: tuple[int, ...] = ()
        self._inputs: InputKinds[CapturedStep] = InputKinds(executor.options.max_graphs)
        self._attempt = CaptureAttempt()
        """How calls are captured: the last attempt that did not fail, or the next one to try."""
        self._stall_check = StallCheck(executor)
        self._update: UpdateRunner | None = None
        """Runs updates if calls cannot be captured."""
        self._recapture_key: Any = None
        self._warned_full = False
        self.drop_graphs()
        if self._shared is not None:
            drop_before_shutdown(self)

    # -- one call ----------------------------------------------------------------------------------

    def __call__(self, call: Call, phase: AccumulationPhase) -> Any:
        """Run one call: replay it if its graph is captured, else warm up or capture."""
        if dispatch_mode_count() and not self.shares_calls:
            # A mode sees the ops that run, and a replay runs none.
            return self.run_eagerly(call, phase)
        modes = self._follow_structure()
        inputs = _CallInputs(call, [], phase, modes)
        if self.eager_reason is not None:
            return self._run_eagerly(inputs)
        if not self._has_reducers:
            self._renew_reducers()
        kind = self._find_kind(inputs)
        if kind is None:
            return self._run_eagerly(inputs)
        if self._executor.static_gradients.exist:
            self._executor.static_gradients.attach()
        captured = kind.graphs.get(phase)
        if captured is not None:
            returned = self._replay_checked(kind, captured, inputs)
            if returned is not None:
                return returned[0]
        self._stall_check.drop()
        if self._inputs.exceed_limit and not self._warned_full:
            self._warned_full = True
            warn_many_kinds(self._inputs.limit, inputs.leaves)
        if self._inputs.needs_memory_of_graphs(kind):
            self._release_graphs()
        return self._warm_up_or_capture(kind, inputs)

    def _follow_structure(self) -> Hashable:
        """Drop graphs if modules or hooks were replaced; return the modes of the current ones."""
        if self._structure.has_changed(self._graphs.assignments.places):
            self.drop_graphs()
        return self._modes()

    def _modes(self) -> Hashable:
        return module_modes(self._structure.modules, self._structure.parameters)

    def _find_kind(self, inputs: _CallInputs) -> InputKind[CapturedStep] | None:
        """Return the kind of a call, and collect its tensors; None if it cannot be captured."""
        call, leaves, phase, modes = inputs
        key: Hashable = None
        size = refusal = None
        try:
            values = self._executor.options.closure_values()
            assignments = self._graphs.assignments
            empty = assignments.empty_places if assignments.places else ()
            key = (signature(call, leaves), self._number(modes), values, empty)
        except UnsupportedInput as error:
            refusal = (
                f"an input of type {error} is neither a tensor, a list, a tuple, a mapping, a"
                " dataclass nor a hashable value"
            )
        self._check_recapture_key(phase)
        if self._shared is not None:
            own = sum(leaf.nbytes for leaf in leaves)
            is_ready = key is not None and self._warm_up.is_ready(phase)
            agreed = self._shared.agree(CallState(key, own, is_ready, self._has_dropped))
            if agreed.drops:
                self.drop_graphs()
            self._has_dropped, self._are_ready = False, agreed.is_ready
            key, size, refusal = agreed.key, agreed.size, refusal or agreed.refusal
        if refusal is not None:
            self._give_up(refusal)
            return None
        return self._inputs.use(key, leaves, size)

    def _number(self, modes: Hashable) -> int:
        """Return a small number for these modes, which is fast to hash."""
        if self._warm_up.select(modes) and self._executor.static_gradients.exist:
            # Other parameters may get gradients now: backward passes allocate them again.
            self.drop_graphs()
        return self._warm_up.modes.number

    def _check_recapture_key(self, phase: AccumulationPhase) -> None:
        """Drop graphs if parameter addresses, the scale rule or optimizer tables changed."""
        scaler = self._executor.components.scaler
        if self._shared is not None and scaler is not None and phase.last:
            # Before the ranks agree: otherwise only some of them would find that the tables have
            # moved.
            self._schedule_tables = captured_scaler.before_replay(scaler)
        parameters = self._structure.parameters
        addressed = shards(parameters) if self._is_sharded else parameters
        key = [
            list(map(torch.Tensor.data_ptr, addressed)),
            self._schedule_tables,
            *self._graphs.recapture_key(),
        ]
        if key != self._recapture_key:
            self._recapture_key = key
            self.drop_graphs()

    def _run_eagerly(self, inputs: _CallInputs) -> Any:
        """Run a call eagerly; if calls cannot be captured, the update may still be."""
        call, _, phase, modes = inputs

        def run() -> Any:
            moved = self._executor.move_inputs(call)
            return copy_outputs(self._executor.run(moved, phase, modes, self._update))

        # Wrappers that may be captured accumulate gradients on the capture stream.
        on_current = self._shared is None or self.eager_reason is not None
        returned = run() if on_current else self._graphs.capturer.run_on_capture_stream(run)
        self._check_gradients(phase)
        return returned

    def run_eagerly(self, call: Call, phase: AccumulationPhase) -> Any:
        """Run one call eagerly, on the stream on which gradients accumulate; keep the graphs."""
        self._stall_check.drop()
        inputs = _CallInputs(call, [], phase, self._modes())
        if self.eager_reason is not None:
            return self._run_eagerly(inputs)
        return self._graphs.capturer.run_on_capture_stream(lambda: self._run_eagerly(inputs))

    def _check_gradients(self, phase: AccumulationPhase) -> None:
        """Drop graphs if an eager call has made gradients that a captured update does not read."""
        static = self._executor.static_gradients
        if (
            static.exist
            and not phase.last
            and not static.note_eager_call(self._executor.gradients())
        ):
            self.drop_graphs()

    # -- replay ------------------------------------------------------------------------------------

    def _replay_checked(
        self, kind: InputKind[CapturedStep], captured: CapturedStep, inputs: _CallInputs
    ) -> tuple[Any] | None:
        """Replay; after consecutive skips, compare one update with the eager step."""
        phase, check = inputs.phase, self._stall_check
        if phase.first:
            check.start()
        if check.compared is None:
            return self._replay(kind, captured, inputs)
        check.compute(inputs.call)
        returned = self._replay(kind, captured, inputs)
        if returned is not None and phase.last and (error := check.judge()) is not None:
            self.eager_reason = error
            self.drop_graphs()
            warn_replay_disagreed(error)
        return returned

    def _replay(
        self, kind: InputKind[CapturedStep], captured: CapturedStep, inputs: _CallInputs
    ) -> tuple[Any] | None:
        """Replay a graph; return its outputs in a 1-tuple, None if it cannot run any more."""
        _, leaves, phase, modes = inputs
        replay = self._graphs.replay_call
        arguments = (captured, leaves, phase, modes, self._stall_check.source)
        timing = kind.timings[phase]
        returned: tuple[Any] | None = (
            timing.time_replay(partial(replay, *arguments))
            if timing.is_running
            else replay(*arguments)
        )
        if returned is None:
            self.drop_graphs()
            return None
        self._replays += 1
        if not timing.is_judged and self._capture is Capture.AUTO and self._is_slower(timing):
            torch.cuda.synchronize(self._executor.components.device)
            kind.leave_eager(phase)
            reason = f"for inputs of shape {format_shapes(leaves)}, {timing.reason}"
            if not (kind.graphs or self._inputs.are_others_captured(kind)):
                self._give_up(reason)
            elif _events.listening():
                _events.emit(_events.StepNotCaptured(reason))
        return returned

    def _is_slower(self, timing: ReplayTiming) -> bool:
        """Return once, after enough replays, whether they take longer on all ranks."""
        if not timing.is_due:
            return False
        slower = timing.judges_slower()
        return slower if self._shared is None else self._shared.agree_on_slower(slower=slower)

    # -- warm-up and capture -----------------------------------------------------------------------

    def _warm_up_or_capture(self, kind: InputKind[CapturedStep], inputs: _CallInputs) -> Any:
        if kind.is_eager:
            return self._run_eagerly(inputs)
        replaced = self._graphs.assignments.replaced_parameter
        if replaced is not None and self._shared is None:
            # Its new address drops all graphs: no capture would be tried.
            self._give_up(explain_replaced(replaced))
            return self._run_eagerly(inputs)
        phase = inputs.phase
        if not self._can_capture_now(kind, phase):
            self._warm_up.count_call(phase)
            if self._inputs.is_new_beyond_limit(kind):
                # An input number that changes makes a new kind in each call. Timing them would
                # synchronize.
                return self._run_eagerly(inputs)
            return self._run_warm_up_call(kind, inputs)
        if not kind.graphs and not self._make_room(kind):
            return self._run_eagerly(inputs)
        captured = self._try_capture(kind, inputs)
        if captured is None:
            return self._run_eagerly(inputs)
        kind.add_graph(phase, captured)
        returned = self._replay(kind, captured, inputs)
        return self._run_eagerly(inputs) if returned is None else returned[0]

    def _can_capture_now(self, kind: InputKind[CapturedStep], phase: AccumulationPhase) -> bool:
        settled = bool(kind.graphs) or self._inputs.are_settled
        if not settled or phase not in kind.timings:
            return False
        if self._shared is not None:
            return self._are_ready
        return self._warm_up.is_ready(phase)

    def _run_warm_up_call(self, kind: InputKind[CapturedStep], inputs: _CallInputs) -> Any:
        """Run a real call on the capture stream, and time it."""
        call, phase = self._executor.static_inputs(inputs.call, inputs.leaves), inputs.phase
        capturer = self._graphs.capturer

        def run() -> Any:
            return copy_outputs(self._executor.run(call, phase, inputs.modes))

        def warm_up() -> Any:
            if self._shared is None:
                return capturer.run_on_capture_stream(run)
            returned, kind.host_reads[phase] = capturer.find_host_reads(run)
            return returned

        timing = kind.timings.setdefault(phase, ReplayTiming(self._executor.components.device))
        with self._graphs.assignments.noting(self._executor.components.models):
            returned = timing.time_eager(warm_up)
        self._check_gradients(phase)
        return returned

    def _make_room(self, kind: InputKind[CapturedStep]) -> bool:
        """Make room for the graphs of other inputs; return False if there is none."""
        if not self._inputs.has_room(kind):
            return False
        # Graphs that are dropped may be running.
        torch.cuda.synchronize(self._executor.components.device)
        self._inputs.make_room()
        if self._inputs.is_largest(kind):
            self._release_graphs()
        return True

    def _try_capture(
        self, kind: InputKind[CapturedStep], inputs: _CallInputs
    ) -> CapturedStep | None:
        """Capture a call; return None if no attempt succeeds.

        All calls run eagerly from then on, or only those of this kind if others are captured.
        """
        leaves, attempt = inputs.leaves, self._attempt
        if self._shared is not None:
            failure = self._shared.agree_on_reads(kind.host_reads[inputs.phase])
            if failure is not None:
                self._run_kind_eagerly(kind, leaves, failure, "")
                return None
        hint = "" if self._shared is not None else kept_graph_hint(self._structure.parameters)
        while True:
            captured, failure = self._capture_once(inputs, attempt)
            if failure is None:
                self._attempt = attempt
                return captured
            following = attempt.after(failure)
            if self._shared is not None:
                # The models are warmed up again before the next attempt.
                self._recover()
                self._attempt = following or CaptureAttempt()
            if following is None:
                self._run_kind_eagerly(kind, leaves, failure, hint)
            if following is None or self._shared is not None:
                return None
            attempt = following

    def _capture_once(
        self, inputs: _CallInputs, attempt: CaptureAttempt
    ) -> tuple[CapturedStep | None, CaptureFailed | None]:
        """Capture a call, on all ranks or on none; return the graph or why it failed."""
        call = self._executor.static_inputs(inputs.call, inputs.leaves)
        captured = failure = None
        try:
            captured = self._graphs.capture_call(call, inputs.phase, inputs.modes, attempt)
        except CaptureFailed as error:
            release_frames(error)
            failure = error
        if self._shared is not None:
            failure = self._shared.agree_on_capture(failure)
        return captured, failure

    def _recover(self) -> None:
        """Let wrapped and sharded models run again after a failed capture.

        An error in backward leaves reducers unusable, and captured graphs use their memory.
        """
        self._release_graphs()
        self._warm_up.clear()
        self._renew_reducers()
        for model in self._executor.components.models:
            reset_fsdp(model)

    def _renew_reducers(self) -> None:
        """Let wrappers reduce gradients on the capture stream, once no graph uses their memory."""
        ddp = self._executor.components.ddp
        self._graphs.capturer.run_on_capture_stream(ddp.renew_reducers)
        self._has_reducers = True

    def _run_kind_eagerly(
        self,
        kind: InputKind[CapturedStep],
        leaves: list[torch.Tensor],
        failure: CaptureFailed,
        hint: str,
    ) -> None:
        reason = f"{failure}{hint if 'stream' in str(failure) else ''}"
        if self._inputs.are_others_captured(kind):
            kind.leave_eager()
            reason = f"for inputs of shape {format_shapes(leaves)}, {reason}"
            warn_not_captured(reason, self._capture)
        else:
            self._give_up(reason, failure)

    def _give_up(self, reason: str, error: Exception | None = None) -> None:
        """Run eagerly from now on, with a warning or, if capture=True, an error."""
        self.eager_reason = reason
        self.drop_graphs()
        if self._shared is not None:
            # Calls run on the current stream from now on.
            self._executor.components.ddp.renew_reducers()
        try:
            warn_not_captured(reason, self._capture)
        except Exception as refused:
            raise refused from error
        if not self._is_sharded:
            # An update of shards contains a collective: ranks would have to agree on its capture.
            self._update = UpdateRunner(self._executor, self._graphs)

    # -- other calls -------------------------------------------------------------------------------

    def flush(self, calls: int) -> None:
        """Update from the gradients of fewer calls than usual, eagerly."""
        self._executor.flush(calls)

    def first_nonfinite(self) -> str | None:
        """Return the name of the parameter with the last non-finite gradient, if it is known."""
        if self.captured:
            return self._stall_check.source.name()
        return first_nonfinite(self._executor.results)

    @property
    def captured(self) -> bool:
        """Whether calls are replayed by now."""
        return self._inputs.has_graphs

    @property
    def shares_calls(self) -> bool:
        """Whether all ranks run each call alike, so that no rank may run one eagerly by itself."""
        return self._shared is not None and self.eager_reason is None

    @property
    def graph_count(self) -> int:
        """Kinds of inputs whose calls are replayed."""
        return self._inputs.graph_count

    @property
    def replays(self) -> int:
        """Calls replayed so far."""
        return self._replays

    def drop_graphs(self) -> None:
        """Drop captured graphs. This synchronizes if there are any, since they may be running."""
        self._release_graphs()
        self._has_dropped = True
        self._inputs.clear()
        self._warm_up.clear()
        if self._update is not None:
            self._update.drop()
        if self._executor.options.accumulate > 1:
            self._executor.static_gradients.release(records=self.eager_reason is None)

    def _release_graphs(self) -> None:
        """Free the memory of all graphs; inputs are captured again without a warm-up."""
        if self._inputs.has_graphs:
            torch.cuda.synchronize(self._executor.components.device)
            self._inputs.drop_graphs()
            torch.cuda.empty_cache()
