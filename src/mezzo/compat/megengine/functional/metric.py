"""`megengine.functional.metric`: `topk_accuracy`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["topk_accuracy"]


def topk_accuracy(
    logits: torch.Tensor, target: torch.Tensor, topk: int | Iterable[int] = 1
) -> torch.Tensor | list[torch.Tensor]:
    """Return the fraction of rows whose label is among the `topk` largest; a list for several.

    >>> topk_accuracy(torch.eye(3), torch.tensor([0, 1, 1]), (1, 3))
    [tensor(0.6667), tensor(1.)]
    """
    counts = [topk] if isinstance(topk, int) else list(topk)
    if max(counts) > logits.shape[-1]:
        raise AssertionError(
            f"topk={topk} needs at least that many classes; logits have {logits.shape[-1]}."
        )
    best = logits.detach().topk(max(counts)).indices
    hits = best == target.long().unsqueeze(-1)
    accuracies = [hits[:, :k].float().sum() / target.shape[0] for k in counts]
    return accuracies[0] if len(accuracies) == 1 else accuracies
