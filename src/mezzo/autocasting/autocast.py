"""`mezzo.autocast`, `enable` and `disable`; autocast on all device types at once."""

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
    Entered,
    Region,
    Traced,
    enter,
    enter_traced,
    leave,
    leave_traced,
)
from mezzo.autocasting.table_lookup import PolicyTable
from mezzo.autocasting.wrappers import wrap_function
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level, Rule

P = ParamSpec("P")
R = TypeVar("R")


_TRACED = 0
"""Stands for the thread in compiled code, which has none."""


class autocast:  # noqa: N801 - torch's spelling
    """Run what is inside in the precision that a policy says.

    torch's call shape, or a policy: a level, a `Policy`, a TOML file, and overrides of the policy's
    fields.

    >>> import mezzo
    >>> with mezzo.autocast("cpu", dtype=torch.bfloat16):
    ...     torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.bfloat16
    >>> with mezzo.autocast("O1", device_type="cpu", dtype="bfloat16", half={"add"}):
    ...     (torch.ones(2) + torch.ones(2)).dtype
    torch.bfloat16
    """

    def __init__(
        self,
        policy_or_device: PolicyArg = None,
        /,
        dtype: torch.dtype | str | None = None,
        enabled: bool = True,  # noqa: FBT001, FBT002 - torch's call shape
        cache_enabled: bool | None = None,  # noqa: FBT001
        *,
        device_type: str | torch.device | None = None,
        policy: PolicyArg = None,
        model: nn.Module | None = None,
        **overrides: Any,
    ) -> None:
        if is_dynamo_compiling():
            region, binding = (
                Region.decode(
                    _settled_code(
                        policy_or_device,
                        dtype,
                        enabled,
                        cache_enabled,
                        device_type,
                        policy,
                        overrides,
                    )
                ),
                None,
            )
            settled = None
        else:
            words = (
                policy_or_device,
                dtype,
                enabled,
                cache_enabled,
                device_type,
                policy,
                _frozen(overrides) if overrides else (),
            )
            region, settled = resolve_call(words)
            binding = bind_module_rules(settled, region, model) if settled.modules else None
        self._region = region
        self._binding = binding
        self._policy = settled
        self._model = model
        self._entered: dict[int, list[Any]] = {}

    def __enter__(self) -> Self:
        if self._binding is not None:
            self._binding.__enter__()
        # By thread: one instance may be open in several, and each puts back its own.
        entered: Entered | Traced
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle what the region was made of: the table that carries it out lives in one process."""
        return _made_again, (replace(self._region, owner=None), self._policy, self._model)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, a generator function or a coroutine function: every call runs in the region."""
        return wrap_function(self._region, self._binding, function)


def _made_again(region: Region, policy: Policy, model: nn.Module | None) -> autocast:
    again = autocast.__new__(autocast)
    if region.key:
        region = region_for(policy, region.device, cache_enabled=region.cache_enabled)
    again._region, again._policy, again._model, again._entered = region, policy, model, {}
    again._binding = bind_module_rules(policy, region, model) if policy.modules else None
    return again


@dynamo_constant
def _settled_code(*words: Any) -> str:
    """`settle` as a constant of compiled code: the words of a call inside a compiled function are constants there too."""
    region, policy = resolve_call((*words[:-1], _frozen(words[-1])))
    if policy.modules:
        raise PolicyError(
            "Module rules are bound outside compiled code: enter the region around the compiled"
            " function, not inside it."
        )
    if isinstance(region.owner, PolicyTable):
        region.owner.keep()
    return region.encode()


def _frozen(overrides: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Overrides as a key: sets of op names, the usual case, are made hashable."""
    return tuple(
        [
            (name, frozenset(value) if isinstance(value, set) else value)
            for name, value in overrides.items()
        ]
    )


def bind_module_rules(
    policy: Policy, region: Region, model: nn.Module | None
) -> ModuleRuleBinding | None:
    """The module rules of a policy on a model, ready to be applied; None where the region is off."""
    if not region.enabled:
        return None
    if model is None:
        names = ", ".join(repr(selector.text) for selector, _ in policy.modules)
        raise PolicyError(
            f"The policy has module rules ({names}) and needs the model they speak of:"
            " autocast(policy, model=model)."
        )
    dtype = region.computes_in
    off = Region(region.device, False, region.dtype, region.cache_enabled, ruled=True)
    half = replace(
        region_for(Policy(Level.O3, dtype, on_unsupported=policy.on_unsupported), region.device),
        ruled=True,
    )
    precisions = {
        Rule.HALF: Precision(half, dtype),
        Rule.FULL: Precision(off, torch.float32),
        Rule.KEEP: Precision(off, None),
    }
    return ModuleRuleBinding(
        (one.module, precisions[one.rule]) for one in plan_modules(model, policy)
    )


_switch = threading.local()


def enable_autocast(policy: PolicyArg = None, **words: Any) -> None:
    """Switch a policy on for the rest of this thread, without a region; `disable` switches it off, another `enable` replaces it.

    >>> enable_autocast("cpu", dtype="bfloat16")
    >>> torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
    torch.bfloat16
    >>> disable_autocast()
    """
    set_thread_region(autocast(policy, **words))


def set_thread_region(region: AbstractContextManager[Any]) -> None:
    """Stay in a region for the rest of this thread, in place of the one that was switched on before."""
    disable_autocast()
    region.__enter__()
    _switch.region = region


def thread_region() -> AbstractContextManager[Any] | None:
    """The region that this thread was switched to."""
    return getattr(_switch, "region", None)


def disable_autocast() -> None:
    """Switch off what `enable` switched on in this thread; nothing happens where nothing is on."""
    region = thread_region()
    if region is not None:
        _switch.region = None
        region.__exit__(None, None, None)


@dynamo_constant
def device_types() -> tuple[str, ...]:
    """The kinds of device that tensors may be on here: the CPU, and the accelerator if there is one.

    >>> device_types()[0]
    'cpu'
    """
    return tuple(dict.fromkeys(("cpu", hardware().device)))


class autocast_all_devices:  # noqa: N801 - reads as a phrase, as `autocast` does
    """`autocast` for tensors on any device: as context manager and as decorator.

    >>> import torch
    >>> with autocast_all_devices(preset="megengine", dtype="bfloat16"):
    ...     torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.bfloat16
    """

    def __init__(self, policy: Any = None, *, enabled: bool = True, **overrides: Any) -> None:
        self._each = [
            autocast(policy, device_type=device, enabled=enabled, **overrides)
            for device in device_types()
        ]

    def __enter__(self) -> Self:
        for one in self._each:
            one.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for one in reversed(self._each):
            one.__exit__(*error)  # type: ignore[arg-type]

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, a generator function or a coroutine function: every call runs in the region."""
        for one in self._each:
            function = one(function)
        return function
