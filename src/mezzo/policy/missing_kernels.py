"""Which ops have no 16-bit kernel on a device: known ahead from torch's own tables of tested dtypes, and learnt when a call fails.

And which have one that takes no float32 parameters beside a 16-bit input.
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
"""Layers that cuDNN computes. On CUDA torch's autocast casts inside of them, to float16 whatever
its dtype is, and lays the weights side by side as cuDNN wants them (ATen/cudnn/AutocastRNN.cpp)."""

_ONE_DTYPE = frozenset({"layer_norm", "group_norm"})
"""Norms whose kernels read input and parameters as one dtype:
ATen/native/cuda/layer_norm_kernel.cu and group_norm_kernel.cu. Batch norm's take the mix
wherever they run, instance norm is made of it, and rms_norm is then made of ops that promote."""

_MIXED: Mapping[str, frozenset[str]] = {"cpu": _ONE_DTYPE}
"""Of these the ones that take the mix after all, by device:
ATen/native/cpu/layer_norm_kernel.cpp and group_norm_kernel.cpp."""


def needs_one_dtype(op: str, device: str) -> bool:
    """Whether an op's kernel on a device refuses float32 parameters beside a 16-bit input.

    >>> needs_one_dtype("layer_norm", "cuda"), needs_one_dtype("layer_norm", "cpu"), needs_one_dtype("batch_norm", "cuda")
    (True, False, False)
    """
    return op in _ONE_DTYPE - _MIXED.get(device, frozenset())


def lacks_kernel(op: str, dtype: torch.dtype, device: str) -> bool:
    """Whether an op is known to have no kernel for a 16-bit dtype on a device.

    >>> lacks_kernel("linalg_qr", torch.bfloat16, "cpu")
    True
    """
    key = (op, dtype_name(dtype), device)
    return key in _recorded or op in _known().get(device, {}).get(key[1], frozenset())


def known_missing(device: str) -> frozenset[str]:
    """The ops that are known ahead to have no kernel for either 16-bit dtype on a device."""
    tables = list(_known().get(device, {}).values())
    return frozenset.intersection(*tables) if tables else frozenset()


def is_recorded_missing(op: str, dtype: torch.dtype, device: str) -> bool:
    """Whether a failed call has shown that an op has no kernel."""
    return bool(_recorded) and (op, dtype_name(dtype), device) in _recorded


def record_missing(op: str, dtype: torch.dtype, device: str) -> bool:
    """Remember that a call failed for want of a kernel; says whether that was news."""
    key = (op, dtype_name(dtype), device)
    news = key not in _recorded
    _recorded.add(key)
    return news


def missing(op: str) -> tuple[tuple[str, str], ...]:
    """The (device, dtype) pairs for which an op has no kernel."""
    known = {
        (device, dtype)
        for device, table in _known().items()
        for dtype, ops in table.items()
        if op in ops
    }
    return tuple(
        sorted(known | {(device, dtype) for name, dtype, device in _recorded if name == op})
    )


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
