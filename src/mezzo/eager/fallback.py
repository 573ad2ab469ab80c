"""An op without a 16-bit kernel runs in float32 instead of failing in the middle of a step.

Where a mode steers, it catches the failure. Where torch's own lists do the work, nothing of ours sees the call, so torch's lists are completed: the ops that
have no 16-bit kernel on a device and that torch's autocast does not know get an autocast kernel, as torch's own float32 ops have one. It never depends on a
policy, so that compiled code needs no guard on it, and it only turns an error into a result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.library import Library

from mezzo import _events
from mezzo._casting import cast_all, is_castable
from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._hardware import hardware
from mezzo.policy import kernels
from mezzo.policy.registry import Function, functional_overloads
from mezzo.policy.torch_lists import AUTOCAST_KEYS, native

_NO_KERNEL = (
    "not implemented for 'Half'",
    "not implemented for 'BFloat16'",
    "Unsupported dtype Half",
    "Unsupported dtype BFloat16",
    "Low precision dtypes not supported",
    "could not create a primitive descriptor",
)


def fall_back(error: Exception, func: Function, op: str, dtype: torch.dtype | None, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call again in float32 when the device has no kernel for the 16-bit dtype; any other error is raised again."""
    if dtype not in HALF_DTYPES or not any(text in str(error) for text in _NO_KERNEL):
        raise error
    kernels.learn(op, dtype, device)
    if _events.listening():
        _events.emit(_events.OpFellBack(op, device, dtype_name(dtype), str(error).splitlines()[0]))
    return func(*cast_all(args, torch.float32, device), **cast_all(kwargs, torch.float32, device))


@cache
def complete_torch_lists(device: str) -> Library | None:
    """Give the ops that lack a 16-bit kernel on a device an autocast kernel that casts to float32. Kept for the life of the process."""
    key = AUTOCAST_KEYS.get(device)
    lacking = sorted((kernels.known(device) | _lacking_here(device)) - set(native(device)))
    if key is None or not lacking:
        return None
    library = Library("aten", "IMPL")
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    for op in lacking:
        for qualified in functional_overloads(op) - registered:
            library.impl(qualified.removeprefix("aten::"), _in_float32(op, qualified, device, key), key)
    return library


def _lacking_here(device: str) -> frozenset[str]:
    """Ops whose 16-bit kernel this very device lacks: oneDNN's LSTM, which torch's autocast calls on a CPU, fails without native instructions."""
    return frozenset({"lstm"}) if device == "cpu" and not hardware(device).bfloat16.fast else frozenset()


def _in_float32(op: str, qualified: str, device: str, key: str) -> Function:
    base, _, overload = qualified.removeprefix("aten::").partition(".")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = getattr(getattr(torch.ops.aten, base), overload or "default")
        if _events.listening() and any(is_castable(value, device) and value.dtype in HALF_DTYPES for value in args):
            _events.emit(_events.OpFellBack(op, device, dtype_name(torch.get_autocast_dtype(device)), "it has no 16-bit kernel there"))
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return call(*cast_all(args, torch.float32, device), **cast_all(kwargs, torch.float32, device))

    return kernel
