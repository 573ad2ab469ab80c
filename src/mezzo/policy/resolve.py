"""Where a policy meets a device: `auto` becomes a dtype, and what the device lacks is said once."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mezzo import _events
from mezzo._dtypes import dtype_name
from mezzo._errors import UnsupportedError
from mezzo._hardware import Hardware
from mezzo.policy.rule import Level, OnUnsupported

if TYPE_CHECKING:
    from mezzo.policy.policy import Policy

_warned: set[str] = set()


@dataclass(frozen=True)
class Resolved:
    """What a policy comes to on a device."""

    dtype: torch.dtype | None
    """The 16-bit dtype to compute in; None runs everything in float32."""
    reason: str


def resolve(policy: Policy, hardware: Hardware) -> Resolved:
    """Choose the 16-bit dtype for a device, or do what the policy says when the device lacks it.

    >>> from mezzo import Policy, hardware
    >>> resolve(Policy("O1", "bfloat16"), hardware("cpu")).dtype
    torch.bfloat16
    """
    resolved = choose(policy, hardware)
    if resolved.dtype is None and policy.level is not Level.O0:
        _downgrade(policy, hardware, resolved.reason)
    if _events.listening():
        dtype = "float32" if resolved.dtype is None else dtype_name(resolved.dtype)
        _events.emit(_events.PolicyResolved(repr(policy), hardware.device, dtype, resolved.reason))
    return resolved


def choose(policy: Policy, hardware: Hardware) -> Resolved:
    """What `resolve` comes to, for who only asks: nothing is raised, warned or emitted."""
    if policy.level is Level.O0:
        return Resolved(None, "level O0 runs everything in float32")
    if policy.dtype is None:
        best = hardware.best
        return Resolved(best.dtype, best.reason) if best else Resolved(None, hardware.float16.reason)
    support = hardware.support(policy.dtype)
    return Resolved(policy.dtype if support.supported else None, support.reason)


def _downgrade(policy: Policy, hardware: Hardware, reason: str) -> None:
    asked = "a 16-bit dtype" if policy.dtype is None else dtype_name(policy.dtype)
    instead = [dtype_name(dtype) for dtype in (torch.float16, torch.bfloat16) if hardware.support(dtype).supported]
    remedy = f"Use dtype={instead[0]!r}" if instead else "Use another device, or level O0"
    message = f"{hardware.name} ({hardware.device}) cannot compute in {asked}: {reason}. {remedy}"
    if policy.on_unsupported is OnUnsupported.ERROR:
        raise UnsupportedError(f"{message}; or on_unsupported='warn' to run in float32.")
    if _events.listening():
        _events.emit(_events.PolicyDowngraded(asked, "float32", hardware.device, reason))
    if policy.on_unsupported is OnUnsupported.WARN and message not in _warned:
        _warned.add(message)
        warnings.warn(f"{message}. Running in float32.", UserWarning, stacklevel=_levels_up())


def _levels_up() -> int:
    """How far up the stack the user's code is, from where it is asked."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == __name__.partition(".")[0]:
        frame, levels = frame.f_back, levels + 1
    return levels
