"""`torch.autocast` and `torch.amp.GradScaler` on mezzo; `install()` puts them into torch."""

from __future__ import annotations

import importlib
from functools import wraps
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from torch import amp as _amp

from mezzo import _torch
from mezzo._errors import UnsupportedError
from mezzo.compat._missing import module_getattr
from mezzo.compat.torch import _autocast, _grad_scaler
from mezzo.compat.torch._autocast import autocast
from mezzo.compat.torch._grad_scaler import GradScaler
from mezzo.policy.policy import Policy

__all__ = ["GradScaler", "autocast", "install", "is_installed", "uninstall"]


_MODULES: dict[str, tuple[str, ...]] = {
    "": ("torch", "torch.amp"),
    "cuda": ("torch.cuda.amp", "torch.cuda.amp.autocast_mode", "torch.cuda.amp.grad_scaler"),
    "cpu": ("torch.cpu.amp", "torch.cpu.amp.autocast_mode", "torch.cpu.amp.grad_scaler"),
}
"""The modules whose names `install` replaces. `torch.amp.autocast_mode` and `torch.amp.grad_scaler`
are not changed: torch.compile, torch.export and FSDP's scaler refer to the classes there, as do
`custom_fwd` and `custom_bwd`, whose regions then nest inside mezzo's."""


_REPLACEMENTS: dict[str, dict[str, Any]] = {
    "": {"autocast": _autocast.autocast, "GradScaler": _grad_scaler.GradScaler},
    "cuda": {"autocast": _autocast.cuda_autocast, "GradScaler": _grad_scaler.CudaGradScaler},
    "cpu": {"autocast": _autocast.cpu_autocast, "GradScaler": _grad_scaler.CpuGradScaler},
}


def install(policy: Policy | None = None) -> Installed:
    """Replace autocast and GradScaler in `torch`, `torch.amp`, `torch.cuda.amp`, `torch.cpu.amp`.

    They run on mezzo until `uninstall`. A second call changes nothing. Names imported before, by
    `from torch.amp import autocast`, stay torch's: install first, or import mezzo's.

    Args:
        policy: The op rules and the dtype of all regions that are created from then on; without
            one, torch's own lists and the dtype that is passed. A policy whose dtype is `"auto"`
            leaves the dtype. Regions inside compiled functions stay torch's.

    >>> import mezzo, torch
    >>> with install():
    ...     issubclass(torch.autocast, mezzo.autocast)
    True
    >>> issubclass(torch.autocast, mezzo.autocast)
    False
    """
    if _replaced:
        _check_same_policy(policy)
        return Installed(first=False)
    _autocast.use_policy(policy)
    for device, module_names in _MODULES.items():
        for module_name in module_names:
            module = importlib.import_module(module_name)
            for name, replacement in _REPLACEMENTS[device].items():
                if name in vars(module):
                    _replaced.append(_Replaced(module, name, vars(module)[name], replacement))
    module_name, name = _torch.place("recursive_compile_class")
    module = importlib.import_module(module_name)
    if (original := getattr(module, name, None)) is not None:
        _replaced.append(_Replaced(module, name, original, _compile_counterpart(original)))
    for replaced in _replaced:
        setattr(replaced.module, replaced.name, replaced.replacement)
    return Installed(first=True)


def _check_same_policy(policy: Policy | None) -> None:
    current = _autocast.current_policy()
    if policy is not None and policy != current:
        raise UnsupportedError(
            f"install(policy={policy!r}): mezzo is installed"
            f" {'without a policy' if current is None else f'with {current!r}'}. Call uninstall()"
            " first."
        )


def uninstall() -> None:
    """Restore torch's names, except those that other code has replaced since."""
    for module, name, original, replacement in _replaced:
        if vars(module).get(name) is replacement:
            setattr(module, name, original)
    _replaced.clear()
    _autocast.use_policy(None)


def is_installed() -> bool:
    """Return whether torch's names are currently mezzo's."""
    return bool(_replaced)


def _compile_counterpart(compile_class: Any) -> Any:
    """Wrap TorchScript's class compiler to compile torch's class in place of mezzo's."""

    @wraps(compile_class)
    def compile_torch_class(cls: Any, location: Any) -> Any:
        return compile_class(getattr(cls, "torch_counterpart", None) or cls, location)

    return compile_torch_class


class _Replaced(NamedTuple):
    """A name in a module of torch that `install` replaced."""

    module: ModuleType
    name: str
    original: Any
    replacement: Any


_replaced: list[_Replaced] = []


class Installed:
    """Result of `install`; as a context manager it uninstalls on exit if it installed."""

    def __init__(self, *, first: bool) -> None:
        self._first = first

    def __enter__(self) -> None:
        if self._first:
            install()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._first:
            uninstall()


__getattr__ = module_getattr(__name__, {}, counterpart=_amp)
