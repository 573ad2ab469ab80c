"""Masters for parameters that are 16-bit already: what `FP16_Optimizer` is for, and what `initialize` does where it does not cast."""

from __future__ import annotations

import torch

from mezzo.optim.halves import step_halves
from mezzo.optim.masters import Masters


def keep_masters(optimizer: torch.optim.Optimizer) -> Masters:
    """Let an optimizer step float32 masters of its 16-bit parameters, those of groups that are added later too."""
    return step_halves(optimizer)
