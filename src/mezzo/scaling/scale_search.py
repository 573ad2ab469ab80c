"""Search for a loss scale at which the first gradients are finite, so that no batch is lost.

A scaler starts at 65536 and halves its scale at each skipped step: a model with large gradients
loses its first batches. Here backward is repeated from the same forward pass instead, so that batch
statistics and random numbers advance once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import distributed

from mezzo.scaling.gradients import first_nonfinite
from mezzo.scaling.loss_scales import LossScales

_FACTOR = 4.0
"""What the scale is divided by for each attempt."""
_HEADROOM = 4.0
"""What the found scale is divided by in the end: later gradients may be larger."""
_SMALLEST = 1.0
"""The smallest scale that is tried: gradients that overflow below it need another remedy."""

_LOW = 1024.0
"""The largest initial scale without a warning where the scale cannot be searched."""

Backward = Callable[[bool], None]
"""Computes gradients at the current scale; its argument is `retain_graph`."""


def can_search(scales: LossScales, loss_id: int, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether to search: the scale is dynamic, unused, and there are no gradients yet.

    Not with several processes, which is warned about once.
    """
    state = scales.state(loss_id)
    is_new = (
        scales.rule.dynamic
        and state.good_steps == state.skipped_steps == 0
        and all(parameter.grad is None for parameter in parameters)
    )
    if is_new and _reduces_gradients():
        if state.scale > _LOW:
            _warn_once(
                "The initial loss scale is not searched with several processes, since the gradients"
                " of a second backward pass are not reduced. If it is too high, the first steps are"
                f" skipped. Pass GradScaler(init_scale={_LOW}) to avoid this."
            )
        return False
    return is_new


def search(
    scales: LossScales, loss_id: int, parameters: Sequence[torch.Tensor], backward: Backward
) -> bool:
    """Compute gradients at a scale that leaves headroom above them. Synchronizes.

    A scale stays, with the gradients of the first backward pass, if they are finite at four times
    the scale too. Returns False, with the original scale and non-finite gradients, if no scale down
    to 1 helps or backward cannot run twice: the step is then skipped as usual.
    """
    scale, original = scales.of(loss_id), scales.state(loss_id).scale

    def is_finite_at(value: float) -> bool:
        _clear(parameters)
        scale.set(value, scales.rule)
        backward(True)
        return first_nonfinite(parameters) is None

    backward(True)
    gradients = [parameter.grad for parameter in parameters]
    fits = first_nonfinite(parameters) is None
    try:
        found = (
            original * (_HEADROOM if is_finite_at(original * _HEADROOM) else 1.0)
            if fits
            else next(filter(is_finite_at, _lower_scales(original)), None)
        )
        if found is not None and found != original * _HEADROOM:
            is_finite_at(found / _HEADROOM)
            return True
    except RuntimeError as error:
        if not fits:
            _warn_not_repeated(error)
    scale.set(original, scales.rule)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return fits


def _lower_scales(scale: float) -> Iterator[float]:
    while scale > _SMALLEST:
        scale = max(scale / _FACTOR, _SMALLEST)
        yield scale


def _clear(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _reduces_gradients() -> bool:
    """Return whether gradients may be reduced over processes: a second backward reduces none."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


_warned = False


def _warn_not_repeated(error: RuntimeError) -> None:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    _warn_once(
        "The first gradients overflow at the initial loss scale, and backward cannot be repeated to"
        f" find a lower one ({reason}). The first steps are skipped instead. Pass"
        " GradScaler(init_scale=1024.0) to avoid this."
    )


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(message, UserWarning, stacklevel=3)
