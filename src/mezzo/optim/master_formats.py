"""Master formats: how the float32 value of a 16-bit parameter is stored.

`float32` keeps a float32 copy, `split` a 16-bit remainder, `kahan` a 16-bit compensation.
`stochastic` and `none` store nothing, and round each update at random or to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mezzo._casting import CASTS, cast
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

_NAN_BITS = 0x7FC00000


@dataclass(frozen=True)
class RandomDraw:
    """Key of the random numbers for one rounding: equal draws give equal bits on every device."""

    seed: int
    """Seed of the run."""
    index: int
    """Index of the parameter in its optimizer."""
    step: torch.Tensor | int
    """Number of updates of the parameter."""
    first: int = 0
    """Number of the first element in the whole parameter, if this is a shard of it."""


class MasterFormat(Protocol):
    """One way to store the float32 value of a 16-bit parameter."""

    @property
    def master(self) -> Master:
        """Name of the format."""

    @property
    def sampled(self) -> bool:
        """Whether a sample of the parameter is stored with the companion tensor.

        The formats that need one cannot tell from the companion which parameter value it is for.
        """

    @property
    def exact(self) -> bool:
        """Whether float32 values are stored exactly."""

    def companion_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype of the companion tensor of a parameter; None if there is none."""

    def split(
        self, value: torch.Tensor, dtype: torch.dtype, draw: RandomDraw | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split a float32 value into a parameter of a 16-bit dtype and its companion tensor."""

    def merge(self, parameter: torch.Tensor, companion: torch.Tensor | None) -> torch.Tensor:
        """Return the float32 value of a parameter, always as a new tensor."""


class Float32:
    """A float32 copy. Elements that other code has written follow the parameter.

    These are the elements where the parameter is not what the copy rounds to.
    """

    master, sampled, exact = Master.FLOAT32, False, True

    def companion_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return float32."""
        return torch.float32

    def split(
        self,
        value: torch.Tensor,
        dtype: torch.dtype,
        draw: RandomDraw | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Round to nearest, ties to even; return a copy of the value as companion."""
        return CASTS[dtype](value), value.clone()

    def merge(self, parameter: torch.Tensor, companion: torch.Tensor | None) -> torch.Tensor:
        """Return the copy, and the parameter's value in elements where both differ."""
        if companion is None:
            return _float32_copy(parameter)
        rounded = CASTS[parameter.dtype](companion)
        same = rounded.view(torch.int16) == parameter.view(torch.int16)
        return torch.where(same, companion, CASTS[torch.float32](parameter))


class Split:
    """A bfloat16 parameter and a signed 16-bit remainder: together the bits of a float32.

    Half-way cases round away from zero. Truncation would bias every weight towards zero, and ties
    to even leave no room for the remainder in 16 bits.
    """

    master, sampled, exact = Master.SPLIT, True, True

    def companion_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return int16."""
        return torch.int16

    def split(
        self,
        value: torch.Tensor,
        dtype: torch.dtype,
        draw: RandomDraw | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Round to bfloat16; return the remainder in units of the last place of float32."""
        if dtype is not torch.bfloat16:
            raise PolicyError(
                "master='split' needs bfloat16 parameters, got float16. Use master='float32', or"
                " dtype='bfloat16'."
            )
        # A GPU's NaN has every bit set and would wrap around to zero.
        bits = torch.where(value.isnan(), _NAN_BITS, value.view(torch.int32))
        upper = (bits + 0x8000) >> 16
        return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)

    def merge(self, parameter: torch.Tensor, companion: torch.Tensor | None) -> torch.Tensor:
        """Add the remainder to the bits of the parameter."""
        if companion is None:
            return _float32_copy(parameter)
        upper, remainder = parameter.view(torch.int16).to(torch.int32), companion.to(torch.int32)
        # Zero has no negative remainder: a negative one belongs to a value that was overwritten
        # (`p.data.mul_(mask)`), and zero minus it would be NaN.
        remainder = torch.where((upper & 0x7FFF) == 0, remainder.clamp(min=0), remainder)
        return ((upper << 16) + remainder).view(torch.float32)


class Kahan:
    """A 16-bit parameter and a 16-bit compensation of its rounding error: nearly exact."""

    master, sampled, exact = Master.KAHAN, True, False

    def companion_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype of the parameter."""
        return dtype

    def split(
        self,
        value: torch.Tensor,
        dtype: torch.dtype,
        draw: RandomDraw | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Round to nearest; return the rounding error, rounded too, as companion."""
        parameter = cast(value, dtype)
        return parameter, cast(value - cast(parameter, torch.float32), dtype)

    def merge(self, parameter: torch.Tensor, companion: torch.Tensor | None) -> torch.Tensor:
        """Add the compensation, unless it is too large to be the parameter's rounding error.

        It is too large where other code wrote the parameter past torch's version counter
        (`p.data.mul_(mask)`).
        """
        value = _float32_copy(parameter)
        if companion is None:
            return value
        lost = cast(companion, torch.float32)
        # Half of it, because a rounded compensation may lie on the tie between two parameters.
        fits = cast(value + lost * 0.5, parameter.dtype) == parameter
        return torch.where(fits, value + lost, value)


class Stochastic:
    """No companion: updates round up or down at random, so that they are right on average."""

    master, sampled, exact = Master.STOCHASTIC, False, False

    def companion_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return None."""
        return None

    def split(
        self, value: torch.Tensor, dtype: torch.dtype, draw: RandomDraw | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Round at random with a draw, to nearest without one."""
        if draw is None:
            return cast(value, dtype), None
        return round_stochastically(value, dtype, draw), None

    def merge(self, parameter: torch.Tensor, companion: torch.Tensor | None) -> torch.Tensor:
        """Return the parameter's value."""
        return _float32_copy(parameter)


class NoMaster:
    """No companion: updates round to nearest, and small ones are lost."""

    master, sampled, exact = Master.NONE, False, False

    def companion_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return None."""
        return None

    def split(
        self,
        value: torch.Tensor,
        dtype: torch.dtype,
        draw: RandomDraw | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Round to nearest."""
        return cast(value, dtype), None

    def merge(self, parameter: torch.Tensor, companion: torch.Tensor | None) -> torch.Tensor:
        """Return the parameter's value."""
        return _float32_copy(parameter)


MASTER_FORMATS: dict[Master, MasterFormat] = {
    master_format.master: master_format
    for master_format in (Float32(), Split(), Kahan(), Stochastic(), NoMaster())
}
"""Every format by its name."""


def float32_values(
    master_format: MasterFormat,
    parameters: list[torch.Tensor],
    companions: list[torch.Tensor | None],
) -> list[torch.Tensor]:
    """Return the float32 values of parameters that no other code has written.

    Float32 masters are returned themselves, others as new tensors; split ones in few launches.
    """
    present = [companion for companion in companions if companion is not None]
    if master_format.master is Master.FLOAT32:
        return present
    if master_format.master is Master.SPLIT:
        return _merge_split(parameters, present)
    return [
        master_format.merge(parameter.detach(), companion)
        for parameter, companion in zip(parameters, companions, strict=True)
    ]


def _merge_split(
    parameters: list[torch.Tensor], companions: list[torch.Tensor]
) -> list[torch.Tensor]:
    values, remainders, lowest = (
        [torch.empty_like(parameter, dtype=dtype) for parameter in parameters]
        for dtype in (torch.float32, torch.int32, torch.int32)
    )
    # A bfloat16 is the upper half of a float32's bits. One launch casts many tensors, where bit
    # shifts would take several for each.
    foreach_copy_(values, [parameter.detach() for parameter in parameters])
    foreach_copy_(remainders, companions)
    # Zero has no negative remainder: a negative one belongs to a value that was overwritten
    # (`p.data.mul_(mask)`), and the sum of both would stay NaN.
    signs = foreach_sign(foreach_abs(values))
    foreach_mul_(signs, -(2.0**15))
    foreach_copy_(lowest, signs)
    foreach_maximum_(remainders, lowest)
    foreach_add_([value.view(torch.int32) for value in values], remainders)
    return list(values)


def round_stochastically(value: torch.Tensor, dtype: torch.dtype, draw: RandomDraw) -> torch.Tensor:
    """Round to one of the two neighbours at random, so that the expected result is the value.

    >>> value = torch.full((10_000,), 1.0 + 2.0**-9)
    >>> rounded = round_stochastically(value, torch.bfloat16, RandomDraw(seed=1, index=0, step=0))
    >>> sorted(set(rounded.tolist())), abs(rounded.double().mean().item() - value[0].item()) < 1e-4
    ([1.0, 1.0078125], True)
    """
    words = philox(draw.seed, value.numel(), draw.index, draw.step, value.device, draw.first)
    # Elements are numbered in memory order, which is the only order that a kernel sees.
    words = (
        words.as_strided(value.shape, value.stride())
        if is_dense(value)
        else words.view(value.shape)
    )
    lost = (1 << (16 if dtype is torch.bfloat16 else 13)) - 1
    bits = value.view(torch.int32)
    rounded = ((bits + (words & lost).to(torch.int32)) & ~lost).view(torch.float32)
    if dtype is torch.float16:
        # Below its normal range float16 has equal steps of 2^-24.
        steps = (value * 2.0**24 + (words & lost).to(torch.float32) * 2.0**-13).floor()
        rounded = torch.where(value.abs() < 2.0**-14, steps * 2.0**-24, rounded)
    # Non-finite values stay as they are.
    return cast(torch.where(value.isfinite(), rounded, value), dtype)


_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(
    seed: int,
    count: int,
    index: int,
    step: torch.Tensor | int,
    device: torch.device,
    first: int = 0,
) -> torch.Tensor:
    """Return a random 32-bit word, as int64, for each of `count` elements of a parameter.

    Philox 4x32-10, as Triton computes it; `index` is that of the parameter in its optimizer, and
    `first` the number of the first element.

    >>> philox(0, 2, index=0, step=0, device=torch.device("cpu")).tolist()
    [1713891541, 4175744164]
    """
    element = torch.arange(first, first + count, dtype=torch.int64, device=device)
    words = [
        element & _WORD,
        element >> 32,
        torch.full_like(element, index),
        torch.zeros_like(element) + step,
    ]
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(_ROUNDS):
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


def _float32_copy(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to(dtype=torch.float32, copy=True)
