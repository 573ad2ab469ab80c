"""Ops without a 16-bit kernel on a device.

Known in advance from torch's tables of tested dtypes, and recorded when a call fails. Also: ops
whose kernel does not accept float32 parameters with a 16-bit input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import torch

from mezzo._dtypes import dtype_name
from mezzo.policy.op_names import is_removed

_recorded: set[tuple[str, str, str]] = set()

RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Layers that cuDNN computes. On CUDA torch's autocast casts inside them, always to float16, and
packs the weights into one buffer as cuDNN expects (ATen/cudnn/AutocastRNN.cpp)."""

_ONE_DTYPE = frozenset({"layer_norm", "group_norm"})
"""Norms whose kernels need input and parameters of one dtype:
ATen/native/cuda/layer_norm_kernel.cu and group_norm_kernel.cu. Batch norm accepts mixed dtypes on
every device, instance norm calls it, and rms_norm then decomposes into ops that promote."""

_MIXED: Mapping[str, frozenset[str]] = {"cpu": _ONE_DTYPE}
"""Norms of `_ONE_DTYPE` that accept mixed dtypes on a device:
ATen/native/cpu/layer_norm_kernel.cpp and group_norm_kernel.cpp."""


def needs_one_dtype(op: str, device: str) -> bool:
    """Return whether an op's kernel rejects float32 parameters with a 16-bit input on a device.

    >>> needs_one_dtype("layer_norm", "cuda"), needs_one_dtype("layer_norm", "cpu")
    (True, False)
    >>> needs_one_dtype("batch_norm", "cuda")
    False
    """
    return op in _ONE_DTYPE - _MIXED.get(device, frozenset())


def lacks_kernel(op: str, dtype: torch.dtype, device: str) -> bool:
    """Return whether an op is known to have no kernel for a 16-bit dtype on a device.

    >>> lacks_kernel("linalg_qr", torch.bfloat16, "cpu")
    True
    """
    key = (op, dtype_name(dtype), device)
    return key in _recorded or op in _known().get(device, {}).get(key[1], frozenset())


def known_missing(device: str) -> frozenset[str]:
    """Return the ops known in advance to have no kernel for either 16-bit dtype on a device."""
    tables = list(_known().get(device, {}).values())
    return frozenset.intersection(*tables) if tables else frozenset()


def is_recorded_missing(op: str, dtype: torch.dtype, device: str) -> bool:
    """Return whether a failed call has shown that an op has no kernel."""
    return bool(_recorded) and (op, dtype_name(dtype), device) in _recorded


def record_missing(op: str, dtype: torch.dtype, device: str) -> bool:
    """Record that an op has no kernel; return whether this is the first record of it."""
    key = (op, dtype_name(dtype), device)
    is_new = key not in _recorded
    _recorded.add(key)
    return is_new


def missing(op: str) -> tuple[tuple[str, str], ...]:
    """Return the (device, dtype) pairs for which an op has no kernel."""
    known = {
        (device, dtype)
        for device, table in _known().items()
        for dtype, ops in table.items()
        if op in ops
    }
    recorded = {(device, dtype) for name, dtype, device in _recorded if name == op}
    return tuple(sorted(known | recorded))


@cache
def _known() -> dict[str, dict[str, frozenset[str]]]:
    text = files(__package__).joinpath("missing_kernels.json").read_text()
    tables = json.loads(text)["missing"]
    return {
        device: {
            dtype: frozenset(op for op in ops if not is_removed(op)) for dtype, ops in table.items()
        }
        for device, table in tables.items()
    }
