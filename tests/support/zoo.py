"""Small models with random weights, one of each common kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Animal:
    """A model and its inputs."""

    model: nn.Module
    args: tuple[Any, ...]


class MLP(nn.Sequential):
    def __init__(self, width: int = 64) -> None:
        super().__init__(
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, 10),
        )


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = (
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
            if stride != 1 or inputs != outputs
            else None
        )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet50(nn.Module):
    """All fifty layers; `width` is 64 in the original."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, inputs = [], width
        for stage, count in enumerate((3, 4, 6, 3)):
            for place in range(count):
                blocks.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not place else 1))
                inputs = 4 * width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, classes)

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class MobileNet(nn.Module):
    """Inverted residuals with depthwise convolutions."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6(inplace=True)
        )
        self.blocks = nn.ModuleList(self._block(width) for _ in range(4))
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _block(width: int) -> nn.Module:
        wide = 4 * width
        return nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(inplace=True),
            nn.Conv2d(wide, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean([2, 3]))


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = (
            self._double(3, width),
            self._double(width, 2 * width),
            self._double(2 * width, 4 * width),
        )
        self.up2, self.out2 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            self._double(4 * width, 2 * width),
        )
        self.out1, self.head = self._double(3 * width, width), nn.Conv2d(width, 2, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Module:
        layers = []
        for first in (inputs, outputs):
            layers += [
                nn.Conv2d(first, outputs, 3, 1, 1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
        return nn.Sequential(*layers)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        three = self.middle(F.max_pool2d(two, 2))
        two = self.out2(torch.cat([self.up2(three), two], 1))
        wide = F.interpolate(two, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.out1(torch.cat([wide, one], 1)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        batch, length, width = x.shape
        q, k, v = (
            one.view(batch, length, self.heads, -1).transpose(1, 2)
            for one in self.qkv(x).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A transformer layer with its norms before or after."""

    def __init__(self, width: int, heads: int, *, causal: bool, before: bool) -> None:
        super().__init__()
        self.before = before
        self.attention, self.norm1, self.norm2 = (
            Attention(width, heads, causal=causal),
            nn.LayerNorm(width),
            nn.LayerNorm(width),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask=None):
        if self.before:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class GPT(nn.Module):
    def __init__(
        self, width: int = 64, layers: int = 12, vocabulary: int = 100, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            Block(width, 4, causal=True, before=True) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class BERT(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4, vocabulary: int = 100) -> None:
        super().__init__()
        self.tokens, self.positions, self.kinds = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(64, width),
            nn.Embedding(2, width),
        )
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            Block(width, 4, causal=False, before=False) for _ in range(layers)
        )
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, tokens, mask):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(
            self.tokens(tokens) + self.positions(places) + self.kinds(torch.zeros_like(tokens))
        )
        added = (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        for block in self.blocks:
            x = block(x, added)
        return {"hidden": x, "logits": self.head(torch.tanh(self.pooler(x[:, 0])))}


class ViT(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token, self.places = (
            nn.Parameter(torch.randn(1, 1, width)),
            nn.Parameter(torch.randn(1, 17, width)),
        )
        self.blocks = nn.ModuleList(
            Block(width, 4, causal=False, before=True) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Window(nn.Module):
    """Attention inside shifted windows, with a learned bias for each distance."""

    def __init__(self, width: int, heads: int, size: int, shift: int) -> None:
        super().__init__()
        self.heads, self.size, self.shift = heads, size, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.bias = nn.Parameter(torch.randn((2 * size - 1) ** 2, heads) * 0.02)
        places = torch.cartesian_prod(torch.arange(size), torch.arange(size))
        apart = places[:, None] - places[None] + size - 1
        self.register_buffer(
            "distances", (apart[..., 0] * (2 * size - 1) + apart[..., 1]).flatten()
        )

    def forward(self, x):
        batch, height, width, channels = x.shape
        size, across, down = self.size, width // self.size, height // self.size
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        y = (
            y.view(batch, down, size, across, size, channels)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, size * size, channels)
        )
        q, k, v = (
            self.qkv(y)
            .view(-1, size * size, 3, self.heads, channels // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        scores = (q * (channels // self.heads) ** -0.5) @ k.transpose(-2, -1) + self.bias[
            self.distances
        ].view(size**2, size**2, -1).permute(2, 0, 1)
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, size * size, channels))
        y = (
            y.view(batch, down, across, size, size, channels)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(x.shape)
        )
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(
            *(Window(width, 4, 4, 2 * (place % 2)) for place in range(layers))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.patches(x).permute(0, 2, 3, 1))).mean((1, 2)))


class LSTMTagger(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(width, width, 2, batch_first=True), nn.Linear(width, 5)

    def forward(self, x):
        out, (last, _) = self.lstm(x)
        return self.head(out), last


class Branching(nn.Module):
    """Control flow that depends on the values of the input."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        x = F.relu(self.first(x))
        x = torch.cond(
            x.sum() > 0, lambda y: F.relu(self.left(y)), lambda y: torch.tanh(self.right(y)), (x,)
        )
        return self.last(x)


def _statistics(model: nn.Module) -> nn.Module:
    """Give batch norms random statistics, instead of 0 and 1; return the model."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


ZOO: dict[str, Callable[[], Animal]] = {
    "mlp": lambda: Animal(MLP().eval(), (torch.randn(4, 64),)),
    "resnet50": lambda: Animal(_statistics(ResNet50()).eval(), (torch.randn(2, 3, 32, 32),)),
    "mobilenet": lambda: Animal(_statistics(MobileNet(64)).eval(), (torch.randn(2, 3, 16, 16),)),
    "unet": lambda: Animal(_statistics(UNet()).eval(), (torch.randn(2, 3, 32, 32),)),
    "bert": lambda: Animal(
        BERT().eval(), (torch.randint(0, 100, (2, 16)), torch.tensor([[1] * 16, [1] * 9 + [0] * 7]))
    ),
    "gpt": lambda: Animal(GPT().eval(), (torch.randint(0, 100, (2, 16)),)),
    "gpt-tied": lambda: Animal(
        GPT(layers=4, vocabulary=40, tied=True).eval(), (torch.randint(0, 40, (2, 16)),)
    ),
    "vit": lambda: Animal(ViT().eval(), (torch.randn(2, 3, 32, 32),)),
    "swin": lambda: Animal(Swin().eval(), (torch.randn(2, 3, 32, 32),)),
    "lstm": lambda: Animal(LSTMTagger().eval(), (torch.randn(2, 12, 64),)),
    "conv-training": lambda: Animal(
        _statistics(MobileNet(64)).train(), (torch.randn(4, 3, 16, 16),)
    ),
    "branching": lambda: Animal(Branching().eval(), (torch.randn(4, 64),)),
}
"""Functions by name that create a model and its inputs."""
