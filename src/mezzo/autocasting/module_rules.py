"""Module rules: run the forward of some modules in another precision than what surrounds them."""

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


def replace_forward(
    module: nn.Module, mark: str, make: Callable[[Forward, bool], Forward]
) -> Callable[[], None]:
    """Replace the forward of one module; what comes back puts it back.

    `make` gets the function that was there, and whether it is bound to its module already, and
    gives one of `self` and the arguments. A forward with the same `mark` gives way: what it had
    replaced is replaced anew.
    """
    own = module.__dict__.get("forward")
    function = getattr(own, mark, own) or type(module).forward
    forward = make(function, own is not None and function is not type(module).forward)
    setattr(forward, mark, function)
    # A bound method, so that a deep copy of the model gets one bound to the copy.
    module.__dict__["forward"] = MethodType(forward, module)
    return partial(_restore_forward, module, own)


def _restore_forward(module: nn.Module, own: Any) -> None:
    if own is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = own


_SHOWN = 20


@dataclass(frozen=True)
class RuledModule:
    """One module under its rule."""

    name: str
    module: nn.Module
    rule: Rule


def plan_modules(model: nn.Module, policy: Policy) -> tuple[RuledModule, ...]:
    """Find the rule of each module that one names. An exact name beats a glob, a glob beats a type, and of equals the later wins."""
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError(
            "Module rules cannot be bound to nn.DataParallel, whose replicas would run the"
            " original's forward. Bind the module inside it."
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[nn.Module, tuple[int, RuledModule]] = {}
    for selector, rule in policy.modules:
        matched = [name for name, module in modules.items() if selector.matches(name, module)]
        if not matched:
            known = [name for name in modules if name]
            raise PolicyError(
                f"The module rule {selector.text!r} matches nothing in"
                f" {type(model).__name__}.{nearest(selector.text, known)} Its modules:"
                f" {', '.join(known[:_SHOWN])}{', …' if len(known) > _SHOWN else ''}."
            )
        for name in matched:
            # By the module: one that is shared has several names and runs one precision.
            if modules[name] not in chosen or chosen[modules[name]][0] <= selector.rank:
                chosen[modules[name]] = selector.rank, RuledModule(name, modules[name], rule)
    return tuple(ruled for _, ruled in chosen.values())


@dataclass(frozen=True, slots=True)
class Precision:
    """How a module runs under a rule."""

    region: Region
    """The region that its forward runs in."""
    dtype: torch.dtype | None
    """What its floating-point arguments are cast to; None leaves them."""


class ModuleRuleBinding:
    """Module rules on a model: a context in which they hold for the current thread. It can be entered any number of times, in any thread."""

    def __init__(self, precisions: Iterable[tuple[nn.Module, Precision]]) -> None:
        self._precisions = tuple(precisions)

    def __enter__(self) -> None:
        entry = _Entry(self, self._replace_forwards())
        _thread.entries.append(entry)
        for forward, precision in entry.precisions.items():
            forward.here.precision = precision

    def __exit__(self, *_: object) -> None:
        # Not necessarily the innermost: a suspended generator may be closed late.
        place = next(
            place
            for place in reversed(range(len(_thread.entries)))
            if _thread.entries[place].binding is self
        )
        entry = _thread.entries.pop(place)
        _follow_innermost(entry.precisions)
        _put_back(entry.precisions)

    def apply_in_all_threads(self) -> Callable[[], None]:
        """Let the rules hold in every thread that has no other for the same module; call what is returned to end this."""
        precisions = self._replace_forwards()
        for forward, precision in precisions.items():
            forward.everywhere = precision

        def undo() -> None:
            for forward in precisions:
                forward.everywhere = None
            _put_back(precisions)

        return undo

    def _replace_forwards(self) -> dict[_RuledForward, Precision]:
        with _lock:
            return {_RuledForward.of(module): precision for module, precision in self._precisions}


class _ThreadPrecision(threading.local):
    """How one module runs in the current thread. Compiled code guards on what it reads here, so that each thread gets code for its own rules."""

    def __init__(self) -> None:
        self.precision: Precision | None = None


class _RuledForward:
    """The replaced forward of one module, shared by all bindings that need it."""

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module | None = module
        self.users = 0
        """How often bindings that need it were entered, in all threads."""
        self.here = _ThreadPrecision()
        self.everywhere: Precision | None = None
        """How the module runs in threads that have no rule of their own for it."""
        self._put_back = replace_forward(module, "mezzo_original", self._make)
        module.__dict__["forward"].__func__.mezzo_shared = self

    @classmethod
    def of(cls, module: nn.Module) -> _RuledForward:
        """Replace the forward of a module, unless it is replaced already."""
        found: _RuledForward | None = getattr(module.__dict__.get("forward"), "mezzo_shared", None)
        # A deep copy has the forward of its original.
        shared = cls(module) if found is None or found.module is not module else found
        shared.users += 1
        return shared

    def release(self) -> None:
        """Put the forward back, unless another region needs it."""
        self.users -= 1
        if self.users == 0:
            self._put_back()
            # Deep copies of the module keep this object, and would keep the original.
            self.module = None
            del self._put_back

    def _make(self, function: Forward, bound: bool) -> Forward:  # noqa: FBT001
        here, shared = self.here, self

        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            precision = shared.everywhere if here.precision is None else here.precision
            if precision is None or (
                not is_dynamo_compiling() and _is_switched_off(precision.region.device)
            ):
                return function(*args, **kwargs) if bound else function(self_, *args, **kwargs)
            if precision.dtype is not None:
                args, kwargs = (
                    cast_all(args, precision.dtype, precision.region.device),
                    cast_all(kwargs, precision.dtype, precision.region.device),
                )
            with enter_regions(precision.region):
                return function(*args, **kwargs) if bound else function(self_, *args, **kwargs)

        return forward


def _is_switched_off(device: str) -> bool:
    """Whether a disabled region of the user is around, and not just the float32 rule of a parent."""
    if torch.is_autocast_enabled(device):
        return False
    region = innermost_region(device)
    return region is None or not region.ruled


class _Entry(NamedTuple):
    """A binding that a thread has entered."""

    binding: ModuleRuleBinding
    precisions: dict[_RuledForward, Precision]


class _Thread(threading.local):
    """The bindings that the current thread has entered, innermost last."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._alive = _Alive()
        # A thread may end inside a region, after `mezzo.enable_autocast` for instance.
        finalize(self._alive, _put_back_all, self.entries).atexit = False


class _Alive:
    """Lives as long as its thread."""


_lock = threading.RLock()
"""Held while forwards are replaced and put back."""


def _follow_innermost(forwards: Iterable[_RuledForward]) -> None:
    for forward in forwards:
        forward.here.precision = next(
            (
                entry.precisions[forward]
                for entry in reversed(_thread.entries)
                if forward in entry.precisions
            ),
            None,
        )


def _put_back(forwards: Iterable[_RuledForward]) -> None:
    with _lock:
        for forward in forwards:
            forward.release()


def _put_back_all(entries: list[_Entry]) -> None:
    for entry in entries:
        _put_back(entry.precisions)


_thread = _Thread()


def current_bindings() -> tuple[ModuleRuleBinding, ...]:
    """The bindings that this thread has entered, innermost last."""
    return tuple(entry.binding for entry in _thread.entries)


@contextmanager
def only(bindings: tuple[ModuleRuleBinding, ...]) -> Iterator[None]:
    """Replace the bindings that this thread has entered by others."""
    outer = _thread.entries.copy()
    _thread.entries.clear()
    for entry in outer:
        _follow_innermost(entry.precisions)
    try:
        with ExitStack() as stack:
            for binding in bindings:
                stack.enter_context(binding)
            yield
    finally:
        _thread.entries.extend(outer)
        for entry in outer:
            _follow_innermost(entry.precisions)
