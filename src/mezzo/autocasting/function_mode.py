"""TorchFunctionMode that casts op inputs where the policy differs from torch's own lists, in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.amp.autocast_mode import autocast as torchs_own
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from mezzo import _events
from mezzo._casting import CASTS, cast, cast_all, device_test, is_castable
from mezzo._dtypes import CASTABLE_DTYPES, HALF_DTYPES, dtype_name
from mezzo._errors import RefusedOpError
from mezzo._torch import function_mode_at, function_mode_count
from mezzo.autocasting import composite_bodies, table_lookup
from mezzo.autocasting.composites import opened
from mezzo.autocasting.dynamo import permit_mode_changes, skip_frame, under_mode
from mezzo.autocasting.float32_fallback import retry_in_float32
from mezzo.autocasting.op_table import CastAction
from mezzo.autocasting.table_lookup import TABLES, refused
from mezzo.autocasting.weight_cache import WeightCache, is_weight
from mezzo.policy import missing_kernels
from mezzo.policy.registry import Function
from mezzo.policy.types import Rule

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def apply_rule_traced(
    key: str,
    device: str,
    rule: str,
    func: Function,
    args: Args,
    kwargs: Kwargs,
    inner: Function | None = None,
) -> Any:
    """Carry out one action; `inner` is what to call where that is not the function that the table knows."""
    call = func if inner is None else inner
    if _says_itself(key, func, args, kwargs):
        return call(*args, **kwargs)
    if table_lookup.has_conditions(key, func) and _condition(key, func, args, kwargs):
        rule = "full"
    dtype = _dtype(key, device, rule, func, args, kwargs)
    if dtype is torch.float32:
        args = tuple([_change(value, device, dtype) for value in args])
        kwargs = {name: _change(value, device, dtype) for name, value in kwargs.items()}
    elif dtype is not None:
        args = tuple(
            [
                value if table_lookup.is_exempt(key, func, place) else _change(value, device, dtype)
                for place, value in enumerate(args)
            ]
        )
        kwargs = {
            name: (
                value if table_lookup.is_exempt(key, func, name) else _change(value, device, dtype)
            )
            for name, value in kwargs.items()
        }
        if table_lookup.computes_in_float32(key, func) and _has_float32_exempt_traced(
            key, device, func, args, kwargs
        ):
            args = tuple([_change(value, device, torch.float32) for value in args])
            kwargs = {name: _change(value, device, torch.float32) for name, value in kwargs.items()}
            return cast(_call(key, device, func, call, args, kwargs), dtype)
    return _call(key, device, func, call, args, kwargs)


def _call(key: str, device: str, func: Function, call: Function, args: Args, kwargs: Kwargs) -> Any:
    if not table_lookup.disables_torch_autocast(key, func):
        return call(*args, **kwargs)
    with torchs_own(
        device, dtype=torch.get_autocast_dtype(device), enabled=False, cache_enabled=False
    ):
        return call(*args, **kwargs)


def _has_float32_exempt_traced(
    key: str, device: str, func: Function, args: Args, kwargs: Kwargs
) -> bool:
    exempt = [value for place, value in enumerate(args) if table_lookup.is_exempt(key, func, place)]
    exempt += [value for name, value in kwargs.items() if table_lookup.is_exempt(key, func, name)]
    wide = [
        value for value in exempt if is_castable(value, device) and value.dtype is torch.float32
    ]
    return len(wide) > 0


def traced_body(func: Function) -> Function:
    """The body of a composite, reached through the module that holds it."""
    found: Function = getattr(composite_bodies, table_lookup.body_of(func))
    return found


def _says_itself(key: str, func: Function, args: Args, kwargs: Kwargs) -> bool:
    if kwargs.get("out") is not None:
        return True
    if table_lookup.takes_dtype(key, func) and (
        kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
    ):
        return True
    asked = [
        value
        for place, value in enumerate(args)
        if isinstance(value, bool) and table_lookup.asks_in_place(key, func, place)
    ]
    asked += [
        value
        for name, value in kwargs.items()
        if isinstance(value, bool) and table_lookup.asks_in_place(key, func, name)
    ]
    return any(asked)


def _condition(key: str, func: Function, args: Args, kwargs: Kwargs) -> bool:
    plain: list[tuple[int | str, Any]] = [
        (place, value)
        for place, value in enumerate(args)
        if not isinstance(value, torch.Tensor | list | tuple)
    ]
    plain += [
        (name, value)
        for name, value in kwargs.items()
        if not isinstance(value, torch.Tensor | list | tuple)
    ]
    given = [table_lookup.is_condition(key, func, argument, value) for argument, value in plain]
    return any(given) or table_lookup.is_condition_by_default(
        key, func, len(args), " ".join(kwargs)
    )


def _dtype(
    key: str, device: str, rule: str, func: Function, args: Args, kwargs: Kwargs
) -> torch.dtype | None:
    if rule == "half":
        half = torch.get_autocast_dtype(device)
        return torch.float32 if table_lookup.lacks_kernel(key, func, half, device) else half
    if rule == "full":
        return torch.float32
    if rule == "keep":
        return None
    values = [
        value for place, value in enumerate(args) if not table_lookup.is_exempt(key, func, place)
    ]
    values += [
        value for name, value in kwargs.items() if not table_lookup.is_exempt(key, func, name)
    ]
    flat = [
        item for value in values for item in (value if isinstance(value, list | tuple) else [value])
    ]
    dtypes = [item.dtype for item in flat if is_castable(item, device)]
    refused = (
        [one for one in dtypes if one in HALF_DTYPES]
        if rule == "refuse" and table_lookup.refuses_halves_alone(key, func)
        else dtypes
    )
    if rule == "refuse" and refused:
        raise RefusedOpError(table_lookup.refusal(key, func))
    return reduce(torch.promote_types, dtypes) if dtypes else None


def _change(value: Any, device: str, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return cast(value, dtype) if is_castable(value, device) else value
    if type(value) in (list, tuple):
        return type(value)([_change(item, device, dtype) for item in value])
    return value


# Looking a member up on its enum costs as much as the rest of the question.
_HALF, _FULL = Rule.HALF, Rule.FULL
# So does looking a function up on torch, three times an op.
_is_enabled, _set_enabled, _get_dtype = (
    torch.is_autocast_enabled,
    torch.set_autocast_enabled,
    torch.get_autocast_dtype,
)


class AutocastMode(TorchFunctionMode):
    """Acts on the functions of one table, for tensors of one device type."""

    def __init__(self, device: str, key: str) -> None:
        super().__init__()
        self.device = device
        self.key = key

    # Both made when eager first asks: compiled code never does, and would guard on all that they
    # are made of.
    @cached_property
    def cache(self) -> WeightCache:
        """The 16-bit copies of weights, for as long as the outermost steered region lasts."""
        return WeightCache()

    @cached_property
    def _is_here(self) -> Callable[[Tensor], bool]:
        return device_test(self.device)

    @skip_frame
    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if is_dynamo_compiling():
            return self._trace(func, args, kwargs or {})
        action = TABLES[self.key].get(func)
        # torch's own state says whether casting is on: a disabled region inside switches this off
        # too.
        if action is None or not _is_enabled(self.device):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.apply_rule(func, action, args, kwargs or {})

    def _trace(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        rule = table_lookup.rule_of(self.key, func)
        if rule is None or not torch.is_autocast_enabled(self.device):
            # Called as a method: dynamo does not trace the `super()` inside this one.
            return (
                args[0].unflatten(*args[1:], **kwargs)
                if func is Tensor.unflatten
                else func(*args, **kwargs)
            )
        if rule == "open":
            with self:
                return traced_body(func)(*args, **kwargs)
        if rule == "carried":
            return self._trace_carried(func, args, kwargs)
        return apply_rule_traced(self.key, self.device, rule, func, args, kwargs)

    def _trace_carried(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        before = permit_mode_changes(True)
        # Looked up anew: dynamo asks for the permission when it first sees the operator.
        operator = getattr(torch.ops.higher_order, table_lookup.operator_of(self.key, func))
        try:
            return operator(under_mode(self, args[0]), *args[1:], **kwargs)
        finally:
            permit_mode_changes(before)

    def apply_rule(self, func: Function, action: CastAction, args: Args, kwargs: Kwargs) -> Any:
        """Carry out one action."""
        if action.is_composite:
            with self:
                return opened(func)(*args, **kwargs)
        if action.wraps_function:
            return func(under_mode(self, args[0]), *args[1:], **kwargs)
        rule = action.rule if action.plain and not kwargs else _rule_for(action, args, kwargs)
        if rule is None:
            return func(*args, **kwargs)
        if rule is _HALF:
            dtype: torch.dtype | None = self._half(action)
        else:
            dtype = torch.float32 if rule is _FULL else self._widest(rule, action, args, kwargs)
        if dtype is not None:
            args, kwargs = self._cast(action, dtype, args, kwargs)
        if _events.listening() and not action.weights:
            _events.emit(
                _events.OpCastOverridden(
                    action.op,
                    rule.value,
                    "as given" if dtype is None else dtype_name(dtype),
                    action.reason,
                )
            )
        if (
            action.computes_in_float32
            and dtype in HALF_DTYPES
            and _has_float32_exempt(action, self.device, args, kwargs)
        ):
            args, kwargs = (
                cast_all(args, torch.float32, self.device),
                cast_all(kwargs, torch.float32, self.device),
            )
            return CASTS[dtype](self._run(func, action, torch.float32, args, kwargs))
        return self._run(func, action, dtype, args, kwargs)

    def _run(
        self,
        func: Function,
        action: CastAction,
        dtype: torch.dtype | None,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        if action.disables_torch_autocast:
            _set_enabled(self.device, False)
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        except (RuntimeError, NotImplementedError) as error:
            return retry_in_float32(error, func, action.op, dtype, self.device, args, kwargs)
        finally:
            if action.disables_torch_autocast:
                _set_enabled(self.device, True)

    def _half(self, action: CastAction) -> torch.dtype:
        half = _get_dtype(self.device)
        return (
            torch.float32
            if missing_kernels.is_recorded_missing(action.op, half, self.device)
            else half
        )

    def _widest(
        self, rule: Rule, action: CastAction, args: Args, kwargs: Kwargs
    ) -> torch.dtype | None:
        """What the inputs of an op are promoted to; None leaves them."""
        if rule is Rule.KEEP:
            return None
        dtypes = [tensor.dtype for tensor in _castables(action, self.device, args, kwargs)]
        if rule is Rule.REFUSE and (
            any(one in HALF_DTYPES for one in dtypes) if action.halves_alone else dtypes
        ):
            raise RefusedOpError(refused(action))
        return reduce(torch.promote_types, dtypes) if dtypes else None

    def _cast(
        self, action: CastAction, dtype: torch.dtype, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        if action.exempt_args and dtype is not torch.float32:
            places, names = (
                [place for place, _ in action.exempt_args],
                [name for _, name in action.exempt_args],
            )
            positional = [
                value if place in places else self._change(value, action, dtype)
                for place, value in enumerate(args)
            ]
            return (*positional,), {
                name: value if name in names else self._change(value, action, dtype)
                for name, value in kwargs.items()
            }
        positional = [self._change(value, action, dtype) for value in args]
        return (*positional,), (
            {name: self._change(value, action, dtype) for name, value in kwargs.items()}
            if kwargs
            else kwargs
        )

    def _change(self, value: Any, action: CastAction, dtype: torch.dtype) -> Any:
        # The hot path of a steered op: the questions are asked in the order of what they cost.
        if not isinstance(value, Tensor):
            return (
                type(value)([self._change(item, action, dtype) for item in value])
                if type(value) in (list, tuple)
                else value
            )
        given = value.dtype
        if given is dtype or given not in CASTABLE_DTYPES or not self._is_here(value):
            return value
        if (
            action.cached
            and type(value) is Parameter
            and given is torch.float32
            and is_weight(value)
        ):
            return self.cache.get(value, dtype)
        return value if action.weights else CASTS[dtype](value)


def _rule_for(action: CastAction, args: Args, kwargs: Kwargs) -> Rule | None:
    """The rule for this very call; None when the call says itself what it wants: an explicit dtype, a given output, a write into its input."""
    if action.rule is Rule.REFUSE:
        return action.rule
    if kwargs.get("out") is not None or (
        action.in_place is not None
        and _argument(action.in_place[0], action.in_place[1], args, kwargs)
    ):
        return None
    if action.takes_dtype and (
        kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
    ):
        return None
    for place, name, values, by_default in action.conditions:
        given = name in kwargs or 0 <= place < len(args)
        value = _argument(place, name, args, kwargs)
        if (given and not isinstance(value, Tensor) and value in values) or (
            by_default and not given
        ):
            return Rule.FULL
    return action.rule


def _argument(place: int, name: str, args: Args, kwargs: Kwargs) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[place] if 0 <= place < len(args) else None


def _castables(action: CastAction, device: str, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    places, names = (
        [place for place, _ in action.exempt_args],
        [name for _, name in action.exempt_args],
    )
    values = [value for place, value in enumerate(args) if place not in places] + [
        value for name, value in kwargs.items() if name not in names
    ]
    flat = [
        item
        for value in values
        for item in (value if isinstance(value, list | tuple) else (value,))
    ]
    return [item for item in flat if is_castable(item, device)]


def _has_float32_exempt(action: CastAction, device: str, args: Args, kwargs: Kwargs) -> bool:
    """Whether one of the arguments that are never cast down is float32."""
    given = (_argument(place, name, args, kwargs) for place, name in action.exempt_args)
    return any(is_castable(value, device) and value.dtype is torch.float32 for value in given)


def active_mode(device: str) -> AutocastMode | None:
    """The mode that steers a device type on this thread. The stack is asked through torch's own calls, which dynamo knows."""
    for index in range(function_mode_count()):
        mode = function_mode_at(index)
        if isinstance(mode, AutocastMode) and mode.device == device:
            return mode
    return None
