"""Resolve the arguments of `autocast(...)` to a `Region`."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._errors import PolicyError, UnsupportedError
from mezzo._hardware import hardware
from mezzo._torch import OpOverload, require
from mezzo.autocasting.float32_kernels import register_float32_kernels
from mezzo.autocasting.op_table import make_table
from mezzo.autocasting.regions import Region
from mezzo.autocasting.table_lookup import EXPORT_KEY, PolicyTable
from mezzo.policy.decide import effective_lists, resolve_dtype
from mezzo.policy.policy import Policy
from mezzo.policy.registry import registry
from mezzo.policy.types import Cache, Level, Rule

PolicyArg = Policy | str | os.PathLike[str] | Level | torch.device | None
"""First argument of an entry point: a policy, a level, a policy file, or a device."""

_CACHE_SIZE = 64
"""Number of cached policies and calls: a table takes about 50 KB, and 40 ms to make."""

_LEVELS = frozenset(level.value for level in Level)


class AutocastCall(NamedTuple):
    """The arguments of a call of `autocast`."""

    first: PolicyArg
    """torch's `device_type`, or a policy."""
    dtype: torch.dtype | str | None
    enabled: bool
    cache_enabled: bool | None
    device_type: str | torch.device | None
    policy: PolicyArg
    overrides: tuple[tuple[str, Any], ...]
    """Fields of the policy with their new values."""


def resolve_call(call: tuple[Any, ...]) -> tuple[Region, Policy]:
    """Resolve the fields of an `AutocastCall`, passed as a plain tuple, to a region and a policy.

    Equal calls return the same region; all but the first are one dictionary lookup.
    """
    if _loaded_files and (_is_file(call[0]) or _is_file(call[5])):
        # The file may have changed.
        return _resolve(AutocastCall(*call))
    try:
        return _resolved(call, registry().generation)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
    return _resolve(AutocastCall(*call))


_loaded_files: set[str] = set()
"""Policy files loaded so far: while it is empty, calls need not be checked for files."""


def _is_file(policy: PolicyArg) -> bool:
    if type(policy) is str:
        return policy.endswith(".toml")
    return isinstance(policy, os.PathLike)


@lru_cache(maxsize=_CACHE_SIZE)
def _resolved(call: tuple[Any, ...], _generation: int) -> tuple[Region, Policy]:
    return _resolve(AutocastCall(*call))


def _resolve(call: AutocastCall) -> tuple[Region, Policy]:
    first_device, first_policy = _device_or_policy(call.first)
    device = _device(first_device, call.device_type)
    if not torch.amp.is_autocast_available(device):
        raise UnsupportedError(
            f"torch has no autocast for device type {device!r}. Choose one that it has, such as"
            " 'cuda' or 'cpu'."
        )
    policy_arg = _single_policy(first_policy, call.policy)
    if _is_file(policy_arg):
        _loaded_files.add(str(policy_arg))
    if policy_arg is None and not call.overrides:
        is_device_passed = first_device is not None or call.device_type is not None
        return _resolve_torch_call(device, call, is_device_passed=is_device_passed)
    dtype = {} if call.dtype is None else {"dtype": call.dtype}
    policy = Policy.parse(policy_arg, **dict(call.overrides), **dtype)  # type: ignore[arg-type]
    region = region_for(policy, device, enabled=call.enabled, cache_enabled=call.cache_enabled)
    return region, policy


def _resolve_torch_call(
    device: str, call: AutocastCall, *, is_device_passed: bool
) -> tuple[Region, Policy]:
    """Resolve a call without a policy as torch does.

    Without a dtype it uses torch's for the device; float32 disables the region with a warning.
    """
    dtype, enabled = call.dtype, call.enabled
    if isinstance(dtype, torch.dtype) and dtype not in HALF_DTYPES:
        if device != "cuda" and enabled:
            warnings.warn(
                f"autocast on {device} computes in float16 or bfloat16, not {dtype_name(dtype)}: it"
                " is disabled here.",
                UserWarning,
                stacklevel=2,
            )
        return Region(device, enabled and device == "cuda", dtype, call.cache_enabled), Policy()
    policy = Policy(dtype="auto" if dtype is None else dtype)
    region = region_for(policy, device, enabled=enabled, cache_enabled=call.cache_enabled)
    # Without a dtype torch uses the one set for the device, which an outer region may have changed.
    use_current = dtype is None and is_device_passed
    return replace(region, dtype=None) if use_current else region, policy


def region_for(
    policy: Policy,
    device: str,
    *,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    by_mode: bool = False,
) -> Region:
    """Return the region of a policy on a device.

    With `by_mode` the function mode casts every op, and nothing is left to torch's autocast.
    """
    if not enabled:
        return Region(device, False, policy.dtype, cache_enabled)
    dtype = resolve_dtype(policy, hardware(device)).dtype
    if dtype is None:
        return Region(device, False, None, cache_enabled)
    if _casts_nothing(policy, dtype, device, registry().generation):
        # Apex's O2 and O3, for example: no mode is needed.
        return Region(device, False, dtype, cache_enabled)
    register_float32_kernels(device)
    off = policy.cache is Cache.OFF or cache_enabled is False
    versioned = not off and (
        policy.cache is Cache.VERSIONED
        or (policy.cache is Cache.AUTO and not uses_torch_lists(policy, device))
    )
    if uses_torch_lists(policy, device) and not versioned and not by_mode:
        return Region(device, True, dtype, False if off else cache_enabled)
    # With mezzo's cache, torch's would only become stale.
    torch_cache = False if off or versioned else cache_enabled
    table = _table(policy, device, dtype, versioned, by_mode, registry().generation)
    return Region(device, True, dtype, torch_cache, table.key, table)


@lru_cache(maxsize=_CACHE_SIZE)
def _casts_nothing(policy: Policy, dtype: torch.dtype, device: str, _generation: int) -> bool:
    lists = effective_lists(policy, dtype, device)
    entries = (lists.default_rule, *lists.entries.values())
    casts_ops = any(entry.rule is not Rule.KEEP for entry in entries)
    return not (casts_ops or lists.conditional or policy.modules)


@lru_cache(maxsize=_CACHE_SIZE)
def _table(
    policy: Policy,
    device: str,
    dtype: torch.dtype,
    versioned: bool,  # noqa: FBT001
    by_mode: bool,  # noqa: FBT001
    generation: int,
) -> PolicyTable:
    require("support for policies with rules of their own")
    cache = "versioned" if versioned else "plain"
    kind = EXPORT_KEY if by_mode else "/region/"
    key = f"{device}/{dtype_name(dtype)}/{cache}{kind}{generation}/{policy!r}"
    return PolicyTable.shared(
        key,
        policy,
        lambda: make_table(
            policy, dtype, device, versioned=versioned, without_torch_autocast=by_mode
        ),
    )


def policy_of(region: Region) -> Policy | None:
    """Return the policy of a region with a table; None if torch's own lists are its policy."""
    return None if region.table is None else region.table.policy


def without_torch_autocast(region: Region) -> Region:
    """Return an equivalent region in which the mode casts every op, for torch.export."""
    policy = replace(policy_of(region) or Policy(), dtype=region.computes_in, cache=Cache.OFF)
    return region_for(policy, region.device, by_mode=True)


def uses_torch_lists(policy: Policy, device: str) -> bool:
    """Return whether torch's own lists implement the policy, so that no mode is needed."""
    has_custom_operators = registry().generation > 0 and any(
        isinstance(function, OpOverload)
        for op in registry()
        if op.entry
        for function in op.functions
    )
    return (
        policy.level in (Level.O1, Level.O2)
        and policy.preset in ("torch", f"torch-{device}")
        and not _overrides_op_lists(policy)
        and not has_custom_operators
    )


@lru_cache(maxsize=_CACHE_SIZE)
def _overrides_op_lists(policy: Policy) -> bool:
    op_fields = (
        policy.exempt_args,
        policy.conditional,
        policy.default_rule,
        *(policy.ops_with_rule(rule) for rule in Rule),
    )
    return any(bool(value) for value in op_fields)


def _device_or_policy(argument: PolicyArg) -> tuple[str | None, PolicyArg]:
    """Split the first argument of `autocast` into a device type or a policy."""
    if isinstance(argument, torch.device):
        return argument.type, None
    if not isinstance(argument, str) or isinstance(argument, Policy):
        return None, argument
    if argument in _LEVELS or argument.endswith(".toml"):
        return None, argument
    device = _device_type(argument)
    if device is not None:
        return device, None
    raise PolicyError(
        f"autocast({argument!r}): that is neither a device type such as 'cuda' or 'cpu', nor a"
        f" level ({', '.join(sorted(_LEVELS))}), nor a .toml policy file."
        + (" The level starts with the letter O, not a zero." if argument[:1] == "0" else "")
    )


def _device_type(device: str) -> str | None:
    try:
        return torch.device(device).type
    except RuntimeError:
        return None


def _device(first: str | None, device_type: str | torch.device | None) -> str:
    if first is not None and device_type is not None:
        raise PolicyError(
            f"The device is passed twice: {first!r} and device_type={device_type!r}. Pass it once."
        )
    if first is not None:
        return first
    if device_type is None:
        return hardware().device
    if isinstance(device_type, torch.device):
        return device_type.type
    parsed = _device_type(device_type) if isinstance(device_type, str) else None
    if parsed is None:
        # torch raises a RuntimeError with this text, which code written for it may expect.
        raise UnsupportedError(
            f"Invalid device string: {device_type!r}. A device type is one that torch knows, such"
            " as 'cuda', 'cpu', 'xpu' or 'mps'."
        )
    return parsed


def _single_policy(first: PolicyArg, policy: PolicyArg) -> PolicyArg:
    if first is not None and policy is not None:
        raise PolicyError(
            f"The policy is passed twice: {first!r} and policy={policy!r}. Pass it once."
        )
    return first if first is not None else policy
