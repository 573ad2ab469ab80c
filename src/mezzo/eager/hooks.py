"""Hooks where torch drops a region, so that the precision is carried along or refused: checkpointing, torch.export, TorchScript, the cache of compiled code.

Installed once, when `mezzo.eager` is imported; outside mezzo's regions the hooks hand straight through.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.compiler import is_dynamo_compiling

from mezzo._errors import UnsupportedError
from mezzo.eager import region
from mezzo.eager.carry import carry
from mezzo.eager.region import current_regions, inside
from mezzo.eager.settle import alone


def install() -> None:
    """Hook what torch would run in another precision."""
    region.by_mode_alone = alone
    _hook_checkpoint()
    _hook_script()
    _when_imported("torch.export._trace", _hook_export)
    if torch.__version__ < "2.13":  # torch compares versions here, not strings
        _when_imported("torch._functorch._aot_autograd.autograd_cache", _hook_compile_cache)


def _when_imported(name: str, hook: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        hook(sys.modules[name])
    else:
        sys.meta_path.insert(0, _OnImport(name, hook))


def _is_steered() -> bool:
    return any(one.key and one.enabled for one in current_regions())


def _hook_checkpoint() -> None:
    """torch restores its own autocast state when it recomputes; a policy's op lists and module rules are carried by the function itself."""
    # Since torch 2.14 the one with `_impl` is called, and the other is there for those who call it themselves.
    name = next(name for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator") if hasattr(torch_checkpoint, name))
    generator, function = getattr(torch_checkpoint, name), torch_checkpoint.CheckpointFunction

    @wraps(generator)
    def carrying(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(fn if is_dynamo_compiling() or not current_regions() else carry(fn), *args, **kwargs)

    class CheckpointFunction(function):  # type: ignore[valid-type,misc]
        @classmethod
        def apply(cls, fn: Callable[..., Any], *args: Any) -> Any:
            return function.apply(carry(fn) if current_regions() else fn, *args)

    setattr(torch_checkpoint, name, carrying)
    torch_checkpoint.CheckpointFunction = CheckpointFunction  # type: ignore[misc]


def _hook_script() -> None:
    """TorchScript's interpreter knows torch's own lists only. A function is run as the Python that it was made from, as compiled code does too."""
    for kind in (torch.jit.ScriptFunction, torch._C.ScriptMethod):
        kind.__call__ = _steered(kind.__call__)  # type: ignore[method-assign]


def _steered(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_steered():
            return call(self, *args, **kwargs)
        written = getattr(self, "_torchdynamo_inline", None)
        if written is None:
            raise UnsupportedError(
                f"{self.name!r} is TorchScript, whose interpreter applies torch's own op lists and would ignore this policy. "
                "Use the module it was scripted from, or a policy without entries of its own around it."
            )
        return written(*args, **kwargs)

    return checked


class _OnImport(importlib.abc.MetaPathFinder):
    """Hooks a module of torch when it is imported. Importing torch.export for the hook alone would take a second."""

    def __init__(self, name: str, hook: Callable[[ModuleType], None]) -> None:
        self._name, self._hook = name, hook

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Hooking(spec.loader, self._hook)
        return spec


class _Hooking(importlib.abc.Loader):
    def __init__(self, loader: Any, hook: Callable[[ModuleType], None]) -> None:
        self._loader, self._hook = loader, hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._hook(module)


def _hook_export(module: ModuleType) -> None:
    """torch.export ignores the autocast state around it; casts made by a mode survive. So the whole policy is given to the mode while it exports."""
    export = module._export

    @wraps(export)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        regions = tuple(alone(one) for one in current_regions() if one.enabled)
        before, region.exporting = region.exporting, True
        try:
            with inside(*regions):
                return export(*args, **kwargs)
        finally:
            region.exporting = before

    module._export = keeping  # type: ignore[attr-defined]


def _hook_compile_cache(module: ModuleType) -> None:
    """Make the dtype of a region part of the key of torch's cache on disk.

    The key says only whether autocast is on: after bfloat16, a function compiled in a float16 region would be served the code for bfloat16. torch 2.13 has the same cure.
    """
    details = module.AOTAutogradCacheDetails
    make = details.__init__

    @wraps(make)
    def keyed(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if current_regions():
            enabled = [device for device in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(device)]
            self.mezzo_autocast_dtypes = {device: torch.get_autocast_dtype(device) for device in enabled}

    details.__init__ = keyed
