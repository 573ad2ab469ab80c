"""`amp.init`, `init_trainer`, `scale_loss` and `unscale`; outputs that carry their own gradient."""

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
from mezzo.compat.mxnet.amp._lists import Condition, overrides, read_dtype
from mezzo.compat.mxnet.gluon import ScaledOptimizer, Trainer, scaled_optimizer_of
from mezzo.scaling.scaler import GradScaler

PRESET = "mxnet"

_log = logging.getLogger()
"""The root logger, as there: whoever greps for `INFO:root:Using AMP` finds it."""


class Initialized:
    """What `init` switched on; as a context it ends with the block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.undo = ExitStack()
        """Takes back what was done since, the last first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        uninit()


_now: Initialized | None = None


def init(
    target_dtype: Any = "float16",
    target_precision_ops: Collection[str] | None = None,
    conditional_fp32_ops: Sequence[Condition] | None = None,
    fp32_ops: Collection[str] | None = None,
    layout_optimization: bool = False,
) -> Initialized:
    """Switch MXNet's mixed precision on for the rest of this thread; `uninit` switches it off. A second call changes nothing.

    Each list that is given takes the place of MXNet's own. `layout_optimization` is a hint to
    MXNet's compiler: say `mezzo.channels_last(net)` here.

    >>> with init():
    ...     torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype, nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype
    (torch.float32, torch.float16)
    """
    global _now
    if _now is not None:
        return _now
    dtype = read_dtype(
        target_dtype, "AMP currently supports only float16 or bfloat16 as a target_dtype"
    )
    if layout_optimization:
        raise UnsupportedError(
            "layout_optimization=True is an instruction to MXNet's compiler. Call"
            " mezzo.channels_last(net) on the network instead."
        )
    words = overrides(dtype, target_precision_ops, fp32_ops, conditional_fp32_ops)
    region = autocast_all_devices(preset=PRESET, dtype=dtype, **words)
    _log.info("Using AMP")
    _warn_of_networks(sys._getframe(1))
    set_thread_region(region)
    _now = Initialized(dtype)
    return _now


def uninit() -> None:
    """Switch off what `init` switched on in this thread, trainers included; nothing happens where nothing is on."""
    global _now
    before, _now = _now, None
    if before is not None:
        disable_autocast()
        before.undo.close()


def initialized() -> Initialized | None:
    """What `init` switched on."""
    return _now


def _warn_of_networks(frame: FrameType | None) -> None:
    """MXNet's symbols are made once: a network that was there before keeps its precision. Here it does not, but code that goes back there would be caught."""
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
"""What the layer's input gets."""


class _Output(torch.autograd.Function):
    """An output with a gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,  # noqa: ARG004 - autograd ties the input to the output
        output: torch.Tensor,
        gradient: Gradient,
        times_incoming: bool,
    ) -> torch.Tensor:
        """The output as it is."""
        ctx.gradient, ctx.loss_scale, ctx.times_incoming = gradient, 1.0, times_incoming
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The layer's own gradient, times the scale: an incoming one that counts has it already."""
        return (
            ctx.gradient() * (incoming[0] if ctx.times_incoming else ctx.loss_scale),
            None,
            None,
            None,
        )


_made = False
"""Whether there ever was such an output: most never make one, and no graph need be searched for
it."""


def output_with_gradient(
    data: torch.Tensor, output: torch.Tensor, gradient: Gradient, *, times_incoming: bool = False
) -> torch.Tensor:
    """An output whose input gets this gradient, whatever comes in unless that is to count."""
    global _made
    _made = True
    made: torch.Tensor = _Output.apply(data, output, gradient, times_incoming)  # type: ignore[no-untyped-call]
    return made


def tell_scale(loss: Any, scaler: GradScaler) -> None:
    """Tell the output layers that a loss is made of what it is scaled by. By the loss and not by the moment: several trainers have several scales."""
    if not _made or not isinstance(loss, torch.Tensor):
        return
    # On the device, so that nobody waits for it.
    scale = scaler.scale(torch.ones((), device=loss.device))
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _Output._backward_cls):
            node.loss_scale = scale  # type: ignore[attr-defined]
        else:
            waiting.extend(following for following, _ in node.next_functions)


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
        raise AssertionError(
            "AMP not initialized, did you forget to call amp.init()? Call it before the network and"
            " the trainer are made."
        )
    optimizer = _optimizer_of(optimizer_or_trainer)
    before = scaled_optimizer_of(optimizer)
    if before is not None:
        before.detach()
    ScaledOptimizer(optimizer, GradScaler(max_scale=_MAX_SCALE))
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
            raise ValueError(
                f"{len(losses)} losses and {len(optimizer_or_trainer)} trainers: each trainer has"
                " its own scale and needs its own loss."
            )
        yield [
            _scaled(one, trainer) for one, trainer in zip(losses, optimizer_or_trainer, strict=True)
        ]
    elif isinstance(loss, list | tuple):
        yield [_scaled(one, optimizer_or_trainer) for one in loss]
    else:
        yield _scaled(loss, optimizer_or_trainer)


def unscale(optimizer_or_trainer: Trained) -> None:
    """Divide the gradients by the scale and check them now, for whoever looks at them before the step, such as a clipping."""
    attached = scaled_optimizer_of(_optimizer_of(optimizer_or_trainer))
    if attached is not None:
        attached.unscale()


def _scaled(loss: Any, trainer: Any) -> Any:
    attached = scaled_optimizer_of(_optimizer_of(trainer))
    if attached is None:
        raise AssertionError(
            "Loss scaler is not initialized, did you forget to call amp.init_trainer()? Call it"
            " once the trainer is made."
        )
    scaled = attached.scale(loss)
    tell_scale(loss, attached.scaler)
    return scaled


def _optimizer_of(trained: Any) -> torch.optim.Optimizer:
    if isinstance(trained, Trainer):
        return trained.optimizer
    if isinstance(trained, torch.optim.Optimizer):
        return trained
    raise TypeError(
        "optimizer_or_trainer should be a Gluon Trainer or an optimizer, instead is"
        f" {type(trained)}. Pass gluon.Trainer(...), or one of torch.optim."
    )


def _forget_all() -> None:
    for optimizer in list(_scaling):
        attached = scaled_optimizer_of(optimizer)
        if attached is not None:
            attached.detach()
    _scaling.clear()
