"""Autocast kernels that compute in float32, for ops without a 16-bit kernel on a device.

With torch's own lists no function mode sees an op, and one without a 16-bit kernel would raise in
the middle of a step. torch's dispatcher has one table per process, so these kernels are registered
for all code: outside mezzo's regions each one redispatches to the next kernel, as if it were not
registered.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch
from torch.library import Library

from mezzo import _events
from mezzo._casting import cast_all, is_castable
from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._hardware import hardware
from mezzo._torch import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    kernels_of,
    keys_below,
    lacks,
)
from mezzo.autocasting.float32_fallback import means_missing_kernel
from mezzo.autocasting.regions import in_region
from mezzo.policy import missing_kernels
from mezzo.policy.presets.torch_amp import AUTOCAST_KEYS, torch_entries
from mezzo.policy.registry import Function, functional_overloads

_LSTM = "lstm"
"""The op whose kernel is found missing by calling it: oneDNN's LSTM in float16 needs AMX-FP16, and
ONEDNN_MAX_CPU_ISA can switch off what the processor has. Nothing has happened when it fails."""

_lock = threading.Lock()


def register_float32_kernels(device: str) -> None:
    """Register float32 autocast kernels for ops without a 16-bit kernel on a device, once.

    They stay registered for the life of the process, and act in mezzo's regions only.
    """
    # Two threads may enter their first regions at the same time.
    with _lock:
        _registered(device)


@cache
def _registered(device: str) -> Library | None:
    key = AUTOCAST_KEYS.get(device)
    everywhere = dict.fromkeys(missing_kernels.known_missing(device), HALF_DTYPES)
    lacking = {
        op: dtypes
        for op, dtypes in sorted((everywhere | _missing_on_this_machine(device)).items())
        if op not in torch_entries(device)
    }
    if key is None or not lacking or lacks("float32 fallback"):
        return None
    library = Library("aten", "IMPL")
    registered = set(kernels_of(key))
    for op, dtypes in lacking.items():
        for qualified in functional_overloads(op) - registered:
            library.impl(
                qualified.removeprefix("aten::"),
                _kernel(op, qualified, device, key, dtypes),
                key,
                with_keyset=True,
            )
    return library


def _missing_on_this_machine(device: str) -> dict[str, tuple[torch.dtype, ...]]:
    """Return ops that may lack a kernel on this machine, with 16-bit dtypes that they surely lack.

    oneDNN's LSTM, which torch's autocast calls on a CPU, fails without native instructions. Some
    CPUs have those of bfloat16 only.
    """
    if device != "cpu":
        return {}
    native = hardware(device).native_dtypes
    return {_LSTM: tuple(dtype for dtype in HALF_DTYPES if dtype not in native)}


def _kernel(
    op: str, qualified: str, device: str, key: str, dtypes: tuple[torch.dtype, ...]
) -> Function:
    base, _, overload = qualified.removeprefix("aten::").partition(".")
    autocast = getattr(DispatchKey, key)
    below = keys_below(autocast)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        call = getattr(getattr(torch.ops.aten, base), overload or "default")
        dtype = torch.get_autocast_dtype(device)
        if not in_region():
            return call.redispatch(keyset & below, *args, **kwargs)
        if dtype not in dtypes and not missing_kernels.is_recorded_missing(op, dtype, device):
            try:
                return call.redispatch(keyset & below, *args, **kwargs)
            except RuntimeError as error:
                if op != _LSTM or not means_missing_kernel(error):
                    raise
                missing_kernels.record_missing(op, dtype, device)
        if _events.listening() and any(
            is_castable(value, device) and value.dtype in HALF_DTYPES for value in args
        ):
            reason = "it has no 16-bit kernel there"
            _events.emit(_events.Float32Fallback(op, device, dtype_name(dtype), reason))
        with ExcludeDispatchKeyGuard(DispatchKeySet(autocast)):
            return call(
                *cast_all(args, torch.float32, device), **cast_all(kwargs, torch.float32, device)
            )

    return kernel
