"""GPT-2 for the benchmarks: the language model of `mezzo compare` with its loss."""

from __future__ import annotations

import torch
from internals import LanguageModel
from torch.nn import functional as F


class GPT(LanguageModel):
    """GPT-2 with tied embedding and head. The forward pass returns the loss."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten())
