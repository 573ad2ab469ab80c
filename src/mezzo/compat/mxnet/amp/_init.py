"""`mxnet.amp.init`, `init_trainer`, `scale_loss` and `unscale`; gradients of output layers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import nn

from mezzo._errors import UnsupportedError
from mezzo.autocasting.autocast import autocast_all_devices, disable_autocast, set_thread_region
from mezzo.compat.mxnet.amp._lists import Condition, parse_target_dtype, policy_fields
from mezzo.compat.mxnet.gluon import ScaledOptimizer, Trainer, scaled_optimizer_of
from mezzo.scaling.scaler import GradScaler

PRESET = "mxnet"

_log = logging.getLogger()
"""The root logger, as in MXNet, so that the line reads `INFO:root:Using AMP`."""


class Initialized:
    """Result of `init`; as a context manager it calls `uninit` on exit."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.undo = ExitStack()
        """Callbacks that `uninit` runs, the last first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        uninit()


_current: Initialized | None = None


def init(
    target_dtype: Any = "float16",
    target_precision_ops: Collection[str] | None = None,
    conditional_fp32_ops: Sequence[Condition] | None = None,
    fp32_ops: Collection[str] | None = None,
    layout_optimization: bool = False,
) -> Initialized:
    """Activate autocast by MXNet's op lists in this thread, until `uninit`.

    A second call changes nothing. Each list passed replaces MXNet's. `layout_optimization` is not
    supported: call `mezzo.channels_last(net)`.

    >>> x = torch.ones(1, 1)
    >>> with init():
    ...     torch.mm(x, x).dtype, nn.functional.linear(x, x).dtype
    (torch.float32, torch.float16)
    """
    global _current
    if _current is not None:
        return _current
    dtype = parse_target_dtype(
        target_dtype, "AMP currently supports only float16 or bfloat16 as a target_dtype"
    )
    if layout_optimization:
        raise UnsupportedError(
            "layout_optimization=True is not supported: it is an option of MXNet's compiler. Call"
            " mezzo.channels_last(net) on the network instead."
        )
    fields = policy_fields(dtype, target_precision_ops, fp32_ops, conditional_fp32_ops)
    region = autocast_all_devices(preset=PRESET, dtype=dtype, **fields)
    _log.info("Using AMP")
    _warn_about_existing_networks(sys._getframe(1))
    set_thread_region(region)
    _current = Initialized(dtype)
    return _current


def uninit() -> None:
    """Undo `init` and `init_trainer` in this thread. Without `init` this does nothing."""
    global _current
    previous, _current = _current, None
    if previous is not None:
        disable_autocast()
        previous.undo.close()


def initialized() -> Initialized | None:
    """Return the result of `init`, or None if it is not active."""
    return _current


def _warn_about_existing_networks(frame: FrameType | None) -> None:
    """Warn about a network created before `init`, as MXNet does.

    Here such a network is cast too; the warning is for code that also runs on MXNet.
    """
    while frame is not None:
        for name, value in frame.f_locals.items():
            if isinstance(value, nn.Module):
                _log.warning(
                    "Block %s created in [%s:%d] before AMP init.",
                    name,
                    frame.f_code.co_filename,
                    frame.f_lineno,
                )
                return
        frame = frame.f_back


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
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the layer's gradient times the loss scale, or times the incoming gradient."""
        # The incoming gradient already contains the loss scale.
        factor = incoming[0] if ctx.times_incoming else ctx.loss_scale
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
    result: torch.Tensor = _OutputWithGradient.apply(data, output, gradient, times_incoming)  # type: ignore[no-untyped-call]
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
            node.loss_scale = scale  # type: ignore[attr-defined]
        else:
            pending.extend(next_node for next_node, _ in node.next_functions)


TrainerLike = Trainer | torch.optim.Optimizer
Losses = torch.Tensor | Sequence[torch.Tensor]

_MAX_SCALE = 2.0**24

_scaled_optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers passed to `init_trainer` since `init`."""


def init_trainer(optimizer_or_trainer: TrainerLike) -> None:
    """Add dynamic loss scaling to a trainer or a torch optimizer.

    The scale starts at 2^16, doubles after 2000 successful steps, halves after a skipped one, and
    is at most 2^24. Differs from MXNet: `update_on_kvstore` may be true.
    """
    current = initialized()
    if current is None:
        raise AssertionError(
            "AMP not initialized, did you forget to call amp.init()? Call it before the network and"
            " the trainer are created."
        )
    optimizer = _optimizer_of(optimizer_or_trainer)
    previous = scaled_optimizer_of(optimizer)
    if previous is not None:
        previous.detach()
    ScaledOptimizer(optimizer, GradScaler(max_scale=_MAX_SCALE))
    if not _scaled_optimizers:
        current.undo.callback(_detach_all)
    _scaled_optimizers.add(optimizer)


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
    if isinstance(optimizer_or_trainer, list | tuple):
        losses = list(loss) if isinstance(loss, list | tuple) else [loss]
        if len(losses) != len(optimizer_or_trainer):
            raise ValueError(
                f"scale_loss got {len(losses)} losses and {len(optimizer_or_trainer)} trainers."
                " Each trainer has its own scale: pass one loss for each."
            )
        pairs = zip(losses, optimizer_or_trainer, strict=True)
        yield [_scale(one_loss, trainer) for one_loss, trainer in pairs]
    elif isinstance(loss, list | tuple):
        yield [_scale(one_loss, optimizer_or_trainer) for one_loss in loss]
    else:
        yield _scale(loss, optimizer_or_trainer)


def unscale(optimizer_or_trainer: TrainerLike) -> None:
    """Unscale and check the gradients before the step, for example to clip them."""
    attached = scaled_optimizer_of(_optimizer_of(optimizer_or_trainer))
    if attached is not None:
        attached.unscale()


def _scale(loss: Any, trainer: Any) -> Any:
    attached = scaled_optimizer_of(_optimizer_of(trainer))
    if attached is None:
        raise AssertionError(
            "Loss scaler is not initialized, did you forget to call amp.init_trainer()? Call it"
            " after creating the trainer."
        )
    scaled = attached.scale(loss)
    set_output_scales(loss, attached.scaler)
    return scaled


def _optimizer_of(trainer: Any) -> torch.optim.Optimizer:
    if isinstance(trainer, Trainer):
        return trainer.optimizer
    if isinstance(trainer, torch.optim.Optimizer):
        return trainer
    raise TypeError(
        "optimizer_or_trainer should be a Gluon Trainer or an optimizer, instead is"
        f" {type(trainer)}. Pass gluon.Trainer(...), or one of torch.optim."
    )


def _detach_all() -> None:
    for optimizer in list(_scaled_optimizers):
        attached = scaled_optimizer_of(optimizer)
        if attached is not None:
            attached.detach()
    _scaled_optimizers.clear()
