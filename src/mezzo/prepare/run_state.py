"""The state of a run beside models and optimizers, as bytes: scaler, schedule, random states."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

from mezzo._errors import CheckpointError
from mezzo.prepare import checkpoint_file, ranks

_RNG = "rng of all ranks"


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
