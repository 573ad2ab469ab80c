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
from mezzo.policy.decide import effective_lists, resolve
from mezzo.policy.policy import Policy
from mezzo.policy.registry import registry
from mezzo.policy.types import Cache, Level, Rule

PolicyArg = Policy | str | os.PathLike[str] | Level | torch.device | None
"""What the first argument of an entry point may be: a policy, a level, a policy file, or a
device."""

_KEPT = 64
"""How many policies, and ways to call for them, are remembered: a table takes about 50 KB, and
40 ms to make."""

_LEVELS = frozenset(level.value for level in Level)


class AutocastCall(NamedTuple):
    """The words of a call of `autocast`."""

    first: PolicyArg
    """torch's `device_type`, or a policy."""
    dtype: torch.dtype | str | None
    enabled: bool
    cache_enabled: bool | None
    device_type: str | torch.device | None
    policy: PolicyArg
    overrides: tuple[tuple[str, Any], ...]
    """Fields of the policy, and what they are set to."""


def resolve_call(words: tuple[Any, ...]) -> tuple[Region, Policy]:
    """Read a call, given as the bare tuple of a `Call`; the same words give the same region, and cost a look-up the second time."""
    if _files and (_is_file(words[0]) or _is_file(words[5])):
        # A file may say something else the next time.
        return _resolve(AutocastCall(*words))
    try:
        return _resolved(words, registry().generation)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
    return _resolve(AutocastCall(*words))


_files: set[str] = set()
"""The policy files that were read: whoever uses none need not be asked for one at every region."""


def _is_file(word: PolicyArg) -> bool:
    return word.endswith(".toml") if type(word) is str else isinstance(word, os.PathLike)


@lru_cache(maxsize=_KEPT)
def _resolved(words: tuple[Any, ...], _generation: int) -> tuple[Region, Policy]:
    return _resolve(AutocastCall(*words))


def _resolve(call: AutocastCall) -> tuple[Region, Policy]:
    first_device, first_policy = _read_first(call.first)
    device = _device(first_device, call.device_type)
    words = _one_policy(first_policy, call.policy)
    if _is_file(words):
        _files.add(str(words))
    if words is None and not call.overrides:
        return _torch_shape(
            device, call, named=first_device is not None or call.device_type is not None
        )
    dtype = {} if call.dtype is None else {"dtype": call.dtype}
    policy = Policy.parse(words, **dict(call.overrides), **dtype)  # type: ignore[arg-type]
    return (
        region_for(policy, device, enabled=call.enabled, cache_enabled=call.cache_enabled),
        policy,
    )


def _torch_shape(device: str, call: AutocastCall, *, named: bool) -> tuple[Region, Policy]:
    """torch's own words mean what they mean there: no dtype is the one that torch has for the device, float32 switches off with a warning."""
    dtype, enabled = call.dtype, call.enabled
    if not torch.amp.is_autocast_available(device):
        raise UnsupportedError(
            f"torch has no autocast for device type {device!r}. Choose one that it has, such as"
            " 'cuda' or 'cpu'."
        )
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
    # As in torch: no dtype is the one that is set for the device, which an outer region may have
    # changed.
    return replace(region, dtype=None) if dtype is None and named else region, policy


def region_for(
    policy: Policy,
    device: str,
    *,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    by_mode: bool = False,
) -> Region:
    """Settle a policy on a device."""
    if not enabled:
        return Region(device, False, policy.dtype, cache_enabled)
    dtype = resolve(policy, hardware(device)).dtype
    if dtype is None:
        return Region(device, False, None, cache_enabled)
    if _leaves_all_alone(policy, dtype, device, registry().generation):
        # Apex's O2 and O3, for instance: an op runs in what it is given, and no mode need look at
        # it.
        return Region(device, False, dtype, cache_enabled)
    register_float32_kernels(device)
    off = policy.cache is Cache.OFF or cache_enabled is False
    versioned = not off and (
        policy.cache is Cache.VERSIONED
        or (policy.cache is Cache.AUTO and not uses_torch_lists(policy, device))
    )
    if uses_torch_lists(policy, device) and not versioned and not by_mode:
        return Region(device, True, dtype, False if off else cache_enabled)
    # Beside mezzo's own cache torch's has nothing to do but to go stale.
    beside = False if off or versioned else cache_enabled
    table = _table(policy, device, dtype, versioned, by_mode, registry().generation)
    return Region(device, True, dtype, beside, table.key, table)


@lru_cache(maxsize=_KEPT)
def _leaves_all_alone(policy: Policy, dtype: torch.dtype, device: str, _generation: int) -> bool:
    lists = effective_lists(policy, dtype, device)
    listed = any(
        entry.rule is not Rule.KEEP for entry in (lists.default_rule, *lists.entries.values())
    )
    return not (listed or lists.conditional or policy.modules)


@lru_cache(maxsize=_KEPT)
def _table(
    policy: Policy,
    device: str,
    dtype: torch.dtype,
    versioned: bool,  # noqa: FBT001
    alone: bool,  # noqa: FBT001
    generation: int,
) -> PolicyTable:
    require("support for policies with rules of their own")
    key = f"{device}/{dtype_name(dtype)}/{'versioned' if versioned else 'plain'}{EXPORT_KEY if alone else '/beside/'}{generation}/{policy!r}"
    return PolicyTable.of(
        key, policy, lambda: make_table(policy, dtype, device, versioned=versioned, alone=alone)
    )


def policy_of(region: Region) -> Policy | None:
    """The policy that a steered region carries out; None where torch's own lists do."""
    return region.owner.policy if isinstance(region.owner, PolicyTable) else None


def without_torch_autocast(region: Region) -> Region:
    """The same region carried out by the mode alone, for where torch's own autocast is not heard."""
    policy = replace(policy_of(region) or Policy(), dtype=region.computes_in, cache=Cache.OFF)
    return region_for(policy, region.device, by_mode=True)


@lru_cache(maxsize=_KEPT)
def _own_fields(policy: Policy) -> bool:
    said = (
        policy.exempt_args,
        policy.conditional,
        policy.default_rule,
        *(policy.ops_with_rule(rule) for rule in Rule),
    )
    return any(bool(word) for word in said)


def uses_torch_lists(policy: Policy, device: str) -> bool:
    """Whether torch's C++ lists carry the policy out as it is, at no cost."""
    foreign = registry().generation > 0 and any(
        isinstance(function, OpOverload)
        for op in registry()
        if op.entry
        for function in op.functions
    )
    return (
        policy.level is Level.O1
        and policy.preset in ("torch", f"torch-{device}")
        and not _own_fields(policy)
        and not foreign
    )


def _read_first(word: PolicyArg) -> tuple[str | None, PolicyArg]:
    if isinstance(word, torch.device):
        return word.type, None
    if not isinstance(word, str) or isinstance(word, Policy):
        return None, word
    if word in _LEVELS or word.endswith(".toml"):
        return None, word
    device = _device_type(word)
    if device is not None:
        return device, None
    raise PolicyError(
        f"autocast({word!r}): that is neither a device type such as 'cuda' or 'cpu', nor a level"
        f" ({', '.join(sorted(_LEVELS))}), nor a .toml policy file."
        + (" The level starts with the letter O, not a zero." if word[:1] == "0" else "")
    )


def _device_type(word: str) -> str | None:
    try:
        return torch.device(word).type
    except RuntimeError:
        return None


def _device(first: str | None, device_type: str | torch.device | None) -> str:
    if first is not None and device_type is not None:
        raise PolicyError(
            f"The device was given twice: {first!r} and device_type={device_type!r}. Give it once."
        )
    if first is not None:
        return first
    if device_type is None:
        return hardware().device
    if isinstance(device_type, torch.device):
        return device_type.type
    named = _device_type(device_type) if isinstance(device_type, str) else None
    if named is None:
        # torch raises a RuntimeError with these words, and code that was written for it may wait
        # for that.
        raise UnsupportedError(
            f"Invalid device string: {device_type!r}. A device type is one that torch knows, such"
            " as 'cuda', 'cpu', 'xpu' or 'mps'."
        )
    return named


def _one_policy(first: PolicyArg, policy: PolicyArg) -> PolicyArg:
    if first is not None and policy is not None:
        raise PolicyError(
            f"The policy was given twice: {first!r} and policy={policy!r}. Give it once."
        )
    return first if first is not None else policy
