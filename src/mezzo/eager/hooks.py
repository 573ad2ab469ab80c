"""Where torch drops a region without asking: checkpointing, torch.export and TorchScript. Each is hooked so that the precision is carried along or refused.

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

_EXPORT = "torch.export._trace"


def install() -> None:
    """Hook what torch would run in another precision."""
    region.by_mode_alone = alone
    _hook_checkpoint()
    _hook_script()
    if _EXPORT in sys.modules:
        _hook_export(sys.modules[_EXPORT])
    else:
        sys.meta_path.insert(0, _OnImport())


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
    """Hooks torch.export when it is loaded, since loading it for the hook's sake would cost every user a second."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != _EXPORT:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Hooking(spec.loader)
        return spec


class _Hooking(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _hook_export(module)


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
