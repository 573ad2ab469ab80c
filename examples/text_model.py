"""Train a small language model of transformers on the bytes of Python's own library.

Shows: `TrainStep` with a model that computes its loss, batches of few lengths by `pad_batch`,
gradient accumulation, clipping and a schedule; `EvalStep`; checkpoints from which `--resume`
continues to the bit; and `save_pretrained` with float32 weights. Nothing is downloaded.

    python examples/text_model.py                                # Python code
    python examples/text_model.py --text book.txt --level O1 --dtype float16
    python examples/text_model.py --resume                       # after an interruption

Prints the mean loss of the last updates, bits per byte on text held out, and generated text:

    update 20: loss 4.356, bits per byte 6.18, gradient norm 1.91, rate 1.85e-05
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import mezzo

END = 0
"""The token at the end of each paragraph; the others are bytes."""
FILES = ("argparse", "inspect", "pickle", "subprocess", "tarfile", "threading", "typing", "uuid")


def load_paragraphs(path: Path | None, longest: int) -> list[dict[str, list[int]]]:
    """Return the paragraphs of a text as tokens, in random order, of different lengths."""
    library = Path(argparse.__file__).parent
    paths = [library / f"{name}.py" for name in FILES] if path is None else [path]
    text = b"\n\n".join(path.read_bytes() for path in paths)
    paragraphs = [[*one[: longest - 1], END] for one in text.split(b"\n\n") if one.strip()]
    order = torch.randperm(len(paragraphs), generator=torch.Generator().manual_seed(0))
    # Labels are the tokens themselves: the model shifts them, and padding is ignored.
    return [{"input_ids": paragraphs[place], "labels": paragraphs[place]} for place in order]


def make_model(layers: int, longest: int) -> LlamaForCausalLM:
    """Return a model for bytes, from its configuration alone."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32 * layers,
            intermediate_size=96 * layers,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=longest,
            bos_token_id=END,
            eos_token_id=END,
            pad_token_id=END,
        )
    )


def bits_per_byte(evaluate: mezzo.EvalStep, batches: list[dict[str, Any]]) -> float:
    """Return the mean over tokens of the loss, in bits: 8 without a model."""
    counts = [int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches]
    losses = [float(evaluate(batch).loss) for batch in batches]
    total = sum(loss * count for loss, count in zip(losses, counts, strict=True))
    return total / sum(counts) / math.log(2)


def parse_arguments() -> argparse.Namespace:
    """Return the options; `--tiny` is what the tests run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a file to learn from; Python's library without")
    parser.add_argument("--level", default="O2", choices=["O0", "O1", "O2", "O3"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256, help="tokens of a paragraph, at most")
    parser.add_argument("--accumulate", type=int, default=2, help="batches for each update")
    parser.add_argument("--every", type=int, default=50, help="updates between two checkpoints")
    parser.add_argument("--out", type=Path, default=Path("runs/text_model"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--tiny", action="store_true", help="1 layer, 20 updates")
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.longest, options.batch = 1, 64, 8
        options.updates, options.every = 20, 10
    return options


def main() -> None:
    """Train, evaluate and save every few updates, then generate text."""
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    paragraphs = load_paragraphs(options.text, options.longest)
    # Lengths become multiples of a quarter: four shapes, each of which a GPU captures once.
    collate = partial(mezzo.pad_batch, multiple=options.longest // 4, pad_token_id=END)
    held_out = 8 * options.batch
    tested = list(DataLoader(paragraphs[:held_out], options.batch, collate_fn=collate))
    sampler = torch.utils.data.RandomSampler(
        paragraphs[held_out:],
        replacement=True,
        num_samples=options.every * options.accumulate * options.batch,
    )
    loader = DataLoader(
        paragraphs[held_out:], options.batch, sampler=sampler, collate_fn=collate, drop_last=True
    )

    model = make_model(options.layers, options.longest).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.updates)
    step = mezzo.TrainStep(
        model,
        optimizer=optimizer,
        policy=options.level,
        dtype=options.dtype,
        scheduler=scheduler,
        accumulate=options.accumulate,
        clip_norm=1.0,
        mean_over=len(loader),
    )
    evaluate = mezzo.EvalStep(model)
    print(f"before: {bits_per_byte(evaluate, tested):.2f} bits per byte")

    updates = 0
    if options.resume and (path := mezzo.latest_checkpoint(options.out)):
        updates = mezzo.load_checkpoint(path, step=step)["updates"]
        print(f"continue after update {updates}")
    while updates < options.updates:
        for batch in loader:
            step(**batch)
        updates += options.every
        bits = bits_per_byte(evaluate, tested)  # waits for the device: now the means are complete
        print(
            f"update {updates}: loss {step.means['loss']:.3f}, bits per byte {bits:.2f},"
            f" gradient norm {step.grad_norm:.2f}, rate {step.rate:.3g}"
        )
        mezzo.save_checkpoint(options.out / f"{updates}.pt", step=step, updates=updates)
    print(step)

    mezzo.undecorate(model, optimizer)  # float32 again, with the exact weights
    model.save_pretrained(options.out / "model")
    prompt = torch.tensor([list(b"def ")], device=options.device)
    generated = model.generate(prompt, max_new_tokens=40, do_sample=True, use_cache=True)
    print("generated:", bytes(generated[0].tolist()))


if __name__ == "__main__":
    main()
