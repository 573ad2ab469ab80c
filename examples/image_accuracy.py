"""Train a CNN on handwritten digits and log loss and accuracy without waiting for the device.

The loss function returns `(loss, aux)`; `step.means` are the means of both over 25 calls. The data
are the 1,797 scanned digits that come with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mezzo

EPOCHS, BATCH, LOG_EVERY = 4, 64, 25


def with_accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and beside it the accuracy of this batch."""
    accuracy = (logits.argmax(dim=1) == labels).float().mean()
    return F.cross_entropy(logits, labels), {"accuracy": accuracy}


def main() -> None:
    """Train, log, and test on a quarter of the digits."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits, dtype=torch.int64)
    tested = len(labels) // 4
    train = TensorDataset(images[tested:], labels[tested:])
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    step = mezzo.TrainStep(model, with_accuracy, optimizer, "O2", mean_over=LOG_EVERY)
    calls = 0
    for _ in range(EPOCHS):
        for batch_images, batch_labels in DataLoader(train, BATCH, shuffle=True, drop_last=True):
            step(batch_images, batch_labels)
            calls += 1
            if calls % LOG_EVERY == 0 and step.means:
                print(f"call {calls}: " + ", ".join(f"{k} {v:.3f}" for k, v in step.means.items()))
    print(step)
    predicted = mezzo.EvalStep(model)(images[:tested]).argmax(dim=1).cpu()
    print(f"test accuracy {(predicted == labels[:tested]).float().mean():.1%}")


if __name__ == "__main__":
    main()
