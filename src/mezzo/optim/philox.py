"""Philox4x32-10, the counter-based generator of Triton and CUDA, in torch's integer ops: rounding at random gives the same bits on every path.

Salmon et al., *Parallel random numbers: as easy as 1, 2, 3* (2011).
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(seed: int, count: int, place: int, step: torch.Tensor | int, device: torch.device) -> torch.Tensor:
    """One random word of 32 bits, as int64, for each of `count` elements of the parameter at a place, at a step.

    >>> philox(0, 2, place=0, step=0, device=torch.device("cpu")).tolist()
    [1713891541, 4175744164]
    """
    element = torch.arange(count, dtype=torch.int64, device=device)
    words = [element & _WORD, element >> 32, torch.full_like(element, place), torch.zeros_like(element) + step]
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(ROUNDS):
        # Products wrap around at 64 bits; shifted and masked, their halves are right all the same.
        low, high = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [(high >> 32 & _WORD) ^ words[1] ^ keys[0], high & _WORD, (low >> 32 & _WORD) ^ words[3] ^ keys[1], low & _WORD]
        keys = [(key + weyl) & _WORD for key, weyl in zip(keys, _WEYL, strict=True)]
    return words[0]
