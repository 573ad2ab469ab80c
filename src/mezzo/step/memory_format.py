"""channels_last: the layout in which convolutions run on tensor cores without transposing, chosen where it is faster."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from mezzo._errors import PolicyError
from mezzo._hardware import hardware
from mezzo.prepare.decoration import decoration_of
from mezzo.step.components import Layout
from mezzo.step.cuda_graph import GraphCapturer, find_host_syncs
from mezzo.step.inputs import IMAGES

ThingT = TypeVar("ThingT", nn.Module, torch.Tensor)

_WARM, _TIMED = 2, 5
_WORTH = 0.98
"""Faster by less is not told from noise, and the model stays as it is."""


def channels_last(thing: ThingT) -> ThingT:
    """Lay a model or a batch of images out with the channels last. A model is converted in place; do it before `decorate`.

    >>> channels_last(torch.ones(2, 3, 4, 4)).is_contiguous(memory_format=torch.channels_last)
    True
    """
    if isinstance(thing, nn.Module):
        if decoration_of(thing) is not None:
            raise PolicyError(
                "Exact weights and states have the layout that the parameters had when they were"
                " decorated. First channels_last, then decorate."
            )
        return thing.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    if thing.dim() != IMAGES:
        raise PolicyError(
            "channels_last takes a batch of images with 4 dimensions, got shape"
            f" {tuple(thing.shape)}."
        )
    return thing.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class LayoutChoice:
    """What was decided about the layout of a model, and why."""

    channels_last: bool | None
    """None where it has to be measured, which needs inputs."""
    reason: str


def decide(model: nn.Module, asked: Layout) -> LayoutChoice:
    """What can be said about a model's layout before it has seen inputs."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if convolutions and all(_has_channels_last(module.weight) for module in convolutions):
        return LayoutChoice(channels_last=True, reason="the model has its channels last already")
    if asked is Layout.ON:
        return LayoutChoice(channels_last=True, reason="channels_last=True")
    if asked is Layout.OFF:
        return LayoutChoice(channels_last=False, reason="channels_last=False")
    if not convolutions:
        return LayoutChoice(channels_last=False, reason="the model has no Conv2d")
    device = convolutions[0].weight.device
    if device.type != "cuda" or not hardware("cuda").float16.native:
        return LayoutChoice(
            channels_last=False, reason=f"there are no tensor cores on {device.type}"
        )
    if decoration_of(model) is not None:
        return LayoutChoice(
            channels_last=False,
            reason="the model was decorated before: call mezzo.channels_last(model) first",
        )
    return LayoutChoice(channels_last=None, reason="not measured yet")


def measure(
    model: nn.Module, run: Callable[[nn.Module, bool], torch.Tensor], *, captured: bool
) -> LayoutChoice:
    """Time forward and backward of copies of a model in both layouts, as the step is going to run; `run` gives the loss of a model.

    Small models keep the host busier than the device: run eagerly, both layouts take the same time
    and the captured step is left with the slower one. The random generators are as they were.
    """
    device = next(model.parameters()).device
    state = torch.cuda.get_rng_state(device)
    try:
        plain, last = (
            _time(
                _laid_out(model, last=last),
                run,
                GraphCapturer.on(device),
                last=last,
                captured=captured,
            )
            for last in (False, True)
        )
    finally:
        torch.cuda.set_rng_state(state, device)
    faster = last < _WORTH * plain
    return LayoutChoice(
        channels_last=faster,
        reason=(
            f"forward and backward take {last:.2f} ms with channels last, {plain:.2f} ms without"
        ),
    )


def _laid_out(model: nn.Module, *, last: bool) -> nn.Module:
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        if last and parameter.dim() == IMAGES:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return copied


def _time(
    model: nn.Module,
    run: Callable[[nn.Module, bool], torch.Tensor],
    studio: GraphCapturer,
    *,
    last: bool,
    captured: bool,
) -> float:
    """Milliseconds of the fastest of a few runs."""

    def once(_: Any = None) -> None:
        run(model, last).backward()
        model.zero_grad(set_to_none=True)

    for _ in range(_WARM):
        studio.run_on_capture_stream(once)
    with find_host_syncs() as reads:
        studio.run_on_capture_stream(once)
    # What cannot be captured is timed as it will run then: eagerly.
    timed: Callable[[], object] = (captured and not reads and _replay_of(studio, once)) or once
    times: list[float] = []
    for _ in range(_TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        timed()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


def _replay_of(studio: GraphCapturer, once: Callable[[Any], None]) -> Callable[[], object] | None:
    try:
        return studio.capture(once, ()).graph.replay
    except RuntimeError:
        return None


def _has_channels_last(weight: Any) -> bool:
    # A kernel of one pixel is laid out both ways at once: torch tells by the strides.
    return bool(weight.is_contiguous(memory_format=torch.channels_last)) and not bool(
        weight.is_contiguous()
    )
