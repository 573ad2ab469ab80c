"""`paddle.metric`: what `Model` counts while it trains and evaluates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch


class Metric(ABC):
    """Something that is added up over batches."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what was added up."""

    @abstractmethod
    def update(self, *args: Any) -> Any:
        """Add a batch: what `compute` gave."""

    @abstractmethod
    def accumulate(self) -> Any:
        """The number, or several, so far."""

    @abstractmethod
    def name(self) -> str | list[str]:
        """What the number, or each of several, is called."""

    def compute(self, *args: Any) -> Any:
        """What `update` gets, from outputs and labels; by default these."""
        return args


class Accuracy(Metric):
    """How often the label is among the first guesses.

    >>> accuracy = Accuracy()
    >>> accuracy.update(accuracy.compute(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])))
    0.5
    """

    def __init__(self, topk: Sequence[int] = (1,), name: str | None = None) -> None:
        super().__init__()
        self.topk = tuple(topk)
        self._name = name or "acc"
        self.reset()

    def compute(self, pred: torch.Tensor, label: torch.Tensor, *_: Any) -> torch.Tensor:
        """Which of the first guesses are right. Labels are class numbers, with a last dimension of one or without, or one-hot."""
        first = pred.detach().topk(max(self.topk), dim=-1).indices
        if label.dim() == pred.dim() and label.shape[-1] != 1:
            label = label.argmax(-1)
        return first == label.reshape(*first.shape[:-1], 1).to(first.device)

    def update(self, correct: Any, *_: Any) -> Any:
        """Add a batch, and give its accuracy."""
        hits = torch.as_tensor(correct).reshape(-1, max(self.topk))
        shares = []
        for place, k in enumerate(self.topk):
            found = int(hits[:, :k].sum())
            self._found[place] += found
            self._seen[place] += len(hits)
            shares.append(found / len(hits))
        return shares[0] if len(shares) == 1 else shares

    def reset(self) -> None:
        """Forget what was added up."""
        self._found, self._seen = [0] * len(self.topk), [0] * len(self.topk)

    def accumulate(self) -> Any:
        """The accuracy so far."""
        shares = [
            found / seen if seen else 0.0
            for found, seen in zip(self._found, self._seen, strict=True)
        ]
        return shares[0] if len(shares) == 1 else shares

    def name(self) -> list[str]:
        """What the numbers are called."""
        return [self._name] if len(self.topk) == 1 else [f"{self._name}_top{k}" for k in self.topk]
