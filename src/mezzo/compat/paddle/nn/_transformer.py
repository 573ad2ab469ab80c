"""`paddle.nn.MultiHeadAttention` and the encoder of transformers, made of layers of `paddle.nn`."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.compat.paddle.nn import functional as F
from mezzo.compat.paddle.nn._layer import Layer, LayerList
from mezzo.compat.paddle.nn._layers import Dropout, LayerNorm, Linear


class MultiHeadAttention(Layer):
    """`paddle.nn.MultiHeadAttention`, without `cache`.

    >>> MultiHeadAttention(8, 2)(torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        kdim: int | None = None,
        vdim: int | None = None,
        need_weights: bool = False,
        weight_attr: Any = None,
        bias_attr: Any = None,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            # Paddle's exception type.
            raise AssertionError(
                f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}."
            )
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout, self.need_weights = dropout, need_weights
        self.q_proj = Linear(embed_dim, embed_dim, weight_attr, bias_attr)
        self.k_proj = Linear(kdim or embed_dim, embed_dim, weight_attr, bias_attr)
        self.v_proj = Linear(vdim or embed_dim, embed_dim, weight_attr, bias_attr)
        self.out_proj = Linear(embed_dim, embed_dim, weight_attr, bias_attr)

    def forward(
        self,
        query: Any,
        key: Any = None,
        value: Any = None,
        attn_mask: Any = None,
        cache: Any = None,
    ) -> Any:
        """Return the attended values; with `need_weights`, the weights too."""
        _refuse_cache(cache)
        key = query if key is None else key
        value = key if value is None else value
        q = self._split_heads(self.q_proj(query))
        k, v = self._split_heads(self.k_proj(key)), self._split_heads(self.v_proj(value))
        scores = torch.matmul(q * self.head_dim**-0.5, k.transpose(-1, -2))
        if attn_mask is not None:
            if not attn_mask.is_floating_point():
                attn_mask = (attn_mask.to(scores.dtype) - 1.0) * 1e9
            scores = scores + attn_mask
        weights = F.softmax(scores)
        if self.dropout:
            weights = F.dropout(weights, self.dropout, training=self.training)
        attended = torch.matmul(weights, v).transpose(1, 2)
        output = self.out_proj(attended.reshape(*attended.shape[:2], self.embed_dim))
        return (output, weights) if self.need_weights else output

    def _split_heads(self, x: Any) -> Any:
        return x.reshape(x.shape[0], -1, self.num_heads, self.head_dim).transpose(1, 2)


class TransformerEncoderLayer(Layer):
    """`paddle.nn.TransformerEncoderLayer`, without `cache`."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        dropout: float = 0.1,
        activation: str = "relu",
        attn_dropout: float | None = None,
        act_dropout: float | None = None,
        normalize_before: bool = False,
        weight_attr: Any = None,
        bias_attr: Any = None,
        layer_norm_eps: float = 1e-5,
    ) -> None:
        self._config = {name: value for name, value in locals().items() if name in _CONFIG}
        super().__init__()
        attn_dropout = dropout if attn_dropout is None else attn_dropout
        act_dropout = dropout if act_dropout is None else act_dropout
        weights, biases = _pair(weight_attr), _pair(bias_attr)
        self.normalize_before = normalize_before
        self.self_attn = MultiHeadAttention(
            d_model, nhead, attn_dropout, weight_attr=weights[0], bias_attr=biases[0]
        )
        self.linear1 = Linear(d_model, dim_feedforward, weights[1], biases[1])
        self.dropout = Dropout(act_dropout)
        self.linear2 = Linear(dim_feedforward, d_model, weights[1], biases[1])
        self.norm1 = LayerNorm(d_model, layer_norm_eps)
        self.norm2 = LayerNorm(d_model, layer_norm_eps)
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)
        self.activation = getattr(F, activation)

    def forward(self, src: Any, src_mask: Any = None, cache: Any = None) -> Any:
        """Return the encoded sequence."""
        _refuse_cache(cache)
        residual, src = src, self.norm1(src) if self.normalize_before else src
        src = residual + self.dropout1(self.self_attn(src, src, src, src_mask))
        src = src if self.normalize_before else self.norm1(src)
        residual, src = src, self.norm2(src) if self.normalize_before else src
        src = self.linear2(self.dropout(self.activation(self.linear1(src))))
        src = residual + self.dropout2(src)
        return src if self.normalize_before else self.norm2(src)


class TransformerEncoder(Layer):
    """`paddle.nn.TransformerEncoder`: several layers like the first one, without `cache`."""

    def __init__(self, encoder_layer: Any, num_layers: int, norm: Any = None) -> None:
        super().__init__()
        kind, config = type(encoder_layer), encoder_layer._config
        others = [kind(**config) for _ in range(num_layers - 1)]
        self.layers = LayerList([encoder_layer, *others])
        self.num_layers, self.norm = num_layers, norm

    def forward(self, src: Any, src_mask: Any = None, cache: Any = None) -> Any:
        """Return the encoded sequence."""
        _refuse_cache(cache)
        for layer in self.layers:
            src = layer(src, src_mask)
        return src if self.norm is None else self.norm(src)


_CONFIG = frozenset(
    "d_model nhead dim_feedforward dropout activation attn_dropout act_dropout normalize_before"
    " weight_attr bias_attr layer_norm_eps".split()
)


def _pair(attr: Any) -> Any:
    """Return the attributes of the attention and of the linear layers."""
    return attr if isinstance(attr, list | tuple) else (attr, attr)


def _refuse_cache(cache: Any) -> None:
    if cache is not None:
        raise ValueError("cache= is not supported. Call the layer on the whole sequence.")
