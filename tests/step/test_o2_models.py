"""Models with random weights train at O2 in float16 as at O1, and skip no more updates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mezzo

pytestmark = pytest.mark.slow

STEPS = 6
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TOKENS = {
    "input_ids": torch.arange(3, 51).reshape(4, 12),
    "labels": torch.arange(48).reshape(4, 12),
}


def llama(library):
    config = library.LlamaConfig(vocab_size=64, num_key_value_heads=2, **SIZES)
    return library.LlamaForCausalLM(config), TOKENS


def t5(library):
    config = library.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return library.T5ForConditionalGeneration(config), TOKENS


def swin_v2(library):
    config = library.Swinv2Config(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        num_labels=4,
    )
    images = torch.randn(4, 3, 32, 32)
    model = library.Swinv2ForImageClassification(config)
    return model, {"pixel_values": images, "labels": torch.arange(4)}


def wav2vec2(library):
    config = library.Wav2Vec2Config(
        vocab_size=32,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 8, 4),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_length=2,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
        **SIZES,
    )
    labels = torch.arange(1, 13).reshape(2, 6)
    return library.Wav2Vec2ForCTC(config), {"input_values": torch.randn(2, 3200), "labels": labels}


class InvertedResidual(nn.Sequential):
    """The block of an MNASNet: widen, filter each channel, narrow."""

    def __init__(self, channels: int) -> None:
        wide = 3 * channels
        super().__init__(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 5, padding=2, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Mnasnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [InvertedResidual(8) for _ in range(3)]
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), *blocks)
        self.head = nn.Linear(8, 4)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(pixel_values).mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels)}


def mnasnet(_library):
    return Mnasnet(), {"pixel_values": torch.randn(4, 3, 17, 17), "labels": torch.arange(4)}


@pytest.mark.parametrize("make", [llama, t5, swin_v2, wav2vec2, mnasnet])
def test_o2_trains_as_o1_and_skips_no_more_updates(make):
    library = pytest.importorskip("transformers")
    losses, skipped = {}, {}
    for policy in ("O1", "O2"):
        torch.manual_seed(0)
        model, batch = make(library)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = mezzo.TrainStep(
            model.train(), lambda output: output["loss"], optimizer, policy, dtype="float16"
        )
        losses[policy] = torch.stack([step(batch).float() for _ in range(STEPS)])
        skipped[policy] = step.scaler.state().skipped_steps
    assert skipped["O2"] <= skipped["O1"] <= 1
    assert losses["O1"][-1] < losses["O1"][0]
    torch.testing.assert_close(losses["O2"], losses["O1"], rtol=0.02, atol=0.02)
