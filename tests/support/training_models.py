"""Tiny models of transformers to train, and LoRA adapters of peft: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import mezzo

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}

LEVELS = [(level, dtype) for level in ("O1", "O2") for dtype in ("bfloat16", "float16")]
ADAPTED = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "bert": ["query", "value"]}
"""The layers that get adapters."""


def make_model(name: str, device: str = "cpu") -> Any:
    """Return a model in training mode, always from the same seed."""
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            loss_type="ForCausalLM",
            **_SPECIAL,
        )
        model = transformers.GPT2LMHeadModel(config)
    elif name == "bert":
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(max_position_embeddings=32, **_SIZES)
        )
    elif name == "llama":
        config = transformers.LlamaConfig(num_key_value_heads=2, **_SIZES, **_SPECIAL)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
        )
        model = transformers.T5ForConditionalGeneration(config)
    return model.to(device).train()


def make_adapted(name: str, base: torch.dtype | None = None, device: str = "cpu") -> Any:
    """Return a model with LoRA adapters over a frozen base in this dtype."""
    import peft

    model = make_model(name, device)
    if base is not None:
        model = model.to(base)
    config = peft.LoraConfig(
        r=4, target_modules=ADAPTED[name], lora_dropout=0.1, fan_in_fan_out=name == "gpt2"
    )
    return peft.get_peft_model(model, config).train()


def make_batch(seed: int = 1, device: str = "cpu", length: int = 12) -> dict[str, torch.Tensor]:
    """Return tokens with padding and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 64, (4, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1:, length - 3 :] = 0
    batch = {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }
    return {key: value.to(device) for key, value in batch.items()}


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss that a model of transformers computes from its labels."""
    loss: torch.Tensor = outputs.loss
    return loss


def make_step(model: nn.Module, level: str, dtype: str, **options: Any) -> mezzo.TrainStep:
    """Return a step with AdamW over all parameters, the frozen ones too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mezzo.TrainStep(model, loss_of, optimizer, level, dtype=dtype, **options)


def train(step: mezzo.TrainStep, count: int = 3, device: str = "cpu") -> list[float]:
    """Take steps on batches of their own and return the losses."""
    torch.manual_seed(2)
    losses = [step(make_batch(seed, device)) for seed in range(count)]
    return [float(loss) for loss in losses]


def train_by_hand(model: Any, level: str, dtype: str, count: int = 3) -> list[float]:
    """Do the same with `decorate` and a scaler."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mezzo.decorate(model, optimizer, level, dtype=dtype)
    scaler = mezzo.GradScaler("cpu", enabled=dtype == "float16")
    torch.manual_seed(2)
    losses = []
    for seed in range(count):
        loss = model(**make_batch(seed)).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def copies(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def is_tied(model: Any) -> bool:
    """Return whether the input embedding is the weight of the last layer."""
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight
