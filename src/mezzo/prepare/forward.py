"""Forward wrapper of a decorated model.

The wrapper casts inputs, runs the forward in the policy's autocast region, and casts outputs. A
model with a wrapper can be copied and pickled.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from mezzo._casting import cast_all
from mezzo._errors import UnsupportedError
from mezzo.autocasting.arguments import policy_of, region_for
from mezzo.autocasting.module_rules import (
    RULED_FORWARD,
    WRAPPED_FORWARD,
    Forward,
    replace_forward,
)
from mezzo.autocasting.regions import Region, enter_regions
from mezzo.policy.policy import Policy
from mezzo.prepare.mixed_dtypes import explain_forward

DECORATION = "_mezzo_decoration"
"""The attribute of models and optimizers that holds their `Decoration`."""

_REDUCE, _DEEPCOPY = "__reduce_ex__", "__deepcopy__"
_NOT_COPIED = (_REDUCE, _DEEPCOPY, "_apply", DECORATION)
"""Attributes of a decorated model that its copies do not get."""


@dataclass(frozen=True)
class ForwardWrapper:
    """What is done around the forward of a decorated model."""

    region: Region
    """The autocast region that the model runs in."""
    input_dtype: torch.dtype | None
    """Dtype that floating-point inputs are cast to; None does not cast them."""
    output_dtype: torch.dtype | None
    """Dtype that outputs are cast to; None does not cast them."""
    defer_to_autocast: bool = False
    """Whether an enabled region around the call is used instead: then nothing is cast."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the policy of the region, whose op table exists in one process."""
        return _made_again, (
            replace(self.region, table=None),
            policy_of(self.region),
            self.input_dtype,
            self.output_dtype,
            self.defer_to_autocast,
        )


def wrap_forward(wrapper: ForwardWrapper, model: nn.Module) -> Callable[[], None]:
    """Replace the forward of a model; return a function that restores it."""
    region, input_dtype, output_dtype = wrapper.region, wrapper.input_dtype, wrapper.output_dtype
    defer_to_autocast = wrapper.defer_to_autocast

    def make(function: Forward, bound: bool) -> Forward:  # noqa: FBT001
        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_deferred = defer_to_autocast and torch.is_autocast_enabled(region.device)
            if input_dtype is not None and not is_deferred:
                args = cast_all(args, input_dtype, region.device)
                kwargs = cast_all(kwargs, input_dtype, region.device)
            if not bound:
                args = (self_, *args)
            with nullcontext() if is_deferred else enter_regions(region):
                if is_dynamo_compiling():
                    # Not in `try`, where dynamo cannot break a graph.
                    result = function(*args, **kwargs)
                else:
                    try:
                        result = function(*args, **kwargs)
                    except RuntimeError as error:
                        if (explained := explain_forward(error)) is None:
                            raise
                        raise explained from error
            if output_dtype is None:
                return result
            return cast_all(result, output_dtype, region.device)

        # Dynamo keeps its caches by code object: models that share one recompile for each other, at
        # most 8 times. By name it collects the sizes that vary, for which it compiles dynamic code.
        forward.__code__ = forward.__code__.replace(co_name=f"{type(model).__qualname__}.forward")
        forward.__name__, forward.__doc__ = "forward", function.__doc__
        forward.__signature__ = _signature(function, bound=bound)  # type: ignore[attr-defined]
        return forward

    # A deep copy of a decorated model has a wrapper already, which this one replaces.
    restore_forward = replace_forward(model, WRAPPED_FORWARD, make)
    wrapped: Any = model.__dict__["forward"]
    wrapped.__func__.mezzo_wrapper = wrapper
    model.__dict__.update(
        {
            name: MethodType(method, model)
            for name, method in ((_REDUCE, _reduced), (_DEEPCOPY, _deep_copied))
            if hasattr(type(model), name)
        }
    )

    def restore() -> None:
        restore_forward()
        model.__dict__.pop(_REDUCE, None)
        model.__dict__.pop(_DEEPCOPY, None)

    return restore


def _signature(function: Forward, *, bound: bool) -> inspect.Signature:
    """Return the signature of a forward with `self`.

    Libraries read the parameters of `model.forward`: Hugging Face's Trainer drops the columns of a
    dataset that are not among them.
    """
    signature = inspect.signature(function)
    if not bound:
        return signature
    self_ = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[self_, *signature.parameters.values()])


# -- copies and pickles ----------------------------------------------------------------------------
# Pickles refer to `_made_again`, `_made_and_wrapped` and `_unpickled_forward` by name.


def _made_again(region: Region, policy: Policy | None, *options: Any) -> ForwardWrapper:
    if policy is None:
        return ForwardWrapper(region, *options)
    try:
        # With the dtype of the weights, which was chosen where the model was decorated.
        rebuilt = region_for(
            replace(policy, dtype=region.dtype), region.device, cache_enabled=region.cache_enabled
        )
    except UnsupportedError:
        # The file may be read on a machine without such a device; the model must be cast before it
        # can run there.
        rebuilt = region.disabled()
    return ForwardWrapper(rebuilt, *options)


def _unpickled_forward(model: nn.Module, wrapper: ForwardWrapper, original: Any) -> Any:
    # The model is being unpickled and has no state yet: only its class can be used.
    if original is not None:
        model.__dict__["forward"] = original
    wrap_forward(wrapper, model)
    return model.__dict__["forward"]


def _reduced(model: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Reduce a model for pickle and copy, with a forward that can be rebuilt."""
    reduced: Any
    if pickles_itself(model):
        with _unwrapped(model) as wrapper:
            reduced = type(model).__reduce_ex__(model, protocol)
        return _made_and_wrapped, (wrapper, *reduced[:2])
    reduced = type(model).__reduce_ex__(model, protocol)
    state = reduced[2]
    if not isinstance(state, dict) or not hasattr(state.get("forward"), "mezzo_wrapper"):
        return tuple(reduced)
    if DECORATION in state and state[DECORATION].plan.converts:
        _refuse_averaged_model()
    copied = {name: value for name, value in state.items() if name not in _NOT_COPIED}
    copied["forward"] = _PickledForward(model, state["forward"])
    return (*reduced[:2], copied, *reduced[3:])


def pickles_itself(model: nn.Module) -> bool:
    """Return whether the class of a model defines its pickles, as `torch.fx.GraphModule` does."""
    return type(model).__reduce__ is not object.__reduce__


def _deep_copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a model as its class does, and wrap the forward of the copy."""
    with _unwrapped(model) as wrapper:
        copied: nn.Module = type(model).__deepcopy__(model, memo)  # type: ignore[attr-defined]
    wrap_forward(wrapper, copied)
    return copied


def _made_and_wrapped(
    wrapper: ForwardWrapper, make: Callable[..., nn.Module], arguments: tuple[Any, ...]
) -> nn.Module:
    model = make(*arguments)
    wrap_forward(wrapper, model)
    return model


@contextmanager
def _unwrapped(model: nn.Module) -> Iterator[ForwardWrapper]:
    """Remove the decoration from a model inside the block, in which the model is copied."""
    attributes = model.__dict__
    if DECORATION in attributes and attributes[DECORATION].plan.converts:
        _refuse_averaged_model()
    names = [name for name in ("forward", *_NOT_COPIED) if name in attributes]
    taken = {name: attributes.pop(name) for name in names}
    try:
        yield taken["forward"].mezzo_wrapper
    finally:
        attributes.update(taken)


def _refuse_averaged_model() -> None:
    """Raise if torch's AveragedModel copies the model: 16-bit averages lose small updates."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.optim.swa_utils":
            raise UnsupportedError(
                "AveragedModel(model) of a decorated model would average rounded weights in 16"
                " bits. Use mezzo.EMA(model, decay=0.999), which averages the float32 masters; or"
                " create the AveragedModel before mezzo.decorate, and call"
                " averaged.update_parameters(mezzo.master_params(model))."
            )


class _PickledForward:
    """The forward of a wrapped model while it is copied or pickled. A shallow copy calls it."""

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
            if hasattr(part.__dict__.get("forward"), RULED_FORWARD)
        ]
        if ruled:
            raise UnsupportedError(
                f"The model has module rules ({', '.join(ruled)}), which cannot be pickled. Save"
                " its state_dict(), or call mezzo.undecorate(model) first."
            )
        original = getattr(self._forward, WRAPPED_FORWARD)
        return _unpickled_forward, (
            self._model,
            self._forward.mezzo_wrapper,
            None if original is type(self._model).forward else original,
        )
