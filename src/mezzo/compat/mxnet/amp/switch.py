"""`amp.init`, and the way back that MXNet does not have."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, Self

import torch
from torch import nn

from mezzo._errors import UnsupportedError
from mezzo.autocasting.autocast import disable, everywhere, switch_to
from mezzo.compat.mxnet.amp.lists import Condition, read_dtype
from mezzo.compat.mxnet.amp.translate import overrides

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
    layout_optimization: bool = False,  # noqa: FBT001, FBT002 - MXNet's call shape
) -> Initialized:
    """Switch MXNet's mixed precision on for the rest of this thread; `uninit` switches it off. A second call changes nothing.

    Each list that is given takes the place of MXNet's own. `layout_optimization` is a hint to MXNet's compiler: say `mezzo.channels_last(net)` here.

    >>> with init():
    ...     torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype, nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype
    (torch.float32, torch.float16)
    """
    global _now
    if _now is not None:
        return _now
    dtype = read_dtype(target_dtype, "AMP currently supports only float16 or bfloat16 as a target_dtype")
    if layout_optimization:
        raise UnsupportedError("layout_optimization=True is an instruction to MXNet's compiler. Call mezzo.channels_last(net) on the network instead.")
    words = overrides(dtype, target_precision_ops, fp32_ops, conditional_fp32_ops)
    region = everywhere(preset=PRESET, dtype=dtype, **words)
    _log.info("Using AMP")
    _warn_of_networks(sys._getframe(1))
    switch_to(region)
    _now = Initialized(dtype)
    return _now


def uninit() -> None:
    """Switch off what `init` switched on in this thread, trainers included; nothing happens where nothing is on."""
    global _now
    before, _now = _now, None
    if before is not None:
        disable()
        before.undo.close()


def initialized() -> Initialized | None:
    """What `init` switched on."""
    return _now


def _warn_of_networks(frame: FrameType | None) -> None:
    """MXNet's symbols are made once: a network that was there before keeps its precision. Here it does not, but code that goes back there would be caught."""
    while frame is not None:
        for name, value in frame.f_locals.items():
            if isinstance(value, nn.Module):
                _log.warning("Block %s created in [%s:%d] before AMP init.", name, frame.f_code.co_filename, frame.f_lineno)
                return
        frame = frame.f_back
