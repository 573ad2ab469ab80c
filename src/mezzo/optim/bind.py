"""Which step an optimizer gets: the fused one where there is one for its type, else its own over stand-ins."""

from __future__ import annotations

import torch

from mezzo.optim.algorithms import ALGORITHMS, kind_of
from mezzo.optim.bound import Bound
from mezzo.optim.fused import FusedBound
from mezzo.optim.masters import Masters


def bind(optimizer: torch.optim.Optimizer, masters: Masters, *, clip_norm: float | None = None) -> Bound:
    """Let an optimizer's `step` run over exact weights."""
    kind = FusedBound if kind_of(optimizer) in ALGORITHMS else Bound
    return kind(optimizer, masters, clip_norm=clip_norm)
