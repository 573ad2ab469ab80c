"""What `initialize` refuses, before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mezzo.compat.apex.amp._amp_state import _amp_state, warn_or_err

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
    several = [] if optimizers is None else optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in several:
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise RuntimeError(
                "optimizers has an FP16_Optimizer, which keeps masters and a scale of its own. Pass the plain optimizer: amp.initialize does both."
            )
    if all(isinstance(optimizer, Optimizer) for optimizer in several):
        return several
    raise TypeError(f"optimizers should be an optimizer, a list of optimizers or None, got {_kinds(optimizers)}.")


def _kinds(given: Any) -> str:
    return f"[{', '.join(type(one).__name__ for one in given)}]" if isinstance(given, list) else type(given).__name__


def refuse_wrapped(models: list[nn.Module]) -> None:
    """Refuse models that are wrapped for several devices already."""
    for model in models:
        if isinstance(model, _WRAPPERS):
            raise RuntimeError(  # noqa: TRY004 - Apex's type
                f"models has a torch.nn.parallel.{type(model).__name__}, which holds on to the parameters as they are. Wrap a model AFTER amp.initialize has returned it."
            )


def refuse_known(optimizers: list[Optimizer]) -> None:
    """Refuse optimizers that went through `initialize` before."""
    if any(hasattr(optimizer, "_amp_stash") for optimizer in optimizers):
        raise RuntimeError("An optimizer goes through amp.initialize once, and one of these did before. Make a new one for another initialize.")


def refuse_half(models: list[nn.Module]) -> None:
    """Refuse models that come in 16 bits."""
    if _amp_state.allow_incoming_model_not_fp32:
        return
    for model in models:
        for what, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                if tensor.dtype in _HALF:
                    warn_or_err(
                        f"Found {what} {name} with type {tensor.type()}, expected float32: amp.initialize casts whatever the level asks for. "
                        "Leave .half() out, or call .float() on the model first."
                    )
