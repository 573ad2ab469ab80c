"""Small trainings for `numerics.py`: ordinary models, and computations that break naive float16.

Each case has learnable synthetic data. Models that compute their loss in the forward pass use
`identity` as loss function. Noise is part of the data, so that every precision gets the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Any, Any]
Data = Callable[[torch.Generator], Batch]


@dataclass(frozen=True)
class Case:
    """A training."""

    model: Callable[[], nn.Module]
    data: Data
    """Draws one batch: the input and the target, as `mezzo.TrainStep` takes them."""
    loss: Callable[..., Tensor] = F.cross_entropy
    rate: float = 3e-3
    steps: int = 120
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    delicate: bool = False
    """Whether the computation breaks in naive float16."""


def identity(loss: Tensor) -> Tensor:
    """Return the loss of a model that computes it in its forward pass."""
    return loss


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


# -- data ------------------------------------------------------------------------------------------

# Fixed teachers: the same task for every seed.
_TEACHER = torch.randn(64, 64, generator=torch.Generator().manual_seed(1234))


def rows(random: torch.Generator) -> Batch:
    """Draw vectors and their classes, which a small network has to learn."""
    x = torch.randn(128, 32, generator=random)
    hidden = torch.tanh(x @ _TEACHER[:32, :32])
    return x, (hidden @ _TEACHER[:32, 32:40]).argmax(-1)


def regression(random: torch.Generator) -> Batch:
    """Draw vectors and a smooth function of them with noise."""
    x = torch.randn(128, 32, generator=random)
    y = torch.tanh(x @ _TEACHER[:32, :8]).sum(-1, keepdim=True)
    return x, y + 0.1 * torch.randn(y.shape, generator=random)


def images(random: torch.Generator, size: int = 16) -> Batch:
    """Draw images of stripes; the class is their direction and frequency."""
    label = torch.randint(8, (64,), generator=random)
    angle, frequency = (label % 4) * (math.pi / 4), 1.0 + (label // 4)
    grid = torch.linspace(-1.0, 1.0, size)
    along = angle.cos().view(-1, 1, 1) * grid + angle.sin().view(-1, 1, 1) * grid.view(-1, 1)
    phase = 6.28 * torch.rand(64, 1, 1, generator=random)
    x = torch.sin(3.0 * frequency.view(-1, 1, 1) * along + phase)
    return (x + 0.3 * torch.randn(x.shape, generator=random)).unsqueeze(1), label


def tokens(random: torch.Generator, length: int = 24) -> Batch:
    """Draw sequences in which each token follows from the two before it, with noise."""
    x = torch.randint(16, (32, length + 1), generator=random)
    for i in range(2, length + 1):
        follows = (x[:, i - 1] + 3 * x[:, i - 2]) % 16
        keep = torch.rand(32, generator=random) < 0.9
        x[:, i] = torch.where(keep, follows, x[:, i])
    return x[:, :-1], x[:, 1:]


def of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of a language model."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def segmentation(random: torch.Generator) -> Batch:
    """Draw noisy images and the mask of their bright part."""
    x, _ = images(random)
    return x, (F.avg_pool2d(x, 3, 1, 1) > 0.2).float()


def pairs(random: torch.Generator) -> Batch:
    """Draw vectors and a noisy linear function of each, for models that return their loss."""
    x, noise = torch.randn(2, 128, 32, generator=random)
    return (x, (x @ _TEACHER[:32, :32]) / 6.0 + 0.02 * noise), ()


def correlated(random: torch.Generator) -> Batch:
    """Draw correlated vectors, for models that return their loss."""
    return (pairs(random)[0][1],), ()


def noisy_images(random: torch.Generator) -> Batch:
    """Draw images and standard normal noise, for models that return their loss."""
    return (images(random)[0], torch.randn(64, 8, generator=random)), ()


def only_tokens(random: torch.Generator) -> Batch:
    """Draw sequences of tokens, for models that return their loss."""
    return (tokens(random)[0],), ()


# -- ordinary models -------------------------------------------------------------------------------


def mlp(inputs: int = 32, outputs: int = 8, width: int = 64) -> nn.Sequential:
    """Return a small multilayer perceptron."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def cnn(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Return a convolutional classifier."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), norm(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), norm(32),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8),
    )  # fmt: skip


class Residual(nn.Module):
    """A sum of the input and a function of it."""

    def __init__(self, *layers: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.norm = nn.Sequential(*layers), norm or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.layers(x))


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def resnet() -> nn.Module:
    """Return a small residual network."""
    block = [
        Residual(
            nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16),
        )
        for _ in range(2)
    ]  # fmt: skip
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)]
    return nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), *block, *head)


def convnext() -> nn.Module:
    """Return a small ConvNeXt."""
    blocks = [
        Residual(
            nn.Conv2d(24, 24, 5, 1, 2, groups=24), LayerNorm2d(24),
            nn.Conv2d(24, 72, 1), nn.GELU(), nn.Conv2d(72, 24, 1),
        )
        for _ in range(2)
    ]  # fmt: skip
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 8)]
    return nn.Sequential(nn.Conv2d(1, 24, 4, 4), LayerNorm2d(24), *blocks, *head)


class UNet(nn.Module):
    """One level down and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 16, 3, 1, 1)
        self.down, self.up = nn.Conv2d(16, 32, 3, 2, 1), nn.ConvTranspose2d(32, 16, 2, 2)
        self.leave = nn.Conv2d(32, 1, 3, 1, 1)
        self.norm = nn.GroupNorm(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.enter(x))
        deep = F.silu(self.norm(self.down(skip)))
        return self.leave(torch.cat([skip, F.silu(self.up(deep))], dim=1))


class Attention(nn.Module):
    """Causal attention; `scores` makes the attention weights of queries and keys."""

    def __init__(
        self, width: int, scores: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scores = scores

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        if self.scores is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = self.scores(query, key)
            length = x.shape[1]
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """A language model of blocks."""

    def __init__(self, *blocks: nn.Module, width: int = 48, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, width), nn.Embedding(64, width)
        self.blocks, self.norm = nn.Sequential(*blocks), norm or nn.LayerNorm(width)
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(self.tokens(x) + positions)))


def prenorm(
    attention: Callable[[], nn.Module], norm: Callable[[int], nn.Module]
) -> list[nn.Module]:
    """Return the blocks of a pre-norm transformer."""
    return [
        layer
        for _ in range(2)
        for layer in (
            Residual(norm(48), attention()),
            Residual(norm(48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)),
        )
    ]


def postnorm() -> nn.Module:
    """Return a post-norm transformer."""
    blocks = [
        layer
        for _ in range(2)
        for layer in (
            Residual(Attention(48), norm=nn.LayerNorm(48)),
            Residual(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48), norm=nn.LayerNorm(48)),
        )
    ]
    return Language(*blocks, norm=nn.Identity())


class Gated(nn.Module):
    """The feed-forward layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(48, 96), nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Recurrent(nn.Module):
    """A recurrent language model."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.tokens, self.cells = nn.Embedding(16, 32), kind(32, 64, batch_first=True)
        self.head = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.tokens(x))[0])


class DeepSets(nn.Module):
    """A function of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = mlp(8, 64), mlp(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x.unflatten(1, (4, 8))).sum(1))


class Bag(nn.Module):
    """A classifier of bags of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(16, 32, mode="mean"), mlp(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x))


def bags(random: torch.Generator) -> Batch:
    """Draw bags of tokens; the class is the most frequent one."""
    label = torch.randint(16, (128,), generator=random)
    x = torch.randint(16, (128, 12), generator=random)
    return torch.where(torch.rand(x.shape, generator=random) < 0.3, label.unsqueeze(1), x), label


class Mixer(nn.Module):
    """An MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 4, 4)
        self.mix = mlp(16, 16, 32)
        self.channels = Residual(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2)
        x = self.channels((x + self.mix(x)).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


class Graph(nn.Module):
    """A graph network on a ring, which adds the messages of neighbours by index."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.message, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        nodes = self.enter(x.unflatten(1, (4, 8)))
        target = torch.arange(1, 5, device=x.device) % 4
        messages = F.relu(self.message(nodes))
        return self.head(torch.zeros_like(messages).index_add(1, target, messages)).sum(1)


# -- delicate computations -------------------------------------------------------------------------


def dot_scores(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return plain attention scores, multiplied by a number."""
    return lambda query, key: (scale * query) @ key.transpose(-1, -2)


def shifted_scores(query: Tensor, key: Tensor) -> Tensor:
    """Return attention scores of queries and keys with a large mean, as some large models have."""
    return (query + 80.0) @ (key + 80.0).transpose(-1, -2) / math.sqrt(key.shape[-1])


class CosineScores(nn.Module):
    """The attention scores of Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4, 1, 1), math.log(10.0)))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        cosine = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-2, -1)
        return cosine * torch.clamp(self.scale, max=math.log(100.0)).exp()


class LinearAttention(nn.Module):
    """Attention with positive features, summed over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.qkv, self.head = nn.Linear(8, 32), nn.Linear(32, 96), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.enter(x)).chunk(3, -1)
        query, key = F.elu(query) + 1.0, F.elu(key) + 1.0
        total = key.transpose(1, 2) @ value
        norm = (query * key.sum(1, keepdim=True)).sum(-1, keepdim=True)
        return self.head((query @ total / norm).mean(1))


def long_sequences(random: torch.Generator) -> Batch:
    """Draw long sequences and a function of their mean."""
    x = torch.randn(8, 2048, 8, generator=random) + torch.randn(8, 1, 8, generator=random)
    return x, torch.tanh(x.mean(1) @ _TEACHER[:8, :4]).sum(-1, keepdim=True)


class Cumulative(nn.Module):
    """Running means by cumulative sums."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        steps = F.softplus(self.enter(x))
        means = steps.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)
        return self.head(means[:, -64:].mean(1))


class Stream(nn.Module):
    """A pre-norm network whose residual stream grows beyond the range of float16."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 48), nn.Embedding(64, 48)
        blocks = prenorm(lambda: Attention(48), nn.LayerNorm)
        self.blocks, self.norm, self.head = (
            nn.ModuleList(blocks), nn.LayerNorm(48), nn.Linear(48, 16),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(torch.arange(x.shape[1], device=x.device))
        x = 30000.0 * (self.tokens(x) + positions)
        for block in self.blocks:
            x = x + 30000.0 * block.layers(x)
        return self.head(self.norm(x))


class RMSNorm(nn.Module):
    """A root-mean-square norm as written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))


class Standardize(nn.Module):
    """A batch norm as written by hand, with the variance as a difference of means."""

    def forward(self, h: Tensor) -> Tensor:
        mean = h.mean(0)
        variance = (h * h).mean(0) - mean**2
        return (h - mean) / (variance.clamp(min=0.0) + 1e-3).sqrt()


def standardized() -> nn.Module:
    """Return a network with activations around 1000 before a norm written by hand."""
    first = nn.Linear(32, 64)
    nn.init.constant_(first.bias, 1000.0)
    nn.init.normal_(first.weight, std=3.0)
    return nn.Sequential(first, Standardize(), nn.ReLU(), nn.Linear(64, 8))


def root_mean_square() -> nn.Module:
    """Return a network with large activations before a norm written by hand."""
    first = nn.Linear(32, 64)
    nn.init.normal_(first.weight, std=200.0)
    return nn.Sequential(first, RMSNorm(64), nn.GELU(), nn.Linear(64, 8))


class Contrast(nn.Module):
    """Two encoders, trained by InfoNCE at a low temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(32, 32), mlp(32, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        scores = left @ right.T / 0.02
        return F.cross_entropy(scores, torch.arange(len(x), device=x.device))


class VAE(nn.Module):
    """A variational autoencoder; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(256, 16), mlp(8, 256)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        x = x.flatten(1)
        mean, logvar = self.encoder(x).chunk(2, -1)
        decoded = self.decoder(mean + (0.5 * logvar).exp() * noise)
        divergence = 0.5 * (mean.square() + logvar.exp() - logvar - 1.0).sum(-1)
        return ((decoded - x).square().sum(-1) + divergence).mean()


def gaussian_nll(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the negative log likelihood with a predicted variance."""
    mean, logvar = outputs.chunk(2, -1)
    return (0.5 * (logvar + (y - mean).square() * (-logvar).exp())).mean()


def poisson(random: torch.Generator) -> Batch:
    """Draw counts up to several thousands."""
    x = torch.randn(128, 32, generator=random)
    rate = torch.exp(5.0 + torch.tanh(x @ _TEACHER[:32, :4]).sum(-1, keepdim=True))
    return x, torch.poisson(rate, generator=random)


class PoissonRate(nn.Module):
    """A predicted log rate that starts near the data's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + 5.0


class CTC(nn.Module):
    """A recurrent model trained by connectionist temporal classification; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = (
            nn.Embedding(16, 32),
            nn.Conv1d(32, 64, 3, 1, 1),
            mlp(64, 17),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.mix(self.tokens(x.repeat_interleave(2, 1)).transpose(1, 2)))
        logits = self.head(hidden.transpose(1, 2)).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), logits.shape[0], device=x.device)
        targets = torch.full((len(x),), x.shape[1], device=x.device)
        return F.ctc_loss(logits, x + 1, lengths, targets, zero_infinity=True)


class GradientPenalty(nn.Module):
    """A critic with a penalty on the norm of its gradient; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = mlp(32, 1)

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        between = (0.5 * (real + noise)).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (gradient.norm(dim=-1) - 1.0).square().mean()
        return self.critic(noise).mean() - self.critic(real).mean() + 10.0 * penalty


class Experts(nn.Module):
    """Four experts, of which each row uses two."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(32, 4), nn.Linear(32, 8)
        self.experts = nn.ModuleList(mlp(32, 32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        gates = torch.zeros(len(x), 4, device=x.device, dtype=weights.dtype)
        gates = gates.scatter(1, chosen, weights / weights.sum(-1, keepdim=True))
        mixed = sum(gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return self.head(mixed)


def mixture(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the negative log likelihood of a mixture of five Gaussians."""
    logits, means, logscales = outputs.chunk(3, -1)
    densities = -0.5 * ((y - means) * (-logscales).exp()).square() - logscales
    return -torch.logsumexp(logits.log_softmax(-1) + densities, dim=-1).mean()


class Flow(nn.Module):
    """Affine coupling layers; returns the negative log likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp(16, 32, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        logdet = x.new_zeros(len(x))
        for part in self.parts:
            scale, shift = part(left).chunk(2, -1)
            scale = 2.0 * torch.tanh(scale)
            left, right = right * scale.exp() + shift, left
            logdet = logdet + scale.sum(-1)
        z = torch.cat([left, right], -1)
        return (0.5 * z.square().sum(-1) - logdet).mean()


class Frequencies(nn.Module):
    """A field over positions, with sines of high frequencies as features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(10.0))
        self.layers = mlp(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        phase = (x.unsqueeze(-1) * self.frequencies).flatten(1)
        return self.layers(torch.cat([phase.sin(), phase.cos()], -1))


def field(random: torch.Generator) -> Batch:
    """Draw positions and a quickly changing function of them."""
    x = 2.0 * torch.rand(256, 2, generator=random) - 1.0
    return x, torch.sin(512.0 * x[:, :1]) + torch.cos(32.0 * x[:, 1:])


class Sinkhorn(nn.Module):
    """Assignment of encodings by entropic optimal transport, in the log domain."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(32, 32)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        encoded = self.encoder(x)
        cost = (encoded.unsqueeze(1) - target.unsqueeze(0)).square().sum(-1)
        scores = -cost / 0.05
        for _ in range(5):
            scores = scores - torch.logsumexp(scores, 1, keepdim=True)
            scores = scores - torch.logsumexp(scores, 0, keepdim=True)
        return (scores.exp() * cost).sum() / len(x)


def distillation(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the divergence from soft targets at temperature 4."""
    soft = F.one_hot(y, 8).float() * 0.9 + 0.0125
    return 16.0 * F.kl_div((outputs / 4.0).log_softmax(-1), soft, reduction="batchmean")


def wide_regression(random: torch.Generator) -> Batch:
    """Draw vectors with 1024 targets each: 131,072 terms in the loss of a batch."""
    x = torch.randn(128, 32, generator=random)
    return x, torch.tanh(x @ _TEACHER[:32, :32]).repeat(1, 32)


def small_language() -> nn.Module:
    """Return a pre-norm language model."""
    return Language(*prenorm(lambda: Attention(48), nn.LayerNorm))


CASES: dict[str, Case] = {
    "mlp": Case(mlp, rows),
    "mlp, sgd": Case(mlp, rows, rate=0.05, optimizer=sgd),
    "cnn, batch norm": Case(lambda: cnn(nn.BatchNorm2d), images),
    "cnn, group norm": Case(lambda: cnn(lambda width: nn.GroupNorm(4, width)), images),
    "residual network": Case(resnet, images),
    "convnext": Case(convnext, images),
    "u-net": Case(UNet, segmentation, F.binary_cross_entropy_with_logits),
    "autoencoder": Case(
        lambda: nn.Sequential(
            nn.Flatten(), mlp(256, 16), mlp(16, 256), nn.Unflatten(1, (1, 16, 16))
        ),
        lambda random: (images(random)[0],) * 2,
        F.mse_loss,
    ),
    "transformer, pre-norm": Case(small_language, tokens, of_tokens),
    "transformer, post-norm": Case(postnorm, tokens, of_tokens),
    "transformer, rms norm and gates": Case(
        lambda: Language(
            Residual(nn.RMSNorm(48), Attention(48)), Residual(nn.RMSNorm(48), Gated()),
            norm=nn.RMSNorm(48),
        ),
        tokens,
        of_tokens,
    ),
    "lstm": Case(lambda: Recurrent(nn.LSTM), tokens, of_tokens),
    "gru": Case(lambda: Recurrent(nn.GRU), tokens, of_tokens),
    "deep sets": Case(DeepSets, regression, F.mse_loss),
    "embedding bag": Case(Bag, bags),
    "mixer": Case(Mixer, images),
    "graph network": Case(Graph, regression, F.mse_loss),
    "large attention logits": Case(
        lambda: Language(*prenorm(lambda: Attention(48, dot_scores(100.0)), nn.LayerNorm)),
        tokens, of_tokens, rate=1e-3, delicate=True,
    ),
    "attention logits past 65504": Case(
        lambda: Language(*prenorm(lambda: Attention(48, shifted_scores), nn.LayerNorm)),
        tokens, of_tokens, rate=1e-3, delicate=True,
    ),
    "residual stream past 65504": Case(Stream, tokens, of_tokens, delicate=True),
    "InfoNCE, temperature 0.02": Case(
        Contrast, pairs, identity, delicate=True
    ),
    "vae": Case(VAE, noisy_images, identity, delicate=True),
    "gaussian likelihood": Case(lambda: mlp(32, 2), regression, gaussian_nll, delicate=True),
    "poisson": Case(PoissonRate, poisson, F.poisson_nll_loss, delicate=True),
    "ctc": Case(CTC, only_tokens, identity, delicate=True),
    "gradient penalty": Case(
        GradientPenalty, pairs, identity, rate=1e-3, delicate=True
    ),
    "long cumulative sums": Case(Cumulative, long_sequences, F.mse_loss, delicate=True),
    "linear attention": Case(LinearAttention, long_sequences, F.mse_loss, delicate=True),
    "rms norm by hand": Case(root_mean_square, rows, delicate=True),
    "variance by hand": Case(standardized, rows, delicate=True),
    "tiny learning rate": Case(mlp, rows, rate=2e-6, steps=200, delicate=True),
    "loss × 1e-5": Case(
        mlp, rows, lambda outputs, y: 1e-5 * F.cross_entropy(outputs, y), delicate=True
    ),
    "loss summed over 131,072 terms": Case(
        lambda: mlp(32, 1024), wide_regression,
        lambda outputs, y: (outputs - y).square().sum(), delicate=True,
    ),
    "cosine attention": Case(
        lambda: Language(*prenorm(lambda: Attention(48, CosineScores()), nn.LayerNorm)),
        tokens, of_tokens, delicate=True,
    ),
    "mixture of experts": Case(Experts, rows, delicate=True),
    "log-sum-exp mixture": Case(lambda: mlp(32, 15), regression, mixture, delicate=True),
    "normalizing flow": Case(Flow, correlated, identity, rate=1e-3, delicate=True),
    "fourier features": Case(Frequencies, field, F.mse_loss, delicate=True),
    "sinkhorn": Case(Sinkhorn, pairs, identity, delicate=True),
    "distillation": Case(mlp, rows, distillation),
}  # fmt: skip
"""The trainings by name."""
