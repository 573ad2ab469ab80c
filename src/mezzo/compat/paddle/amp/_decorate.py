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
from mezzo.compat.paddle.nn import norm_for_all
from mezzo.compat.paddle.parallel import DataParallel
from mezzo.optim.binding import optimizer_binding
from mezzo.policy.types import Master
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.half_weights import HalfWeights
from mezzo.scaling.gradients import parameters

BATCH_NORMS: tuple[type[nn.Module], ...] = (BatchNorm,)
"""Kept in float32 always, subclasses included."""
OTHER_NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, InstanceNorm)
"""Kept in float32 beside float16 alone: Paddle casts them to bfloat16, and group norms to both."""


def read_excluded(excluded: Any) -> tuple[tuple[nn.Module, ...], tuple[type, ...]]:
    """The layers and the types in `excluded_layers`."""
    several = excluded if isinstance(excluded, list) else [] if excluded is None else [excluded]
    if not isinstance(excluded, list) and several and not _is_layer(excluded):
        raise TypeError(
            "excluded_layers must be either a nn.Layer instance/type or a list of nn.Layer"
            f" instances/types. It is {excluded!r}."
        )
    for one in several:
        if not _is_layer(one):
            raise TypeError(
                f"issubclass() arg 1 must be a class: excluded_layers has {one!r}. It may have"
                " layers and their types."
            )
    return tuple(one for one in several if isinstance(one, nn.Module)), tuple(
        one for one in several if isinstance(one, type)
    )


def kept(models: list[nn.Module], dtype: str, excluded: Any) -> list[nn.Module | str]:
    """What stays in float32, as `keep_full` takes it. A layer is kept with all that is in it, a type's layers without: a kept Sequential casts its parts."""
    layers, types = read_excluded(excluded)
    norms = BATCH_NORMS if dtype == "bfloat16" else BATCH_NORMS + OTHER_NORMS
    found: list[nn.Module | str] = [
        one for model in models for one in model.modules() if any(one is layer for layer in layers)
    ]
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, norms + types):
                found += [module] if not list(module.children()) else list(_own_names(name, module))
    return found


def _own_names(prefix: str, module: nn.Module) -> Iterator[str]:
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                yield escape(f"{prefix}.{name}" if prefix else name)


def _is_layer(one: Any) -> bool:
    return isinstance(one, nn.Module) or (isinstance(one, type) and issubclass(one, nn.Module))


_SAVED = {
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
    """Make parameters and buffers 16-bit at `O2`, in place; at `O1` nothing is done. What was passed comes back in the same shape.

    Batch norms stay float32, layer and instance norms beside float16 only, and so does what
    `excluded_layers` has. With optimizers, float32 masters are kept unless `master_weight=False`;
    without any there are none, and small updates are lost. Optimizers compute in float32, named or
    not. Inside `auto_cast` a decorated model runs as that says.

    It differs from Paddle's where that surprises: everything is checked before anything changes; a
    CPU is decorated too, and a model outside of `auto_cast` runs at its level by itself; masters
    start from the original float32 values; `master_grad` holds for these models alone and needs no
    `auto_cast`; decorating anew with another dtype gives that dtype throughout; `mezzo.undecorate`
    puts everything back.

    >>> model = decorate(models=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), level="O2")
    >>> model[0].weight.dtype, model[1].weight.dtype
    (torch.float16, torch.float32)
    """
    if level not in ("O1", "O2"):
        raise ValueError(
            "level should be O1 or O2, O1 represent AMP train mode, O2 represent Pure fp16 train"
            f" mode. It is {level!r}."
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype only support float16 or bfloat16. It is {dtype!r}.")
    if level == "O2":
        several, given, saved = _models(models), _optimizers(optimizers), _save_dtype(save_dtype)
        words: dict[str, Any] = {"dtype": dtype, "keep_full": kept(several, dtype, excluded_layers)}
        # Who steps these models and was not named computes in float32, as every optimizer of
        # Paddle's, and keeps the masters that it has.
        named = given or optimizers_of_models(several)
        words["master"] = (
            "float32"
            if (master_weight is not False if given else any(map(_has_masters, named)))
            else None
        )
        words |= {"grad_dtype": "float32"} if master_grad else {}
        _convert(several, named, words)
        if saved is not None:
            for model in several:
                _save_as(model, saved)
    return models if optimizers is None else (models, optimizers)


def _convert(models: list[nn.Module], optimizers: list[Any], words: dict[str, Any]) -> None:
    _refresh(models, optimizers)
    for optimizer in optimizers:
        bound = optimizer_binding(optimizer)
        if bound is not None and decoration_of(optimizer) is None:
            # It was made for parameters that were 16-bit already.
            bound.unbind()
    clip_norm = norm_for_all(optimizers) if optimizers else None
    mezzo.decorate(
        models,
        optimizers or None,
        "O2",
        preset="paddle",
        clip_norm=clip_norm,
        defer_to_autocast=True,
        **words,
    )


def _models(models: Any) -> list[nn.Module]:
    if not isinstance(models, nn.Module | list):
        raise TypeError(
            "models must be either a single model or a list of models. It is"
            f" {type(models).__name__}."
        )
    several = models if isinstance(models, list) else [models]
    for one in several:
        if isinstance(one, _WRAPPERS):
            raise RuntimeError(
                "For distributed AMP training, you should first use paddle.amp.decorate() to"
                " decorate origin model, and then call paddle.DataParallel get distributed model."
            )
        if not isinstance(one, nn.Module):
            raise RuntimeError(
                "Current train mode is pure fp16, models should be paddle.nn.Layer, but receive"
                f" {type(one)}. Pass torch.nn.Modules."
            )
    return several


def _optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    if not isinstance(optimizers, torch.optim.Optimizer | list):
        raise TypeError(
            "optimizers must be either a single optimizer or a list of optimizers. It is"
            f" {type(optimizers).__name__}."
        )
    several = optimizers if isinstance(optimizers, list) else [optimizers]
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise RuntimeError(
                "Current train mode is pure fp16, optimizers should be paddle.optimizer.Optimizer,"
                f" but receive {type(one)}."
            )
    return several


def _save_dtype(word: Any) -> torch.dtype | None:
    if word is not None and word not in _SAVED:
        raise ValueError(
            "save_dtype can only be float16 float32 or float64, but your input save_dtype is"
            f" {word}. bfloat16 is allowed, too."
        )
    return None if word is None else _SAVED[word]


def _refresh(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Undo an earlier decoration of these, if nothing else was in it: mezzo refuses to decorate twice, and Paddle does not."""
    for found in {decoration for one in models if (decoration := decoration_of(one)) is not None}:
        if all(any(one is given for given in optimizers) for one in found.optimizers) and all(
            any(one is given for given in models) for one in found.models
        ):
            found.undo()


def _has_masters(optimizer: torch.optim.Optimizer) -> bool:
    found = decoration_of(optimizer)
    return found is not None and found.plan.master is Master.FLOAT32


def _save_as(model: nn.Module, dtype: torch.dtype) -> None:
    """Let `state_dict` give every floating-point entry in a dtype, as exact as there is one; the parameters stay as they are."""
    found = decoration_of(model)
    handle = model.register_state_dict_post_hook(
        _Saved(dtype, None if found is None else found.weights)
    )
    if found is not None:
        found.undo_stack.callback(handle.remove)


class _Saved:
    """A hook that gives a state in a dtype. Copies of the model keep it, and have no exact weights."""

    def __init__(self, dtype: torch.dtype, weights: HalfWeights | None = None) -> None:
        self._dtype, self._weights = dtype, weights

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            key = prefix + name
            # With keep_vars=True the caller wants the parameters themselves.
            if key in state and state[key].is_floating_point() and state[key] is not tensor:
                state[key] = cast(
                    (
                        self._weights.read(tensor)
                        if self._weights is not None and tensor in self._weights
                        else state[key]
                    ),
                    self._dtype,
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Saved, (self._dtype,)


def optimizers_of_models(models: Iterable[torch.nn.Module]) -> list[torch.optim.Optimizer]:
    """The optimizers that step parameters of models and no others, and were not named with them; of two for the same parameters the later one."""
    free = {id(one) for model in models for one in model.parameters()}
    found = []
    for optimizer in reversed(list(_registered.values())):
        own = {id(one) for one in parameters(optimizer)}
        if own <= free:
            free -= own
            found.append(optimizer)
    return found


_registered: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()
"""Every optimizer that is still there, in the order they were made."""
_numbers = itertools.count()


def register_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let `decorate` find an optimizer that is not passed to it, as Paddle does."""
    _registered[next(_numbers)] = optimizer
