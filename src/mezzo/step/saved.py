"""The state of a step: all that a run needs to go on to the bit."""

from __future__ import annotations

from typing import Any

import torch

from mezzo._errors import CheckpointError
from mezzo.prepare import fitting, rng
from mezzo.prepare.checkpoint import optimizer_state
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
    """Take a state over, and give the calls since the last update and the updates so far. What does not fit is refused before anything changes."""
    _check(parts, state, accumulate)
    if parts.scaler is not None:
        parts.scaler.load_state_dict(state["scaler"])
    order: dict[str, tuple[Any, ...]] = {"models": parts.models, "schedulers": tuple(parts.schedulers.values()), "optimizers": parts.optimizers}
    for name, several in order.items():
        for one, saved in zip(several, state[name], strict=True):
            one.load_state_dict(saved)
    _load_gradients(parts, state["gradients"])
    if state["buffers"] is not None:
        buffers.load(state["buffers"])
    rng.restore(state["rng"])
    return state["position"], state["updates"]


def _check(parts: Parts, state: dict[str, Any], accumulate: int) -> None:
    expected = {"models": len(parts.models), "optimizers": len(parts.optimizers), "schedulers": len(parts.schedulers)}
    missing = [name for name in (*expected, "scaler", "gradients", "buffers", "position", "updates", "rng") if name not in state]
    if missing:
        raise CheckpointError(f"This is no state of a step: it lacks {', '.join(missing)}. Pass what step.state_dict() gave.")
    for name, count in expected.items():
        if len(state[name]) != count:
            raise CheckpointError(f"The state has {len(state[name])} {name}, and this step {count}. Make the step with the same parts.")
    if (state["scaler"] is None) != (parts.scaler is None):
        has, lacks = ("state", "step") if parts.scaler is None else ("step", "state")
        raise CheckpointError(f"The {has} has a scaler, and the {lacks} has none. Make the step with the same dtype and scaler.")
    if state["position"] >= accumulate:
        raise CheckpointError(f"The state was saved after {state['position']} calls without an update, and this step has accumulate={accumulate}.")
    several = {"model": parts.models, "optimizer": parts.optimizers, "scheduler": tuple(parts.schedulers.values())}
    fitting.check({name: list(zip(own, state[f"{name}s"], strict=True)) for name, own in several.items()}, strict=True)


def _gradients(parts: Parts) -> list[list[torch.Tensor | None]]:
    return [[None if one.grad is None else one.grad.clone() for one in parameters(optimizer)] for optimizer in parts.optimizers]


def _load_gradients(parts: Parts, gradients: list[list[torch.Tensor | None]] | None) -> None:
    for place, optimizer in enumerate(parts.optimizers):
        optimizer.zero_grad(set_to_none=True)
        if gradients is not None:
            for parameter, gradient in zip(parameters(optimizer), gradients[place], strict=True):
                parameter.grad = None if gradient is None else torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
