"""What happens in one call of a step, as device work alone: nothing here asks the device, so that it can be captured as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mezzo._casting import cast_all
from mezzo._errors import ScalerError
from mezzo._torch import foreach_mul_, foreach_zero_
from mezzo.autocasting.regions import inside
from mezzo.scaling.gradients import parameters
from mezzo.scaling.result import StepResult
from mezzo.scaling.stepping import advance
from mezzo.step.buffers import Buffers
from mezzo.step.inputs import placed
from mezzo.step.parts import Parts
from mezzo.step.tallies import Tallies
from mezzo.step.told import Board
from mezzo.step.turn import ScaledBackward, Turn, refuse_other_steps
from mezzo.step.words import Reduction

Body = Callable[..., Any]


@dataclass(frozen=True)
class Rules:
    """How calls become updates."""

    accumulate: int
    """Calls for each update."""
    reduction: Reduction
    free: bool = False
    """Whether the body is a user's own: it may call backward by itself."""
    handed: bool = False
    """Whether the body asks for `update`."""

    @property
    def factor(self) -> float:
        """What a loss is multiplied by."""
        return 1.0 / self.accumulate if self.reduction is Reduction.MEAN else 1.0


class Phase(NamedTuple):
    """Where a call stands among those that make up one update."""

    first: bool
    last: bool


class Engine:
    """Runs the body of a step and what follows it."""

    def __init__(self, parts: Parts, body: Body, rules: Rules) -> None:
        self.parts, self.rules = parts, rules
        self._body = body
        self.first_enters = False
        """Whether the first argument goes to a model and nowhere else."""
        self.channels_last = False
        """Whether the model has its channels last, and images are to have them too."""
        self.buffers = Buffers(parts.models if parts.scaler is not None else ())
        self._tallies = Tallies(parts.models)
        self.board = Board(parts.device, parts.scaler)
        self.seen: Callable[[], Hashable] = tuple
        """Values beside the inputs that a body sees, and that a captured one would not see change."""
        self.results: Iterable[StepResult | None] = ()
        """Of the last eager update."""
        self.had: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters with the gradients of the last update, where these are wanted."""
        self.wants_gradients = False
        self.static: list[torch.Tensor] = []
        """Gradients that stay where they are from update to update; empty where each backward makes its own."""

    def place(self, values: tuple[Any, ...]) -> tuple[Any, Any]:
        """Arguments and words on the device of the models, in their layout."""
        moved: tuple[Any, Any] = placed(values, self.parts.device, channels_last=self.channels_last)
        return moved

    def entering(self, values: tuple[Any, Any]) -> tuple[Any, Any]:
        """Inputs of the device as a captured step holds them: what the model would cast first is cast by the copy that brings it, in one pass."""
        if not self.first_enters or self.parts.enters is None:
            return values
        (first, *rest), words = values
        return (cast_all(first, self.parts.enters, self.parts.device.type), *rest), words

    def run(self, arguments: tuple[Any, ...], words: dict[str, Any], phase: Phase, mode: Hashable) -> Any:
        """One call, whole."""
        if phase.first:
            self.buffers.save(mode)
        turn = Turn(self.parts, factor=self.rules.factor, updates=self.rules.accumulate == 1)
        returned = self._compute(turn, arguments, words)
        self.buffers.look()
        bad = self._update(turn) if phase.last else None
        self.board.write(turn.loss, bad)
        return returned

    def compute_gradients(self, arguments: tuple[Any, ...], words: dict[str, Any]) -> None:
        """Run the body and its scaled backward pass alone: gradients are added to what is there, nothing is updated."""
        self._compute(Turn(self.parts, factor=self.rules.factor, updates=False), arguments, words)

    def flush(self, calls: int) -> None:
        """Update from fewer calls than usual."""
        turn = Turn(self.parts, factor=1.0, updates=True)
        if self.rules.reduction is Reduction.MEAN:
            gradients = [one.grad for optimizer in self.parts.optimizers for one in parameters(optimizer) if one.grad is not None]
            foreach_mul_(gradients, self.rules.accumulate / calls)
        self.board.write(None, self._update(turn))

    def after_update(self) -> None:
        """What the host does after an update: schedulers that no scaler steps."""
        if self.parts.scaler is None:
            for optimizer, scheduler in self.parts.schedulers.items():
                advance(optimizer, scheduler)

    def clear(self) -> None:
        """Forget the gradients."""
        if self.static:
            foreach_zero_(self.static)
        else:
            for optimizer in self.parts.optimizers:
                optimizer.zero_grad(set_to_none=True)

    def _compute(self, turn: Turn, arguments: tuple[Any, ...], words: dict[str, Any]) -> Any:
        handed = (turn, *arguments) if self.rules.handed else arguments
        with ExitStack() as around:
            if self.rules.free:
                around.enter_context(ScaledBackward(turn))
                for optimizer in self.parts.optimizers:
                    around.callback(optimizer.register_step_pre_hook(refuse_other_steps).remove)
            around.enter_context(self._tallies.counting())
            around.enter_context(inside(self.parts.region))
            around.enter_context(torch.enable_grad() if not torch.is_grad_enabled() else nullcontext())
            returned = self._body(*handed, **words)
        if turn.loss is None:
            if not isinstance(returned, torch.Tensor):
                raise ScalerError(
                    f"A step's loss is a tensor, got {type(returned).__name__}. Return the loss, or call loss.backward() in the body and return what you like."
                )
            turn.backward(returned)
        return returned

    def _update(self, turn: Turn) -> torch.Tensor | bool:
        if self.wants_gradients:
            every = (one for optimizer in self.parts.optimizers for one in parameters(optimizer))
            self.had = [(one, one.grad) for one in every if one.grad is not None]
        turn.step_rest()
        self.results = turn.results.values()
        self.clear()
        bad = turn.bad()
        self.buffers.restore(bad)
        return bad
