"""Accuracy of a character language model on text of a small grammar.

It is tuned at O2 on text of the same grammar with another vocabulary.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.text import ALPHABET, OTHER_VOCABULARY, encode, generate_text
from support.tuning import (
    Data,
    Task,
    float32_losses,
    losses_before_tuning,
    tuned_loss,
    with_masters,
    without_masters,
)
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.slow

WIDTH, HEADS, LENGTH = 32, 2, 16


class LanguageModel(nn.Module):
    """One transformer block that predicts each character from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = (
            nn.Embedding(len(ALPHABET), WIDTH),
            nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH)),
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.characters(text) + self.positions
        queries, keys, values = (
            self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


@cache
def windows(length: int, seed: int, *, other: bool = False) -> Data:
    """Return pieces of text, and the next character for each of their characters."""
    text = generate_text(length, seed, OTHER_VOCABULARY if other else {})
    pieces = encode(text).unfold(0, LENGTH + 1, 5)
    return pieces[:, :-1], pieces[:, 1:]


TASK = Task(
    LanguageModel,
    first=lambda: windows(20_000, 1),
    second=lambda: windows(20_000, 2, other=True),
    unseen=lambda: windows(2_000, 3, other=True),
    batch=16,
    steps=(400, 160),
)


@pytest.mark.parametrize(("dtype", "master"), with_masters(1))
def test_with_masters_the_loss_is_within_the_spread_of_three_float32_runs(dtype: str, master: str):
    losses = float32_losses(TASK)
    assert losses[0] <= tuned_loss(TASK, dtype, master) <= losses[-1]


@pytest.mark.parametrize("dtype", without_masters(1))
def test_without_masters_the_loss_is_worse_than_that_of_every_float32_run(dtype: str):
    losses = float32_losses(TASK)
    assert tuned_loss(TASK, dtype, None) > losses[-1]


def test_tuning_in_float32_learns():
    assert float32_losses(TASK)[-1] < losses_before_tuning(TASK, TASK.unseen())[0]
