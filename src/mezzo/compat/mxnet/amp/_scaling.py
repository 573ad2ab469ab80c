"""`mxnet.amp.init_trainer`, `scale_loss` and `unscale`; gradients of output layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mezzo._errors import ScalerError
from mezzo.compat.mxnet._trainer import ScaledOptimizer, Trainer, scaled_optimizer_of
from mezzo.compat.mxnet.amp._init import thread_state
from mezzo.compat.mxnet.autograd import check_recorded
from mezzo.scaling.scaler import GradScaler

Gradient = Callable[[], torch.Tensor]
"""Computes the gradient of the layer's input."""


class _OutputWithGradient(torch.autograd.Function):
    """Return an output whose backward computes the layer's own gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,  # noqa: ARG004 - autograd ties the input to the output
        output: torch.Tensor,
        gradient: Gradient,
        times_incoming: bool,
    ) -> torch.Tensor:
        """Return the output unchanged."""
        ctx.gradient, ctx.loss_scale, ctx.times_incoming = gradient, 1.0, times_incoming
        ctx.scaler = None
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the layer's gradient times the loss scale, or times the incoming gradient."""
        # The incoming gradient already contains the loss scale.
        factor = incoming[0] if ctx.times_incoming else ctx.loss_scale
        ctx.scaler = None
        return ctx.gradient() * factor, None, None, None


_has_output_layers = False
"""Whether any output layer was called; without one, `scale_loss` need not search the graph."""


def output_with_gradient(
    data: torch.Tensor, output: torch.Tensor, gradient: Gradient, *, times_incoming: bool = False
) -> torch.Tensor:
    """Return `output`, whose backward passes `gradient()` to `data`.

    The incoming gradient is ignored unless `times_incoming` is set.
    """
    global _has_output_layers
    _has_output_layers = True
    result: torch.Tensor = _OutputWithGradient.apply(data, output, gradient, times_incoming)
    return result


def set_output_scales(loss: Any, scaler: GradScaler) -> None:
    """Set the loss scale of the output layers in a loss's graph.

    Per loss, because several trainers have different scales.
    """
    if not _has_output_layers or not isinstance(loss, torch.Tensor):
        return
    # A tensor on the device: reading the scale would synchronize.
    scale = scaler.scale(torch.ones((), device=loss.device))
    pending, visited = [loss.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if isinstance(node, _OutputWithGradient._backward_cls):
            _set_output_scale(node, scale, scaler)
        else:
            pending.extend(next_node for next_node, _ in node.next_functions)


def _set_output_scale(node: Any, scale: torch.Tensor, scaler: GradScaler) -> None:
    if node.scaler not in (None, scaler):
        raise ScalerError(
            "An output layer is part of scaled losses of two trainers, and its gradient can have"
            " one scale only. Run backward of the first loss before the second is scaled."
        )
    node.loss_scale, node.scaler = scale, scaler


TrainerLike = Trainer | torch.optim.Optimizer
Losses = torch.Tensor | Sequence[torch.Tensor]

_MAX_SCALE = 2.0**24


def init_trainer(optimizer_or_trainer: TrainerLike) -> None:
    """Add dynamic loss scaling to a trainer or a torch optimizer.

    The scale starts at 2^16, doubles after 2000 successful steps, halves after a skipped one, and
    is at most 2^24. A second call starts again at 2^16. Differs from MXNet: `update_on_kvstore` may
    be true.
    """
    current = thread_state()
    if current is None:
        raise AssertionError(
            "AMP not initialized, did you forget to call amp.init()? Call it in this thread, before"
            " the network and the trainer are created."
        )
    optimizer = _optimizer_of(optimizer_or_trainer)
    previous = scaled_optimizer_of(optimizer)
    if previous is not None:
        if previous.is_pending():
            raise ScalerError(
                "amp.init_trainer() was called between scale_loss and step of this trainer, whose"
                " gradients have the old scale. Call trainer.step(batch_size) first."
            )
        previous.detach()
    current.scaled.add(ScaledOptimizer(optimizer, GradScaler(max_scale=_MAX_SCALE)))


@contextmanager
def scale_loss(
    loss: Losses, optimizer_or_trainer: TrainerLike | Sequence[TrainerLike]
) -> Iterator[Any]:
    """Yield the loss or losses times the trainer's scale; a list of trainers scales one loss each.

    >>> from mezzo.compat.mxnet import amp, gluon
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> with amp.init():
    ...     trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 0.5})
    ...     amp.init_trainer(trainer)
    ...     with amp.scale_loss(weight.sum(), trainer) as scaled:
    ...         scaled.backward()
    ...     trainer.step(1)
    >>> scaled.item(), weight.item()
    (65536.0, 0.5)
    """
    losses: list[Any] = list(loss) if isinstance(loss, list | tuple) else [loss]
    trainers: list[Any] = [optimizer_or_trainer] * len(losses)
    if isinstance(optimizer_or_trainer, list | tuple):
        trainers = list(optimizer_or_trainer)
    if len(losses) != len(trainers):
        raise ValueError(
            f"scale_loss got {len(losses)} losses and {len(trainers)} trainers. Each trainer has"
            " its own scale: pass one loss for each, or one trainer with all parameters."
        )
    attached = [_require_scaled(trainer) for trainer in trainers]
    check_recorded(losses, "loss")
    for scaled_trainer in attached:
        scaled_trainer.check_not_unscaled()
    scaled = [_scale(*pair) for pair in zip(losses, attached, strict=True)]
    several = isinstance(loss, list | tuple) or isinstance(optimizer_or_trainer, list | tuple)
    yield scaled if several else scaled[0]


def unscale(optimizer_or_trainer: TrainerLike) -> None:
    """Unscale and check the gradients before the step, for example to clip them.

    Call it once, after backward of the scaled loss and before `trainer.step`; otherwise it raises
    `ScalerError`.
    """
    _require_scaled(optimizer_or_trainer).unscale()


def _scale(loss: torch.Tensor, attached: ScaledOptimizer) -> torch.Tensor:
    scaled: torch.Tensor = attached.scale(loss)
    set_output_scales(loss, attached.scaler)
    return scaled


def _require_scaled(trainer: Any) -> ScaledOptimizer:
    attached = scaled_optimizer_of(_optimizer_of(trainer))
    if attached is None or attached.detached:
        raise AssertionError(
            "Loss scaler is not initialized, did you forget to call amp.init_trainer()? Call it"
            " after creating the trainer."
        )
    return attached


def _optimizer_of(trainer: Any) -> torch.optim.Optimizer:
    if isinstance(trainer, Trainer):
        return trainer.optimizer
    if isinstance(trainer, torch.optim.Optimizer):
        return trainer
    raise TypeError(
        "optimizer_or_trainer should be a Gluon Trainer or an optimizer, instead is"
        f" {type(trainer)}. Pass gluon.Trainer(...), or one of torch.optim."
    )
