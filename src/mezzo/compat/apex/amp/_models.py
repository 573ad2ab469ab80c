"""What `initialize` does to models and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from mezzo._dtypes import HALF_DTYPES
from mezzo._torch import BatchNorm
from mezzo.autocasting.regions import Region
from mezzo.compat.apex.amp._batches import cast_custom_batches
from mezzo.compat.apex.amp._properties import Properties
from mezzo.compat.apex.amp._stash import attach
from mezzo.optim.bound import bound_of
from mezzo.optim.halves import adopt_halves, step_halves
from mezzo.prepare import door
from mezzo.prepare.decorate import decorate
from mezzo.prepare.decoration import decoration_of
from mezzo.scaling.gradients import parameters

Optimizer = torch.optim.Optimizer

_MARK = "_amp_undo"


class _Undo(list[Callable[[], None]]):
    """What takes off what an earlier `initialize` has put on a model. It lies on the model, so that nothing else keeps that alive."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has nothing of the original's to take off."""
        return _Undo, ()


def _undo(model: nn.Module) -> _Undo:
    found: _Undo = model.__dict__.setdefault(_MARK, _Undo())
    return found


def release(models: list[nn.Module]) -> None:
    """Make models as they were before an earlier `initialize`, with their current exact weights."""
    for model in models:
        for undo in reversed(model.__dict__.pop(_MARK, ())):
            undo()
        for part in model.modules():
            decoration = decoration_of(part)
            if decoration is not None:
                decoration.undo()


def prepare(models: list[nn.Module], optimizers: list[Optimizer], properties: Properties, outputs: torch.dtype | None) -> None:
    """Cast and open models, and let optimizers heed `scale_loss`."""
    dtype = properties.cast_model_type
    if dtype in HALF_DTYPES:
        _convert(models, optimizers, properties, outputs or torch.float32)
    elif dtype is torch.float32:
        _open(models, torch.float32, outputs or torch.float32)
    elif outputs is not None:
        _open(models, None, outputs)
    for optimizer in optimizers:
        if properties.master_weights and dtype not in HALF_DTYPES:
            step_halves(optimizer)
        if properties.master_weights:
            _follow_groups(optimizer)
        attach(optimizer, masters=bool(properties.master_weights))


def _follow_groups(optimizer: Optimizer) -> None:
    """Let 16-bit parameters of groups that are added later have masters at once, as the others have."""
    own, bound = optimizer.add_param_group, bound_of(optimizer)

    def add_param_group(_self: Optimizer, param_group: dict[str, Any]) -> None:
        own(param_group)
        if bound is not None:
            adopt_halves(optimizer, bound.masters)

    optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]


def device_of(models: list[nn.Module]) -> str:
    """The kind of device that the models' parameters are on."""
    found = (parameter.device.type for model in models for parameter in model.parameters())
    return next(found, "cuda" if torch.cuda.is_available() else "cpu")


def _convert(models: list[nn.Module], optimizers: list[Optimizer], properties: Properties, outputs: torch.dtype) -> None:
    dtype, masters = cast("torch.dtype", properties.cast_model_type), bool(properties.master_weights and optimizers)
    floating = [model for model in models if any(parameter.is_floating_point() for parameter in model.parameters())]
    strangers = nn.ParameterList(_strangers(floating, optimizers))
    norms = [BatchNorm] if properties.keep_batchnorm_fp32 and any(isinstance(part, BatchNorm) for model in models for part in model.modules()) else []
    decorate(
        [*floating, strangers] if len(strangers) else floating,
        cast("Any", optimizers or None),
        "O2" if masters else "O3",
        dtype=dtype,
        preset="apex",
        master="float32" if masters else None,
        # What an optimizer updates beside the models is left as it is.
        keep_full=[*norms, strangers] if len(strangers) else norms,
        output_dtype=outputs,
        save_dtype="float32" if masters else None,
    )
    for model in models:
        _undo(model).extend(cast_custom_batches(model, dtype, outputs))
        if not masters:
            _undo(model).append(model.register_state_dict_post_hook(_save_in_float32).remove)


def _strangers(models: list[nn.Module], optimizers: list[Optimizer]) -> Iterator[nn.Parameter]:
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        yield from (cast("nn.Parameter", parameter) for parameter in parameters(optimizer) if id(parameter) not in owned)


def _open(models: list[nn.Module], inputs: torch.dtype | None, outputs: torch.dtype) -> None:
    """Cast what goes in and comes out, and nothing else: inside, a region goes on as it is."""
    for model in models:
        hung = door.hang(door.Door(Region(device_of([model]), False, None, None), inputs, outputs, yields=True), model)
        _undo(model).append(hung)


def _save_in_float32(_module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    """Let `state_dict` give float32 where there are no exact weights to give."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES:
            state[name] = value.float()
