"""`amp.initialize`: check the arguments, prepare models and optimizers, save and load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from mezzo._dtypes import HALF_DTYPES
from mezzo._torch import BatchNorm, pytree
from mezzo.autocasting.regions import Region
from mezzo.compat.apex.amp._amp_state import (
    OptLevel,
    Properties,
    _amp_state,
    level_of,
    maybe_print,
    overridden,
    warn_or_err,
)
from mezzo.compat.apex.amp._casts import Handle, stop_casting
from mezzo.compat.apex.amp._scale_loss import LossScaler, attach
from mezzo.optim.attach import adopt_half_parameters, bind_half_parameters
from mezzo.optim.binding import optimizer_binding
from mezzo.prepare import forward
from mezzo.prepare.decorate import decorate
from mezzo.prepare.decoration import decoration_of
from mezzo.scaling.gradients import parameters

Optimizer = torch.optim.Optimizer

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_HALF = (torch.float16, torch.bfloat16)


def models_of(models: Any) -> list[nn.Module]:
    """The models that were passed: one, or a list of them."""
    if isinstance(models, nn.Module):
        return [models]
    if isinstance(models, list) and all(isinstance(model, nn.Module) for model in models):
        return models
    raise TypeError(f"models should be a model or a list of models, got {_kinds(models)}.")


def optimizers_of(optimizers: Any) -> list[Optimizer]:
    """The optimizers that were passed: none, one, or a list of them."""
    several = (
        [] if optimizers is None else optimizers if isinstance(optimizers, list) else [optimizers]
    )
    for optimizer in several:
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise RuntimeError(
                "optimizers has an FP16_Optimizer, which keeps masters and a scale of its own. Pass"
                " the plain optimizer: amp.initialize does both."
            )
    if all(isinstance(optimizer, Optimizer) for optimizer in several):
        return several
    raise TypeError(
        "optimizers should be an optimizer, a list of optimizers or None, got"
        f" {_kinds(optimizers)}."
    )


def _kinds(given: Any) -> str:
    return (
        f"[{', '.join(type(one).__name__ for one in given)}]"
        if isinstance(given, list)
        else type(given).__name__
    )


def refuse_wrapped(models: list[nn.Module]) -> None:
    """Refuse models that are wrapped for several devices already."""
    for model in models:
        if isinstance(model, _WRAPPERS):
            raise RuntimeError(
                f"models has a torch.nn.parallel.{type(model).__name__}, which holds on to the"
                " parameters as they are. Wrap a model AFTER amp.initialize has returned it."
            )


def refuse_known(optimizers: list[Optimizer]) -> None:
    """Refuse optimizers that went through `initialize` before."""
    if any(hasattr(optimizer, "_amp_stash") for optimizer in optimizers):
        raise RuntimeError(
            "An optimizer goes through amp.initialize once, and one of these did before. Make a new"
            " one for another initialize."
        )


def refuse_half(models: list[nn.Module]) -> None:
    """Refuse models that come in 16 bits."""
    if _amp_state.allow_incoming_model_not_fp32:
        return
    for model in models:
        for what, tensors in (
            ("param", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for name, tensor in tensors:
                if tensor.dtype in _HALF:
                    warn_or_err(
                        f"Found {what} {name} with type {tensor.type()}, expected float32:"
                        " amp.initialize casts whatever the level asks for. Leave .half() out, or"
                        " call .float() on the model first."
                    )


def cast_custom_batches(
    model: nn.Module, inputs: torch.dtype, outputs: torch.dtype
) -> tuple[Callable[[], None], ...]:
    """Let a model cast custom batches on the way in and out by their own `to(dtype)`; what comes back takes that off again."""
    # Functions of this module, so that the model can be pickled.
    before = model.register_forward_pre_hook(partial(_before, inputs), with_kwargs=True)
    return before.remove, model.register_forward_hook(partial(_after, outputs)).remove


def _before(dtype: torch.dtype, _model: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast((args, kwargs), dtype)


def _after(dtype: torch.dtype, _model: nn.Module, _args: Any, result: Any) -> Any:
    return _cast(result, dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda value: value.to(dtype) if _is_custom(value) else value, values)


def _is_custom(value: object) -> bool:
    """Whether a value is neither a tensor, which the model's door casts, nor anything of torch's, but has a method `to`."""
    return not isinstance(
        value, torch.Tensor | nn.Module | torch.device | torch.dtype
    ) and callable(getattr(value, "to", None))


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


def prepare(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    properties: Properties,
    outputs: torch.dtype | None,
) -> None:
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
            bind_half_parameters(optimizer)
        if properties.master_weights:
            _follow_groups(optimizer)
        attach(optimizer, masters=bool(properties.master_weights))


def _follow_groups(optimizer: Optimizer) -> None:
    """Let 16-bit parameters of groups that are added later have masters at once, as the others have."""
    own, bound = optimizer.add_param_group, optimizer_binding(optimizer)

    def add_param_group(_self: Optimizer, param_group: dict[str, Any]) -> None:
        own(param_group)
        if bound is not None:
            adopt_half_parameters(optimizer, bound.masters)

    optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]


def device_of(models: list[nn.Module]) -> str:
    """The kind of device that the models' parameters are on."""
    found = (parameter.device.type for model in models for parameter in model.parameters())
    return next(found, "cuda" if torch.cuda.is_available() else "cpu")


def _convert(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    properties: Properties,
    outputs: torch.dtype,
) -> None:
    dtype, masters = (
        cast("torch.dtype", properties.cast_model_type),
        bool(properties.master_weights and optimizers),
    )
    floating = [
        model
        for model in models
        if any(parameter.is_floating_point() for parameter in model.parameters())
    ]
    strangers = nn.ParameterList(_unknown_parameters(floating, optimizers))
    norms = (
        [BatchNorm]
        if properties.keep_batchnorm_fp32
        and any(isinstance(part, BatchNorm) for model in models for part in model.modules())
        else []
    )
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


def _unknown_parameters(
    models: list[nn.Module], optimizers: list[Optimizer]
) -> Iterator[nn.Parameter]:
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        yield from (
            cast("nn.Parameter", parameter)
            for parameter in parameters(optimizer)
            if id(parameter) not in owned
        )


def _open(models: list[nn.Module], inputs: torch.dtype | None, outputs: torch.dtype) -> None:
    """Cast what goes in and comes out, and nothing else: inside, a region goes on as it is."""
    for model in models:
        hung = forward.wrap_forward(
            forward.ForwardWrapper(
                Region(device_of([model]), False, None, None),
                inputs,
                outputs,
                defer_to_autocast=True,
            ),
            model,
        )
        _undo(model).append(hung)


def _save_in_float32(
    _module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any
) -> None:
    """Let `state_dict` give float32 where there are no exact weights to give."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES:
            state[name] = value.float()


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Make models and optimizers ready for a level; both come back as the objects they were, in lists where lists were passed.

    It may be called again, for other models or for the same ones with a new optimizer: the last
    call says which casts and scales hold.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = initialize(model, optimizer, opt_level="O2", verbosity=0)
    >>> model.weight.dtype, model(torch.ones(1, 4)).dtype
    (torch.float16, torch.float32)
    """
    _amp_state.verbosity = verbosity
    if not enabled:
        stop_casting()
        _amp_state.opt_properties, _amp_state.loss_scalers = Properties(), []
        return models if optimizers is None else (models, optimizers)
    level = level_of(opt_level)
    if not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses={num_losses!r}: it is the number of losses, 1 or more.")
    properties = overridden(
        level.properties,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    _tell(level, properties)
    scalers = [
        LossScaler(
            properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale
        )
        for _ in range(num_losses)
    ]
    _set_up(models, optimizers, properties, cast_model_outputs)
    _amp_state.opt_properties, _amp_state.loss_scalers = properties, scalers
    return models if optimizers is None else (models, optimizers)


def _set_up(
    models: Any, optimizers: Any, properties: Properties, outputs: torch.dtype | None
) -> None:
    several, stepping = models_of(models), optimizers_of(optimizers)
    refuse_wrapped(several)
    refuse_known(stepping)
    release(several)
    refuse_half(several)
    stop_casting()
    prepare(several, stepping, properties, outputs)
    if properties.patch_torch_functions:
        _amp_state.handle = Handle(device_of(several), verbose=_amp_state.verbosity > 1)
        _amp_state.handle.last_as_long_as(several)


def _tell(level: OptLevel, properties: Properties) -> None:
    maybe_print(
        f"Selected optimization level {level.brief}\n\nDefaults for this optimization level are:",
        True,
    )
    maybe_print(_listed(level.properties), True)
    maybe_print("After processing overrides, optimization options are:", True)
    maybe_print(_listed(properties), True)


def _listed(properties: Properties) -> str:
    return "\n".join(f"{name:22} : {value}" for name, value in properties.options.items())


def state_dict() -> dict[str, dict[str, float | int]]:
    """Every loss's scale and how many steps in a row were good; it belongs into a checkpoint beside model and optimizer."""
    return {
        f"loss_scaler{index}": {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
        for index, scaler in enumerate(_amp_state.loss_scalers)
    }


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Take over what `state_dict` gave, after `initialize`. Too many or too few are said, names that mean nothing are refused."""
    scalers = _amp_state.loss_scalers
    unknown = [name for name in state_dict if not name.startswith("loss_scaler")]
    if unknown:
        raise RuntimeError(
            f"Unexpected key(s) in state_dict: {', '.join(map(repr, unknown))}. Pass what"
            " amp.state_dict() returned."
        )
    if len(state_dict) != len(scalers):
        maybe_print(
            f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)}"
            " loss_scalers are used"
        )
    for scaler, entry in zip(scalers, state_dict.values(), strict=False):
        scaler._loss_scale, scaler._unskipped = entry["loss_scale"], entry["unskipped"]
