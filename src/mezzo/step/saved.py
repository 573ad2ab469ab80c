"""The state of a step: all that a run needs to go on to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mezzo._errors import CheckpointError
from mezzo.prepare import fitting, rng
from mezzo.prepare.checkpoint import optimizer_state
from mezzo.prepare.rollback import rolled_back_on_error
from mezzo.prepare.weight_hooks import exact_state_dict
from mezzo.scaling.gradients import parameters
from mezzo.step.buffers import Buffers
from mezzo.step.parts import Parts


def to_dict(parts: Parts, buffers: Buffers, *, position: int, updates: int) -> dict[str, Any]:
    """The state as nested plain values and tensors."""
    return {
        "models": [exact_state_dict(model) for model in parts.models],
        "optimizers": [optimizer_state(optimizer, parts.models) for optimizer in parts.optimizers],
        "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in parts.schedulers.values()],
        "gradients": _gradients(parts) if position else None,
        "buffers": buffers.saved() if position else None,
        "position": position,
        "updates": updates,
        "rng": rng.capture(),
    }


def load(parts: Parts, buffers: Buffers, state: dict[str, Any], accumulate: int) -> tuple[int, int]:
    """Load a state; return the calls since the last update and the updates so far. An error leaves everything as it was."""
    _check(parts, buffers, state, accumulate)
    schedulers, scaler = tuple(parts.schedulers.values()), () if parts.scaler is None else (parts.scaler,)
    order: list[tuple[tuple[Any, ...], list[Any]]] = [
        (scaler, [state["scaler"]] if scaler else []),
        (parts.models, state["models"]),
        (schedulers, state["schedulers"]),
        (parts.optimizers, state["optimizers"]),
    ]
    name = "state"
    try:
        with rolled_back_on_error(parts.models, parts.optimizers, (*scaler, *schedulers)):
            for one, saved in (pair for several, states in order for pair in zip(several, states, strict=True)):
                name = type(one).__name__
                one.load_state_dict(saved)
            name = "gradients and buffers"
            _load_gradients(parts, state["gradients"])
            rng.restore(state["rng"])
            if state["buffers"] is not None:
                buffers.load(state["buffers"])
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"The saved {name} cannot be loaded: {error!s:.500} Nothing was changed. Pass what step.state_dict() gave.") from error
    return state["position"], state["updates"]


def _check(parts: Parts, buffers: Buffers, state: dict[str, Any], accumulate: int) -> None:
    expected = {"models": len(parts.models), "optimizers": len(parts.optimizers), "schedulers": len(parts.schedulers)}
    wanted = (*expected, "scaler", "gradients", "buffers", "position", "updates", "rng")
    missing = [name for name in wanted if not isinstance(state, dict) or name not in state]
    if missing:
        raise CheckpointError(f"This is no state of a step: it lacks {', '.join(missing)}. Pass what step.state_dict() gave.")
    for name, count in expected.items():
        if not isinstance(state[name], list):
            raise CheckpointError(f"The state's {name} are {state[name]!r:.80}, not a list. Pass what step.state_dict() gave.")
        if len(state[name]) != count:
            raise CheckpointError(f"The state has {len(state[name])} {name}, and this step {count}. Make the step with the same parts.")
    if (state["scaler"] is None) != (parts.scaler is None):
        has, lacks = ("state", "step") if parts.scaler is None else ("step", "state")
        raise CheckpointError(f"The {has} has a scaler, and the {lacks} has none. Make the step with the same dtype and scaler.")
    for name in ("position", "updates"):
        if not isinstance(state[name], int) or isinstance(state[name], bool) or state[name] < 0:
            raise CheckpointError(f"The state's {name} is {state[name]!r:.80}, not a number of calls. Pass what step.state_dict() gave.")
    if state["position"] >= accumulate:
        raise CheckpointError(f"The state was saved after {state['position']} calls without an update, and this step has accumulate={accumulate}.")
    several = {"model": parts.models, "optimizer": parts.optimizers, "scheduler": tuple(parts.schedulers.values())}
    fitting.check({name: list(zip(own, state[f"{name}s"], strict=True)) for name, own in several.items()}, strict=True)
    rng.refuse_other(state["rng"])
    _refuse_other_gradients(parts, buffers, state)


def _refuse_other_gradients(parts: Parts, buffers: Buffers, state: dict[str, Any]) -> None:
    """Refuse gradients and buffers of an unfinished update that do not belong to these parameters and buffers."""
    own: dict[str, list[Any]] = {"gradients": [parameters(optimizer) for optimizer in parts.optimizers], "buffers": buffers.tensors}
    for name, tensors in own.items():
        saved = state[name]
        if (saved is not None) != bool(state["position"]):
            raise CheckpointError(f"The state has {'' if saved else 'no '}{name}, and position {state['position']}. Pass what step.state_dict() gave.")
        for place, tensor, value in () if saved is None else _side_by_side(name, tensors, saved):
            if value is not None:
                fitting.refuse_other_tensor(place, value, tensor, "step")


def _side_by_side(name: str, own: Sequence[Any], saved: Any) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Each tensor with what was saved for it, in lists of lists; a list of another length is refused."""
    if not isinstance(saved, list) or len(saved) != len(own):
        raise CheckpointError(f"The state's {name} are not a list of {len(own)}. Make the step with the same parts.")
    for place, (one, value) in enumerate(zip(own, saved, strict=True)):
        if isinstance(one, torch.Tensor):
            yield f"{name}[{place}]", one, value
        else:
            yield from _side_by_side(f"{name}[{place}]", one, value)


def _gradients(parts: Parts) -> list[list[torch.Tensor | None]]:
    return [[None if one.grad is None else one.grad.clone() for one in parameters(optimizer)] for optimizer in parts.optimizers]


def _load_gradients(parts: Parts, gradients: list[list[torch.Tensor | None]] | None) -> None:
    for place, optimizer in enumerate(parts.optimizers):
        optimizer.zero_grad(set_to_none=True)
        if gradients is not None:
            for parameter, gradient in zip(parameters(optimizer), gradients[place], strict=True):
                parameter.grad = None if gradient is None else torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
