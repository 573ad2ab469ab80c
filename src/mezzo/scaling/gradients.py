"""Gather, check and unscale the gradients of an optimizer; backward passes with separate scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mezzo import _launch
from mezzo._dtypes import dtype_name
from mezzo._errors import ScalerError
from mezzo._torch import check_and_unscale_
from mezzo.scaling import check_unscale
from mezzo.scaling.schedule_sync import groups_of
from mezzo.scaling.step_result import FlaggedSource

Flags = dict[torch.device, torch.Tensor]
"""Found flags by device: 0 while every gradient there was finite, else 1."""

_CPU = torch.device("cpu")
_GRADIENT, _DTYPE, _LAYOUT, _DEVICE = (
    attrgetter(name) for name in ("grad", "dtype", "layout", "device")
)
_SMALL = 2**20
"""Up to so many elements gradients are checked fastest by torch's own kernel, which also writes
them (80 µs a step less on an H200), and may be held for a name."""


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every parameter of an optimizer."""
    return [parameter for group in groups_of(optimizer) for parameter in group["params"]]


class CpuGradientChecker:
    """Checks gradients that are on a CPU with as few questions as possible: for 400 small tensors the questions cost more than the arithmetic."""

    def __init__(self) -> None:
        self._plain: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """How many gradients an optimizer had when their dtypes were last looked at and all were
        plain."""
        self._spare: list[torch.Tensor] = []
        """Flags that are down and that nobody holds: a new one costs 10 µs, or 4 % of the
        kernel."""
        self._lent: list[torch.Tensor] = []
        """Flags of this iteration that are down so far."""

    def check(
        self, optimizer: torch.optim.Optimizer, factor: torch.Tensor, flags: Flags
    ) -> bool | None:
        """Multiply every gradient by `factor`, raise the flag where one is not finite, and say whether it is raised; None where only the flags know."""
        found = [
            gradient
            for group in groups_of(optimizer)
            for parameter in group["params"]
            if (gradient := parameter.grad) is not None
        ]
        if not found:
            return None
        if not self._are_plain(optimizer, found):
            self._check_sorted(optimizer, factor, flags)
            return None
        flag = flags.get(_CPU)
        if flag is None:
            flag = self._spare.pop() if self._spare else torch.zeros(())
            self._lent.append(flag)
        try:
            check_and_unscale_(found, flag, factor)
        except (NotImplementedError, RuntimeError):
            # Sparse gradients and those of another device are refused before anything is written:
            # torch chooses the kernel by all of them.
            if all(gradient.layout is torch.strided and gradient.is_cpu for gradient in found):
                raise
            self._check_sorted(optimizer, factor, flags)
            return None
        flags[_CPU] = flag
        bad = bool(flag)
        if bad:
            self._lent.clear()
        return bad if len(flags) == 1 else None

    def unscale(self) -> None:
        """Nobody holds the flags of this iteration any longer: those that stayed down serve again."""
        self._spare.extend(self._lent)
        self._lent.clear()

    def _check_sorted(
        self, optimizer: torch.optim.Optimizer, factor: torch.Tensor, flags: Flags
    ) -> None:
        self._lent.clear()
        check_sorted(optimizer, factor, flags)

    def _are_plain(self, optimizer: torch.optim.Optimizer, found: list[torch.Tensor]) -> bool:
        if self._plain.get(optimizer) == len(found):
            return True
        plain = _launch.DTYPES.issuperset(map(_DTYPE, found))
        if plain:
            self._plain[optimizer] = len(found)
        return plain


def check_sorted(
    optimizer: torch.optim.Optimizer,
    factor: torch.Tensor | None,
    flags: Flags,
    culprit: FlaggedSource | None = None,
) -> None:
    """The same for gradients of any kind, device by device and dtype by dtype; without a factor they are only checked.

    Whose gradients are to blame is noted where that costs no pass of its own. Gradients that are
    only checked are about to be used by the optimizer, which leaves bad ones alone: small ones are
    held as they are.
    """
    for gradients, owners in sorted_gradients(optimizer):
        device, single = gradients[0].device, None
        small = (
            factor is None
            and culprit is not None
            and sum(map(torch.Tensor.numel, gradients)) <= _SMALL
        )
        if culprit is not None and not small and _launch.has_triton(device):
            single = room_for_flags(device, len(gradients), flags)
            culprit.add(single, owners)
        elif device not in flags:
            flags[device] = torch.zeros((), device=device)
        if culprit is not None and small:
            check_and_unscale_(gradients, flags[device], unit_factor(device))
            culprit.hold(gradients, owners)
        elif factor is None:
            check_unscale.check(gradients, flags[device], single)
        else:
            check_unscale.check_and_unscale(
                gradients,
                factor.to(device, non_blocking=device.type != "cpu"),
                flags[device],
                single,
            )


@cache
def unit_factor(device: torch.device) -> torch.Tensor:
    """The factor that changes nothing, made once."""
    return torch.ones((), device=device)


def room_for_flags(device: torch.device, count: int, flags: Flags) -> torch.Tensor:
    """A flag for each gradient, and in the same memory one for all of them if there is none yet: on a small model a second launch is felt."""
    if device in flags:
        return torch.zeros(count, dtype=torch.int32, device=device)
    room = torch.zeros(count + 1, dtype=torch.int32, device=device)
    flags[device] = room[count].view(torch.float32)
    return room[:count]


def sorted_gradients(
    optimizer: torch.optim.Optimizer,
) -> Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Gradients and their owners, in lists of one device and dtype each."""
    return grouped(
        [
            parameter
            for group in groups_of(optimizer)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
    )


def grouped(owners: list[torch.Tensor]) -> Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The same for tensors that all have gradients, whoever owns them."""
    found = list(map(_GRADIENT, owners))
    # Asked of all at once, the questions cost a third of what they cost in a loop, and mostly have
    # one answer.
    dtypes, layouts, devices = (
        list(map(_DTYPE, found)),
        set(map(_LAYOUT, found)),
        list(map(_DEVICE, found)),
    )
    if layouts == {torch.strided} and _launch.DTYPES.issuperset(dtypes):
        if len(set(dtypes)) == len(set(devices)) == 1:
            return [(found, owners)]
    else:
        found = [_plain(owner, gradient) for owner, gradient in zip(owners, found, strict=True)]
        dtypes, devices = list(map(_DTYPE, found)), list(map(_DEVICE, found))
    kinds: dict[
        tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]
    ] = {}
    for owner, gradient, device, dtype in zip(owners, found, devices, dtypes, strict=True):
        gradients, theirs = kinds.setdefault((device, dtype), ([], []))
        gradients.append(gradient)
        theirs.append(owner)
    return kinds.values()


def unscale_tensors(tensors: Iterable[torch.Tensor], scale: float) -> bool:
    """Divide the gradients of tensors that no optimizer speaks for by a scale, in place, and say whether one is not finite; this waits for the device.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> weight.grad = torch.tensor([8.0, float("inf")])
    >>> unscale_tensors([weight], 4.0), weight.grad
    (True, tensor([2., inf]))
    """
    flags: Flags = {}
    # Divided in float64 and rounded once: a scale need not be a power of two.
    factor = torch.tensor(1.0 / scale, dtype=torch.float32)
    for gradients, _ in grouped([tensor for tensor in tensors if tensor.grad is not None]):
        device = gradients[0].device
        flag = flags.setdefault(device, torch.zeros((), device=device))
        check_unscale.check_and_unscale(gradients, factor.to(device), flag)
    return any(bool(flag) for flag in flags.values())


def _plain(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as the kernels take it. Sparse ones are given by their values, complex ones as pairs of reals: both share the gradient's memory."""
    if gradient.is_sparse:
        if not gradient.is_coalesced():
            # Values of one index add up when the optimizer coalesces: what overflows then must be
            # seen now.
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


def first_nonfinite(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the first parameter with a non-finite gradient. Reads every gradient, so it is asked only about a skipped step."""
    return next((one for one in tensors if one.grad is not None and not is_finite(one.grad)), None)


def is_finite(gradient: torch.Tensor) -> bool:
    """Return whether every element is finite. This synchronizes."""
    return bool((gradient._values() if gradient.is_sparse else gradient).isfinite().all())


IsolatedGradients = list[tuple[torch.Tensor, torch.Tensor | None]]
"""Parameters and the gradients they had before."""


@contextmanager
def isolated_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[list[torch.Tensor]]:
    """Let the parameters of some optimizers hold no gradients but new ones; afterwards the old ones are added. Nothing is lost if the body fails."""
    unique = {
        id(parameter): parameter
        for optimizer in optimizers
        for parameter in parameters(optimizer)
        if parameter.requires_grad
    }
    kept: IsolatedGradients = [(parameter, parameter.grad) for parameter in unique.values()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield list(unique.values())
    except BaseException:
        for parameter, old in kept:
            parameter.grad = old
        raise
    _add(kept)


@contextmanager
def backward_isolated(
    loss: torch.Tensor, optimizers: Sequence[torch.optim.Optimizer], **kwargs: Any
) -> Iterator[Sequence[torch.optim.Optimizer]]:
    """Run backward while the parameters of some optimizers hold no other gradients."""
    with isolated_gradients(optimizers) as tensors:
        loss.backward(**({"inputs": tensors} | kwargs))
        yield optimizers


@torch.no_grad()
def _add(kept: IsolatedGradients) -> None:
    for parameter, old in kept:
        new = parameter.grad
        if old is None:
            continue
        if new is None:
            parameter.grad = old
        elif old.layout is new.layout is torch.strided:
            # In place: whoever holds the gradient, a bucket of a data-parallel wrapper for one,
            # keeps holding it.
            parameter.grad = old.add_(new)
        else:
            parameter.grad = old + new if old.layout is torch.strided else new + old
