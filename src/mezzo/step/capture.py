"""Calls as captured programs: a few real steps warm up, one is captured, and from then on the device replays it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from mezzo import _events
from mezzo.autocasting.regions import innermost_region, invalidate
from mezzo.optim.bound import bound_of
from mezzo.optim.fused import FusedBound
from mezzo.optim.prepared import Prepared
from mezzo.scaling import replay
from mezzo.step.buffers import mode_of
from mezzo.step.engine import Engine, Phase
from mezzo.step.hostreads import watching
from mezzo.step.inputs import Unkeyed, copies, said, signature
from mezzo.step.program import Program, Studio
from mezzo.step.runner import first_nonfinite, first_words, say_full, say_not_captured
from mezzo.step.stall import StallCheck
from mezzo.step.words import Capture

KINDS = 8
"""Kinds of inputs that are captured; more run eagerly."""
_WARM, _WARM_AGAIN = 3, 2
"""Real steps before a capture: optimizer states, tables and compiled kernels are made in them. Another shape of inputs needs less.
Host reads are looked for in the last, for the first of a kind may have some of its own: a kernel is chosen, code is compiled."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A program with what its host side needs."""

    program: Program
    bounds: tuple[tuple[FusedBound, Prepared], ...]
    """Optimizers that it steps, each with its tables."""
    tables: tuple[int, ...]
    """Where the tables of schedules lay."""
    kept: tuple[Any, ...]
    """What it reads, and so must live as long."""


class CapturingRunner:
    """Captures calls, and replays them."""

    def __init__(self, engine: Engine, capture: Capture) -> None:
        self.reason: str | None = None
        self._engine, self._capture = engine, capture
        self._studio = Studio.on(engine.parts.device)
        self._modules = [module for model in engine.parts.models for module in model.modules()]
        self._parameters = [parameter for model in engine.parts.models for parameter in model.parameters()]
        self._bounds = [bound for optimizer in engine.parts.optimizers if isinstance(bound := bound_of(optimizer), FusedBound)]
        self._programs: dict[Hashable, Captured] = {}
        self._warm: dict[Hashable, int] = {}
        self._kinds: dict[Hashable, None] = {}
        self._modes: dict[Hashable, int] = {}
        self._mode: tuple[Hashable, int] = (None, 0)
        self._warm_modes: set[int] = set()
        """Modes in which something was captured: another shape needs less warming up there."""
        self._stall = StallCheck(engine)
        self._ground: Any = None
        self._full = False
        self.forget()

    @property
    def captured(self) -> bool:
        """Whether programs are replayed by now."""
        return bool(self._programs)

    def __call__(self, arguments: tuple[Any, ...], words: dict[str, Any], phase: Phase) -> Any:
        """One call."""
        values, leaves = (arguments, words), list[torch.Tensor]()
        mode = mode_of(self._modules, self._parameters)
        if self.reason is not None:
            return self._eagerly(values, phase, mode)
        try:
            kind = (signature(values, leaves), self._number(mode), self._engine.seen())
        except Unkeyed as error:
            self._give_up(f"an input of type {error} is neither a tensor, a list, a tuple, a dict nor a plain value")
            return self._eagerly(values, phase, mode)
        self._look_at_the_ground()
        captured = self._programs.get((kind, phase))
        if captured is not None and (returned := self._replay_checked(captured, values, leaves, phase)) is not None:
            return returned[0]
        self._stall.drop()
        return self._learn(values, leaves, kind, phase, mode)

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
        self._kinds.clear()
        self._engine.static = []
        self._engine.wants_gradients = self._engine.rules.accumulate > 1

    def first_nonfinite(self) -> str | None:
        """Return the name of the parameter with the last non-finite gradient, if it is known. This synchronizes."""
        return self._stall.source.name() if self._programs else first_nonfinite(self._engine)

    # -- replaying -------------------------------------------------------------------------------------------------------------------------------

    def _replay_checked(self, captured: Captured, values: tuple[Any, ...], leaves: list[torch.Tensor], phase: Phase) -> tuple[Any] | None:
        """Replay; where updates are skipped in a row, compare one with the eager step."""
        if phase.first:
            self._stall.start()
        self._stall.compute(values)
        returned = self._replay(captured, leaves, phase)
        if returned is not None and phase.last and (wrong := self._stall.judge()) is not None:
            self.reason = wrong
            self.forget()
            warnings.warn(f"The step runs eagerly from here on: {wrong}. One batch was skipped.", UserWarning, stacklevel=5)
        return returned

    def _replay(self, captured: Captured, leaves: list[torch.Tensor], phase: Phase) -> tuple[Any] | None:
        """What a program returns, in a tuple of its own; None where it can no longer run."""
        scaler = self._engine.parts.scaler
        if phase.last:
            for bound, prepared in captured.bounds:
                bound.before_replay(prepared)
            if scaler is not None and replay.before(scaler) != captured.tables:
                self.forget()
                return None
        returned = captured.program.replay(leaves)
        if phase.last:
            if scaler is not None:
                replay.after(scaler, self._engine.board.scale_and_skips, self._stall.source)
            if innermost_region() is not None:
                # Copies of weights that a region around the loop holds are old now.
                invalidate()
        return (returned,)

    # -- learning --------------------------------------------------------------------------------------------------------------------------------

    def _learn(self, values: tuple[Any, ...], leaves: list[torch.Tensor], kind: Hashable, phase: Phase, mode: Hashable) -> Any:
        if kind not in self._kinds:
            if len(self._kinds) >= KINDS:
                self._full = self._full or say_full(leaves, KINDS)
                return self._eagerly(values, phase, mode)
            self._kinds[kind] = None
        key = (kind, phase)
        done = self._warm.get(key, 0)
        needed = _WARM_AGAIN if self._mode[1] in self._warm_modes else _WARM
        if done < needed or not self._ready(phase, mode):
            # Where something is yet to be learned the host looks at the device itself, and nobody else can be watched for it.
            known = self._engine.buffers.learned(mode)
            self._warm[key] = done + known
            return self._warm_up(self._placed(values, leaves), phase, mode, watched=known and done + 1 >= needed)
        try:
            self._programs[key] = captured = self._captured(values, leaves, phase, mode)
            self._warm_modes.add(self._mode[1])
        except Exception as error:  # noqa: BLE001 - whatever a body does that cannot be captured: it is told, and the call runs eagerly
            self._tidy_up()
            self._give_up(first_words(error), error)
            return self._eagerly(values, phase, mode)
        returned = self._replay(captured, leaves, phase)
        return returned[0] if returned is not None else self._eagerly(values, phase, mode)

    def _placed(self, values: tuple[Any, ...], leaves: list[torch.Tensor]) -> tuple[Any, Any]:
        """Inputs as a captured step holds them; a warm-up runs on the same, or code compiled in it would have to be compiled again while it is captured."""
        placed = self._engine.place(values)
        # From elsewhere, torch would cast before it copies, and wait.
        return self._engine.entering(placed) if all(leaf.device == self._engine.parts.device for leaf in leaves) else placed

    def _warm_up(self, placed: tuple[Any, Any], phase: Phase, mode: Hashable, *, watched: bool) -> Any:
        """A real step, on the stream of the captures."""
        run = lambda: copies(self._engine.run(*placed, phase, mode))  # noqa: E731
        if not watched:
            return self._studio.aside(run)
        with watching() as found:
            returned = self._studio.aside(run)
        if found:
            self._give_up(f"the host reads from the device in {found[0]}")
        return returned

    def _ready(self, phase: Phase, mode: Hashable) -> bool:
        """Whether what a capture needs has been made: known buffers, a scale that adapts, and gradients that stay where they are if calls share them."""
        engine, scaler = self._engine, self._engine.parts.scaler
        if not engine.buffers.learned(mode) or (scaler is not None and not replay.is_warm(scaler)):
            return False
        if engine.rules.accumulate > 1 and not engine.static:
            if not phase.first or not engine.had:
                return False
            # With the strides of their parameters, which the fused step needs.
            engine.static = [torch.zeros_like(parameter, dtype=gradient.dtype) for parameter, gradient in engine.had]
            for (parameter, _), gradient in zip(engine.had, engine.static, strict=True):
                parameter.grad = gradient
            engine.had, engine.wants_gradients = [], False
        return True

    def _captured(self, values: tuple[Any, ...], leaves: list[torch.Tensor], phase: Phase, mode: Hashable) -> Captured:
        engine, scaler = self._engine, self._engine.parts.scaler
        if not engine.static:
            engine.clear()
        placed = self._placed(values, leaves)
        tables = () if scaler is None else replay.tables(scaler)
        begin = time.perf_counter()
        for bound in self._bounds:
            bound.before_capture()
        program = self._studio.capture(lambda held: engine.run(held[0], held[1], phase, mode), placed, leaves, engine.board.memory)
        for bound in self._bounds:
            bound.after_capture()
        if _events.listening():
            _events.emit(_events.StepCaptured(said(program.inputs), time.perf_counter() - begin))
        found = [(bound, bound.captured()) for bound in self._bounds]
        bounds = tuple((bound, prepared) for bound, (prepared, _) in found if prepared is not None)
        return Captured(program, bounds, tables, tuple(kept for _, (_, kept) in found))

    # -- inside ----------------------------------------------------------------------------------------------------------------------------------

    def _eagerly(self, values: tuple[Any, ...], phase: Phase, mode: Hashable) -> Any:
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

    def _look_at_the_ground(self) -> None:
        scaler = self._engine.parts.scaler
        rule = None if scaler is None else replay.rule(scaler)
        ground = [list(map(torch.Tensor.data_ptr, self._parameters)), rule, *[bound.ground() for bound in self._bounds]]
        if ground != self._ground:
            self._ground = ground
            self.forget()

    def _tidy_up(self) -> None:
        """After a capture that failed in the middle: gradients in its memory, and what the scaler noted of them."""
        if self._engine.parts.scaler is not None:
            replay.forget(self._engine.parts.scaler)
        if not self._engine.static:
            self._engine.clear()

    def _give_up(self, reason: str, error: Exception | None = None) -> None:
        self.reason = reason
        self.forget()
        try:
            say_not_captured(reason, self._capture)
        except Exception as refused:
            raise refused from error
