"""Entering and leaving a region: torch's own autocast state, and the steering mode where the policy is not torch's own.

What torch gets wrong is put right here, at no cost while nothing is wrong: another 16-bit dtype
inside a region or in another thread, and an optimizer step inside a region, would all be served
stale copies from torch's weight cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch.amp.autocast_mode import autocast as torchs_own
from torch.compiler import is_dynamo_compiling
from torch.fx import traceback
from torch.optim.optimizer import register_optimizer_step_post_hook

from mezzo._dtypes import dtype_name
from mezzo._errors import UnsupportedError
from mezzo._torch import CompileContext, function_mode_at, function_mode_count
from mezzo.autocasting.dynamo import dynamo_constant, skip_frame
from mezzo.autocasting.function_mode import AutocastMode, active_mode
from mezzo.autocasting.table_lookup import register_with_dynamo
from mezzo.autocasting.weight_cache import CacheInfo, WeightCache


@dataclass(frozen=True, slots=True)
class Region:
    """What a region does, settled: a plain value that can be entered any number of times, in any thread."""

    device: str
    enabled: bool
    dtype: torch.dtype | None
    """None takes the dtype that torch has for the device at that moment."""
    cache_enabled: bool | None
    """Whether torch's own weight cache is used; None leaves it as it is."""
    key: str = ""
    """Names the steering table; empty where torch's own lists are the policy."""
    owner: object = field(default=None, compare=False, repr=False)
    """What keeps that table alive."""
    ruled: bool = False
    """Whether a module rule entered it. One that is off does not switch off the rules of the
    modules inside, as a disabled region of the user does."""

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype, which may be the one that torch has for the device just now."""
        return torch.get_autocast_dtype(self.device) if self.dtype is None else self.dtype

    def encode(self) -> str:
        """The region as one string: the only kind of value that compiled code can take over without guards on it."""
        return _SEPARATOR.join(
            [
                self.device,
                str(self.enabled),
                "" if self.dtype is None else dtype_name(self.dtype),
                self.key,
            ]
        )

    @classmethod
    def decode(cls, code: str) -> Self:
        """Read `encode`'s string, in words that dynamo can trace."""
        device, enabled, dtype, key = code.split(_SEPARATOR)
        return cls(device, enabled == "True", getattr(torch, dtype) if dtype else None, False, key)


_SEPARATOR = "\x1f"


Entered = list[Any]
"""What to put back: the region, whether autocast was on, the dtype if it changed, torch's cache,
the steering mode, whether it was pushed, its key, and the dtype it computes in. A bare list,
since a region is entered at every step and a record of names costs a tenth of it."""


class _Stack(list[Entered]):
    """The regions that a thread has entered, innermost last."""


class _Mine(threading.local):
    def __init__(self) -> None:
        self.stack = _Stack()
        self.compiled: object = None
        self.exporting = False
        self.notes: list[Any] = []
        _stacks[threading.get_ident()] = self.stack


_stacks: WeakValueDictionary[int, _Stack] = WeakValueDictionary()
"""Every thread's regions. A thread that ends inside a region takes them along: its number will
be another's."""

_mine = _Mine()


@skip_frame
def enter(region: Region) -> Entered:
    """Make a region the current one of this thread."""
    device, dtype = region.device, region.dtype
    before = torch.get_autocast_dtype(device)
    changed = None if dtype is None or dtype is before else before
    cached = torch.is_autocast_cache_enabled()
    steered = _push_mode(region) if region.key or function_mode_count() else _NO_MODE
    entered = [
        region,
        torch.is_autocast_enabled(device),
        changed,
        cached,
        *steered,
        dtype or before,
    ]
    nesting = torch.autocast_increment_nesting()
    if dtype is not None and changed is not None:
        torch.set_autocast_dtype(device, dtype)
        if nesting > 1:
            # torch's cache is keyed on the weight alone and would serve the outer region's dtype.
            torch.clear_autocast_cache()
    torch.set_autocast_enabled(device, region.enabled)
    # First known to the others, then looking at them: of two that enter at once, at least one sees
    # the other.
    _mine.stack.append(entered)
    wanted = cached if region.cache_enabled is None else region.cache_enabled
    torch.set_autocast_cache_enabled(
        wanted and not (len(_stacks) > 1 and _another_dtype_elsewhere(dtype or before))
    )
    if _mine.exporting:
        # Through its module: torch replaces the table when it starts to trace.
        _mine.notes.append(traceback.current_meta.get("custom"))
        traceback.current_meta["custom"] = {
            **(traceback.current_meta.get("custom") or {}),
            NOTE: True,
        }
    return entered


@skip_frame
def leave(entered: Entered) -> None:
    """Put everything back as it was before `enter`."""
    region, enabled, changed, cached, steering, pushed, key, _ = entered
    stack = _mine.stack
    if _mine.exporting and _mine.notes:
        traceback.current_meta["custom"] = _mine.notes.pop() or {}
    if torch.autocast_decrement_nesting() == 0 or changed is not None:
        torch.clear_autocast_cache()
    if stack and stack[-1] is not entered:
        _hand_over(stack, entered)
        return
    if stack:
        stack.pop()
    torch.set_autocast_enabled(region.device, enabled)
    if changed is not None:
        torch.set_autocast_dtype(region.device, changed)
    torch.set_autocast_cache_enabled(cached)
    if steering is not None:
        _pop_mode(steering, key, pushed=pushed)


def _hand_over(stack: _Stack, entered: Entered) -> None:
    """Leave a region that is not the innermost (a suspended generator's, or one that `enable` was called in): the next one puts back what it would have."""
    place = next(index for index, one in enumerate(stack) if one is entered)
    del stack[place]
    _, enabled, changed, cached, steering, pushed, key, _ = entered
    stack[place][_CACHED] = cached
    heir = next((one for one in stack[place:] if one[0].device == entered[0].device), None)
    if heir is not None:
        kept = heir[_CHANGED] if changed is None else changed
        mode = [steering, pushed, key] if steering is not None else heir[_STEERING : _KEY + 1]
        heir[_ENABLED:-1] = [enabled, kept, heir[_CACHED], *mode]


_ENABLED, _CHANGED, _CACHED, _STEERING, _PUSHED, _KEY = range(1, 7)


_NO_MODE: tuple[None, bool, str] = (None, False, "")


@dynamo_constant
def is_exporting() -> bool:
    """Whether torch.export is at work in this thread. torch's own question, `torch.compiler.is_exporting`, says yes to every compilation in torch 2.11."""
    return _mine.exporting


@contextmanager
def exporting() -> Iterator[None]:
    """Note that torch.export is at work in this thread."""
    before, _mine.exporting = _mine.exporting, True
    try:
        yield
    finally:
        _mine.exporting = before


NOTE = "mezzo_region"
"""What torch.export notes on every node inside a region, for who converts the graph: its
precision is settled. Nobody else would know that a region was there."""

# Replaced when the hooks are installed.
export_region: Callable[[Region], Region] = lambda region: region  # noqa: E731
"""Turns a region into one that leaves nothing to torch's own lists, which torch.export does not
hear."""


def _push_mode(region: Region) -> tuple[AutocastMode | None, bool, str]:
    if is_exporting() and region.enabled:
        region = export_region(region)
    steering = active_mode(region.device)
    if steering is None:
        if not region.key:
            return _NO_MODE
        register_with_dynamo()
        steering = AutocastMode(region.device, region.key)
        steering.__enter__()  # type: ignore[no-untyped-call]
        return steering, True, ""
    before = steering.key
    steering.key = region.key
    return steering, False, before


def _pop_mode(steering: AutocastMode, key: str, *, pushed: bool) -> None:
    if pushed:
        steering.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    else:
        steering.key = key


def _another_dtype_elsewhere(dtype: torch.dtype) -> bool:
    """Whether another thread has a region of the other 16-bit dtype, if only one to come back to: torch's cache is one for all and does not tell dtypes apart."""
    others = [stack for stack in _stacks.values() if stack is not _mine.stack]
    return any(one[0].enabled and one[-1] is not dtype for stack in others for one in list(stack))


@dataclass(slots=True)
class Traced:
    """A region inside compiled code: dynamo records torch's own enter and exit calls in the graph, and the mode in its stack."""

    native: Any
    steering: AutocastMode | None
    pushed: bool
    key: str


@contextmanager
def _native(device: str, dtype: torch.dtype, enabled: bool) -> Iterator[None]:  # noqa: FBT001
    """torch's own region in the one shape that dynamo traces in every version since 2.11: a `with` inside a generator.

    Without torch's cache: compiled code shares casts by itself, and the cache's defects stay out.
    """
    # Not by the name `torch.autocast`, under which others may have put something else.
    with torchs_own(device, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def enter_traced(region: Region) -> Traced:
    """`enter` in words that dynamo can trace."""
    if is_exporting():
        raise UnsupportedError(
            "torch.export(strict=True) drops a mezzo region inside the model. Export with"
            " strict=False, or put the region around the export."
        )
    _note_compiled()
    steering, pushed, key = _push_mode(region)
    native = _native(region.device, region.computes_in, region.enabled)
    native.__enter__()
    return Traced(native, steering, pushed, key)


def leave_traced(traced: Traced) -> None:
    """`leave` in words that dynamo can trace."""
    traced.native.__exit__(None, None, None)
    if traced.steering is not None:
        _pop_mode(traced.steering, traced.key, pushed=traced.pushed)


def in_region() -> bool:
    """Whether this thread is in a region, or compiles a function that enters one."""
    if _mine.stack:
        return True
    return _mine.compiled is not None and _mine.compiled == _compile_id()


def _compile_id() -> object:
    """What torch compiles just now, if anything; None too where torch does not say."""
    return None if CompileContext is None else CompileContext.current_compile_id()


@dynamo_constant
def _note_compiled() -> None:
    """Remember that what this thread compiles enters a region: torch traces it once more after dynamo, when no region is on the stack."""
    _mine.compiled = _compile_id()


def current_regions() -> tuple[Region, ...]:
    """The regions of this thread that are in force, for each device type the innermost, as torch's own regions inside them have left them."""
    innermost = {entered[0].device: entered[0] for entered in _mine.stack}
    return tuple(
        Region(
            device,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            region.cache_enabled,
            region.key,
            region.owner,
            region.ruled,
        )
        for device, region in innermost.items()
    )


def innermost_region(device: str | None = None) -> Region | None:
    """The region that this thread entered last, for any device type or for one."""
    return next(
        (
            entered[0]
            for entered in reversed(_mine.stack)
            if device is None or entered[0].device == device
        ),
        None,
    )


class enter_regions:  # noqa: N801 - reads as a phrase: `with inside(region):`
    """Regions as a context: entered in order, left in reverse, any number of times, in eager and in compiled code."""

    def __init__(self, *regions: Region) -> None:
        self._regions = regions
        self._records: list[Entered | Traced] = []

    @skip_frame
    def __enter__(self) -> None:
        for region in self._regions:
            self._records.append(enter_traced(region) if is_dynamo_compiling() else enter(region))

    @skip_frame
    def __exit__(self, *_: object) -> None:
        for _region in self._regions:
            record = self._records.pop()
            if isinstance(record, Traced):
                leave_traced(record)
            else:
                leave(record)


def clear_weight_cache() -> None:
    """Forget every 16-bit copy of a weight, in torch's cache and in this thread's own.

    Needed after a change that torch does not count: `p.data.add_(1)`, or a write from outside
    torch. Optimizer steps and in-place ops are noticed by themselves.
    """
    torch.clear_autocast_cache()
    for cache in _caches():
        cache.clear()


def weight_cache_info() -> CacheInfo:
    """What this thread's weight cache holds, and how often it served.

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
    # Fused optimizers do not move a weight's version, and torch's own cache never looks at it.
    if any(_stacks.values()):
        clear_weight_cache()


register_optimizer_step_post_hook(_after_optimizer_step)
