"""The mode that steers: it sees every torch function, and acts on those that the policy wants otherwise than torch's own lists.

One mode a thread and device type stands on torch's mode stack while any steered region is open; entering another region only changes its key.
A key names a table. In compiled code the key is what dynamo guards on: another policy is another key, and the code is compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from mezzo import _events
from mezzo._casting import CASTS, cast_all, is_castable, on_device
from mezzo._dtypes import CASTABLE_DTYPES, HALF_DTYPES, dtype_name
from mezzo._errors import RefusedOpError
from mezzo._torch import function_mode_at, function_mode_count
from mezzo.eager import tables, tracing
from mezzo.eager.cache import WeightCache, is_weight
from mezzo.eager.composites import body
from mezzo.eager.fallback import fall_back
from mezzo.eager.higher_order import permit_mode_changes, within
from mezzo.eager.inlined import inlined
from mezzo.eager.plan import Action
from mezzo.eager.tables import TABLES, refused
from mezzo.policy import kernels
from mezzo.policy.registry import Function
from mezzo.policy.rule import Rule

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# Looking a member up on its enum costs as much as the rest of the question.
_HALF, _FULL = Rule.HALF, Rule.FULL
# So does looking a function up on torch, three times an op.
_is_enabled, _set_enabled, _get_dtype = torch.is_autocast_enabled, torch.set_autocast_enabled, torch.get_autocast_dtype


class Steering(TorchFunctionMode):
    """Acts on the functions of one table, for tensors of one device type."""

    def __init__(self, device: str, key: str) -> None:
        super().__init__()
        self.device = device
        self.key = key

    # Both made when eager first asks: compiled code never does, and would guard on all that they are made of.
    @cached_property
    def cache(self) -> WeightCache:
        """The 16-bit copies of weights, for as long as the outermost steered region lasts."""
        return WeightCache()

    @cached_property
    def _is_here(self) -> Callable[[Tensor], bool]:
        return on_device(self.device)

    @inlined
    def __torch_function__(self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if is_dynamo_compiling():
            return self._trace(func, args, kwargs or {})
        action = TABLES[self.key].get(func)
        # torch's own state says whether casting is on: a disabled region inside switches this off too.
        if action is None or not _is_enabled(self.device):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.steer(func, action, args, kwargs or {})

    def _trace(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        rule = tables.rule_of(self.key, func)
        if rule is None or not torch.is_autocast_enabled(self.device):
            # Called as a method: dynamo does not trace the `super()` inside this one.
            return args[0].unflatten(*args[1:], **kwargs) if func is Tensor.unflatten else func(*args, **kwargs)
        if rule == "open":
            with self:
                return tracing.body(func)(*args, **kwargs)
        if rule == "carried":
            return self._trace_carried(func, args, kwargs)
        return tracing.trace(self.key, self.device, rule, func, args, kwargs)

    def _trace_carried(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        before = permit_mode_changes(True)
        # Looked up anew: dynamo asks for the permission when it first sees the operator.
        operator = getattr(torch.ops.higher_order, tables.operator_of(self.key, func))
        try:
            return operator(within(self, args[0]), *args[1:], **kwargs)
        finally:
            permit_mode_changes(before)

    def steer(self, func: Function, action: Action, args: Args, kwargs: Kwargs) -> Any:
        """Carry out one action."""
        if action.opens:
            with self:
                return body(func)(*args, **kwargs)
        if action.carried:
            return func(within(self, args[0]), *args[1:], **kwargs)
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
            _events.emit(_events.CastSteered(action.op, rule.value, "as given" if dtype is None else dtype_name(dtype), action.reason))
        if action.widens and dtype in HALF_DTYPES and _has_wide(action, self.device, args, kwargs):
            args, kwargs = cast_all(args, torch.float32, self.device), cast_all(kwargs, torch.float32, self.device)
            return CASTS[dtype](self._run(func, action, torch.float32, args, kwargs))
        return self._run(func, action, dtype, args, kwargs)

    def _run(self, func: Function, action: Action, dtype: torch.dtype | None, args: Args, kwargs: Kwargs) -> Any:
        if action.quiet:
            _set_enabled(self.device, False)
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        except (RuntimeError, NotImplementedError) as error:
            return fall_back(error, func, action.op, dtype, self.device, args, kwargs)
        finally:
            if action.quiet:
                _set_enabled(self.device, True)

    def _half(self, action: Action) -> torch.dtype:
        half = _get_dtype(self.device)
        return torch.float32 if kernels.was_learnt(action.op, half, self.device) else half

    def _widest(self, rule: Rule, action: Action, args: Args, kwargs: Kwargs) -> torch.dtype | None:
        """What the inputs of an op are promoted to; None leaves them."""
        if rule is Rule.KEEP:
            return None
        dtypes = [tensor.dtype for tensor in _castables(action, self.device, args, kwargs)]
        if rule is Rule.REFUSE and (any(one in HALF_DTYPES for one in dtypes) if action.halves_alone else dtypes):
            raise RefusedOpError(refused(action))
        return reduce(torch.promote_types, dtypes) if dtypes else None

    def _cast(self, action: Action, dtype: torch.dtype, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if action.exempt and dtype is not torch.float32:
            places, names = [place for place, _ in action.exempt], [name for _, name in action.exempt]
            positional = [value if place in places else self._change(value, action, dtype) for place, value in enumerate(args)]
            return (*positional,), {name: value if name in names else self._change(value, action, dtype) for name, value in kwargs.items()}
        positional = [self._change(value, action, dtype) for value in args]
        return (*positional,), {name: self._change(value, action, dtype) for name, value in kwargs.items()} if kwargs else kwargs

    def _change(self, value: Any, action: Action, dtype: torch.dtype) -> Any:
        # The hot path of a steered op: the questions are asked in the order of what they cost.
        if not isinstance(value, Tensor):
            return type(value)([self._change(item, action, dtype) for item in value]) if type(value) in (list, tuple) else value
        given = value.dtype
        if given is dtype or given not in CASTABLE_DTYPES or not self._is_here(value):
            return value
        if action.cached and type(value) is Parameter and given is torch.float32 and is_weight(value):
            return self.cache.get(value, dtype)
        return value if action.weights else CASTS[dtype](value)


def _rule_for(action: Action, args: Args, kwargs: Kwargs) -> Rule | None:
    """The rule for this very call; None when the call says itself what it wants: an explicit dtype, a given output, a write into its input."""
    if action.rule is Rule.REFUSE:
        return action.rule
    if kwargs.get("out") is not None or (action.in_place is not None and _argument(action.in_place[0], action.in_place[1], args, kwargs)):
        return None
    if action.takes_dtype and (kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)):
        return None
    for place, name, values, by_default in action.conditions:
        given = name in kwargs or 0 <= place < len(args)
        value = _argument(place, name, args, kwargs)
        if (given and not isinstance(value, Tensor) and value in values) or (by_default and not given):
            return Rule.FULL
    return action.rule


def _argument(place: int, name: str, args: Args, kwargs: Kwargs) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[place] if 0 <= place < len(args) else None


def _castables(action: Action, device: str, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    places, names = [place for place, _ in action.exempt], [name for _, name in action.exempt]
    values = [value for place, value in enumerate(args) if place not in places] + [value for name, value in kwargs.items() if name not in names]
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else (value,))]
    return [item for item in flat if is_castable(item, device)]


def _has_wide(action: Action, device: str, args: Args, kwargs: Kwargs) -> bool:
    """Whether one of the arguments that are never cast down is float32."""
    given = (_argument(place, name, args, kwargs) for place, name in action.exempt)
    return any(is_castable(value, device) and value.dtype is torch.float32 for value in given)


def steering_of(device: str) -> Steering | None:
    """The mode that steers a device type on this thread. The stack is asked through torch's own calls, which dynamo knows."""
    for index in range(function_mode_count()):
        mode = function_mode_at(index)
        if isinstance(mode, Steering) and mode.device == device:
            return mode
    return None
