"""`mxnet.io`, as far as a module's `forward` needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["DataBatch"]


@dataclass(frozen=True)
class DataBatch:
    """A batch: its data, and labels that nobody looks at in inference.

    >>> len(DataBatch(data=[torch.ones(1, 2)]).data)
    1
    """

    data: Sequence[torch.Tensor]
    label: Sequence[torch.Tensor] | None = None
    pad: int | None = None
    index: object = None
