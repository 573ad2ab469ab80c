"""Run a step eagerly, or warm it up, capture it as a CUDA graph and replay it."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from mezzo import _events, _launch
from mezzo._errors import UnsupportedError
from mezzo.autocasting.regions import clear_weight_cache, innermost_region
from mezzo.optim.binding import optimizer_binding
from mezzo.optim.fused_step import FusedBinding
from mezzo.optim.fused_tables import LaunchPlan
from mezzo.scaling import capture
from mezzo.step.components import Capture, StepComponents
from mezzo.step.cuda_graph import CapturedGraph, GraphCapturer, find_host_syncs, user_line
from mezzo.step.executor import AccumulationPhase, StepExecutor
from mezzo.step.inputs import Call, UnsupportedInput, copy_outputs, format_shapes, signature
from mezzo.step.module_buffers import module_modes
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

    def drop_graphs(self) -> None:
        """Drop captured graphs: what they depend on may have changed."""


def runner_for(executor: StepExecutor, capture: Capture) -> Runner:
    """Return a runner that captures, or an eager one if that is requested or necessary."""
    if capture is Capture.OFF:
        return EagerRunner(executor)
    reason = capture_obstacle(executor.components)
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
    if len({parameter.device for parameter in parameters}) > 1:
        return "the parameters are on several devices"
    if not _launch.has_triton(device):
        return "Triton is not installed, which the fused steps need"
    for optimizer in components.optimizers:
        if not isinstance(optimizer_binding(optimizer), FusedBinding):
            return f"{type(optimizer).__name__} has no fused step, and its own step synchronizes"
    return None if components.scaler is None else capture.capture_refusal(components.scaler)


class EagerRunner:
    """Runs every call eagerly."""

    captured = False

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
        return run_eagerly(self._executor, call, phase, modes)

    def flush(self, calls: int) -> None:
        """Update from the gradients of fewer calls than usual."""
        self._executor.flush(calls)

    def first_nonfinite(self) -> str | None:
        """Return the name of the first parameter with a non-finite gradient in the last update."""
        return first_nonfinite(self._executor)

    def drop_graphs(self) -> None:
        """Do nothing: an eager runner has no graphs."""


def run_eagerly(
    executor: StepExecutor, call: Call, phase: AccumulationPhase, modes: Hashable
) -> Any:
    """Run one call eagerly and return detached copies of what the body returned."""
    return copy_outputs(executor.run(executor.move_inputs(call), phase, modes))


def first_nonfinite(executor: StepExecutor) -> str | None:
    """Return the first parameter with a non-finite gradient in the last eager update, by name.

    This synchronizes.
    """
    names = (result.first_nonfinite for result in executor.results if result is not None)
    return next((name for name in names if name is not None), None)


MAX_GRAPHS = 8
"""Input signatures that are captured; others run eagerly."""
_WARM_UP, _WARM_UP_AGAIN = 3, 2
"""Real calls before a capture, which create optimizer states, tables and compiled kernels. Another
signature of inputs needs fewer. Host reads are looked for in the last one: the first may have some
of its own, when a kernel is chosen or code is compiled."""


class ReplayedBinding(NamedTuple):
    """An optimizer that a captured graph steps."""

    binding: FusedBinding
    plan: LaunchPlan
    """The tables that the graph reads."""


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A captured graph with what the host prepares before each replay."""

    graph: CapturedGraph
    bindings: tuple[ReplayedBinding, ...]
    schedule_tables: tuple[int, ...]
    """Addresses of the schedules' tables at the capture."""
    kept_alive: tuple[Any, ...]
    """Tensors that the graph reads."""


class _NumberedModes(NamedTuple):
    """Modes of modules and parameters, with a small number that is fast to hash."""

    modes: Hashable
    number: int


class CaptureRunner:
    """Captures calls as CUDA graphs and replays them."""

    def __init__(self, executor: StepExecutor, capture: Capture) -> None:
        self.eager_reason: str | None = None
        self._executor, self._capture = executor, capture
        components = executor.components
        self._capturer = GraphCapturer.on(components.device)
        self._modules = [module for model in components.models for module in model.modules()]
        self._parameters = [
            parameter for model in components.models for parameter in model.parameters()
        ]
        self._bindings = [
            binding
            for optimizer in components.optimizers
            if isinstance(binding := optimizer_binding(optimizer), FusedBinding)
        ]
        self._graphs: dict[Hashable, CapturedStep] = {}
        """Captured steps by input key and accumulation phase."""
        self._warm_up_calls: dict[Hashable, int] = {}
        self._input_keys: set[Hashable] = set()
        self._mode_numbers: dict[Hashable, int] = {}
        self._current = _NumberedModes(None, 0)
        self._captured_modes: set[int] = set()
        """Modes in which a graph was captured: another signature needs a shorter warm-up there."""
        self._stall_check = StallCheck(executor)
        self._recapture_key: Any = None
        self._warned_full = False
        self.drop_graphs()

    # -- one call ----------------------------------------------------------------------------------

    def __call__(self, call: Call, phase: AccumulationPhase) -> Any:
        """Run one call: replay it if its graph is captured, else warm up or capture."""
        leaves: list[torch.Tensor] = []
        modes = module_modes(self._modules, self._parameters)
        if self.eager_reason is not None:
            return run_eagerly(self._executor, call, phase, modes)
        try:
            input_key = (
                signature(call, leaves),
                self._number(modes),
                self._executor.options.closure_values(),
            )
        except UnsupportedInput as error:
            self._give_up(
                f"an input of type {error} is neither a tensor, a list, a tuple, a dict nor a"
                " hashable value"
            )
            return run_eagerly(self._executor, call, phase, modes)
        self._check_recapture_key()
        captured = self._graphs.get((input_key, phase))
        if (
            captured is not None
            and (returned := self._replay_checked(captured, call, leaves, phase)) is not None
        ):
            return returned[0]
        self._stall_check.drop()
        return self._warm_up_or_capture(call, leaves, input_key, phase, modes)

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
        scaler = self._executor.components.scaler
        key = [
            list(map(torch.Tensor.data_ptr, self._parameters)),
            None if scaler is None else capture.scale_rule(scaler),
            *[binding.recapture_key() for binding in self._bindings],
        ]
        if key != self._recapture_key:
            self._recapture_key = key
            self.drop_graphs()

    # -- replay ------------------------------------------------------------------------------------

    def _replay_checked(
        self,
        captured: CapturedStep,
        call: Call,
        leaves: list[torch.Tensor],
        phase: AccumulationPhase,
    ) -> tuple[Any] | None:
        """Replay; after consecutive skips, compare one update with the eager step."""
        if phase.first:
            self._stall_check.start()
        self._stall_check.compute(call)
        returned = self._replay(captured, leaves, phase)
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
        self, captured: CapturedStep, leaves: list[torch.Tensor], phase: AccumulationPhase
    ) -> tuple[Any] | None:
        """Replay a graph; return its outputs in a 1-tuple, None if it cannot run any more."""
        scaler = self._executor.components.scaler
        if phase.last:
            for binding, plan in captured.bindings:
                binding.before_replay(plan)
            if scaler is not None and capture.before_replay(scaler) != captured.schedule_tables:
                self.drop_graphs()
                return None
        returned = captured.graph.replay(leaves)
        if phase.last:
            if scaler is not None:
                capture.after_replay(
                    scaler, self._executor.metrics.scale_and_skips, self._stall_check.source
                )
            if innermost_region() is not None:
                # A region around the training loop holds cached casts of the old weights.
                clear_weight_cache()
        return (returned,)

    # -- warm-up and capture -----------------------------------------------------------------------

    def _warm_up_or_capture(
        self,
        call: Call,
        leaves: list[torch.Tensor],
        input_key: Hashable,
        phase: AccumulationPhase,
        modes: Hashable,
    ) -> Any:
        if input_key not in self._input_keys:
            if len(self._input_keys) >= MAX_GRAPHS:
                self._warned_full = self._warned_full or warn_full(leaves)
                return run_eagerly(self._executor, call, phase, modes)
            self._input_keys.add(input_key)
        key = (input_key, phase)
        done = self._warm_up_calls.get(key, 0)
        needed = _WARM_UP_AGAIN if self._current.number in self._captured_modes else _WARM_UP
        if done < needed or not self._is_ready(phase, modes):
            # The call that finds the written buffers reads from the device itself; it does not
            # count as warm-up, and its own reads would hide those of the body.
            known = self._executor.buffers.knows(modes)
            self._warm_up_calls[key] = done + known
            inputs = self._static_inputs(call, leaves)
            return self._warm_up(inputs, phase, modes, finds_syncs=known and done + 1 >= needed)
        try:
            self._graphs[key] = captured = self._capture_step(call, leaves, phase, modes)
            self._captured_modes.add(self._current.number)
        # Any error: a body may do anything that cannot be captured. The call then runs eagerly.
        except Exception as error:  # noqa: BLE001
            self._discard_failed_capture()
            self._give_up(root_cause(error), error)
            return run_eagerly(self._executor, call, phase, modes)
        returned = self._replay(captured, leaves, phase)
        if returned is None:
            return run_eagerly(self._executor, call, phase, modes)
        return returned[0]

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
        self, call: Call, phase: AccumulationPhase, modes: Hashable, *, finds_syncs: bool
    ) -> Any:
        """Run a real call on the capture stream; with `finds_syncs`, look for host reads."""

        def run() -> Any:
            return copy_outputs(self._executor.run(call, phase, modes))

        if not finds_syncs:
            return self._capturer.run_on_capture_stream(run)
        with find_host_syncs() as lines:
            returned = self._capturer.run_on_capture_stream(run)
        if lines:
            self._give_up(f"the host reads from the device in {lines[0]}")
        return returned

    def _capture_step(
        self, call: Call, leaves: list[torch.Tensor], phase: AccumulationPhase, modes: Hashable
    ) -> CapturedStep:
        executor, scaler = self._executor, self._executor.components.scaler
        if not executor.has_static_gradients:
            executor.clear_gradients()
        inputs = self._static_inputs(call, leaves)
        schedule_tables = () if scaler is None else capture.schedule_tables(scaler)
        begin = time.perf_counter()
        for binding in self._bindings:
            binding.before_capture()
        graph = self._capturer.capture(
            lambda buffers: executor.run(buffers, phase, modes),
            inputs,
            executor.metrics.memory,
        )
        for binding in self._bindings:
            binding.after_capture()
        if _events.listening():
            seconds = time.perf_counter() - begin
            _events.emit(_events.StepCaptured(format_shapes(graph.inputs), seconds))
        bindings, kept_alive = [], []
        for binding in self._bindings:
            plan, kept = binding.captured()
            kept_alive.append(kept)
            if plan is not None:
                bindings.append(ReplayedBinding(binding, plan))
        return CapturedStep(graph, tuple(bindings), schedule_tables, tuple(kept_alive))

    def _discard_failed_capture(self) -> None:
        """Discard gradients in a failed graph's memory, and the scaler's records of them."""
        if self._executor.components.scaler is not None:
            capture.discard_records(self._executor.components.scaler)
        if not self._executor.has_static_gradients:
            self._executor.clear_gradients()

    def _give_up(self, reason: str, error: Exception | None = None) -> None:
        """Run eagerly from now on, with a warning or, if capture=True, an error."""
        self.eager_reason = reason
        self.drop_graphs()
        try:
            warn_not_captured(reason, self._capture)
        except Exception as refused:
            raise refused from error

    # -- other calls -------------------------------------------------------------------------------

    def flush(self, calls: int) -> None:
        """Update from the gradients of fewer calls than usual, eagerly."""
        self._executor.flush(calls)

    def first_nonfinite(self) -> str | None:
        """Return the name of the parameter with the last non-finite gradient, if it is known."""
        return self._stall_check.source.name() if self._graphs else first_nonfinite(self._executor)

    @property
    def captured(self) -> bool:
        """Whether calls are replayed by now."""
        return bool(self._graphs)

    def drop_graphs(self) -> None:
        """Drop captured graphs. This synchronizes if there are any, since they may be running."""
        if self._graphs:
            torch.cuda.synchronize(self._executor.components.device)
            self._capturer = self._capturer.with_new_pool()
        self._graphs.clear()
        self._warm_up_calls.clear()
        self._captured_modes.clear()
        self._input_keys.clear()
        if self._executor.options.accumulate > 1:
            self._executor.record_gradients()


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


def warn_full(leaves: list[torch.Tensor]) -> bool:
    """Warn that no further input signatures are captured; return True."""
    warnings.warn(
        f"Already {MAX_GRAPHS} captured graphs; inputs of shape {format_shapes(leaves)} run"
        " eagerly. Pad inputs to fewer distinct shapes.",
        UserWarning,
        stacklevel=6,
    )
    return True


def root_cause(error: BaseException) -> str:
    """Return the first error of a chain, with its line: ending a failed capture raises another."""
    while error.__context__ is not None:
        error = error.__context__
    stack = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}" + (
        f", in {user_line(stack)}" if stack else ""
    )
