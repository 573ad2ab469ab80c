"""NVIDIA Apex's calls on mezzo's engine: `from mezzo.compat.apex import amp`, or `install()` for `from apex import amp`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from mezzo._errors import UnsupportedError
from mezzo.compat.apex import (
    amp,
    fp16_utils,
    multi_tensor_apply,
    normalization,
    optimizers,
    parallel,
)

_OURS = "mezzo.compat.apex"
_PARTS = (
    "",
    ".amp",
    ".amp._amp_state",
    ".fp16_utils",
    ".multi_tensor_apply",
    ".normalization",
    ".optimizers",
    ".parallel",
)
"""What Apex's users import."""


def install() -> None:
    """Let `from apex import amp` find mezzo's dialect, until `uninstall`; a second call changes nothing. Refused where Apex itself is installed.

    >>> install()
    >>> from apex import amp
    >>> amp.initialize.__module__
    'mezzo.compat.apex.amp._initialize'
    >>> uninstall()
    """
    if is_installed():
        return
    found = sys.modules.get("apex") or importlib.util.find_spec("apex")
    if found is not None:
        where = (
            getattr(found, "origin", None)
            or getattr(found, "__file__", None)
            or "somewhere on the path"
        )
        raise UnsupportedError(
            f"A package named apex is installed here ({where}), and mezzo does not hide it."
            " Uninstall it, or write `from mezzo.compat.apex import amp` instead."
        )
    sys.modules.update({"apex" + part: _module(part) for part in _PARTS})


def uninstall() -> None:
    """Take Apex's name off again; what was imported under it stays what it is."""
    if is_installed():
        for part in _PARTS:
            sys.modules.pop("apex" + part, None)


def is_installed() -> bool:
    """Whether `apex` is mezzo's dialect just now."""
    return getattr(sys.modules.get("apex"), "__name__", "") == _OURS


def _module(part: str) -> ModuleType:
    return importlib.import_module(_OURS + part)


__all__ = [
    "amp",
    "fp16_utils",
    "install",
    "is_installed",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
    "uninstall",
]
