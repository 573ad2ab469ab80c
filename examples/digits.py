"""Train a small CNN on handwritten digits in float32, mixed precision and 16-bit parameters.

Prints losses, times and the dtypes of the ops, and which way is the fastest on this machine. The
data are the 1,797 scanned digits that come with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import mezzo

EPOCHS = 6
BATCH = 64
SHOWN_OPS = {
    "conv2d": ("convolution",),
    "batch_norm": ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    "linear": ("addmm",),
    "log_softmax": ("_log_softmax",),
    "nll_loss": ("nll_loss_forward",),
    "casts": ("_to_copy",),
}
"""Ops in the table, and their names in ATen."""

Region = Callable[[], AbstractContextManager[object]]
"""Returns the context in which the forward pass and the loss run."""


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    region: Region = nullcontext
    level: str = "O0"
    """At O2 the parameters are 16-bit, with float32 master weights."""


@dataclass(frozen=True)
class Digits:
    """Images and labels on the device."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls, device: str) -> Digits:
        """Scale the pixels to 0…1 and use a quarter of the images for the test."""
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
        train_images, test_images = (
            torch.tensor(part, dtype=torch.float32, device=device).reshape(-1, 1, 8, 8) / 16
            for part in parts[:2]
        )
        train_labels, test_labels = (
            torch.tensor(part, dtype=torch.int64, device=device) for part in parts[2:]
        )
        return cls(train_images, train_labels, test_images, test_labels)


@dataclass(frozen=True)
class Result:
    """Results of one training run."""

    way: Way
    loss: float
    accuracy: float
    seconds: float
    weights: str
    """Dtype of the weights of the convolutions."""
    ops: dict[str, str]
    """How often each op of `SHOWN_OPS` ran in each dtype: `2 × bfloat16`."""


def make_model() -> nn.Sequential:
    """Return two convolutions with batch norm and two linear layers: 99 % in a few epochs."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(way: Way, dtype: torch.dtype, digits: Digits, device: str, progress: Progress) -> Result:
    """Train in one way, always from the same initial weights."""
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    region = way.region
    if way.level != "O0":
        mezzo.decorate(model, optimizer, way.level, dtype=dtype)
    loss_of = nn.CrossEntropyLoss()
    bar = progress.add_task(way.name, total=EPOCHS * len(digits.train_labels))

    # Count the ops of the first step only, before the clock starts: counting slows every op down.
    with mezzo.count_dtypes() as counts, region():
        loss = loss_of(model(digits.train_images[:BATCH]), digits.train_labels[:BATCH])
    loss.backward()

    started = time.perf_counter()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(digits.train_labels), device=device).split(BATCH):
            optimizer.zero_grad()
            with region():
                loss = loss_of(model(digits.train_images[batch]), digits.train_labels[batch])
            loss.backward()
            optimizer.step()
            progress.advance(bar, len(batch))
    final_loss = loss.item()  # synchronizes, so that the clock below includes all work
    seconds = time.perf_counter() - started
    return Result(
        way,
        final_loss,
        accuracy(model, region, digits),
        seconds,
        str(model[0].weight.dtype).removeprefix("torch."),
        {op: ran_in(counts.rows(), names) for op, names in SHOWN_OPS.items()},
    )


@torch.no_grad()
def accuracy(model: nn.Module, region: Region, digits: Digits) -> float:
    """Return the fraction of test digits that the model classifies correctly."""
    model.eval()
    with region():
        predicted = model(digits.test_images).argmax(dim=1)
    return (predicted == digits.test_labels).float().mean().item()


def show(results: list[Result], console: Console) -> None:
    """Print a table with a column for each run."""
    table = Table(title="Handwritten digits, one CNN, three ways to train it")
    table.add_column("")
    for result in results:
        table.add_column(result.way.name, justify="right")
    table.add_row("final loss", *(f"{result.loss:.4f}" for result in results))
    table.add_row("test accuracy", *(f"{result.accuracy:.1%}" for result in results))
    table.add_row("training time", *(f"{result.seconds:.1f} s" for result in results))
    table.add_row("weights", *(result.weights for result in results), end_section=True)
    for op in SHOWN_OPS:
        table.add_row(op, *(result.ops[op] for result in results))
    console.print(table)


def ran_in(rows: Iterable[Any], names: tuple[str, ...]) -> str:
    """Return how often an op ran in each dtype: `2 × bfloat16`."""
    return ", ".join(f"{row.calls} × {row.dtype}" for row in rows if row.op in names) or "none"


def conclusion(full: Result, mixed: Result, dtype: torch.dtype, hardware: mezzo.Hardware) -> str:
    """Describe what the hardware supports and what was measured."""
    name = str(dtype).removeprefix("torch.")
    support = hardware.support(name)
    ratio = full.seconds / mixed.seconds
    measured = f"{ratio:.1f} × faster" if ratio >= 1 else f"{1 / ratio:.1f} × slower"
    lines = [
        f"{name} is {support.label} on this device ({hardware.name}): {support.reason}.",
        (
            f"Measured: mixed precision was {measured} than float32, and accuracy moved by"
            f" {mixed.accuracy - full.accuracy:+.1%}."
        ),
    ]
    if support.native and ratio < 1:
        lines.append(
            "The model is so small that launching ops costs more than computing them; 16 bits pay"
            " on larger ones."
        )
    if not support.native:
        lines.append(
            "Train in float32 here, and in mixed precision on a device that computes it natively."
        )
    return "\n".join(lines)


def main() -> None:
    """Train in each way, print the table and the conclusion."""
    console = Console()
    hardware = mezzo.hardware()
    console.print(f"{hardware}\n", highlight=False, soft_wrap=True)
    if hardware.preferred is None:
        console.print("There is no 16-bit dtype to compare with on this device.")
        return
    dtype = hardware.preferred.dtype
    digits = Digits.load(hardware.device)
    mixed = lambda: mezzo.autocast(hardware.device, dtype=dtype)  # noqa: E731
    ways = [Way("float32"), Way("mixed, O1", mixed), Way("16-bit weights, O2", mixed, "O2")]
    with Progress(console=console) as progress:
        results = [train(way, dtype, digits, hardware.device, progress) for way in ways]
    show(results, console)
    console.print(
        conclusion(results[0], results[1], dtype, hardware), highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    main()
