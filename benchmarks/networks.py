"""Networks of the benchmarks that no library has: small versions of common designs."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RecurrentLM(nn.Module):
    """A language model of two LSTM layers. Tokens → logits."""

    def __init__(self, vocabulary: int = 10_000, width: int = 650, dropout: float = 0.2) -> None:
        super().__init__()
        self.tokens, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.tokens(tokens)))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits.flatten(0, 1)


class Tagger(nn.Module):
    """A tagger of two bidirectional GRU layers. Tokens → logits of the tags."""

    def __init__(self, vocabulary: int = 20_000, width: int = 256, tags: int = 32) -> None:
        super().__init__()
        self.tokens, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(0.2)
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.gru(self.dropout(self.tokens(tokens)))
        logits: Tensor = self.head(hidden)
        return logits.flatten(0, 1)


class ResidualBlock(nn.Module):
    """Two convolutions, each after a group norm."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, before), nn.GroupNorm(8, after)])
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)]
        )
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = convolution(F.silu(norm(y)))
        shortcut: Tensor = self.skip(x)
        return shortcut + y


class UNet(nn.Module):
    """A U-Net with group norms, as diffusion models have. Images → images."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            ResidualBlock(before, after)
            for before, after in zip([width, *widths], widths, strict=False)
        )
        self.middle = ResidualBlock(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            ResidualBlock(2 * before, after)
            for before, after in zip(widths[::-1], [*widths[-2::-1], width], strict=True)
        )
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, kept.pop()], dim=1))
        image: Tensor = self.last(x)
        return image


class DLRM(nn.Module):
    """A recommender: tables of categories, products of all pairs, an MLP below and above."""

    pairs: Tensor

    def __init__(
        self,
        dense: int = 13,
        tables: int = 26,
        categories: int = 20_000,
        width: int = 64,
        hidden: int = 512,
    ) -> None:
        super().__init__()
        self.below = _layers(dense, hidden, hidden // 2, width)
        self.tables = nn.ModuleList(nn.Embedding(categories, width) for _ in range(tables))
        pairs = torch.triu_indices(tables + 1, tables + 1, offset=1)
        self.register_buffer("pairs", pairs)
        self.above = nn.Sequential(
            _layers(width + pairs.shape[1], hidden, hidden // 2), nn.Linear(hidden // 2, 1)
        )

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        below = self.below(dense)
        vectors = torch.stack(
            [below, *(table(categories[:, index]) for index, table in enumerate(self.tables))],
            dim=1,
        )
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.above(torch.cat([below, products], dim=1))
        return logits.squeeze(1)


def _layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(
        *(
            module
            for before, after in itertools.pairwise(widths)
            for module in (nn.Linear(before, after), nn.ReLU())
        )
    )


class PointNet(nn.Module):
    """A classifier of point clouds: the same layers for every point, then their maximum."""

    def __init__(self, classes: int = 40, width: int = 64) -> None:
        super().__init__()
        widths = [3, width, width, 2 * width, 16 * width]
        self.points = nn.Sequential(
            *(
                module
                for before, after in itertools.pairwise(widths)
                for module in (nn.Conv1d(before, after, 1), nn.BatchNorm1d(after), nn.ReLU())
            )
        )
        self.head = nn.Sequential(
            nn.Linear(16 * width, 4 * width),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(4 * width, classes),
        )

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.head(self.points(points).amax(dim=2))
        return logits


class PostNormEncoder(nn.Module):
    """torch's own post-norm transformer encoder. Tokens → logits of two classes."""

    def __init__(
        self,
        vocabulary: int = 20_000,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(x)).mean(dim=1))
        return logits
