"""Models of the benchmarks with their batches and bars: transformers, torchvision, our own.

Weights are random and data too, so nothing is downloaded. Every model has a tiny form for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpt import GPT
from networks import DLRM, PointNet, PostNormEncoder, RecurrentLM, Tagger, UNet
from torch import Tensor, nn
from torch.nn import functional as F

AMP, HAND = "torch.amp", "torch by hand"

Batch = Any
"""A dict of arguments of a model that returns its loss, or a pair of input and target."""
Make = Callable[[bool], Any]
"""Makes a model or a batch; the argument is whether it is the tiny one."""


def adamw(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters."""
    return [torch.optim.AdamW(model.parameters(), lr=1e-4, **options)]


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and the ratios that mezzo must reach."""

    name: str
    model: Make
    batch: Make
    bars: dict[str, float]
    """Set-up of torch → the largest ratio to it; set-ups without a bar are not run."""
    loss: Callable[..., Tensor] | None = None
    """None if the model returns its loss."""
    optimizers: Callable[..., list[torch.optim.Optimizer]] = adamw
    images: bool = False
    """Whether channels_last is tried by hand."""
    compile: bool = False


# -- transformers ----------------------------------------------------------------------------------

_BERT_TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 128,
}
_LLAMA = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 2048,
    "vocab_size": 32_000,
    "use_cache": False,
}


def transformers_model(kind: str, configuration: str, **sizes: Any) -> nn.Module:
    """Return a model of transformers with random weights."""
    import transformers  # noqa: PLC0415 - takes seconds

    model: nn.Module = getattr(transformers, kind)(getattr(transformers, configuration)(**sizes))
    return model


def _transformers(kind: str, configuration: str, tiny: dict[str, Any], **sizes: Any) -> Make:
    return lambda small: transformers_model(kind, configuration, **sizes | (tiny if small else {}))


def _text(rows: int, length: int, vocabulary: int, labels: Callable[[Tensor], Tensor]) -> Make:
    def make(small: bool) -> Batch:  # noqa: FBT001
        # Small numbers are special tokens, such as padding.
        shape = (2, 16) if small else (rows, length)
        tokens = torch.randint(10, 128 if small else vocabulary, shape)
        mask = torch.ones_like(tokens)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels(tokens)}

    return make


def _one_of_two(tokens: Tensor) -> Tensor:
    return torch.randint(2, tokens.shape[:1])


def _masked(tokens: Tensor) -> Tensor:
    return torch.where(torch.rand(tokens.shape) < 0.15, tokens, -100)


def _summaries(tokens: Tensor) -> Tensor:
    return tokens[:, : tokens.shape[1] // 4].flip(1)


def _vit_batch(small: bool) -> Batch:  # noqa: FBT001
    rows, size = (2, 32) if small else (64, 224)
    return {
        "pixel_values": torch.randn(rows, 3, size, size),
        "labels": torch.randint(1000, (rows,)),
    }


def _audio_batch(small: bool) -> Batch:  # noqa: FBT001
    rows, samples, length = (2, 8_000, 4) if small else (8, 80_000, 40)
    return {
        "input_values": torch.randn(rows, samples),
        "labels": torch.randint(1, 32, (rows, length)),
    }


def _whisper_batch(small: bool) -> Batch:  # noqa: FBT001
    rows, frames, length = (2, 100, 8) if small else (16, 3000, 64)
    return {
        "input_features": torch.randn(rows, 80, frames),
        "labels": torch.randint(10, 50_000, (rows, length)),
    }


TRANSFORMERS = {
    "bert": Case(
        "BERT-base, 32 × 128",
        _transformers("BertForSequenceClassification", "BertConfig", _BERT_TINY),
        _text(32, 128, 30_000, _one_of_two),
        {AMP: 0.42, HAND: 0.55},
    ),
    "llama": Case(
        "Llama 150M, 8 × 1024",
        _transformers("LlamaForCausalLM", "LlamaConfig", _BERT_TINY, **_LLAMA),
        _text(8, 1024, 32_000, torch.clone),
        {AMP: 0.75, HAND: 0.75},
    ),
    "t5": Case(
        "T5-small, 16 × 256 → 64",
        _transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            {
                "d_model": 32,
                "d_kv": 16,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 2,
                "vocab_size": 128,
            },
            decoder_start_token_id=0,
            use_cache=False,
        ),
        _text(16, 256, 32_000, _summaries),
        {AMP: 0.33, HAND: 0.33},
    ),
    "hf-vit": Case(
        "ViT-B/16 of transformers, batch 64",
        _transformers(
            "ViTForImageClassification",
            "ViTConfig",
            _BERT_TINY | {"image_size": 32},
            num_labels=1000,
        ),
        _vit_batch,
        {AMP: 1.0, HAND: 1.0},
    ),
}

COMPILED = {
    f"{name}-compiled": replace(
        case, name=f"{case.name}, compiled", bars={HAND: 0.92}, compile=True
    )
    for name, case in TRANSFORMERS.items()
}

WAV2VEC2 = Case(
    "wav2vec2-base with CTC, 8 × 5 s",
    _transformers(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        _BERT_TINY
        | {
            "conv_dim": (16,) * 7,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        },
        layerdrop=0.0,
    ),
    _audio_batch,
    {AMP: 1.0, HAND: 1.02},
)


# -- torchvision -----------------------------------------------------------------------------------


def _pictures(rows: int, size: int = 224) -> Make:
    def make(small: bool) -> Batch:  # noqa: FBT001
        count = 2 if small else rows
        return torch.randn(count, 3, size, size), torch.randint(1000, (count,))

    return make


def _vision(
    constructor: str, name: str, against_amp: float, against_hand: float = 1.0, size: int = 224
) -> Case:
    def make(_small: bool) -> nn.Module:  # noqa: FBT001
        import torchvision  # type: ignore[import-not-found, import-untyped] # noqa: PLC0415 - optional

        model: nn.Module = getattr(torchvision.models, constructor)()
        return model

    return Case(
        f"{name}, {size}², batch 64",
        make,
        _pictures(64, size),
        {AMP: against_amp, HAND: against_hand},
        F.cross_entropy,
        images=True,
    )


TORCHVISION = {
    "vit": _vision("vit_b_16", "ViT-B/16", 0.75),
    "convnext": _vision("convnext_tiny", "ConvNeXt-T", 0.68),
    "efficientnet": _vision("efficientnet_v2_s", "EfficientNetV2-S", 0.27),
    "mobilenet": _vision("mobilenet_v3_large", "MobileNetV3-L", 0.30),
    "swin": _vision("swin_t", "Swin-T", 0.53),
    "regnet": _vision("regnet_y_3_2gf", "RegNetY-3.2GF", 0.48),
    "densenet": _vision("densenet121", "DenseNet-121", 0.33),
    "vgg": _vision("vgg16_bn", "VGG16-BN", 0.50),
}

# At 224² its windows are padded with zeros, whose keys are zero: normalizing them divides the
# gradients by 1e-12, and float16 overflows at every step, with torch.amp too.
SWIN_V2 = _vision("swin_v2_t", "Swin-V2-T", 1.0, 1.02, size=256)
MNASNET = _vision("mnasnet1_0", "MNASNet 1.0", 1.0, 1.02)


# -- our own ---------------------------------------------------------------------------------------


def _tagged(rows: int, length: int, vocabulary: int, tags: int) -> Make:
    def make(small: bool) -> Batch:  # noqa: FBT001
        shape = (2, 8) if small else (rows, length)
        tokens = torch.randint(100 if small else vocabulary, shape)
        return tokens, torch.randint(min(tags, 100) if small else tags, (tokens.numel(),))

    return make


def _noise(small: bool) -> Batch:  # noqa: FBT001
    shape = (2, 3, 8, 8) if small else (16, 3, 64, 64)
    return torch.randn(shape), torch.randn(shape)


def _clicks(small: bool) -> Batch:  # noqa: FBT001
    rows = 8 if small else 2048
    x = torch.randn(rows, 13), torch.randint(50 if small else 20_000, (rows, 26))
    return x, torch.randint(2, (rows,)).float()


def _points(small: bool) -> Batch:  # noqa: FBT001
    rows, points = (4, 32) if small else (32, 1024)
    return torch.randn(rows, 3, points), torch.randint(40, (rows,))


def _tokens_and_targets(small: bool) -> Batch:  # noqa: FBT001
    tokens, targets = torch.randint(256 if small else 50257, (2, 2, 16) if small else (2, 8, 1024))
    return {"tokens": tokens, "targets": targets}


def _sentences(small: bool) -> Batch:  # noqa: FBT001
    rows, length, vocabulary = (2, 8, 100) if small else (32, 128, 20_000)
    return torch.randint(vocabulary, (rows, length)), torch.randint(2, (rows,))


def _rows(small: bool) -> Batch:  # noqa: FBT001
    count = 8 if small else 128
    return torch.randn(count, 256), torch.randint(10, (count,))


OWN = {
    "lstm": Case(
        "LSTM language model, 2 × 650, 32 × 64",
        lambda small: RecurrentLM(100, 16) if small else RecurrentLM(),
        _tagged(32, 64, 10_000, 10_000),
        {AMP: 0.42, HAND: 0.6},
        F.cross_entropy,
    ),
    "u-net": Case(
        "U-Net with group norms, 64², batch 16",
        lambda small: UNet(8, 2) if small else UNet(),
        _noise,
        {AMP: 0.54, HAND: 0.6},
        F.mse_loss,
        images=True,
    ),
    "dlrm": Case(
        "DLRM, 26 tables of 20,000 × 64, batch 2048",
        lambda small: DLRM(categories=50, width=8, hidden=16) if small else DLRM(),
        _clicks,
        {AMP: 0.40, HAND: 0.6},
        F.binary_cross_entropy_with_logits,
    ),
}


def _post_norm(dropout: float) -> Make:
    def make(small: bool) -> nn.Module:  # noqa: FBT001
        size = (100, 64, 2, 2) if small else (20_000, 768, 12, 12)
        return PostNormEncoder(*size, dropout=dropout)

    return make


_POST_NORM = "post-norm nn.TransformerEncoder, 12 × 768, 32 × 128"
POST_NORM = Case(_POST_NORM, _post_norm(0.1), _sentences, {}, F.cross_entropy)
# Dropout keeps a mask and a copy of each activation, in the same number of bits at both levels;
# at O2 that of the hidden layers keeps neither.
POST_NORM_WITHOUT_DROPOUT = Case(
    f"{_POST_NORM}, no dropout", _post_norm(0.0), _sentences, {}, F.cross_entropy
)
MLP = Case(
    "MLP of 16 layers, 256 wide, batch 128",
    lambda small: nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(1 if small else 16)),
        nn.Linear(256, 10),
    ),
    _rows,
    {},
    F.cross_entropy,
)


def muon_and_adamw(model: GPT, **options: Any) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and fused AdamW for the other parameters."""
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-3, **options | {"fused": True}),
    ]


MUON = {
    "muon": Case(
        "GPT-2 124M, 8 × 1024, Muon and AdamW",
        lambda small: GPT(32, 2, 2, 256, 16) if small else GPT(),
        _tokens_and_targets,
        {AMP: 0.85},
        optimizers=muon_and_adamw,
    )
}


# -- chosen last -----------------------------------------------------------------------------------

FURTHER = {
    "gpt2": Case(
        "GPT-2 of transformers, 8 × 512",
        _transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128},
            use_cache=False,
        ),
        _text(8, 512, 50_000, torch.clone),
        {AMP: 1.0, HAND: 1.02},
    ),
    "distilbert": Case(
        "DistilBERT, 32 × 128",
        _transformers(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 128},
        ),
        _text(32, 128, 30_000, _one_of_two),
        {AMP: 1.0, HAND: 1.02},
    ),
    "roberta": Case(
        "RoBERTa-base, masked tokens, 16 × 256",
        _transformers(
            "RobertaForMaskedLM",
            "RobertaConfig",
            _BERT_TINY,
            vocab_size=50_265,
            max_position_embeddings=514,
            type_vocab_size=1,
        ),
        _text(16, 256, 50_000, _masked),
        {AMP: 1.0, HAND: 1.02},
    ),
    "wav2vec2": WAV2VEC2,
    "whisper": Case(
        "Whisper-tiny, 16 × 30 s → 64",
        _transformers(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            {
                "d_model": 32,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "max_source_positions": 50,
            },
            d_model=384,
            encoder_layers=4,
            decoder_layers=4,
            encoder_attention_heads=6,
            decoder_attention_heads=6,
            encoder_ffn_dim=1536,
            decoder_ffn_dim=1536,
            use_cache=False,
        ),
        _whisper_batch,
        {AMP: 1.0, HAND: 1.02},
    ),
    "resnext": _vision("resnext50_32x4d", "ResNeXt-50", 1.0, 1.02),
    "maxvit": _vision("maxvit_t", "MaxViT-T", 1.0, 1.02),
    "swin-v2": SWIN_V2,
    "gru": Case(
        "GRU tagger, 2 × 256 in both directions, 64 × 64",
        lambda small: Tagger(100, 16) if small else Tagger(),
        _tagged(64, 64, 20_000, 32),
        {AMP: 1.0, HAND: 1.02},
        F.cross_entropy,
    ),
    "pointnet": Case(
        "PointNet, 32 × 1024 points",
        lambda small: PointNet(width=8) if small else PointNet(),
        _points,
        {AMP: 1.0, HAND: 1.02},
        F.cross_entropy,
    ),
}

GROUPS = {
    "transformers": TRANSFORMERS,
    "torchvision": TORCHVISION,
    "own": OWN,
    "muon": MUON,
    "further": FURTHER,
    "compiled": COMPILED,
}
"""Cases by the names of groups, in the order in which they run."""
CASES = {name: case for group in GROUPS.values() for name, case in group.items()}
