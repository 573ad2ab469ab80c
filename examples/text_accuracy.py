"""Train a small BERT to tell Python code from comments, and log loss and accuracy.

The lines are those of Python's own library, a token for each byte: nothing is downloaded.
`mezzo.pad_batch` collates lines of different lengths to few shapes, which are captured on a GPU.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import mezzo

SAMPLES, BATCH, LOG_EVERY = 1600, 32, 10
FILES = ("argparse", "inspect", "pickle", "subprocess", "tarfile", "threading", "typing", "uuid")


def load_samples() -> list[dict[str, Any]]:
    """Return as many comments, without their `#`, as lines of code, with labels."""
    folder, shuffled = Path(random.__file__).parent, random.Random(0)  # noqa: S311 - not secret
    source = b"\n".join((folder / f"{name}.py").read_bytes() for name in FILES)
    lines = set(map(bytes.strip, source.splitlines()))
    comments = {line.strip(b"# ") for line in lines if line.startswith(b"#")}
    code = {line for line in lines if line.startswith((b"self.", b"return ", b"if ", b"def "))}
    samples = [
        {"input_ids": [min(byte, 127) for byte in text[:32]], "labels": label}
        for label, texts in enumerate((code, comments))
        for text in shuffled.sample(sorted(text for text in texts if len(text) > 10), SAMPLES // 2)
    ]
    return shuffled.sample(samples, SAMPLES)


def with_accuracy(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the model's loss, and beside it the accuracy of this batch."""
    return output.loss, {"accuracy": (output.logits.argmax(-1) == labels).float().mean()}


def main() -> None:
    """Train for one epoch and log every few calls."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=128, hidden_size=48, num_hidden_layers=1, intermediate_size=64)
    model = BertForSequenceClassification(config).to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    step = mezzo.TrainStep(model, with_accuracy, optimizer, mean_over=LOG_EVERY)
    data = DataLoader(load_samples(), BATCH, collate_fn=partial(mezzo.pad_batch, multiple=8))
    for calls, batch in enumerate(data, start=1):
        step(batch, batch["labels"])
        if calls % LOG_EVERY == 0:
            print(f"call {calls}: " + ", ".join(f"{k} {v:.3f}" for k, v in step.means.items()))
    print(step)


if __name__ == "__main__":
    main()
