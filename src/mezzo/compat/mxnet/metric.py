"""`mxnet.metric`: metrics that add up on the device and synchronize in `get` only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mezzo._errors import choices, nearest
from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._ndarray import as_tensor
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = [
    "MAE",
    "MSE",
    "RMSE",
    "Accuracy",
    "CompositeEvalMetric",
    "CrossEntropy",
    "EvalMetric",
    "Loss",
    "TopKAccuracy",
    "create",
]

Tensor = torch.Tensor


class EvalMetric:
    """Base class: subclasses define `update(labels, preds)` and call `add`."""

    def __init__(self, name: str, **_: Any) -> None:
        self.name = str(name)
        self.reset()

    def reset(self) -> None:
        """Forget all updates."""
        self.num_inst = 0
        self._sums: dict[torch.device, Tensor] = {}

    def add(self, total: Tensor, count: int) -> None:
        """Add a sum over `count` elements. Does not synchronize."""
        total = total.detach().double() if total.device.type != "mps" else total.detach()
        previous = self._sums.get(total.device)
        self._sums[total.device] = total if previous is None else previous + total
        self.num_inst += count

    @property
    def sum_metric(self) -> float:
        """The sum of all updates. Reading it synchronizes."""
        return math.fsum(total.item() for total in self._sums.values())

    def update(self, labels: Any, preds: Any) -> None:
        """Add a batch."""
        raise NotImplementedError(
            f"{type(self).__name__} has no update(labels, preds). Define it, and call"
            " self.add(total, count) in it."
        )

    def update_dict(self, label: dict[str, Any], pred: dict[str, Any]) -> None:
        """Add a batch of named labels and predictions."""
        self.update(list(label.values()), list(pred.values()))

    def get(self) -> tuple[Any, Any]:
        """Return the name and the average; NaN without updates. This synchronizes."""
        return self.name, self.sum_metric / self.num_inst if self.num_inst else math.nan

    def get_name_value(self) -> list[tuple[str, float]]:
        """Return pairs of name and value."""
        names, values = self.get()
        if not isinstance(names, list):
            names, values = [names], [values]
        return list(zip(names, values, strict=True))

    def __str__(self) -> str:
        return f"EvalMetric: {dict(self.get_name_value())}"


class Loss(EvalMetric):
    """The average of losses; labels are ignored.

    >>> metric = Loss("CrossEntropy")
    >>> metric.update(0, [torch.tensor([1.0, 3.0])])
    >>> metric.get()
    ('CrossEntropy', 2.0)
    """

    def __init__(self, name: str = "loss", **_: Any) -> None:
        super().__init__(name)

    def update(self, labels: Any, preds: Any) -> None:
        """Add losses."""
        for loss in _tensors(preds):
            self.add(loss.double().sum(), loss.numel())


class _LabelMetric(EvalMetric):
    """A metric of pairs of labels and predictions."""

    def update(self, labels: Any, preds: Any) -> None:
        """Add a batch, of one array or a list of arrays each."""
        all_labels, all_preds = _tensors(labels), _tensors(preds)
        if len(all_labels) != len(all_preds):
            raise ValueError(
                f"{type(self).__name__}.update got {len(all_labels)} labels and {len(all_preds)}"
                " predictions. Pass lists of the same length."
            )
        for label, pred in zip(all_labels, all_preds, strict=True):
            self._update(label.detach().to(pred.device), pred.detach())

    def _update(self, label: Tensor, pred: Tensor) -> None:
        raise NotImplementedError


class Accuracy(_LabelMetric):
    """The share of predictions with the largest score at the label.

    >>> metric = Accuracy()
    >>> metric.update(torch.tensor([1, 0]), torch.tensor([[0.2, 0.8], [0.3, 0.7]]))
    >>> metric.get()
    ('accuracy', 0.5)
    """

    def __init__(self, axis: int = 1, name: str = "accuracy", **_: Any) -> None:
        super().__init__(name)
        self.axis = axis

    def _update(self, label: Tensor, pred: Tensor) -> None:
        if pred.shape != label.shape and pred.dim() > 1:
            pred = pred.argmax(self.axis)
        _check_same_size("Accuracy", label, pred)
        self.add((pred.flatten().long() == label.flatten().long()).sum(), label.numel())


class TopKAccuracy(_LabelMetric):
    """The share of predictions with the label among the `top_k` largest scores."""

    def __init__(self, top_k: int = 1, name: str = "top_k_accuracy", **_: Any) -> None:
        super().__init__(f"{name}_{top_k}")
        self.top_k = top_k

    def _update(self, label: Tensor, pred: Tensor) -> None:
        best = pred.topk(min(self.top_k, pred.shape[1]), dim=1).indices
        self.add((best == label.reshape(-1, 1).long()).any(1).sum(), len(pred))


class MAE(_LabelMetric):
    """The mean absolute error, averaged over batches."""

    def __init__(self, name: str = "mae", **_: Any) -> None:
        super().__init__(name)

    def _update(self, label: Tensor, pred: Tensor) -> None:
        self.add((label.reshape(pred.shape) - pred).abs().mean(), 1)


class MSE(_LabelMetric):
    """The mean squared error, averaged over batches."""

    def __init__(self, name: str = "mse", **_: Any) -> None:
        super().__init__(name)

    def _update(self, label: Tensor, pred: Tensor) -> None:
        self.add((label.reshape(pred.shape) - pred).square().mean(), 1)


class RMSE(MSE):
    """The root of the mean squared error."""

    def __init__(self, name: str = "rmse", **_: Any) -> None:
        super().__init__(name)

    def get(self) -> tuple[Any, Any]:
        """Return the name and the value. This synchronizes."""
        name, value = super().get()
        return name, math.sqrt(value) if self.num_inst else value


class CrossEntropy(_LabelMetric):
    """The average of -log of the probability of each label."""

    def __init__(self, eps: float = 1e-12, name: str = "cross-entropy", **_: Any) -> None:
        super().__init__(name)
        self.eps = eps

    def _update(self, label: Tensor, pred: Tensor) -> None:
        label = label.flatten().long()
        _check_same_size("CrossEntropy", label, pred[:, 0])
        probabilities = pred.gather(1, label.unsqueeze(1)).double()
        self.add(-torch.log(probabilities + self.eps).sum(), len(label))


class CompositeEvalMetric(EvalMetric):
    """Several metrics of the same labels and predictions."""

    def __init__(
        self, metrics: Sequence[Any] | None = None, name: str = "composite", **_: Any
    ) -> None:
        self.metrics = [create(metric) for metric in metrics or []]
        super().__init__(name)

    def add(self, metric: Any, count: int = 0) -> None:
        """Add a metric, or its name."""
        self.metrics.append(create(metric))

    def reset(self) -> None:
        """Forget all updates."""
        for metric in self.metrics:
            metric.reset()

    def update(self, labels: Any, preds: Any) -> None:
        """Add a batch to each metric."""
        for metric in self.metrics:
            metric.update(labels, preds)

    def get(self) -> tuple[Any, Any]:
        """Return lists of names and values. This synchronizes."""
        pairs = [pair for metric in self.metrics for pair in metric.get_name_value()]
        return [name for name, _ in pairs], [value for _, value in pairs]


_METRICS: dict[str, type[EvalMetric]] = {
    "acc": Accuracy,
    "accuracy": Accuracy,
    "ce": CrossEntropy,
    "cross-entropy": CrossEntropy,
    "loss": Loss,
    "mae": MAE,
    "mse": MSE,
    "rmse": RMSE,
    "top_k_accuracy": TopKAccuracy,
}


def create(metric: Any, *args: Any, **kwargs: Any) -> EvalMetric:
    """Return the metric of a name, several for a list, or a metric as it is.

    >>> create("acc").name
    'accuracy'
    """
    if isinstance(metric, EvalMetric):
        return metric
    if isinstance(metric, list | tuple):
        return CompositeEvalMetric(metric)
    made = _METRICS.get(str(metric).lower())
    if made is None:
        raise ValueError(
            f"Unknown metric {metric!r}. {choices(_METRICS)}{nearest(str(metric), _METRICS)}"
        )
    return made(*args, **kwargs)


def _tensors(values: Any) -> list[Tensor]:
    """Return arrays as a list of tensors."""
    return [
        torch.as_tensor(as_tensor(value))
        for value in (values if isinstance(values, list | tuple) else [values])
    ]


def _check_same_size(name: str, label: Tensor, pred: Tensor) -> None:
    if label.numel() != pred.numel():
        raise ValueError(
            f"Shape of labels {tuple(label.shape)} does not match shape of predictions"
            f" {tuple(pred.shape)} in {name}. Pass one label for each prediction."
        )


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
