"""Models for the differential harness: own ones, torchvision's and Hugging Face's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from support.differential import Row
from torch import nn
from torch.nn import functional as F

CLASSES = 10


# -- own models ------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A language model with a recurrent layer."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(50, 32), nn.Dropout(0.2)
        self.recurrent, self.head = (
            kind(32, 48, num_layers=2, batch_first=True),
            nn.Linear(48, CLASSES),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.recurrent(self.drop(self.embed(tokens)))
        return self.head(outputs[:, -1])


class UNet(nn.Module):
    """Two levels, with GroupNorm, a transposed convolution and an interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = self._block(3, 16), self._block(16, 32)
        self.up, self.out = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, CLASSES, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.down(x)
        low = self.middle(F.max_pool2d(high, 2))
        return self.out(torch.cat([high, self.up(low)], 1)).mean((2, 3))


class Interaction(nn.Module):
    """Embeddings of categories and their products: a small recommendation model."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(40, 16, mode="sum") for _ in range(4))
        self.dense, self.top = (
            nn.Sequential(nn.Linear(8, 16), nn.ReLU()),
            nn.Linear(16 + 10, CLASSES),
        )

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        dense = self.dense(numbers)
        vectors = torch.stack(
            [dense, *(table(categories[:, place]) for place, table in enumerate(self.tables))], 1
        )
        products = torch.bmm(vectors, vectors.mT)
        first, second = torch.tril_indices(5, 5, offset=-1, device=products.device)
        return self.top(torch.cat([dense, products[:, first, second]], 1))


class DoubleBackward(nn.Module):
    """Returns its output and the gradient of it, for losses of both."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, CLASSES))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        outputs = self.net(x)
        (slope,) = torch.autograd.grad(outputs.float().sum(), x, create_graph=True)
        return outputs, slope


def penalized(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """Cross entropy with a gradient penalty."""
    return (
        F.cross_entropy(outputs[0].float(), target)
        + 0.1 * (outputs[1].float().norm(dim=1) - 1).square().mean()
    )


def _target(generator: torch.Generator, size: int) -> torch.Tensor:
    return torch.randint(CLASSES, (size,), generator=generator)


def _tokens(generator: torch.Generator) -> tuple[Any, tuple[torch.Tensor, ...]]:
    return torch.randint(50, (8, 12), generator=generator), (_target(generator, 8),)


def images(
    size: int, batch: int = 8
) -> Callable[[torch.Generator], tuple[Any, tuple[torch.Tensor, ...]]]:
    """Images with classes."""
    return lambda generator: (
        torch.randn(batch, 3, size, size, generator=generator),
        (_target(generator, batch),),
    )


def _click(generator: torch.Generator) -> tuple[Any, tuple[torch.Tensor, ...]]:
    return (
        torch.randn(8, 8, generator=generator),
        torch.randint(40, (8, 4, 3), generator=generator),
    ), (_target(generator, 8),)


def _numbers(generator: torch.Generator) -> tuple[Any, tuple[torch.Tensor, ...]]:
    return torch.randn(8, 8, generator=generator), (_target(generator, 8),)


OWN = [
    Row("lstm", lambda: Recurrent(nn.LSTM), _tokens, F.cross_entropy),
    Row("gru", lambda: Recurrent(nn.GRU), _tokens, F.cross_entropy),
    Row("u-net", UNet, images(16), F.cross_entropy),
    Row("interaction", Interaction, _click, F.cross_entropy),
    Row("double backward", DoubleBackward, _numbers, penalized),
]


# -- torchvision -----------------------------------------------------------------------------------


def _classified(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of a classifier; Inception and GoogLeNet have auxiliary outputs."""
    if isinstance(outputs, torch.Tensor):
        return F.cross_entropy(outputs, target)
    return sum(
        (F.cross_entropy(one, target) for one in outputs[1:] if one is not None),
        F.cross_entropy(outputs[0], target),
    )


# Where features do not divide evenly, the backward pass of adaptive pooling sums in any order: with
# these sizes AlexNet, VGG and GoogLeNet are deterministic.
_SIZES = {
    "inception_v3": 299,
    "googlenet": 128,
    "maxvit_t": 224,
    "alexnet": 224,
    "vgg11_bn": 224,
    "squeezenet1_0": 96,
    "squeezenet1_1": 96,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False, "aux_logits": True},
    "inception_v3": {"init_weights": False, "aux_logits": True},
    "vit_b_16": {"image_size": 64},
}
_FAMILIES = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3
    maxvit_t mnasnet0_5 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large regnet_x_400mf
    regnet_y_400mf resnet18 resnet50 resnext50_32x4d wide_resnet50_2 shufflenet_v2_x0_5
    squeezenet1_0 squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_16
""".split()


def vision(name: str, size: int | None = None, batch: int = 8) -> Row:
    """Return a model of torchvision."""

    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(
            name, weights=None, num_classes=CLASSES, **_OPTIONS.get(name, {})
        )

    size = size or _SIZES.get(name, 64)
    return Row(
        name if batch == 8 else f"{name} {batch}x{size}", build, images(size, batch), _classified
    )


TORCHVISION = (
    [vision(name) for name in _FAMILIES] if importlib.util.find_spec("torchvision") else []
)


# -- transformers ----------------------------------------------------------------------------------

_VOCABULARY, _LENGTH = 97, 16
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": _VOCABULARY,
    "pad_token_id": 0,
}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_DECODER = {**_ENCODER, **_SPECIAL}
_SEQ2SEQ = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    **_SPECIAL,
}
_POSITIONS = {"max_position_embeddings": 64}
_DISTILBERT = {
    "vocab_size": _VOCABULARY,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
}
_GPT2 = {
    "vocab_size": _VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    **_SPECIAL,
}
_BLOOM = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "pad_token_id": 0,
    **_SPECIAL,
}
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "use_cache": False,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_OPT = {**_DECODER, **_POSITIONS, "ffn_dim": 64, "word_embed_proj_dim": 32}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_LANGUAGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", _ENCODER),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**_ENCODER, **_POSITIONS}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_ENCODER, "embedding_size": 16}),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**_ENCODER, "embedding_size": 16}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", _DISTILBERT),
    "deberta-v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", _ENCODER),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _DECODER),
    "opt": ("OPTForCausalLM", "OPTConfig", _OPT),
    "bloom": ("BloomForCausalLM", "BloomConfig", _BLOOM),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "phi": ("PhiForCausalLM", "PhiConfig", _DECODER),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ),
}
"""Name → model class, configuration class and sizes."""


def _language(name: str, *, padded: bool) -> Row:
    kind, configuration, sizes = _LANGUAGE[name]

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, kind)(getattr(transformers, configuration)(**sizes))

    def batch(generator: torch.Generator) -> tuple[Any, tuple[torch.Tensor, ...]]:
        tokens = torch.randint(3, _VOCABULARY, (4, _LENGTH), generator=generator)
        inputs = {"input_ids": tokens, "labels": tokens.clone()}
        if padded:
            lengths = torch.randint(_LENGTH // 2, _LENGTH + 1, (4, 1), generator=generator)
            inputs["attention_mask"] = (torch.arange(_LENGTH)[None] < lengths).long()
            inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
        return inputs, ()

    return Row(f"{name} padded" if padded else name, build, batch, lambda outputs: outputs.loss)


def _hf_vision() -> Row:
    def build() -> nn.Module:
        import transformers

        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
        }
        return transformers.ViTForImageClassification(
            transformers.ViTConfig(**sizes, num_labels=CLASSES)
        )

    return Row(
        "hf-vit", build, images(32), lambda outputs, target: F.cross_entropy(outputs.logits, target)
    )


TRANSFORMERS = (
    [
        *(_language(name, padded=padded) for name in _LANGUAGE for padded in (False, True)),
        _hf_vision(),
    ]
    if importlib.util.find_spec("transformers")
    else []
)
