"""Networks of the workloads without convolutions: linear layers, an MLP, a language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def nine_linears(width: int) -> nn.Sequential:
    """Return nine linear layers without activations, initialized as PaddlePaddle does.

    >>> nine_linears(4)(torch.zeros(2, 4)).shape
    torch.Size([2, 4])
    """
    # Not nn.Linear's own initialization before this one: it takes seconds for 8192 × 8192.
    model = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(9)))
    model.to_empty(device=torch.get_default_device())
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
    return model


def mlp() -> nn.Sequential:
    """Return the network of OneFlow's document: 256 inputs, 128 hidden units, 10 classes."""
    return nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


class TransformerLayer(nn.Module):
    """A layer of GPT-2: causal attention and two linear layers, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states after this layer, [batch, length, width] as the input."""
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.attention(self.before(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.narrow(F.gelu(self.wide(self.after(x)), approximate="tanh"))
        return x + hidden


class LanguageModel(nn.Module):
    """GPT-2 with tied embedding and head, 124 million parameters by default. Tokens → logits.

    >>> model = LanguageModel(width=32, layers=1, heads=2, vocabulary=64, context=16)
    >>> model(torch.zeros(2, 16, dtype=torch.int64)).shape
    torch.Size([2, 16, 64])
    """

    def __init__(
        self,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        vocabulary: int = 50257,
        context: int = 1024,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
