"""Everything that mezzo changes in torch for the whole process, in one table, and the hooks among it that carry autocast regions along.

Outside mezzo's regions, steps and averages each hook passes straight through: code that does not
use mezzo gets the results and errors of plain torch, in every thread. What the dialects replace
(`mezzo.compat.*.install`) is asked for by name, undone by `uninstall`, and is not listed here.
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
    """A change of torch that the whole process can see."""

    target: str
    """What is changed."""
    when: str
    """From when on, or for how long."""
    why: str
    """What it is for."""
    acts: str
    """Where it acts. Everywhere else it passes straight through."""


def _at(private: str) -> str:
    return ".".join(place(private))


_GENERATOR = (
    "checkpoint_generator" if checkpoint_generator_impl is None else "checkpoint_generator_impl"
)
"""What runs a checkpointed function. Since torch 2.14 the one with `_impl` is called, and the
other is there for those who call it themselves."""


_IMPORT = "from the import of mezzo on"

HOOKS = (
    Hook(
        _at(_GENERATOR),
        _IMPORT,
        "a recomputed forward pass runs under the policy of the first one",
        "calls of torch.utils.checkpoint in a region of this thread",
    ),
    Hook(
        "torch.utils.checkpoint.CheckpointFunction",
        _IMPORT,
        "the same with use_reentrant=True",
        "the same",
    ),
    Hook(
        "torch.jit.ScriptFunction.__call__",
        _IMPORT,
        "TorchScript's interpreter ignores policies",
        "regions with op rules of their own",
    ),
    Hook(_at("ScriptMethod") + ".__call__", _IMPORT, "the same for methods", "the same"),
    Hook(
        _at("export"),
        "once that module is imported",
        "torch.export ignores autocast around it",
        "exports in a region, or of one",
    ),
    Hook(
        _at("AOTAutogradCacheDetails") + ".__init__",
        "once that module is imported",
        "the key of torch's cache of compiled code names the region's dtype",
        "compilation in a region, or of one",
    ),
    Hook(
        "sys.meta_path",
        "until the two modules above are imported",
        "importing them early would take a second",
        "their import",
    ),
    Hook(
        "autocast kernels of aten ops (torch.library)",
        "from the first region of a device type on",
        "an op without a 16-bit kernel computes in float32",
        "regions: see float32_kernels.py",
    ),
    Hook(
        "torch.optim: a global step post-hook",
        _IMPORT,
        "an optimizer step makes the cached 16-bit copies of weights stale",
        "processes with an open region: torch's cache is one for all threads",
    ),
    Hook(
        _at("dynamo_overridable_functions"),
        "from the first compiled region with op rules of its own on",
        "dynamo asks function modes about the functions inside torch.nn.functional too, as eager"
        " mode does",
        "compiled code under a function mode",
    ),
    Hook(
        "torch.cuda.is_current_stream_capturing",
        "during a capture",
        "model code takes the path that it takes in eager mode",
        "the capturing thread, for callers outside torch and mezzo",
    ),
    Hook(
        "torch.optim: a global step pre-hook",
        "during EMA.applied() and the step of a bound optimizer that mezzo does not know",
        "refuses a step of the same parameters by another optimizer",
        "optimizers that hold those parameters",
    ),
)
"""Every change, for readers and for the test that looks for others."""


def install() -> None:
    """Install the hooks that carry regions along; a name that torch does not have leaves out the hook that needs it."""
    regions.export_region = without_torch_autocast
    _hook_checkpoint()
    _hook_script()
    _when_imported("export", _hook_export)
    _when_imported("AOTAutogradCacheDetails", _hook_compile_cache)


def _when_imported(private: str, hook: Callable[[ModuleType, str], None]) -> None:
    """Hook a name of a module that torch imports late: importing torch.export for a hook alone would take a second."""
    name, attribute = place(private)

    def hook_if_there(module: ModuleType) -> None:
        if hasattr(module, attribute):
            hook(module, attribute)

    if name in sys.modules:
        hook_if_there(sys.modules[name])
    else:
        sys.meta_path.insert(0, _OnImport(name, hook_if_there))


def _has_mode() -> bool:
    return any(one.key and one.enabled for one in current_regions())


def _hook_checkpoint() -> None:
    """torch restores its own autocast state when it recomputes; a policy's op lists and module rules are carried by the function itself."""
    generator, function = (
        checkpoint_generator_impl or checkpoint_generator,
        torch_checkpoint.CheckpointFunction,
    )

    def carrying(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
        setattr(torch_checkpoint, place(_GENERATOR)[1], wraps(generator)(carrying))
    torch_checkpoint.CheckpointFunction = CheckpointFunction  # type: ignore[misc]


def _hook_script() -> None:
    """TorchScript's interpreter knows torch's own lists only. A function is run as the Python that it was made from, as compiled code does too."""
    for kind in filter(None, (torch.jit.ScriptFunction, ScriptMethod)):
        kind.__call__ = _under_mode(kind.__call__)


def _under_mode(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_mode():
            return call(self, *args, **kwargs)
        written = getattr(self, "_torchdynamo_inline", None)
        if written is None:
            raise UnsupportedError(
                f"{self.name!r} is TorchScript, whose interpreter applies torch's own op lists and"
                " would ignore this policy. Use the module it was scripted from, or a policy"
                " without entries of its own around it."
            )
        return written(*args, **kwargs)

    return checked


class _OnImport(importlib.abc.MetaPathFinder):
    """Hook a module of torch when it is imported."""

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


def _hook_export(module: ModuleType, name: str) -> None:
    """torch.export ignores the autocast state around it; casts made by a mode survive. So the whole policy is given to the mode while it exports."""
    export = getattr(module, name)

    @wraps(export)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        regions = tuple(without_torch_autocast(one) for one in current_regions() if one.enabled)
        with exporting(), enter_regions(*regions):
            return export(*args, **kwargs)

    setattr(module, name, keeping)


def _hook_compile_cache(module: ModuleType, name: str) -> None:
    """Make mezzo's regions, with their dtypes, part of the key of torch's cache of compiled code on disk.

    Before torch 2.13 the key said only whether autocast is on: after bfloat16, a function compiled
    in a float16 region was served the code for bfloat16. And code in which an op without a 16-bit
    kernel computes in float32 must not be served to a program without mezzo.
    """
    details = getattr(module, name)
    make = details.__init__

    @wraps(make)
    def keyed(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if in_region():
            enabled = [device for device in autocast_devices() if torch.is_autocast_enabled(device)]
            self.mezzo_autocast_dtypes = {
                device: torch.get_autocast_dtype(device) for device in enabled
            }

    details.__init__ = keyed
