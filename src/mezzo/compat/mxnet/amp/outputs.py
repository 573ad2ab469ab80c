"""Output layers that make their own gradient: their backward ignores the incoming one, so that a scaled loss does not reach it. They are told the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mezzo.scaling.scaler import GradScaler

Gradient = Callable[[], torch.Tensor]
"""What the layer's input gets."""


class _Output(torch.autograd.Function):
    """An output with a gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,  # noqa: ARG004 - autograd ties the input to the output
        output: torch.Tensor,
        gradient: Gradient,
        times_incoming: bool,  # noqa: FBT001 - apply() takes arguments by position
    ) -> torch.Tensor:
        """The output as it is."""
        ctx.gradient, ctx.loss_scale, ctx.times_incoming = gradient, 1.0, times_incoming
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The layer's own gradient, times the scale: an incoming one that counts has it already."""
        return ctx.gradient() * (incoming[0] if ctx.times_incoming else ctx.loss_scale), None, None, None


_made = False
"""Whether there ever was such an output: most never make one, and no graph need be searched for it."""


def output_with_gradient(data: torch.Tensor, output: torch.Tensor, gradient: Gradient, *, times_incoming: bool = False) -> torch.Tensor:
    """An output whose input gets this gradient, whatever comes in unless that is to count."""
    global _made
    _made = True
    made: torch.Tensor = _Output.apply(data, output, gradient, times_incoming)  # type: ignore[no-untyped-call]
    return made


def tell_scale(loss: Any, scaler: GradScaler) -> None:
    """Tell the output layers that a loss is made of what it is scaled by. By the loss and not by the moment: several trainers have several scales."""
    if not _made or not isinstance(loss, torch.Tensor):
        return
    # On the device, so that nobody waits for it.
    scale = scaler.scale(torch.ones((), device=loss.device))
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _Output._backward_cls):
            node.loss_scale = scale  # type: ignore[attr-defined]
        else:
            waiting.extend(following for following, _ in node.next_functions)
