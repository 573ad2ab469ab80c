"""Check and unscale the gradients of an optimizer; backward passes with separate scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from mezzo import _launch
from mezzo._dtypes import dtype_name
from mezzo._errors import ScalerError
from mezzo._torch import check_and_unscale_
from mezzo.scaling import check_unscale
from mezzo.scaling.gradient_counts import GradientCounts
from mezzo.scaling.mesh import ProcessMesh, any_sharded, local, local_gradients, mesh_of
from mezzo.scaling.schedule_sync import groups_of
from mezzo.scaling.step_result import FlaggedSource

Flags = dict[torch.device, torch.Tensor]
"""A `found_inf` flag for each device: 0 while every gradient there was finite, else 1."""

_CPU = torch.device("cpu")
_GRADIENT, _DTYPE, _LAYOUT, _DEVICE = map(attrgetter, ("grad", "dtype", "layout", "device"))
_SMALL = 2**20
"""Up to this many elements, torch's kernel checks gradients faster although it writes them (80 µs
less per step on an H200), and the gradients may be kept to name their source."""


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer. Does not synchronize."""
    return [parameter for group in groups_of(optimizer) for parameter in group["params"]]


class CpuGradientChecker:
    """Checks and unscales gradients on a CPU.

    Inspects as little as possible: for 400 small tensors, reading their dtypes and layouts costs
    more than the arithmetic.
    """

    def __init__(self) -> None:
        self._plain: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """Number of gradients of an optimizer when all were last found to have plain dtypes."""
        self._free: list[torch.Tensor] = []
        """Flags that are 0 and not in use. A new one costs 10 µs, or 4 % of the kernel."""
        self._in_use: list[torch.Tensor] = []
        """Flags of this iteration that are 0 so far."""

    def check(
        self, optimizer: torch.optim.Optimizer, factor: torch.Tensor, flags: Flags
    ) -> bool | None:
        """Multiply all gradients by `factor`, and set the flag if one is not finite.

        Returns whether one is not finite, or None if a flag would have to be read.
        """
        gradients = [
            gradient
            for group in groups_of(optimizer)
            for parameter in group["params"]
            if (gradient := parameter.grad) is not None
        ]
        if not gradients:
            return None
        if not self._are_plain(optimizer, gradients):
            self._check_sorted(optimizer, factor, flags)
            return None
        flag = flags.get(_CPU)
        if flag is None:
            flag = self._free.pop() if self._free else torch.zeros(())
            self._in_use.append(flag)
        try:
            check_and_unscale_(gradients, flag, factor)
        except (NotImplementedError, RuntimeError):
            # torch rejects sparse gradients and other devices before it writes anything: it chooses
            # the kernel by all gradients.
            if all(gradient.layout is torch.strided and gradient.is_cpu for gradient in gradients):
                raise
            self._check_sorted(optimizer, factor, flags)
            return None
        flags[_CPU] = flag
        is_nonfinite = bool(flag)
        if is_nonfinite:
            self._in_use.clear()
        return is_nonfinite if len(flags) == 1 else None

    def recycle_flags(self) -> None:
        """Reuse the flags of this iteration that stayed 0. Call it when no record holds them."""
        self._free.extend(self._in_use)
        self._in_use.clear()

    def _check_sorted(
        self, optimizer: torch.optim.Optimizer, factor: torch.Tensor, flags: Flags
    ) -> None:
        self._in_use.clear()
        check_sorted(optimizer, factor, flags)

    def _are_plain(self, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> bool:
        if self._plain.get(optimizer) == len(gradients):
            return True
        plain = _launch.DTYPES.issuperset(map(_DTYPE, gradients))
        if plain:
            self._plain[optimizer] = len(gradients)
        return plain


def check_sorted(
    optimizer: torch.optim.Optimizer,
    factor: torch.Tensor | None,
    flags: Flags,
    source: FlaggedSource | None = None,
    *,
    mesh: ProcessMesh | None = None,
) -> None:
    """Check gradients of any layout, device by device and dtype by dtype; unscale with a factor.

    `source` gets flags for single parameters where these cost no further pass. Gradients that are
    only checked go to the optimizer, which does not change non-finite ones: small ones are kept as
    they are, to name the source later. `mesh` has the processes that hold the parameters, if some
    are sharded.
    """
    owned = [parameter for parameter in parameters(optimizer) if parameter.grad is not None]
    for gradients, owners in _by_kind(owned, mesh):
        device, single = gradients[0].device, None
        counted = None if source is None else source.counted(owners)
        small = (
            factor is None
            and source is not None
            and not (counted is not None and _launch.has_triton(device))
            # torch's kernel does not take bfloat16 on CUDA (2.11).
            and not (device.type == "cuda" and gradients[0].dtype is torch.bfloat16)
            and sum(map(torch.Tensor.numel, gradients)) <= _SMALL
        )
        if source is not None and not small and _launch.has_triton(device):
            single = room_for_flags(device, len(gradients), flags)
            source.add(single, owners)
        elif device not in flags:
            flags[device] = torch.zeros((), device=device)
        if source is not None and small:
            if counted is not None:
                counted.add(gradients)
            check_and_unscale_(gradients, flags[device], unit_factor(device))
            source.hold(gradients, owners)
        elif factor is None:
            check_unscale.check(gradients, flags[device], single, counted)
        else:
            here = factor.to(device, non_blocking=device.type != "cpu")
            check_unscale.check_and_unscale(gradients, here, flags[device], single, counted)


def count(optimizer: torch.optim.Optimizer, counts: GradientCounts) -> None:
    """Count the values of an optimizer's gradients, in a pass of its own."""
    owned = [parameter for parameter in parameters(optimizer) if parameter.grad is not None]
    for gradients, owners in _by_kind(owned, mesh_of(owned)):
        counted, device = counts.of(owners), gradients[0].device
        if counted is not None and _launch.has_triton(device):
            check_unscale.check(gradients, torch.zeros((), device=device), None, counted)
        elif counted is not None:
            counted.add(gradients)


@cache
def unit_factor(device: torch.device) -> torch.Tensor:
    """Return a factor of 1 on a device, always the same tensor."""
    return torch.ones((), device=device)


def room_for_flags(device: torch.device, count: int, flags: Flags) -> torch.Tensor:
    """Create one flag per gradient, and the device's flag in `flags` if there is none yet.

    Both share one allocation: a second launch is noticeable on a small model.
    """
    if device in flags:
        return torch.zeros(count, dtype=torch.int32, device=device)
    room = torch.zeros(count + 1, dtype=torch.int32, device=device)
    flags[device] = room[count].view(torch.float32)
    return room[:count]


def unscale_tensors(tensors: Iterable[torch.Tensor], scale: float) -> bool:
    """Unscale the gradients of tensors in place; return whether one is not finite.

    For tensors that belong to no optimizer. This synchronizes. If some are sharded, all processes
    return the same.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> weight.grad = torch.tensor([8.0, float("inf")])
    >>> unscale_tensors([weight], 4.0), weight.grad
    (True, tensor([2., inf]))
    """
    flags: Flags = {}
    # Divided in float64 and rounded once: a scale need not be a power of two.
    factor = torch.tensor(1.0 / scale, dtype=torch.float32)
    owners = list(tensors)
    mesh = mesh_of(owners)
    for gradients, _ in _by_kind([tensor for tensor in owners if tensor.grad is not None], mesh):
        device = gradients[0].device
        flag = flags.setdefault(device, torch.zeros((), device=device))
        check_unscale.check_and_unscale(gradients, factor.to(device), flag)
    found = any(bool(flag) for flag in flags.values())
    if mesh is None:
        return found
    device = owners[0].device
    return bool(mesh.reduce(None, torch.tensor(float(found), device=device), device)[1])


def first_nonfinite(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the first tensor with a non-finite gradient, or None.

    Reads every gradient and synchronizes: call it only after a skipped step.
    """
    return next(
        (tensor for tensor in tensors if tensor.grad is not None and not is_finite(tensor.grad)),
        None,
    )


def is_finite(gradient: torch.Tensor) -> bool:
    """Return whether every element, of a sharded gradient those here, is finite.

    This synchronizes, but not with other processes, which may not call it.
    """
    here = local(gradient)
    return bool((here._values() if here.is_sparse else here).isfinite().all())


# -- gradients by device and dtype -----------------------------------------------------------------


class _GradientGroup(NamedTuple):
    """Gradients of one device and dtype, as the kernels take them."""

    gradients: list[torch.Tensor]
    owners: list[torch.Tensor]


def _by_kind(owners: list[torch.Tensor], mesh: ProcessMesh | None) -> Iterable[_GradientGroup]:
    """Group the gradients of tensors, all of which have one, by device and dtype.

    Of sharded gradients, the shards of this process; without a mesh none is sharded.
    """
    gradients = list(map(_GRADIENT, owners)) if mesh is None else local_gradients(owners)
    # `map` over all costs a third of a loop, and mostly all are alike.
    dtypes, layouts, devices = (
        list(map(_DTYPE, gradients)),
        set(map(_LAYOUT, gradients)),
        list(map(_DEVICE, gradients)),
    )
    if layouts == {torch.strided} and _launch.DTYPES.issuperset(dtypes):
        if len(set(dtypes)) == len(set(devices)) == 1:
            return [_GradientGroup(gradients, owners)]
    else:
        gradients = [_plain(*pair) for pair in zip(owners, gradients, strict=True)]
        dtypes, devices = list(map(_DTYPE, gradients)), list(map(_DEVICE, gradients))
    groups: dict[tuple[torch.device, torch.dtype], _GradientGroup] = {}
    for owner, gradient, device, dtype in zip(owners, gradients, devices, dtypes, strict=True):
        group = groups.get((device, dtype))
        if group is None:
            group = groups[device, dtype] = _GradientGroup([], [])
        group.gradients.append(gradient)
        group.owners.append(owner)
    return groups.values()


def _plain(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a real, strided view of a gradient: sparse values, or complex numbers as pairs.

    The view shares the gradient's memory.
    """
    if gradient.is_sparse:
        if not gradient.is_coalesced():
            # The optimizer adds up values of one index when it coalesces: find an overflow there
            # now.
            parameter.grad = gradient = gradient.coalesce()
        gradient = gradient._values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if gradient.layout is torch.strided and gradient.dtype in _launch.DTYPES:
        return gradient
    raise ScalerError(
        f"A gradient of dtype {dtype_name(gradient.dtype)} and layout {gradient.layout} cannot be"
        " unscaled: gradients are float16, bfloat16, float32, float64 or complex, strided or"
        " sparse COO. Convert it before the step, for instance parameter.grad ="
        " parameter.grad.float().to_dense()."
    )


# -- backward with separate scales -----------------------------------------------------------------


class _SavedGradient(NamedTuple):
    """The gradient that a parameter had before a block."""

    parameter: torch.Tensor
    gradient: torch.Tensor | None


@contextmanager
def isolated_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[list[torch.Tensor]]:
    """Remove the gradients of some optimizers inside the block; add them to the new ones after it.

    Yields the parameters. If the block raises, the old gradients are restored.
    """
    unique = {
        id(parameter): parameter
        for optimizer in optimizers
        for parameter in parameters(optimizer)
        if parameter.requires_grad
    }
    saved = [_SavedGradient(parameter, parameter.grad) for parameter in unique.values()]
    for parameter, _ in saved:
        parameter.grad = None
    try:
        yield list(unique.values())
    except BaseException:
        for parameter, old in saved:
            parameter.grad = old
        raise
    _add(saved)


@contextmanager
def backward_isolated(
    loss: torch.Tensor, optimizers: Sequence[torch.optim.Optimizer], **kwargs: Any
) -> Iterator[None]:
    """Run backward, with only its own gradients in the parameters inside the block."""
    with isolated_gradients(optimizers) as tensors:
        loss.backward(**({"inputs": tensors} | kwargs))
        refuse_unreached(tensors)
        yield


def refuse_unreached(tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ScalerError` if a backward pass for some sharded tensors has reached none of them."""
    if any_sharded(tensors) and all(tensor.grad is None for tensor in tensors):
        raise ScalerError(
            "A backward pass for the parameters of one optimizer does not reach parameters that"
            " FSDP2 shards: it computes gradients of gathered copies. Add up the losses and run"
            " backward once: scaler.scale(loss + other).backward(), then step each optimizer."
        )


@torch.no_grad()
def _add(saved: list[_SavedGradient]) -> None:
    for parameter, old in saved:
        new = parameter.grad
        if old is None:
            continue
        if new is None:
            parameter.grad = old
        elif old.layout is new.layout is torch.strided:
            # In place: a bucket of a data-parallel wrapper may hold the old gradient.
            parameter.grad = old.add_(new)
        else:
            parameter.grad = old + new if old.layout is torch.strided else new + old
