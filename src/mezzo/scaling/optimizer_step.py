"""Step an optimizer: torch's `found_inf` protocol, and optimizers that wrap others."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mezzo import _launch
from mezzo._errors import ScalerError
from mezzo.scaling.loss_scales import BoundStep, binding_of
from mezzo.scaling.mesh import any_sharded
from mezzo.scaling.schedule_sync import groups_of

Optimizer = torch.optim.Optimizer

# -- optimizers that wrap others -------------------------------------------------------------------

_STANDARD_ATTRIBUTES = frozenset({"state", "param_groups", "defaults"})
"""Attributes that every optimizer has, and that hold tensors and numbers."""


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that an optimizer wraps, and those that they wrap, by path.

    Searches attributes, and lists, tuples, sets and dictionaries in them.

    >>> outer, inner = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    >>> outer.parts = {"first": inner}
    >>> list(inner_optimizers(outer))
    [".parts['first']"]
    """
    found: dict[str, Optimizer] = {}
    _collect(optimizer, "", found, {id(optimizer)})
    return found


def bindings_of(optimizer: Optimizer) -> list[BoundStep]:
    """Return the binding of an optimizer, or the bindings of the optimizers that it wraps."""
    binding = binding_of(optimizer)
    if binding is not None:
        return [binding]
    if type(optimizer).__module__.startswith("torch.optim."):
        # No search at every step: torch's optimizers wrap none.
        return []
    bindings = map(binding_of, inner_optimizers(optimizer).values())
    return [binding for binding in bindings if binding is not None]


def _collect(optimizer: Optimizer, path: str, found: dict[str, Optimizer], seen: set[int]) -> None:
    for name, value in vars(optimizer).items():
        if name not in _STANDARD_ATTRIBUTES:
            for rest, inner in _optimizers_in(value, "", seen):
                # Prefer a property without the underscore that returns the same optimizer.
                public = name.lstrip("_")
                is_public = (
                    public != name and not rest and getattr(optimizer, public, None) is inner
                )
                inner_path = f"{path}.{public if is_public else name}{rest}"
                found[inner_path] = inner
                _collect(inner, inner_path, found, seen)


def _optimizers_in(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Optimizer]]:
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        entries = list(enumerate(value))
    elif not isinstance(value, Optimizer):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Optimizer):
        yield path, value
    for key, entry in entries:
        yield from _optimizers_in(entry, f"{path}[{key!r}]", seen)


# -- torch's protocol ------------------------------------------------------------------------------


def refuse_closures(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `ScalerError` if a closure is passed, by position or by keyword."""
    closure = (
        kwargs.get("closure")
        if "closure" in kwargs
        else next((argument for argument in args if callable(argument)), None)
    )
    if closure is not None:
        # A partial function names its function. Its repr would print the batch that it holds.
        function = getattr(closure, "func", closure)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise ScalerError(
            f"step() takes no closure, got {name}: it would compute new gradients that are"
            " neither unscaled nor checked. Compute the loss and its gradients first, then step."
        )


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer reads `found_inf` itself, by torch's protocol.

    Not on a CPU: nothing synchronizes there, and torch's fused steps are faster without it.
    """
    if binding_of(optimizer) is not None:
        return True
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not type(optimizer).__module__.startswith("torch.optim."):
        # A wrapper may forward this attribute from its optimizer without passing on the scale and
        # the flag.
        return not inner_optimizers(optimizer)
    owned = [parameter for group in groups_of(optimizer) for parameter in group["params"]]
    # torch's fused steps do not take the plain flag of a scaler together with DTensors.
    return not owned or (_launch.needs_sync(owned[0].device) and not any_sharded(owned))


def takes_grad_scaler(optimizer: Optimizer) -> bool:
    """Return whether `step` has a `grad_scaler` argument, the deprecated form of the protocol."""
    step = getattr(optimizer.step, "__func__", optimizer.step)
    takes = _takes_grad_scaler.get(step)
    if takes is None:
        takes = _takes_grad_scaler[step] = "grad_scaler" in inspect.signature(step).parameters
    if takes:
        # The stack level of the line that called the scaler's step().
        warnings.warn(
            f"{type(optimizer).__name__}.step(grad_scaler=...) is an old form of torch's protocol."
            " Read self.grad_scale and self.found_inf instead.",
            FutureWarning,
            stacklevel=3,
        )
    return takes


_takes_grad_scaler: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Cache of `takes_grad_scaler`: reading a signature costs 20 µs. Weak, since the step of a
decorated optimizer holds its model and masters."""


@contextmanager
def amp_attributes(
    optimizer: Any, scale: torch.Tensor, found_inf: torch.Tensor, *, unscaled: bool
) -> Iterator[None]:
    """Set `grad_scale` and `found_inf` on an optimizer inside the block, as torch's scaler does."""
    before = getattr(optimizer, "grad_scale", None)
    optimizer.grad_scale = before if unscaled else (scale if before is None else scale * before)
    optimizer.found_inf = found_inf
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
