"""A character language model on text of a small grammar, tuned at O2 on the same grammar with other words."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.text import ALPHABET, OTHER_WORDS, encoded, written
from support.tuning import (
    WITH_MASTERS,
    Data,
    Task,
    float32_losses,
    losses_before_tuning,
    tuned_loss,
)
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.slow

WIDTH, HEADS, LETTERS = 32, 2, 16


class LanguageModel(nn.Module):
    """One block of a transformer: every letter is told by those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = (
            nn.Embedding(len(ALPHABET), WIDTH),
            nn.Parameter(0.1 * torch.randn(LETTERS, WIDTH)),
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attended, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widened, self.narrowed = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.told = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        seen = self.letters(text) + self.places
        queries, keys, values = (
            self.attended(self.norms[0](seen)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        seen = seen + self.mixed(
            F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        seen = seen + self.narrowed(F.gelu(self.widened(self.norms[1](seen))))
        return self.told(self.norms[2](seen))


@cache
def windows(letters: int, seed: int, *, other: bool = False) -> Data:
    """Pieces of text, and the letter that follows each of theirs."""
    pieces = encoded(written(letters, seed, OTHER_WORDS if other else {})).unfold(0, LETTERS + 1, 5)
    return pieces[:, :-1], pieces[:, 1:]


TASK = Task(
    LanguageModel,
    first=lambda: windows(20_000, 1),
    second=lambda: windows(20_000, 2, other=True),
    unseen=lambda: windows(2_000, 3, other=True),
    batch=16,
    steps=(400, 160),
)


@pytest.mark.parametrize(("dtype", "master"), WITH_MASTERS)
def test_with_masters_the_loss_is_within_the_spread_of_three_float32_runs(dtype: str, master: str):
    losses = float32_losses(TASK)
    assert losses[0] <= tuned_loss(TASK, dtype, master) <= losses[-1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_without_masters_the_loss_is_worse_than_that_of_every_float32_run(dtype: str):
    losses = float32_losses(TASK)
    assert tuned_loss(TASK, dtype, None) > losses[-1]


def test_tuning_in_float32_learns():
    assert float32_losses(TASK)[-1] < losses_before_tuning(TASK, TASK.unseen())[0]
