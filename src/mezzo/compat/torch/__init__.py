"""torch.amp's names on mezzo's engine; `install()` puts them into torch."""

from __future__ import annotations

import importlib
from functools import wraps
from types import ModuleType, TracebackType
from typing import Any

from mezzo import _torch
from mezzo.compat.torch import _autocast, _grad_scaler
from mezzo.compat.torch._autocast import autocast
from mezzo.compat.torch._grad_scaler import GradScaler

_PLACES: dict[str, tuple[str, ...]] = {
    "": ("torch", "torch.amp"),
    "cuda": ("torch.cuda.amp", "torch.cuda.amp.autocast_mode", "torch.cuda.amp.grad_scaler"),
    "cpu": ("torch.cpu.amp", "torch.cpu.amp.autocast_mode", "torch.cpu.amp.grad_scaler"),
}
"""Where torch's users find the names. `torch.amp.autocast_mode` and `torch.amp.grad_scaler`
stay: the compiler, torch.export and FSDP's scaler hold on to what is there, and so do
`custom_fwd` and `custom_bwd`, whose regions then lie inside mezzo's."""

_OURS: dict[str, dict[str, Any]] = {
    "": {"autocast": _autocast.autocast, "GradScaler": _grad_scaler.GradScaler},
    "cuda": {"autocast": _autocast.cuda_autocast, "GradScaler": _grad_scaler.CudaGradScaler},
    "cpu": {"autocast": _autocast.cpu_autocast, "GradScaler": _grad_scaler.CpuGradScaler},
}


def _compile_torchs_own(compile_class: Any) -> Any:
    """TorchScript compiles the source of a class that it meets: of ours, the source of the class that it stands for."""

    @wraps(compile_class)
    def compile_in_its_place(kind: Any, location: Any) -> Any:
        return compile_class(getattr(kind, "stands_for", None) or kind, location)

    return compile_in_its_place


_replaced: list[tuple[ModuleType, str, Any, Any]] = []
"""Module, name, what torch has there, what mezzo put there."""


class Installed:
    """What `install` gives: as a context it uninstalls at its end, unless mezzo was installed before."""

    def __init__(self, *, first: bool) -> None:
        self._first = first

    def __enter__(self) -> None:
        if self._first:
            install()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._first:
            uninstall()


def install() -> Installed:
    """Let `torch.autocast`, `torch.amp.GradScaler`, `torch.cuda.amp` and `torch.cpu.amp` run on mezzo until `uninstall`; a second call changes nothing.

    Names that were bound earlier, by `from torch.amp import autocast`, stay torch's: install first,
    or import mezzo's.

    >>> import mezzo, torch
    >>> with install():
    ...     issubclass(torch.autocast, mezzo.autocast), isinstance(torch.amp.GradScaler("cpu"), mezzo.GradScaler)
    (True, True)
    >>> issubclass(torch.autocast, mezzo.autocast)
    False
    """
    if _replaced:
        return Installed(first=False)
    for family, places in _PLACES.items():
        for place in places:
            module = importlib.import_module(place)
            for name, ours in _OURS[family].items():
                if name in vars(module):
                    _replaced.append((module, name, vars(module)[name], ours))
    script, name = _torch.place("recursive_compile_class")
    module = importlib.import_module(script)
    if (theirs := getattr(module, name, None)) is not None:
        _replaced.append((module, name, theirs, _compile_torchs_own(theirs)))
    for module, name, _, ours in _replaced:
        setattr(module, name, ours)
    return Installed(first=True)


def uninstall() -> None:
    """Put torch's own names back; nothing happens where mezzo is not installed, and what others have put there since stays."""
    for module, name, theirs, ours in _replaced:
        if vars(module).get(name) is ours:
            setattr(module, name, theirs)
    _replaced.clear()


def is_installed() -> bool:
    """Whether torch's names are mezzo's just now."""
    return bool(_replaced)


__all__ = ["GradScaler", "autocast", "install", "is_installed", "uninstall"]
