"""channels_last: convert a model, or choose by measuring whether to.

In this memory format convolutions run on tensor cores without transposing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo._errors import PolicyError
from mezzo._hardware import hardware
from mezzo.prepare import rng_state
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.kept_results import copy_with_results
from mezzo.scaling.mesh import any_sharded
from mezzo.step.cuda_graph import CaptureFailed, GraphCapturer, find_host_syncs
from mezzo.step.inputs import IMAGE_DIMS, is_channels_last
from mezzo.step.options import Layout

ModelOrTensor = TypeVar("ModelOrTensor", nn.Module, torch.Tensor)


def channels_last(model_or_tensor: ModelOrTensor) -> ModelOrTensor:
    """Convert a model or a batch of images to the channels_last memory format.

    Convolutions on tensor cores then need no transposed copies. Convert a model before it is
    decorated: master weights and optimizer states take the memory format of the parameters.

    Args:
        model_or_tensor: A model, which is converted in place, or a tensor with 4 dimensions.

    Returns:
        The model itself, or the tensor: a copy unless it is channels_last already.

    Raises:
        PolicyError: The model is decorated, or the tensor does not have 4 dimensions.

    >>> channels_last(torch.ones(2, 3, 4, 4)).is_contiguous(memory_format=torch.channels_last)
    True
    """
    if isinstance(model_or_tensor, nn.Module):
        if decoration_of(model_or_tensor) is not None:
            raise PolicyError(
                "The model is decorated, and its master weights and optimizer states have the"
                " memory format that the parameters had then. Call channels_last(model) before"
                " decorate."
            )
        return model_or_tensor.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    if model_or_tensor.dim() != IMAGE_DIMS:
        raise PolicyError(
            "channels_last takes a model or a batch of images with 4 dimensions, got shape"
            f" {tuple(model_or_tensor.shape)}."
        )
    return model_or_tensor.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class LayoutChoice:
    """Whether a model is converted to channels_last, and why."""

    channels_last: bool | None
    """None if it is to be measured, which needs inputs."""
    reason: str


def decide(model: nn.Module, layout: Layout) -> LayoutChoice:
    """Choose the memory format of a model as far as that is possible without inputs."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    fixed = _why_fixed(model)
    # A 1 × 1 kernel is contiguous in both formats: torch then chooses by strides.
    if convolutions and all(is_channels_last(module.weight) for module in convolutions):
        return LayoutChoice(channels_last=True, reason="the model is channels_last already")
    if layout is Layout.ON:
        if fixed is not None:
            raise PolicyError(
                f"channels_last=True converts the parameters, and {fixed}. Call"
                " mezzo.channels_last(model) before that."
            )
        return LayoutChoice(channels_last=True, reason="channels_last=True")
    if layout is Layout.OFF:
        return LayoutChoice(channels_last=False, reason="channels_last=False")
    if not convolutions:
        return LayoutChoice(channels_last=False, reason="the model has no Conv2d")
    device = convolutions[0].weight.device
    if device.type != "cuda" or not hardware("cuda").float16.native:
        return LayoutChoice(
            channels_last=False, reason=f"there are no tensor cores on {device.type}"
        )
    if fixed is None and decoration_of(model) is not None:
        fixed = "the model was decorated before"
    if fixed is not None:
        reason = f"{fixed}: call mezzo.channels_last(model) first"
        return LayoutChoice(channels_last=False, reason=reason)
    return LayoutChoice(channels_last=None, reason="not measured yet")


def _why_fixed(model: nn.Module) -> str | None:
    """Return why the memory format of a model cannot be changed any more."""
    if any_sharded(model.parameters()):
        return "the model is sharded over processes already"
    if isinstance(model, DistributedDataParallel):
        return "the model is wrapped by DistributedDataParallel already"
    return None


_WARM_UP, _TIMED = 2, 5
"""Runs before the timed ones, and timed runs."""
_FASTER = 0.98
"""channels_last must take less than this share of the time: smaller gains are noise."""


def measure(
    model: nn.Module, run: Callable[[nn.Module, bool], torch.Tensor], *, captured: bool
) -> LayoutChoice:
    """Time forward and backward of copies of a model in both memory formats.

    `run` returns the loss of a model. With `captured`, CUDA graphs are timed: eager runs of small
    models are bound by the host and take the same time in both formats. Random generators are
    restored.
    """
    device = next(iter(model.parameters())).device
    state = rng_state.capture_rng_state()
    try:
        contiguous, last = (
            _time(
                _copy_in_format(model, last=last),
                run,
                GraphCapturer.on(device),
                last=last,
                captured=captured,
            )
            for last in (False, True)
        )
    finally:
        rng_state.restore_rng_state(state)
    return LayoutChoice(
        channels_last=last < _FASTER * contiguous,
        reason=(
            f"forward and backward take {last:.2f} ms with channels_last,"
            f" {contiguous:.2f} ms without"
        ),
    )


def _copy_in_format(model: nn.Module, *, last: bool) -> nn.Module:
    copied = copy_with_results(model)
    for parameter in copied.parameters():
        if last and parameter.dim() == IMAGE_DIMS:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return copied


def _time(
    model: nn.Module,
    run: Callable[[nn.Module, bool], torch.Tensor],
    capturer: GraphCapturer,
    *,
    last: bool,
    captured: bool,
) -> float:
    """Return the milliseconds of the fastest of a few runs."""

    def run_once(_: Any = None) -> None:
        run(model, last).backward()
        model.zero_grad(set_to_none=True)

    for _ in range(_WARM_UP):
        capturer.run_on_capture_stream(run_once)
    with find_host_syncs() as syncs:
        capturer.run_on_capture_stream(run_once)
    timed: Callable[[], object] = run_once
    if captured and not syncs:
        timed = _capture_replay(capturer, run_once) or run_once
    times: list[float] = []
    for _ in range(_TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        timed()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


def _capture_replay(
    capturer: GraphCapturer, run: Callable[[Any], None]
) -> Callable[[], object] | None:
    """Return a function that replays a run; None if it cannot be captured."""
    try:
        return capturer.capture(run, ()).graph.replay
    except CaptureFailed:
        return None
