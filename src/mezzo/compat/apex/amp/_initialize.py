"""`apex.amp.initialize`, `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    apply_overrides,
    find_opt_level,
    maybe_print,
    warn_or_err,
)
from mezzo.compat.apex.amp._casts import Handle, deactivate_casts
from mezzo.compat.apex.amp._scale_loss import LossScaler, attach_amp_stash
from mezzo.optim.bind_optimizer import adopt_half_parameters, bind_half_parameters
from mezzo.optim.binding import optimizer_binding
from mezzo.prepare import forward
from mezzo.prepare.decorate import decorate
from mezzo.prepare.decoration import decoration_of
from mezzo.scaling.gradients import parameters

Optimizer = torch.optim.Optimizer

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


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
    """Prepare models and optimizers for an opt level, in place, and return them as passed.

    May be called again with other models, or with the same models and a new optimizer: the last
    call defines the casts and loss scales.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = initialize(model, optimizer, opt_level="O2", verbosity=0)
    >>> model.weight.dtype, model(torch.ones(1, 4)).dtype
    (torch.float16, torch.float32)
    """
    _amp_state.set_verbosity(verbosity)
    if not enabled:
        deactivate_casts()
        _amp_state.initialize(Properties(), [])
        return models if optimizers is None else (models, optimizers)
    level = find_opt_level(opt_level)
    if not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses must be 1 or more, got {num_losses!r}.")
    properties = apply_overrides(
        level.properties,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    _print_options(level, properties)
    scalers = [
        LossScaler(
            properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale
        )
        for _ in range(num_losses)
    ]
    _initialize_all(models, optimizers, properties, cast_model_outputs)
    _amp_state.initialize(properties, scalers)
    return models if optimizers is None else (models, optimizers)


def state_dict() -> dict[str, dict[str, float | int]]:
    """Return scale and growth tracker of every loss, to save in a checkpoint. Synchronizes."""
    return {
        f"loss_scaler{index}": {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
        for index, scaler in enumerate(_amp_state.loss_scalers)
    }


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load a `state_dict` after `initialize`; print if the number of losses differs."""
    scalers = _amp_state.loss_scalers
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"amp.load_state_dict takes a dictionary, got {type(state_dict).__name__}. Pass what"
            " amp.state_dict() returned."
        )
    unknown = [name for name in state_dict if not name.startswith("loss_scaler")]
    unknown += [
        name for name, entry in state_dict.items() if {"loss_scale", "unskipped"} - set(entry)
    ]
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
        scaler.load(entry["loss_scale"], entry["unskipped"])


def _initialize_all(
    models: Any, optimizers: Any, properties: Properties, outputs: torch.dtype | None
) -> None:
    models, optimizers = _model_list(models), _optimizer_list(optimizers)
    _check_not_wrapped(models)
    _check_not_initialized(optimizers)
    release(models)
    _check_float32(models)
    deactivate_casts()
    _prepare(models, optimizers, properties, outputs)
    if properties.patch_torch_functions:
        handle = Handle(device_of(models), verbose=_amp_state.verbosity > 1)
        _amp_state.set_handle(handle)
        handle.deactivate_after(models)


def _print_options(level: OptLevel, properties: Properties) -> None:
    maybe_print(
        f"Selected optimization level {level.brief}\n\nDefaults for this optimization level are:",
        True,
    )
    maybe_print(_format_options(level.properties), True)
    maybe_print("After processing overrides, optimization options are:", True)
    maybe_print(_format_options(properties), True)


def _format_options(properties: Properties) -> str:
    return "\n".join(f"{name:22} : {value}" for name, value in properties.options.items())


def _model_list(models: Any) -> list[nn.Module]:
    """Return the models argument as a list."""
    if isinstance(models, nn.Module):
        return [models]
    if isinstance(models, list) and all(isinstance(model, nn.Module) for model in models):
        return models
    raise TypeError(f"models should be a model or a list of models, got {_type_names(models)}.")


def _optimizer_list(optimizers: Any) -> list[Optimizer]:
    """Return the optimizers argument as a list, empty for None."""
    if optimizers is None:
        return []
    several = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in several:
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise RuntimeError(
                "optimizers has an FP16_Optimizer, which keeps its own masters and loss scale. Pass"
                " the plain optimizer: amp.initialize adds both."
            )
    if all(isinstance(optimizer, Optimizer) for optimizer in several):
        return several
    raise TypeError(
        "optimizers should be an optimizer, a list of optimizers or None, got"
        f" {_type_names(optimizers)}."
    )


def _type_names(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(type(item).__name__ for item in value)}]"
    return type(value).__name__


def _check_not_wrapped(models: list[nn.Module]) -> None:
    """Raise if a model is already wrapped for data parallelism."""
    for model in models:
        if isinstance(model, _WRAPPERS):
            raise RuntimeError(
                f"models has a torch.nn.parallel.{type(model).__name__}, which keeps references to"
                " the current parameters. Wrap a model AFTER amp.initialize has returned it."
            )


def _check_not_initialized(optimizers: list[Optimizer]) -> None:
    """Raise if an optimizer was passed to `initialize` before."""
    if any(hasattr(optimizer, "_amp_stash") for optimizer in optimizers):
        raise RuntimeError(
            "An optimizer was already passed to amp.initialize, which accepts an optimizer once."
            " Create a new optimizer."
        )


def _check_float32(models: list[nn.Module]) -> None:
    """Raise if a model has 16-bit parameters or buffers, unless that is allowed."""
    if _amp_state.allow_incoming_model_not_fp32:
        return
    for model in models:
        tensors: list[tuple[str, str, torch.Tensor]] = [
            *(("param", name, parameter) for name, parameter in model.named_parameters()),
            *(("buffer", name, buffer) for name, buffer in model.named_buffers()),
        ]
        for kind, name, tensor in tensors:
            if tensor.dtype in HALF_DTYPES:
                warn_or_err(
                    f"Found {kind} {name} with type {tensor.type()}, expected float32:"
                    " amp.initialize casts the model to the level's dtype. Leave .half() out, or"
                    " call .float() on the model first."
                )


def _prepare(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    properties: Properties,
    outputs: torch.dtype | None,
) -> None:
    """Cast models and wrap their forward, bind masters, and attach amp's step to optimizers."""
    dtype = properties.cast_model_type
    if dtype in HALF_DTYPES:
        _decorate_models(models, optimizers, properties, outputs or torch.float32)
    elif dtype is torch.float32:
        _wrap_forwards(models, torch.float32, outputs or torch.float32)
    elif outputs is not None:
        _wrap_forwards(models, None, outputs)
    for optimizer in optimizers:
        if properties.master_weights and dtype not in HALF_DTYPES:
            bind_half_parameters(optimizer)
        if properties.master_weights:
            _bind_later_groups(optimizer)
        attach_amp_stash(optimizer, masters=bool(properties.master_weights))


def _bind_later_groups(optimizer: Optimizer) -> None:
    """Create masters for 16-bit parameters when their group is added to the optimizer."""
    original, binding = optimizer.add_param_group, optimizer_binding(optimizer)

    def add_param_group(_self: Optimizer, param_group: dict[str, Any]) -> None:
        original(param_group)
        if binding is not None:
            adopt_half_parameters(optimizer, binding.masters)

    optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]


def _decorate_models(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    properties: Properties,
    outputs: torch.dtype,
) -> None:
    dtype = cast("torch.dtype", properties.cast_model_type)
    masters = bool(properties.master_weights and optimizers)
    floating = [
        model
        for model in models
        if any(parameter.is_floating_point() for parameter in model.parameters())
    ]
    others = nn.ParameterList(_other_parameters(floating, optimizers))
    modules = (module for model in models for module in model.modules())
    keep_norms = properties.keep_batchnorm_fp32 and any(isinstance(m, BatchNorm) for m in modules)
    norms = [BatchNorm] if keep_norms else []
    decorate(
        [*floating, others] if len(others) else floating,
        cast("Any", optimizers or None),
        "O2" if masters else "O3",
        dtype=dtype,
        preset="apex",
        master="float32" if masters else None,
        # Parameters of an optimizer that belong to none of the models are not cast.
        keep_full=[*norms, others] if len(others) else norms,
        output_dtype=outputs,
        save_dtype="float32" if masters else None,
    )
    for model in models:
        _undo_list(model).extend(_cast_custom_batches(model, dtype, outputs))
        if not masters:
            _undo_list(model).append(model.register_state_dict_post_hook(_save_in_float32).remove)


def _other_parameters(
    models: list[nn.Module], optimizers: list[Optimizer]
) -> Iterator[nn.Parameter]:
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        yield from (
            cast("nn.Parameter", parameter)
            for parameter in parameters(optimizer)
            if id(parameter) not in owned
        )


def _wrap_forwards(
    models: list[nn.Module], input_dtype: torch.dtype | None, output_dtype: torch.dtype
) -> None:
    """Cast only inputs and outputs; an outer autocast region stays active inside."""
    for model in models:
        unwrap = forward.wrap_forward(
            forward.ForwardWrapper(
                Region(device_of([model]), False, None, None),
                input_dtype,
                output_dtype,
                defer_to_autocast=True,
            ),
            model,
        )
        _undo_list(model).append(unwrap)


def device_of(models: list[nn.Module]) -> str:
    """Return the device type of the models' parameters."""
    devices = (parameter.device.type for model in models for parameter in model.parameters())
    return next(devices, "cuda" if torch.cuda.is_available() else "cpu")


def _save_in_float32(
    _module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any
) -> None:
    """Cast a state dict to float32 when there are no master weights to save."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES:
            state[name] = value.float()


def _cast_custom_batches(
    model: nn.Module, inputs: torch.dtype, outputs: torch.dtype
) -> tuple[Callable[[], None], ...]:
    """Cast batches of custom classes by their `to(dtype)` with hooks; return their removers."""
    # Module-level functions, so that the model can be pickled.
    before = model.register_forward_pre_hook(partial(_cast_batch_inputs, inputs), with_kwargs=True)
    return before.remove, model.register_forward_hook(partial(_cast_batch_outputs, outputs)).remove


def _cast_batch_inputs(dtype: torch.dtype, _model: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast_batches((args, kwargs), dtype)


def _cast_batch_outputs(dtype: torch.dtype, _model: nn.Module, _args: Any, result: Any) -> Any:
    return _cast_batches(result, dtype)


def _cast_batches(values: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(
        lambda value: value.to(dtype) if _is_custom_batch(value) else value, values
    )


def _is_custom_batch(value: object) -> bool:
    """Return whether a value has a `to` method and is neither a tensor nor a torch object."""
    return not isinstance(
        value, torch.Tensor | nn.Module | torch.device | torch.dtype
    ) and callable(getattr(value, "to", None))


def release(models: list[nn.Module]) -> None:
    """Undo an earlier `initialize`; the models keep their current master weights as float32."""
    for model in models:
        for undo in reversed(model.__dict__.pop(_UNDO_ATTRIBUTE, ())):
            undo()
        for module in model.modules():
            decoration = decoration_of(module)
            if decoration is not None:
                decoration.undo()


_UNDO_ATTRIBUTE = "_amp_undo"


class _Undo(list[Callable[[], None]]):
    """Functions that undo an earlier `initialize`, stored on the model so that they die with it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy as an empty list: a copied model shares no hooks with the original."""
        return _Undo, ()


def _undo_list(model: nn.Module) -> _Undo:
    undo_list: _Undo = model.__dict__.setdefault(_UNDO_ATTRIBUTE, _Undo())
    return undo_list
