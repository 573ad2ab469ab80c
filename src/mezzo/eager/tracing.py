"""Steering inside compiled code: the same decisions as in eager, in words that dynamo can trace, and without a cache, since compiled code shares casts by itself."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch.amp.autocast_mode import autocast as torchs_own

from mezzo._casting import cast, is_castable
from mezzo._dtypes import HALF_DTYPES
from mezzo._errors import RefusedOpError
from mezzo.eager import bodies, tables
from mezzo.policy.registry import Function

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def trace(key: str, device: str, rule: str, func: Function, args: Args, kwargs: Kwargs, inner: Function | None = None) -> Any:
    """Carry out one action; `inner` is what to call where that is not the function that the table knows."""
    call = func if inner is None else inner
    if _says_itself(key, func, args, kwargs):
        return call(*args, **kwargs)
    if tables.has_conditions(key, func) and _condition(key, func, args, kwargs):
        rule = "full"
    dtype = _dtype(key, device, rule, func, args, kwargs)
    if dtype is torch.float32:
        args = tuple([_change(value, device, dtype) for value in args])
        kwargs = {name: _change(value, device, dtype) for name, value in kwargs.items()}
    elif dtype is not None:
        args = tuple([value if tables.is_exempt(key, func, place) else _change(value, device, dtype) for place, value in enumerate(args)])
        kwargs = {name: value if tables.is_exempt(key, func, name) else _change(value, device, dtype) for name, value in kwargs.items()}
        if tables.widens(key, func) and _has_wide(key, device, func, args, kwargs):
            args = tuple([_change(value, device, torch.float32) for value in args])
            kwargs = {name: _change(value, device, torch.float32) for name, value in kwargs.items()}
            return cast(_call(key, device, func, call, args, kwargs), dtype)
    return _call(key, device, func, call, args, kwargs)


def _call(key: str, device: str, func: Function, call: Function, args: Args, kwargs: Kwargs) -> Any:
    if not tables.is_quiet(key, func):
        return call(*args, **kwargs)
    with torchs_own(device, dtype=torch.get_autocast_dtype(device), enabled=False, cache_enabled=False):
        return call(*args, **kwargs)


def _has_wide(key: str, device: str, func: Function, args: Args, kwargs: Kwargs) -> bool:
    exempt = [value for place, value in enumerate(args) if tables.is_exempt(key, func, place)]
    exempt += [value for name, value in kwargs.items() if tables.is_exempt(key, func, name)]
    wide = [value for value in exempt if is_castable(value, device) and value.dtype is torch.float32]
    return len(wide) > 0


def body(func: Function) -> Function:
    """The body of a composite, reached through the module that holds it."""
    found: Function = getattr(bodies, tables.body_of(func))
    return found


def _says_itself(key: str, func: Function, args: Args, kwargs: Kwargs) -> bool:
    if kwargs.get("out") is not None:
        return True
    if tables.takes_dtype(key, func) and (kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)):
        return True
    asked = [value for place, value in enumerate(args) if isinstance(value, bool) and tables.asks_in_place(key, func, place)]
    asked += [value for name, value in kwargs.items() if isinstance(value, bool) and tables.asks_in_place(key, func, name)]
    return any(asked)


def _condition(key: str, func: Function, args: Args, kwargs: Kwargs) -> bool:
    plain: list[tuple[int | str, Any]] = [(place, value) for place, value in enumerate(args) if not isinstance(value, torch.Tensor | list | tuple)]
    plain += [(name, value) for name, value in kwargs.items() if not isinstance(value, torch.Tensor | list | tuple)]
    given = [tables.is_condition(key, func, argument, value) for argument, value in plain]
    return any(given) or tables.is_condition_by_default(key, func, len(args), " ".join(kwargs))


def _dtype(key: str, device: str, rule: str, func: Function, args: Args, kwargs: Kwargs) -> torch.dtype | None:
    if rule == "half":
        half = torch.get_autocast_dtype(device)
        return torch.float32 if tables.lacks_kernel(key, func, half, device) else half
    if rule == "full":
        return torch.float32
    if rule == "keep":
        return None
    values = [value for place, value in enumerate(args) if not tables.is_exempt(key, func, place)]
    values += [value for name, value in kwargs.items() if not tables.is_exempt(key, func, name)]
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
    dtypes = [item.dtype for item in flat if is_castable(item, device)]
    refused = [one for one in dtypes if one in HALF_DTYPES] if rule == "refuse" and tables.refuses_halves_alone(key, func) else dtypes
    if rule == "refuse" and refused:
        raise RefusedOpError(tables.refusal(key, func))
    return reduce(torch.promote_types, dtypes) if dtypes else None


def _change(value: Any, device: str, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return cast(value, dtype) if is_castable(value, device) else value
    if type(value) in (list, tuple):
        return type(value)([_change(item, device, dtype) for item in value])
    return value
