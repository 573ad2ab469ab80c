"""Run a step eagerly, or warm it up, capture it as a CUDA graph and replay it."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

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
from mezzo.step.inputs import UnsupportedInput, copies, format_shapes, signature
from mezzo.step.module_buffers import module_modes
from mezzo.step.stall_check import StallCheck


class Runner(Protocol):
    """Runs the calls of a step."""

    reason: str | None
    """Why calls run eagerly, where they were to be captured."""

    @property
    def captured(self) -> bool:
        """Whether programs are replayed by now."""

    def __call__(
        self, arguments: tuple[Any, ...], words: dict[str, Any], phase: AccumulationPhase
    ) -> Any:
        """One call; what comes back is the caller's own."""

    def flush(self, calls: int) -> None:
        """Update from fewer calls than usual."""

    def forget(self) -> None:
        """Everything that programs stand on may have changed."""

    def first_nonfinite(self) -> str | None:
        """Return the name of the parameter with the last non-finite gradient, if it is known. This synchronizes."""


class EagerRunner:
    """Runs everything as it is written."""

    captured = False

    def __init__(self, engine: StepExecutor, reason: str | None = None) -> None:
        self.reason = reason
        self._engine = engine
        self._modules = [module for model in engine.parts.models for module in model.modules()]
        self._parameters = [
            parameter for model in engine.parts.models for parameter in model.parameters()
        ]

    def __call__(
        self, arguments: tuple[Any, ...], words: dict[str, Any], phase: AccumulationPhase
    ) -> Any:
        """One call."""
        mode = (
            None
            if self._engine.parts.scaler is None
            else module_modes(self._modules, self._parameters)
        )
        arguments, words = self._engine.place((arguments, words))
        return copies(self._engine.run(arguments, words, phase, mode))

    def flush(self, calls: int) -> None:
        """Update from fewer calls than usual."""
        self._engine.flush(calls)

    def forget(self) -> None:
        """Nothing is kept."""

    def first_nonfinite(self) -> str | None:
        """Return the name of the first parameter with a non-finite gradient in the last update."""
        return first_nonfinite(self._engine)


def first_nonfinite(engine: StepExecutor) -> str | None:
    """Return the name of the first parameter with a non-finite gradient in the last eager update. This synchronizes."""
    names = (result.first_nonfinite for result in engine.results if result is not None)
    return next((name for name in names if name is not None), None)


def refusal(parts: StepComponents) -> str | None:
    """Why the steps of these parts cannot be captured, as far as can be said before one ran."""
    if parts.device.type != "cuda":
        return f"the model is on {parts.device.type}, which captures nothing"
    if len({parameter.device for model in parts.models for parameter in model.parameters()}) > 1:
        return "the parameters live on several devices"
    if not _launch.has_triton(parts.device):
        return "Triton is not installed, and the fused steps need it"
    for optimizer in parts.optimizers:
        if not isinstance(optimizer_binding(optimizer), FusedBinding):
            return f"{type(optimizer).__name__} has no fused step, and its own decides on the host"
    return None if parts.scaler is None else capture.capture_refusal(parts.scaler)


def runner_for(engine: StepExecutor, capture: Capture) -> Runner:
    """The runner that was asked for, or that is possible."""
    if capture is Capture.OFF:
        return EagerRunner(engine)
    reason = refusal(engine.parts)
    if reason is None:
        return CaptureRunner(engine, capture)
    warn_not_captured(reason, capture, quietly=engine.parts.device.type != "cuda")
    return EagerRunner(engine, reason)


def first_line(error: BaseException) -> str:
    """What went wrong first, and in which line: the end of a capture that failed raises too."""
    while error.__context__ is not None:
        error = error.__context__
    stack = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}" + (
        f", in {user_line(stack)}" if stack else ""
    )


def warn_not_captured(reason: str, capture: Capture, *, quietly: bool = False) -> None:
    """Tell that steps run eagerly; an error where they must not. On a CPU nobody expects otherwise."""
    if capture is Capture.ON:
        raise UnsupportedError(
            f"capture=True, but the step cannot be captured: {reason}. Change that, or use"
            " capture='auto'."
        )
    if _events.listening():
        _events.emit(_events.StepNotCaptured(reason))
    if not quietly:
        warnings.warn(
            f"The step runs eagerly, for it cannot be captured: {reason}. capture=False says that"
            " this is meant.",
            UserWarning,
            stacklevel=5,
        )


def warn_full(leaves: list[torch.Tensor], kinds: int) -> bool:
    """Tell that inputs are of one kind too many; true, so that it is told once."""
    warnings.warn(
        f"{kinds} kinds of inputs are captured, and inputs of {format_shapes(leaves)} are another:"
        " they run eagerly. Pad inputs to fewer shapes.",
        UserWarning,
        stacklevel=6,
    )
    return True


MAX_GRAPHS = 8
"""Kinds of inputs that are captured; more run eagerly."""
_WARM, _WARM_AGAIN = 3, 2
"""Real steps before a capture: optimizer states, tables and compiled kernels are made in them.
Another shape of inputs needs less. Host reads are looked for in the last, for the first of a
kind may have some of its own: a kernel is chosen, code is compiled."""


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A program with what its host side needs."""

    program: CapturedGraph
    bounds: tuple[tuple[FusedBinding, LaunchPlan], ...]
    """Optimizers that it steps, each with its tables."""
    tables: tuple[int, ...]
    """Where the tables of schedules lay."""
    kept: tuple[Any, ...]
    """What it reads, and so must live as long."""


class CaptureRunner:
    """Captures calls, and replays them."""

    def __init__(self, engine: StepExecutor, capture: Capture) -> None:
        self.reason: str | None = None
        self._engine, self._capture = engine, capture
        self._studio = GraphCapturer.on(engine.parts.device)
        self._modules = [module for model in engine.parts.models for module in model.modules()]
        self._parameters = [
            parameter for model in engine.parts.models for parameter in model.parameters()
        ]
        self._bounds = [
            bound
            for optimizer in engine.parts.optimizers
            if isinstance(bound := optimizer_binding(optimizer), FusedBinding)
        ]
        self._programs: dict[Hashable, CapturedStep] = {}
        self._warm: dict[Hashable, int] = {}
        self._input_keys: dict[Hashable, None] = {}
        self._modes: dict[Hashable, int] = {}
        self._mode: tuple[Hashable, int] = (None, 0)
        self._warm_modes: set[int] = set()
        """Modes in which something was captured: another shape needs less warming up there."""
        self._stall = StallCheck(engine)
        self._recapture_key: Any = None
        self._full = False
        self.forget()

    @property
    def captured(self) -> bool:
        """Whether programs are replayed by now."""
        return bool(self._programs)

    def __call__(
        self, arguments: tuple[Any, ...], words: dict[str, Any], phase: AccumulationPhase
    ) -> Any:
        """One call."""
        values, leaves = (arguments, words), list[torch.Tensor]()
        mode = module_modes(self._modules, self._parameters)
        if self.reason is not None:
            return self._eagerly(values, phase, mode)
        try:
            kind = (signature(values, leaves), self._number(mode), self._engine.closure_values())
        except UnsupportedInput as error:
            self._give_up(
                f"an input of type {error} is neither a tensor, a list, a tuple, a dict nor a plain"
                " value"
            )
            return self._eagerly(values, phase, mode)
        self._check_recapture_key()
        captured = self._programs.get((kind, phase))
        if (
            captured is not None
            and (returned := self._replay_checked(captured, values, leaves, phase)) is not None
        ):
            return returned[0]
        self._stall.drop()
        return self._warm_up_or_capture(values, leaves, kind, phase, mode)

    def flush(self, calls: int) -> None:
        """Update from fewer calls than usual; too rare to be captured."""
        self._engine.flush(calls)

    def forget(self) -> None:
        """Drop the programs: what they read is elsewhere by now. They may be running, so this waits."""
        if self._programs:
            torch.cuda.synchronize(self._engine.parts.device)
            self._studio = self._studio.emptied()
        self._programs.clear()
        self._warm.clear()
        self._warm_modes.clear()
        self._input_keys.clear()
        self._engine.static = []
        self._engine.wants_gradients = self._engine.rules.accumulate > 1

    def first_nonfinite(self) -> str | None:
        """Return the name of the parameter with the last non-finite gradient, if it is known. This synchronizes."""
        return self._stall.source.name() if self._programs else first_nonfinite(self._engine)

    # -- replaying ---------------------------------------------------------------------------------

    def _replay_checked(
        self,
        captured: CapturedStep,
        values: tuple[Any, ...],
        leaves: list[torch.Tensor],
        phase: AccumulationPhase,
    ) -> tuple[Any] | None:
        """Replay; where updates are skipped in a row, compare one with the eager step."""
        if phase.first:
            self._stall.start()
        self._stall.compute(values)
        returned = self._replay(captured, leaves, phase)
        if returned is not None and phase.last and (wrong := self._stall.judge()) is not None:
            self.reason = wrong
            self.forget()
            warnings.warn(
                f"The step runs eagerly from here on: {wrong}. One batch was skipped.",
                UserWarning,
                stacklevel=5,
            )
        return returned

    def _replay(
        self, captured: CapturedStep, leaves: list[torch.Tensor], phase: AccumulationPhase
    ) -> tuple[Any] | None:
        """What a program returns, in a tuple of its own; None where it can no longer run."""
        scaler = self._engine.parts.scaler
        if phase.last:
            for bound, prepared in captured.bounds:
                bound.before_replay(prepared)
            if scaler is not None and capture.before_replay(scaler) != captured.tables:
                self.forget()
                return None
        returned = captured.program.replay(leaves)
        if phase.last:
            if scaler is not None:
                capture.after_replay(
                    scaler, self._engine.metrics.scale_and_skips, self._stall.source
                )
            if innermost_region() is not None:
                # Copies of weights that a region around the loop holds are old now.
                clear_weight_cache()
        return (returned,)

    # -- learning ----------------------------------------------------------------------------------

    def _warm_up_or_capture(
        self,
        values: tuple[Any, ...],
        leaves: list[torch.Tensor],
        kind: Hashable,
        phase: AccumulationPhase,
        mode: Hashable,
    ) -> Any:
        if kind not in self._input_keys:
            if len(self._input_keys) >= MAX_GRAPHS:
                self._full = self._full or warn_full(leaves, MAX_GRAPHS)
                return self._eagerly(values, phase, mode)
            self._input_keys[kind] = None
        key = (kind, phase)
        done = self._warm.get(key, 0)
        needed = _WARM_AGAIN if self._mode[1] in self._warm_modes else _WARM
        if done < needed or not self._ready(phase, mode):
            # Where something is yet to be learned the host looks at the device itself, and nobody
            # else can be watched for it.
            known = self._engine.buffers.learned(mode)
            self._warm[key] = done + known
            return self._warm_up(
                self._placed(values, leaves), phase, mode, watched=known and done + 1 >= needed
            )
        try:
            self._programs[key] = captured = self._captured(values, leaves, phase, mode)
            self._warm_modes.add(self._mode[1])
        # Whatever a body does that cannot be captured: it is told, and the call runs eagerly.
        except Exception as error:  # noqa: BLE001
            self._tidy_up()
            self._give_up(first_line(error), error)
            return self._eagerly(values, phase, mode)
        returned = self._replay(captured, leaves, phase)
        return returned[0] if returned is not None else self._eagerly(values, phase, mode)

    def _placed(self, values: tuple[Any, ...], leaves: list[torch.Tensor]) -> tuple[Any, Any]:
        """Inputs as a captured step holds them; a warm-up runs on the same, or code compiled in it would have to be compiled again while it is captured."""
        placed = self._engine.place(values)
        # From elsewhere, torch would cast before it copies, and wait.
        return (
            self._engine.entering(placed)
            if all(leaf.device == self._engine.parts.device for leaf in leaves)
            else placed
        )

    def _warm_up(
        self, placed: tuple[Any, Any], phase: AccumulationPhase, mode: Hashable, *, watched: bool
    ) -> Any:
        """A real step, on the stream of the captures."""
        run = lambda: copies(self._engine.run(*placed, phase, mode))  # noqa: E731
        if not watched:
            return self._studio.run_on_capture_stream(run)
        with find_host_syncs() as found:
            returned = self._studio.run_on_capture_stream(run)
        if found:
            self._give_up(f"the host reads from the device in {found[0]}")
        return returned

    def _ready(self, phase: AccumulationPhase, mode: Hashable) -> bool:
        """Whether what a capture needs has been made: known buffers, a scale that adapts, and gradients that stay where they are if calls share them."""
        engine, scaler = self._engine, self._engine.parts.scaler
        if not engine.buffers.learned(mode) or (
            scaler is not None and not capture.is_warmed_up(scaler)
        ):
            return False
        if engine.rules.accumulate > 1 and not engine.static:
            if not phase.first or not engine.had:
                return False
            # With the strides of their parameters, which the fused step needs.
            engine.static = [
                torch.zeros_like(parameter, dtype=gradient.dtype)
                for parameter, gradient in engine.had
            ]
            for (parameter, _), gradient in zip(engine.had, engine.static, strict=True):
                parameter.grad = gradient
            engine.had, engine.wants_gradients = [], False
        return True

    def _captured(
        self,
        values: tuple[Any, ...],
        leaves: list[torch.Tensor],
        phase: AccumulationPhase,
        mode: Hashable,
    ) -> CapturedStep:
        engine, scaler = self._engine, self._engine.parts.scaler
        if not engine.static:
            engine.clear()
        placed = self._placed(values, leaves)
        tables = () if scaler is None else capture.schedule_tables(scaler)
        begin = time.perf_counter()
        for bound in self._bounds:
            bound.before_capture()
        program = self._studio.capture(
            lambda held: engine.run(held[0], held[1], phase, mode),
            placed,
            leaves,
            engine.metrics.memory,
        )
        for bound in self._bounds:
            bound.after_capture()
        if _events.listening():
            _events.emit(
                _events.StepCaptured(format_shapes(program.inputs), time.perf_counter() - begin)
            )
        found = [(bound, bound.captured()) for bound in self._bounds]
        bounds = tuple((bound, prepared) for bound, (prepared, _) in found if prepared is not None)
        return CapturedStep(program, bounds, tables, tuple(kept for _, (_, kept) in found))

    # -- inside ------------------------------------------------------------------------------------

    def _eagerly(self, values: tuple[Any, ...], phase: AccumulationPhase, mode: Hashable) -> Any:
        arguments, words = self._engine.place(values)
        return copies(self._engine.run(arguments, words, phase, mode))

    def _number(self, mode: Hashable) -> int:
        """A small number for a mode, which is compared at every call and rarely another."""
        if mode != self._mode[0]:
            self._mode = mode, self._modes.setdefault(mode, len(self._modes))
            if self._engine.static:
                # Other parameters may get gradients now: each backward makes its own again.
                self.forget()
        return self._mode[1]

    def _check_recapture_key(self) -> None:
        scaler = self._engine.parts.scaler
        rule = None if scaler is None else capture.scale_rule(scaler)
        ground = [
            list(map(torch.Tensor.data_ptr, self._parameters)),
            rule,
            *[bound.recapture_key() for bound in self._bounds],
        ]
        if ground != self._recapture_key:
            self._recapture_key = ground
            self.forget()

    def _tidy_up(self) -> None:
        """After a capture that failed in the middle: gradients in its memory, and what the scaler noted of them."""
        if self._engine.parts.scaler is not None:
            capture.discard_records(self._engine.parts.scaler)
        if not self._engine.static:
            self._engine.clear()

    def _give_up(self, reason: str, error: Exception | None = None) -> None:
        self.reason = reason
        self.forget()
        try:
            warn_not_captured(reason, self._capture)
        except Exception as refused:
            raise refused from error
