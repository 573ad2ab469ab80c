"""Losses of `paddle.nn`: subclasses of torch's, with Paddle's arguments and defaults."""

from __future__ import annotations

from typing import Any

from torch import nn

from mezzo.compat.paddle.nn import functional as F
from mezzo.compat.paddle.nn._layer import Layer


class MSELoss(nn.MSELoss, Layer):
    """`paddle.nn.MSELoss`."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)


class L1Loss(nn.L1Loss, Layer):
    """`paddle.nn.L1Loss`."""

    def __init__(self, reduction: str = "mean", name: str | None = None) -> None:
        super().__init__(reduction=reduction)


class SmoothL1Loss(nn.HuberLoss, Layer):
    """`paddle.nn.SmoothL1Loss`, which computes what torch calls the Huber loss."""

    def __init__(
        self, reduction: str = "mean", delta: float = 1.0, name: str | None = None
    ) -> None:
        super().__init__(reduction, delta)


class BCELoss(nn.BCELoss, Layer):
    """`paddle.nn.BCELoss`."""

    def __init__(
        self, weight: Any = None, reduction: str = "mean", name: str | None = None
    ) -> None:
        super().__init__(weight, reduction=reduction)


class BCEWithLogitsLoss(nn.BCEWithLogitsLoss, Layer):
    """`paddle.nn.BCEWithLogitsLoss`."""

    def __init__(
        self,
        weight: Any = None,
        reduction: str = "mean",
        pos_weight: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, reduction=reduction, pos_weight=pos_weight)


class CrossEntropyLoss(nn.CrossEntropyLoss, Layer):
    """`paddle.nn.CrossEntropyLoss`: see `nn.functional.cross_entropy`.

    >>> import torch
    >>> CrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([[1], [3]])).item()
    1.3862943649291992
    """

    def __init__(
        self,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        soft_label: bool = False,
        axis: int = -1,
        use_softmax: bool = True,
        label_smoothing: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        self._options: dict[str, Any] = {
            "soft_label": soft_label,
            "axis": axis,
            "use_softmax": use_softmax,
        }

    def forward(self, input: Any, label: Any) -> Any:
        """Return the loss."""
        return F.cross_entropy(
            input,
            label,
            self.weight,
            self.ignore_index,
            self.reduction,
            label_smoothing=self.label_smoothing,
            **self._options,
        )


class NLLLoss(nn.NLLLoss, Layer):
    """`paddle.nn.NLLLoss`."""

    def __init__(
        self,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        name: str | None = None,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction)


class KLDivLoss(nn.KLDivLoss, Layer):
    """`paddle.nn.KLDivLoss`."""

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(reduction=reduction, log_target=log_target)


class CTCLoss(Layer):
    """`paddle.nn.CTCLoss`: see `nn.functional.ctc_loss`."""

    def __init__(self, blank: int = 0, reduction: str = "mean") -> None:
        super().__init__()
        self.blank, self.reduction = blank, reduction

    def forward(
        self,
        log_probs: Any,
        labels: Any,
        input_lengths: Any,
        label_lengths: Any,
        norm_by_times: bool = False,
    ) -> Any:
        """Return the loss."""
        return F.ctc_loss(
            log_probs,
            labels,
            input_lengths,
            label_lengths,
            self.blank,
            self.reduction,
            norm_by_times,
        )
