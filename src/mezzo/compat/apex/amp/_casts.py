"""Casts of Apex's O1: the handle, `amp.init`, decorated and registered functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import finalize

import torch
from torch import nn

from mezzo.autocasting.autocast import autocast, disable_autocast, set_thread_region, thread_region
from mezzo.autocasting.function_mode import AutocastMode, active_mode
from mezzo.autocasting.op_table import CastAction
from mezzo.autocasting.regions import Region, clear_weight_cache, enter_regions, innermost_region
from mezzo.compat.apex.amp._amp_state import _amp_state
from mezzo.policy.registry import registry
from mezzo.policy.types import Rule

registered_rules: dict[str, Rule] = {}
"""Rules of torch ops set by `register_half_function` and its siblings."""


class Handle:
    """Apply Apex's casts to every op of this thread until `_deactivate`."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype = torch.float16,
        *,
        verbose: bool = False,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        self.device, self.dtype, self.verbose = device, dtype, verbose
        self._active = True
        op_lists: dict[str, Any] = {}
        for name, rule in registered_rules.items():
            op_lists.setdefault(rule.value, set()).add(name)
        op_lists.setdefault(Rule.KEEP.value, set()).update(keep - registered_rules.keys())
        self._region = autocast(preset="apex", device_type=device, dtype=dtype, **op_lists)
        set_thread_region(self._region)

    def is_active(self) -> bool:
        """Return whether ops are currently cast."""
        return self._active and thread_region() is self._region

    def deactivate_after(self, models: Sequence[nn.Module]) -> None:
        """Deactivate the casts once all of these models are garbage-collected."""
        self._live_models = len(models)
        for model in models:
            finalize(model, self._on_model_freed).atexit = False

    def _on_model_freed(self) -> None:
        self._live_models -= 1
        # Garbage collection can run in the middle of an op or of a nested region; exiting the
        # region is safe only while it is the innermost one.
        can_exit = (
            innermost_region() is self._region._region and active_mode(self.device) is not None
        )
        if not self._live_models and self.is_active() and can_exit:
            self._deactivate()

    @property
    def mode(self) -> AutocastMode:
        """The function mode that casts the inputs of decorated functions."""
        return active_mode(self.device) or AutocastMode(self.device, "")

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        before, self._active = self._active, False
        try:
            with enter_regions(Region(self.device, False, None, None)):
                yield
        finally:
            self._active = before

    def _deactivate(self) -> None:
        if thread_region() is self._region:
            disable_autocast()
        if _amp_state.handle is self:
            _amp_state.set_handle(None)

    def _clear_cache(self) -> None:
        """Clear the weight cache, which cannot detect writes to `p.data` (no version counter)."""
        if self.is_active():
            clear_weight_cache()

    def wrap_optimizer(self, *_: object, **__: object) -> Any:
        """Raise: part of Apex's API before `initialize`."""
        _raise_old_api()

    def scale_loss(self, *_: object, **__: object) -> Any:
        """Raise: part of Apex's API before `initialize`."""
        _raise_old_api()


class NoOpHandle(Handle):
    """Handle of `init(enabled=False)`, which casts nothing."""

    def __init__(self) -> None:
        self.device, self._active = "cpu", False

    def is_active(self) -> bool:
        """Return False."""
        return False

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def _deactivate(self) -> None:
        """Do nothing."""


def _raise_old_api() -> None:
    raise RuntimeError(
        "This call belongs to amp's API before amp.initialize, which Apex removed as well. Use"
        " model, optimizer = amp.initialize(model, optimizer, opt_level=...) and"
        " amp.scale_loss(...)."
    )


def deactivate_casts() -> None:
    """Deactivate the casts of an earlier `initialize` or `init`."""
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()


def init(
    enabled: bool = True,
    # No effect: part of the old API, which Apex rejects as well.
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    patch_type: torch.dtype = torch.float16,
) -> Handle:
    """Activate the casts of O1 without a model, until `handle._deactivate()`."""
    deactivate_casts()
    if not enabled:
        return NoOpHandle()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    handle = Handle(
        device,
        patch_type,
        verbose=verbose,
        keep=frozenset({"binary_cross_entropy"} if allow_banned else ()),
    )
    _amp_state.set_handle(handle)
    return handle


@contextmanager
def disable_casts() -> Iterator[None]:
    """Disable the casts of O1 inside a `with` block.

    >>> with disable_casts():
    ...     torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
    torch.float32
    """
    if _amp_state.handle is None:
        yield
    else:
        with _amp_state.handle._disable_casts():
            yield


P = ParamSpec("P")
R = TypeVar("R")


def half_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Cast the function's inputs to float16 at O1; its body runs without further casts."""
    return _with_rule(Rule.HALF, fn)


def float_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Cast the function's inputs to float32 at O1; its body runs without further casts."""
    return _with_rule(Rule.FULL, fn)


def promote_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Cast the function's inputs to the widest dtype among them at O1."""
    return _with_rule(Rule.PROMOTE, fn)


def register_half_function(module: Any, name: str) -> None:
    """Apply `half_function` to `module.name`, before `initialize`.

    A torch op is not replaced: the next `initialize` lists it under the half rule.
    """
    _register(Rule.HALF, module, name)


def register_float_function(module: Any, name: str) -> None:
    """Apply `float_function` to `module.name`; see `register_half_function`."""
    _register(Rule.FULL, module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Apply `promote_function` to `module.name`; see `register_half_function`."""
    _register(Rule.PROMOTE, module, name)


def _with_rule(rule: Rule, function: Callable[P, R]) -> Callable[P, R]:
    name = getattr(function, "__name__", type(function).__name__)
    action = CastAction(name, rule, "rule set by the user")

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        handle = _amp_state.handle
        # At other levels Apex does not cast these functions.
        if handle is None or not handle.is_active():
            return function(*args, **kwargs)
        result: R = handle.mode.apply_rule(function, action, args, kwargs)
        return result

    return wrapped


def _register(rule: Rule, module: Any, name: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    function = getattr(module, name)
    op_name = registry().name_of(function)
    if op_name is None:
        setattr(module, name, _with_rule(rule, function))
    else:
        # torch's function is not replaced: torch.compile recognizes it by identity.
        registered_rules[op_name] = rule
