"""All process-wide changes that mezzo makes in torch, and the hooks for regions among them.

Outside mezzo's regions, steps and averages each hook calls the original: code that does not use
mezzo gets the results and errors of plain torch, in every thread. Not listed are the replacements
of the dialects (`mezzo.compat.*.install`), which users call by name and undo with `uninstall`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.compiler import is_dynamo_compiling

from mezzo._errors import UnsupportedError
from mezzo._torch import (
    ScriptMethod,
    autocast_devices,
    checkpoint_generator,
    checkpoint_generator_impl,
    place,
)
from mezzo.autocasting import regions
from mezzo.autocasting.arguments import without_torch_autocast
from mezzo.autocasting.regions import current_regions, enter_regions, exporting, in_region
from mezzo.autocasting.wrappers import propagate_autocast


@dataclass(frozen=True)
class Hook:
    """A process-wide change of torch."""

    target: str
    """What is changed."""
    when: str
    """When it starts, and how long it lasts."""
    why: str
    """Its purpose."""
    acts: str
    """Where it has an effect. Elsewhere it calls the original."""


def _path(private: str) -> str:
    return ".".join(place(private))


_GENERATOR = (
    "checkpoint_generator" if checkpoint_generator_impl is None else "checkpoint_generator_impl"
)
"""The function that runs a checkpointed function. Since torch 2.14 torch calls the one with
`_impl`, and keeps the other for code that calls it directly."""

_IMPORT = "since the import of mezzo"

HOOKS = (
    Hook(
        _path(_GENERATOR),
        _IMPORT,
        "a recomputed forward pass runs under the policy of the original one",
        "calls of torch.utils.checkpoint in a region",
    ),
    Hook(
        "torch.utils.checkpoint.CheckpointFunction",
        _IMPORT,
        "the same for use_reentrant=True",
        "the same",
    ),
    Hook(
        "torch.jit.ScriptFunction.__call__",
        _IMPORT,
        "TorchScript's interpreter ignores policies",
        "regions whose policy overrides torch's op lists",
    ),
    Hook(_path("ScriptMethod") + ".__call__", _IMPORT, "the same for methods", "the same"),
    Hook(
        _path("export"),
        "after that module is imported",
        "torch.export ignores autocast around it",
        "exports in a region, or of a model that enters one",
    ),
    Hook(
        _path("AOTAutogradCacheDetails") + ".__init__",
        "after that module is imported",
        "the dtype of the region becomes part of the key of torch's cache of compiled code",
        "compilation in a region, or of a function that enters one",
    ),
    Hook(
        "sys.meta_path",
        "until the two modules above are imported",
        "importing them with mezzo would take a second",
        "the import of those modules",
    ),
    Hook(
        "autocast kernels of aten ops (torch.library)",
        "since the first region of a device type",
        "an op without a 16-bit kernel computes in float32",
        "mezzo's regions (see float32_kernels.py)",
    ),
    Hook(
        "torch.optim: a global step post-hook",
        _IMPORT,
        "clears cached 16-bit copies of weights, which an optimizer step makes stale",
        "while any thread is in a region: torch's cache is shared by all threads",
    ),
    Hook(
        _path("dynamo_overridable_functions"),
        "since the first region whose policy overrides torch's op lists",
        "dynamo calls function modes for functions inside torch.nn.functional too, as eager mode"
        " does",
        "compiled code under a function mode",
    ),
    Hook(
        "torch.cuda.is_current_stream_capturing",
        "during a capture",
        "model code takes the same branches as in eager mode",
        "the capturing thread, for callers outside torch and mezzo",
    ),
    Hook(
        "torch.optim: a global step pre-hook",
        "during EMA.applied() and steps of bound optimizers of unknown classes",
        "refuses a step of the same parameters by another optimizer",
        "optimizers that hold those parameters",
    ),
)
"""All process-wide changes. A test checks that there are no others."""


def install() -> None:
    """Install the hooks for regions; hooks of names that torch does not have are left out."""
    regions.export_region = without_torch_autocast
    _hook_checkpoint()
    _hook_script()
    _when_imported("export", _hook_export)
    _when_imported("AOTAutogradCacheDetails", _hook_compile_cache)


def _when_imported(private: str, hook: Callable[[ModuleType, str], None]) -> None:
    """Install a hook when its module is imported: importing torch.export takes a second."""
    name, attribute = place(private)

    def hook_if_there(module: ModuleType) -> None:
        if hasattr(module, attribute):
            hook(module, attribute)

    if name in sys.modules:
        hook_if_there(sys.modules[name])
    else:
        sys.meta_path.insert(0, _OnImport(name, hook_if_there))


def _has_table() -> bool:
    """Return whether the policy of a current region overrides torch's op lists."""
    return any(region.table_key and region.enabled for region in current_regions())


def _hook_checkpoint() -> None:
    """Bind checkpointed functions to the current regions and module rules.

    torch restores only its own autocast state when it recomputes.
    """
    generator = checkpoint_generator_impl or checkpoint_generator
    function = torch_checkpoint.CheckpointFunction

    def propagating(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(
            fn if is_dynamo_compiling() or not current_regions() else propagate_autocast(fn),
            *args,
            **kwargs,
        )

    class CheckpointFunction(function):  # type: ignore[valid-type,misc]
        @classmethod
        def apply(cls, fn: Callable[..., Any], *args: Any) -> Any:
            return function.apply(propagate_autocast(fn) if current_regions() else fn, *args)

    if generator is not None:
        setattr(torch_checkpoint, place(_GENERATOR)[1], wraps(generator)(propagating))
    CheckpointFunction.__module__ = function.__module__
    CheckpointFunction.__qualname__ = function.__qualname__
    CheckpointFunction.__doc__ = function.__doc__
    torch_checkpoint.CheckpointFunction = CheckpointFunction  # type: ignore[misc]


def _hook_script() -> None:
    """Run scripted functions as the Python function they were made from, where a policy needs it.

    TorchScript's interpreter applies only torch's own lists. torch.compile does the same.
    """
    for script_class in filter(None, (torch.jit.ScriptFunction, ScriptMethod)):
        script_class.__call__ = _call_as_python(script_class.__call__)


def _call_as_python(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def call_as_python(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_table():
            return call(self, *args, **kwargs)
        python_function = getattr(self, "_torchdynamo_inline", None)
        if python_function is None:
            raise UnsupportedError(
                f"{self.name!r} is TorchScript, whose interpreter applies torch's own op lists and"
                " would ignore this policy. Use the module that it was scripted from, or a policy"
                " with torch's own lists around it."
            )
        return python_function(*args, **kwargs)

    return call_as_python


class _OnImport(importlib.abc.MetaPathFinder):
    """Import finder that calls a hook after a module was imported."""

    def __init__(self, name: str, hook: Callable[[ModuleType], None]) -> None:
        self._name, self._hook = name, hook

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _HookingLoader(spec.loader, self._hook)
        return spec


class _HookingLoader(importlib.abc.Loader):
    """A loader that runs a hook after it has executed its module."""

    def __init__(self, loader: Any, hook: Callable[[ModuleType], None]) -> None:
        self._loader, self._hook = loader, hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._hook(module)


def _hook_export(module: ModuleType, name: str) -> None:
    """Let the function mode cast every op during an export.

    torch.export ignores the autocast state around it, but keeps the casts of a mode.
    """
    export = getattr(module, name)

    @wraps(export)
    def export_in_regions(*args: Any, **kwargs: Any) -> Any:
        regions = tuple(
            without_torch_autocast(region) for region in current_regions() if region.enabled
        )
        with exporting(), enter_regions(*regions):
            return export(*args, **kwargs)

    setattr(module, name, export_in_regions)


def _hook_compile_cache(module: ModuleType, name: str) -> None:
    """Add the dtypes of regions to the key of torch's cache of compiled code on disk.

    Before torch 2.13 the key contains only whether autocast is enabled: a function compiled in a
    float16 region got the code for bfloat16. Also, code in which an op without a 16-bit kernel
    computes in float32 must not be used by a program without mezzo.
    """
    details = getattr(module, name)
    original = details.__init__

    @wraps(original)
    def init_with_dtypes(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if in_region():
            enabled = [device for device in autocast_devices() if torch.is_autocast_enabled(device)]
            self.mezzo_autocast_dtypes = {
                device: torch.get_autocast_dtype(device) for device in enabled
            }

    details.__init__ = init_with_dtypes
