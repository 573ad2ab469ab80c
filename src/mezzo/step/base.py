"""What every training step has: calls that add up to updates, numbers that can be read at any moment, and a state that can be saved."""

from __future__ import annotations

import warnings
from typing import Any

import torch

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
        scaler = parts.scaler
        self._watches_scale = scaler is not None and parts.region.computes_in is torch.float16 and scaler.get_scale() >= 1.0
        """Whether a loss scale below 1 is still to be reported."""
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
        if self._watches_scale:
            self._warn_of_a_small_scale()
        return returned

    def _warn_of_a_small_scale(self) -> None:
        """Warn once when skipped updates have brought the loss scale of a float16 run below 1."""
        scale, in_a_row = self._engine.board.scale_and_skips()
        if scale >= 1.0 or not in_a_row:
            return
        self._watches_scale = False
        name = self._runner.first_nonfinite()
        where = f"; the gradient of {name!r} is not finite" if name else ""
        warnings.warn(
            f"The loss scale fell to {scale:g}, below 1{where}. The gradients overflow float16 without any scaling: look for a loss that is summed where it "
            "should be averaged, or use dtype='bfloat16'.",
            UserWarning,
            stacklevel=4,
        )

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
