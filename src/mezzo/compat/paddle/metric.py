"""`paddle.metric`: metrics that `paddle.Model` accumulates over batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS


class Metric(ABC):
    """`paddle.metric.Metric`: base class of metrics."""

    @abstractmethod
    def reset(self) -> None:
        """Clear the accumulated values."""

    @abstractmethod
    def update(self, *args: Any) -> Any:
        """Add one batch, given what `compute` returned."""

    @abstractmethod
    def accumulate(self) -> Any:
        """Return the metric over all batches since the last reset."""

    @abstractmethod
    def name(self) -> str | list[str]:
        """Return the name of the metric, or a list of names."""

    def compute(self, *args: Any) -> Any:
        """Compute the arguments of `update` from outputs and labels; by default, pass them on."""
        return args


class Accuracy(Metric):
    """`paddle.metric.Accuracy`: how often the label is among the top k predictions.

    >>> accuracy = Accuracy()
    >>> predicted = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    >>> accuracy.update(accuracy.compute(predicted, torch.tensor([1, 1])))
    0.5
    """

    def __init__(self, topk: Sequence[int] = (1,), name: str | None = None) -> None:
        super().__init__()
        self.topk = tuple(topk)
        self._name = name or "acc"
        self.reset()

    def compute(self, pred: torch.Tensor, label: torch.Tensor, *_: Any) -> torch.Tensor:
        """Return which of the top predictions are correct.

        Labels are class numbers, with or without a last dimension of one, or one-hot rows.
        """
        top = pred.detach().topk(max(self.topk), dim=-1).indices
        if label.dim() == pred.dim() and label.shape[-1] != 1:
            label = label.argmax(-1)
        return top == label.reshape(*top.shape[:-1], 1).to(top.device)

    def update(self, correct: Any, *_: Any) -> Any:
        """Add a batch and return its accuracy."""
        rows = torch.as_tensor(correct).reshape(-1, max(self.topk))
        accuracies = []
        for index, k in enumerate(self.topk):
            num_correct = int(rows[:, :k].sum())
            self._correct[index] += num_correct
            self._total[index] += len(rows)
            accuracies.append(num_correct / len(rows))
        return accuracies[0] if len(accuracies) == 1 else accuracies

    def reset(self) -> None:
        """Clear the accumulated counts."""
        self._correct, self._total = [0] * len(self.topk), [0] * len(self.topk)

    def accumulate(self) -> Any:
        """Return the accuracy since the last reset."""
        accuracies = [
            correct / total if total else 0.0
            for correct, total in zip(self._correct, self._total, strict=True)
        ]
        return accuracies[0] if len(accuracies) == 1 else accuracies

    def name(self) -> list[str]:
        """Return the names of the numbers that `accumulate` returns."""
        return [self._name] if len(self.topk) == 1 else [f"{self._name}_top{k}" for k in self.topk]


def accuracy(
    input: torch.Tensor,
    label: torch.Tensor,
    k: int = 1,
    correct: Any = None,
    total: Any = None,
    name: str | None = None,
) -> torch.Tensor:
    """Return how often the label is among the top k predictions of a batch, as a tensor."""
    return Accuracy((k,)).compute(input, label).any(-1).float().mean()


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
