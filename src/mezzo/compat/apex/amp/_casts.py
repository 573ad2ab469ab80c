"""Casts of Apex's O1: the handle, `init`, and registered functions."""

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

registered: dict[str, Rule] = {}
"""Ops of torch's that `register_half_function` and its like have put under another rule."""


class Handle:
    """Apex's casts, while they are on."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype = torch.float16,
        *,
        verbose: bool = False,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        self.device, self.dtype, self.verbose, self._keep = device, dtype, verbose, keep
        self._active = True
        listed: dict[str, Any] = {}
        for name, rule in registered.items():
            listed.setdefault(rule.value, set()).add(name)
        listed.setdefault(Rule.KEEP.value, set()).update(self._keep - registered.keys())
        self._region = autocast(preset="apex", device_type=self.device, dtype=self.dtype, **listed)
        set_thread_region(self._region)

    def is_active(self) -> bool:
        """Whether ops are cast just now."""
        return self._active and thread_region() is self._region

    def last_as_long_as(self, models: Sequence[nn.Module]) -> None:
        """Switch the casts off when the last of the models is gone: nobody is left to ask for them."""
        self._living = len(models)
        for model in models:
            finalize(model, self._one_is_gone).atexit = False

    def _one_is_gone(self) -> None:
        self._living -= 1
        # Python may clean up at any moment: in the middle of an op, or of a region inside, things
        # are left as they are.
        undisturbed = (
            innermost_region() is self._region._region and active_mode(self.device) is not None
        )
        if not self._living and self.is_active() and undisturbed:
            self._deactivate()

    @property
    def steering(self) -> AutocastMode:
        """What casts the inputs of functions under a rule."""
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
            _amp_state.handle = None

    def _clear_cache(self) -> None:
        """Forget the copies of weights. They know when they are stale, but for writes to `p.data`, which torch does not count."""
        if self.is_active():
            clear_weight_cache()

    def wrap_optimizer(self, *_: object, **__: object) -> Any:
        """Apex's API before `initialize`."""
        _refuse_old_api()

    def scale_loss(self, *_: object, **__: object) -> Any:
        """Apex's API before `initialize`."""
        _refuse_old_api()


class NoOpHandle(Handle):
    """What `init(enabled=False)` gives."""

    def __init__(self) -> None:
        self.device, self._active = "cpu", False

    def is_active(self) -> bool:
        """Nothing is ever cast."""
        return False

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def _deactivate(self) -> None:
        """Nothing to switch off."""


def _refuse_old_api() -> None:
    raise RuntimeError(
        "This belongs to amp's API before amp.initialize, which Apex gave up as well. Use model,"
        " optimizer = amp.initialize(model, optimizer, opt_level=...) and amp.scale_loss(...)."
    )


def stop_casting() -> None:
    """Switch off what an earlier `initialize` has switched on."""
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()


def init(
    enabled: bool = True,
    # Belongs to the old API, which Apex refuses as well.
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    patch_type: torch.dtype = torch.float16,
) -> Handle:
    """Switch the casts of O1 on without a model; `handle._deactivate()` switches them off."""
    stop_casting()
    if not enabled:
        return NoOpHandle()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _amp_state.handle = Handle(
        device,
        patch_type,
        verbose=verbose,
        keep=frozenset({"binary_cross_entropy"} if allow_banned else ()),
    )
    return _amp_state.handle


@contextmanager
def disable_casts() -> Iterator[None]:
    """Run what is inside without the casts of O1.

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
    """Decorate a function so that O1 casts its inputs to float16. Its body runs without further casts."""
    return _under(Rule.HALF, fn)


def float_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that O1 casts its inputs to float32. Its body runs without further casts, and is float32 indeed."""
    return _under(Rule.FULL, fn)


def promote_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that O1 casts its inputs to the widest dtype among them."""
    return _under(Rule.PROMOTE, fn)


def register_half_function(module: Any, name: str) -> None:
    """Put a function of a module under `half_function`, before `initialize`; one of torch's own changes its list."""
    _register(Rule.HALF, module, name)


def register_float_function(module: Any, name: str) -> None:
    """Put a function of a module under `float_function`, before `initialize`; one of torch's own changes its list."""
    _register(Rule.FULL, module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Put a function of a module under `promote_function`, before `initialize`; one of torch's own changes its list."""
    _register(Rule.PROMOTE, module, name)


def _under(rule: Rule, function: Callable[P, R]) -> Callable[P, R]:
    name = getattr(function, "__name__", type(function).__name__)
    action = CastAction(name, rule, "put under this rule by the user")

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        handle = _amp_state.handle
        # At the other levels Apex leaves such functions alone.
        if handle is None or not handle.is_active():
            return function(*args, **kwargs)
        result: R = handle.steering.apply_rule(function, action, args, kwargs)
        return result

    return wrapped


def _register(rule: Rule, module: Any, name: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    function = getattr(module, name)
    known = registry().name_of(function)
    if known is None:
        setattr(module, name, _under(rule, function))
    else:
        # torch's own function stays in its place, for the compiler's sake: the casts of the next
        # `initialize` treat it so.
        registered[known] = rule
