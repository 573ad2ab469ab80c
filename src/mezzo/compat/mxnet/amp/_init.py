"""`mxnet.amp.init` and `uninit`: autocast by MXNet's op lists in the thread that calls them."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import nn

from mezzo._dtypes import dtype_name
from mezzo._errors import PolicyError, UnsupportedError
from mezzo.autocasting.autocast import (
    autocast_all_devices,
    disable_autocast,
    set_thread_region,
    thread_region,
)
from mezzo.compat.mxnet._trainer import ScaledOptimizer
from mezzo.compat.mxnet.amp._lists import (
    Condition,
    OpLists,
    check_init_lists,
    parse_target_dtype,
    policy_fields,
)

PRESET = "mxnet"

_log = logging.getLogger()
"""The root logger, as in MXNet, so that the line reads `INFO:root:Using AMP`."""


@dataclass(frozen=True)
class Initialized:
    """Result of `init`; as a context manager it calls `uninit` on exit."""

    dtype: torch.dtype
    first: bool = True
    """Whether this call of `init` activated autocast: only then does leaving it call `uninit`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.first:
            uninit()


class ThreadState:
    """What `init` set up in a thread."""

    def __init__(self, lists: OpLists, region: autocast_all_devices) -> None:
        self.lists, self.region = lists, region
        self.thread = threading.current_thread()
        self.scaled: WeakSet[ScaledOptimizer] = WeakSet()
        """Optimizers of `init_trainer`, whose loss scaling `uninit` removes."""


_local = threading.local()
_states: WeakSet[ThreadState] = WeakSet()
"""The states of all threads, for the message of an `uninit` in another thread."""


def init(
    target_dtype: Any = "float16",
    target_precision_ops: Collection[str] | None = None,
    conditional_fp32_ops: Sequence[Condition] | None = None,
    fp32_ops: Collection[str] | None = None,
    layout_optimization: bool = False,
) -> Initialized:
    """Activate autocast by MXNet's op lists in this thread, until `uninit` in the same thread.

    Other threads are not affected: call `init` there too, or wrap the function that they run in
    `mezzo.propagate_autocast`. A forked worker of a data loader inherits it. A second call with the
    same arguments changes nothing; with others it raises `PolicyError`. Each list passed replaces
    MXNet's. `layout_optimization` is not supported: call `mezzo.channels_last(net)`.

    >>> x = torch.ones(1, 1)
    >>> with init():
    ...     torch.mm(x, x).dtype, nn.functional.linear(x, x).dtype
    (torch.float32, torch.float16)
    """
    dtype = parse_target_dtype(
        target_dtype, "AMP currently supports only float16 or bfloat16 as a target_dtype"
    )
    if layout_optimization:
        raise UnsupportedError(
            "layout_optimization=True is not supported: it is an option of MXNet's compiler. Call"
            " mezzo.channels_last(net) on the network instead."
        )
    lists = check_init_lists(dtype, target_precision_ops, fp32_ops, conditional_fp32_ops)
    current = thread_state()
    if current is not None:
        _check_same(current.lists, lists)
        return Initialized(dtype, first=False)
    options = policy_fields(dtype, target_precision_ops, fp32_ops, conditional_fp32_ops)
    region = autocast_all_devices(preset=PRESET, dtype=dtype, **options)
    _log.info("Using AMP")
    _warn_about_existing_networks(sys._getframe(1))
    set_thread_region(region)
    state = ThreadState(lists, region)
    previous = getattr(_local, "state", None)
    if previous is not None:
        # Other code replaced the region of an earlier init; its trainers stay initialized.
        state.scaled = previous.scaled
    _local.state = state
    _states.add(state)
    return Initialized(dtype)


def uninit() -> None:
    """Undo `init` and `init_trainer` of this thread. Without `init` this does nothing.

    Raises `UnsupportedError` in a thread that never called `init` while another one uses AMP.
    """
    if not hasattr(_local, "state"):
        _check_no_other_thread()
        return
    state, _local.state = _local.state, None
    if state is not None:
        # Another dialect, or mezzo.enable_autocast, may have replaced the region.
        if thread_region() is state.region:
            disable_autocast()
        for optimizer in list(state.scaled):
            optimizer.detach()


def thread_state() -> ThreadState | None:
    """Return what `init` set up in this thread, or None if it is not active."""
    state: ThreadState | None = getattr(_local, "state", None)
    return state if state is not None and thread_region() is state.region else None


def _check_same(current: OpLists, requested: OpLists) -> None:
    """Raise `PolicyError` unless a second call of `init` requests what is active."""
    different = [
        field.name
        for field in fields(OpLists)
        if getattr(current, field.name) != getattr(requested, field.name)
    ]
    if different:
        raise PolicyError(
            "amp.init() is active in this thread with"
            f" target_dtype={dtype_name(current.target_dtype)!r}, and a second call cannot change"
            f" it. This one has target_dtype={dtype_name(requested.target_dtype)!r} and differs in:"
            f" {', '.join(different)}. Call amp.uninit() first, or pass the same arguments."
        )


def _check_no_other_thread() -> None:
    threads = sorted({state.thread.name for state in list(_states) if state.thread.is_alive()})
    if threads:
        raise UnsupportedError(
            f"amp.uninit() was called in thread {threading.current_thread().name!r}, but amp.init()"
            f" in {', '.join(map(repr, threads))}. Each thread ends its own: call amp.uninit()"
            " there."
        )


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
