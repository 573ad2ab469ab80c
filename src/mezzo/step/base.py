"""What every training step has: calls that add up to updates, numbers that can be read at any moment, and a state that can be saved."""

from __future__ import annotations

from typing import Any

from mezzo._errors import UnsupportedError
from mezzo.prepare.ema import refused_while_lent
from mezzo.scaling.scaler import GradScaler
from mezzo.step import saved
from mezzo.step.engine import Body, Engine, Phase, Rules
from mezzo.step.parts import Parts
from mezzo.step.runner import Runner, runner_for
from mezzo.step.told import Told
from mezzo.step.words import Capture


class Step:
    """A training step over models and optimizers that are ready."""

    def __init__(self, parts: Parts, body: Body, rules: Rules, capture: Capture) -> None:
        self._parts = parts
        self._engine = Engine(parts, body, rules)
        self._runner: Runner = runner_for(self._engine, capture)
        self._capture = capture
        self._position = 0
        """Calls since the last update."""
        self._updates = 0
        parts.decoration.training_steps.add(self)
        self._phases = [Phase(place == 0, place + 1 == rules.accumulate) for place in range(rules.accumulate)]

    # -- asking ----------------------------------------------------------------------------------------------------------------------------------

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler, if there is one."""
        return self._parts.scaler

    @property
    def told(self) -> Told:
        """What is known of the last finished step. Nothing waits: on a GPU that may be a few steps ago."""
        return self._engine.board.read()

    @property
    def loss(self) -> float:
        """The loss of the last finished step."""
        return self.told.loss

    @property
    def skipped(self) -> bool:
        """Whether the last finished update was skipped."""
        return self.told.skipped

    @property
    def scale(self) -> float:
        """The loss scale after the last finished update; 1 without a scaler."""
        return self.told.scale

    @property
    def position(self) -> int:
        """Calls since the last update: 0 right after one, less than `accumulate`."""
        return self._position

    @property
    def captured(self) -> bool:
        """Whether steps are replayed as captured programs by now."""
        return self._runner.captured

    @property
    def reason(self) -> str | None:
        """Why steps run eagerly, where they were to be captured."""
        return self._runner.reason

    # -- stepping --------------------------------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Update from the calls since the last update, if there are any: the last batch of an epoch may be a partial one."""
        if self._position:
            self._refuse_lent("flush()")
            calls, self._position = self._position, 0
            self._runner.flush(calls)
            self._updated()

    def _call(self, arguments: tuple[Any, ...], words: dict[str, Any]) -> Any:
        if self._parts.decoration.lent:
            self._refuse_lent("The training step")
        phase = self._phases[self._position]
        returned = self._runner(arguments, words, phase)
        if phase.last:
            self._position = 0
            self._updated()
        else:
            self._position += 1
        self._engine.board.speak()
        return returned

    def _refuse_lent(self, what: str) -> None:
        if self._parts.decoration.lent:
            raise UnsupportedError(refused_while_lent(what))

    def _updated(self) -> None:
        self._updates += 1
        self._engine.after_update()

    # -- saving ----------------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on to the bit: models, optimizers, scaler, schedulers, gradients so far, counters, random generators."""
        self._refuse_lent("state_dict() of a step")
        return saved.to_dict(self._parts, self._engine.buffers, position=self._position, updates=self._updates)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, the random generators included."""
        self._refuse_lent("load_state_dict() of a step")
        self._position, self._updates = saved.load(self._parts, self._engine.buffers, state_dict, self._engine.rules.accumulate)
        self._runner.forget()
