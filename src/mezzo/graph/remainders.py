"""Tables of numbers in 16 bits and a few more: the first 16 as other ops can read them, the others packed into bytes beside them.

A table that only gives rows is best kept as whole numbers with a scale for each row: they lie as evenly as the numbers of a row nearly do. One that others read too
is rounded to the 16-bit dtype of these, and its remainders are factors: what rounding loses is a share of each number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

PER_BYTE: Mapping[int, int] = {256: 1, 16: 2, 6: 3, 4: 4, 3: 5, 2: 8}
"""How many levels a further part of a number can have, each with how many such parts a byte holds."""
LARGEST = torch.iinfo(torch.int16).max
"""The whole number for the largest number of a row."""
_NARROWEST = 16
"""Numbers in a row, for which its scale takes no more than a 32nd of what the row takes in float32."""
_DIMENSIONS = 2
_REACH = 0.75
"""How far factors go, of the most that rounding can change a number by: nearly all lie closer, and with few levels the finer steps gain more than the others lose."""


def fits(table: torch.Tensor) -> bool:
    """Whether a tensor has rows that fixed point can tell."""
    return table.dim() >= _DIMENSIONS and table.shape[-1] >= _NARROWEST and not table.is_meta and bool(table.isfinite().all())


def fixed_point(table: torch.Tensor, dtype: torch.dtype, levels: int = 1) -> tuple[torch.Tensor, ...]:
    """A table as whole numbers, a scale for each row and, if there are several levels, those packed: it is (numbers + level / levels) / LARGEST * scale.

    >>> numbers, scale, level = fixed_point(torch.tensor([[0.3, -1.0], [0.0, 0.0]]), torch.float16, 256)
    >>> numbers.tolist(), ((numbers + level / 256) / LARGEST * scale).round(decimals=6).tolist()
    ([[9830, -32767], [0, 0]], [[0.30000001192092896, -1.0], [0.0, 0.0]])
    """
    scale = _rounded_up(table.abs().amax(-1, keepdim=True), dtype)
    finest = (table / torch.where(scale > 0, scale, 1.0) * (LARGEST * levels)).round_()
    numbers = finest.div(levels).floor_()
    parts = numbers.to(torch.int16), scale
    return (*parts, pack(finest.sub_(numbers, alpha=levels), levels)) if levels > 1 else parts


def factors(table: torch.Tensor, rounded: torch.Tensor, levels: int) -> torch.Tensor:
    """What rounding a table lost, packed: it is nearly rounded * (level * step + start), with these two from `grid`.

    >>> table = torch.tensor([[1.001, -3.14159]])
    >>> rounded, (step, start) = table.bfloat16(), grid(torch.bfloat16, 256)
    >>> rounded.tolist(), (rounded * (factors(table, rounded, 256) * step + start)).round(decimals=4).tolist()
    ([[1.0, -3.140625]], [[1.0010000467300415, -3.1415998935699463]])
    """
    step, start = grid(rounded.dtype, levels)
    # Beside an infinite number or a zero there is nothing to tell: neither changes by a factor.
    change = ((table - rounded) / rounded).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return pack(change.sub_(start - 1.0).div_(step).round_(), levels)


def grid(dtype: torch.dtype, levels: int) -> tuple[float, float]:
    """The step from level to level, and the factor of the first: they lie evenly around 1.

    >>> grid(torch.bfloat16, 2)
    (0.0029296875, 0.99853515625)
    """
    width = _REACH * torch.finfo(dtype).eps
    step = width / levels
    return step, 1.0 - width / 2 + step / 2


def pack(level: torch.Tensor, levels: int) -> torch.Tensor:
    """Rows of levels as bytes: the first byte of a row holds its first level, and those that lie one row of bytes further each.

    >>> pack(torch.tensor([[1, 2, 3, 4]]), 16).tolist()
    [[49, 66]]
    """
    count = PER_BYTE[levels]
    whole = F.pad(level.clamp(0, levels - 1).to(torch.uint8), (0, -level.shape[-1] % count)).unflatten(-1, (count, -1))
    places = torch.tensor([[levels**place] for place in range(count)], dtype=torch.uint8, device=level.device)
    return torch.sum(whole * places, -2, dtype=torch.uint8)


def _rounded_up(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers that are not negative in a 16-bit dtype, none of them less than it was."""
    nearest = largest.to(dtype)
    bits = nearest.view(torch.int16)
    return torch.where(nearest < largest, bits + 1, bits).view(dtype)
