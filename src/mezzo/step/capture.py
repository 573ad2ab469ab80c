"""Warm a step up, capture it as a CUDA graph and replay it, or choose to run it eagerly."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from mezzo import _events
from mezzo._torch import dispatch_mode_count
from mezzo.policy.decide import user_stack_level
from mezzo.scaling import capture
from mezzo.step.capture_obstacles import (
    capture_obstacle,
    optimizer_obstacle,
    warn_many_kinds,
    warn_not_captured,
)
from mezzo.step.captured_step import Attempt, CapturedStep, StepGraphs, UpdateRunner
from mezzo.step.components import Capture
from mezzo.step.cuda_graph import CaptureFailed, keeps_autograd_graph
from mezzo.step.eager_runner import EagerRunner, Runner, first_nonfinite
from mezzo.step.executor import AccumulationPhase, StepExecutor
from mezzo.step.input_kinds import InputKind, InputKinds
from mezzo.step.inputs import Call, UnsupportedInput, copy_outputs, format_shapes, signature
from mezzo.step.module_buffers import module_modes
from mezzo.step.replay_timing import ReplayTiming
from mezzo.step.stall_check import StallCheck


def runner_for(executor: StepExecutor, capture: Capture) -> Runner:
    """Return a runner that captures, or an eager one if that is requested or necessary."""
    if capture is Capture.OFF:
        return EagerRunner(executor)
    reason = capture_obstacle(executor.components) or optimizer_obstacle(executor)
    if reason is None:
        return CaptureRunner(executor, capture)
    warn_not_captured(reason, capture, quietly=executor.components.device.type != "cuda")
    return EagerRunner(executor, reason)


_WARM_UP = 3
"""Real calls before the first capture, which create optimizer states, tables and compiled kernels.
One of them at least has the inputs that are captured: inputs that are seen once are not."""


_KEPT_GRAPH = (
    ". An output or a loss of the model that was computed before is still in memory, and its"
    " autograd graph belongs to another stream. Delete it before the first steps, or compute it"
    " under torch.no_grad()"
)


class _NumberedModes(NamedTuple):
    """Modes of modules and parameters, with a small number that is fast to hash."""

    modes: Hashable
    number: int


class CaptureRunner:
    """Captures calls as CUDA graphs and replays them."""

    def __init__(self, executor: StepExecutor, capture: Capture) -> None:
        self.eager_reason: str | None = None
        self._replays = 0
        self._executor, self._capture = executor, capture
        components = executor.components
        self._modules = [module for model in components.models for module in model.modules()]
        self._parameters = [
            parameter for model in components.models for parameter in model.parameters()
        ]
        self._graphs = StepGraphs(executor)
        self._inputs: InputKinds[CapturedStep] = InputKinds(executor.options.max_graphs)
        self._mode_numbers: dict[Hashable, int] = {}
        self._current = _NumberedModes(None, 0)
        self._warm_up_calls: Counter[Hashable] = Counter()
        """Calls so far by modes and phase, of all kinds of inputs."""
        self._attempt = Attempt()
        """How calls are captured: the last attempt that did not fail."""
        self._stall_check = StallCheck(executor)
        self._update: UpdateRunner | None = None
        """Runs updates if calls cannot be captured."""
        self._recapture_key: Any = None
        self._warned_full = False
        self.drop_graphs()

    # -- one call ----------------------------------------------------------------------------------

    def __call__(self, call: Call, phase: AccumulationPhase) -> Any:
        """Run one call: replay it if its graph is captured, else warm up or capture."""
        leaves: list[torch.Tensor] = []
        modes = module_modes(self._modules, self._parameters)
        if dispatch_mode_count():
            # A mode sees the ops that run, and a replay runs none.
            self._stall_check.drop()
            return copy_outputs(self._executor.run(self._executor.move_inputs(call), phase, modes))
        if self.eager_reason is not None:
            return self._run_eagerly(call, phase, modes)
        try:
            key = (
                signature(call, leaves),
                self._number(modes),
                self._executor.options.closure_values(),
            )
        except UnsupportedInput as error:
            self._give_up(
                f"an input of type {error} is neither a tensor, a list, a tuple, a mapping, a"
                " dataclass nor a hashable value"
            )
            return self._run_eagerly(call, phase, modes)
        self._check_recapture_key()
        kind = self._inputs.use(key, leaves)
        if self._inputs.exceed_limit and not self._warned_full:
            self._warned_full = True
            warn_many_kinds(self._inputs.limit, leaves)
        if self._inputs.needs_memory_of_graphs(kind):
            self._release_graphs()
        if phase.first:
            self._executor.static_gradients.attach()
        captured = kind.graphs.get(phase)
        if captured is not None:
            returned = self._replay_checked(kind, captured, call, leaves, phase, modes)
            if returned is not None:
                return returned[0]
        self._stall_check.drop()
        return self._warm_up_or_capture(kind, call, leaves, phase, modes)

    def _number(self, modes: Hashable) -> int:
        """Return a small number for these modes, which rarely change between calls."""
        if modes != self._current.modes:
            number = self._mode_numbers.setdefault(modes, len(self._mode_numbers))
            self._current = _NumberedModes(modes, number)
            if self._executor.static_gradients.exist:
                # Other parameters may get gradients now: backward passes allocate them again.
                self.drop_graphs()
        return self._current.number

    def _check_recapture_key(self) -> None:
        """Drop graphs if parameter addresses, the scale rule or optimizer tables changed."""
        key = [list(map(torch.Tensor.data_ptr, self._parameters)), *self._graphs.recapture_key()]
        if key != self._recapture_key:
            self._recapture_key = key
            self.drop_graphs()

    def _run_eagerly(self, call: Call, phase: AccumulationPhase, modes: Hashable) -> Any:
        """Run a call eagerly; if no calls can be captured, with a captured update."""
        moved = self._executor.move_inputs(call)
        returned = copy_outputs(self._executor.run(moved, phase, modes, self._update))
        self._check_gradients(phase)
        return returned

    def _check_gradients(self, phase: AccumulationPhase) -> None:
        """Drop graphs if an eager call has made gradients that a captured update does not read."""
        static = self._executor.static_gradients
        if static.exist and not phase.last:
            static.has_run = True
            if static.lack(self._executor.gradients()):
                self.drop_graphs()

    # -- replay ------------------------------------------------------------------------------------

    def _replay_checked(
        self,
        kind: InputKind[CapturedStep],
        captured: CapturedStep,
        call: Call,
        leaves: list[torch.Tensor],
        phase: AccumulationPhase,
        modes: Hashable,
    ) -> tuple[Any] | None:
        """Replay; after consecutive skips, compare one update with the eager step."""
        if phase.first:
            self._stall_check.start()
        self._stall_check.compute(call)
        returned = self._replay(kind, captured, leaves, phase, modes)
        if returned is not None and phase.last and (error := self._stall_check.judge()) is not None:
            self.eager_reason = error
            self.drop_graphs()
            warnings.warn(
                f"The step runs eagerly from now on: {error}. One batch was skipped.",
                UserWarning,
                stacklevel=user_stack_level(),
            )
        return returned

    def _replay(
        self,
        kind: InputKind[CapturedStep],
        captured: CapturedStep,
        leaves: list[torch.Tensor],
        phase: AccumulationPhase,
        modes: Hashable,
    ) -> tuple[Any] | None:
        """Replay a graph; return its outputs in a 1-tuple, None if it cannot run any more."""

        def replay() -> tuple[Any] | None:
            return self._graphs.replay_call(
                captured, leaves, phase, modes, self._stall_check.source
            )

        timing = kind.timings[phase]
        returned: tuple[Any] | None = timing.time_replay(replay)
        if returned is None:
            self.drop_graphs()
            return None
        self._replays += 1
        if timing.judges_slower() and self._capture is Capture.AUTO:
            torch.cuda.synchronize(self._executor.components.device)
            del kind.graphs[phase]
            kind.is_eager = True
            reason = f"for inputs of shape {format_shapes(leaves)}, {timing.reason}"
            if not (kind.graphs or self._inputs.are_others_captured(kind)):
                self._give_up(reason)
            elif _events.listening():
                _events.emit(_events.StepNotCaptured(reason))
        return returned

    # -- warm-up and capture -----------------------------------------------------------------------

    def _warm_up_or_capture(
        self,
        kind: InputKind[CapturedStep],
        call: Call,
        leaves: list[torch.Tensor],
        phase: AccumulationPhase,
        modes: Hashable,
    ) -> Any:
        if kind.is_eager:
            return self._run_eagerly(call, phase, modes)
        warmed_up = self._warm_up_calls[self._current.number, phase] >= _WARM_UP
        settled = bool(kind.graphs) or self._inputs.are_settled
        is_known = warmed_up and settled and phase in kind.timings
        if not (is_known and self._is_ready(phase, modes)):
            # The call that finds the written buffers does not count.
            known = self._executor.buffers.knows(modes)
            self._warm_up_calls[self._current.number, phase] += known
            if self._inputs.is_new_beyond_limit(kind):
                # A number that changes makes ever new kinds. Timing their calls would synchronize.
                return self._run_eagerly(call, phase, modes)
            return self._warm_up(kind, self._static_inputs(call, leaves), phase, modes)
        if not kind.graphs and not self._make_room(kind):
            return self._run_eagerly(call, phase, modes)
        captured = self._try_capture(kind, call, leaves, phase, modes)
        if captured is None:
            return self._run_eagerly(call, phase, modes)
        self._inputs.add(kind, phase, captured)
        returned = self._replay(kind, captured, leaves, phase, modes)
        return self._run_eagerly(call, phase, modes) if returned is None else returned[0]

    def _is_ready(self, phase: AccumulationPhase, modes: Hashable) -> bool:
        """Return whether a capture has what it needs.

        That is known buffers, a loss scale past its warm-up and, if calls accumulate, gradients at
        fixed addresses, which this allocates.
        """
        executor, scaler = self._executor, self._executor.components.scaler
        if not executor.buffers.knows(modes) or (
            scaler is not None and not capture.is_warmed_up(scaler)
        ):
            return False
        if executor.options.accumulate > 1 and not executor.static_gradients.exist:
            return phase.first and executor.static_gradients.allocate()
        return True

    def _static_inputs(self, call: Call, leaves: list[torch.Tensor]) -> Call:
        """Return inputs as the static buffers of a captured graph hold them.

        A warm-up runs on the same dtypes: code compiled in it would else be compiled again in the
        capture.
        """
        moved = self._executor.move_inputs(call)
        # A copy from another device would cast on the host first, and synchronize.
        if all(leaf.device == self._executor.components.device for leaf in leaves):
            return self._executor.cast_inputs(moved)
        return moved

    def _warm_up(
        self, kind: InputKind[CapturedStep], call: Call, phase: AccumulationPhase, modes: Hashable
    ) -> Any:
        """Run a real call on the capture stream, and time it."""

        def run() -> Any:
            return copy_outputs(self._executor.run(call, phase, modes))

        timing = kind.timings.setdefault(phase, ReplayTiming(self._executor.components.device))
        returned = timing.time_eager(lambda: self._graphs.capturer.run_on_capture_stream(run))
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
        self,
        kind: InputKind[CapturedStep],
        call: Call,
        leaves: list[torch.Tensor],
        phase: AccumulationPhase,
        modes: Hashable,
    ) -> CapturedStep | None:
        """Capture a call; return None if no attempt succeeds.

        All calls run eagerly from then on, or only those of this kind if others are captured.
        """
        inputs, attempt = self._static_inputs(call, leaves), self._attempt
        hint = _KEPT_GRAPH if keeps_autograd_graph(self._parameters) else ""
        while True:
            try:
                captured = self._graphs.capture_call(inputs, phase, modes, attempt)
            except CaptureFailed as failure:
                following = attempt.after(failure)
                if following is None:
                    self._run_kind_eagerly(kind, leaves, failure, hint)
                    return None
                attempt = following
            else:
                self._attempt = attempt
                return captured

    def _run_kind_eagerly(
        self,
        kind: InputKind[CapturedStep],
        leaves: list[torch.Tensor],
        failure: CaptureFailed,
        hint: str,
    ) -> None:
        reason = f"{failure}{hint if 'stream' in str(failure) else ''}"
        if self._inputs.are_others_captured(kind):
            kind.is_eager = True
            reason = f"for inputs of shape {format_shapes(leaves)}, {reason}"
            warn_not_captured(reason, self._capture)
        else:
            self._give_up(reason, failure)

    def _give_up(self, reason: str, error: Exception | None = None) -> None:
        """Run eagerly from now on, with a warning or, if capture=True, an error."""
        self.eager_reason = reason
        self.drop_graphs()
        try:
            warn_not_captured(reason, self._capture)
        except Exception as refused:
            raise refused from error
        self._update = UpdateRunner(self._executor, self._graphs)

    # -- other calls -------------------------------------------------------------------------------

    def flush(self, calls: int) -> None:
        """Update from the gradients of fewer calls than usual, eagerly."""
        self._executor.flush(calls)

    def first_nonfinite(self) -> str | None:
        """Return the name of the parameter with the last non-finite gradient, if it is known."""
        return self._stall_check.source.name() if self.captured else first_nonfinite(self._executor)

    @property
    def captured(self) -> bool:
        """Whether calls are replayed by now."""
        return self._inputs.has_graphs

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
        self._inputs.clear()
        self._warm_up_calls.clear()
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
