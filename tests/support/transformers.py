"""Tiny models of Hugging Face's transformers with random weights: nothing is downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from support.zoo import Animal

_SMALL, _LARGE = 64, 1000
"""Sizes of the vocabulary."""
_MASK = torch.ones(2, 12, dtype=torch.long)


def _tokens(vocabulary: int = _SMALL) -> torch.Tensor:
    return torch.randint(3, vocabulary, (2, 12))


def _make(kind: str, configuration: str, args: tuple[Any, ...], **sizes: Any) -> Animal:
    import transformers

    config = getattr(transformers, configuration)(**sizes)
    return Animal(getattr(transformers, kind)(config).eval(), args)


_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}

HUGGING_FACE: dict[str, Callable[[], Animal]] = (
    {
        "bert": lambda: _make(
            "BertModel",
            "BertConfig",
            (_tokens(), _MASK),
            vocab_size=_SMALL,
            max_position_embeddings=32,
            **_SIZES,
        ),
        "bert-many-words": lambda: _make(
            "BertModel",
            "BertConfig",
            (_tokens(_LARGE), _MASK),
            vocab_size=_LARGE,
            max_position_embeddings=32,
            **_SIZES,
        ),
        "bert-narrow": lambda: _make(
            "BertModel",
            "BertConfig",
            (_tokens(), _MASK),
            vocab_size=99,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=37,
        ),
        "vit-many-places": lambda: _make(
            "ViTForMaskedImageModeling",
            "ViTConfig",
            (torch.randn(2, 3, 64, 64),),
            image_size=64,
            patch_size=4,
            encoder_stride=4,
            **_SIZES,
        ),
        "gpt2": lambda: _make(
            "GPT2LMHeadModel",
            "GPT2Config",
            (_tokens(),),
            vocab_size=_SMALL,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=32,
            **_SPECIAL,
        ),
        "gpt-neo": lambda: _make(
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            (_tokens(),),
            vocab_size=_SMALL,
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            intermediate_size=128,
            max_position_embeddings=32,
            attention_types=[[["global", "local"], 1]],
            **_SPECIAL,
        ),
        "llama": lambda: _make(
            "LlamaForCausalLM",
            "LlamaConfig",
            (_tokens(),),
            vocab_size=_SMALL,
            num_key_value_heads=2,
            **_SIZES,
            **_SPECIAL,
        ),
        "llama-tied": lambda: _make(
            "LlamaForCausalLM",
            "LlamaConfig",
            (_tokens(),),
            vocab_size=_SMALL,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            **_SIZES,
            **_SPECIAL,
        ),
        "vit": lambda: _make(
            "ViTForImageClassification",
            "ViTConfig",
            (torch.randn(2, 3, 32, 32),),
            image_size=32,
            patch_size=8,
            **_SIZES,
        ),
        "t5": lambda: _make(
            "T5ForConditionalGeneration",
            "T5Config",
            (_tokens(), _MASK, _tokens()),
            vocab_size=_SMALL,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            use_cache=False,
        ),
        "bart": lambda: _make(
            "BartModel",
            "BartConfig",
            (_tokens(_LARGE), _MASK, _tokens(_LARGE)),
            vocab_size=_LARGE,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_position_embeddings=32,
            **_SPECIAL,
        ),
    }
    if importlib.util.find_spec("transformers")
    else {}
)
"""The models by name; empty if transformers is not installed."""
