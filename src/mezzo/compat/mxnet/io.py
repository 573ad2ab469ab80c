"""`mxnet.io.DataBatch`, the input of `Module.forward`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["DataBatch"]


@dataclass(frozen=True)
class DataBatch:
    """`mxnet.io.DataBatch`: data and labels of a batch. Inference ignores the labels.

    >>> len(DataBatch(data=[torch.ones(1, 2)]).data)
    1
    """

    data: Sequence[torch.Tensor]
    label: Sequence[torch.Tensor] | None = None
    pad: int | None = None
    index: object = None
