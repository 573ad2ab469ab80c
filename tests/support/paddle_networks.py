"""torch versions of the five networks that were recorded with PaddlePaddle's `decorate`.

Parameters have the names that Paddle gives them, except for `NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

NAMES = {
    "_mean": "running_mean",
    "_variance": "running_var",
    "scale": "weight",
    "_weight": "weight",
}
"""Paddle's names of tensors that have another name in torch."""


class OwnNorm(nn.BatchNorm1d):
    """A user's subclass of a batch norm."""


class SpectralNorm(nn.Module):
    """Spectral norm with the two vectors as parameters, as in Paddle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_u, self.weight_v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))


class Attention(nn.Module):
    """Attention with separate projections, as in Paddle."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(4, 4) for _ in range(4))


class A(nn.Module):
    """Layers of a text classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc1, self.ln, self.bn, self.fc2 = (
            nn.Embedding(8, 4),
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 2),
        )


class B(nn.Module):
    """Layers of a convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.gn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.inorm, self.fc = nn.InstanceNorm2d(4, affine=True), nn.Linear(4, 2)


class C(nn.Module):
    """Nested containers, with a parameter and buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("fbuf", torch.ones(2))
        self.register_buffer("ibuf", torch.ones(2, dtype=torch.int64))
        self.inner = nn.Sequential(
            nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        )
        self.mybn, self.prelu = OwnNorm(4), nn.PReLU()


class Encoder(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.linear1, self.linear2 = Attention(), nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(4), nn.LayerNorm(4), nn.Dropout()


class D(nn.Module):
    """A transformer's layer and a recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.lstm = Encoder(), nn.LSTM(4, 4)


class E(nn.Module):
    """Every normalisation layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.bn1, self.bn2, self.bn3, self.sbn = (
            nn.BatchNorm1d(4),
            nn.BatchNorm1d(4),
            nn.BatchNorm2d(4),
            nn.BatchNorm3d(4),
            nn.SyncBatchNorm(4),
        )
        self.ln, self.gn, self.lrn, self.sn = (
            nn.LayerNorm(4),
            nn.GroupNorm(2, 4),
            nn.LocalResponseNorm(2),
            SpectralNorm(),
        )
        self.in1, self.in2, self.in3 = (
            nn.InstanceNorm1d(4, affine=True),
            nn.InstanceNorm2d(4, affine=True),
            nn.InstanceNorm3d(4, affine=True),
        )


NETWORKS: dict[str, Callable[[], nn.Module]] = {kind.__name__: kind for kind in (A, B, C, D, E)}


def torchs(name: str) -> str:
    """Return the name in torch of a recorded parameter.

    >>> torchs("bn._mean")
    'bn.running_mean'
    """
    *path, last = name.split(".")
    return ".".join([*path, NAMES.get(last, last)])
