"""Fine-tune a language model with LoRA adapters (peft) over a frozen base in 16 bits.

Shows: `TrainStep` at O2, which keeps master weights of the adapters alone; the adapters saved by
themselves in float32, loaded again beside a fresh base, and merged into it.

    python examples/lora.py                                      # trains a small base first
    python examples/text_model.py && python examples/lora.py --base runs/text_model/model

Prints the loss on new text before and after, the bytes of base and adapters on disk, and the loss
of the merged model:

    new text: loss 3.385 before, 3.246 after 30 updates
    on disk: base 341,024 bytes, adapters alone 64,936 bytes
    merged: loss 3.246; largest difference of a logit 0.026
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import mezzo

LONGEST = 32
"""Tokens of a line, at most."""
LIBRARY = Path(argparse.__file__).parent


def load_lines(kind: str) -> list[dict[str, list[int]]]:
    """Return lines of code, or comments, of Python's library: a token for each byte."""
    source = b"\n".join((LIBRARY / f"{name}.py").read_bytes() for name in ("inspect", "tarfile"))
    lines = sorted(set(map(bytes.strip, source.splitlines())))
    wanted = [line for line in lines if line.startswith(b"#") == (kind == "comments")]
    tokens = [[*line[: LONGEST - 1], 0] for line in wanted if len(line) > 20]
    return [{"input_ids": one, "labels": one} for one in tokens]


def make_loader(kind: str, batch: int, batches: int) -> DataLoader:
    """Return batches of lines, chosen at random, padded to a few lengths."""
    lines = load_lines(kind)
    sampler = torch.utils.data.RandomSampler(lines, replacement=True, num_samples=batch * batches)
    collate = partial(mezzo.pad_batch, multiple=LONGEST // 4)
    return DataLoader(lines, batch, sampler=sampler, collate_fn=collate)


def train_base(options: argparse.Namespace) -> Path:
    """Train a small model on code, and return the folder in which it is saved in float32."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = mezzo.TrainStep(model, optimizer=optimizer, policy="O2", clip_norm=1.0)
    for batch in make_loader("code", options.batch, options.updates):
        step(batch)
    mezzo.undecorate(model).save_pretrained(options.out / "base")
    return options.out / "base"


def add_adapters(model: Any) -> Any:
    """Return the model with adapters beside all linear layers but the last; the rest is frozen."""
    return peft.get_peft_model(
        model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    )


@torch.no_grad()
def loss_and_logits(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Return the loss and the logits of a model in evaluation mode."""
    device = next(model.parameters()).device
    output = model.eval()(**{name: value.to(device) for name, value in batch.items()})
    return float(output.loss), output.logits.float()


def size_of(folder: Path) -> int:
    """Return the bytes of the weights in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def parse_arguments() -> argparse.Namespace:
    """Return the options; `--tiny` is what the tests run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", type=Path, help="folder of a saved model for bytes")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=256, help="width of the base")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--tiny", action="store_true", help="width 48, 30 updates")
    options = parser.parse_args()
    if options.tiny:
        options.width, options.updates, options.batch = 48, 30, 16
    return options


def main() -> None:
    """Train adapters, save them alone, and compare with the model they are merged into."""
    options = parse_arguments()
    torch.manual_seed(0)
    base = options.base or train_base(options)
    # The frozen base is loaded in 16 bits: it needs no gradients, states or master weights.
    dtype = getattr(torch, options.dtype)
    model = add_adapters(AutoModelForCausalLM.from_pretrained(base, dtype=dtype))
    model.to(options.device).train()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    step = mezzo.TrainStep(
        model,
        optimizer=optimizer,
        policy="O2",
        dtype=dtype,
        clip_norm=1.0,
        save_dtype="float32",  # what save_pretrained writes
    )
    trained = sum(parameter.numel() for parameter in adapters)
    total = sum(parameter.numel() for parameter in model.parameters())
    print(f"parameters: {total - trained:,} in the base, {trained:,} in adapters")

    tested = next(iter(make_loader("comments", 64, 1)))
    before, _ = loss_and_logits(model, tested)
    model.train()
    for batch in make_loader("comments", options.batch, options.updates):
        step(batch)
    after, logits = loss_and_logits(model, tested)
    print(f"new text: loss {before:.3f} before, {after:.3f} after {options.updates} updates")
    print(step)

    model.save_pretrained(options.out / "adapter")
    sizes = size_of(Path(base)), size_of(options.out / "adapter")
    print(f"on disk: base {sizes[0]:,} bytes, adapters alone {sizes[1]:,} bytes")

    # What another program does: load the base and the adapters, and merge them.
    fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(options.device)
    merged = peft.PeftModel.from_pretrained(fresh, options.out / "adapter").merge_and_unload()
    merged.save_pretrained(options.out / "merged")
    loss, merged_logits = loss_and_logits(merged, tested)
    difference = (merged_logits - logits).abs().max().item()
    print(f"merged: loss {loss:.3f}; largest difference of a logit {difference:.3f}")


if __name__ == "__main__":
    main()
