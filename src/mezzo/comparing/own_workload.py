"""A workload of the user's own model, sample, loss function and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mezzo._casting import tensors_of
from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._errors import PolicyError
from mezzo.comparing.workload import Batch, Preset, Workload
from mezzo.prepare.arguments import unwrapped
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.kept_results import copy_with_results
from mezzo.step.inputs import ModelArguments, call_model
from mezzo.step.outputs import loss_of_output, split_loss

_STEPS, _RATE = 20, 1e-4


def own_workload(
    name: str,
    model: nn.Module,
    sample: Any,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Optimizer | None = None,
) -> Workload:
    """Return a workload that trains copies of a model on one batch.

    Args:
        name: Its name in tables.
        model: The model in float32, which is not changed.
        sample: Inputs of the model, as `TrainStep` takes them; with `loss_fn` `(inputs, target)`.
        loss_fn: A function of the model's output and the target. Without it the loss is the one
            that the model computes, or else the mean square of its outputs.
        optimizer: The optimizer of the model; None for AdamW with a rate of 1e-4.

    >>> workload = own_workload("mine", nn.Linear(4, 2), torch.ones(8, 4))
    >>> workload.samples, workload.title
    (8, 'Linear, batch 8, AdamW')
    """
    _check(model, sample, loss_fn, optimizer)
    inner = unwrapped(model)
    tensors = tensors_of(sample)
    samples = tensors[0].shape[0] if tensors and tensors[0].dim() else 1
    named = "AdamW" if optimizer is None else type(optimizer).__name__
    inputs, target = (sample, ()) if loss_fn is None else (sample[0], tuple(sample[1:]))
    return Workload(
        name=name,
        title=f"{type(inner).__name__}, batch {samples}, {named}",
        preset=Preset.FULL,
        data="the sample of the factory",
        make_model=lambda: copy_with_results(inner),
        make_optimizer=_copier(inner, optimizer),
        make_batch=lambda _: (ModelArguments(inner).arrange((inputs,), {}), *target),
        loss=_Loss(loss_fn),
        samples=samples,
        steps=_STEPS,
    )


class _Loss:
    """The loss function of the user, or what stands in for it."""

    def __init__(self, loss_fn: Callable[..., Any] | None) -> None:
        self._loss_fn = loss_fn

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, *target = batch
        outputs = call_model(model, inputs)
        if self._loss_fn is None:
            return _own_loss(outputs)
        values = target[0] if target and isinstance(target[0], tuple) else target
        loss = split_loss(self._loss_fn(outputs, *values)).loss
        if loss is None:
            raise PolicyError(
                "loss_fn returned no loss. Return a tensor with one element, or (loss, aux)."
            )
        return loss


def _own_loss(outputs: Any) -> Tensor:
    """Return the loss that a model computed, or else the mean square of its outputs."""
    try:
        return loss_of_output(outputs)
    except PolicyError:
        floating = [tensor for tensor in tensors_of(outputs) if tensor.is_floating_point()]
        if not floating:
            raise
        return torch.stack([output.float().square().mean() for output in floating]).sum()


def _copier(model: nn.Module, optimizer: Optimizer | None) -> Callable[[nn.Module], Optimizer]:
    """Return a function that makes the optimizer of a copy of the model."""

    def make(copied: nn.Module) -> Optimizer:
        if optimizer is None:
            return AdamW(copied.parameters(), _RATE)
        # Parameters of the optimizer become those of the copy, by their place in the model.
        places = zip(model.parameters(), copied.parameters(), strict=True)
        return deepcopy(optimizer, {id(old): new for old, new in places})

    return make


def _check(model: Any, sample: Any, loss_fn: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise PolicyError(f"compare takes a model, got {type(model).__name__}.")
    if any(decoration_of(module) is not None for module in unwrapped(model).modules()):
        raise PolicyError(
            "The model is decorated, and each mode trains a copy of the plain model. Return it"
            " before decorate, or call mezzo.undecorate(model)."
        )
    half = next(
        (parameter.dtype for parameter in model.parameters() if parameter.dtype in HALF_DTYPES),
        None,
    )
    if half is not None:
        raise PolicyError(
            f"The model has {dtype_name(half)} parameters, and each mode is compared with float32."
            " Return model.float()."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PolicyError(f"{type(model).__name__} has no parameters that are trained.")
    is_pair = isinstance(sample, tuple | list) and len(sample) > 1
    if loss_fn is not None and not is_pair:
        raise PolicyError(
            f"With loss_fn the sample is (inputs, target), got {type(sample).__name__}. Return"
            " 'sample': (x, y), or leave out loss_fn."
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise PolicyError(
            f"optimizer is {type(optimizer).__name__}. Return one optimizer of torch, or leave it"
            " out for AdamW."
        )
