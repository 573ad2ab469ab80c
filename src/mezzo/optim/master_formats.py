"""Master formats: how a 16-bit parameter keeps its exact value (float32, split, Kahan, stochastic rounding)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mezzo._casting import cast
from mezzo._errors import PolicyError
from mezzo._launch import is_dense
from mezzo._torch import (
    foreach_abs,
    foreach_add_,
    foreach_copy_,
    foreach_maximum_,
    foreach_mul_,
    foreach_sign,
)
from mezzo.policy.types import Master

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(
    seed: int, count: int, place: int, step: torch.Tensor | int, device: torch.device
) -> torch.Tensor:
    """One random word of 32 bits, as int64, for each of `count` elements of the parameter at a place, at a step.

    >>> philox(0, 2, place=0, step=0, device=torch.device("cpu")).tolist()
    [1713891541, 4175744164]
    """
    element = torch.arange(count, dtype=torch.int64, device=device)
    words = [
        element & _WORD,
        element >> 32,
        torch.full_like(element, place),
        torch.zeros_like(element) + step,
    ]
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(ROUNDS):
        # Products wrap around at 64 bits; shifted and masked, their halves are right all the same.
        low, high = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (high >> 32 & _WORD) ^ words[1] ^ keys[0],
            high & _WORD,
            (low >> 32 & _WORD) ^ words[3] ^ keys[1],
            low & _WORD,
        ]
        keys = [(key + weyl) & _WORD for key, weyl in zip(keys, _WEYL, strict=True)]
    return words[0]


_NAN_BITS = 0x7FC00000


@dataclass(frozen=True)
class RandomDraw:
    """Which random numbers a rounding takes: the same draw gives the same bits, whatever the device."""

    seed: int
    """The run's."""
    index: int
    """The parameter's place in its optimizer."""
    step: torch.Tensor | int
    """How many steps were made."""


class MasterFormat(Protocol):
    """One way to keep exact weights."""

    @property
    def master(self) -> Master:
        """Its name."""

    @property
    def sampled(self) -> bool:
        """Whether the companion tensor does not tell which parameter value it belongs to, so that a sample of the parameter is kept with it."""

    @property
    def exact(self) -> bool:
        """Whether the weights are exact float32 values."""

    def companion_dtype(self, half: torch.dtype) -> torch.dtype | None:
        """The dtype of what lies beside a parameter."""

    def split(
        self, value: torch.Tensor, half: torch.dtype, draw: RandomDraw | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A float32 value as a 16-bit parameter and what lies beside it."""

    def merge(self, parameter: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:
        """The float32 value of a parameter; always a tensor of its own."""


class Float32:
    """A float32 copy. Where the parameter is not what the copy rounds to, somebody else wrote it, and the parameter holds."""

    master, sampled, exact = Master.FLOAT32, False, True

    def companion_dtype(self, half: torch.dtype) -> torch.dtype | None:  # noqa: ARG002
        """Float32."""
        return torch.float32

    def split(
        self,
        value: torch.Tensor,
        half: torch.dtype,
        draw: RandomDraw | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Round to nearest, ties to even; the value beside it."""
        return cast(value, half), value.clone()

    def merge(self, parameter: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:
        """The copy, or the parameter where the copy is not its."""
        if beside is None:
            return _own(parameter)
        same = cast(beside, parameter.dtype).view(torch.int16) == parameter.view(torch.int16)
        return torch.where(same, beside, cast(parameter, torch.float32))


class Split:
    """A bfloat16 parameter and a signed 16-bit remainder: together the bits of a float32.

    Half-way cases round away from zero. Truncation would bias every weight towards zero, and ties
    to even leave no room for the remainder in 16 bits.
    """

    master, sampled, exact = Master.SPLIT, True, True

    def companion_dtype(self, half: torch.dtype) -> torch.dtype | None:  # noqa: ARG002
        """int16."""
        return torch.int16

    def split(
        self,
        value: torch.Tensor,
        half: torch.dtype,
        draw: RandomDraw | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The nearest bfloat16, and what is missing in units of the last place of float32."""
        if half is not torch.bfloat16:
            raise PolicyError(
                "master='split' needs bfloat16 parameters, got float16. Use master='float32', or"
                " dtype='bfloat16'."
            )
        # A GPU's NaN has every bit set and would wrap around to zero.
        bits = torch.where(value.isnan(), _NAN_BITS, value.view(torch.int32))
        upper = (bits + 0x8000) >> 16
        return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)

    def merge(self, parameter: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:
        """The bits added up."""
        if beside is None:
            return _own(parameter)
        upper, remainder = parameter.view(torch.int16).to(torch.int32), beside.to(torch.int32)
        # Zero has no negative remainder: this one is of another value, which was overwritten
        # (`p.data.mul_(mask)`), and zero minus it would be NaN.
        remainder = torch.where((upper & 0x7FFF) == 0, remainder.clamp(min=0), remainder)
        return ((upper << 16) + remainder).view(torch.float32)


class Kahan:
    """A 16-bit parameter and a 16-bit compensation of what rounding lost: nearly exact."""

    master, sampled, exact = Master.KAHAN, True, False

    def companion_dtype(self, half: torch.dtype) -> torch.dtype | None:
        """As the parameter's."""
        return half

    def split(
        self,
        value: torch.Tensor,
        half: torch.dtype,
        draw: RandomDraw | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rounded, and the error rounded."""
        parameter = cast(value, half)
        return parameter, cast(value - cast(parameter, torch.float32), half)

    def merge(self, parameter: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:
        """Their sum, or the parameter where the compensation is too large to be its: somebody wrote it (`p.data.mul_(mask)`) past torch's version counter."""
        value = _own(parameter)
        if beside is None:
            return value
        lost = cast(beside, torch.float32)
        # Half of it, for a compensation that was rounded may lie on the tie between two parameters.
        own = cast(value + lost * 0.5, parameter.dtype) == parameter
        return torch.where(own, value + lost, value)


class Stochastic:
    """Nothing beside the parameter: an update rounds up or down at random, so that it is right on average."""

    master, sampled, exact = Master.STOCHASTIC, False, False

    def companion_dtype(self, half: torch.dtype) -> torch.dtype | None:  # noqa: ARG002
        """Nothing."""
        return None

    def split(
        self, value: torch.Tensor, half: torch.dtype, draw: RandomDraw | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rounded at random, or to nearest where there is nothing to draw."""
        return (
            cast(value, half) if draw is None else round_stochastically(value, half, draw)
        ), None

    def merge(self, parameter: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002
        """The parameter's value."""
        return _own(parameter)


class NoMaster:
    """Nothing beside the parameter: what rounds away is lost."""

    master, sampled, exact = Master.NONE, False, False

    def companion_dtype(self, half: torch.dtype) -> torch.dtype | None:  # noqa: ARG002
        """Nothing."""
        return None

    def split(
        self,
        value: torch.Tensor,
        half: torch.dtype,
        draw: RandomDraw | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rounded to nearest."""
        return cast(value, half), None

    def merge(self, parameter: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002
        """The parameter's value."""
        return _own(parameter)


MASTER_FORMATS: dict[Master, MasterFormat] = {
    kind.master: kind for kind in (Float32(), Split(), Kahan(), Stochastic(), NoMaster())
}
"""Every way, by its name."""


def values_of(
    kind: MasterFormat, parameters: list[torch.Tensor], beside: list[torch.Tensor | None]
) -> list[torch.Tensor]:
    """The float32 values of several parameters, nothing of which was written by others: float32 masters themselves, else copies, split ones in few launches."""
    known = [one for one in beside if one is not None]
    if kind.master is Master.FLOAT32:
        return known
    if kind.master is not Master.SPLIT:
        return [
            kind.merge(parameter.detach(), one)
            for parameter, one in zip(parameters, beside, strict=True)
        ]
    values, remainders, lowest = (
        [torch.empty_like(one, dtype=dtype) for one in parameters]
        for dtype in (torch.float32, torch.int32, torch.int32)
    )
    # A bfloat16 is the upper half of a float32's bits. One launch casts many tensors, where bit
    # shifts would take several for each.
    foreach_copy_(values, [parameter.detach() for parameter in parameters])
    foreach_copy_(remainders, known)
    # Zero has no negative remainder: this one is of a value that was overwritten
    # (`p.data.mul_(mask)`), and the sum of both would be NaN for ever.
    signs = foreach_sign(foreach_abs(values))
    foreach_mul_(signs, -(2.0**15))
    foreach_copy_(lowest, signs)
    foreach_maximum_(remainders, lowest)
    foreach_add_([value.view(torch.int32) for value in values], remainders)
    return list(values)


def round_stochastically(value: torch.Tensor, half: torch.dtype, draw: RandomDraw) -> torch.Tensor:
    """Round to one of the two neighbours, to the nearer one more often: the mean of many is the value.

    >>> value = torch.full((10_000,), 1.0 + 2.0**-9)
    >>> drawn = round_stochastically(value, torch.bfloat16, RandomDraw(seed=1, index=0, step=0))
    >>> sorted(set(drawn.tolist())), abs(drawn.double().mean().item() - value[0].item()) < 1e-4
    ([1.0, 1.0078125], True)
    """
    words = philox(draw.seed, value.numel(), draw.index, draw.step, value.device)
    # An element's number is its place in memory, which is all that a kernel sees.
    words = (
        words.as_strided(value.shape, value.stride())
        if is_dense(value)
        else words.view(value.shape)
    )
    lost = (1 << (16 if half is torch.bfloat16 else 13)) - 1
    bits = value.view(torch.int32)
    rounded = ((bits + (words & lost).to(torch.int32)) & ~lost).view(torch.float32)
    if half is torch.float16:
        # Below its normal range float16 has equal steps of 2^-24.
        steps = (value * 2.0**24 + (words & lost).to(torch.float32) * 2.0**-13).floor()
        rounded = torch.where(value.abs() < 2.0**-14, steps * 2.0**-24, rounded)
    # What is not finite has nothing to draw.
    return cast(torch.where(value.isfinite(), rounded, value), half)


def _own(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to(dtype=torch.float32, copy=True)
