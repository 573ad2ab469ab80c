"""Run a step eagerly, or warm it up, capture it as a CUDA graph and replay it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import torch

from mezzo import _events, _launch
from mezzo._errors import UnsupportedError
from mezzo.optim.device_binding import device_binding
from mezzo.prepare.sharding import is_sharded_model
from mezzo.scaling import capture
from mezzo.step.captured_step import Attempt, CapturedStep, StepGraphs, UpdateRunner
from mezzo.step.components import Capture, StepComponents
from mezzo.step.cuda_graph import CaptureFailed
from mezzo.step.executor import AccumulationPhase, StepExecutor
from mezzo.step.input_kinds import InputKind, InputKinds
from mezzo.step.inputs import Call, UnsupportedInput, copy_outputs, format_shapes, signature
from mezzo.step.module_buffers import module_modes
from mezzo.step.replay_timing import ReplayTiming
from mezzo.step.stall_check import StallCheck


class Runner(Protocol):
    """Runs the calls of a step."""

    eager_reason: str | None
    """Why calls run eagerly although they were to be captured."""

    def __call__(self, call: Call, phase: AccumulationPhase) -> Any:
        """Run one call and return detached copies of what the body returned."""

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
    def graph_count(self) -> int:
        """Kinds of inputs whose calls are replayed."""

    @property
    def replays(self) -> int:
        """Calls replayed so far."""

    def drop_graphs(self) -> None:
        """Drop captured graphs: what they depend on may have changed."""


def runner_for(executor: StepExecutor, capture: Capture) -> Runner:
    """Return a runner that captures, or an eager one if that is requested or necessary."""
    if capture is Capture.OFF:
        return EagerRunner(executor)
    reason = capture_obstacle(executor.components) or optimizer_obstacle(executor)
    if reason is None:
        return CaptureRunner(executor, capture)
    warn_not_captured(reason, capture, quietly=executor.components.device.type != "cuda")
    return EagerRunner(executor, reason)


def capture_obstacle(components: StepComponents) -> str | None:
    """Return why a step cannot be captured, as far as that is known before the first call."""
    device = components.device
    if device.type != "cuda":
        return f"the model is on {device.type}, which has no CUDA graphs"
    parameters = (parameter for model in components.models for parameter in model.parameters())
    if is_sharded_model(components.models):
        return "the model is sharded over processes, which is not captured"
    if len({parameter.device for parameter in parameters}) > 1:
        return "the parameters are on several devices"
    if components.replicas:
        return (
            "the model is wrapped by DistributedDataParallel, and all ranks would have to capture"
            " and replay the same graph in the same call"
        )
    if not _launch.has_triton(device):
        return "Triton is not installed, which the fused steps need"
    return None if components.scaler is None else capture.capture_refusal(components.scaler)


def optimizer_obstacle(executor: StepExecutor) -> str | None:
    """Return why optimizers without a captured step prevent the capture of calls.

    They step behind a captured forward and backward pass, from copies of its gradients: not in the
    middle of a body, and not from gradients that calls add to at fixed addresses.
    """
    options = executor.options
    names = [
        type(one).__name__ for one in executor.components.optimizers if device_binding(one) is None
    ]
    if not names or (options.accumulate == 1 and not options.takes_update):
        return None
    how = "the body steps it by update()" if options.takes_update else "calls accumulate gradients"
    return f"{' and '.join(names)} has no step that can be captured, and {how}"


class EagerRunner:
    """Runs every call eagerly."""

    captured = False
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

    def flush(self, calls: int) -> None:
        """Update from the gradients of fewer calls than usual."""
        self._executor.flush(calls)

    def first_nonfinite(self) -> str | None:
        """Return the name of the first parameter with a non-finite gradient in the last update."""
        return first_nonfinite(self._executor)

    def drop_graphs(self) -> None:
        """Do nothing: an eager runner has no graphs."""


def first_nonfinite(executor: StepExecutor) -> str | None:
    """Return the first parameter with a non-finite gradient in the last eager update, by name.

    This synchronizes.
    """
    names = (result.first_nonfinite for result in executor.results if result is not None)
    return next((name for name in names if name is not None), None)


_WARM_UP = 3
"""Real calls before the first capture, which create optimizer states, tables and compiled kernels.
One of them at least has the inputs that are captured: inputs that are seen once are not."""


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
            if self._executor.has_static_gradients:
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
        return copy_outputs(self._executor.run(moved, phase, modes, self._update))

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
                stacklevel=5,
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
            self._reject(kind, phase, timing, leaves)
        return returned

    def _reject(
        self,
        kind: InputKind[CapturedStep],
        phase: AccumulationPhase,
        timing: ReplayTiming,
        leaves: list[torch.Tensor],
    ) -> None:
        """Run these inputs eagerly from now on, because replays are slower."""
        torch.cuda.synchronize(self._executor.components.device)
        kind.graphs.pop(phase)
        kind.is_slower = True
        if not self._inputs.has_graphs:
            self._graphs.use_new_pool()
        reason = f"for inputs of shape {format_shapes(leaves)}, {timing.reason}"
        if self._inputs.has_graphs:
            if _events.listening():
                _events.emit(_events.StepNotCaptured(reason))
        else:
            self._give_up(reason)

    # -- warm-up and capture -----------------------------------------------------------------------

    def _warm_up_or_capture(
        self,
        kind: InputKind[CapturedStep],
        call: Call,
        leaves: list[torch.Tensor],
        phase: AccumulationPhase,
        modes: Hashable,
    ) -> Any:
        if kind.is_slower:
            return self._run_eagerly(call, phase, modes)
        warmed_up = self._warm_up_calls[self._current.number, phase] >= _WARM_UP
        settled = bool(kind.graphs) or self._inputs.are_settled
        is_known = warmed_up and settled and phase in kind.timings
        if not (is_known and self._is_ready(phase, modes)):
            # The call that finds the written buffers does not count.
            known = self._executor.buffers.knows(modes)
            self._warm_up_calls[self._current.number, phase] += known
            return self._warm_up(kind, self._static_inputs(call, leaves), phase, modes)
        if not kind.graphs and not self._make_room(kind):
            return self._run_eagerly(call, phase, modes)
        captured = self._try_capture(self._static_inputs(call, leaves), phase, modes)
        if captured is None:
            return self._run_eagerly(call, phase, modes)
        kind.graphs[phase] = captured
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
        if executor.options.accumulate > 1 and not executor.has_static_gradients:
            return phase.first and executor.make_gradients_static()
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
        return timing.time_eager(lambda: self._graphs.capturer.run_on_capture_stream(run))

    def _make_room(self, kind: InputKind[CapturedStep]) -> bool:
        """Make room for the graphs of other inputs; return False if there is none."""
        if not self._inputs.has_room(kind):
            return False
        # Graphs that are dropped may be running.
        torch.cuda.synchronize(self._executor.components.device)
        had_graphs = self._inputs.has_graphs
        self._inputs.make_room()
        if self._inputs.is_largest(kind):
            self._release_graphs()
        elif had_graphs and not self._inputs.has_graphs:
            # torch does not capture into a pool whose graphs are gone.
            self._graphs.use_new_pool()
        return True

    def _try_capture(
        self, call: Call, phase: AccumulationPhase, modes: Hashable
    ) -> CapturedStep | None:
        """Capture a call; if no attempt succeeds, give up and return None."""
        while True:
            try:
                return self._graphs.capture_call(call, phase, modes, self._attempt)
            except CaptureFailed as failure:
                # torch's allocators cannot begin another capture in the pool of a failed one.
                self._graphs.use_new_pool()
                attempt = self._attempt.after(failure)
                if attempt is None:
                    self._give_up(str(failure), failure)
                    return None
                self._attempt = attempt

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
        if self._executor.options.accumulate > 1:
            self._executor.record_gradients()

    def _release_graphs(self) -> None:
        """Free the memory of all graphs; inputs are captured again without a warm-up."""
        if self._inputs.has_graphs:
            torch.cuda.synchronize(self._executor.components.device)
            self._inputs.drop_graphs()
            self._graphs.use_new_pool()
            torch.cuda.empty_cache()


def warn_not_captured(reason: str, capture: Capture, *, quietly: bool = False) -> None:
    """Warn that a step runs eagerly; raise `UnsupportedError` if it must be captured."""
    if capture is Capture.ON:
        raise UnsupportedError(
            f"capture=True, but the step cannot be captured as a CUDA graph: {reason}. Change that,"
            " or pass capture='auto'."
        )
    if _events.listening():
        _events.emit(_events.StepNotCaptured(reason))
    if not quietly:
        warnings.warn(
            f"The step cannot be captured as a CUDA graph and runs eagerly: {reason}. Pass"
            " capture=False to silence this warning.",
            UserWarning,
            stacklevel=6,
        )


def warn_many_kinds(limit: int, leaves: list[torch.Tensor]) -> None:
    """Warn that there are more kinds of inputs than graphs."""
    warnings.warn(
        f"The step was called with more than {limit} kinds of inputs, now with"
        f" {format_shapes(leaves)}. Those that have no CUDA graph run eagerly. Pad inputs to fewer"
        " distinct shapes (pad_to=64), pass numbers that change as tensors, or raise max_graphs.",
        UserWarning,
        stacklevel=5,
    )
