"""Train a small network on handwritten digits, and count its gradients by exponent.

`python docs/figures/gradients.py` writes docs/figures/gradients.json, which draw.py reads.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

RECORD = Path(__file__).with_name("gradients.json")
STEPS, BATCH = 400, 256


def exponents(values: Tensor) -> Counter[int]:
    """Count the values other than zero by their exponent."""
    found = torch.log2(values.abs()[values != 0]).floor().int()
    return Counter(found.tolist())


def main() -> None:
    """Train in float32, and count the gradients of all activations in every tenth step."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16.0
    labels = torch.tensor(digits.target)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    counts: Counter[int] = Counter()
    recording = False

    def record(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if recording:
            output.register_hook(lambda gradient: counts.update(exponents(gradient)))

    for module in model:
        module.register_forward_hook(record)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        recording = step % 10 == 9
        chosen = torch.randint(len(images), (BATCH,))
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    record_of = {"steps": STEPS, "batch": BATCH, "loss": round(loss.item(), 4)}
    ordered = {str(exponent): counts[exponent] for exponent in sorted(counts)}
    RECORD.write_text(json.dumps(record_of | {"counts": ordered}, indent=1) + "\n")
    print(f"{sum(counts.values()):,} gradients written to {RECORD}")


if __name__ == "__main__":
    main()
