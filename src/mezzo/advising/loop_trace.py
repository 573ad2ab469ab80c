"""Run a user's training step, record what it does in which order, and restore all state."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mezzo._torch import TorchDispatchMode, current_autograd_node, pytree
from mezzo.advising.op_trace import OpTrace, source_line, traced
from mezzo.prepare.arguments import Optimizer
from mezzo.prepare.rollback import rolled_back
from mezzo.scaling.gradients import parameters

_CLIPS = frozenset(
    "mul_ _foreach_mul_ clamp_ clamp_min_ clamp_max_ clip_ _foreach_clamp_min_ _foreach_clamp_max_"
    " _foreach_minimum_ _foreach_maximum_".split()
)
"""Ops with which gradients are clipped in place."""
_SCALINGS = frozenset({"mul_", "_foreach_mul_"})
_SCALER_METHODS = ("scale", "backward", "find_scale", "unscale_", "step", "update")
"""Methods of scalers that are followed. torch's has no `backward`, which unscales at once."""


@dataclass(frozen=True)
class Loop:
    """A user's training step, and what it trains."""

    step: Callable[[], object]
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    scaler: Any
    schedulers: tuple[Any, ...]

    @property
    def device_type(self) -> str:
        """The device type of the model."""
        return next((parameter.device.type for parameter in self.model.parameters()), "cpu")


@dataclass
class LoopTrace:
    """What one training step did."""

    ops: OpTrace = field(default_factory=OpTrace)
    scaler_calls: Counter[str] = field(default_factory=Counter)
    """Calls of the scaler's methods."""
    clips_of_scaled: list[str] = field(default_factory=list)
    """Lines that clipped gradients before `unscale_`."""
    backward_in_region: list[str] = field(default_factory=list)
    """Lines that called backward while autocast was enabled."""
    backward_changes: list[str] = field(default_factory=list)
    """Ops of backward whose dtype that changes."""
    half_states: list[str] = field(default_factory=list)
    """States that the optimizers keep in 16 bits after the step."""
    steps_on_skip: bool | None = None
    """Whether a scheduler advanced when the update was skipped; None if that was not tried."""


def trace_loop(loop: Loop) -> LoopTrace:
    """Run the user's step, up to three times, and restore all state after each.

    Once as it is; once with backward outside of autocast if it was inside, to compare the dtypes;
    once with gradients that are not finite, to see what a skip does.
    """
    trace = LoopTrace()
    _run(loop, trace)
    if trace.backward_in_region:
        outside = LoopTrace()
        _run(loop, outside, around_backward=partial(_disabled, loop.device_type))
        trace.backward_changes = _changes(outside.ops.backward, trace.ops.backward)
    if loop.schedulers and trace.scaler_calls["step"] and loop.scaler.is_enabled():
        trace.steps_on_skip = _steps_on_skip(loop)
    return trace


def _run(
    loop: Loop,
    trace: LoopTrace,
    around_backward: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    watch = _ScalerWatch(loop, trace)
    with ExitStack() as stack:
        stack.enter_context(_restored(loop))
        stack.enter_context(watch.attached())
        stack.enter_context(_BackwardMode(loop.device_type, trace, around_backward))
        stack.enter_context(_ClipMode(loop, watch, trace))
        traced(loop.model, loop.step, trace.ops)
        trace.half_states.extend(half_states(loop.optimizers))


def _restored(loop: Loop) -> AbstractContextManager[None]:
    others = [part for part in (loop.scaler, *loop.schedulers) if hasattr(part, "load_state_dict")]
    return rolled_back([loop.model], loop.optimizers, others)


def _disabled(device_type: str) -> torch.autocast:
    return torch.autocast(device_type, enabled=False)


def _changes(outside: Counter[tuple[str, str]], inside: Counter[tuple[str, str]]) -> list[str]:
    """Return the ops of backward that ran in another dtype, as text."""
    added, removed = inside - outside, outside - inside
    changed: list[str] = []
    for op in sorted({op for op, _ in added} & {op for op, _ in removed}):
        before, after = (
            "/".join(sorted(dtype for name, dtype in counts if name == op))
            for counts in (removed, added)
        )
        changed.append(f"{op} in {after} instead of {before}")
    return changed


def _steps_on_skip(loop: Loop) -> bool | None:
    """Run the step with gradients that are not finite; return whether a scheduler advanced.

    None if nothing was skipped, as after `clip_grad_value_`, which makes them finite.
    """
    calls: Counter[str] = Counter()
    with ExitStack() as stack, warnings.catch_warnings():
        # torch warns about a scheduler that steps before any update: that is what is tried here.
        warnings.simplefilter("ignore")
        stack.enter_context(_restored(loop))
        for scheduler in loop.schedulers:
            stack.enter_context(_wrapped(scheduler, "step", partial(_count, calls, "step")))
        for parameter in {id(parameter): parameter for parameter in _trained(loop)}.values():
            stack.callback(parameter.register_hook(_make_infinite).remove)
        before = loop.scaler.get_scale()
        loop.step()
        is_skipped = loop.scaler.get_scale() < before
    return bool(calls["step"]) if is_skipped else None


def _trained(loop: Loop) -> Iterator[Tensor]:
    for optimizer in loop.optimizers:
        yield from (parameter for parameter in parameters(optimizer) if parameter.requires_grad)


def _make_infinite(gradient: Tensor) -> Tensor:
    return torch.full_like(gradient, torch.inf)


def half_states(optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """Yield the names of states that optimizers keep in 16 bits, such as `AdamW: exp_avg`."""
    found: dict[str, None] = {}
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                    found[f"{type(optimizer).__name__}: {name}"] = None
    # Rests of float32 values, which masters of 16 bits are.
    yield from (name for name in found if "mezzo" not in name)


# -- scaler ----------------------------------------------------------------------------------------


class _ScalerWatch:
    """Follows the calls of a scaler: whether gradients are scaled now, and unscaled already."""

    def __init__(self, loop: Loop, trace: LoopTrace) -> None:
        self._scaler, self._trace = loop.scaler, trace
        self._inside = 0
        self._scaled = False

    @property
    def holds_scaled(self) -> bool:
        """Whether the user's code sees gradients that are scaled."""
        return self._scaled and not self._inside

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Wrap the methods of this scaler, not those of its class."""
        with ExitStack() as stack:
            for name in _SCALER_METHODS:
                if not hasattr(self._scaler, name):
                    continue
                stack.enter_context(_wrapped(self._scaler, name, partial(self._call, name)))
            yield

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._trace.scaler_calls[name] += 1
        self._inside += 1
        try:
            return method(*args, **kwargs)
        finally:
            self._inside -= 1
            self._scaled = name == "scale" and self._scaler.is_enabled()


def _count(
    calls: Counter[str], name: str, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    calls[name] += 1
    return method(*args, **kwargs)


@contextmanager
def _wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Call `around(method, ...)` instead of a method of one object."""
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    attributes[name] = partial(around, getattr(owner, name))
    try:
        yield
    finally:
        attributes.pop(name, None)
        if had:
            attributes[name] = before


# -- modes -----------------------------------------------------------------------------------------


class _BackwardMode(TorchFunctionMode):
    """Sees calls of `Tensor.backward`, in the regions that the user's code is in."""

    def __init__(
        self,
        device_type: str,
        trace: LoopTrace,
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        super().__init__()
        self._device_type, self._trace, self._around = device_type, trace, around

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.backward:
            return func(*args, **(kwargs or {}))
        if torch.is_autocast_enabled(self._device_type):
            self._trace.backward_in_region.append(source_line())
        with self._around():
            return func(*args, **(kwargs or {}))


class _ClipMode(TorchDispatchMode):
    """Sees ops that clip gradients in place while these are scaled."""

    def __init__(self, loop: Loop, watch: _ScalerWatch, trace: LoopTrace) -> None:
        super().__init__()
        self._loop, self._watch, self._trace = loop, watch, trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _CLIPS and self._watch.holds_scaled and current_autograd_node() is None:
            # A division by a number of processes or calls is no clipping.
            constant = name in _SCALINGS and not isinstance(args[1], Tensor)
            if not constant and self._writes_gradients(args[0]):
                self._trace.clips_of_scaled.append(source_line())
        return func(*args, **(kwargs or {}))

    def _writes_gradients(self, written: Any) -> bool:
        gradients = {
            parameter.grad.data_ptr()
            for parameter in self._loop.model.parameters()
            if parameter.grad is not None
        }
        return any(
            leaf.data_ptr() in gradients
            for leaf in pytree.tree_leaves(written)
            if isinstance(leaf, Tensor)
        )
