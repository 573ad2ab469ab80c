"""`init_trainer`, `scale_loss` and `unscale`: dynamic loss scaling, a scale for each trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from mezzo.compat.mxnet.amp.outputs import tell_scale
from mezzo.compat.mxnet.amp.switch import initialized
from mezzo.compat.mxnet.gluon.attached import Attached, attached_to
from mezzo.compat.mxnet.gluon.trainer import Trainer
from mezzo.scaling.scaler import GradScaler

Trained = Trainer | torch.optim.Optimizer
Losses = torch.Tensor | Sequence[torch.Tensor]

_MAX_SCALE = 2.0**24

_scaling: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers whose steps are scaled since `init`."""


def init_trainer(optimizer_or_trainer: Trained) -> None:
    """Let a trainer, or one of torch's optimizers, scale dynamically: from 2^16, doubled after 2000 good steps, halved by a bad one, 2^24 at most.

    Whatever `update_on_kvstore` says: MXNet needs it to be false.
    """
    now = initialized()
    if now is None:
        raise AssertionError("AMP not initialized, did you forget to call amp.init()? Call it before the network and the trainer are made.")
    optimizer = _optimizer_of(optimizer_or_trainer)
    before = attached_to(optimizer)
    if before is not None:
        before.detach()
    Attached(optimizer, GradScaler(max_scale=_MAX_SCALE))
    if not _scaling:
        now.undo.callback(_forget_all)
    _scaling.add(optimizer)


@contextmanager
def scale_loss(loss: Losses, optimizer_or_trainer: Trained | Sequence[Trained]) -> Iterator[Any]:
    """The loss, or losses, times the trainer's scale; with as many trainers as losses, each times the scale of its own.

    >>> from mezzo.compat.mxnet import amp, gluon
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> with amp.init():
    ...     trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 0.5}, update_on_kvstore=False)
    ...     amp.init_trainer(trainer)
    ...     with amp.scale_loss(weight.sum(), trainer) as scaled:
    ...         scaled.backward()
    ...     trainer.step(1)
    >>> scaled.item(), weight.item()
    (65536.0, 0.5)
    """
    if isinstance(optimizer_or_trainer, list | tuple):
        losses = list(loss) if isinstance(loss, list | tuple) else [loss]
        if len(losses) != len(optimizer_or_trainer):
            raise ValueError(f"{len(losses)} losses and {len(optimizer_or_trainer)} trainers: each trainer has its own scale and needs its own loss.")
        yield [_scaled(one, trainer) for one, trainer in zip(losses, optimizer_or_trainer, strict=True)]
    elif isinstance(loss, list | tuple):
        yield [_scaled(one, optimizer_or_trainer) for one in loss]
    else:
        yield _scaled(loss, optimizer_or_trainer)


def unscale(optimizer_or_trainer: Trained) -> None:
    """Divide the gradients by the scale and check them now, for whoever looks at them before the step, such as a clipping."""
    attached = attached_to(_optimizer_of(optimizer_or_trainer))
    if attached is not None:
        attached.unscale()


def _scaled(loss: Any, trainer: Any) -> Any:
    attached = attached_to(_optimizer_of(trainer))
    if attached is None:
        raise AssertionError("Loss scaler is not initialized, did you forget to call amp.init_trainer()? Call it once the trainer is made.")
    scaled = attached.scale(loss)
    tell_scale(loss, attached.scaler)
    return scaled


def _optimizer_of(trained: Any) -> torch.optim.Optimizer:
    if isinstance(trained, Trainer):
        return trained.optimizer
    if isinstance(trained, torch.optim.Optimizer):
        return trained
    raise TypeError(
        f"optimizer_or_trainer should be a Gluon Trainer or an optimizer, instead is {type(trained)}. Pass gluon.Trainer(...), or one of torch.optim."
    )


def _forget_all() -> None:
    for optimizer in list(_scaling):
        attached = attached_to(optimizer)
        if attached is not None:
            attached.detach()
    _scaling.clear()
