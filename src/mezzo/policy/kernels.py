"""Which ops have no 16-bit kernel on a device: known ahead from torch's own tables of tested dtypes, and learnt when a call fails."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

import torch

from mezzo._dtypes import dtype_name

_learnt: set[tuple[str, str, str]] = set()


def lacks_kernel(op: str, dtype: torch.dtype, device: str) -> bool:
    """Whether an op is known to have no kernel for a 16-bit dtype on a device.

    >>> lacks_kernel("linalg_qr", torch.bfloat16, "cpu")
    True
    """
    key = (op, dtype_name(dtype), device)
    return key in _learnt or op in _known().get(device, {}).get(key[1], frozenset())


def known(device: str) -> frozenset[str]:
    """The ops that are known ahead to have no kernel for either 16-bit dtype on a device."""
    tables = list(_known().get(device, {}).values())
    return frozenset.intersection(*tables) if tables else frozenset()


def was_learnt(op: str, dtype: torch.dtype, device: str) -> bool:
    """Whether a failed call has shown that an op has no kernel."""
    return bool(_learnt) and (op, dtype_name(dtype), device) in _learnt


def learn(op: str, dtype: torch.dtype, device: str) -> bool:
    """Remember that a call failed for want of a kernel; says whether that was news."""
    key = (op, dtype_name(dtype), device)
    news = key not in _learnt
    _learnt.add(key)
    return news


def missing(op: str) -> tuple[tuple[str, str], ...]:
    """The (device, dtype) pairs for which an op has no kernel."""
    known = {(device, dtype) for device, table in _known().items() for dtype, ops in table.items() if op in ops}
    return tuple(sorted(known | {(device, dtype) for name, dtype, device in _learnt if name == op}))


@cache
def _known() -> dict[str, dict[str, frozenset[str]]]:
    text = files(__package__).joinpath("kernels.json").read_text()
    return {device: {dtype: frozenset(ops) for dtype, ops in table.items()} for device, table in json.loads(text)["missing"].items()}
