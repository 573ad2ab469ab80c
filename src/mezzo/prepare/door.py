"""The door of a decorated model: what goes in is cast, what happens inside runs in the policy's region, and what comes out may be cast back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mezzo._casting import cast_all
from mezzo.eager.forward import Forward, replace_forward
from mezzo.eager.region import Region, inside


@dataclass(frozen=True)
class Door:
    """What a model's door does."""

    region: Region
    """The region that the model runs in."""
    inputs: torch.dtype | None
    """What floating-point inputs are cast to; None leaves them to the region's ops."""
    outputs: torch.dtype | None
    """What outputs are cast to; None leaves them."""
    yields: bool = False
    """Whether the door stands open inside a region that is on already: nothing is cast, and that region goes on."""


def hang(door: Door, model: nn.Module) -> Callable[[], None]:
    """Replace the forward of a model; what comes back takes the door out again."""
    region, inputs, outputs, yields = door.region, door.inputs, door.outputs, door.yields

    def make(function: Forward, bound: bool) -> Forward:  # noqa: FBT001
        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            outer = yields and torch.is_autocast_enabled(region.device)
            if inputs is not None and not outer:
                args, kwargs = cast_all(args, inputs, region.device), cast_all(kwargs, inputs, region.device)
            with nullcontext() if outer else inside(region):
                result = function(*args, **kwargs) if bound else function(self_, *args, **kwargs)
            return result if outputs is None else cast_all(result, outputs, region.device)

        return forward

    # A deep copy of a decorated model has a door already: a new one takes its place.
    return replace_forward(model, "mezzo_behind", make)
