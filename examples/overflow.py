"""Find an overflow of float16 and cure it: a classifier of digits whose attention leaves the range.

The scores of its attention are not divided by the root of their width, as they should be, and the
pixels are bytes from 0 to 255. float32 can hold such scores, float16 cannot: its largest number is
65504. mezzo names the op, its line and the policy with which it trains.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo

EPOCHS = 3
BATCH = 64
WIDTH = 64


class Attention(nn.Module):
    """Attention of the rows of an image to each other, without the usual scale of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        """Return a mean of the rows for each row."""
        scores = self.query(rows) @ self.key(rows).transpose(1, 2)
        return scores.softmax(-1) @ self.value(rows)


class Classifier(nn.Module):
    """One layer of attention over the eight rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.attention = Attention()
        self.head = nn.Sequential(nn.LayerNorm(8 * WIDTH), nn.Linear(8 * WIDTH, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of ten digits."""
        rows = self.embed(images)
        return self.head((rows + self.attention(rows)).flatten(1))


def load(device: str) -> tuple[Tensor, Tensor]:
    """Return images of 8 × 8 bytes and their digits."""
    images, digits = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32, device=device).reshape(-1, 8, 8)
    return pixels * (255 / 16), torch.tensor(digits, dtype=torch.int64, device=device)


def train(images: Tensor, digits: Tensor, policy: mezzo.Policy) -> mezzo.Overflow | None:
    """Train under a policy; return what made the loss non-finite, or None if nothing did."""
    torch.manual_seed(0)
    model = Classifier().to(images.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = mezzo.TrainStep(model, F.cross_entropy, optimizer, policy)
    losses = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images), device=images.device).split(BATCH):
            losses.append(step(images[batch], digits[batch]).clone())
            if not losses[-1].isfinite():
                print(f"  the loss of step {len(losses)} is {losses[-1].item()}")
                return mezzo.trace_overflow(step, (images[batch], digits[batch]))
    last = torch.stack(losses[-len(losses) // EPOCHS :]).mean().item()
    print(f"  loss {losses[0].item():.2f} → {last:.2f} in {EPOCHS} epochs")
    return None


def main() -> None:
    """Train in float32 and float16, then with the policy that the finding suggests."""
    images, digits = load(mezzo.hardware().device)
    print("Attention whose scores need the range of float32, in float32:")
    train(images, digits, mezzo.Policy("O0"))
    print("in float16 (O1):")
    found = train(images, digits, mezzo.Policy("O1", dtype="float16"))
    if found is None or found.policy is None:
        print("  no op left the range of float16")
        return
    print(f"  {found}")
    print(f"in float16 with what is suggested, {found.policy}:")
    train(images, digits, found.policy)


if __name__ == "__main__":
    main()
