"""`mezzo.autocast`, `enable_autocast` and `disable_autocast`; autocast on all device types."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import get_ident
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from mezzo._errors import PolicyError
from mezzo._hardware import hardware
from mezzo.autocasting.arguments import PolicyArg, region_for, resolve_call
from mezzo.autocasting.dynamo import dynamo_constant
from mezzo.autocasting.module_rules import ModuleRuleBinding, Precision, plan_modules
from mezzo.autocasting.regions import (
    EnteredRegion,
    Region,
    TracedRegion,
    enter,
    enter_traced,
    leave,
    leave_traced,
)
from mezzo.autocasting.wrappers import wrap_function
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level, Rule

P = ParamSpec("P")
R = TypeVar("R")

_TRACED = 0
"""Replaces the thread id in compiled code, which has none."""


class autocast:  # noqa: N801 - torch's spelling
    """Run ops in the precision that a policy chooses, as a context manager or a decorator.

    The first argument is a device type, as in `torch.autocast`, or a policy: a level, a
    `mezzo.Policy`, or the path of a TOML file. Further keyword arguments override fields of the
    policy.

    >>> import mezzo
    >>> x = torch.ones(2, 2)
    >>> with mezzo.autocast("cpu", dtype=torch.bfloat16):
    ...     torch.mm(x, x).dtype
    torch.bfloat16
    >>> with mezzo.autocast("O1", device_type="cpu", dtype="bfloat16", half={"add"}):
    ...     (x + x).dtype
    torch.bfloat16

    Args:
        policy_or_device: `"cuda"`, `torch.device("cpu")`, `"O1"`, a `Policy` or `"policy.toml"`.
            The default is the default policy on the current accelerator, or on the CPU.
        dtype: The 16-bit dtype. By default the policy's, or torch's for the device.
        enabled: False disables casts, also those of an outer region.
        cache_enabled: False disables the cache of 16-bit copies of weights.
        device_type: The device type, if the first argument is a policy.
        policy: The policy, if the first argument is a device type.
        model: The model that the policy's module rules (`modules=`) apply to.
        overrides: Fields of the policy, such as `half={"add"}`. See `mezzo.Policy`.

    Regions nest, belong to the current thread (see `mezzo.propagate_autocast`), work inside and
    around `torch.compile`, and may be entered any number of times. With torch's own op lists a
    region costs what `torch.autocast` costs; other policies add a function mode.

    Raises:
        PolicyError: The policy is invalid.
        UnsupportedError: torch has no autocast for the device, or the device does not support the
            dtype and `on_unsupported="error"`.
    """

    def __init__(
        self,
        policy_or_device: PolicyArg = None,
        /,
        dtype: torch.dtype | str | None = None,
        enabled: bool = True,  # noqa: FBT001, FBT002 - torch's call shape
        cache_enabled: bool | None = None,  # noqa: FBT001 - torch's call shape
        *,
        device_type: str | torch.device | None = None,
        policy: PolicyArg = None,
        model: nn.Module | None = None,
        **overrides: Any,
    ) -> None:
        call = (policy_or_device, dtype, enabled, cache_enabled, device_type, policy)
        resolved: Policy | None = None
        binding: ModuleRuleBinding | None = None
        if is_dynamo_compiling():
            region = Region.decode(_encoded_region(*call, overrides))
        else:
            region, resolved = resolve_call((*call, _hashable(overrides) if overrides else ()))
            if resolved.modules:
                binding = bind_module_rules(resolved, region, model)
        self._region = region
        self._binding = binding
        self._policy = resolved
        self._model = model
        self._entered: dict[int, list[Any]] = {}

    def __enter__(self) -> Self:
        if self._binding is not None:
            self._binding.__enter__()
        # By thread: several may be inside one instance, and each restores its own state.
        entered: EnteredRegion | TracedRegion
        if is_dynamo_compiling():
            thread, entered = _TRACED, enter_traced(self._region)
        else:
            thread, entered = get_ident(), enter(self._region)
        if thread in self._entered:
            self._entered[thread].append(entered)
        else:
            self._entered[thread] = [entered]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if is_dynamo_compiling():
            leave_traced(self._entered[_TRACED].pop())
        else:
            leave(self._entered[get_ident()].pop())
        if self._binding is not None:
            self._binding.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, generator or coroutine function: each call runs in the region."""
        return wrap_function(self._region, self._binding, function)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the policy: its table of cast actions exists in one process only."""
        return _rebuild, (replace(self._region, table=None), self._policy, self._model)


def _rebuild(region: Region, policy: Policy, model: nn.Module | None) -> autocast:
    copy = autocast.__new__(autocast)
    if region.table_key:
        region = region_for(policy, region.device, cache_enabled=region.cache_enabled)
    copy._region, copy._policy, copy._model, copy._entered = region, policy, model, {}
    copy._binding = bind_module_rules(policy, region, model) if policy.modules else None
    return copy


@dynamo_constant
def _encoded_region(*call: Any) -> str:
    """Resolve a call in compiled code, where its arguments are constants, to an encoded region."""
    region, policy = resolve_call((*call[:-1], _hashable(call[-1])))
    if policy.modules:
        raise PolicyError(
            "Module rules cannot be bound in compiled code. Enter the region around the compiled"
            " function, not inside it."
        )
    if region.table is not None:
        region.table.keep_alive()
    return region.encode()


def _hashable(overrides: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return overrides as a dictionary key; sets of op names become frozen sets."""
    return tuple(
        [
            (name, frozenset(value) if isinstance(value, set) else value)
            for name, value in overrides.items()
        ]
    )


def bind_module_rules(
    policy: Policy, region: Region, model: nn.Module | None
) -> ModuleRuleBinding | None:
    """Bind the module rules of a policy to a model; None if the region is disabled."""
    if not region.enabled:
        return None
    if model is None:
        names = ", ".join(repr(selector.text) for selector, _ in policy.modules)
        raise PolicyError(
            f"The policy has module rules ({names}) and needs the model that they apply to:"
            " autocast(policy, model=model)."
        )
    dtype = region.computes_in
    off = replace(region.disabled(), from_module_rule=True)
    half = replace(
        region_for(Policy(Level.O3, dtype, on_unsupported=policy.on_unsupported), region.device),
        from_module_rule=True,
    )
    precisions = {
        Rule.HALF: Precision(half, dtype),
        Rule.FULL: Precision(off, torch.float32),
        Rule.KEEP: Precision(off, None),
    }
    return ModuleRuleBinding(
        (module.module, precisions[module.rule]) for module in plan_modules(model, policy)
    )


_thread = threading.local()


def enable_autocast(policy: PolicyArg = None, **kwargs: Any) -> None:
    """Enable autocast for the rest of this thread, without a `with` block.

    Takes the arguments of `mezzo.autocast`. A second call replaces the first, and
    `mezzo.disable_autocast` ends it. Useful in notebooks, and where a training loop cannot be
    changed.

    >>> enable_autocast("cpu", dtype="bfloat16")
    >>> torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
    torch.bfloat16
    >>> disable_autocast()
    """
    set_thread_region(autocast(policy, **kwargs))


def disable_autocast() -> None:
    """End what `mezzo.enable_autocast` enabled in this thread; do nothing if it was not called."""
    region = thread_region()
    if region is not None:
        _thread.region = None
        region.__exit__(None, None, None)


def set_thread_region(region: AbstractContextManager[Any]) -> None:
    """Enter a region for the rest of this thread, in place of the one set before."""
    disable_autocast()
    region.__enter__()
    _thread.region = region


def thread_region() -> AbstractContextManager[Any] | None:
    """Return the region that was set for the rest of this thread, if any."""
    return getattr(_thread, "region", None)


@dynamo_constant
def device_types() -> tuple[str, ...]:
    """Return the device types of this machine: the CPU, and the accelerator if there is one.

    >>> device_types()[0]
    'cpu'
    """
    return tuple(dict.fromkeys(("cpu", hardware().device)))


class autocast_all_devices:  # noqa: N801 - a context manager like `autocast`
    """`autocast` on all device types, as a context manager or a decorator.

    >>> import torch
    >>> with autocast_all_devices(preset="megengine", dtype="bfloat16"):
    ...     torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.bfloat16
    """

    def __init__(self, policy: Any = None, *, enabled: bool = True, **overrides: Any) -> None:
        self._regions = [
            autocast(policy, device_type=device, enabled=enabled, **overrides)
            for device in device_types()
        ]

    def __enter__(self) -> Self:
        for region in self._regions:
            region.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for region in reversed(self._regions):
            region.__exit__(*error)  # type: ignore[arg-type]

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, generator or coroutine function: each call runs in the regions."""
        for region in self._regions:
            function = region(function)
        return function
