"""`paddle.amp.decorate`: master weights, excluded layers, dtypes of saved parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from glob import escape
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

import mezzo
from mezzo._casting import cast
from mezzo._torch import BatchNorm, InstanceNorm
from mezzo.compat.paddle.amp._auto_cast import DTYPES
from mezzo.compat.paddle.amp._support import warn_if_slow
from mezzo.compat.paddle.nn._clip import shared_clip_norm
from mezzo.compat.paddle.parallel import DataParallel
from mezzo.optim.binding import optimizer_binding
from mezzo.policy.types import Master
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.half_weights import HalfWeights
from mezzo.scaling.gradients import parameters

_BATCH_NORMS: tuple[type[nn.Module], ...] = (BatchNorm,)
"""Always kept in float32, subclasses included."""
_OTHER_NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, InstanceNorm)
"""Kept in float32 with float16 only. Paddle casts them to bfloat16, and group norms to either."""

_SAVE_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_WRAPPERS = (DataParallel, nn.DataParallel, nn.parallel.DistributedDataParallel)


def decorate(
    models: Any,
    optimizers: Any = None,
    level: str = "O1",
    dtype: str = "float16",
    master_weight: bool | None = None,
    save_dtype: str | None = None,
    master_grad: bool = False,
    excluded_layers: Any = None,
) -> Any:
    """Cast parameters and buffers to 16 bits in place at `O2`; do nothing at `O1`.

    Stands for `paddle.amp.decorate` and returns its arguments in the shape they were passed.
    Batch norms stay float32; so do layer and instance norms with float16, and `excluded_layers`.
    With optimizers, float32 master weights are kept unless `master_weight=False`. Without
    optimizers there are none, and small updates are lost. Optimizers compute in float32 whether
    passed or not. Inside `auto_cast`, a decorated model runs as that region's lists say.

    Differences from Paddle:

    - all arguments are checked before anything changes;
    - models on a CPU are decorated too;
    - outside of `auto_cast` a decorated model runs at its own level;
    - master weights start from the original float32 values, not from rounded ones;
    - `master_grad` applies to these models only and does not depend on `auto_cast`;
    - decorating again with another dtype gives that dtype throughout;
    - `mezzo.undecorate` restores the model and the optimizers.

    >>> model = decorate(models=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), level="O2")
    >>> model[0].weight.dtype, model[1].weight.dtype
    (torch.float16, torch.float32)
    """
    if not isinstance(level, str) or level not in ("O1", "O2"):
        raise ValueError(
            "level should be O1 or O2, O1 represent AMP train mode, O2 represent Pure fp16 train"
            f" mode. It is {level!r}."
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype only support float16 or bfloat16. It is {dtype!r}.")
    if level == "O2":
        model_list, passed = _check_models(models), _check_optimizers(optimizers)
        saved_as = _parse_save_dtype(save_dtype)
        options: dict[str, Any] = {
            "dtype": dtype,
            "keep_full": keep_full_list(model_list, dtype, excluded_layers),
        }
        # An optimizer that was not passed keeps the masters it has; like all of Paddle's it
        # computes in float32.
        optimizer_list = passed or optimizers_of_models(model_list)
        masters = master_weight is not False if passed else any(map(_has_masters, optimizer_list))
        options["master"] = "float32" if masters else None
        if master_grad:
            options["grad_dtype"] = "float32"
        warn_if_slow(dtype)
        _convert(model_list, optimizer_list, options)
        if saved_as is not None:
            for model in model_list:
                _save_as(model, saved_as)
    return models if optimizers is None else (models, optimizers)


def keep_full_list(models: list[nn.Module], dtype: str, excluded: Any) -> list[nn.Module | str]:
    """Return the layers and tensor names that stay float32, as `mezzo.decorate(keep_full=)`.

    An excluded layer stays float32 with everything inside it. A layer of an excluded type keeps
    only its own tensors: an excluded `Sequential` type does not keep the layers in it.
    """
    layers, types = _split_excluded(excluded)
    norms = _BATCH_NORMS if dtype == "bfloat16" else _BATCH_NORMS + _OTHER_NORMS
    keep_full: list[nn.Module | str] = [
        module
        for model in models
        for module in model.modules()
        if any(module is layer for layer in layers)
    ]
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, norms + types):
                has_children = bool(list(module.children()))
                keep_full += _tensor_names(name, module) if has_children else [module]
    return keep_full


def register_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Register an optimizer so that `decorate` finds it when it is not passed, as in Paddle."""
    _registered[next(_numbers)] = optimizer


def optimizers_of_models(models: Iterable[torch.nn.Module]) -> list[torch.optim.Optimizer]:
    """Return the registered optimizers that step only parameters of these models.

    Of two optimizers for the same parameters, the later one is returned.
    """
    remaining = {id(parameter) for model in models for parameter in model.parameters()}
    optimizers = []
    for optimizer in reversed(list(_registered.values())):
        stepped = {id(parameter) for parameter in parameters(optimizer)}
        if stepped and stepped <= remaining:
            remaining -= stepped
            optimizers.append(optimizer)
    return optimizers


_registered: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()
"""Every living optimizer of `paddle.optimizer`, in the order of construction."""
_numbers = itertools.count()


# -- arguments -------------------------------------------------------------------------------------


def _check_models(models: Any) -> list[nn.Module]:
    if not isinstance(models, nn.Module | list):
        raise TypeError(
            "models must be either a single model or a list of models. It is"
            f" {type(models).__name__}."
        )
    model_list = models if isinstance(models, list) else [models]
    for model in model_list:
        if isinstance(model, _WRAPPERS):
            raise RuntimeError(
                "For distributed AMP training, you should first use paddle.amp.decorate() to"
                " decorate origin model, and then call paddle.DataParallel get distributed model."
            )
        if not isinstance(model, nn.Module):
            raise RuntimeError(
                "Current train mode is pure fp16, models should be paddle.nn.Layer, but receive"
                f" {type(model)}. Pass torch.nn.Modules."
            )
    return model_list


def _check_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    if not isinstance(optimizers, torch.optim.Optimizer | list):
        raise TypeError(
            "optimizers must be either a single optimizer or a list of optimizers. It is"
            f" {type(optimizers).__name__}."
        )
    optimizer_list = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in optimizer_list:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise RuntimeError(
                "Current train mode is pure fp16, optimizers should be paddle.optimizer.Optimizer,"
                f" but receive {type(optimizer)}."
            )
    return optimizer_list


def _parse_save_dtype(save_dtype: Any) -> torch.dtype | None:
    if save_dtype is not None and (
        not isinstance(save_dtype, str) or save_dtype not in _SAVE_DTYPES
    ):
        raise ValueError(
            "save_dtype can only be float16 float32 or float64, but your input save_dtype is"
            f" {save_dtype}. bfloat16 is allowed, too."
        )
    return None if save_dtype is None else _SAVE_DTYPES[save_dtype]


def _split_excluded(excluded: Any) -> tuple[tuple[nn.Module, ...], tuple[type, ...]]:
    """Split `excluded_layers` into layers and types of layers."""
    entries = excluded if isinstance(excluded, list) else [] if excluded is None else [excluded]
    if not isinstance(excluded, list) and entries and not _is_layer(excluded):
        raise TypeError(
            "excluded_layers must be either a nn.Layer instance/type or a list of nn.Layer"
            f" instances/types. It is {excluded!r}."
        )
    for entry in entries:
        if not _is_layer(entry):
            raise TypeError(
                f"issubclass() arg 1 must be a class: excluded_layers has {entry!r}. It may have"
                " layers and their types."
            )
    layers = tuple(entry for entry in entries if isinstance(entry, nn.Module))
    return layers, tuple(entry for entry in entries if isinstance(entry, type))


def _is_layer(entry: Any) -> bool:
    return isinstance(entry, nn.Module) or (
        isinstance(entry, type) and issubclass(entry, nn.Module)
    )


def _tensor_names(prefix: str, module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's own tensors, escaped as patterns of `keep_full=`."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                yield escape(f"{prefix}.{name}" if prefix else name)


# -- conversion ------------------------------------------------------------------------------------


def _convert(models: list[nn.Module], optimizers: list[Any], options: dict[str, Any]) -> None:
    _undo_earlier(models, optimizers)
    for optimizer in optimizers:
        binding = optimizer_binding(optimizer)
        if binding is not None and decoration_of(optimizer) is None:
            # Bound at construction, because its parameters were 16-bit already.
            binding.unbind()
    mezzo.decorate(
        models,
        optimizers or None,
        "O2",
        preset="paddle",
        on_unsupported="ignore",  # `warn_if_slow` has warned
        clip_norm=shared_clip_norm(optimizers) if optimizers else None,
        defer_to_autocast=True,
        **options,
    )


def _undo_earlier(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Undo an earlier decoration that covers nothing but these models and optimizers.

    `mezzo.decorate` rejects decorated models; Paddle allows decorating again.
    """
    decorations = {found for model in models if (found := decoration_of(model)) is not None}
    for decoration in decorations:
        if all(
            any(optimizer is other for other in optimizers) for optimizer in decoration.optimizers
        ) and all(any(model is other for other in models) for model in decoration.models):
            decoration.undo()


def _has_masters(optimizer: torch.optim.Optimizer) -> bool:
    decoration = decoration_of(optimizer)
    return decoration is not None and decoration.plan.master is Master.FLOAT32


def _save_as(model: nn.Module, dtype: torch.dtype) -> None:
    """Make `state_dict` return floating-point entries in a dtype, from the masters if any."""
    decoration = decoration_of(model)
    handle = model.register_state_dict_post_hook(
        _SaveDtypeHook(dtype, None if decoration is None else decoration.weights)
    )
    if decoration is not None:
        decoration.undo_stack.callback(handle.remove)


class _SaveDtypeHook:
    """State dict hook that casts entries to a dtype.

    A copied or unpickled model keeps the hook but has no master weights.
    """

    def __init__(self, dtype: torch.dtype, weights: HalfWeights | None = None) -> None:
        self._dtype, self._weights = dtype, weights

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        weights = self._weights
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            key = prefix + name
            # With keep_vars=True the entry is the parameter itself and must stay it.
            if key in state and state[key].is_floating_point() and state[key] is not tensor:
                value = state[key]
                if weights is not None and tensor in weights:
                    value = weights.read(tensor)
                state[key] = cast(value, self._dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _SaveDtypeHook, (self._dtype,)
