"""Enter and leave autocast regions.

A region sets torch's autocast state and, if the policy differs from torch's own lists, pushes the
function mode. It also avoids errors of torch's weight cache, at no cost in the usual case: the
cache would return stale copies after an optimizer step inside a region, and copies of the wrong
dtype in nested regions or in other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch.amp.autocast_mode import autocast as torch_autocast
from torch.compiler import is_dynamo_compiling
from torch.fx import traceback
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo._dtypes import dtype_name
from mezzo._errors import UnsupportedError
from mezzo._torch import CompileContext, function_mode_at, function_mode_count
from mezzo.autocasting.dynamo import dynamo_constant, skip_frame
from mezzo.autocasting.function_mode import AutocastMode, active_mode
from mezzo.autocasting.table_lookup import PolicyTable, register_with_dynamo
from mezzo.autocasting.weight_cache import CacheInfo, WeightCache


@dataclass(frozen=True, slots=True)
class Region:
    """A resolved region: a plain value that can be entered any number of times, in any thread."""

    device: str
    enabled: bool
    dtype: torch.dtype | None
    """None for the dtype that torch has set for the device when the region is entered."""
    cache_enabled: bool | None
    """Whether to use torch's weight cache; None leaves its setting unchanged."""
    table_key: str = ""
    """Key of the table of cast actions; empty if torch's own lists are the policy."""
    table: PolicyTable | None = field(default=None, compare=False, repr=False)
    """The table, which lives as long as regions hold it; None without one, and in compiled code."""
    from_module_rule: bool = False
    """Whether a module rule entered the region. If it is disabled, the rules of modules inside
    still apply, unlike in a region that the user disabled."""

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype, or the one that torch has set for the device now."""
        return torch.get_autocast_dtype(self.device) if self.dtype is None else self.dtype

    def disabled(self) -> Region:
        """Return the same region with autocast off."""
        return Region(self.device, False, self.dtype, self.cache_enabled)

    def encode(self) -> str:
        """Return the region as a string, which compiled code can use without guards."""
        return _SEPARATOR.join(
            [
                self.device,
                str(self.enabled),
                "" if self.dtype is None else dtype_name(self.dtype),
                self.table_key,
            ]
        )

    @classmethod
    def decode(cls, code: str) -> Self:
        """Return the region of a string that `encode` made, in code that dynamo can trace."""
        device, enabled, dtype, key = code.split(_SEPARATOR)
        return cls(device, enabled == "True", getattr(torch, dtype) if dtype else None, False, key)


_SEPARATOR = "\x1f"


@dataclass(slots=True)
class EnteredRegion:
    """A region that a thread is in, and the state that `leave` restores."""

    region: Region
    computes_in: torch.dtype
    enabled_before: bool
    dtype_before: torch.dtype | None
    """None if the region did not change the dtype."""
    cache_before: bool
    mode: AutocastMode | None
    table_key_before: str
    """Key that the mode had; empty if the region pushed it."""
    pushed: tuple[AutocastMode, ...]
    """Modes to pop, the last one first: its own, after those of regions that were left first."""

    def inherit_cache_and_modes(self, outer: EnteredRegion) -> None:
        """Restore torch's cache setting and pop modes in place of a region that was left first."""
        self.cache_before = outer.cache_before
        self.pushed = outer.release_modes() + self.pushed

    def release_modes(self) -> tuple[AutocastMode, ...]:
        """Return the modes to pop, which another region pops from now on."""
        released, self.pushed = self.pushed, ()
        return released

    def inherit_autocast(self, outer: EnteredRegion) -> None:
        """Restore the state of the device in place of an outer region that was left first."""
        self.enabled_before = outer.enabled_before
        if outer.dtype_before is not None:
            self.dtype_before = outer.dtype_before
        if outer.mode is not None:
            self.mode, self.table_key_before = outer.mode, outer.table_key_before


class _Stack(list[EnteredRegion]):
    """The regions that a thread is in, innermost last; a class to be weakly referenced."""


class _Thread(threading.local):
    """What each thread knows of its regions, its compilation and its export."""

    def __init__(self) -> None:
        self.stack = _Stack()
        self.compiled: object = None
        self.exporting = False
        self.outer_metadata: list[Any] = []
        _stacks[threading.get_ident()] = self.stack


_stacks: WeakValueDictionary[int, _Stack] = WeakValueDictionary()
"""The regions of every thread. Weak: a thread that ends inside a region must not leave it to a
later thread with the same id."""

_thread = _Thread()


@skip_frame
def enter(region: Region) -> EnteredRegion:
    """Enter a region in this thread; return what `leave` needs."""
    device, dtype = region.device, region.dtype
    before = torch.get_autocast_dtype(device)
    changed = None if dtype is None or dtype is before else before
    cached = torch.is_autocast_cache_enabled()
    mode, is_pushed, key = (
        _push_mode(region) if region.table_key or function_mode_count() else _NO_MODE
    )
    pushed = () if mode is None or not is_pushed else (mode,)
    enabled = torch.is_autocast_enabled(device)
    entered = EnteredRegion(region, dtype or before, enabled, changed, cached, mode, key, pushed)
    nesting = torch.autocast_increment_nesting()
    if dtype is not None and changed is not None:
        torch.set_autocast_dtype(device, dtype)
        if nesting > 1:
            # torch's cache is keyed on the weight only and would return the outer region's dtype.
            torch.clear_autocast_cache()
    torch.set_autocast_enabled(device, region.enabled)
    # Publish this region before reading those of other threads: of two threads that enter at the
    # same time, at least one sees the other.
    _thread.stack.append(entered)
    use_cache = cached if region.cache_enabled is None else region.cache_enabled
    torch.set_autocast_cache_enabled(
        use_cache and not (len(_stacks) > 1 and _another_dtype_elsewhere(dtype or before))
    )
    if _thread.exporting:
        _mark_exported_nodes()
    return entered


@skip_frame
def leave(entered: EnteredRegion) -> None:
    """Restore the state before `enter`."""
    stack = _thread.stack
    if _thread.exporting and _thread.outer_metadata:
        traceback.current_meta["custom"] = _thread.outer_metadata.pop() or {}
    if torch.autocast_decrement_nesting() == 0 or entered.dtype_before is not None:
        torch.clear_autocast_cache()
    if stack and stack[-1] is not entered:
        _hand_over(stack, entered)
        return
    if stack:
        stack.pop()
    _restore_device(entered)
    torch.set_autocast_cache_enabled(entered.cache_before)
    for mode in reversed(entered.pushed):
        mode.__exit__(None, None, None)


def _restore_device(entered: EnteredRegion) -> None:
    """Restore the autocast state of the device of a region, and the table of a mode that stays."""
    torch.set_autocast_enabled(entered.region.device, entered.enabled_before)
    if entered.dtype_before is not None:
        torch.set_autocast_dtype(entered.region.device, entered.dtype_before)
    if entered.mode is not None and entered.mode not in entered.pushed:
        entered.mode.use_table(entered.table_key_before)


def _hand_over(stack: _Stack, left: EnteredRegion) -> None:
    """Leave a region that is not the innermost: the next one restores what it would have restored.

    This happens to a suspended generator, and if `enable_autocast` was called inside the region.
    """
    index = next(index for index, entered in enumerate(stack) if entered is left)
    del stack[index]
    # Modes are popped in order, and regions of other devices may have pushed theirs since.
    stack[index].inherit_cache_and_modes(left)
    device = left.region.device
    inner = next((entered for entered in stack[index:] if entered.region.device == device), None)
    if inner is not None:
        inner.inherit_autocast(left)
    else:
        _restore_device(left)


_NO_MODE: tuple[None, bool, str] = (None, False, "")


@dynamo_constant
def is_exporting() -> bool:
    """Return whether torch.export runs in this thread.

    `torch.compiler.is_exporting` returns True in every compilation in torch 2.11.
    """
    return _thread.exporting


@contextmanager
def exporting() -> Iterator[None]:
    """Mark that torch.export runs in this thread."""
    before, _thread.exporting = _thread.exporting, True
    try:
        yield
    finally:
        _thread.exporting = before


REGION_NOTE = "mezzo_region"
"""Metadata of exported nodes inside a region, which `convert` reads: their precision is fixed."""


def _mark_exported_nodes() -> None:
    # `current_meta` is looked up in its module: torch replaces it when it starts to trace.
    _thread.outer_metadata.append(traceback.current_meta.get("custom"))
    custom = traceback.current_meta.get("custom") or {}
    traceback.current_meta["custom"] = {**custom, REGION_NOTE: True}


# Replaced when the hooks are installed.
export_region: Callable[[Region], Region] = lambda region: region  # noqa: E731
"""Return an equivalent region that does not use torch's own lists, which torch.export ignores."""


def _push_mode(region: Region) -> tuple[AutocastMode | None, bool, str]:
    """Push a mode for the region, or set its key in the active one.

    Returns the mode, whether it was pushed, and the key that it had before.
    """
    if is_exporting() and region.enabled:
        region = export_region(region)
    mode = active_mode(region.device)
    if mode is None:
        if not region.table_key:
            return _NO_MODE
        register_with_dynamo()
        mode = AutocastMode(region.device, region.table_key)
        mode.__enter__()
        return mode, True, ""
    return mode, False, mode.use_table(region.table_key)


def _pop_mode(mode: AutocastMode, key: str, *, pushed: bool) -> None:
    if pushed:
        mode.__exit__(None, None, None)
    else:
        mode.use_table(key)


def _another_dtype_elsewhere(dtype: torch.dtype) -> bool:
    """Return whether another thread has entered a region of the other 16-bit dtype.

    torch's cache is shared by all threads and does not distinguish dtypes. Outer regions count,
    since the thread returns to them.
    """
    others = [stack for stack in _stacks.values() if stack is not _thread.stack]
    return any(
        entered.region.enabled and entered.computes_in is not dtype
        for stack in others
        for entered in list(stack)
    )


@dataclass(slots=True)
class TracedRegion:
    """A region that compiled code has entered: torch's own region, and the mode."""

    native: Any
    mode: AutocastMode | None
    pushed: bool
    table_key: str


@contextmanager
def _native(device: str, dtype: torch.dtype, enabled: bool) -> Iterator[None]:  # noqa: FBT001
    """Enter torch's own region in the one form that dynamo traces in every version since 2.11.

    That is a `with` in a generator. torch's cache is off: compiled code shares casts without it.
    """
    # Not `torch.autocast`, which other code may have replaced.
    with torch_autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def enter_traced(region: Region) -> TracedRegion:
    """Enter a region in code that dynamo traces."""
    if is_exporting():
        raise UnsupportedError(
            "torch.export(strict=True) drops a mezzo region inside the model. Export with"
            " strict=False, or put the region around the export."
        )
    _note_compiled()
    mode, pushed, key = _push_mode(region)
    native = _native(region.device, region.computes_in, region.enabled)
    native.__enter__()
    return TracedRegion(native, mode, pushed, key)


def leave_traced(traced: TracedRegion) -> None:
    """Leave a region in code that dynamo traces."""
    traced.native.__exit__(None, None, None)
    if traced.mode is not None:
        _pop_mode(traced.mode, traced.table_key, pushed=traced.pushed)


def in_region() -> bool:
    """Return whether this thread is in a region, or compiles a function that enters one."""
    if _thread.stack:
        return True
    return _thread.compiled is not None and _thread.compiled == _compile_id()


def _compile_id() -> object:
    """Return torch's id of the current compilation; None if there is none, or torch has no ids."""
    return None if CompileContext is None else CompileContext.current_compile_id()


@dynamo_constant
def _note_compiled() -> None:
    """Record that the current compilation enters a region.

    torch traces the function again after dynamo, when no region is on the stack.
    """
    _thread.compiled = _compile_id()


def current_regions() -> tuple[Region, ...]:
    """Return the innermost region of each device type, with torch's current state.

    The state may differ from the region's if a region of torch was entered inside.
    """
    innermost = {entered.region.device: entered.region for entered in _thread.stack}
    return tuple(
        Region(
            device,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            region.cache_enabled,
            region.table_key,
            region.table,
            region.from_module_rule,
        )
        for device, region in innermost.items()
    )


def innermost_region(device: str | None = None) -> Region | None:
    """Return the region that this thread entered last, for one device type or any."""
    return next(
        (
            entered.region
            for entered in reversed(_thread.stack)
            if device is None or entered.region.device == device
        ),
        None,
    )


class enter_regions:  # noqa: N801 - a function in all but state: `with enter_regions(region):`
    """Context manager that enters regions in order and leaves them in reverse, also when traced."""

    def __init__(self, *regions: Region) -> None:
        self._regions = regions
        self._entered: list[EnteredRegion | TracedRegion] = []

    @skip_frame
    def __enter__(self) -> None:
        for region in self._regions:
            self._entered.append(enter_traced(region) if is_dynamo_compiling() else enter(region))

    @skip_frame
    def __exit__(self, *_: object) -> None:
        for _region in self._regions:
            entered = self._entered.pop()
            if isinstance(entered, TracedRegion):
                leave_traced(entered)
            else:
                leave(entered)


def clear_weight_cache() -> None:
    """Drop all 16-bit copies of weights, in torch's cache and in this thread's regions.

    Call it inside a region after a change that torch does not track: `p.data.add_(1)`, or a write
    from outside torch. Optimizer steps and in-place ops are detected without it.
    """
    torch.clear_autocast_cache()
    for cache in _caches():
        cache.clear()


def weight_cache_info() -> CacheInfo:
    """Return size, bytes, hits and misses of the weight cache in this thread's regions.

    The cache holds 16-bit copies of float32 weights and is dropped when the outermost region ends.
    torch's cache, which regions with torch's own op lists use, has no such counters.

    >>> import mezzo
    >>> linear = torch.nn.Linear(2, 2, bias=False)
    >>> with mezzo.autocast("O1", device_type="cpu", dtype="bfloat16", full={"softmax"}):
    ...     _ = linear(linear(torch.ones(1, 2)))
    ...     weight_cache_info()
    CacheInfo(size=1, bytes=8, hits=1, misses=1)
    >>> weight_cache_info()
    CacheInfo(size=0, bytes=0, hits=0, misses=0)
    """
    infos = [cache.info() for cache in _caches()]
    return CacheInfo(
        *(
            sum(getattr(info, name) for info in infos)
            for name in ("size", "bytes", "hits", "misses")
        )
    )


def _caches() -> list[WeightCache]:
    modes = map(function_mode_at, range(function_mode_count()))
    return [mode.cache for mode in modes if isinstance(mode, AutocastMode)]


def _after_optimizer_step(*_: object) -> None:
    # Fused optimizers do not increment the version of a weight, and torch's cache ignores it.
    if any(_stacks.values()):
        clear_weight_cache()


register_optimizer_step_post_hook(_after_optimizer_step)
