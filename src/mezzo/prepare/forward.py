"""Forward wrapper of a decorated model: cast inputs, run in the policy's autocast region, cast outputs; pad wide linear layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mezzo._casting import cast_all
from mezzo._errors import UnsupportedError
from mezzo.autocasting.arguments import policy_of, region_for
from mezzo.autocasting.module_rules import Forward, replace_forward
from mezzo.autocasting.regions import Region, enter_regions
from mezzo.policy.policy import Policy


@dataclass(frozen=True)
class ForwardWrapper:
    """What a model's door does."""

    region: Region
    """The region that the model runs in."""
    inputs: torch.dtype | None
    """What floating-point inputs are cast to; None leaves them to the region's ops."""
    outputs: torch.dtype | None
    """What outputs are cast to; None leaves them."""
    defer_to_autocast: bool = False
    """Whether the door stands open inside a region that is on already: nothing is cast, and that
    region goes on."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled with the policy of its region: the table that carries that out lives in one process."""
        return _made_again, (
            replace(self.region, owner=None),
            policy_of(self.region),
            self.inputs,
            self.outputs,
            self.defer_to_autocast,
        )


def _made_again(region: Region, policy: Policy | None, *words: Any) -> ForwardWrapper:
    if policy is None:
        return ForwardWrapper(region, *words)
    try:
        # In the dtype that was chosen where the model was decorated: its weights have it.
        again = region_for(
            replace(policy, dtype=region.dtype), region.device, cache_enabled=region.cache_enabled
        )
    except UnsupportedError:
        # A file is also read where there is no such device; who goes on there casts the model
        # first.
        again = Region(region.device, False, region.dtype, region.cache_enabled)
    return ForwardWrapper(again, *words)


def wrap_forward(door: ForwardWrapper, model: nn.Module) -> Callable[[], None]:
    """Replace the forward of a model; what comes back takes the door out again."""
    region, inputs, outputs, defers = door.region, door.inputs, door.outputs, door.defer_to_autocast

    def make(function: Forward, bound: bool) -> Forward:  # noqa: FBT001
        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            outer = defers and torch.is_autocast_enabled(region.device)
            if inputs is not None and not outer:
                args, kwargs = (
                    cast_all(args, inputs, region.device),
                    cast_all(kwargs, inputs, region.device),
                )
            with nullcontext() if outer else enter_regions(region):
                result = function(*args, **kwargs) if bound else function(self_, *args, **kwargs)
            return result if outputs is None else cast_all(result, outputs, region.device)

        return forward

    # A deep copy of a decorated model has a door already: a new one takes its place.
    put_back = replace_forward(model, _BEHIND, make)
    hung: Any = model.__dict__["forward"]
    hung.__func__.mezzo_door = door
    model.__dict__[_REDUCE] = MethodType(_reduced, model)

    def take_out() -> None:
        put_back()
        model.__dict__.pop(_REDUCE, None)

    return take_out


_BEHIND, _RULED = "mezzo_behind", "mezzo_original"
"""The marks of forwards that a door and a module rule have replaced."""

_REDUCE = "__reduce_ex__"

_MARK = "_mezzo_decoration"

_STAYS = (_REDUCE, "_apply", _MARK)
"""What belongs to the original alone."""


def _reduced(model: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """What pickle and copy take a model for: itself, with a forward that can be made anew."""
    made: Any = type(model).__reduce_ex__(model, protocol)
    state = made[2]
    if not isinstance(state, dict) or not hasattr(state.get("forward"), "mezzo_door"):
        return tuple(made)
    if _MARK in state and state["forward"].mezzo_door.inputs is not None:
        _refuse_averages()
    kept = {name: value for name, value in state.items() if name not in _STAYS}
    return (*made[:2], kept | {"forward": _PickledForward(model, state["forward"])}, *made[3:])


def _refuse_averages() -> None:
    """Refuse a copy for torch's AveragedModel: an average in 16 bits does not move by the small part of each update that it takes."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.optim.swa_utils":
            raise UnsupportedError(
                "AveragedModel(model) of a decorated model would average rounded weights in 16"
                " bits. Use mezzo.EMA(model, decay=0.999), which averages the float32 masters; or"
                " make the AveragedModel before mezzo.decorate, and call"
                " averaged.update_parameters(mezzo.master_params(model))."
            )


class _PickledForward:
    """The forward of a model with a door, on its way into a file; a shallow copy calls it."""

    def __init__(self, model: nn.Module, forward: Any) -> None:
        self._model, self._forward = model, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = deepcopy(self._model, memo)
        copied.__dict__[_REDUCE] = MethodType(_reduced, copied)
        return MethodType(self._forward.__func__, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        ruled = [
            name
            for name, part in self._model.named_modules()
            if hasattr(part.__dict__.get("forward"), _RULED)
        ]
        if ruled:
            raise UnsupportedError(
                f"The model has rules for modules ({', '.join(ruled)}), which do not go into a"
                " pickle. Save its state_dict(), or mezzo.undecorate(model) first."
            )
        own = getattr(self._forward, _BEHIND)
        return _unpickled_forward, (
            self._model,
            self._forward.mezzo_door,
            None if own is type(self._model).forward else own,
        )


def _unpickled_forward(model: nn.Module, door: ForwardWrapper, own: Any) -> Any:
    # The model is only just made and has no state yet: nothing but its class is asked.
    if own is not None:
        model.__dict__["forward"] = own
    wrap_forward(door, model)
    return model.__dict__["forward"]


MULTIPLE = 8
"""16 bytes of 16-bit numbers."""
_WORTHWHILE = 2**20
"""Elements of a weight below which the extra copies cost more than they save."""


@dataclass(frozen=True, eq=False)
class PaddedLinear:
    """A layer that computes more outputs than it gives."""

    name: str
    module: nn.Linear

    @property
    def outputs(self) -> int:
        """How many it computes."""
        return self.module.out_features + -self.module.out_features % MULTIPLE

    def __str__(self) -> str:
        return (
            f"{self.name} computes {self.outputs} outputs and gives {self.module.out_features}:"
            f" rows of 16-bit numbers are fast in multiples of {MULTIPLE}"
        )


def find_paddable(models: Iterable[nn.Module], device: str) -> tuple[PaddedLinear, ...]:
    """The layers that gain by it. Only GPUs mind, and only plain linear layers are known to do nothing but the product."""
    if device != "cuda":
        return ()
    return tuple(
        PaddedLinear(name, module)
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and _gains(module)
    )


def _gains(module: nn.Linear) -> bool:
    plain = type(module) is nn.Linear and "forward" not in module.__dict__
    return plain and module.out_features % MULTIPLE != 0 and module.weight.numel() >= _WORTHWHILE


def pad_outputs(aligned: PaddedLinear) -> Callable[[], None]:
    """Replace the layer's forward; what comes back puts it back."""
    module = aligned.module
    module.__dict__["forward"] = MethodType(_forward, module)
    return partial(module.__dict__.pop, "forward", None)


def _forward(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    missing = -module.out_features % MULTIPLE
    weight = F.pad(module.weight, (0, 0, 0, missing))
    bias = None if module.bias is None else F.pad(module.bias, (0, missing))
    # Contiguous, as any linear layer's outputs: whoever calls `view` on them need not know.
    return F.linear(inputs, weight, bias)[..., : module.out_features].contiguous()


# A method is pickled by its name: what comes out of a file has the forward of its class, which
# gives the same.
_forward.__name__ = "forward"
