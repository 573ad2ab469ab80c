"""Module rules: run the forward of some modules in another precision than the region around."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from mezzo._casting import cast_all
from mezzo._errors import PolicyError, UnsupportedError, nearest
from mezzo.autocasting.regions import Region, enter_regions, innermost_region
from mezzo.policy.policy import Policy
from mezzo.policy.types import Rule

Forward = Callable[..., Any]


WRAPPED_FORWARD, RULED_FORWARD = "mezzo_wrapped_forward", "mezzo_ruled_forward"
"""Attributes of the forwards of decorated models and of module rules: the forward below them."""


def replace_forward(
    module: nn.Module, mark: str, make: Callable[[Forward, bool], Forward]
) -> Callable[[], None]:
    """Replace the forward of one module; return a function that restores it.

    `make` takes the previous function and whether it is bound to its module, and returns a function
    of `self` and the arguments. If the previous forward has the same `mark`, it is replaced, and
    `make` gets the function below it.
    """
    previous = module.__dict__.get("forward")
    function = getattr(previous, mark, previous) or type(module).forward
    forward = make(function, previous is not None and function is not type(module).forward)
    setattr(forward, mark, function)
    # A bound method, so that a deep copy of the model gets one that is bound to the copy.
    module.__dict__["forward"] = MethodType(forward, module)
    return partial(_restore_forward, module, previous)


def _restore_forward(module: nn.Module, previous: Any) -> None:
    if previous is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = previous


_SHOWN_NAMES = 20


@dataclass(frozen=True)
class ModuleRule:
    """One module and its rule."""

    name: str
    module: nn.Module
    rule: Rule


def plan_modules(model: nn.Module, policy: Policy) -> tuple[ModuleRule, ...]:
    """Return the modules that the module rules of a policy match, with their rules.

    An exact name takes precedence over a glob, a glob over a class, and of equals the later one.
    """
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError(
            "Module rules cannot be bound to nn.DataParallel, whose replicas would run the forward"
            " of the original. Bind them to the module inside it."
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[nn.Module, tuple[int, ModuleRule]] = {}
    for selector, rule in policy.modules:
        matched = [name for name, module in modules.items() if selector.matches(name, module)]
        if not matched:
            raise PolicyError(_no_match(selector.text, model, [name for name in modules if name]))
        for name in matched:
            # By module: a shared module has several names but one precision.
            module = modules[name]
            if module not in chosen or chosen[module][0] <= selector.rank:
                chosen[module] = selector.rank, ModuleRule(name, module, rule)
    return tuple(module_rule for _, module_rule in chosen.values())


def _no_match(selector: str, model: nn.Module, names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")
    return (
        f"The module rule {selector!r} matches nothing in"
        f" {type(model).__name__}.{nearest(selector, names)} Its modules: {shown}."
    )


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision in which a module runs."""

    region: Region
    """The region around its forward."""
    dtype: torch.dtype | None
    """The dtype to which its floating-point arguments are cast; None leaves them."""


class ModuleRuleBinding:
    """Context manager in which module rules apply to a model, in the current thread.

    It can be entered any number of times, in any thread.
    """

    def __init__(self, precisions: Iterable[tuple[nn.Module, Precision]]) -> None:
        self._precisions = tuple(precisions)

    def __enter__(self) -> None:
        entry = _Entry(self, self._replace_forwards())
        _thread.entries.append(entry)
        for forward, precision in entry.precisions.items():
            forward.in_thread.apply(precision)

    def __exit__(self, *_: object) -> None:
        # Not necessarily the innermost: a suspended generator may be closed late.
        index = next(
            index
            for index in reversed(range(len(_thread.entries)))
            if _thread.entries[index].binding is self
        )
        entry = _thread.entries.pop(index)
        _apply_innermost(entry.precisions)
        _release(entry.precisions)

    def apply_in_all_threads(self) -> Callable[[], None]:
        """Apply the rules in every thread without another rule for a module; return the undo."""
        precisions = self._replace_forwards()
        for forward, precision in precisions.items():
            forward.apply_in_all_threads(precision)

        def undo() -> None:
            for forward in precisions:
                forward.apply_in_all_threads(None)
            _release(precisions)

        return undo

    def _replace_forwards(self) -> dict[_SharedForward, Precision]:
        with _lock:
            return {_SharedForward.of(module): precision for module, precision in self._precisions}


class _ThreadPrecision(threading.local):
    """Precision of one module in the current thread.

    Compiled code guards on it, so that each thread gets code for its own rules.
    """

    def __init__(self) -> None:
        self.precision: Precision | None = None

    def apply(self, precision: Precision | None) -> None:
        """Run the module in this precision; None leaves it to other threads."""
        self.precision = precision


class _SharedForward:
    """The replaced forward of one module, shared by all bindings that need it."""

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module | None = module
        self.users = 0
        """Number of entered bindings that need it, in all threads."""
        self.in_thread = _ThreadPrecision()
        self.in_all_threads: Precision | None = None
        """Precision in threads without a rule for the module."""
        self._restore = replace_forward(module, RULED_FORWARD, self._make)
        module.__dict__["forward"].__func__.mezzo_shared = self

    @classmethod
    def of(cls, module: nn.Module) -> _SharedForward:
        """Return the replaced forward of a module; replace it if it is not yet."""
        existing: _SharedForward | None = getattr(
            module.__dict__.get("forward"), "mezzo_shared", None
        )
        # A deep copy has the forward of its original.
        is_own = existing is not None and existing.module is module
        shared = existing if existing is not None and is_own else cls(module)
        shared.add_user()
        return shared

    def add_user(self) -> None:
        """Keep the forward replaced until one more `release`."""
        self.users += 1

    def apply_in_all_threads(self, precision: Precision | None) -> None:
        """Run the module in this precision in threads without a rule for it."""
        self.in_all_threads = precision

    def release(self) -> None:
        """Restore the forward if no other binding needs it."""
        self.users -= 1
        if self.users == 0:
            self._restore()
            # Deep copies of the module refer to this object, which must not keep the original.
            self.module = None
            del self._restore

    def _make(self, function: Forward, bound: bool) -> Forward:  # noqa: FBT001
        in_thread, shared = self.in_thread, self

        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            precision = (
                shared.in_all_threads if in_thread.precision is None else in_thread.precision
            )
            if precision is None or (
                not is_dynamo_compiling() and _is_disabled(precision.region.device)
            ):
                return function(*args, **kwargs) if bound else function(self_, *args, **kwargs)
            if precision.dtype is not None:
                args = cast_all(args, precision.dtype, precision.region.device)
                kwargs = cast_all(kwargs, precision.dtype, precision.region.device)
            with enter_regions(precision.region):
                return function(*args, **kwargs) if bound else function(self_, *args, **kwargs)

        return forward


def _is_disabled(device: str) -> bool:
    """Return whether autocast is disabled, other than by the float32 rule of a parent module."""
    if torch.is_autocast_enabled(device):
        return False
    region = innermost_region(device)
    return region is None or not region.from_module_rule


class _Entry(NamedTuple):
    """A binding that a thread has entered."""

    binding: ModuleRuleBinding
    precisions: dict[_SharedForward, Precision]


class _Thread(threading.local):
    """The bindings that the current thread has entered, innermost last."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._alive = _Alive()
        # A thread may end inside a region, for example after `mezzo.enable_autocast`.
        finalize(self._alive, _release_all, self.entries).atexit = False


class _Alive:
    """An object that lives as long as its thread."""


_lock = threading.RLock()
"""Held while forwards are replaced and restored."""


def _apply_innermost(forwards: Iterable[_SharedForward]) -> None:
    """Set the thread's precision of each forward to that of the innermost entered binding."""
    for forward in forwards:
        forward.in_thread.apply(
            next(
                (
                    entry.precisions[forward]
                    for entry in reversed(_thread.entries)
                    if forward in entry.precisions
                ),
                None,
            )
        )


def _release(forwards: Iterable[_SharedForward]) -> None:
    with _lock:
        for forward in forwards:
            forward.release()


def _release_all(entries: list[_Entry]) -> None:
    for entry in entries:
        _release(entry.precisions)


_thread = _Thread()


def current_bindings() -> tuple[ModuleRuleBinding, ...]:
    """Return the bindings that this thread has entered, innermost last."""
    return tuple(entry.binding for entry in _thread.entries)


@contextmanager
def replace_bindings(bindings: tuple[ModuleRuleBinding, ...]) -> Iterator[None]:
    """Context manager in which this thread has entered other bindings instead of its own."""
    outer = _thread.entries.copy()
    _thread.entries.clear()
    for entry in outer:
        _apply_innermost(entry.precisions)
    try:
        with ExitStack() as stack:
            for binding in bindings:
                stack.enter_context(binding)
            yield
    finally:
        _thread.entries.extend(outer)
        for entry in outer:
            _apply_innermost(entry.precisions)
