"""The casts of O1, which Apex switches on for the whole process and for ever: here a region that this thread stays in while its models live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import nn

from mezzo.autocasting.autocast import autocast, disable, switch_to, switched_to
from mezzo.autocasting.function_mode import Steering, steering_of
from mezzo.autocasting.regions import Region, innermost_region, inside, invalidate
from mezzo.compat.apex.amp._amp_state import _amp_state
from mezzo.policy.types import Rule

registered: dict[str, Rule] = {}
"""Ops of torch's that `register_half_function` and its like have put under another rule."""


class Handle:
    """Apex's casts, while they are on."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float16, *, verbose: bool = False, keep: frozenset[str] = frozenset()) -> None:
        self.device, self.dtype, self.verbose, self._keep = device, dtype, verbose, keep
        self._active = True
        listed: dict[str, Any] = {}
        for name, rule in registered.items():
            listed.setdefault(rule.value, set()).add(name)
        listed.setdefault(Rule.KEEP.value, set()).update(self._keep - registered.keys())
        self._region = autocast(preset="apex", device_type=self.device, dtype=self.dtype, **listed)
        switch_to(self._region)

    def is_active(self) -> bool:
        """Whether ops are cast just now."""
        return self._active and switched_to() is self._region

    def last_as_long_as(self, models: Sequence[nn.Module]) -> None:
        """Switch the casts off when the last of the models is gone: nobody is left to ask for them."""
        self._living = len(models)
        for model in models:
            finalize(model, self._one_is_gone).atexit = False

    def _one_is_gone(self) -> None:
        self._living -= 1
        # Python may clean up at any moment: in the middle of an op, or of a region inside, things are left as they are.
        undisturbed = innermost_region() is self._region._region and steering_of(self.device) is not None
        if not self._living and self.is_active() and undisturbed:
            self._deactivate()

    @property
    def steering(self) -> Steering:
        """What casts the inputs of functions under a rule."""
        return steering_of(self.device) or Steering(self.device, "")

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        before, self._active = self._active, False
        try:
            with inside(Region(self.device, False, None, None)):
                yield
        finally:
            self._active = before

    def _deactivate(self) -> None:
        if switched_to() is self._region:
            disable()
        if _amp_state.handle is self:
            _amp_state.handle = None

    def _clear_cache(self) -> None:
        """Forget the copies of weights. They know when they are stale, but for writes to `p.data`, which torch does not count."""
        if self.is_active():
            invalidate()

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
        "This belongs to amp's API before amp.initialize, which Apex gave up as well. "
        "Use model, optimizer = amp.initialize(model, optimizer, opt_level=...) and amp.scale_loss(...)."
    )


def stop_casting() -> None:
    """Switch off what an earlier `initialize` has switched on."""
    if _amp_state.handle is not None:
        _amp_state.handle._deactivate()


def init(
    enabled: bool = True,  # noqa: FBT001, FBT002 - Apex's call shape
    loss_scale: float | str = "dynamic",  # noqa: ARG001 - belongs to the old API, which Apex refuses as well
    enable_caching: bool = True,  # noqa: ARG001, FBT001, FBT002
    verbose: bool = False,  # noqa: FBT001, FBT002
    allow_banned: bool = False,  # noqa: FBT001, FBT002
    patch_type: torch.dtype = torch.float16,
) -> Handle:
    """Switch the casts of O1 on without a model; `handle._deactivate()` switches them off."""
    stop_casting()
    if not enabled:
        return NoOpHandle()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _amp_state.handle = Handle(device, patch_type, verbose=verbose, keep=frozenset({"binary_cross_entropy"} if allow_banned else ()))
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
