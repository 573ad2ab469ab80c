"""NVIDIA Apex's API on mezzo's engine.

Write `from mezzo.compat.apex import amp`, or call `install()` to keep `from apex import amp`.
Signatures and printed lines are Apex's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from mezzo._errors import UnsupportedError
from mezzo.compat._missing import module_getattr
from mezzo.compat.apex import (
    amp,
    fp16_utils,
    multi_tensor_apply,
    normalization,
    optimizers,
    parallel,
)
from mezzo.compat.apex._substitutions import SUBSTITUTIONS

_DIALECT = "mezzo.compat.apex"
_SUBMODULES = (
    "",
    ".amp",
    ".amp._amp_state",
    ".fp16_utils",
    ".multi_tensor_apply",
    ".normalization",
    ".optimizers",
    ".parallel",
)
"""Import paths of Apex that `install` provides, relative to the package."""


def install() -> None:
    """Make `from apex import amp` import this dialect, until `uninstall` is called.

    A second call changes nothing. Raises `UnsupportedError` if Apex itself is installed.

    >>> install()
    >>> from apex import amp
    >>> amp.initialize.__module__
    'mezzo.compat.apex.amp._initialize'
    >>> uninstall()
    """
    if is_installed():
        return
    existing = sys.modules.get("apex") or importlib.util.find_spec("apex")
    if existing is not None:
        location = (
            getattr(existing, "origin", None)
            or getattr(existing, "__file__", None)
            or "somewhere on the path"
        )
        raise UnsupportedError(
            f"A package named apex is already installed ({location}), and mezzo does not shadow it."
            " Uninstall it, or use `from mezzo.compat.apex import amp` instead."
        )
    sys.modules.update({"apex" + name: _submodule(name) for name in _SUBMODULES})


def uninstall() -> None:
    """Remove `apex` from `sys.modules`. Objects imported from it earlier stay valid."""
    if is_installed():
        for name in _SUBMODULES:
            sys.modules.pop("apex" + name, None)


def is_installed() -> bool:
    """Return whether `import apex` currently gives this dialect."""
    return getattr(sys.modules.get("apex"), "__name__", "") == _DIALECT


def _submodule(name: str) -> ModuleType:
    return importlib.import_module(_DIALECT + name)


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

__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
