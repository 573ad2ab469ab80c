"""`mezzo.RunState`: scaler, schedule, counters and random states for distributed checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo._errors import CheckpointError
from mezzo.prepare import checkpoint_checks, checkpoint_file, ranks
from mezzo.prepare.arguments import Optimizer, flat
from mezzo.prepare.decoration import Accumulating
from mezzo.prepare.rollback import rolled_back_on_error

_KEY = "run"
_RNG = "rng of all ranks"


@runtime_checkable
class Step(Accumulating, Protocol):
    """The part of a training step that checkpoints use."""

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The models, without wrappers."""

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers."""

    @property
    def schedulers(self) -> tuple[LRScheduler, ...]:
        """The schedulers that the step advances."""

    def run_state(self) -> dict[str, Any]:
        """Return scaler, schedulers and counters. Raises with accumulated gradients."""

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Continue from the counters, scaler and schedulers of a saved step."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to continue."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state. A state that does not fit raises before anything changes."""


class RunState:
    """What a run needs besides its model and optimizer, for `torch.distributed.checkpoint`.

    This is a `Stateful` of the scaler, the schedule, the counters of a training step, and the
    random states of every rank. A rank gets its own random state back if there are as many ranks
    as before. Save and load it on every rank, with the states of the model and the optimizer:

        state = {"model": ..., "optimizer": ..., "run": mezzo.RunState(step)}
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)

    Args:
        step: A `mezzo.TrainStep`, or what `mezzo.train_step` returned.
        scaler: The scaler of a loop without a step.
        scheduler: A learning rate scheduler, or a list of schedulers, that the loop steps itself.

    >>> import mezzo, torch
    >>> scaler, other = mezzo.GradScaler(init_scale=8.0), mezzo.GradScaler()
    >>> state = RunState(scaler=scaler).state_dict()
    >>> RunState(scaler=other).load_state_dict(state)
    >>> other.get_scale()
    8.0
    """

    def __init__(
        self, step: Step | None = None, *, scaler: Any = None, scheduler: Any = None
    ) -> None:
        if step is not None and not isinstance(step, Step):
            raise CheckpointError(
                f"step={step!r:.80} is not a training step. Pass what mezzo.TrainStep or"
                " mezzo.train_step returned, or scaler= and scheduler=."
            )
        refuse_parts_of(step, (scaler,), scheduler)
        self._step, self._scalers = step, () if scaler is None else (scaler,)
        self._schedulers = () if scheduler is None else tuple(flat(scheduler))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as one value. All ranks must call this, and wait for each other.

        Raises `CheckpointError` if the step has accumulated gradients since its last update.
        """
        state = {
            "step": None if self._step is None else self._step.run_state(),
            "scalers": [scaler.state_dict() for scaler in self._scalers],
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
        }
        return {_KEY: pack(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state. A state that does not fit raises and changes nothing."""
        state, restore_own_rng_state = unpack(state_dict.get(_KEY))
        self._check(state)
        with rolled_back_on_error((), (), (*self._scalers, *self._schedulers)):
            for owner, saved in zip(
                (*self._scalers, *self._schedulers),
                (*state["scalers"], *state["schedulers"]),
                strict=True,
            ):
                owner.load_state_dict(saved)
            if self._step is not None:
                self._step.load_run_state(state["step"])
            restore_own_rng_state()

    def _check(self, state: dict[str, Any]) -> None:
        for name, own in (("scalers", self._scalers), ("schedulers", self._schedulers)):
            if len(state[name]) != len(own):
                raise CheckpointError(
                    f"The state has {len(state[name])} {name}, and this RunState {len(own)}. Pass"
                    " what was saved."
                )
        if (state["step"] is None) != (self._step is None):
            has, lacks = ("state", "RunState") if self._step is None else ("RunState", "state")
            raise CheckpointError(f"The {has} has a step, and the {lacks} has none. Pass the same.")
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            checkpoint_checks.refuse_other_scheduler(scheduler, saved)


def refuse_parts_of(step: Step | None, parts: tuple[Any, ...], scheduler: Any) -> None:
    """Raise `CheckpointError` if parts of a step are passed beside it."""
    schedulers = () if scheduler is None else flat(scheduler)
    if step is None or (
        all(part is None for part in parts)
        and not any(scheduler is own for scheduler in schedulers for own in step.schedulers)
    ):
        return
    raise CheckpointError(
        "step= includes its models, optimizers, scaler and schedulers. Pass the step alone, or its"
        " parts without it; beside it only a scheduler= that you step yourself."
    )


def pack(state: dict[str, Any]) -> bytes:
    """Return a state with the random states of every rank as bytes. All ranks must call this.

    `torch.distributed.checkpoint` would flatten a nested state, and load only those keys that the
    state has before it is loaded.
    """
    buffer = BytesIO()
    checkpoint_file.save({**state, _RNG: ranks.gather_rng_states()}, buffer)
    return buffer.getvalue()


def unpack(packed: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return a packed state, and a function that restores the random generators of this rank."""
    try:
        state = checkpoint_file.load(BytesIO(packed))
        rng_states = state.pop(_RNG)
    except Exception as error:
        raise CheckpointError(
            f"This is not the state of a run: {error}. Pass a checkpoint that was saved with"
            " mezzo.RunState or mezzo.save_checkpoint."
        ) from error
    ranks.check_rng_states(rng_states)
    return state, lambda: ranks.restore_own_rng_state(rng_states)
