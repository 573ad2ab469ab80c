"""Skipping without asking the device: run the optimizer's step, then keep the old values or the new ones by the flag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim

from mezzo._errors import UnsupportedError
from mezzo.scaling import copies
from mezzo.scaling.gradients import parameters
from mezzo.scaling.reading import class_of, groups_of

_STARTS_AT_ZERO = (optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.Adadelta, optim.RMSprop, optim.RAdam)
"""Optimizers whose fresh state is all zeros: a first step that was skipped is undone by zeroing what it made."""


def masked_step(optimizer: optim.Optimizer, found: torch.Tensor, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Step, and undo the step on the device where the flag is raised. Costs a copy of every parameter and of the optimizer's state for its duration."""
    refuse_host_counters(optimizer)
    before = [(tensor, tensor.clone()) for tensor in _tensors(optimizer)]
    known = {id(tensor) for tensor in _state(optimizer)}
    value = optimizer.step(*args, **(kwargs or {}))
    raised = {device: found.to(device, non_blocking=True) != 0 for device in {tensor.device for tensor in _tensors(optimizer)}}
    with torch.no_grad():
        for tensor, old in before:
            torch.where(raised[tensor.device], old, tensor, out=tensor)
        for tensor in _state(optimizer):
            if id(tensor) not in known:
                # State that this step made did not exist before: after a skip it is as new. Multiplying would keep a NaN.
                tensor.masked_fill_(raised[tensor.device], 0)
    return value


def copied_bytes(optimizer: optim.Optimizer) -> int:
    """How many bytes the copies of a masked step take."""
    return sum(tensor.nbytes for tensor in _tensors(optimizer))


def can_undo(optimizer: optim.Optimizer) -> bool:
    """Whether a bad step can be undone now: what it would make anew is all zeros, or nothing will be made."""
    if class_of(optimizer) in _STARTS_AT_ZERO and not _damps_its_first_momentum(optimizer):
        return True
    return all(optimizer.state.get(parameter) for parameter in parameters(optimizer) if parameter.grad is not None)


def refuse_host_counters(optimizer: optim.Optimizer) -> None:
    """A step count kept on the host would advance on a skip, and nobody could undo it without asking the device."""
    kind = type(optimizer).__name__
    remedy = "Or leave skip='host', which reads one flag a step."
    for group in groups_of(optimizer):
        if group.get("capturable") is False and any(copies.waits(parameter.device) for parameter in group["params"]):
            raise UnsupportedError(f"skip='masked' needs an optimizer that keeps its step count on the device: {kind}(..., capturable=True). {remedy}")
    for entry in optimizer.state.values():
        numbers = [name for name, value in entry.items() if isinstance(value, int | float)] if isinstance(entry, dict) else []
        if numbers:
            raise UnsupportedError(f"skip='masked' cannot undo what {kind} counts on the host: {', '.join(numbers)}. Keep it in a tensor. {remedy}")


def _tensors(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    return [*(parameter.detach() for parameter in parameters(optimizer) if parameter.grad is not None), *_state(optimizer)]


def _state(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    entries = [entry for entry in optimizer.state.values() if isinstance(entry, dict)]
    return [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]


def _damps_its_first_momentum(optimizer: optim.Optimizer) -> bool:
    """SGD starts its momentum from the gradient itself and damps only the later ones: a zeroed start would be damped."""
    return any(group.get("momentum") and group.get("dampening") for group in groups_of(optimizer))
