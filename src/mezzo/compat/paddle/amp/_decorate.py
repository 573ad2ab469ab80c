"""`decorate`: 16-bit parameters, in Paddle's words."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import mezzo
from mezzo._casting import cast
from mezzo.compat.paddle._clip import norm_for_all
from mezzo.compat.paddle.amp import _excluded
from mezzo.compat.paddle.amp._words import DTYPES
from mezzo.compat.paddle.parallel import DataParallel
from mezzo.prepare.decoration import decoration_of

_SAVED = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_WRAPPERS = (DataParallel, nn.DataParallel, nn.parallel.DistributedDataParallel)


def decorate(
    models: Any,
    optimizers: Any = None,
    level: str = "O1",
    dtype: str = "float16",
    master_weight: bool | None = None,  # noqa: FBT001 - Paddle's call shape
    save_dtype: str | None = None,
    master_grad: bool = False,  # noqa: FBT001, FBT002
    excluded_layers: Any = None,
) -> Any:
    """Make parameters and buffers 16-bit at `O2`, in place; at `O1` nothing is done. What was passed comes back in the same shape.

    Batch norms stay float32, layer and instance norms beside float16 only, and so does what `excluded_layers` has. With optimizers, float32 masters are kept
    unless `master_weight=False`; without any there are none, and small updates are lost. Inside `auto_cast` a decorated model runs as that says.

    It differs from Paddle's where that surprises: everything is checked before anything changes; a CPU is decorated too, and a model outside of `auto_cast` runs
    at its level by itself; masters start from the original float32 values; `master_grad` holds for these models alone and needs no `auto_cast`; decorating
    anew with another dtype gives that dtype throughout; `mezzo.undecorate` puts everything back.

    >>> model = decorate(models=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), level="O2")
    >>> model[0].weight.dtype, model[1].weight.dtype
    (torch.float16, torch.float32)
    """
    if level not in ("O1", "O2"):
        raise ValueError(f"level should be O1 or O2, O1 represent AMP train mode, O2 represent Pure fp16 train mode. It is {level!r}.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype only support float16 or bfloat16. It is {dtype!r}.")
    if level == "O2":
        several, stepping = _models(models), _optimizers(optimizers)
        saved = _save_dtype(save_dtype)
        _refresh(several, stepping)
        _convert(several, stepping, dtype, master_weight is not False, master_grad, excluded_layers)
        if saved is not None:
            for model in several:
                _save_as(model, saved)
    return models if optimizers is None else (models, optimizers)


def _convert(models: list[nn.Module], optimizers: list[Any], dtype: str, masters: bool, master_grad: bool, excluded: Any) -> None:  # noqa: FBT001
    words: dict[str, Any] = {"grad_dtype": "float32"} if master_grad else {}
    mezzo.decorate(
        models,
        optimizers or None,
        "O2",
        preset="paddle",
        dtype=dtype,
        keep_full=_excluded.kept(models, dtype, excluded),
        master="float32" if masters and optimizers else None,
        clip_norm=norm_for_all(optimizers) if optimizers else None,
        yields=True,
        **words,
    )


def _models(models: Any) -> list[nn.Module]:
    if not isinstance(models, nn.Module | list):
        raise TypeError(f"models must be either a single model or a list of models. It is {type(models).__name__}.")
    several = models if isinstance(models, list) else [models]
    for one in several:
        if isinstance(one, _WRAPPERS):
            raise RuntimeError(  # noqa: TRY004 - Paddle's
                "For distributed AMP training, you should first use paddle.amp.decorate() to decorate origin model, and then call paddle.DataParallel get "
                "distributed model."
            )
        if not isinstance(one, nn.Module):
            raise RuntimeError(f"Current train mode is pure fp16, models should be paddle.nn.Layer, but receive {type(one)}. Pass torch.nn.Modules.")  # noqa: TRY004
    return several


def _optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    if not isinstance(optimizers, torch.optim.Optimizer | list):
        raise TypeError(f"optimizers must be either a single optimizer or a list of optimizers. It is {type(optimizers).__name__}.")
    several = optimizers if isinstance(optimizers, list) else [optimizers]
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise RuntimeError(f"Current train mode is pure fp16, optimizers should be paddle.optimizer.Optimizer, but receive {type(one)}.")  # noqa: TRY004
    return several


def _save_dtype(word: Any) -> torch.dtype | None:
    if word is not None and word not in _SAVED:
        raise ValueError(f"save_dtype can only be float16 float32 or float64, but your input save_dtype is {word}. bfloat16 is allowed, too.")
    return None if word is None else _SAVED[word]


def _refresh(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Undo an earlier decoration of these, if nothing else was in it: mezzo refuses to decorate twice, and Paddle does not."""
    for found in {decoration for one in models if (decoration := decoration_of(one)) is not None}:
        if all(any(one is given for given in optimizers) for one in found.optimizers) and all(any(one is given for given in models) for one in found.models):
            found.undo()


def _save_as(model: nn.Module, dtype: torch.dtype) -> None:
    """Let `state_dict` give every floating-point entry in a dtype, as exact as there is one; the parameters stay as they are."""
    found = decoration_of(model)

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
            key = prefix + name
            # With keep_vars=True the caller wants the parameters themselves.
            if key in state and state[key].is_floating_point() and state[key] is not tensor:
                state[key] = cast(found.weights.read(tensor) if found is not None and tensor in found.weights else state[key], dtype)

    handle = model.register_state_dict_post_hook(hook)
    if found is not None:
        found.steps.callback(handle.remove)
