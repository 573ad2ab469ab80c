"""TorchFunctionMode that casts the inputs of ops where a policy differs from torch's own op lists.

Eager mode looks the action up in the table and uses the weight cache (`AutocastMode.apply_rule`).
Compiled code makes the same decisions from constants that dynamo can trace (`apply_rule_traced`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.amp.autocast_mode import autocast as torch_autocast
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from mezzo import _events
from mezzo._casting import CASTS, cast, cast_all, device_test, is_castable
from mezzo._dtypes import CASTABLE_DTYPES, HALF_DTYPES, dtype_name
from mezzo._errors import RefusedOpError
from mezzo._torch import function_mode_at, function_mode_count
from mezzo.autocasting import composites, table_lookup
from mezzo.autocasting.composites import decomposed
from mezzo.autocasting.dynamo import permit_mode_changes, skip_frame, under_mode
from mezzo.autocasting.float32_fallback import retry_in_float32
from mezzo.autocasting.op_table import CastAction
from mezzo.autocasting.table_lookup import TABLES, refusal_message
from mezzo.autocasting.weight_cache import WeightCache, is_weight
from mezzo.policy import missing_kernels
from mezzo.policy.registry import Function
from mezzo.policy.types import Rule

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# A lookup of an enum member costs as much as the comparison with it.
_HALF, _FULL = Rule.HALF, Rule.FULL
# So does a lookup of a function in torch, three times per op.
_is_enabled, _set_enabled, _get_dtype = (
    torch.is_autocast_enabled,
    torch.set_autocast_enabled,
    torch.get_autocast_dtype,
)
_DTYPE = Tensor.dtype
"""The attribute of ordinary tensors and of most subclasses."""


class AutocastMode(TorchFunctionMode):
    """Apply the cast actions of one table to tensors of one device type."""

    def __init__(self, device: str, table_key: str) -> None:
        super().__init__()
        self.device = device
        self.table_key = table_key

    def use_table(self, table_key: str) -> str:
        """Use the table with this key; return the key of the one before."""
        before, self.table_key = self.table_key, table_key
        return before

    # Both are created on first use in eager mode. Compiled code does not use them, and would guard
    # on their contents.
    @cached_property
    def cache(self) -> WeightCache:
        """16-bit copies of weights, which live as long as the outermost region with a table."""
        return WeightCache()

    @cached_property
    def _is_on_device(self) -> Callable[[Tensor], bool]:
        return device_test(self.device)

    @skip_frame
    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if is_dynamo_compiling():
            return self._trace(func, args, kwargs or {})
        action = TABLES[self.table_key].get(func)
        # torch's autocast state decides: a disabled torch region inside disables this mode too.
        if action is None or not _is_enabled(self.device):
            return func(*args, **kwargs) if kwargs else func(*args)
        if types and any(getattr(cls, "dtype", _DTYPE) is not _DTYPE for cls in types):
            # A subclass with another system's dtypes: inside its own handler they are torch's.
            with self:
                return types[0].__torch_function__(func, types, args, kwargs or {})
        return self.apply_rule(func, action, args, kwargs or {})

    # -- Eager mode --------------------------------------------------------------------------------

    def apply_rule(self, func: Function, action: CastAction, args: Args, kwargs: Kwargs) -> Any:
        """Cast the inputs as the action requires and call the function."""
        if action.is_composite:
            with self:
                return decomposed(func)(*args, **kwargs)
        if action.wraps_function:
            return func(under_mode(self, args[0]), *args[1:], **kwargs)
        fixed = action.has_fixed_rule and not kwargs
        rule = action.rule if fixed else _rule_for_call(action, args, kwargs)
        if rule is None:
            return func(*args, **kwargs)
        if rule is _HALF:
            dtype: torch.dtype | None = self._half(action)
        else:
            dtype = torch.float32 if rule is _FULL else self._widest(rule, action, args, kwargs)
        if dtype is not None:
            args, kwargs = self._cast(action, dtype, args, kwargs)
        if not action.casts_only_weights and _events.listening():
            name = "as given" if dtype is None else dtype_name(dtype)
            event = _events.OpCastOverridden(action.op, rule.value, name, action.reason)
            _events.emit(event)
        if (
            action.computes_in_float32
            and dtype in HALF_DTYPES
            and _has_float32_exempt(action, self.device, args, kwargs)
        ):
            args = cast_all(args, torch.float32, self.device)
            kwargs = cast_all(kwargs, torch.float32, self.device)
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
        """Return the dtype to which the inputs are promoted; None leaves them as they are."""
        if rule is Rule.KEEP:
            return None
        dtypes = [tensor.dtype for tensor in _castable_inputs(action, self.device, args, kwargs)]
        if rule is Rule.REFUSE:
            only_half = action.refused_only_in_half
            if any(dtype in HALF_DTYPES for dtype in dtypes) if only_half else dtypes:
                raise RefusedOpError(refusal_message(action))
        if rule is Rule.FLOAT32_INSIDE:
            return dtypes[0] if dtypes else None
        return reduce(torch.promote_types, dtypes) if dtypes else None

    def _cast(
        self, action: CastAction, dtype: torch.dtype, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        if action.exempt_args and dtype is not torch.float32:
            positions, names = zip(*action.exempt_args, strict=True)
            positional = [
                value if position in positions else self._cast_value(value, action, dtype)
                for position, value in enumerate(args)
            ]
            return (*positional,), {
                name: value if name in names else self._cast_value(value, action, dtype)
                for name, value in kwargs.items()
            }
        positional = [self._cast_value(value, action, dtype) for value in args]
        return (*positional,), (
            {name: self._cast_value(value, action, dtype) for name, value in kwargs.items()}
            if kwargs
            else kwargs
        )

    def _cast_value(self, value: Any, action: CastAction, dtype: torch.dtype) -> Any:
        # The hot path of an op: the cheapest checks come first.
        if not isinstance(value, Tensor):
            return (
                type(value)([self._cast_value(item, action, dtype) for item in value])
                if type(value) in (list, tuple)
                else value
            )
        source = value.dtype
        if source is dtype or source not in CASTABLE_DTYPES or not self._is_on_device(value):
            return value
        if (
            action.cached
            and type(value) is Parameter
            and source is torch.float32
            and is_weight(value)
        ):
            return self.cache.get(value, dtype)
        return value if action.casts_only_weights else CASTS[dtype](value)

    # -- Compiled code -----------------------------------------------------------------------------

    def _trace(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        rule = table_lookup.rule_of(self.table_key, func)
        if rule is None or not torch.is_autocast_enabled(self.device):
            # Called as a method: dynamo does not trace the `super()` inside this one.
            return (
                args[0].unflatten(*args[1:], **kwargs)
                if func is Tensor.unflatten
                else func(*args, **kwargs)
            )
        if rule == "decompose":
            with self:
                return decomposed_traced(func)(*args, **kwargs)
        if rule == "wrap":
            return self._trace_wrapped(func, args, kwargs)
        return apply_rule_traced(self.table_key, self.device, rule, func, args, kwargs)

    def _trace_wrapped(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        before = permit_mode_changes(True)
        # Looked up again: dynamo reads the permission when it first meets the operator.
        operator = getattr(torch.ops.higher_order, table_lookup.operator_of(self.table_key, func))
        try:
            return operator(under_mode(self, args[0]), *args[1:], **kwargs)
        finally:
            permit_mode_changes(before)


def active_mode(device: str) -> AutocastMode | None:
    """Return the mode of a device type on this thread's stack, with calls that dynamo can trace."""
    for index in range(function_mode_count()):
        mode = function_mode_at(index)
        if isinstance(mode, AutocastMode) and mode.device == device:
            return mode
    return None


def _rule_for_call(action: CastAction, args: Args, kwargs: Kwargs) -> Rule | None:
    """Return the rule for the arguments of a call; None if nothing is cast.

    Nothing is cast if the call has an explicit dtype or output, or writes into its input.
    """
    if action.rule is Rule.REFUSE:
        return action.rule
    if kwargs.get("out") is not None or (
        action.in_place is not None and _argument(*action.in_place, args, kwargs)
    ):
        return None
    if action.takes_dtype and (
        kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
    ):
        return None
    for position, name, values, is_met_by_default in action.conditions:
        is_passed = name in kwargs or 0 <= position < len(args)
        value = _argument(position, name, args, kwargs)
        if (is_passed and not isinstance(value, Tensor) and value in values) or (
            is_met_by_default and not is_passed
        ):
            return Rule.FULL
    return action.rule


def _argument(position: int, name: str, args: Args, kwargs: Kwargs) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[position] if 0 <= position < len(args) else None


def _castable_inputs(
    action: CastAction, device: str, args: Args, kwargs: Kwargs
) -> list[torch.Tensor]:
    positions = [argument.position for argument in action.exempt_args]
    names = [argument.name for argument in action.exempt_args]
    values = [value for position, value in enumerate(args) if position not in positions]
    values += [value for name, value in kwargs.items() if name not in names]
    return [item for item in _flat(values) if is_castable(item, device)]


def _flat(values: list[Any]) -> list[Any]:
    return [
        item for value in values for item in (value if isinstance(value, list | tuple) else [value])
    ]


def _has_float32_exempt(action: CastAction, device: str, args: Args, kwargs: Kwargs) -> bool:
    """Return whether an exempt argument of the call is float32."""
    values = (_argument(*argument, args, kwargs) for argument in action.exempt_args)
    return any(is_castable(value, device) and value.dtype is torch.float32 for value in values)


# -- The same decisions in compiled code: strings and constants instead of a `CastAction` ----------


def apply_rule_traced(
    key: str,
    device: str,
    rule: str,
    func: Function,
    args: Args,
    kwargs: Kwargs,
    inner: Function | None = None,
) -> Any:
    """Cast the inputs by a rule and call the function, in code that dynamo traces.

    `inner` is called instead of `func` if it is passed; `func` is the key in the table.
    """
    call = func if inner is None else inner
    if _has_explicit_result_traced(key, func, args, kwargs):
        return call(*args, **kwargs)
    if table_lookup.has_conditions(key, func) and _meets_condition_traced(key, func, args, kwargs):
        rule = "full"
    dtype = _dtype_traced(key, device, rule, func, args, kwargs)
    if dtype is torch.float32:
        args = tuple([_cast_value_traced(value, device, dtype) for value in args])
        kwargs = {name: _cast_value_traced(value, device, dtype) for name, value in kwargs.items()}
    elif dtype is not None:
        args = tuple(
            [
                value
                if table_lookup.is_exempt(key, func, position)
                else _cast_value_traced(value, device, dtype)
                for position, value in enumerate(args)
            ]
        )
        kwargs = {
            name: value
            if table_lookup.is_exempt(key, func, name)
            else _cast_value_traced(value, device, dtype)
            for name, value in kwargs.items()
        }
        if table_lookup.computes_in_float32(key, func) and _has_float32_exempt_traced(
            key, device, func, args, kwargs
        ):
            args = tuple([_cast_value_traced(value, device, torch.float32) for value in args])
            kwargs = {
                name: _cast_value_traced(value, device, torch.float32)
                for name, value in kwargs.items()
            }
            return cast(_call_traced(key, device, func, call, args, kwargs), dtype)
    return _call_traced(key, device, func, call, args, kwargs)


def decomposed_traced(func: Function) -> Function:
    """Return the decomposed copy of a composite function, through the module that holds it."""
    copy: Function = getattr(composites, table_lookup.decomposed_name(func))
    return copy


def _call_traced(
    key: str, device: str, func: Function, call: Function, args: Args, kwargs: Kwargs
) -> Any:
    if not table_lookup.disables_torch_autocast(key, func):
        return call(*args, **kwargs)
    with torch_autocast(
        device, dtype=torch.get_autocast_dtype(device), enabled=False, cache_enabled=False
    ):
        return call(*args, **kwargs)


def _has_float32_exempt_traced(
    key: str, device: str, func: Function, args: Args, kwargs: Kwargs
) -> bool:
    exempt = [
        value for position, value in enumerate(args) if table_lookup.is_exempt(key, func, position)
    ]
    exempt += [value for name, value in kwargs.items() if table_lookup.is_exempt(key, func, name)]
    in_float32 = [
        value for value in exempt if is_castable(value, device) and value.dtype is torch.float32
    ]
    return len(in_float32) > 0


def _has_explicit_result_traced(key: str, func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Return whether a call has an explicit output or dtype, or writes into its input."""
    if kwargs.get("out") is not None:
        return True
    if table_lookup.takes_dtype(key, func) and (
        kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
    ):
        return True
    in_place = [
        value
        for position, value in enumerate(args)
        if isinstance(value, bool) and table_lookup.is_in_place_argument(key, func, position)
    ]
    in_place += [
        value
        for name, value in kwargs.items()
        if isinstance(value, bool) and table_lookup.is_in_place_argument(key, func, name)
    ]
    return any(in_place)


def _meets_condition_traced(key: str, func: Function, args: Args, kwargs: Kwargs) -> bool:
    plain: list[tuple[int | str, Any]] = [
        (position, value)
        for position, value in enumerate(args)
        if not isinstance(value, torch.Tensor | list | tuple)
    ]
    plain += [
        (name, value)
        for name, value in kwargs.items()
        if not isinstance(value, torch.Tensor | list | tuple)
    ]
    met = [table_lookup.is_condition(key, func, argument, value) for argument, value in plain]
    return any(met) or table_lookup.is_condition_by_default(key, func, len(args), " ".join(kwargs))


def _dtype_traced(
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
        value
        for position, value in enumerate(args)
        if not table_lookup.is_exempt(key, func, position)
    ]
    values += [
        value for name, value in kwargs.items() if not table_lookup.is_exempt(key, func, name)
    ]
    dtypes = [item.dtype for item in _flat(values) if is_castable(item, device)]
    refused = (
        [dtype for dtype in dtypes if dtype in HALF_DTYPES]
        if rule == "refuse" and table_lookup.refuses_only_half(key, func)
        else dtypes
    )
    if rule == "refuse" and refused:
        raise RefusedOpError(table_lookup.refusal(key, func))
    if rule == "float32_inside":
        return dtypes[0] if dtypes else None
    return reduce(torch.promote_types, dtypes) if dtypes else None


def _cast_value_traced(value: Any, device: str, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return cast(value, dtype) if is_castable(value, device) else value
    if type(value) in (list, tuple):
        return type(value)([_cast_value_traced(item, device, dtype) for item in value])
    return value
